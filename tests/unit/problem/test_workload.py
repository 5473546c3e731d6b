"""The examples of the full run and the rows they make, computed by hand."""

import math
from dataclasses import replace

import pytest

from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import PROBED_ROWS, Workload


@pytest.mark.parametrize(
    ("examples", "epochs", "batch", "steps"),
    [(10_000, 1, 32, 313), (10_000, 3, 32, 939), (64, 1, 32, 2), (65, 2, 32, 6), (1, 1, 32, 1), (33, 1, 1, 33)],
)
def test_a_smaller_last_batch_is_a_step(examples, epochs, batch, steps):
    workload = Workload(examples=examples, epochs=epochs, global_batch=batch)
    assert workload.run_shape(TrainConfig(micro_batch_size=1)).num_steps == steps


def test_the_global_batch_is_kept():
    workload = Workload(global_batch=24)
    assert [
        workload.run_shape(TrainConfig(micro_batch_size=size)).accumulation for size in (1, 2, 3, 4, 6, 8, 12, 24)
    ] == [*(24, 12, 8, 6, 4, 3, 2, 1)]
    for size in (5, 7, 16, 48):
        with pytest.raises(ValueError, match=f"micro batch {size} does not divide the global batch 24"):
            workload.run_shape(TrainConfig(micro_batch_size=size))


@pytest.mark.parametrize(
    ("length", "seq_len", "useful", "cut", "fill"),
    [(1024, 512, 512, 0.5, 1.0), (1024, 1024, 1024, 0.0, 1.0), (768, 1024, 768, 0.0, 0.75), (1000, 990, 990, 0.01, 1)],
)
def test_padding_and_truncation(length, seq_len, useful, cut, fill):
    workload = Workload(lengths=Lengths.constant(length))
    assert workload.useful_tokens_per_row(TrainConfig(seq_len=seq_len)) == useful
    assert workload.truncated(seq_len) == pytest.approx(cut)
    assert workload.fill(TrainConfig(seq_len=seq_len)) == pytest.approx(fill)


@pytest.mark.parametrize("name", ["examples", "epochs", "global_batch"])
@pytest.mark.parametrize("value", [0, -1, -(10**30), -math.inf])
def test_counts_below_one_are_errors(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, not "):
        Workload(**{name: value})


BY_HAND = Lengths.of([7, 6, 5, 5, 5, 3, 3, 2, 1, 12], "counted")  # packed by hand in test_packing.py
PACKED = TrainConfig(seq_len=10, micro_batch_size=1, packing=True)


def test_packed_rows_hold_several_examples_and_a_step_takes_fewer_of_them() -> None:
    workload = Workload(examples=10, epochs=2, lengths=BY_HAND, global_batch=8)
    assert workload.examples_per_row(PACKED) == 2  # 10 examples in 5 rows
    assert workload.useful_tokens_per_row(PACKED) == (49 - 2) / 5
    assert workload.fill(PACKED) == pytest.approx(0.94)
    assert [workload.run_shape(replace(PACKED, micro_batch_size=size)).accumulation for size in (1, 2, 4, 3, 16)] == [
        4,
        2,
        1,
        1,
        1,
    ]
    assert workload.run_shape(replace(PACKED, micro_batch_size=3)).examples_per_step == 6  # as near as whole rows allow
    assert workload.run_shape(PACKED).num_steps == 2 * 2  # 4 rows, then 1
    alone = replace(PACKED, packing=False)
    assert (workload.fill(alone), workload.run_shape(alone).num_steps) == (pytest.approx(0.47), 2 * 2)


def test_one_known_length_stands_for_all_examples() -> None:
    """One length was given, of many examples: they share rows all the same."""
    workload = Workload(examples=10_000, lengths=Lengths.constant(3))
    assert workload.examples_per_row(PACKED) == pytest.approx(3, rel=1e-3)


def test_probed_rows_represent_all_rows() -> None:
    workload = Workload(lengths=Lengths.of([10] * 75 + [5] * 50, "counted"))
    kinds = workload.micro_batches(PACKED)
    rows = [row for kind in kinds for row in kind.rows]
    assert rows[:2] == [(5, 5), (10,)]  # with a mask, and without: both are compiled and weighed at the start
    assert sorted(rows) == [(5, 5)] * 2 + [(10,)] * 6 and len(rows) == PROBED_ROWS
    assert {(kind.length, kind.share) for kind in kinds} == {(10, 1 / 8)}
    by_three = workload.micro_batches(replace(PACKED, micro_batch_size=3))
    assert [kind.rows for kind in by_three] == [tuple(rows[:3]), tuple(rows[3:6]), (*rows[6:], rows[0])]
    assert sum(kind.share for kind in by_three) == pytest.approx(1)


def test_padded_rows_have_the_lengths_of_the_examples_and_full_rows_are_left_out() -> None:
    config = TrainConfig(seq_len=1024, micro_batch_size=4)
    (kind,) = Workload(lengths=Lengths.of([100] * 50 + [500] * 25 + [4000] * 25, "counted")).micro_batches(config)
    assert sorted(kind.rows) == [(100,), (100,), (500,), (1024,)]
    assert (kind.length, kind.share) == (1024, 1)
    assert Workload(lengths=Lengths.constant(1024)).micro_batches(config) == ()
    assert Workload(lengths=Lengths.constant(5000)).micro_batches(config) == ()
    (short,) = Workload(lengths=Lengths.constant(1)).micro_batches(config)
    assert set(short.rows) == {(2,)}  # one has no loss


@pytest.mark.parametrize(
    ("examples", "share", "held_out"), [(1000, 0.05, 50), (1000, 0.0501, 51), (3, 0.1, 1), (1, 0.5, 0), (1000, 0.0, 0)]
)
def test_held_out_examples_are_not_trained_on(examples: int, share: float, held_out: int) -> None:
    workload = Workload(examples=examples, eval_share=share, global_batch=1)
    assert (workload.held_out(), workload.trained) == (held_out, examples - held_out)
    assert workload.run_shape(TrainConfig(micro_batch_size=1)).num_steps == examples - held_out
    assert workload.held_out(2 * examples) == min(math.ceil(2 * examples * share), 2 * examples - 1)
