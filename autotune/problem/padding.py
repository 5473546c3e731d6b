"""The lengths to which the rows of micro batches are padded: the distribution of the longest row of each.

Micro batches are drawn at random, or grouped by length as transformers' sampler does.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from autotune.problem.length_distribution import Lengths

MAX_BUCKETS = 4  # each is compiled by itself
WORTH_A_BUCKET = 0.01  # the relative gain in padded tokens from which on a further bucket is made
MAX_STRATA = 8
STRATA_ERROR = 0.01  # at most, of the mean of any time that is flat up to some length and linear from there
BINS = 64  # parts of the distribution, of which buckets and strata are made
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
    shares: dict[int, float] = {}
    lengths, size = draw.lengths, draw.size
    if draw.sorted_together > size:
        number = draw.sorted_together // size
        for place in range(number):
            # Of those sorted, the longest of the micro batch has this many shorter ones below it, and half of itself.
            tokens = min(lengths.quantile(((place + 1) * size - 0.5) / (number * size)), draw.seq_len)
            shares[tokens] = shares.get(tokens, 0.0) + 1 / number
    else:
        seen, before = 0, 0.0
        for length, number in lengths.counts:
            seen += number
            share, tokens = (seen / lengths.number) ** size, min(length, draw.seq_len)
            shares[tokens] = shares.get(tokens, 0.0) + share - before
            before = share
    return tuple(Longest(tokens=tokens, up_to=tokens, share=share) for tokens, share in sorted(shares.items()) if share)


def sorted_together(examples: int, step_examples: int) -> int:
    """How many of the examples transformers' sampler sorts by length at a time; a step of a device takes some."""
    return step_examples * max(1, min(examples // (step_examples * MEGABATCHES), MAX_STEPS))


@lru_cache(maxsize=1024)
def padded_tokens(draw: Draw, *, bucketed: bool) -> float:
    """Tokens to which a row is padded on average: the longest of its micro batch, or the next of `buckets`."""
    maxima = batch_maxima(draw)
    if not bucketed:
        return sum(one.tokens * one.share for one in maxima)
    return sum(length * share for length, share in bucket_shares(draw).items())


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


def strata(draw: Draw) -> Maxima:
    """A few lengths that stand for all: the means of parts of the distribution, so that the mean of all is theirs.

    As few as keep the mean of any time that is flat up to some length, and linear from there, within STRATA_ERROR.
    """
    maxima = batch_maxima(draw)
    mean = sum(one.tokens * one.share for one in maxima)

    def cost(part: Maxima) -> float:
        middle = _merged(part).tokens
        return sum(one.share * (one.tokens - middle) ** 2 for one in part)

    parts: list[Maxima] = []
    for _, parts in _partitions(_binned(maxima), MAX_STRATA, cost):
        middles = [_merged(part).tokens for part in parts]
        # Such a time is underestimated most where it begins to rise at the mean of a part.
        errors = (
            sum(one.share * max(one.tokens - middle, 0.0) for one in part)
            for part, middle in zip(parts, middles, strict=True)
        )
        if max(errors) <= STRATA_ERROR * mean:
            break
    return tuple(map(_merged, parts))


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
