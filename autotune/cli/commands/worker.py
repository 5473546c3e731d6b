"""`autotune worker`: takes part in a study that another process leads, on the GPU of this one."""

import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from autotune.cli.console import Display
from autotune.cli.stop import Stop
from autotune.core.errors import EnvironmentProblem, Interrupted, TooManyFailures, UsageError
from autotune.core.probe_types import ProbeRequest
from autotune.core.process import die_with_parent
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, parse_duration
from autotune.export.clusters import PREEMPTED
from autotune.probe.supervisor import WorkerProber
from autotune.problem.setup import slug
from autotune.problem.target import IGNORED_GIB, find_target
from autotune.problem.task import Task
from autotune.report.study_directory import prepare
from autotune.study.node_health import NodeMonitor
from autotune.study.storage.location import shared_url
from autotune.study.storage.study_record import StudyPhase, StudyRecord, add_worker_seconds
from autotune.study.summary import TrialRecord

if TYPE_CHECKING:
    from autotune.study.storage.probe_store import StoredProbe

LOOK_EVERY_S = 2.0


def command(
    study: str,
    storage: str | None,
    *,
    out: Path | None,
    allow_mixed: bool,
    parent: int | None,
    quiet: bool,
    wait: str | None = None,
) -> None:
    """Work on a study until whoever leads it has seen enough, or its limits are reached.

    `wait` is how long to wait for a study that was not begun yet, such as 15m.

    Raises:
        UsageError: no such study, or a database that machines cannot share.
        EnvironmentProblem: another kind of machine than the study's.
        TooManyFailures: this node is not like the others, or its probes keep failing.
        Interrupted: stopped by a signal; what was being probed is queued again. Exit 75 after SIGTERM.
    """
    if parent is not None:
        die_with_parent(parent, number=signal.SIGTERM)
    url = shared_url(storage)
    record = _begun(url, study, wait, quiet=quiet)
    assert record.limits is not None
    task = record.task
    device = _device(task, record.terms.memory_gib)
    # The one that leads wrote its directory down; on another host there is none of that name.
    home = Path(record.out)
    folder = (
        out or (home if home.is_dir() else Path("runs") / slug(study)) / f"worker-{socket.gethostname()}-{os.getpid()}"
    )
    prepare(folder)
    stop, budget_s = Stop(), record.limits.budget_s
    with (
        stop.listening(),
        WorkerProber(device, folder / "logs", should_stop=stop) as prober,
        Display(budget_s=budget_s, quiet=quiet) as display,
    ):
        prober.launch()
        with stop.ending():
            _work(url, study, task, record, prober, display, stop, folder, allow_mixed=allow_mixed)
    if stop.signal is not None:
        code = PREEMPTED if stop.signal == signal.SIGTERM else 128 + stop.signal
        raise Interrupted("stopped; what was being probed is queued again", exit_code=code)


def _begun(url: str, study: str, wait: str | None, *, quiet: bool) -> StudyRecord:
    """The record of a study whose search has begun. Raises UsageError."""
    from autotune.study.storage.optuna_storage import read_record

    try:
        until = time.monotonic() + (parse_duration(wait) if wait else 0.0)
    except ValueError as error:
        raise UsageError(f"--wait: {error}", remedy="for example --wait 15m") from None
    told = quiet
    while (record := read_record(url, study)) is None or record.limits is None:
        if time.monotonic() >= until:
            raise UsageError(
                f"there is no study {study!r} in this database that could be joined",
                remedy="start it with `autotune run --study NAME` and the same --storage, or --wait for it",
            )
        if not told:
            print(f"waiting {wait} at most for study {study!r} to begin", file=sys.stderr)
        told = True
        time.sleep(LOOK_EVERY_S)
    return record


def _work(
    url: str,
    name: str,
    task: Task,
    record: StudyRecord,
    prober: WorkerProber,
    display: Display,
    stop: Stop,
    folder: Path,
    *,
    allow_mixed: bool,
) -> None:
    from autotune.study.evaluator import Evaluator
    from autotune.study.loop import Study
    from autotune.study.optimizer import Optimizer
    from autotune.study.storage.database import Outages, waiting_s
    from autotune.study.storage.leases import Leases, Worker
    from autotune.study.storage.probe_store import ProbeStore

    display.say("starting the probe worker")
    fingerprint, theirs = prober.fingerprint, record.fingerprint
    if (differs := theirs.differences(fingerprint)) and not allow_mixed:
        raise EnvironmentProblem(
            f"this machine is not like the one that began the study: {'; '.join(differs)}",
            remedy="workers of one study need the same GPU and the same packages (--allow-mixed to try nevertheless)",
        )

    def request(config: TrainConfig) -> ProbeRequest:
        return record.terms.request(task, config, prober.device)

    outages = Outages(
        partial(display.note, style="yellow"), stop, seconds=waiting_s(), reached=True
    )  # its record was read
    store = ProbeStore(url, outbox=folder / "outbox.jsonl", outages=outages)
    evaluator = Evaluator(
        prober,
        store,
        study=name,
        logs=folder / "logs",
        request=request,
        model=task.model_key,
        shape=prober.describe(task.model.config),
        shallow_only=record.shallow_only,
    )
    evaluator.learn_from_others()
    me = Worker.here(fingerprint.device)
    seed = record.terms.seed + crc32(me.name.encode())
    search = Optimizer.create(url, name, task.space, seed=seed, outages=outages)
    assert record.limits is not None
    limits = record.limits
    begun = time.monotonic()
    started = begun - record.wall_seconds + record.earlier_seconds
    with Leases(url, name, me, outages=outages).joined() as coordinator:
        study = Study(
            task, search, evaluator, limits, started, say=display.say, should_stop=stop, coordinator=coordinator
        )
        study.resume(store.of_study(name))
        timed, log = task.device.kind != "cpu", folder / "logs" / "node.log"
        node = NodeMonitor(prober, store, study.selection, request, timed=timed, log=log)
        if (reasons := node.check()) and not allow_mixed:
            raise TooManyFailures(
                f"this node is not like the others: {'; '.join(reasons)}",
                remedy="see what else runs on it, its cooling and its clocks; --allow-mixed joins nevertheless",
            )

        def new_rows() -> "list[StoredProbe]":
            if node.is_due() and (reasons := node.check()):
                told = f"this node is not like the others any more: {'; '.join(reasons)}"
                if not allow_mixed:
                    raise TooManyFailures(told, remedy="see what else runs on it, its cooling and its clocks")
                display.note(told, "yellow")
            return store.new_rows(name)

        own: list[TrialRecord] = []

        def on_trial(row: TrialRecord) -> None:
            own.append(row)
            add_worker_seconds(search, me.name, time.monotonic() - begun)
            display.trial(row)

        study.trials.new_rows, study.trials.on_trial = new_rows, on_trial
        study.work(lambda: search.remembered("phase") != StudyPhase.SEARCHING)
        add_worker_seconds(search, me.name, time.monotonic() - begun)
        display.note(f"{len(own)} trials of study {name} were done here")


def _device(task: Task, memory_gib: float) -> str:
    """ "cpu" or "cuda". Raises EnvironmentProblem where the GPU here is another than the study's, or is not free."""
    probed_on = task.measured_on or task.device
    if probed_on.kind == "cpu":
        return "cpu"
    here = find_target("auto")
    if here.device.name != probed_on.name:
        raise EnvironmentProblem(
            f"the study is probed on {probed_on.name}, here is {here.device.name}",
            remedy="GPUs of different models never share a study: begin another one on this card",
        )
    assert here.card is not None
    free_gib = here.card.memory_gib - here.card.used_gib
    if free_gib < memory_gib - IGNORED_GIB:
        raise EnvironmentProblem(
            f"the study uses {fmt_gib(memory_gib)} of each card, and {fmt_gib(free_gib)} of this one are free",
            remedy="end what holds this GPU's memory",
        )
    return "cuda"
