"""A GRPO step that is composed of an engine and a training, measured apart."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.probe_types import Measurement, Phase
from autotune.core.rollout_types import EngineMeasurement
from autotune.prediction.rollout_step import RolloutStep, compose

ENGINE = EngineMeasurement(
    engine="vllm 0.23.0",
    start_s={"total": 90.0},
    generate_s=(9.0, 11.0),
    tokens=38_400,
    cached_tokens=60_000,
    transfer_s=(0.5, 0.7, 0.6),
    sleep_s=(0.2, 0.2),
    wake_s=(0.3, 0.3),
    peak_gib={"rollout": 21.0},
    awake_gib=(20.0, 20.5),
    asleep_gib=(1.0, 1.2),
    weights_gib=8.0,
)


def training(**changes: Any) -> Measurement:
    """Two micro batches in a step of 5 s: 1 s is the optimizer's, 1 s is for probabilities."""
    found = Measurement(
        step_s=(5.0, 5.0),
        micro_step_s=(2.5, 1.5),
        rest_s=(1.0, 1.0),
        micro_steps=2,
        phase_s={Phase.ROLLOUT: 0.1, Phase.LOG_PROBS: 1.0},
        phase_peak_gib={},
        model_gib=8.0,
        adapters_gib=0.2,
        gradients_gib=0.2,
        optimizer_gib=0.4,
        peak_allocated_gib=29.0,
        peak_reserved_gib=30.0,
        limit_gib=70.0,
        context_gib=1.0,
        loss_first=0.1,
        loss_last=0.1,
        trainable_params=1,
        total_params=2,
        phase_reserved_gib={Phase.LOG_PROBS: 12.0, Phase.FORWARD: 28.0, Phase.BACKWARD: 30.0},
        between_gib=(8.0, 9.0, 9.5),
        merge_s=0.1,
    )
    return replace(found, **changes)


def step(*, sleeps: bool, accumulation: int = 4, updates: int = 1) -> RolloutStep:
    return compose(
        training(), ENGINE, sleeps=sleeps, prompts=8, accumulation=accumulation, updates=updates
    )


def test_seconds_add_up_and_grow_with_the_micro_batches() -> None:
    found = step(sleeps=False)
    # the bookkeeping of a generation, whatever its number of micro batches
    bookkeeping_s = found.phase_s[Phase.ROLLOUT] - 10
    assert bookkeeping_s == pytest.approx(0.1)
    assert found.phase_s[Phase.LOG_PROBS] == pytest.approx(4 * 0.5)
    assert found.phase_s[Phase.TRANSFER] == pytest.approx(0.7)
    # four micro batches of 2 s, without the two parts above, and the optimizer's second
    assert found.phase_s[Phase.UPDATE] == pytest.approx(4 * 2 - 4 * 0.55 + 1)
    assert found.seconds == pytest.approx(10 + 0.7 + 4 * 2 + 1 - bookkeeping_s)
    assert found.prompts_per_s == pytest.approx(8 / found.seconds)


def test_two_updates_for_a_generation_double_only_the_training() -> None:
    assert step(sleeps=False, updates=2).seconds == pytest.approx(
        10.1 + 0.7 + 2 * (4 * 2 + 1 - 4 * 0.05)
    )


def test_without_sleep_the_engine_and_the_freed_memory_of_the_update_are_always_there() -> None:
    found = step(sleeps=False)
    assert found.phase_gib[Phase.BACKWARD] == pytest.approx(1 + 30 + 20.5)
    assert found.phase_gib[Phase.ROLLOUT] == pytest.approx(1 + 30 + 21)
    assert found.peak[0] is Phase.ROLLOUT


def test_a_sleeping_engine_leaves_its_memory_to_the_training() -> None:
    found = step(sleeps=True)
    assert found.phase_gib[Phase.BACKWARD] == pytest.approx(1 + 30 + 1.2)
    assert found.phase_gib[Phase.ROLLOUT] == pytest.approx(1 + 9.5 + 21)
    assert found.phase_gib[Phase.TRANSFER] == pytest.approx(1 + 9.5 + 1.2 + 8)
    slower = found.seconds - step(sleeps=False).seconds
    assert slower == pytest.approx(0.5)


def test_an_engine_that_never_slept_tells_nothing_about_sleep() -> None:
    awake = replace(ENGINE, asleep_gib=())
    with pytest.raises(ValueError, match="without sleep"):
        compose(training(), awake, sleeps=True, prompts=8, accumulation=4)


def test_a_model_that_generates_itself_gets_no_weights() -> None:
    own = replace(ENGINE, transfer_s=(), sleep_s=(), wake_s=(), asleep_gib=())
    found = compose(training(), own, sleeps=False, prompts=8, accumulation=4)
    assert Phase.TRANSFER not in found.phase_s
    assert Phase.TRANSFER not in found.phase_gib
