"""A suite of named configurations: probed by `autotune run` in place of a search, estimated by `autotune plan`."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from autotune.config import TrainConfig
from autotune.estimate import CONTEXT_GIB
from autotune.files import write_atomic
from autotune.ladder import Ladder
from autotune.plan import OOM, TIGHT, planned
from autotune.probe.launcher import WorkerProber
from autotune.result import Evidence, Outcome, ProbeRequest, ProbeResult
from autotune.spec import Case, StudySpec
from autotune.store import ProbeStore
from autotune.subject import Subject
from autotune.submission import Sighting
from autotune.suite import COLUMNS, Told, cases


def probe(
    spec: StudySpec,
    subject: Subject,
    prober: WorkerProber,
    store: ProbeStore,
    out: Path,
    *,
    memory_gib: float,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> list[Told]:
    """Each case in turn, with full rows, unless it is known already. What was probed is stored before it is told.

    Raises Cancelled where the user asked to stop in a probe.
    """
    told: list[Told] = []
    for case, config, own in cases(spec, subject):
        if should_stop():
            break
        say(f"{case.name}: {config.label()}")

        def request(config: TrainConfig, own: Subject = own) -> ProbeRequest:
            return ProbeRequest(
                config=config,
                model=own.model.config,
                weights=own.model.weights,
                device=prober.device,
                trainer=own.trainer,
                micro_steps=min(own.workload.accumulation(config), 4),
                min_timed_s=2.0,
                memory_gib=memory_gib,
                headroom=spec.headroom,
                seed=spec.seed,
            )

        ladder = Ladder(prober, store, study=own.study, logs=out / "logs", request=request, model=own.kin)
        told.append(of_probe(case, config, own, ladder.evaluate(config, None).result))
        write(told, out)
    return told


def of_probe(case: Case, config: TrainConfig, subject: Subject, result: ProbeResult) -> Told:
    found = result.measurement
    evidence = Evidence.MEASURED if subject.carried is None else Evidence.PROJECTED
    if result.outcome is not Outcome.OK or found is None:
        return Told(case=case, config=config, outcome=result.outcome, evidence=evidence, reason=result.reason)
    speed = subject.performance(config, [found])
    return Told(
        case=case,
        config=config,
        outcome=result.outcome,
        evidence=evidence,
        tokens_per_s=speed.samples_per_second / subject.workload.examples_per_row(config) * config.seq_len,
        samples_per_s=speed.samples_per_second,
        step_time_s=speed.step_time_s,
        peak_gib=found.peak_reserved_gib,
        whole_gib=found.peak_reserved_gib + found.managed_gib + found.context_gib,
    )


def estimate(spec: StudySpec, subject: Subject, limit_gib: float, seen: tuple[Sighting, ...]) -> list[Told]:
    """Each case by formula."""
    told = []
    for case, config, own in cases(spec, subject):
        one = planned(own, config, limit_gib, seen)
        if one is None:
            reason = "there is no formula for it"
            told.append(
                Told(case=case, config=config, outcome=Outcome.REFUSED, evidence=Evidence.ESTIMATED, reason=reason)
            )
            continue
        rows = None if one.samples_per_s is None else one.samples_per_s / own.workload.examples_per_row(config)
        told.append(
            Told(
                case=case,
                config=config,
                outcome=Outcome.OOM if one.fits == OOM else Outcome.OK,
                evidence=Evidence.ESTIMATED,
                reason="too close to tell" if one.fits == TIGHT else None,
                tokens_per_s=None if rows is None else rows * config.seq_len,
                samples_per_s=one.samples_per_s,
                step_time_s=None if not rows else own.workload.accumulation(config) * config.micro_batch_size / rows,
                peak_gib=one.footprint.peak_reserved_gib,
                whole_gib=one.footprint.peak_reserved_gib + CONTEXT_GIB,
            )
        )
    return told


def write(told: Iterable[Told], out: Path) -> None:
    """suite.json and suite.md."""
    rows = list(told)
    write_atomic(out / "suite.json", json.dumps([one.data() for one in rows], indent=1) + "\n")
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in one.cells()) + " |" for one in rows]
    write_atomic(out / "suite.md", "\n".join([*head, *body]) + "\n")
