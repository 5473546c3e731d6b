"""The lengths to which the rows of micro batches are padded: the distribution of the longest row of each.

Micro batches are drawn at random; or examples are sorted by length before they are divided into micro batches: those of
a step, as the exported script deals them out, or those of many steps, as transformers' sampler groups them.
"""

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.problem.length_distribution import Lengths
from autotune.trainer.dealing import deal

MAX_BUCKETS = 4  # each is compiled by itself
WORTH_A_BUCKET = 0.01  # the relative gain in padded tokens from which on a further bucket is made
BINS = 64  # parts of the distribution, of which buckets are made
MAX_STAND_INS = 5
NO_SHARE = 1e-9  # of what is left by rounding errors
SIGMAS = 7  # of a binomial distribution, beyond which nothing is left but rounding errors
MOST_DRAWS = 300_000  # about 0.15 s
MEGABATCHES, MAX_STEPS = 4, 50  # transformers sorts a quarter of the examples at a time, and at most those of 50 steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """Micro batches whose longest row has `tokens` tokens on average, and at most `up_to`; their share of all."""

    tokens: float
    up_to: int
    share: float


Maxima = tuple[Longest, ...]  # by length, the shortest first; the shares sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How micro batches of `size` examples, each cut at `seq_len`, are drawn.

    Each example is drawn by itself; or `sorted_together` examples are sorted by length and then divided.
    """

    lengths: Lengths
    seq_len: int
    size: int
    sorted_together: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest example that may occur: seq_len where the lengths are estimated."""
        return min(self.lengths.longest, self.seq_len) if self.lengths.exact else self.seq_len


@lru_cache(maxsize=1024)
def batch_maxima(draw: Draw) -> Maxima:
    """The distribution of the longest example of a micro batch."""
    lengths = draw.lengths
    is_longest = _shares_of_sorted(draw) if draw.sorted_together > draw.size else lambda share: share**draw.size
    shares = dict[int, float]()
    seen, before = 0, 0.0
    for length, number in lengths.counts:
        seen += number
        share, tokens = is_longest(seen / lengths.number), min(length, draw.seq_len)
        shares[tokens] = shares.get(tokens, 0.0) + share - before
        before = share
    return tuple(
        Longest(tokens=tokens, up_to=tokens, share=share) for tokens, share in sorted(shares.items()) if share > 0
    )


def _shares_of_sorted(draw: Draw) -> Callable[[float], float]:
    """A function from the share of the examples up to some length to that of the micro batches without a longer one.

    Of examples that are sorted the longer ones, a binomial number of them, fill as few micro batches as can be.
    """
    number = draw.sorted_together // draw.size * draw.size
    log_ways = [
        math.lgamma(number + 1) - math.lgamma(many + 1) - math.lgamma(number - many + 1) for many in range(number + 1)
    ]

    def without_longer(share: float) -> float:
        if share in (0.0, 1.0):
            return share
        mean, spread = number * (1 - share), math.sqrt(number * share * (1 - share))
        likely = range(max(0, int(mean - SIGMAS * spread)), min(number, math.ceil(mean + SIGMAS * spread)) + 1)
        log_longer, log_not = math.log1p(-share), math.log(share)
        odds = [math.exp(log_ways[many] + many * log_longer + (number - many) * log_not) for many in likely]
        filled = sum(odd * -(-many // draw.size) for odd, many in zip(odds, likely, strict=True)) / sum(odds)
        return max(0.0, 1 - filled * draw.size / number)

    return without_longer


def sorted_together(examples: int, step_examples: int) -> int:
    """How many of the examples transformers' sampler sorts by length at a time; a step of a device takes some."""
    return step_examples * max(1, min(examples // (step_examples * MEGABATCHES), MAX_STEPS))


@lru_cache(maxsize=1024)
def new_length_share(draw: Draw, number: int) -> float:
    """The expected share of `number` micro batches whose longest row is of a length that none before them had."""
    return sum(1 - (1 - min(one.share, 1.0)) ** number for one in batch_maxima(draw)) / number


@lru_cache(maxsize=1024)
def padded_tokens(draw: Draw, *, bucketed: bool) -> float:
    """Tokens to which a row is padded on average: the longest of its micro batch, or the next of `buckets`."""
    return _mean(draw, buckets(draw) if bucketed else ())


def _mean(draw: Draw, ends: tuple[int, ...]) -> float:
    """The mean length of rows that are padded to the next of `ends`, where there are any."""
    return sum(_padded(one.up_to, ends) * one.share for one in batch_maxima(draw))


def _padded(tokens: int, ends: tuple[int, ...]) -> int:
    return ends[bisect_left(ends, tokens)] if ends else tokens


@lru_cache(maxsize=1024)
def waiting(draw: Draw, ranks: int, each: int, *, bucketed: bool) -> float:
    """By which share the longest of the ranks' sums of tokens is longer than their mean.

    A rank pads `each` micro batches: drawn apart, or dealt out where examples are sorted. Of sums that is the mean of
    so many draws that it is off by less than 0.01 for lengths that scatter as those of chats do.
    """
    ends = buckets(draw) if bucketed else ()
    if each == 1:  # those of all ranks together are as one large micro batch
        return _mean(replace(draw, size=ranks * draw.size), ends) / _mean(draw, ends) - 1
    is_sorted = draw.sorted_together > draw.size
    sums = (_dealt if is_sorted else _drawn)(draw, ranks, each, ends)
    draws = ranks * each * (draw.size if is_sorted else 1)
    steps = list(itertools.islice(sums, max(MOST_DRAWS // draws, 500)))
    return sum(map(max, steps)) * ranks / sum(map(sum, steps)) - 1


def _drawn(draw: Draw, ranks: int, each: int, ends: tuple[int, ...]) -> Iterator[list[int]]:
    """For one simulated step after the other, the tokens of each rank whose micro batches are drawn apart."""
    generator, maxima = random.Random(0), batch_maxima(draw)  # noqa: S311 (no secret)
    lengths = [_padded(one.up_to, ends) for one in maxima]
    until = list(itertools.accumulate(one.share for one in maxima))
    while True:
        yield [sum(generator.choices(lengths, cum_weights=until, k=each)) for _ in range(ranks)]


def _dealt(draw: Draw, ranks: int, each: int, ends: tuple[int, ...]) -> Iterator[list[int]]:
    """The same where the rows of the step are drawn, sorted and dealt out."""
    generator, lengths = random.Random(0), [min(tokens, draw.seq_len) for tokens, _ in draw.lengths.counts]  # noqa: S311
    until = list(itertools.accumulate(number for _, number in draw.lengths.counts))
    while True:
        rows = sorted(generator.choices(lengths, cum_weights=until, k=ranks * each * draw.size), reverse=True)
        longest = rows[:: draw.size]
        padded = [_padded(longest[place], ends) for place in deal(longest, ranks)]
        yield [sum(padded[rank::ranks]) for rank in range(ranks)]


@lru_cache(maxsize=1024)
def buckets(draw: Draw) -> tuple[int, ...]:
    """A few lengths, ascending, to the next of which rows are padded with the least padding."""
    bins = _binned(batch_maxima(draw))

    def padded(part: Maxima) -> float:
        end = draw.longest if part[-1] is bins[-1] else part[-1].up_to
        return end * sum(one.share for one in part)

    least, best = math.inf, [bins]
    for tokens, parts in _partitions(bins, MAX_BUCKETS, padded):
        if tokens < least * (1 - WORTH_A_BUCKET):
            least, best = tokens, parts
    return (*(part[-1].up_to for part in best[:-1]), draw.longest)


def bucket_shares(draw: Draw) -> dict[int, float]:
    """For each of `buckets` the share of the micro batches that are padded to it."""
    ends = buckets(draw)
    shares = dict.fromkeys(ends, 0.0)
    for one in batch_maxima(draw):
        shares[ends[bisect_left(ends, one.up_to)]] += one.share
    return shares


def stand_ins(draw: Draw) -> dict[int, float]:
    """At most MAX_STAND_INS lengths that stand for all, each with its share: two for those up to the mean, three above.

    The longest that may occur is one of them, if it has a share. The mean of any time that is quadratic in the length
    is that of all, but for rounding. A host needs as long for short micro batches as for middling ones: of such a time,
    flat up to some length, the mean is 1.2 % off (3.1 % at worst, over 120 draws of 12 distributions and the worst
    length of each). Three Gauss nodes of the whole would be 4.5 % off (14.6 %), four 2.5 % (9.2 %).
    """
    maxima = batch_maxima(draw)
    if len(maxima) <= MAX_STAND_INS:
        return {one.up_to: one.share for one in maxima}
    mean = sum(one.tokens * one.share for one in maxima)
    nodes = _two_nodes([(one.tokens, one.share) for one in maxima if one.tokens <= mean])
    # Gauss-Radau: with the distance to the longest as a further weight, its own node needs none.
    longer = [(one.tokens, one.share) for one in maxima if mean < one.tokens < draw.longest]
    for tokens, weight in _two_nodes([(tokens, share * (draw.longest - tokens)) for tokens, share in longer]):
        nodes.append((tokens, weight / (draw.longest - tokens)))
    nodes.append((draw.longest, 1.0 - sum(share for _, share in nodes)))
    shares: dict[int, float] = {}
    for tokens, share in nodes:
        if share > NO_SHARE:
            shares[round(tokens)] = shares.get(round(tokens), 0.0) + share
    return shares


def _two_nodes(weighted: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Two values with their weights, which have the same sum of any cubic: Gauss quadrature, from three moments.

    One where all are equal, none of none.
    """
    total = sum(weight for _, weight in weighted)
    if not total:
        return []
    mean = sum(value * weight for value, weight in weighted) / total
    spread = math.sqrt(sum((value - mean) ** 2 * weight for value, weight in weighted) / total)
    if spread < 1e-9 * mean:
        return [(mean, total)]
    skewness = sum(((value - mean) / spread) ** 3 * weight for value, weight in weighted) / total
    low, high = (skewness / 2 + sign * math.hypot(1.0, skewness / 2) for sign in (-1, 1))
    of_low = high / (high - low)
    return [(mean + spread * low, total * of_low), (mean + spread * high, total * (1 - of_low))]


def _merged(part: Maxima) -> Longest:
    share = sum(one.share for one in part)
    return Longest(tokens=sum(one.tokens * one.share for one in part) / share, up_to=part[-1].up_to, share=share)


def _binned(maxima: Maxima) -> Maxima:
    """At most BINS parts of the distribution, finer where there are more micro batches and where these differ more."""
    low, high = maxima[0].tokens, maxima[-1].tokens
    bins: dict[int, list[Longest]] = {}
    below = 0.0
    for one in maxima:
        place = (one.tokens - low) / (high - low) if high > low else 0.0
        bins.setdefault(min(int(BINS * (below + one.share / 2 + place) / 2), BINS - 1), []).append(one)
        below += one.share
    return tuple(_merged(tuple(part)) for part in bins.values())


def _partitions(bins: Maxima, most: int, cost: Callable[[Maxima], float]) -> Iterator[tuple[float, list[Maxima]]]:
    """Yield the division of `bins` into 1, 2, ... parts of neighbours with the least sum of costs, and that sum."""
    costs = {(begin, end): cost(bins[begin:end]) for begin, end in itertools.combinations(range(len(bins) + 1), 2)}
    # A dynamic programme: for each end of the last part the least sum, and where the parts end.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(min(most, len(bins))):
        best = {
            end: min((best[begin][0] + costs[begin, end], (*best[begin][1], end)) for begin in best if begin < end)
            for end in range(min(best) + 1, len(bins) + 1)
        }
        total, ends = best[len(bins)]
        yield total, [bins[begin:end] for begin, end in itertools.pairwise(ends)]
