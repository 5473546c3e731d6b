"""Studies on several GPUs: what they search, what they compare with, and what is refused before any
probe.
"""

from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import find_price, resolve_device
from autotune.core.errors import UsageError
from autotune.core.parallelism import PROBED, Parallelism
from autotune.core.probe_types import World
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import memory_breakdown
from autotune.problem.setup import Setup, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target
from autotune.problem.task import Task
from autotune.study.feasibility import leanest_of
from autotune.study.formula_seeds import formula_seeds

H100 = resolve_device("h100")


def setup_on(gpus: int | None, **asked: Any) -> Setup:
    return set_up(StudySpec(**({"model": "llama-3.1-8b", "gpus": gpus} | asked)), H100)


def task_on(gpus: int, **asked: Any) -> Task:
    return setup_on(gpus, **asked).task


def test_several_gpus_are_searched_by_what_probes_can_train() -> None:
    task = task_on(2, space="full")
    assert (task.numbers_of_gpus, task.space.choices("sharding")) == ((2,), PROBED)
    assert task_on(2, pins={"sharding": "fsdp2"}).space.choices("sharding") == ("fsdp2",)
    assert setup_on(None).task.numbers_of_gpus == task_on(1).numbers_of_gpus == (1,)
    assert task_on(1).space.knob("sharding") is None
    by_knob = setup_on(None, pins={"num_gpus": 4}).task
    assert (by_knob.numbers_of_gpus, by_knob.space.choices("sharding")) == ((4,), PROBED)


def test_the_global_batch_is_that_of_all_gpus() -> None:
    setup = setup_on(2, space="full")
    assert (
        "micro_batch_size 32: does not divide the global batch of 32 on each of 2 GPUs"
        " (--global-batch)" in map(str, setup.removals)
    )
    config = TrainConfig(micro_batch_size=8, num_gpus=2)
    shape = setup.task.workload.run_shape(config)
    assert (shape.accumulation, shape.world_size, shape.examples_per_step) == (2, 2, 32)
    alone = setup.task.workload.run_shape(replace(config, num_gpus=1))
    assert (alone.accumulation, alone.world_size) == (4, 1)


def test_the_baseline_shares_out_the_model_where_each_gpu_cannot_hold_it() -> None:
    found = task_on(2, space="full").baselines
    assert [(one.micro_batch_size, one.sharding) for one in found] == [
        *((size, "ddp") for size in (8, 4, 2, 1)),
        *((size, "fsdp2") for size in (8, 4, 2, 1)),
    ]
    assert {one.sharding for one in task_on(2, pins={"sharding": "fsdp2_keep"}).baselines} == {
        "fsdp2_keep"
    }


def test_a_price_is_that_of_all_gpus() -> None:
    task, one = task_on(4), find_price(H100.name)
    assert one is not None and task.price == one and task.search_price == one.multiply(4)
    assert task.search_price.usd_per_hour == 4 * one.usd_per_hour
    assert replace(one, spot_usd_per_hour=0.5).multiply(4).spot_usd_per_hour == 2.0
    assert replace(one, spot_usd_per_hour=None).multiply(2).spot_usd_per_hour is None


def test_what_no_way_to_share_can_train_is_not_searched() -> None:
    setup = setup_on(
        2, space="full", pins={"sharding": "fsdp2"}, allow_any_optimizer=True, allow_pure_bf16=True
    )
    assert not {"adamw_8bit", "paged_adamw_8bit", "adafactor"} & set(
        setup.task.space.choices("optimizer")
    )
    assert "fp16_mixed" not in setup.task.space.choices("precision")
    assert any("breaks the GPU's context" in str(removal) for removal in setup.removals)
    with pytest.raises(UsageError, match="FSDP2 loses the quantisation state of int8 weights"):
        setup_on(2, space="qlora", pins={"sharding": "fsdp2", "quantization": "int8"})
    shards = task_on(2, space="qlora", pins={"sharding": "fsdp2"}).space
    assert shards.choices("quantization") == ("nf4",)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"gpus": 2, "trainer": "trl"}, "--trainer trl is untested on several GPUs"),
        ({"gpus": "1,2", "trainer": "trl"}, "--trainer trl is untested on several GPUs"),
        ({"gpus": 9}, "up to 8 GPUs of one host"),
        ({"gpus": "two"}, "--gpus cannot be 'two'"),
        ({"within": "soon"}, "--within: "),
    ],
)
def test_what_is_not_probed_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        set_up(StudySpec(model="llama-3.1-8b", **asked), H100)


def test_a_card_stands_in_for_one_card_alone() -> None:
    target = Target(device=resolve_device("a10"), measured_on=H100)
    with pytest.raises(UsageError, match="h100-sxm can stand in for one a10, but not for several"):
        set_up(StudySpec(model="llama-3.1-8b", gpus=2), target)


def test_a_processor_has_ranks_of_ddp_alone() -> None:
    task = set_up(StudySpec(model="demo-3m", gpus=2), resolve_device("cpu")).task
    assert task.space.choices("sharding") == ("ddp",)


def test_ranks_of_a_study_are_real() -> None:
    task = task_on(2)
    config = TrainConfig(num_gpus=2, sharding="fsdp2")
    request = task.request(config, device="cuda", memory_gib=80.0, headroom=0.05, seed=0)
    assert request.world is World.REAL and request.has_real_ranks
    assert (
        request.parallelism == Parallelism(num_gpus=2, strategy="fsdp2") == Parallelism.of(config)
    )
    assert replace(request, config=replace(config, sharding="ddp")).digest != request.digest


def test_the_leanest_configuration_is_one_that_its_way_to_share_can_train() -> None:
    space = task_on(2, space="full", allow_any_optimizer=True).space
    found = leanest_of(space)
    assert [one.sharding for one in found] == ["fsdp2", "fsdp2_keep", "ddp"]
    assert not any(Parallelism.of(one).refusal(one) for one in found)
    assert found[2].optimizer in ("paged_adamw_8bit", "lion_8bit")
    in_4_bits = leanest_of(task_on(2, space="qlora").space)
    assert [one.sharding for one in in_4_bits] == ["fsdp2", "fsdp2_keep", "ddp"]
    assert not any(Parallelism.of(one).refusal(one) for one in in_4_bits)
    alone = task_on(1, space="full").space
    assert leanest_of(alone) == [alone.config(alone.leanest())]


def test_formulas_lead_to_a_shared_model_where_nothing_else_fits() -> None:
    task = task_on(2, space="full")
    seeds = list(formula_seeds(task, task.baselines[0], 74.0))
    assert seeds and all(one.sharding.startswith("fsdp2") for one in seeds)
    first = replace(seeds[0], num_gpus=1)
    alone = memory_breakdown(task.model, first, 2)
    assert alone is not None and alone.peak_gib > 100


def test_several_numbers_of_gpus_share_a_space() -> None:
    """What one of them can train stays; on one GPU there is nothing to share out; micro batches
    divide the batch.
    """
    for given in ("1,2,4", (4, 2, 1, 1)):
        made = setup_on(given, space="qlora")  # type: ignore[arg-type]
        task, reserved = made.task, made.reserve.knob("micro_batch_size")
        assert task.numbers_of_gpus == (1, 2, 4) and (task.probing_gpus, task.plays_ranks) == (
            4,
            False,
        )
        sharding, size = task.space.knob("sharding"), task.space.knob("micro_batch_size")
        assert sharding and sharding.when == {"num_gpus": [2, 4]} and size and size.divides == 32
        assert reserved and reserved.divides == 32
    assert task.space.choices("quantization") == ("nf4",)
    assert [(one.num_gpus, one.micro_batch_size, one.sharding) for one in task.baselines] == [
        *((1, size, "none") for size in (8, 4, 2, 1)),
        *((2, size, way) for way in ("ddp", "fsdp2") for size in (8, 4, 2, 1)),
        *((4, size, way) for way in ("ddp", "fsdp2") for size in (8, 4, 2, 1)),
    ]
    setup = set_up(StudySpec(model="llama-3.1-8b", gpus="1,3,4", global_batch=32), H100)
    assert setup.task.numbers_of_gpus == (1, 4)
    assert "num_gpus 3: do not divide the global batch of 32 (--global-batch)" in map(
        str, setup.removals
    )


def test_the_leanest_of_several_numbers_is_one_that_its_strategy_can_train() -> None:
    """One GPU could train by optimizers that fail under FSDP2."""
    space = setup_on("1,4", space="lora", allow_any_optimizer=True).task.space  # type: ignore[arg-type]
    alone, *shared = leanest_of(space)
    assert alone.num_gpus == 1 and {(one.num_gpus, one.sharding) for one in shared} == {
        (4, way) for way in PROBED
    }
    assert all(Parallelism.of(one).refusal(one) is None for one in shared)
    assert [one.num_gpus for one in leanest_of(setup_on(4, space="lora").task.space)] == [4, 4, 4]
