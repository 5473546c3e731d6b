"""`autotune run`: sets a study up, searches, confirms, writes the files and prints the winner."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.commands.local import further_cards, local_workers, refuse_another
from autotune.cli.commands.on_ray import check, ray_workers
from autotune.cli.console import Display
from autotune.cli.stop import Stop
from autotune.core.errors import EnvironmentProblem, Interrupted, TooManyFailures, UsageError, VerificationFailed
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, parse_duration
from autotune.prediction.depth_extrapolation import depths
from autotune.probe.supervisor import WorkerProber
from autotune.problem.setup import Setup, open_reserve, set_up, suit
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target, find_target
from autotune.report import describe
from autotune.report.study_directory import TrialLog, prepare, write_study
from autotune.study.storage.location import locked, shared_url, storage_url, study_directory
from autotune.study.summary import Quality, StudySummary, TrialRecord

if TYPE_CHECKING:
    from autotune.study.storage.probe_store import ProbeStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One call of the command, resolved: what is tuned on what, where it is kept, and how long it may take."""

    spec: StudySpec
    setup: Setup
    target: Target
    url: str
    out: Path
    cards: Sequence[int | str | None]  # of the other workers
    started: float
    budget_s: float

    @property
    def study(self) -> str:
        return self.setup.task.study


def run(spec: StudySpec, *, as_json: bool = False, quiet: bool = False, events: bool = False) -> str:
    """Run or continue a study, and return its name. Raises AutotuneError for everything a user can act on."""
    plan, stop = _resolve(spec, quiet=quiet), Stop()
    with (
        stop.listening(),
        locked(plan.out, plan.study),
        WorkerProber("cpu" if plan.target.card is None else "cuda", plan.out / "logs", should_stop=stop) as prober,
        Display(budget_s=plan.budget_s, quiet=quiet, events=events) as display,
    ):
        prober.launch()  # imports torch meanwhile
        with stop.ending():
            _run(plan, prober, display, stop, as_json=as_json)
    if stop.signal is not None:
        raise Interrupted(
            "stopped; what was found so far is kept",
            remedy=f"continue with the same command and --study {plan.study}",
            exit_code=128 + stop.signal,
        )
    return plan.study


def _resolve(spec: StudySpec, *, quiet: bool = False) -> RunPlan:
    """Everything that can be wrong without a GPU second spent is found here."""
    started = time.monotonic()
    try:
        budget_s = parse_duration(spec.budget)
    except ValueError as error:
        raise UsageError(f"--budget: {error}", remedy="for example --budget 15m") from None
    target = find_target(spec.gpu)
    if spec.quality and spec.shallow_only:
        raise UsageError("--quality trains the whole model, --shallow-only none", remedy="leave one of them out")
    if spec.configs and (spec.quality or spec.shallow_only or spec.verify):
        raise UsageError("configs are probed as they are", remedy="leave --quality, --verify and --shallow-only out")
    if spec.verify and (spec.shallow_only or target.here is not None):
        raise UsageError(
            "--verify runs what is exported on the device itself", remedy="leave out --verify, or --shallow-only"
        )
    searched = replace(spec, pins={}, configs=()) if spec.configs else spec
    setup = set_up(searched, target, (lambda text: None) if quiet else partial(print, file=sys.stderr))
    if target.here is not None:
        from autotune.cli.commands.catalogs import print_note
        from autotune.planning.device_estimate import corrected_by_observations
        from autotune.planning.observations import known_observations

        setup = replace(setup, task=corrected_by_observations(setup.task, known_observations(say=print_note)))
    if spec.quality:
        from autotune.export.run.quality import impossible

        if spec.trainer != "transformers":
            raise UsageError(
                "--quality trains with transformers' Trainer", remedy="leave --quality out, or --trainer trl"
            )
        if reason := impossible(setup.task.model, setup.task.workload, spec.dataset):
            raise UsageError(f"--quality cannot run: {reason}", remedy="give what it needs, or leave --quality out")
    check(spec.ray)
    url = storage_url(spec.storage) if spec.workers == 1 and spec.ray is None else shared_url(spec.storage)
    if spec.study is None:
        name = setup.task.study if not spec.configs else f"{setup.task.study}-suite"
        setup = replace(setup, task=replace(setup.task, study=name if spec.configs else _unused(name, url)))
    cards = further_cards(spec.workers, cpu=target.card is None)
    out = study_directory(spec.out, setup.task.study).absolute()
    prepare(out)
    return RunPlan(
        spec=spec, setup=setup, target=target, url=url, out=out, cards=cards, started=started, budget_s=budget_s
    )


def _run(plan: RunPlan, prober: WorkerProber, display: Display, stop: Stop, *, as_json: bool) -> None:
    """Search, confirm, write, print. Raises Cancelled where a stop leaves nothing to write."""
    from autotune.export.run.quality import compare
    from autotune.export.run.verify import verify
    from autotune.planning.other_devices import winner_on_other_devices
    from autotune.study.evaluator import Evaluator
    from autotune.study.feasibility import find_feasible
    from autotune.study.history import summarize
    from autotune.study.loop import Study
    from autotune.study.optimizer import Optimizer
    from autotune.study.storage.database import Outages, waiting_s
    from autotune.study.storage.leases import Leases, Worker
    from autotune.study.storage.optuna_storage import read_record
    from autotune.study.storage.probe_store import ProbeStore
    from autotune.study.storage.study_record import (
        Limits,
        ProbeTerms,
        StudyPhase,
        StudyRecord,
        start_record,
        update_record,
    )

    spec, setup, out, name = plan.spec, plan.setup, plan.out, plan.study
    outages = Outages(partial(display.note, style="yellow"), stop, seconds=waiting_s())
    store = ProbeStore(plan.url, outbox=out / "outbox.jsonl", outages=outages)
    before = read_record(plan.url, name)
    # One ratio for all sessions, or values would not compare.
    if before is not None and setup.task.carried is not None:
        setup = replace(setup, task=replace(setup.task, carried=before.task.carried))
    display.say("starting the probe worker")
    fingerprint = prober.fingerprint
    memory_gib = _memory(spec, plan.target, prober.memory_gib, display)
    if spec.configs:
        _suite(plan, prober, store, memory_gib, display, stop, as_json=as_json)
        return
    shape = prober.describe(setup.task.model.config)
    if spec.shallow_only and (shape is None or depths(shape, None) is None):
        raise UsageError(
            "--shallow-only: this model's layers cannot be left out: too few, or no two alike",
            remedy="leave --shallow-only out",
        )
    setup = suit(setup, shape)
    display.plan(setup, fits_gib=memory_gib, trials=spec.trials, workers=spec.workers)

    terms = ProbeTerms(memory_gib=memory_gib, headroom=spec.headroom, seed=spec.seed)

    def request(config: TrainConfig) -> ProbeRequest:
        return terms.request(setup.task, config, prober.device)

    evaluator = Evaluator(
        prober,
        store,
        study=name,
        logs=out / "logs",
        request=request,
        model=setup.task.model_key,
        shape=shape,
        shallow_only=spec.shallow_only,
    )
    evaluator.learn_from_others()
    opened = before is not None and before.reserve_opened
    tried: list[TrainConfig] = []
    if before is None or before.limits is None:
        opened, tried = find_feasible(
            setup.task,
            setup.reserve,
            evaluator,
            display.say,
            lambda: time.monotonic() - plan.started >= plan.budget_s,
        )
    if opened:
        display.note("nothing else fits: quantised bases and other optimizers are searched too", "yellow")
        setup = open_reserve(setup)
    search = Optimizer.create(plan.url, name, setup.task.space, seed=spec.seed, outages=outages)
    record = StudyRecord(
        task=setup.task,
        fingerprint=fingerprint,
        terms=terms,
        spec=replace(spec, storage=None),  # without the password that may be in there
        out=str(out),
        reserve_opened=opened,
        shallow_only=spec.shallow_only,
    )
    start_record(search, record)
    limits = Limits(budget_s=plan.budget_s, trials=spec.trials, patience=spec.patience)
    earlier_s, failure = before.wall_seconds if before else 0.0, None
    me = Worker.here(fingerprint.device, leads=True)
    with Leases(plan.url, name, me, outages=outages).joined() as coordinator:
        refuse_another(coordinator, name, display.say)
        study = Study(
            setup.task,
            search,
            evaluator,
            limits,
            plan.started,
            say=display.say,
            should_stop=stop,
            coordinator=coordinator,
        )
        study.trials.new_rows = partial(store.new_rows, name)
        study.resume(store.of_study(name))
        log = TrialLog(out, study.rows)

        def on_trial(row: TrialRecord) -> None:
            log.add(row)
            update_record(search, wall_seconds=earlier_s + time.monotonic() - plan.started)
            display.trial(row)

        study.trials.on_trial = study.trials.on_trial_of_others = on_trial
        study.begin(tried)
        update_record(search, limits=limits, earlier_seconds=earlier_s, phase=StudyPhase.SEARCHING)
        try:
            with (
                local_workers(plan.cards, name, plan.url, out, display, stop),
                ray_workers(spec.ray, name, plan.url, setup.task.device, display, stop),
            ):
                study.run()
                update_record(search, phase=StudyPhase.CONFIRMING)  # and the others leave
            study.trials.sync(reap=True)
            if not stop() and not spec.shallow_only:
                study.confirm()
        except (TooManyFailures, EnvironmentProblem) as error:
            failure = error  # told once what was found so far is written
        finally:
            update_record(search, phase=StudyPhase.ENDED)
            study.trials.reap()
            update_record(search, wall_seconds=earlier_s + time.monotonic() - plan.started)
    display.say("writing the report")

    def summed_up(quality: Quality | None) -> StudySummary:
        return summarize(
            study.rows,
            study.selection,
            fingerprint,
            store.of_study(name),
            cards=winner_on_other_devices(spec.headroom),
            wall_seconds=earlier_s + time.monotonic() - plan.started,
            others_seconds=now.others_seconds if (now := read_record(plan.url, name)) else 0.0,
            importances=search.importances(),
            quality=quality,
            verification=verified,
            explanation=before.ablation if before else None,
        )

    verified = before.verification if before else None
    summary = summed_up(before.quality if before else None)
    data = write_study(out, summary)
    if spec.quality and spec.dataset and summary.recipe is not None and failure is None and not stop():
        prober.close()  # its memory is wanted
        others = [study.selection.candidate(config) for config in study.selection.finalists(limits.finalists)]
        try:
            quality = compare(summary.recipe, others, Path(spec.dataset).expanduser(), out, display.say, stop)
        except (UsageError, OSError) as error:
            display.note(f"--quality could not run: {error}", "yellow")
        else:
            if quality.learned:  # not stopped in the first
                update_record(search, quality=quality)
                summary = summed_up(quality)
                data = write_study(out, summary)
            update_record(search, wall_seconds=earlier_s + time.monotonic() - plan.started)
    if spec.verify and summary.recipe is not None and failure is None and not stop():
        prober.close()
        verified = verify(summary.recipe, out, say=display.say, should_stop=stop)
        update_record(search, verification=verified)
        summary = summed_up(summary.quality)
        data = write_study(out, summary)
    display.result(summary, _short(out))
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
    if failure is not None:
        raise failure
    if spec.verify and verified is not None and not stop() and (reason := describe.failed_verification(verified)):
        raise VerificationFailed(reason, remedy=f"read {_short(out)}/logs/verify.log, and run it again")
    if summary.recipe is None and not stop():
        raise TooManyFailures(
            "no configuration came through", remedy=f"see {_short(out)}/oom_report.md and {_short(out)}/logs"
        )


def _suite(
    plan: RunPlan,
    prober: WorkerProber,
    store: "ProbeStore",
    memory_gib: float,
    display: Display,
    stop: Stop,
    *,
    as_json: bool,
) -> None:
    """Probe the named configurations, and print them beside what was published."""
    from autotune.cli.commands.catalogs import print_table
    from autotune.study.named_configs import COLUMNS, probe_configs

    say = display.say
    task, out = plan.setup.task, plan.out
    told = probe_configs(plan.spec, task, prober, store, out, memory_gib=memory_gib, say=say, should_stop=stop)
    if as_json:
        sys.stdout.write(json.dumps([one.data() for one in told]) + "\n")
    elif not display.configs([one.data() for one in told]):
        print_table(None, dict(COLUMNS), [one.cells() for one in told])
        display.note(f"written: {_short(out)}/suite.md and suite.json")


def _unused(name: str, url: str) -> str:
    """`name`, or with the first number behind it that no study of this database has."""
    from autotune.study.storage.optuna_storage import study_names

    taken = set(study_names(url))
    return next(one for one in (name, *(f"{name}-{number}" for number in range(2, 10_000))) if one not in taken)


def _memory(spec: StudySpec, target: Target, total_gib: float, display: Display) -> float:
    """GiB that a run may use of the device. Prints what other processes hold of it."""
    if held := target.held_by_others_gib:
        display.note(f"others hold {fmt_gib(held)} of this GPU: {target.other_processes()}", "yellow")
    budget = target.memory_budget(
        total_gib, reserve_fraction=spec.headroom, asked_gib=spec.memory_gib, may_exceed=spec.shallow_only
    )
    return budget.cap_gib


def _short(path: Path) -> str:
    """Relative to here where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
