"""Why the winner won: each of its knobs set back to the baseline's, alone, and probed on truncated depths.

The winner itself is probed in the same way beside them, so that what is compared was found out alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from autotune.core.errors import EnvironmentProblem
from autotune.core.probe_types import Outcome, ProbeResult
from autotune.core.train_config import KNOBS, TrainConfig
from autotune.problem.task import Task
from autotune.study.evaluator import Evaluator
from autotune.study.explanation import AblatedKnob, Ablation


def set_back(winner: TrainConfig, baseline: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Each knob in which they differ, with the winner that has the baseline's value of it.

    What cannot stand alone, such as the second quantisation of a base that has no first, goes with the knob it needs.
    """
    for name in KNOBS:
        if (value := getattr(baseline, name)) != getattr(winner, name):
            alone = winner.as_dict() | {name: value}
            if name == "quantization":
                alone["double_quant"] = baseline.double_quant
            elif name == "double_quant" and winner.quantization != baseline.quantization:
                continue
            yield name, TrainConfig(**alone)


def explain(
    task: Task,
    evaluator: Evaluator,
    winner: TrainConfig,
    baseline: TrainConfig,
    *,
    say: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Ablation:
    """Probe what is not known yet. Where `should_stop` says so it ends with what there is.

    Raises EnvironmentProblem where the winner does not come through again.
    """
    found = evaluator.evaluate(winner, None).result
    if (own := told(task, "", found)).tokens_per_s is None:
        raise EnvironmentProblem(
            f"the winner did not come through this time: {found.reason or found.outcome}",
            remedy="see whether something else uses the device (`autotune doctor`)",
        )
    undone: list[AblatedKnob] = []
    for name, config in set_back(winner, baseline):
        if should_stop():
            break
        say(f"without {name} {getattr(winner, name)}: {config.label()}")
        undone.append(told(task, name, evaluator.evaluate(config, None).result))
        evaluator.forgive()
    return Ablation(winner=own, baseline=baseline, undone=tuple(undone))


def told(task: Task, knob: str, result: ProbeResult) -> AblatedKnob:
    """A probe's result as this study reads it."""
    found = result.measurement
    one = AblatedKnob(knob=knob, config=result.config, outcome=result.outcome, evidence=result.evidence)
    if result.oom is not None:
        one = replace(one, peak_gib=result.oom.need_gib, limit_gib=result.oom.limit_gib)
    if result.outcome is not Outcome.OK or found is None:
        return one
    speed, peak, limit = task.performance(result.config, [found]), found.peak_reserved_gib, found.limit_gib
    error = max(map(abs, speed.spread))
    return replace(one, tokens_per_s=speed.tokens_per_second, error=error, peak_gib=peak, limit_gib=limit)
