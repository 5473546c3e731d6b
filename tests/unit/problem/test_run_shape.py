"""The rules about steps: global batch, number of steps, micro batches of a probe, for one device
and for several.
"""

from dataclasses import replace

import pytest

from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import RunShape, Workload

SHAPE = RunShape(
    micro_batch_size=4,
    accumulation=3,
    world_size=2,
    tokens_per_row=100.0,
    examples_per_row=2.5,
    useful_tokens_per_row=90.0,
    examples=1000,
    epochs=2,
)


def test_a_step_has_the_rows_of_all_micro_batches_of_all_devices() -> None:
    assert SHAPE.rows_per_step == 24
    assert SHAPE.examples_per_step == 60
    assert SHAPE.tokens_per_step == 2400
    assert SHAPE.useful_tokens_per_step == 2160


def test_the_last_step_of_an_epoch_may_be_smaller() -> None:
    assert SHAPE.num_steps == 2 * 17
    assert replace(SHAPE, epochs=0.5).num_steps == 9


@pytest.mark.parametrize(
    ("accumulation", "probed", "confirmed"), [(1, 1, 1), (2, 2, 2), (3, 2, 3), (16, 2, 4)]
)
def test_probes_accumulate_only_if_the_run_does(
    accumulation: int, probed: int, confirmed: int
) -> None:
    shape = replace(SHAPE, accumulation=accumulation)
    assert (shape.probe_micro_steps, shape.confirmation_micro_steps) == (probed, confirmed)


def test_several_devices_share_the_global_batch() -> None:
    workload = Workload(global_batch=32)
    shape = workload.run_shape(TrainConfig(micro_batch_size=4), world_size=2)
    assert (shape.accumulation, shape.rows_per_step, shape.examples_per_step) == (4, 32, 32)
    with pytest.raises(
        ValueError, match="micro batch 8 on each of 3 devices does not divide the global batch 32"
    ):
        workload.run_shape(TrainConfig(micro_batch_size=8), world_size=3)


def test_several_devices_share_packed_rows() -> None:
    workload = Workload(examples=100, lengths=Lengths.constant(500), global_batch=32)
    config = TrainConfig(micro_batch_size=2, seq_len=1000, packing=True)
    assert workload.run_shape(config, world_size=4).accumulation == 2
    assert workload.run_shape(config, world_size=4).examples_per_step == 32


def test_a_given_accumulation_replaces_the_global_batch() -> None:
    shape = Workload(global_batch=32).run_shape(TrainConfig(micro_batch_size=5), accumulation=3)
    assert shape.examples_per_step == 15
