"""What the full run must process, computed by hand."""

import math

import pytest

from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload


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
def test_nothing_is_less_than_one(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, not "):
        Workload(**{name: value})
