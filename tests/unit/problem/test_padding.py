"""How long micro batches come out, against drawing them, transformers' sampler, and all buckets
there are.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest

from autotune.problem.length_distribution import Lengths
from autotune.problem.padding import (
    Draw,
    Longest,
    _binned,
    batch_maxima,
    bucket_shares,
    buckets,
    new_length_share,
    padded_tokens,
    sort_group_size,
    stand_ins,
    waiting,
)
from autotune.trainer.dealing import balance_rows

GENERATOR = random.Random(0)
LONG_TAIL = [min(int(GENERATOR.lognormvariate(5.5, 1)) + 5, 6000) for _ in range(3000)]
SIZES = (1, 2, 8, 32)


def draw(
    lengths: list[int] = LONG_TAIL, seq_len: int = 4096, size: int = 8, together: int = 0
) -> Draw:
    return Draw(
        lengths=Lengths.of(lengths, "counted"), seq_len=seq_len, size=size, sorted_together=together
    )


@pytest.mark.parametrize("size", SIZES)
def test_the_longest_of_a_micro_batch_as_it_is_drawn(size: int) -> None:
    generator = random.Random(1)
    drawn = [
        max(min(generator.choice(LONG_TAIL), 1000) for _ in range(size)) for _ in range(20_000)
    ]
    maxima = batch_maxima(draw(seq_len=1000, size=size))
    assert sum(one.share for one in maxima) == pytest.approx(1)
    assert padded_tokens(draw(seq_len=1000, size=size), bucketed=False) == pytest.approx(
        statistics.fmean(drawn), rel=0.02
    )
    at_most = sum(one.share for one in maxima if one.up_to <= 500)
    assert at_most == pytest.approx(sum(one <= 500 for one in drawn) / len(drawn), abs=0.02)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("number", [1, 30, 400])
def test_how_many_micro_batches_are_of_a_length_that_none_before_had(
    size: int, number: int
) -> None:
    generator = random.Random(2)
    found = [
        len({max(generator.choices(LONG_TAIL, k=size)) for _ in range(number)}) / number
        for _ in range(100)
    ]
    assert new_length_share(draw(size=size, seq_len=6000), number) == pytest.approx(
        statistics.fmean(found), abs=0.01
    )


def test_examples_of_one_length_are_new_once() -> None:
    assert new_length_share(draw([300] * 20), 5) == 1 / 5


@pytest.mark.parametrize("size", [2, 8])
def test_the_longest_of_a_micro_batch_as_transformers_groups_by_length(size: int) -> None:
    from transformers.trainer_pt_utils import get_length_grouped_indices

    step, cut = 32, [min(length, 4096) for length in LONG_TAIL]
    drawn = []
    for _ in range(5):
        order = get_length_grouped_indices(cut, step)
        drawn += [
            max(cut[index] for index in order[at : at + size])
            for at in range(0, len(order) - size + 1, size)
        ]
    grouped = draw(size=size, together=sort_group_size(len(LONG_TAIL), step))
    assert padded_tokens(grouped, bucketed=False) == pytest.approx(
        statistics.fmean(drawn), rel=0.02
    )
    at_most = sum(one.share for one in batch_maxima(grouped) if one.up_to <= 300)
    assert at_most == pytest.approx(sum(one <= 300 for one in drawn) / len(drawn), abs=0.02)


def test_a_sampler_sorts_a_quarter_of_the_examples_and_fifty_steps_at_most() -> None:
    assert sort_group_size(3000, 32) == 32 * 23
    assert sort_group_size(100_000, 32) == 32 * 50
    assert sort_group_size(10, 32) == 32


def bimodal() -> list[int]:
    return [
        GENERATOR.randint(50, 250) if GENERATOR.random() < 0.7 else GENERATOR.randint(2000, 3000)
        for _ in range(2000)
    ]


DISTRIBUTIONS = {
    "long tail": LONG_TAIL,
    "bimodal": bimodal(),
    "uniform": [GENERATOR.randint(16, 2048) for _ in range(3000)],
    "narrow": [GENERATOR.randint(900, 1100) for _ in range(3000)],
    "rare long ones": [*(GENERATOR.randint(50, 350) for _ in range(2000)), 4000, 4100],
}


@pytest.mark.parametrize("together", [0, 736], ids=["at random", "grouped by length"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lengths", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_a_few_lengths_stand_for_all(lengths: list[int], size: int, together: int) -> None:
    """The mean of a quadratic time is exact but for rounding; that of one which is flat up to some
    length nearly so.
    """
    one = draw(lengths, size=size, together=together)
    maxima, few = batch_maxima(one), stand_ins(one)
    assert len(few) <= 5 and list(few) == sorted(few)
    assert max(few) in (one.longest, maxima[-1].up_to)
    assert min(few.values()) > 0 and sum(few.values()) == pytest.approx(1)

    def error(time_of: Callable[[float], float]) -> float:
        exact = sum(time_of(part.tokens) * part.share for part in maxima)
        return abs(sum(time_of(tokens) * share for tokens, share in few.items()) / exact - 1)

    assert error(float) < 0.002
    # A row of 4,096 tokens of a small model spends half of its time on attention.
    assert error(lambda tokens: 100 + tokens + tokens**2 / 4096) < 0.002
    mean = padded_tokens(one, bucketed=False)
    for share in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        floor = share * mean
        assert error(lambda tokens, floor=floor: max(tokens, floor)) < 0.035
        # a host that runs ahead
        assert error(lambda tokens, floor=floor: (tokens**4 + floor**4) ** 0.25) < 0.015
    assert error(lambda tokens: 128 * math.ceil(tokens * size / 128)) < 0.1  # the tiles of products


@pytest.mark.parametrize("together", [0, 32])
def test_few_lengths_stand_for_themselves(together: int) -> None:
    """By hand: 600, 300 and 100 of a thousand examples, drawn alone."""
    values = [100] * 600 + [500] * 300 + [3000] * 100
    assert stand_ins(draw(values, size=1)) == pytest.approx({100: 0.6, 500: 0.3, 3000: 0.1})
    five = [10, 20, 30, 40, 1000]
    assert stand_ins(draw(five, size=1)) == pytest.approx(dict.fromkeys(five, 0.2))
    assert set(stand_ins(draw(values, size=8, together=together))) <= set(values)


def test_any_lengths_have_possible_ones_that_stand_for_them() -> None:
    generator = random.Random(3)
    for _ in range(500):
        lengths = [
            generator.randint(1, generator.choice((8, 20, 300, 5000)))
            for _ in range(generator.randint(1, 60))
        ]
        one = Draw(
            lengths=Lengths.of(lengths, generator.choice(("counted", "characters"))),
            seq_len=generator.choice((64, 512, 8192)),
            size=generator.choice((1, 2, 8)),
            sorted_together=generator.choice((0, 32)),
        )
        few, shortest = stand_ins(one), batch_maxima(one)[0].up_to
        assert len(few) <= 5 and all(shortest <= tokens <= one.longest for tokens in few)
        assert min(few.values()) > 0 and sum(few.values()) == pytest.approx(1)


def test_buckets_have_the_least_padding_of_all_divisions() -> None:
    generator = random.Random(2)
    for _ in range(20):
        lengths = [generator.randint(1, 400) for _ in range(12)]
        one = draw(lengths, size=generator.choice((1, 2, 3)))
        distinct, maxima = sorted(set(lengths)), batch_maxima(one)
        divisions = (
            (*inner, distinct[-1])
            for number in range(4)
            for inner in itertools.combinations(distinct[:-1], number)
        )
        least = min(
            sum(next(end for end in ends if end >= one.up_to) * one.share for one in maxima)
            for ends in divisions
        )
        assert buckets(one)[-1] == distinct[-1] and len(buckets(one)) <= 4
        # a bucket that gains less is not worth compiling
        assert padded_tokens(one, bucketed=True) <= least * 1.011
        assert padded_tokens(one, bucketed=True) >= padded_tokens(one, bucketed=False)


@pytest.mark.parametrize("size", SIZES)
def test_every_micro_batch_has_a_bucket(size: int) -> None:
    shares = bucket_shares(draw(size=size))
    assert tuple(shares) == buckets(draw(size=size)) and sum(shares.values()) == pytest.approx(1)
    assert max(shares) == 4096


def test_a_length_that_saves_little_is_not_made() -> None:
    """Each is compiled by itself: a second one would save 0.9 % of the tokens, or 25 %."""
    assert buckets(draw([982, 1000] * 50, size=1)) == (1000,)
    assert buckets(draw([500, 1000] * 50, size=1)) == (500, 1000)


def test_equal_examples_need_one_length() -> None:
    alike = Draw(lengths=Lengths.constant(500), seq_len=1024, size=4)
    assert buckets(alike) == (500,) and stand_ins(alike) == {500: 1.0}
    assert padded_tokens(alike, bucketed=True) == padded_tokens(alike, bucketed=False) == 500
    cut = Draw(lengths=Lengths.constant(500), seq_len=100, size=4)
    assert buckets(cut) == (100,)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (8, 1), (2, 8), (4, 4), (8, 2)])
@pytest.mark.parametrize("bucketed", [False, True])
def test_ranks_wait_for_the_longest_rows_as_they_do_where_each_draws_its_own(
    size: int, ranks: int, each: int, bucketed: bool
) -> None:
    one, generator = draw(size=size), random.Random(1)
    ends = buckets(one)

    def padded() -> int:
        longest = max(min(tokens, one.seq_len) for tokens in generator.choices(LONG_TAIL, k=size))
        return next(end for end in ends if end >= longest) if bucketed else longest

    steps = [[sum(padded() for _ in range(each)) for _ in range(ranks)] for _ in range(2000)]
    mean = statistics.fmean(itertools.chain.from_iterable(steps))
    simulated = statistics.fmean(map(max, steps)) / mean - 1
    assert simulated > 0.05
    assert waiting(one, ranks, each, bucketed=bucketed) == pytest.approx(simulated, rel=0.08)


def test_ranks_with_equal_rows_do_not_wait() -> None:
    assert (
        waiting(draw([100] * 10), 8, 1, bucketed=False)
        == waiting(draw([100] * 10), 8, 4, bucketed=True)
        == 0.0
    )
    # Of two equally frequent lengths, 100 and 300, the longer of two is 300 three times in four.
    assert waiting(draw([100, 300], size=1), 2, 1, bucketed=False) == pytest.approx(250 / 200 - 1)


def shares_of(one: Draw) -> list[tuple[float, int, float]]:
    return [(part.tokens, part.up_to, part.share) for part in batch_maxima(one)]


def test_the_longest_of_a_micro_batch_by_hand() -> None:
    """Of 10, 20, 20 and 50 tokens, two are drawn: 1/16 of the pairs has none above 10, 9/16 none
    above 20.
    """
    lengths = [10, 20, 20, 50]
    assert shares_of(draw(lengths, size=2)) == [
        (10, 10, 1 / 16),
        (20, 20, 8 / 16),
        (50, 50, 7 / 16),
    ]
    assert shares_of(draw(lengths, size=2, seq_len=20)) == [(10, 10, 1 / 16), (20, 20, 15 / 16)]
    assert padded_tokens(draw(lengths, size=2), bucketed=False) == pytest.approx(
        (10 + 8 * 20 + 7 * 50) / 16
    )


def test_the_longest_of_a_sorted_micro_batch_by_hand() -> None:
    """Of four examples 1 or 2 are long ten times in 16, which makes one long pair; 3 or 4 five
    times, two pairs.
    """
    two = [100, 300]
    by_hand = [(100, 100, pytest.approx(6 / 16)), (300, 300, pytest.approx(10 / 16))]
    assert shares_of(draw(two, size=2, together=4)) == by_hand
    assert shares_of(draw(two, size=2, together=5)) == by_hand  # one is left over
    assert shares_of(draw(two, size=2, together=4, seq_len=100)) == [(100, 100, 1.0)]
    lengths = [10, 20, 30, 50]
    at_random = shares_of(draw(lengths, size=4))
    # sorted within a micro batch changes nothing
    assert shares_of(draw(lengths, size=4, together=4)) == at_random
    alone = [(tokens, tokens, pytest.approx(0.25)) for tokens in lengths]
    # nor does it for examples that are alone in theirs
    assert shares_of(draw(lengths, size=1, together=64)) == alone


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize(
    ("size", "ranks", "each"), [(1, 4, 8), (2, 4, 4), (4, 8, 1), (4, 1, 8), (8, 2, 2)]
)
def test_rows_that_are_dealt_out_pad_and_wait_as_in_simulated_steps(
    size: int, ranks: int, each: int, bucketed: bool
) -> None:
    """Ranks wait for each other in each micro batch, or once a step."""
    one, generator = draw(size=size, seq_len=2048, together=size * ranks * each), random.Random(4)
    cut, ends = [min(length, 2048) for length in LONG_TAIL], buckets(one)
    tokens = in_each = in_step = 0
    for _ in range(40_000 // one.sorted_together):
        lengths = generator.choices(cut, k=one.sorted_together)
        order = [lengths[place] for place in balance_rows(lengths, size, ranks)]
        padded = [max(order[at : at + size]) for at in range(0, len(order), size)]
        padded = (
            [next(end for end in ends if end >= longest) for longest in padded]
            if bucketed
            else padded
        )
        tokens += sum(padded)
        in_each += ranks * sum(max(padded[at : at + ranks]) for at in range(0, len(padded), ranks))
        in_step += ranks * max(sum(padded[rank::ranks]) for rank in range(ranks))
    num_batches = 40_000 // one.sorted_together * ranks * each
    assert padded_tokens(one, bucketed=bucketed) == pytest.approx(tokens / num_batches, rel=0.03)
    assert waiting(one, ranks, 1, bucketed=bucketed) == pytest.approx(
        in_each / tokens - 1, abs=0.06
    )
    assert waiting(one, ranks, each, bucketed=bucketed) == pytest.approx(
        in_step / tokens - 1, abs=0.06
    )


@pytest.mark.parametrize(
    ("examples", "step", "together"),
    [
        (7, 1, 1),
        (8, 1, 2),
        (255, 32, 32),
        (256, 32, 64),
        (199, 1, 49),
        (200, 1, 50),
        (204, 1, 50),
        (0, 8, 8),
    ],
)
def test_whole_steps_are_sorted_together(examples: int, step: int, together: int) -> None:
    assert sort_group_size(examples, step) == together


def test_lengths_that_are_estimated_may_be_as_long_as_a_row() -> None:
    exact = draw([100, 200], seq_len=512)
    estimated = Draw(lengths=Lengths.of([100, 200], "characters"), seq_len=512, size=8)
    assert (exact.longest, estimated.longest, draw([100, 200], seq_len=150).longest) == (
        200,
        512,
        150,
    )
    # one of 100 would be for a micro batch in 256
    assert bucket_shares(estimated) == pytest.approx({512: 1.0})


def test_two_buckets_by_hand() -> None:
    """Three quarters at 100 and a quarter at 1,000 tokens, drawn alone: 325 tokens on average
    instead of 1,000.
    """
    one = draw([100] * 75 + [1000] * 25, size=1)
    assert bucket_shares(one) == pytest.approx({100: 0.75, 1000: 0.25})
    assert padded_tokens(one, bucketed=True) == pytest.approx(325)
    assert batch_maxima(one)[0] == Longest(tokens=100, up_to=100, share=0.75)


def test_seven_lengths_have_five_stand_ins_by_hand() -> None:
    """Each drawn alone: those up to the mean (21) keep sum, mean, spread and skewness of 1, 2, 3
    and 4.
    """
    values = [1, 2, 3, 4, 30, 40, 67]
    few = stand_ins(draw(values, size=1))
    # 1, 2, 3, 4 have the mean 2.5 and the deviation 1.118, and no skewness: 1.38 and 3.62, half of
    # them each.
    assert few == pytest.approx({1: 2 / 7, 4: 2 / 7, 30: 1 / 7, 40: 1 / 7, 67: 1 / 7})


def test_six_lengths_are_one_too_many_to_stand_for_themselves() -> None:
    """Each drawn alone. Up to the mean (40) there are three, above it two, and the longest."""
    six = [10, 20, 30, 50, 60, 70]
    assert stand_ins(draw(six[:5], size=1)) == pytest.approx(dict.fromkeys(six[:5], 0.2))
    # 10, 20 and 30 have the mean 20, the deviation 8.165 and no skewness: 11.8 and 28.2, half of
    # them each.
    assert stand_ins(draw(six, size=1)) == pytest.approx(
        {12: 0.25, 28: 0.25, 50: 1 / 6, 60: 1 / 6, 70: 1 / 6}
    )


def test_a_length_that_is_the_mean_is_one_of_the_shorter_ones() -> None:
    """Each drawn alone, 40 on average.

    10 to 40 have the mean 25 and the deviation 11.18: 13.82 and 36.18.
    """
    few = stand_ins(draw([10, 20, 30, 40, 50, 90], size=1))
    assert few == pytest.approx({14: 1 / 3, 36: 1 / 3, 50: 1 / 6, 90: 1 / 6})


def test_four_buckets_are_made_where_more_would_pay() -> None:
    """Five lengths, of which each is twice the one before: 5 buckets would save the most."""
    five = [100, 200, 400, 800, 1600]
    assert buckets(draw(five[1:] * 20, size=1)) == (200, 400, 800, 1600)
    # which costs 100 more for one in five
    assert buckets(draw(five * 20, size=1)) == (200, 400, 800, 1600)


def test_a_further_bucket_is_made_from_one_percent_on() -> None:
    """Half of the examples are shorter: by 1.8 % or 2.2 %, so that 0.9 or 1.1 % of all tokens are
    saved.
    """
    assert buckets(draw([491, 500] * 50, size=1)) == (500,)
    assert buckets(draw([489, 500] * 50, size=1)) == (489, 500)


def test_what_is_too_rare_for_a_number_has_no_micro_batch() -> None:
    """All 64 examples of a micro batch are the one of a million: 1e-384 is 0."""
    rare = Lengths(counts=((1, 1), (2, 1_000_000)), source="counted")
    assert shares_of(Draw(lengths=rare, seq_len=4, size=64)) == [(2, 2, 1.0)]


def test_a_bucket_that_saves_exactly_one_percent_is_not_made() -> None:
    """Half of 980 and half of 1,000 are 990, which is 99 % of 1,000 to the last bit."""
    assert buckets(draw([980, 1000] * 50, size=1)) == (1000,)


def binned(*parts: tuple[float, float]) -> list[tuple[float, int, float]]:
    found = _binned(
        tuple(Longest(tokens=tokens, up_to=int(tokens), share=share) for tokens, share in parts)
    )
    return [(one.tokens, one.up_to, one.share) for one in found]


@pytest.mark.parametrize(("number", "together"), [(64, 1), (128, 2), (256, 4)])
def test_the_distribution_is_cut_into_sixty_four_parts(number: int, together: int) -> None:
    """Of equally many, equally far apart, each part has as many: 1; 1 and 2; or 1 to 4."""
    share = together / number
    ends = range(together, number + 1, together)
    expected = [(end - (together - 1) / 2, end, share) for end in ends]
    assert binned(*((1.0 + index, 1 / number) for index in range(number))) == expected


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        # 32 times (half of the own share, those below, and the place between the shortest and the
        # longest):
        ([(1000, 0.01), (1010, 0.01), (2000, 0.98)], [1010, 2000]),  # 0.16, 0.80 | 48.6
        ([(1000, 0.01), (1030, 0.01), (2000, 0.98)], [1000, 1030, 2000]),  # 0.16 | 1.44 | 48.6
        ([(1000, 0.4), (1001, 0.4), (2000, 0.2)], [1000, 1001, 2000]),  # 6.4 | 19.2 | 60.8
        ([(1000, 0.98), (1990, 0.01), (2000, 0.01)], [1000, 2000]),  # 15.7 | 63.2, 63.8
        ([(1000, 0.98), (1960, 0.01), (2000, 0.01)], [1000, 1960, 2000]),  # 15.7 | 62.2 | 63.8
        # 16 | 63.7, 64, which is beyond the last
        ([(1000, 1.0), (1990, 1e-18), (2000, 1e-18)], [1000, 2000]),
    ],
)
def test_a_part_is_finer_where_there_is_more_and_where_lengths_differ_more(
    parts: list[tuple[float, float]], ends: list[int]
) -> None:
    assert [up_to for _, up_to, _ in binned(*parts)] == ends


def test_parts_of_a_distribution_have_the_mean_of_what_they_hold() -> None:
    assert binned((1000, 0.003), (1010, 0.001), (2000, 0.996)) == [
        (pytest.approx(1002.5), 1010, pytest.approx(0.004)),
        (pytest.approx(2000), 2000, 0.996),
    ]
    assert binned((500, 1.0)) == [(500, 500, 1.0)]
