"""Composes a GRPO step on one card from phases that were measured apart.

An engine and a training were measured in processes of their own. In a run of TRL, both are in one
process on the same card, and their phases follow each other. So seconds add up, and the memory of a
phase is the sum of both parts' memory in it.
"""

import statistics
from dataclasses import dataclass, replace

from autotune.core.probe_types import Measurement, Phase
from autotune.core.rollout_types import EngineMeasurement

OF_UPDATE = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """The seconds and the memory of a generation with its updates.

    Attributes:
        phase_s: The seconds of each phase, for one generation and all updates on it.
        phase_gib: The peak of the device's memory in each phase.
        prompts: The prompts of a generation.
    """

    phase_s: dict[Phase, float]
    phase_gib: dict[Phase, float]
    prompts: int

    @property
    def seconds(self) -> float:
        """The seconds of a generation with its updates."""
        return sum(self.phase_s.values())

    @property
    def prompts_per_s(self) -> float:
        """The prompts whose completions are generated and trained on, per second."""
        return self.prompts / self.seconds

    @property
    def peak(self) -> tuple[Phase, float]:
        """The phase with the largest peak, and this peak in GiB."""
        return max(self.phase_gib.items(), key=lambda item: item[1])


def compose(
    training: Measurement,
    engine: EngineMeasurement,
    *,
    sleeps: bool,
    prompts: int,
    accumulation: int,
    updates: int = 1,
) -> RolloutStep:
    """Compose the step of a layout.

    Args:
        training: the measurement of the training on given completions.
        engine: the measurement of the engine. An engine that can sleep has the same memory and
            speed while it is awake as an engine that cannot.
        sleeps: whether the engine sleeps while the model trains.
        prompts: the prompts of a generation.
        accumulation: the micro batches of an optimizer step.
        updates: the optimizer steps for each generation.

    Raises ValueError if the layout sleeps and the engine was measured without sleep.
    """
    if sleeps and not engine.asleep_gib:
        raise ValueError("this engine was measured without sleep")
    return RolloutStep(
        phase_s=_seconds(training, engine, sleeps, accumulation, updates),
        phase_gib=_memory(training, engine, sleeps),
        prompts=prompts,
    )


def _seconds(
    training: Measurement, engine: EngineMeasurement, sleeps: bool, accumulation: int, updates: int
) -> dict[Phase, float]:
    """The seconds of each phase.

    A measured step computes the probabilities of its own micro batches only, so that their time
    grows with the number of micro batches, like the update. The bookkeeping of a generation does
    not grow.
    """
    micros = accumulation * updates
    each = {
        phase: training.phase_s.get(phase, 0.0) / training.micro_steps * micros
        for phase in (Phase.ROLLOUT, Phase.LOG_PROBS)
    }
    rest_s = statistics.median(training.rest_s) if training.rest_s else 0.0
    micro_s = (statistics.median(training.step_s) - rest_s) / training.micro_steps
    update_s = micros * micro_s + updates * rest_s - sum(each.values())
    phases = {
        Phase.ROLLOUT: training.phase_s.get(Phase.ROLLOUT, 0.0)
        + statistics.median(engine.generate_s),
        Phase.LOG_PROBS: each[Phase.LOG_PROBS],
        Phase.UPDATE: update_s,
    }
    if engine.transfer_s:
        merge_s = training.merge_s or 0.0
        phases[Phase.TRANSFER] = statistics.median(engine.transfer_s) + merge_s
    if sleeps:
        phases[Phase.SLEEP] = statistics.median(engine.sleep_s)
        phases[Phase.WAKE] = statistics.median(engine.wake_s)
    return {phase: seconds for phase, seconds in phases.items() if seconds > 0}


def _memory(training: Measurement, engine: EngineMeasurement, sleeps: bool) -> dict[Phase, float]:
    """The device's memory at the peak of each phase.

    Without sleep, the allocator keeps the memory of the update during the generation. With sleep,
    TRL returns it before the engine wakes up.
    """
    context_gib = training.context_gib or 0.0
    awake_gib = max(engine.awake_gib)
    generating_gib = max(engine.peak_gib[Phase.ROLLOUT.value], awake_gib)
    if sleeps:
        resting_gib = max(training.between_gib[1:] or training.between_gib)
        beside_gib = max(engine.asleep_gib)
    else:
        resting_gib, beside_gib = training.peak_reserved_gib, awake_gib

    found = {Phase.ROLLOUT: context_gib + resting_gib + generating_gib}
    for phase in (Phase.LOG_PROBS, *OF_UPDATE):
        if phase in training.phase_reserved_gib:
            found[phase] = context_gib + training.phase_reserved_gib[phase] + beside_gib
    if engine.transfer_s:
        weights_gib = beside_gib + engine.weights_gib if sleeps else awake_gib
        found[Phase.TRANSFER] = context_gib + resting_gib + weights_gib
    return found


def compose_halves(
    training: Measurement,
    engine: EngineMeasurement,
    *,
    sleeps: bool,
    prompts: int,
    accumulation: int,
    updates: int = 1,
    link_gb_s: float | None = None,
) -> RolloutStep:
    """Compose the step of two GPUs that each generate and train half of the completions.

    The arguments of `compose` are for the whole generation. `link_gb_s` is the rate between
    the GPUs, which exchange their gradients after each update; None leaves this time out.

    Raises ValueError for the reason of `compose`, and if no half generation was measured.
    """
    if engine.half_s is None:
        raise ValueError("no half generation was measured")
    half = compose(
        training,
        replace(engine, generate_s=(engine.half_s,)),
        sleeps=sleeps,
        prompts=prompts,
        accumulation=max(accumulation // 2, 1),
        updates=updates,
    )
    sent_gib = updates * training.gradients_gib
    exchange_s = sent_gib * 2**30 / (link_gb_s * 1e9) if link_gb_s else 0.0
    return replace(
        half, phase_s=half.phase_s | {Phase.UPDATE: half.phase_s[Phase.UPDATE] + exchange_s}
    )


def compose_apart(
    training: Measurement,
    engine: EngineMeasurement,
    *,
    prompts: int,
    accumulation: int,
    updates: int = 1,
    link_gb_s: float | None = None,
) -> RolloutStep:
    """Compose the step of a GPU that trains and another that generates.

    One of them always waits for the other, as in TRL. The weights cross the link after each
    generation, at `link_gb_s`. The memory is the training GPU's.
    """
    whole = compose(
        training,
        replace(engine, awake_gib=(0.0,), peak_gib={Phase.ROLLOUT.value: 0.0}),
        sleeps=False,
        prompts=prompts,
        accumulation=accumulation,
        updates=updates,
    )
    sent_s = engine.weights_gib * 2**30 / (link_gb_s * 1e9) if link_gb_s else 0.0
    transfer_s = whole.phase_s.get(Phase.TRANSFER, 0.0) + sent_s
    return replace(whole, phase_s=whole.phase_s | {Phase.TRANSFER: transfer_s})
