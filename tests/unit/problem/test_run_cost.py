"""Hours, USD and kWh of the full run, by hand; what is unknown stays unknown."""

import math
from dataclasses import replace

import pytest

from autotune.catalog import Price
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import Performance
from autotune.problem.run_cost import TABLE_EXAMPLES, project
from autotune.problem.workload import Workload

PRICE = Price(provider="p", device="d", usd_per_hour=3.0, spot_usd_per_hour=1.0, source="s")
# 100 steps an epoch of 36 s: an hour a pass.
WORKLOAD = Workload(examples=3200, epochs=2, global_batch=32)
SPEED = Performance(
    samples_per_second=32 / 36, tokens_per_second=1000.0, step_time_s=36.0, spread=(-0.1, 0.25), mfu=None
)


def test_by_hand():
    cost = project(WORKLOAD, TrainConfig(), SPEED, PRICE, 700.0)
    assert (cost.examples, cost.epochs, cost.num_steps) == (3200, 2, 200)
    assert cost.full_run_hours == pytest.approx(2.0)
    assert cost.interval_hours == pytest.approx((1.8, 2.5))
    assert cost.usd_per_hour == 3.0
    assert cost.full_run_usd == pytest.approx(6.0)
    assert cost.interval_usd == pytest.approx((5.4, 7.5))
    assert cost.spot_usd == pytest.approx(2.0)
    assert cost.cost_per_1000_samples_usd == pytest.approx(1000 / 3200 * 3.0)
    assert cost.kwh == pytest.approx(1.4)
    assert cost.evidence is Evidence.MEASURED


def test_without_price_and_power():
    cost = project(WORKLOAD, TrainConfig(), SPEED, None)
    assert cost.full_run_hours == pytest.approx(2.0)
    unknown = (cost.usd_per_hour, cost.full_run_usd, cost.interval_usd, cost.spot_usd, cost.kwh)
    assert unknown == (None,) * 5
    assert cost.cost_per_1000_samples_usd is None


def test_a_price_of_zero_is_a_known_price():
    cost = project(WORKLOAD, TrainConfig(), SPEED, replace(PRICE, usd_per_hour=0.0, spot_usd_per_hour=None), 0.0)
    assert (cost.full_run_usd, cost.interval_usd, cost.cost_per_1000_samples_usd) == (0.0, (0.0, 0.0), 0.0)
    assert cost.spot_usd is None
    assert cost.kwh == 0.0


def test_the_table_of_sizes():
    table = [project(WORKLOAD, TrainConfig(), SPEED, PRICE, 700.0, examples=size) for size in TABLE_EXAMPLES]
    assert [cost.examples for cost in table] == [10_000, 50_000, 100_000]
    assert [cost.num_steps for cost in table] == [2 * 313, 2 * 1563, 2 * 3125]
    assert [cost.full_run_usd for cost in table] == pytest.approx([6.26 * 3, 31.26 * 3, 62.5 * 3])
    assert [cost.cost_per_1000_samples_usd for cost in table] == pytest.approx([0.9375] * 3)


def test_other_sizes_of_the_dataset_take_steps_like_the_measured_ones() -> None:
    """Fifty examples fill their rows worse than ten thousand would: the step that was measured is theirs."""
    lengths = Lengths.of([100] * 30 + [300] * 13 + [700] * 5 + [2000] * 2, "counted")
    workload = Workload(examples=50, lengths=lengths, global_batch=32)
    config = TrainConfig(seq_len=2048, micro_batch_size=2, packing=True)
    speed = Performance(samples_per_second=10.0, tokens_per_second=1.0, step_time_s=3.0, spread=(0, 0), mfu=None)
    small, large = (project(workload, config, speed, None, examples=size) for size in (10_000, 50_000))
    assert small.num_steps == math.ceil(10_000 / workload.run_shape(config).examples_per_step)
    assert large.full_run_hours == pytest.approx(5 * small.full_run_hours, rel=1e-2)


def test_examples_that_are_held_out_take_no_training_step() -> None:
    half = replace(WORKLOAD, eval_share=0.5)
    costs = [project(half, TrainConfig(), SPEED, None, examples=size) for size in (None, 1600)]
    assert [(cost.examples, cost.num_steps) for cost in costs] == [(3200, 100), (1600, 50)]
