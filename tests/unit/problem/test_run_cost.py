"""Hours, USD and kWh of the full run, by hand; what is unknown stays unknown."""

import math
from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import Price, resolve_device
from autotune.core.probe_types import Evidence, Measurement
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import Performance
from autotune.problem.run_cost import TABLE_EXAMPLES, Pauses, checkpoint_gib, project, run_cost
from autotune.problem.run_options import RunOptions
from autotune.problem.workload import Workload
from tests.helpers.factories import calibration, measurement

PRICE = Price(provider="p", device="d", usd_per_hour=3.0, spot_usd_per_hour=1.25, source="s")
# 100 steps an epoch of 36 s: an hour a pass.
WORKLOAD = Workload(examples=3200, epochs=2, global_batch=32)
SPEED = Performance(
    samples_per_second=32 / 36,
    tokens_per_second=1000.0,
    step_time_s=36.0,
    spread=(-0.1, 0.25),
    mfu=None,
)


def test_by_hand():
    cost = project(WORKLOAD, TrainConfig(), SPEED, PRICE, 700.0)
    assert (cost.examples, cost.epochs, cost.num_steps) == (3200, 2, 200)
    assert cost.full_run_hours == pytest.approx(2.0)
    assert cost.interval_hours == pytest.approx((1.8, 2.5))
    assert cost.usd_per_hour == 3.0
    assert cost.full_run_usd == pytest.approx(6.0)
    assert cost.interval_usd == pytest.approx((5.4, 7.5))
    # Four times half an hour until the next save, a restart of 10 minutes, one loss a day
    hours = 4 * math.exp(1 / 24 / 6) * math.expm1(1 / 24 / 2) * 24
    assert cost.spot_usd == pytest.approx(1.25 * hours) and 2.0 < hours < 2.04
    assert cost.cost_per_1000_samples_usd == pytest.approx(1000 / 3200 * 3.0)
    assert cost.kwh == pytest.approx(1.4)
    assert cost.evidence is Evidence.MEASURED


def test_a_pass_that_does_not_fill_a_step_takes_the_time_of_its_micro_batches():
    """10 examples fill 2 of the 4 micro batches of a step with 32 examples."""
    few = replace(WORKLOAD, examples=10)
    cost = project(few, TrainConfig(micro_batch_size=8), SPEED, PRICE)
    assert cost.num_steps == 2 and cost.full_run_hours == pytest.approx(2 * 36 / 2 / 3600)
    whole = project(replace(few, global_batch=8), TrainConfig(micro_batch_size=8), SPEED, PRICE)
    assert whole.num_steps == 4 and whole.full_run_hours == pytest.approx(4 * 36 / 3600)


@pytest.mark.parametrize(
    ("examples", "size", "epochs", "num_steps", "steps", "whole"),
    [
        (3216, 8, 2, None, 202, 201.0),  # 100 steps of 4 micro batches, and one of 2
        (3216, 32, 2, None, 202, 202.0),  # the last step has its only micro batch
        (3217, 8, 1, None, 101, 100.75),  # a micro batch with one example takes a whole one's time
        (3216, 8, 2, 100, 100, 100.0),
        (3216, 8, 2, 101, 101, 100.5),
        (3216, 8, 2, 150, 150, 149.5),  # the end of the first pass, and 49 steps of the second
        (3200, 8, 2, None, 200, 200.0),
    ],
)
def test_the_last_step_of_each_pass_takes_the_time_of_its_micro_batches(
    examples: int, size: int, epochs: int, num_steps: int | None, steps: int, whole: float
) -> None:
    workload = Workload(examples=examples, epochs=epochs, global_batch=32)
    shape = workload.run_shape(TrainConfig(micro_batch_size=size))
    cost = run_cost(shape, SPEED, PRICE, num_steps=num_steps)
    assert cost.num_steps == steps and shape.whole_steps(num_steps) == pytest.approx(whole)
    assert cost.full_run_hours == pytest.approx(whole * 36 / 3600)


def test_without_price_and_power():
    cost = project(WORKLOAD, TrainConfig(), SPEED, None)
    assert cost.full_run_hours == pytest.approx(2.0)
    unknown = (cost.usd_per_hour, cost.full_run_usd, cost.interval_usd, cost.spot_usd, cost.kwh)
    assert unknown == (None,) * 5
    assert cost.cost_per_1000_samples_usd is None


def test_a_price_of_zero_is_a_known_price():
    cost = project(
        WORKLOAD,
        TrainConfig(),
        SPEED,
        replace(PRICE, usd_per_hour=0.0, spot_usd_per_hour=None),
        0.0,
    )
    assert (cost.full_run_usd, cost.interval_usd, cost.cost_per_1000_samples_usd) == (
        0.0,
        (0.0, 0.0),
        0.0,
    )
    assert cost.spot_usd is None
    assert cost.kwh == 0.0


@pytest.mark.parametrize(
    ("gpu", "interval", "observations", "guess"),
    [
        ("t4", (1.0, 2.0), 0, True),
        ("t4", (1.0, 2.0), 1, False),
        ("t4", None, 0, False),
        ("a100-80gb", (1.0, 2.0), 0, False),
    ],
)
def test_a_speed_of_a_kind_of_card_that_nobody_measured_is_a_guess(
    gpu: str, interval: tuple[float, float] | None, observations: int, guess: bool
) -> None:
    estimate = Estimate(
        device=resolve_device(gpu),
        config=TrainConfig(),
        state="fits",
        need_gib=1.0,
        limit_gib=2.0,
        interval=interval,
        num_observations=observations,
    )
    assert estimate.is_guess is guess


def test_the_table_of_sizes():
    table = [
        project(WORKLOAD, TrainConfig(), SPEED, PRICE, 700.0, examples=size)
        for size in TABLE_EXAMPLES
    ]
    assert [cost.examples for cost in table] == [10_000, 50_000, 100_000]
    assert [cost.num_steps for cost in table] == [2 * 313, 2 * 1563, 2 * 3125]
    assert [cost.full_run_usd for cost in table] == pytest.approx([6.25 * 3, 31.25 * 3, 62.5 * 3])
    assert [cost.cost_per_1000_samples_usd for cost in table] == pytest.approx([0.9375] * 3)


def test_other_sizes_of_the_dataset_take_steps_like_the_measured_ones() -> None:
    """Fifty examples fill their rows worse than ten thousand would: the step that was measured is
    theirs.
    """
    lengths = Lengths.of([100] * 30 + [300] * 13 + [700] * 5 + [2000] * 2, "counted")
    workload = Workload(examples=50, lengths=lengths, global_batch=32)
    config = TrainConfig(seq_len=2048, micro_batch_size=2, packing=True)
    speed = Performance(
        samples_per_second=10.0, tokens_per_second=1.0, step_time_s=3.0, spread=(0, 0), mfu=None
    )
    small, large = (
        project(workload, config, speed, None, examples=size) for size in (10_000, 50_000)
    )
    assert small.num_steps == math.ceil(10_000 / workload.run_shape(config).examples_per_step)
    assert large.full_run_hours == pytest.approx(5 * small.full_run_hours, rel=1e-2)


def test_examples_that_are_held_out_take_no_training_step() -> None:
    half = replace(WORKLOAD, eval_share=0.5)
    costs = [project(half, TrainConfig(), SPEED, None, examples=size) for size in (None, 1600)]
    assert [(cost.examples, cost.num_steps) for cost in costs] == [(3200, 100), (1600, 50)]


def measured(**changes: Any) -> Measurement:
    return measurement(adapters_gib=1.0, optimizer_gib=2.0, managed_gib=0.5, **changes)


def test_evaluations_and_checkpoints_count_as_they_were_measured() -> None:
    """100 steps of 36 s: evaluations after 40, 80 and 100 steps, checkpoints after 30, 60, 90 and
    100.
    """
    # 11 held out, 3,200 trained on
    workload = replace(WORKLOAD, examples=3211, epochs=1, eval_share=0.0034)
    options = RunOptions(eval_steps=40, save_steps=30)
    config = TrainConfig(micro_batch_size=4)  # 3 micro batches hold 11 examples
    known = [measured(evaluation_s=30.0, checkpoint_s=90.0), measured()]
    cost = project(workload, config, SPEED, PRICE, 1000.0, options=options, measurements=known)
    pauses = cost.pauses
    assert pauses is not None and (pauses.num_evaluations, pauses.num_checkpoints) == (3, 4)
    assert (pauses.evaluation_s, pauses.checkpoint_s) == (3 * 3 * 30.0, 4 * 90.0)
    assert pauses.disk_gib == 3 * 3.5  # two are kept, and one more is written
    assert cost.full_run_hours == pytest.approx(1 + 630 / 3600)
    assert cost.interval_hours == pytest.approx((0.9 + 630 / 3600, 1.25 + 630 / 3600))
    assert (
        cost.full_run_usd == pytest.approx(3 * cost.full_run_hours)
        and cost.kwh == cost.full_run_hours
    )
    assert cost.left_out == ("start-up",)


def test_pauses_that_were_not_measured_are_unknown_and_left_out() -> None:
    workload = replace(WORKLOAD, eval_share=0.5)
    cost = project(
        workload, TrainConfig(), SPEED, PRICE, options=RunOptions(), measurements=[measured()]
    )
    assert cost.pauses is not None and (cost.pauses.evaluation_s, cost.pauses.checkpoint_s) == (
        None,
        None,
    )
    assert cost.full_run_hours == pytest.approx(1) and cost.left_out == (
        "start-up",
        "checkpoint saves",
        "evaluation",
    )
    estimated = project(workload, TrainConfig(), SPEED, PRICE)
    assert estimated.pauses is None and estimated.left_out == cost.left_out
    nothing = project(
        WORKLOAD, TrainConfig(), SPEED, PRICE, options=RunOptions(), measurements=[measured()]
    )
    assert nothing.pauses is not None and nothing.pauses.num_evaluations == 0
    assert nothing.left_out == ("start-up", "checkpoint saves")


def test_packed_examples_are_evaluated_in_packed_rows() -> None:
    """Four examples of 256 tokens share a row: 100 of them fill 25 rows, which are 7 micro batches
    of 4.
    """
    workload = Workload(
        examples=3300, lengths=Lengths.constant(256), eval_share=100 / 3300, global_batch=32
    )
    config = TrainConfig(seq_len=1024, micro_batch_size=4, packing=True)
    known = [measured(evaluation_s=1.0)]
    cost = project(
        workload, config, SPEED, None, options=RunOptions(save_steps=9999), measurements=known
    )
    assert cost.pauses is not None and cost.pauses.evaluation_s == 7.0


def test_a_margin_is_negative_where_there_is_room() -> None:
    device = resolve_device("t4")
    estimate = Estimate(
        device=device, config=TrainConfig(), state="fits", need_gib=3.0, limit_gib=4.0
    )
    assert estimate.margin == -0.25 and replace(estimate, need_gib=5.0).margin == 0.25
    assert estimate.calibrated is None and not estimate.is_guess
    assert replace(estimate, interval=(1.0, 2.0)).is_guess  # nobody measured this kind
    calibrated = replace(estimate, interval=(1.0, 2.0), calibration=calibration("t4"))
    assert not calibrated.is_guess and (calibrated.calibrated or "").startswith(
        "GPU and host calibrated"
    )


def test_the_first_steps_of_a_run_cost_their_part_of_it() -> None:
    shape = WORKLOAD.run_shape(TrainConfig())
    cost = run_cost(shape, SPEED, PRICE, 700.0, num_steps=50)
    assert (cost.examples, cost.epochs, cost.num_steps) == (3200, 2, 50)
    assert cost.full_run_hours == pytest.approx(0.5) and cost.full_run_usd == pytest.approx(1.5)
    assert run_cost(shape, SPEED, PRICE, num_steps=0).full_run_hours == 0.0


def test_what_is_known_of_pauses_counts() -> None:
    pauses = Pauses(
        num_evaluations=2,
        evaluation_s=None,
        num_checkpoints=1,
        checkpoint_s=900.0,
        checkpoint_gib=1.5,
    )
    assert pauses.known_s == 900.0 and pauses.disk_gib == 1.5  # a single one is on the disk
    assert replace(pauses, evaluation_s=60.0).known_s == 960.0
    assert replace(pauses, evaluation_s=60.0, checkpoint_s=None).known_s == 60.0
    assert replace(pauses, num_checkpoints=9).disk_gib == 4.5
    shape = WORKLOAD.run_shape(TrainConfig())
    cost = run_cost(shape, SPEED, PRICE, num_steps=100, pauses=pauses)
    assert cost.full_run_hours == pytest.approx(1.25) and cost.left_out == (
        "start-up",
        "evaluation",
    )
    unsaved = replace(cost, pauses=replace(pauses, evaluation_s=1.0, checkpoint_s=None))
    assert unsaved.left_out == ("start-up", "checkpoint saves")


def test_of_what_several_probes_measured_the_median_time_and_the_largest_checkpoint_count() -> None:
    """Eleven evaluated examples are three micro batches of four; one evaluation and one checkpoint,
    at the end.
    """
    workload = replace(WORKLOAD, examples=3211, epochs=1, eval_share=0.0034)
    options = RunOptions(eval_steps=100, save_steps=100)
    known = [
        measured(evaluation_s=seconds, checkpoint_s=10 * seconds) for seconds in (1.0, 2.0, 9.0)
    ]
    known[0] = replace(known[0], optimizer_gib=4.0)
    config = TrainConfig(micro_batch_size=4)
    pauses = project(workload, config, SPEED, None, options=options, measurements=known).pauses
    assert pauses is not None and (pauses.num_evaluations, pauses.num_checkpoints) == (1, 1)
    assert (pauses.evaluation_s, pauses.checkpoint_s) == (6.0, 20.0)
    assert (
        pauses.checkpoint_gib == max(one.checkpoint_gib for one in known) > known[1].checkpoint_gib
    )
    # nothing was measured
    assert project(workload, config, SPEED, None, options=options).pauses is None
    assert project(workload, config, SPEED, None, measurements=known).pauses is None


def test_a_run_that_waits_for_its_host_is_as_uncertain_as_the_host() -> None:
    """The same host is up to 15 % faster or slower another time; what the device takes is not."""

    def ends(*shares: float | None, on_cpu: bool = False) -> list[float]:
        known, speed = (
            [measured(host_share=share) for share in shares],
            replace(SPEED, spread=(-0.02, 0.05)),
        )
        found = project(WORKLOAD, TrainConfig(), speed, None, measurements=known, on_cpu=on_cpu)
        return [limit / found.full_run_hours for limit in found.interval_hours]

    assert ends() == ends(None) == ends(0.0) == pytest.approx([0.98, 1.05])
    assert ends(1.0) == pytest.approx([0.85, 1.15])
    assert ends(0.2, 0.4, 1.0) == pytest.approx([0.94, 1.06])
    assert ends(on_cpu=True) == ends(0.5, on_cpu=True) == pytest.approx([0.8, 1.2])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("ddp", 10 + 20), ("fsdp2", 4 * (10 + 20)), ("zero2", 10 + 4 * 20), ("zero3", 4 * (10 + 20))],
)
def test_a_checkpoint_has_what_each_rank_holds_of_it(strategy: str, expected: float) -> None:
    """Weights that every rank has count once, shares as often as there are ranks."""
    measured = measurement(model_gib=10.0, adapters_gib=0.0, optimizer_gib=20.0)
    assert (
        checkpoint_gib(TrainConfig(method="full", num_gpus=4, sharding=strategy), measured)
        == expected
    )
    in_host = measurement(model_gib=0.0, adapters_gib=0.0, optimizer_gib=0.0, in_host_gib=30.0)
    assert (
        checkpoint_gib(
            TrainConfig(method="full", num_gpus=4, sharding="fsdp2", offload=True), in_host
        )
        == 120
    )
