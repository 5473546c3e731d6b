"""The examples of the full run and the rows they make, computed by hand."""

import math
from dataclasses import replace

import pytest

from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload, _kind


@pytest.mark.parametrize(
    ("examples", "epochs", "batch", "steps"),
    [
        (10_000, 1, 32, 313),
        (10_000, 3, 32, 939),
        (64, 1, 32, 2),
        (65, 2, 32, 6),
        (1, 1, 32, 1),
        (33, 1, 1, 33),
    ],
)
def test_a_smaller_last_batch_is_a_step(examples, epochs, batch, steps):
    workload = Workload(examples=examples, epochs=epochs, global_batch=batch)
    assert workload.run_shape(TrainConfig(micro_batch_size=1)).num_steps == steps


def test_the_global_batch_is_kept():
    workload = Workload(global_batch=24)
    assert [
        workload.run_shape(TrainConfig(micro_batch_size=size)).accumulation
        for size in (1, 2, 3, 4, 6, 8, 12, 24)
    ] == [*(24, 12, 8, 6, 4, 3, 2, 1)]
    for size in (5, 7, 16, 48):
        with pytest.raises(
            ValueError, match=f"micro batch {size} does not divide the global batch 24"
        ):
            workload.run_shape(TrainConfig(micro_batch_size=size))


@pytest.mark.parametrize(
    ("length", "seq_len", "useful", "cut", "fill"),
    [
        (1024, 512, 512, 0.5, 1.0),
        (1024, 1024, 1024, 0.0, 1.0),
        (768, 1024, 768, 0.0, 0.75),
        (1000, 990, 990, 0.01, 1),
    ],
)
def test_padding_and_truncation(length, seq_len, useful, cut, fill):
    workload = Workload(lengths=Lengths.constant(length))
    assert workload.useful_tokens_per_row(TrainConfig(seq_len=seq_len)) == useful
    assert workload.truncated(seq_len) == pytest.approx(cut)
    assert workload.fill(TrainConfig(seq_len=seq_len, padding="max_length")) == pytest.approx(fill)
    assert workload.fill(TrainConfig(seq_len=seq_len)) == 1  # all are equally long


@pytest.mark.parametrize("name", ["examples", "epochs", "global_batch"])
@pytest.mark.parametrize("value", [0, -1, -(10**30), -math.inf])
def test_counts_below_one_are_errors(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, not "):
        Workload(**{name: value})


# packed by hand in test_packing.py
BY_HAND = Lengths.of([7, 6, 5, 5, 5, 3, 3, 2, 1, 12], "counted")
PACKED = TrainConfig(seq_len=10, micro_batch_size=1, packing=True)


def test_packed_rows_hold_several_examples_and_a_step_takes_fewer_of_them() -> None:
    workload = Workload(examples=10, epochs=2, lengths=BY_HAND, global_batch=8)
    assert workload.examples_per_row(PACKED) == 2  # 10 examples in 5 rows
    assert workload.useful_tokens_per_row(PACKED) == (49 - 2) / 5
    assert workload.fill(PACKED) == pytest.approx(0.94)
    assert [
        workload.run_shape(replace(PACKED, micro_batch_size=size)).accumulation
        for size in (1, 2, 4, 3, 16)
    ] == [
        4,
        2,
        1,
        1,
        1,
    ]
    # as near as whole rows allow
    assert workload.run_shape(replace(PACKED, micro_batch_size=3)).examples_per_step == 6
    assert workload.run_shape(PACKED).num_steps == 2 * 2  # 4 rows, then 1
    alone = replace(PACKED, packing=False)  # padded as packed rows are
    assert (workload.fill(alone), workload.run_shape(alone).num_steps) == (
        pytest.approx(0.47),
        2 * 2,
    )


def test_one_known_length_stands_for_all_examples() -> None:
    """One length was given, of many examples: they share rows all the same."""
    workload = Workload(examples=10_000, lengths=Lengths.constant(3))
    assert workload.examples_per_row(PACKED) == pytest.approx(3, rel=1e-3)


def test_probed_rows_represent_all_rows() -> None:
    workload = Workload(lengths=Lengths.of([10] * 75 + [5] * 50, "counted"))
    kinds = workload.micro_batches(PACKED)
    rows = [row for kind in kinds for row in kind.rows]
    # with a mask, and without: both are compiled and weighed at the start
    assert rows[:2] == [(5, 5), (10,)]
    assert sorted(rows) == [(5, 5)] * 2 + [(10,)] * 6 and len(rows) == 8
    assert {(kind.length, kind.share) for kind in kinds} == {(10, 1 / 8)}
    by_three = workload.micro_batches(replace(PACKED, micro_batch_size=3))
    assert [kind.rows for kind in by_three] == [
        tuple(rows[:3]),
        tuple(rows[3:6]),
        (*rows[6:], rows[0]),
    ]
    assert sum(kind.share for kind in by_three) == pytest.approx(1)


def test_probed_rows_stand_at_equal_distances_in_the_order_of_filling() -> None:
    lengths = range(93, 101)  # each fills a row of its own
    workload = Workload(
        lengths=Lengths.of([length for length in lengths for _ in range(16)], "counted")
    )
    kinds = workload.micro_batches(replace(PACKED, seq_len=100))
    assert sorted(row for kind in kinds for row in kind.rows) == [(length,) for length in lengths]


def test_padded_rows_have_the_lengths_of_the_examples_and_full_rows_are_left_out() -> None:
    config = TrainConfig(seq_len=1024, micro_batch_size=4, padding="max_length")
    (kind,) = Workload(
        lengths=Lengths.of([100] * 50 + [500] * 25 + [4000] * 25, "counted")
    ).micro_batches(config)
    assert sorted(kind.rows) == [(100,), (100,), (500,), (1024,)]
    assert (kind.length, kind.share) == (1024, 1)
    assert Workload(lengths=Lengths.constant(1024)).micro_batches(config) == ()
    assert Workload(lengths=Lengths.constant(5000)).micro_batches(config) == ()
    (short,) = Workload(lengths=Lengths.constant(1)).micro_batches(config)
    assert set(short.rows) == {(2,)}  # one has no loss


@pytest.mark.parametrize(
    ("examples", "share", "held_out"),
    [(1000, 0.05, 50), (1000, 0.0501, 51), (3, 0.1, 1), (1, 0.5, 0), (1000, 0.0, 0)],
)
def test_held_out_examples_are_not_trained_on(examples: int, share: float, held_out: int) -> None:
    workload = Workload(examples=examples, eval_share=share, global_batch=1)
    assert (workload.held_out(), workload.trained) == (held_out, examples - held_out)
    assert workload.run_shape(TrainConfig(micro_batch_size=1)).num_steps == examples - held_out
    assert workload.held_out(2 * examples) == min(math.ceil(2 * examples * share), 2 * examples - 1)


# By hand: of two examples drawn, a quarter of the pairs has none of the long half.
HALVES = Workload(examples=1000, lengths=Lengths.of([100, 300], "counted"), global_batch=8)
TWO = TrainConfig(micro_batch_size=2, seq_len=512)


def test_rows_are_padded_to_the_longest_of_their_micro_batch() -> None:
    assert HALVES.tokens_per_row(TWO) == pytest.approx(0.25 * 100 + 0.75 * 300)
    assert HALVES.fill(TWO) == pytest.approx(200 / 250)
    shape = HALVES.run_shape(TWO)
    assert (shape.tokens_per_step, shape.useful_tokens_per_step) == (
        pytest.approx(8 * 250),
        8 * 200,
    )
    assert HALVES.longest_row(TWO) == 300 and HALVES.padded_lengths(TWO) == ()
    assert (
        HALVES.longest_row_config(TWO).seq_len == 300 and HALVES.mean_row_config(TWO).seq_len == 250
    )
    assert {(kind.length, kind.share) for kind in HALVES.micro_batches(TWO)} == {
        (101, 0.25),
        (300, 0.75),
    }
    bucketed = HALVES.micro_batches(replace(TWO, padding="bucket"))
    assert {kind.length for kind in bucketed} == {100, 300}


def test_a_kind_of_micro_batch_has_one_row_of_its_length_and_no_longer_one() -> None:
    lengths = Lengths.of(range(10, 1010), "counted")
    kinds = Workload(lengths=lengths).micro_batches(replace(TWO, micro_batch_size=4, seq_len=800))
    for kind in kinds:
        assert len(kind.rows) == 4 and kind.rows[0] == (kind.length,)
        assert all(2 <= row[0] <= kind.length for row in kind.rows)
    # the longest has others as long beside it
    for kind in (kind for kind in kinds if kind.length < 800):
        others = [row[0] for row in kind.rows[1:]]
        # spread over all that are shorter
        assert sum(others) / 3 == pytest.approx(kind.length / 2, rel=0.1)
    assert sum(kind.share for kind in kinds) == pytest.approx(1)
    # most have a row that is cut
    assert max(kind.length for kind in kinds) == 800 and 1 - (790 / 1000) ** 4 > 0.5


def test_the_longest_that_can_occur_is_weighed_however_rare_it_is() -> None:
    rare = Workload(lengths=Lengths.of([*range(10, 500)] * 100 + [2000], "counted"))
    kinds = rare.micro_batches(replace(TWO, seq_len=4096))
    (share,) = [kind.share for kind in kinds if kind.length == 2000]
    assert 0 < share < 2 * 2 / rare.lengths.number  # of two examples drawn
    assert rare.longest_row(replace(TWO, seq_len=1024)) == 1024


def test_lengths_that_are_estimated_may_be_exceeded() -> None:
    estimated = Workload(lengths=Lengths.of([100, 300], "characters"))
    assert estimated.longest_row(TWO) == 512
    assert [kind.share for kind in estimated.micro_batches(TWO) if kind.length == 512] == [0.0]
    assert estimated.padded_lengths(replace(TWO, padding="bucket"))[-1] == 512


def test_buckets_are_kinds_with_their_shares() -> None:
    bucketed = replace(TWO, padding="bucket")
    assert HALVES.padded_lengths(bucketed) == (100, 300)
    assert {(kind.length, kind.share) for kind in HALVES.micro_batches(bucketed)} == {
        (100, 0.25),
        (300, 0.75),
    }
    assert HALVES.padded_lengths(replace(TWO, padding="max_length")) == (512,)
    alike = Workload(lengths=Lengths.constant(200))
    assert alike.padded_lengths(bucketed) == (200,)
    assert alike.micro_batches(bucketed) == alike.micro_batches(TWO)  # the same probe


@pytest.mark.parametrize(
    "lengths", [[100] * 50 + [101] * 50, [512, 513], [100, 101, 102, 103], [10] * 20 + [11] * 30]
)
def test_neighbouring_lengths_share_an_odd_one(lengths: list[int]) -> None:
    for size in (1, 2):
        workload = Workload(lengths=Lengths.of(lengths, "counted"))
        kinds = workload.micro_batches(TrainConfig(micro_batch_size=size, seq_len=1024))
        assert sum(kind.share for kind in kinds) == pytest.approx(1)
        assert len({kind.length for kind in kinds}) == len(kinds)


def test_examples_of_nearly_the_same_length_are_padded_little() -> None:
    grouped = replace(TWO, group_by_length=True)
    assert (
        HALVES.run_shape(replace(grouped, micro_batch_size=3), accumulation=5).rows_per_step == 15
    )
    assert HALVES.fill(grouped) > 0.99 > HALVES.fill(TWO)
    for kind in HALVES.micro_batches(grouped):  # lengths are odd, but for the longest
        assert kind.length in (101, 300) and {row[0] for row in kind.rows[1:]} <= {
            kind.length,
            kind.length - 1,
        }


def test_attention_is_counted_over_the_lengths_that_the_examples_have() -> None:
    """100 and 300 tokens: 100^2 + 300^2 pairs for 400 tokens, as many a token as sequences of 250
    have.
    """
    assert (
        HALVES.mean_attention_length(TWO)
        == HALVES.mean_attention_length(replace(TWO, packing=True))
        == 250
    )
    assert HALVES.mean_attention_length(replace(TWO, seq_len=100)) == 100


def test_beside_a_row_stand_rows_as_they_are_drawn_with_it() -> None:
    """Of 1 to 100 tokens, three rows of which the longest has 60: the others stand a third of 60
    apart.
    """
    workload = Workload(lengths=Lengths.of(range(1, 101), "counted"), global_batch=3)
    config = TrainConfig(micro_batch_size=3, seq_len=100)
    assert _kind(workload._draw(config), 60, 0.5).rows == ((60,), (40,), (20,))
    # 40 of 100 are as long, cut
    longest = _kind(workload._draw(replace(config, seq_len=60)), 60, 0.5)
    assert (longest.rows, longest.length, longest.share) == (((60,), (60,), (34,)), 60, 0.5)
    grouped = workload._draw(replace(config, group_by_length=True))
    # neighbours of 150 sorted ones are two thirds of a token apart
    assert grouped.sorted_together == 150
    assert _kind(grouped, 60, 0.5).rows == ((60,), (60,), (59,))


def test_a_single_token_is_padded_to_two_since_it_predicts_nothing() -> None:
    ones = Workload(lengths=Lengths.of([1, 1, 1, 3], "counted"))
    config = TrainConfig(micro_batch_size=1, seq_len=8)
    assert [(kind.length, kind.rows) for kind in ones.micro_batches(config)] == [
        (2, ((2,),)),
        (3, ((3,),)),
    ]
    assert Workload(lengths=Lengths.constant(1)).mean_row_config(config).seq_len == 1


def test_fewer_examples_than_known_lengths_are_packed_once() -> None:
    workload = Workload(examples=10, lengths=Lengths.of([3] * 99 + [7], "counted"), global_batch=1)
    config = replace(PACKED, seq_len=10)
    # 33 rows of three, of which one has room for 1 token more; the one of 7 takes a further one of
    # 3.
    assert workload.examples_per_row(config) == pytest.approx(100 / 34)
    assert len(workload._packed(10)) == len(replace(workload, examples=100)._packed(10))
    assert sum(rows.number for rows in workload._packed(10)) == 34


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("text", "all"),
        ("prompt_completion", "completion"),
        ("chat_completion", "completion"),
        ("alpaca", "completion"),
        ("messages", "assistant"),
        ("unknown", "assistant"),
    ],
)
def test_what_is_trained_on_goes_by_the_form_unless_it_is_given(form: str, what: str) -> None:
    assert Workload(form=form).trains_on == what
    assert Workload(form=form, loss_on="all").trains_on == "all"


def test_the_kinds_of_micro_batch_that_are_timed_stand_mixed() -> None:
    """By hand: of 1 to 5 hundreds the first, the last, the second, the fourth and the third, made
    odd.
    """
    hundreds = [100, 200, 300, 400, 500]
    workload = Workload(lengths=Lengths.of(hundreds, "counted"))
    kinds = workload.micro_batches(TrainConfig(micro_batch_size=1, seq_len=512))
    assert [kind.length for kind in kinds] == [101, 500, 201, 401, 301]


def test_the_defaults_of_a_workload() -> None:
    plain = Workload()
    assert (plain.examples, plain.epochs, plain.global_batch, plain.eval_share) == (
        10_000,
        1,
        32,
        0.0,
    )
    assert plain.lengths == Lengths.constant(1024, "assumed") and plain.examples_assumed
    facts = replace(plain, eval_share=0.25, loss_on="all").facts()
    assert {name: value for name, value in facts.items() if name != "tokens_per_example"} == {
        "examples": 10_000,
        "objective": "sft",
        "examples_assumed": True,
        "epochs": 1,
        "global_batch": 32,
        "eval_share": 0.25,
        "loss_on": "all",
    }


def test_a_row_of_each_kind_comes_first_wherever_it_stands() -> None:
    """Six of eight rows hold two examples; these are filled first.

    Or no row holds two, or each does.
    """
    config = replace(PACKED, seq_len=10, micro_batch_size=8)

    def rows(*lengths: int) -> tuple[tuple[int, ...], ...]:
        (kind,) = Workload(
            lengths=Lengths.of(lengths, "counted"), examples=len(lengths)
        ).micro_batches(config)
        return kind.rows

    assert rows(*[5] * 150, *[9] * 25) == (
        (5, 5),
        (9,),
        (5, 5),
        (5, 5),
        (5, 5),
        (5, 5),
        (5, 5),
        (9,),
    )
    # In the order of filling 10, 9, 8, 7 twice each, which stand mixed: 10, 8, 9, 7, 10, 8, 9, 7.
    assert rows(*[10, 9, 8, 7] * 2) == ((10,), (8,), (9,), (7,), (10,), (8,), (9,), (7,))
    assert set(rows(*[5] * 40)) == {(5, 5)}


def test_attention_counts_each_example_of_a_length() -> None:
    """Three of 100 and one of 300 tokens: 120,000 pairs for 600 tokens."""
    uneven = Workload(lengths=Lengths.of([100] * 3 + [300], "counted"))
    assert uneven.mean_attention_length(TWO) == 200


def test_the_kinds_of_bucketed_rows_are_as_long_as_the_buckets() -> None:
    """Stand-ins would be others, and one more."""
    workload = Workload(lengths=Lengths.of(range(10, 1010), "counted"))
    bucketed = TrainConfig(micro_batch_size=2, seq_len=2048, padding="bucket")
    lengths = sorted(kind.length for kind in workload.micro_batches(bucketed))
    assert tuple(lengths) == workload.padded_lengths(bucketed) and len(lengths) == 4
    assert len(workload.micro_batches(replace(bucketed, padding="longest"))) == 5


def test_gpus_wait_for_the_one_with_the_longest_rows():
    """Of two equally frequent lengths, 100 and 300, the longer of two is 300 three times in four:
    250 in the mean.
    """
    workload = Workload(lengths=Lengths.of([100, 300], "counted"), global_batch=16)
    pair = TrainConfig(
        num_gpus=2, sharding="fsdp2", micro_batch_size=1, seq_len=512, padding="longest"
    )
    assert workload.waiting_share(pair) == pytest.approx(0.25)
    # DDP waits once a step: of two sums of eight the larger is 0.16 above the mean, a normal
    # deviate of sqrt(8) / 16.
    by_ddp = workload.waiting_share(replace(pair, sharding="ddp"))
    assert by_ddp == pytest.approx(math.sqrt(8) / 16 * math.sqrt(1 / math.pi), rel=0.05)
    once = Workload(lengths=workload.lengths, global_batch=2)
    assert once.waiting_share(replace(pair, sharding="ddp")) == once.waiting_share(pair)
    for changed in ({"num_gpus": 1}, {"padding": "max_length"}, {"packing": True}):
        assert workload.waiting_share(replace(pair, **changed)) == 0.0
    # Of eight that are sorted neighbours are alike, unless the number of long ones is odd, as it is
    # every second time: then one of four pairs waits for 300 instead of 200.
    grouped = Workload(examples=32, lengths=workload.lengths, global_batch=8)
    by_length = replace(pair, group_by_length=True)
    assert grouped.waiting_share(by_length) == pytest.approx(0.5 * 100 / 4 / 200)
    assert grouped.waiting_share(replace(by_length, sharding="ddp")) == grouped.waiting_share(
        by_length
    )
    constant = Workload(lengths=Lengths.constant(100), global_batch=16)
    assert constant.waiting_share(pair) == 0.0
    plan = Parallelism(num_gpus=2, strategy="fsdp2")
    assert workload.waiting_share(
        replace(pair, num_gpus=1, sharding="none"), plan
    ) == workload.waiting_share(pair)


def test_rows_of_a_step_are_dealt_out_where_that_changes_anything() -> None:
    """Then ranks wait for 100 tokens more in every second step of eight, as those do whose rows are
    grouped.
    """
    workload = Workload(lengths=Lengths.of([100, 300], "counted"), global_batch=16, dealt=True)
    pair = TrainConfig(
        num_gpus=2, sharding="fsdp2", micro_batch_size=1, seq_len=512, padding="longest"
    )
    assert workload.deals(pair) and workload.waiting_share(pair) == pytest.approx(
        0.5 * 100 / 8 / 200
    )
    assert workload.tokens_per_row(pair) == pytest.approx(200)
    two = replace(pair, micro_batch_size=2)
    assert workload.tokens_per_row(two) < replace(workload, dealt=False).tokens_per_row(two)
    assert workload.deals(replace(pair, padding="bucket")) and workload.deals(
        replace(two, num_gpus=1, sharding="none")
    )
    for changed in (
        {"padding": "masked"},
        {"packing": True},
        {"group_by_length": True},
        {"micro_batch_size": 16},
    ):
        config = replace(pair, **changed)
        assert not workload.deals(config)
        assert workload._draw(config) == replace(workload, dealt=False)._draw(config)
    assert not replace(workload, lengths=Lengths.constant(100)).deals(pair)


@pytest.mark.parametrize("objective", list(Objective))
def test_trl_gives_rows_that_differ_a_mask(objective: Objective) -> None:
    """Rows of one length have one where all are padded to `seq_len`.

    train.py has its own way, and so has sft.
    """
    masked = objective not in (Objective.SFT, Objective.CLASSIFICATION)
    kinds = (HALVES.lengths, Lengths.constant(300))
    several, one = (Workload(lengths=lengths, objective=objective) for lengths in kinds)
    assert (
        several.longest_row_config(TWO).padding
        == several.mean_row_config(TWO).padding
        == ("masked" if masked else TWO.padding)
    )
    assert one.longest_row_config(TWO) == replace(TWO, seq_len=300)
    padded = replace(TWO, padding="max_length")
    assert one.mean_row_config(padded).padding == ("masked" if masked else "max_length")
