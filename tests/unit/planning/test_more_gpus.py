"""The winner's run on other numbers of GPUs: the study's own row is what it knows, others are
scaled from it.
"""

from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.planning.more_gpus import Scaling, project_gpu_counts
from autotune.prediction.estimate import memory_of
from autotune.problem.run_cost import FITS
from autotune.problem.workload import Lengths
from autotune.study.summary import Recipe
from tests.unit.export.test_script import recipe


def winner(**knobs: Any) -> Recipe:
    return recipe(TrainConfig(**({"micro_batch_size": 4} | knobs)), device=resolve_device("h200"))


def row_of(found: Scaling, number: int) -> Any:
    return next(row for row in found.rows if row.num_gpus == number)


def test_what_is_measured_stands_and_others_are_scaled_from_it() -> None:
    made = winner()
    found = project_gpu_counts(made)
    assert [row.num_gpus for row in found.rows] == [1, 2, 4, 8] and found.own == 1
    own, two = row_of(found, 1), row_of(found, 2)
    speed = made.winner.performance.tokens_per_second
    assert own.tokens_per_s == speed and own.usd == made.winner.cost.full_run_usd
    assert own.interval[0] < speed < own.interval[1]
    assert own.efficiency == 1.0 and found.waits(own) == 0.0
    assert 0.9 < two.efficiency < 1.0 and two.tokens_per_s == pytest.approx(
        2 * speed * two.efficiency
    )
    assert two.estimate.cost.evidence is Evidence.PROJECTED
    assert two.estimate.cost.usd_per_hour == pytest.approx(2 * made.price.usd_per_hour)  # type: ignore[union-attr]
    low, high = two.interval
    # the same micro batch was measured
    assert low < two.tokens_per_s < high < 1.1 * two.tokens_per_s
    assert [row.accumulation for row in found.rows] == [8, 4, 2, 1]


def test_twice_the_time_is_twice_the_time_on_any_number() -> None:
    made = winner()
    performance = replace(
        made.winner.performance, step_time_s=2 * made.winner.performance.step_time_s
    )
    slower = project_gpu_counts(replace(made, winner=replace(made.winner, performance=performance)))
    fast, slow = row_of(project_gpu_counts(made), 2), row_of(slower, 2)
    assert slow.parallelism == fast.parallelism
    computed = (
        slow.step.step_s - slow.step.communication_s,
        fast.step.step_s - fast.step.communication_s,
    )
    assert computed[0] == pytest.approx(2 * computed[1], rel=0.01)


def test_a_study_of_two_gpus_is_scaled_both_ways() -> None:
    made = winner(method="full", num_gpus=2, sharding="fsdp2", optimizer="adamw_torch_fused")
    found = project_gpu_counts(made)
    assert (
        found.own == 2
        and row_of(found, 2).tokens_per_s == made.winner.performance.tokens_per_second
    )
    one, eight = row_of(found, 1), row_of(found, 8)
    assert one.estimate.cost.usd_per_hour == pytest.approx(made.price.usd_per_hour / 2)  # type: ignore[union-attr]
    assert one.parallelism.strategy == "none" and eight.parallelism.strategy in (
        "ddp",
        "fsdp2",
        "fsdp2_keep",
    )
    memory = memory_of(
        made.model, replace(made.config, num_gpus=8, sharding=eight.parallelism.strategy)
    )
    assert memory is not None and eight.estimate.need_gib < one.estimate.need_gib
    assert one.efficiency == 1.0 and found.waits(row_of(found, 2)) > 0


def test_the_micro_batch_shrinks_where_the_global_batch_has_no_room_for_it() -> None:
    found = project_gpu_counts(winner(micro_batch_size=16))  # of a global batch of 32
    sizes = {
        row.num_gpus: row.estimate.config.micro_batch_size for row in found.rows if row.estimate
    }
    assert sizes == {1: 16, 2: 16, 4: 8, 8: 4}
    same, smaller = row_of(found, 2), row_of(found, 4)
    # that was not measured
    assert smaller.interval[1] / smaller.interval[0] > same.interval[1] / same.interval[0]
    odd = winner(micro_batch_size=1)
    three = replace(odd, workload=replace(odd.workload, global_batch=3))
    assert [row.problem for row in project_gpu_counts(three).rows] == [
        *(None, "a global batch of 3 cannot be divided over these GPUs"),
        *("a global batch of 3 cannot be divided over these GPUs",) * 2,
    ]


def test_packed_rows_keep_about_the_global_batch() -> None:
    made = winner(packing=True, seq_len=4096, micro_batch_size=1)
    # 8 rows of four examples
    made = replace(made, workload=replace(made.workload, lengths=Lengths.constant(1024)))
    for row in project_gpu_counts(made).rows:
        assert row.accumulation * row.num_gpus == 8
    two_rows = replace(made, workload=replace(made.workload, global_batch=8))
    problems = [row.problem is not None for row in project_gpu_counts(two_rows).rows]
    assert problems == [False, False, True, True]  # four GPUs would double the batch


def test_what_does_not_fit_has_no_speed_and_is_not_where_scaling_starts() -> None:
    made = winner(
        method="full",
        num_gpus=4,
        sharding="fsdp2",
        optimizer="adamw_torch_fused",
        precision="bf16_mixed",
    )
    limit = replace(made.winner.measurement, limit_gib=60.0)
    found = project_gpu_counts(replace(made, winner=replace(made.winner, measurement=limit)))
    assert row_of(found, 1).state != FITS and row_of(found, 1).tokens_per_s is None
    assert row_of(found, 1).efficiency is None
    assert found.trainable[0].efficiency == 1.0 and found.trainable[0].num_gpus > 1


def test_nothing_is_scaled_where_the_link_or_the_model_is_unknown() -> None:
    alone = resolve_device("rtx-4090-laptop")
    no_link = project_gpu_counts(replace(winner(), device=alone))
    assert [row.num_gpus for row in no_link.rows if row.tokens_per_s is not None] == [1]
    known = winner(num_gpus=2)
    assert project_gpu_counts(replace(known, device=alone)).rows == ()
    no_formula = replace(known, model=resolve_model("falcon-h1-1.5b"))
    assert project_gpu_counts(no_formula) == Scaling(own=2)
