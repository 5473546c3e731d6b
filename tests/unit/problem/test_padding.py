"""How long micro batches come out, against drawing them, transformers' sampler, and all buckets there are."""

import itertools
import random
import statistics

import pytest

from autotune.problem.length_distribution import Lengths
from autotune.problem.padding import (
    MAX_BUCKETS,
    MAX_STRATA,
    Draw,
    batch_maxima,
    bucket_shares,
    buckets,
    padded_tokens,
    sorted_together,
    strata,
)

GENERATOR = random.Random(0)
LONG_TAIL = [min(int(GENERATOR.lognormvariate(5.5, 1)) + 5, 6000) for _ in range(3000)]
SIZES = (1, 2, 8, 32)


def draw(lengths: list[int] = LONG_TAIL, seq_len: int = 4096, size: int = 8, together: int = 0) -> Draw:
    return Draw(lengths=Lengths.of(lengths, "counted"), seq_len=seq_len, size=size, sorted_together=together)


@pytest.mark.parametrize("size", SIZES)
def test_the_longest_of_a_micro_batch_as_it_is_drawn(size: int) -> None:
    generator = random.Random(1)
    drawn = [max(min(generator.choice(LONG_TAIL), 1000) for _ in range(size)) for _ in range(20_000)]
    maxima = batch_maxima(draw(seq_len=1000, size=size))
    assert sum(one.share for one in maxima) == pytest.approx(1)
    assert padded_tokens(draw(seq_len=1000, size=size), bucketed=False) == pytest.approx(
        statistics.fmean(drawn), rel=0.02
    )
    at_most = sum(one.share for one in maxima if one.up_to <= 500)
    assert at_most == pytest.approx(sum(one <= 500 for one in drawn) / len(drawn), abs=0.02)


@pytest.mark.parametrize("size", [2, 8])
def test_the_longest_of_a_micro_batch_as_transformers_groups_by_length(size: int) -> None:
    from transformers.trainer_pt_utils import get_length_grouped_indices

    step, cut = 32, [min(length, 4096) for length in LONG_TAIL]
    drawn = []
    for _ in range(5):
        order = get_length_grouped_indices(cut, step)
        drawn += [max(cut[index] for index in order[at : at + size]) for at in range(0, len(order) - size + 1, size)]
    grouped = draw(size=size, together=sorted_together(len(LONG_TAIL), step))
    assert padded_tokens(grouped, bucketed=False) == pytest.approx(statistics.fmean(drawn), rel=0.02)
    at_most = sum(one.share for one in batch_maxima(grouped) if one.up_to <= 300)
    assert at_most == pytest.approx(sum(one <= 300 for one in drawn) / len(drawn), abs=0.02)


def test_a_sampler_sorts_a_quarter_of_the_examples_and_fifty_steps_at_most() -> None:
    assert sorted_together(3000, 32) == 32 * 23
    assert sorted_together(100_000, 32) == 32 * 50
    assert sorted_together(10, 32) == 32


@pytest.mark.parametrize("size", SIZES)
def test_a_few_lengths_stand_for_all(size: int) -> None:
    """The mean is exact, and so within 1 or 2 % is any time that is flat up to a length, linear, or quadratic."""
    maxima, few = batch_maxima(draw(size=size)), strata(draw(size=size))
    assert len(few) <= MAX_STRATA and sum(one.share for one in few) == pytest.approx(1)

    def mean(times: object, over: tuple[object, ...]) -> float:
        return sum(times(one.tokens) * one.share for one in over)  # type: ignore[operator, attr-defined]

    assert mean(float, few) == pytest.approx(mean(float, maxima))
    for floor in (50, 200, 500, 1500):
        assert mean(lambda tokens, floor=floor: max(tokens, floor), few) == pytest.approx(
            mean(lambda tokens, floor=floor: max(tokens, floor), maxima), rel=0.015
        )
    # A row of 4,096 tokens spends a fifth of its time on attention.
    assert mean(lambda tokens: tokens + tokens**2 / 16384, few) == pytest.approx(
        mean(lambda tokens: tokens + tokens**2 / 16384, maxima), rel=0.01
    )


def test_buckets_have_the_least_padding_of_all_divisions() -> None:
    generator = random.Random(2)
    for _ in range(20):
        lengths = [generator.randint(1, 400) for _ in range(12)]
        one = draw(lengths, size=generator.choice((1, 2, 3)))
        distinct, maxima = sorted(set(lengths)), batch_maxima(one)
        divisions = (
            (*inner, distinct[-1])
            for number in range(MAX_BUCKETS)
            for inner in itertools.combinations(distinct[:-1], number)
        )
        least = min(
            sum(next(end for end in ends if end >= one.up_to) * one.share for one in maxima) for ends in divisions
        )
        assert buckets(one)[-1] == distinct[-1] and len(buckets(one)) <= MAX_BUCKETS
        assert padded_tokens(one, bucketed=True) <= least * 1.011  # a bucket that gains less is not worth compiling
        assert padded_tokens(one, bucketed=True) >= padded_tokens(one, bucketed=False)


@pytest.mark.parametrize("size", SIZES)
def test_every_micro_batch_has_a_bucket(size: int) -> None:
    shares = bucket_shares(draw(size=size))
    assert tuple(shares) == buckets(draw(size=size)) and sum(shares.values()) == pytest.approx(1)
    assert max(shares) == 4096


def test_equal_examples_need_one_length() -> None:
    alike = Draw(lengths=Lengths.constant(500), seq_len=1024, size=4)
    assert buckets(alike) == (500,) and [one.tokens for one in strata(alike)] == [500]
    assert padded_tokens(alike, bucketed=True) == padded_tokens(alike, bucketed=False) == 500
    cut = Draw(lengths=Lengths.constant(500), seq_len=100, size=4)
    assert buckets(cut) == (100,)
