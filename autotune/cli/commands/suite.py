"""A suite of named configurations: probed by `autotune run` in place of a search, estimated by `autotune plan`."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from autotune.core.files import write_atomic
from autotune.core.probe_types import Evidence, Outcome, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.planning.observations import Observation
from autotune.planning.plan import OOM, TIGHT, planned
from autotune.prediction.memory_formula import CONTEXT_GIB
from autotune.probe.supervisor import WorkerProber
from autotune.problem.study_spec import NamedConfig, StudySpec
from autotune.problem.task import Task
from autotune.study.evaluator import Evaluator
from autotune.study.named_configs import COLUMNS, ConfigResult, cases
from autotune.study.storage.probe_store import ProbeStore


def probe(
    spec: StudySpec,
    task: Task,
    prober: WorkerProber,
    store: ProbeStore,
    out: Path,
    *,
    memory_gib: float,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> list[ConfigResult]:
    """Each case in turn, with full rows, unless it is known already. What was probed is stored before it is told.

    Raises Cancelled where the user asked to stop in a probe.
    """
    told: list[ConfigResult] = []
    for case, config, own in cases(spec, task):
        if should_stop():
            break
        say(f"{case.name}: {config.label()}")

        def request(config: TrainConfig, own: Task = own) -> ProbeRequest:
            return ProbeRequest(
                config=config,
                model=own.model.config,
                weights=own.model.weights,
                device=prober.device,
                trainer=own.trainer,
                micro_steps=own.workload.run_shape(config).confirmation_micro_steps,
                min_timed_s=2.0,
                memory_gib=memory_gib,
                headroom=spec.headroom,
                seed=spec.seed,
            )

        evaluator = Evaluator(prober, store, study=own.study, logs=out / "logs", request=request, model=own.kin)
        told.append(of_probe(case, config, own, evaluator.evaluate(config, None).result))
        write(told, out)
    return told


def of_probe(case: NamedConfig, config: TrainConfig, task: Task, result: ProbeResult) -> ConfigResult:
    found = result.measurement
    evidence = Evidence.MEASURED if task.carried is None else Evidence.PROJECTED
    if result.outcome is not Outcome.OK or found is None:
        return ConfigResult(case=case, config=config, outcome=result.outcome, evidence=evidence, reason=result.reason)
    speed = task.performance(config, [found])
    return ConfigResult(
        case=case,
        config=config,
        outcome=result.outcome,
        evidence=evidence,
        tokens_per_s=speed.samples_per_second / task.workload.examples_per_row(config) * config.seq_len,
        samples_per_s=speed.samples_per_second,
        step_time_s=speed.step_time_s,
        peak_gib=found.peak_reserved_gib,
        whole_gib=found.peak_reserved_gib + found.managed_gib + found.context_gib,
    )


def estimate(spec: StudySpec, task: Task, limit_gib: float, seen: tuple[Observation, ...]) -> list[ConfigResult]:
    """Each case by formula."""
    told = []
    for case, config, own in cases(spec, task):
        one = planned(own, config, limit_gib, seen)
        if one is None:
            reason = "there is no formula for it"
            told.append(
                ConfigResult(
                    case=case, config=config, outcome=Outcome.REFUSED, evidence=Evidence.ESTIMATED, reason=reason
                )
            )
            continue
        shape = own.workload.run_shape(config)
        rows = None if one.samples_per_s is None else one.samples_per_s / shape.examples_per_row
        told.append(
            ConfigResult(
                case=case,
                config=config,
                outcome=Outcome.OOM if one.fits == OOM else Outcome.OK,
                evidence=Evidence.ESTIMATED,
                reason="too close to tell" if one.fits == TIGHT else None,
                tokens_per_s=None if rows is None else rows * config.seq_len,
                samples_per_s=one.samples_per_s,
                step_time_s=None if not rows else shape.rows_per_step / rows,
                peak_gib=one.footprint.peak_reserved_gib,
                whole_gib=one.footprint.peak_reserved_gib + CONTEXT_GIB,
            )
        )
    return told


def write(told: Iterable[ConfigResult], out: Path) -> None:
    """suite.json and suite.md."""
    rows = list(told)
    write_atomic(out / "suite.json", json.dumps([one.data() for one in rows], indent=1) + "\n")
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in one.cells()) + " |" for one in rows]
    write_atomic(out / "suite.md", "\n".join([*head, *body]) + "\n")
