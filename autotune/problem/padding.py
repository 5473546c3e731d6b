"""The distribution of the lengths to which micro batches are padded.

A micro batch is padded to its longest row. Micro batches are either drawn at random, or made from
examples that are first sorted by length. The exported script sorts the examples of one step. The
sampler of transformers (`group_by_length`) sorts the examples of many steps.
"""

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.problem.length_distribution import Lengths
from autotune.trainer.dealing import ranks_of

MAX_BUCKETS = 4  # the largest number of buckets; layers are compiled once for each bucket
WORTH_A_BUCKET = 0.01  # one more bucket must reduce the padded tokens by at least this fraction
BINS = 64  # the most bins of lengths; a bucket covers one or more neighbouring bins
MAX_STAND_INS = 5
NO_SHARE = 1e-9  # smaller shares of micro batches are ignored as rounding errors
SIGMAS = 7  # binomial probabilities are ignored beyond this number of standard deviations
MOST_DRAWS = 300_000  # the number of random draws in a simulation; they take about 0.15 s
# The sampler of transformers sorts 1/MEGABATCHES of the examples together, but at most the examples
# of MAX_STEPS steps.
MEGABATCHES = 4
MAX_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """Micro batches whose longest rows have similar lengths.

    The longest rows have at most `up_to` tokens, and `tokens` on average. `share` is the share of
    these micro batches in all micro batches.
    """

    tokens: float
    up_to: int
    share: float


Maxima = tuple[Longest, ...]  # sorted by length; the shares sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A way to draw micro batches of `size` examples, truncated to `seq_len`.

    If `sorted_together` is at most `size`, examples are drawn independently. Otherwise,
    `sorted_together` examples are sorted by length and then divided into micro batches.
    """

    lengths: Lengths
    seq_len: int
    size: int
    sorted_together: int = 0

    @property
    def longest(self) -> int:
        """The tokens of the longest possible example."""
        return self.lengths.longest_within(self.seq_len)


@lru_cache(maxsize=1024)
def batch_maxima(draw: Draw) -> Maxima:
    """Return the distribution of the length of a micro batch's longest example."""
    lengths = draw.lengths
    share_within = (
        _shares_of_sorted(draw)
        if draw.sorted_together > draw.size
        else lambda share: share**draw.size
    )

    shares = dict[int, float]()
    num_within = 0
    previous = 0.0
    for length, number in lengths.counts:
        num_within += number
        share = share_within(num_within / lengths.number)
        tokens = min(length, draw.seq_len)
        shares[tokens] = shares.get(tokens, 0.0) + share - previous
        previous = share
    return tuple(
        Longest(tokens=tokens, up_to=tokens, share=share)
        for tokens, share in sorted(shares.items())
        if share > 0
    )


def _shares_of_sorted(draw: Draw) -> Callable[[float], float]:
    """Return a function that converts a share of examples to a share of micro batches.

    The function's argument is the share of examples with at most L tokens. The function's result is
    the share of micro batches in which no example has more than L tokens. Among the examples sorted
    together, the number of examples with more than L tokens is binomial. Sorting puts these longer
    examples into the smallest possible number of micro batches.
    """
    number = draw.sorted_together // draw.size * draw.size
    log_ways = [
        math.lgamma(number + 1) - math.lgamma(many + 1) - math.lgamma(number - many + 1)
        for many in range(number + 1)
    ]

    def without_longer(share: float) -> float:
        if share in (0.0, 1.0):
            return share
        mean = number * (1 - share)
        spread = math.sqrt(number * share * (1 - share))
        counts = range(
            max(0, int(mean - SIGMAS * spread)), min(number, math.ceil(mean + SIGMAS * spread)) + 1
        )

        log_longer = math.log1p(-share)
        log_not = math.log(share)
        odds = [
            math.exp(log_ways[many] + many * log_longer + (number - many) * log_not)
            for many in counts
        ]
        num_filled = sum(
            odd * -(-many // draw.size) for odd, many in zip(odds, counts, strict=True)
        ) / sum(odds)
        return max(0.0, 1 - num_filled * draw.size / number)

    return without_longer


def sort_group_size(examples: int, step_examples: int) -> int:
    """Return the number of examples that transformers' sampler sorts together.

    `step_examples` is the number of examples in one device's step.
    """
    return step_examples * max(1, min(examples // (step_examples * MEGABATCHES), MAX_STEPS))


@lru_cache(maxsize=1024)
def new_length_share(draw: Draw, number: int) -> float:
    """Return the expected share of the first `number` micro batches with a new padded length."""
    return sum(1 - (1 - min(one.share, 1.0)) ** number for one in batch_maxima(draw)) / number


@lru_cache(maxsize=1024)
def padded_tokens(draw: Draw, *, bucketed: bool) -> float:
    """Return the mean padded length of a row in tokens.

    A row is padded to the longest row of its micro batch. If `bucketed` is true, the row is padded
    further, to the next longer length in `buckets`.
    """
    return _mean(draw, buckets(draw) if bucketed else ())


def _mean(draw: Draw, ends: tuple[int, ...]) -> float:
    """Return the mean padded length of a row; rows are padded to the lengths in `ends`, if any."""
    return sum(_padded_length(one.up_to, ends) * one.share for one in batch_maxima(draw))


def _padded_length(tokens: int, ends: tuple[int, ...]) -> int:
    return ends[bisect_left(ends, tokens)] if ends else tokens


@lru_cache(maxsize=1024)
def waiting(draw: Draw, ranks: int, each: int, *, bucketed: bool) -> float:
    """Return (most tokens of a rank in a step) / (mean tokens of the ranks) - 1.

    Each rank computes `each` micro batches before it waits. Micro batches are drawn independently,
    or are made of sorted examples and distributed to the ranks. If `each` is above 1, the result is
    the mean of simulated steps. The error of this mean is below 0.01 if lengths vary as much as the
    lengths of chats.
    """
    if len({min(tokens, draw.seq_len) for tokens, _ in draw.lengths.counts}) == 1:
        return 0.0  # without a simulation, which takes most of a second

    ends = buckets(draw) if bucketed else ()
    if each == 1:  # the rank with the longest row of all ranks is the slowest
        return _mean(replace(draw, size=ranks * draw.size), ends) / _mean(draw, ends) - 1

    is_sorted = draw.sorted_together > draw.size
    draws = ranks * each * (draw.size if is_sorted else 1)
    number = max(MOST_DRAWS // draws, 500)
    steps = list((_dealt_steps if is_sorted else _random_steps)(draw, ranks, each, ends, number))
    return sum(map(max, steps)) * ranks / sum(map(sum, steps)) - 1


def _random_steps(
    draw: Draw, ranks: int, each: int, ends: tuple[int, ...], number: int
) -> Iterator[list[int]]:
    """For each simulated step with independent micro batches, yield the tokens of each rank."""
    lengths = [_padded_length(one.up_to, ends) for one in batch_maxima(draw)]
    size = ranks * each
    places = _places(draw, _enough(number * size))
    for first in range(0, number * size, size):
        ranked = (places[begin : begin + each] for begin in range(first, first + size, each))
        yield [sum(map(lengths.__getitem__, own)) for own in ranked]


def _dealt_steps(
    draw: Draw, ranks: int, each: int, ends: tuple[int, ...], number: int
) -> Iterator[list[int]]:
    """For each simulated step with sorted rows, yield the tokens of each rank."""
    size = ranks * each * draw.size
    rows = _rows(draw.lengths, draw.seq_len, _enough(number * size))
    for first in range(0, number * size, size):
        longest = sorted(rows[first : first + size], reverse=True)[:: draw.size]
        sums = [0] * ranks
        for rank, tokens in zip(ranks_of(longest, ranks), longest, strict=True):
            sums[rank] += _padded_length(tokens, ends)
        yield sums


def _enough(number: int) -> int:
    """Round a number of random draws up, so that calls with similar numbers share cached draws."""
    return math.ceil(number / MOST_DRAWS) * MOST_DRAWS


@lru_cache(maxsize=4)
def _places(draw: Draw, number: int) -> list[int]:
    """Return `number` random indices into `batch_maxima`, which begin the same in every call."""
    maxima = batch_maxima(draw)
    until = list(itertools.accumulate(one.share for one in maxima))
    generator = random.Random(0)  # noqa: S311 (no secret)
    return generator.choices(range(len(maxima)), cum_weights=until, k=number)


@lru_cache(maxsize=4)
def _rows(lengths: Lengths, seq_len: int, number: int) -> list[int]:
    """Return the tokens of `number` random rows; every call begins with the same rows."""
    tokens = [min(tokens, seq_len) for tokens, _ in lengths.counts]
    until = list(itertools.accumulate(count for _, count in lengths.counts))
    return random.Random(0).choices(tokens, cum_weights=until, k=number)  # noqa: S311


@lru_cache(maxsize=1024)
def buckets(draw: Draw) -> tuple[int, ...]:
    """Return in ascending order the buckets: a few lengths to which rows are padded.

    The lengths are chosen so that rows get the least padding.
    """
    bins = _binned(batch_maxima(draw))

    def cost(part: Maxima) -> float:
        end = draw.longest if part[-1] is bins[-1] else part[-1].up_to
        return end * sum(one.share for one in part)

    least = math.inf
    best = [bins]
    for tokens, parts in _partitions(bins, MAX_BUCKETS, cost):
        if tokens < least * (1 - WORTH_A_BUCKET):
            least = tokens
            best = parts
    return (*(part[-1].up_to for part in best[:-1]), draw.longest)


def bucket_shares(draw: Draw) -> dict[int, float]:
    """Return for each bucket the share of micro batches that are padded to it."""
    ends = buckets(draw)
    shares = dict.fromkeys(ends, 0.0)
    for one in batch_maxima(draw):
        shares[ends[bisect_left(ends, one.up_to)]] += one.share
    return shares


def stand_ins(draw: Draw) -> dict[int, float]:
    """Return {length: share} for a few lengths that are timed in place of all lengths.

    There are at most MAX_STAND_INS such lengths. Two of the lengths are at most the mean length,
    and three are above it. The longest possible length is one of the three, unless its share is 0.

    If the time of a micro batch is quadratic in its length, the mean of the few times, weighted
    with the shares, is exact except for rounding. If small micro batches are CPU-bound, the time is
    constant up to some length, and grows above it. The error of the mean time is then 1.2 % on
    average and 3.1 % at most. These errors were computed for 120 draws from 12 distributions; for
    each draw, the time began to grow at the length that gives the largest error. Gauss quadrature
    over all lengths would give a mean error of 4.5 % and a largest error of 14.6 % with three
    nodes, and 2.5 % and 9.2 % with four nodes.
    """
    maxima = batch_maxima(draw)
    if len(maxima) <= MAX_STAND_INS:
        return {one.up_to: one.share for one in maxima}

    mean = sum(one.tokens * one.share for one in maxima)
    nodes = _two_nodes([(one.tokens, one.share) for one in maxima if one.tokens <= mean])
    # This is Gauss-Radau quadrature: one node is fixed at the longest length. For the two other
    # nodes, shares are multiplied by the distance to the longest length.
    longer = [(one.tokens, one.share) for one in maxima if mean < one.tokens < draw.longest]
    for tokens, weight in _two_nodes(
        [(tokens, share * (draw.longest - tokens)) for tokens, share in longer]
    ):
        nodes.append((tokens, weight / (draw.longest - tokens)))
    nodes.append((draw.longest, 1.0 - sum(share for _, share in nodes)))

    shares: dict[int, float] = {}
    for tokens, share in nodes:
        if share > NO_SHARE:
            shares[round(tokens)] = shares.get(round(tokens), 0.0) + share
    return shares


def _two_nodes(weighted: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return two weighted values that replace `weighted` in the sum of any cubic polynomial.

    The weighted sum of a cubic polynomial over the two values equals its weighted sum over
    `weighted`. This is Gauss quadrature, computed from the first three moments. If all values are
    equal, the result is one node; without values, it is an empty list.
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


def _merge(part: Maxima) -> Longest:
    share = sum(one.share for one in part)
    return Longest(
        tokens=sum(one.tokens * one.share for one in part) / share,
        up_to=part[-1].up_to,
        share=share,
    )


def _binned(maxima: Maxima) -> Maxima:
    """Group the distribution into at most BINS bins.

    A range of lengths gets more bins if it is wider, or if more micro batches are in it.
    """
    low = maxima[0].tokens
    high = maxima[-1].tokens
    bins: dict[int, list[Longest]] = {}
    below = 0.0
    for one in maxima:
        share_of_range = (one.tokens - low) / (high - low) if high > low else 0.0
        place = int(BINS * (below + one.share / 2 + share_of_range) / 2)
        bins.setdefault(min(place, BINS - 1), []).append(one)
        below += one.share
    return tuple(_merge(tuple(part)) for part in bins.values())


def _partitions(
    bins: Maxima, most: int, cost: Callable[[Maxima], float]
) -> Iterator[tuple[float, list[Maxima]]]:
    """For 1, 2, ... groups, yield the cost and the groups of the cheapest division of `bins`."""
    costs = {
        (begin, end): cost(bins[begin:end])
        for begin, end in itertools.combinations(range(len(bins) + 1), 2)
    }

    # This is dynamic programming. For each bin at which the last group may end, `best` has the
    # least cost and the ends of all groups.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(min(most, len(bins))):
        best = {
            end: min(
                (best[begin][0] + costs[begin, end], (*best[begin][1], end))
                for begin in best
                if begin < end
            )
            for end in range(min(best) + 1, len(bins) + 1)
        }
        total, ends = best[len(bins)]
        yield total, [bins[begin:end] for begin, end in itertools.pairwise(ends)]
