"""Ablation: reset one knob of the winner at a time to the baseline's value, and probe the result.

If possible, these probes use models with only a few layers (truncated models). For a fair
comparison, the winner itself is probed again in the same way.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.core.errors import UnsteadyMachine
from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Evidence, Outcome, ProbeResult, weakest
from autotune.core.train_config import TrainConfig
from autotune.prediction.projection import run_performance
from autotune.problem.disturbance import assumes_quiet
from autotune.problem.performance import DISAGREEMENT
from autotune.problem.task import Task

if TYPE_CHECKING:
    from autotune.study.evaluator import Evaluator

QUIET = "stop other work on this machine, then run the command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class AblatedKnob:
    """The winner with one knob set back to the baseline's value.

    `error` is the relative error of `tokens_per_s`. `peak_gib` is the peak of the reserved memory
    or, if the probe ran out of memory, the memory that the probe needed.
    """

    knob: str
    config: TrainConfig
    outcome: Outcome
    evidence: Evidence
    tokens_per_s: float | None = None
    error: float = 0.0
    peak_gib: float | None = None
    limit_gib: float | None = None

    @property
    def too_large(self) -> bool:
        """Whether the winner no longer fits if this knob is reset."""
        return self.outcome in (Outcome.OOM, Outcome.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """The effect of each knob of the winner.

    `undone` holds one entry for each knob: the winner with only this knob reset.
    """

    winner: AblatedKnob
    baseline: TrainConfig
    undone: tuple[AblatedKnob, ...]

    def of(self, config: TrainConfig) -> bool:
        """Whether `config` is the winner that this ablation examined.

        If the study was continued after the ablation, `config` may be a newer winner.
        """
        return self.winner.config == config

    def ranked(self) -> list[AblatedKnob]:
        """Return the knobs, the most useful first.

        First come the knobs without which the winner does not fit in memory. Next come the knobs
        with a measured speed, beginning with the knob whose reset slows training most. Knobs
        without a result are last.
        """
        return sorted(
            self.undone,
            key=lambda knob: (
                knob.tokens_per_s is None and not knob.too_large,
                knob.tokens_per_s or 0.0,
            ),
        )


def ablated_configs(
    winner: TrainConfig, baseline: TrainConfig
) -> Iterator[tuple[str, TrainConfig]]:
    """Yield each knob that differs from the baseline, and the winner with this knob reset.

    A reset knob takes the baseline's value. Double quantisation needs quantisation, so these two
    knobs are reset together.
    """
    for name in KNOBS:
        value = getattr(baseline, name)
        if value == getattr(winner, name):
            continue

        changes = {name: value}
        if name == "quantization":
            changes["double_quant"] = baseline.double_quant
        elif name == "double_quant" and winner.quantization != baseline.quantization:
            continue

        config = TrainConfig(**winner.as_dict() | changes)
        # TrainConfig ignores the value of a knob without effect, such as `sharding` on one GPU, so
        # `config` may equal the winner.
        if config != winner:
            yield name, config


def ablate(
    task: Task,
    evaluator: "Evaluator",
    winner: TrainConfig,
    baseline: TrainConfig,
    *,
    say: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Ablation:
    """Probe the winner itself, then the winner with each knob reset, then the winner itself again.

    If `should_stop` returns True, the remaining knobs are left out. Raises UnsteadyMachine if a
    probe of the winner itself fails, or if the winner's two measured speeds differ by more than the
    measurement error.
    """
    evaluator = replace(evaluator, reuses=False)
    measured_winner = _ablated_winner(task, evaluator, winner)
    undone: list[AblatedKnob] = []
    for name, config in ablated_configs(winner, baseline):
        if should_stop():
            break
        # The changed configuration's micro batches may no longer divide the global batch.
        if not task.workload.divides(config):
            continue
        say(f"without {name} {getattr(winner, name)}: {config.label()}")
        undone.append(to_ablated_knob(task, name, evaluator.evaluate(config, None).result))
        evaluator.failures_in_a_row = 0

    if not (should_stop() or assumes_quiet()):
        _check_speed(measured_winner, _ablated_winner(task, evaluator, winner))
    return Ablation(winner=measured_winner, baseline=baseline, undone=tuple(undone))


def _ablated_winner(task: Task, evaluator: "Evaluator", winner: TrainConfig) -> AblatedKnob:
    """Probe the winner. Raises UnsteadyMachine if the probe yields no speed."""
    result = evaluator.evaluate(winner, None).result
    if result.disturbed is not None:
        raise UnsteadyMachine(
            f"the machine is too unsteady to compare speeds: {result.disturbed}", remedy=QUIET
        )
    measured = to_ablated_knob(task, "", result)
    if measured.tokens_per_s is None:
        raise UnsteadyMachine(
            f"the probe of the winner failed this time: {result.reason or result.outcome}",
            remedy="check whether another process uses the device (`autotune doctor`)",
        )
    return measured


def _check_speed(before: AblatedKnob, after: AblatedKnob) -> None:
    """Raise UnsteadyMachine if the winner's two speeds differ by more than their error."""
    speeds = [one.tokens_per_s or 0.0 for one in (before, after)]
    difference = max(speeds) / min(speeds) - 1
    if difference > max(DISAGREEMENT, math.hypot(before.error, after.error)):
        raise UnsteadyMachine(
            "the machine is too unsteady to compare speeds: two probes of the winner differ by "
            f"{difference:.0%}",
            remedy=QUIET,
        )


def to_ablated_knob(task: Task, knob: str, result: ProbeResult) -> AblatedKnob:
    """Convert a probe's result to an entry of the ablation."""
    measurement = result.measurement
    evidence = result.evidence
    if task.is_projected(result.config):
        evidence = weakest(evidence, Evidence.PROJECTED)
    ablated = AblatedKnob(
        knob=knob, config=result.config, outcome=result.outcome, evidence=evidence
    )

    if result.oom is not None:
        ablated = replace(ablated, peak_gib=result.oom.need_gib, limit_gib=result.oom.limit_gib)
    if result.outcome is not Outcome.OK or measurement is None:
        return ablated

    ablated = replace(
        ablated, peak_gib=measurement.peak_reserved_gib, limit_gib=measurement.limit_gib
    )
    if result.disturbed is not None:
        return ablated
    performance = run_performance(task, result.config, [measurement])
    return replace(
        ablated,
        tokens_per_s=performance.tokens_per_second,
        error=max(map(abs, performance.spread)),
    )
