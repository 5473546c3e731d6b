"""One process's session of a study, with its prober and its database.

The session closes the prober and the connections at its end. `Leader` runs a study. `work` helps
with a study that another process leads. `explain` resets one knob of a winner at a time, and probes
the resulting configurations. A session first starts its worker process, which needs seconds to
import torch. Meanwhile, the session opens the database.
"""

import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from zlib import crc32

from autotune.catalog import DeviceSpec
from autotune.core.errors import (
    AutotuneError,
    Cancelled,
    EnvironmentProblem,
    NothingFits,
    TooManyFailures,
    UsageError,
)
from autotune.core.machine import num_cores
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.micro_profile import MicroBatchProfile
from autotune.core.nvml import visible
from autotune.core.objective import Objective
from autotune.core.probe_types import DeviceRates, Fingerprint, ModelShape, Outcome, ProbeRequest
from autotune.core.process import StopToken
from autotune.core.text import study_command
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, fmt_seconds
from autotune.prediction.depth_extrapolation import depths, depths_of
from autotune.prediction.estimate import memory_of
from autotune.prediction.memory_formula import MemoryBreakdown
from autotune.prediction.projection import run_performance
from autotune.probe.compile_ahead import CompileAhead, num_helpers
from autotune.probe.rank_pool import RankPool
from autotune.probe.supervisor import WorkerProber
from autotune.problem.setup import Setup, adapt_to_layers, open_reserve
from autotune.problem.target import IGNORED_GIB, find_target, is_product
from autotune.problem.task import Task
from autotune.study.ablation import Ablation, ablate
from autotune.study.decomposition import Decomposition, decompose
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.feasibility import Feasible, find_feasible
from autotune.study.formula_seeds import formula_seeds
from autotune.study.history import Project, restore, summarize
from autotune.study.lookahead import Lookahead, code_key, shallow_requests
from autotune.study.loop import Study
from autotune.study.neighbours import COMPILED, compiled_variants
from autotune.study.node_health import NodeMonitor
from autotune.study.nodes import Node, nodes_of
from autotune.study.optimizer import Optimizer
from autotune.study.preparation import SessionPlan
from autotune.study.progress import Progress, TextProgress
from autotune.study.selection import Selection
from autotune.study.storage.database import Outages, waiting_s
from autotune.study.storage.leases import Leases, Worker
from autotune.study.storage.location import from_stored_directory, to_stored_directory
from autotune.study.storage.optuna_storage import read_record, study_names
from autotune.study.storage.probe_store import ProbeStore, StoredProbe
from autotune.study.storage.study_record import (
    Limits,
    ProbeTerms,
    StudyPhase,
    StudyRecord,
    add_worker_seconds,
    start_record,
    update_record,
)
from autotune.study.summary import Candidate, StudySummary, TrialRecord
from autotune.study.worker_group import local_workers, ray_workers

JOIN_RETRY_S = 2.0
# The search repeats a disturbed probe only if the probe took at most this share of the budget.
REPEAT_SHARE = 0.1


class Session:
    """The prober and the database of one process, as a context manager that closes them.

    `folder` holds logs, and results that could not be written to the database yet. Probes end when
    the user asks to stop, or when time.monotonic() reaches `until`. `num_gpus` GPUs take part in
    each probe. `reached` is True if this process has reached the database before. In this case,
    even the session's first connection is retried if the database is unreachable.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        device: str,
        *,
        num_gpus: int = 1,
        stop: StopToken | None = None,
        progress: Progress | None = None,
        reached: bool = False,
    ) -> None:
        self.url = url
        self.folder = folder
        self.stop = stop or StopToken()
        self.progress: Progress = progress or TextProgress()
        note = partial(self.progress.note, style="yellow")
        self.outages = Outages(note, self.stop, seconds=waiting_s(), reached=reached)

        self.logs = folder / "logs"
        self.until = math.inf

        self.prober: WorkerProber | RankPool
        if num_gpus == 1:
            self.prober = WorkerProber(device, self.logs, should_stop=self.is_over)
        else:
            self.prober = RankPool(device, num_gpus, self.logs, should_stop=self.is_over)
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Start the prober, then open the store."""
        with ExitStack() as undo:
            undo.enter_context(self.prober)
            self.prober.launch()  # its worker process imports torch meanwhile

            me = Worker.this_process("").name
            outbox = self.folder / "outbox.jsonl"
            self.store = ProbeStore(self.url, outbox=outbox, outages=self.outages, node=me)
            undo.callback(self.store.close)
            self._opened = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Close everything."""
        self._opened.close()

    def is_over(self) -> bool:
        """Whether the user asked to stop, or the budget is used up."""
        return self.stop() or time.monotonic() >= self.until

    def start_prober(self) -> Fingerprint:
        """Wait until the prober has started, and return its device and packages."""
        self.progress.say("starting the probe worker, which loads PyTorch")
        return self.prober.fingerprint

    def compile_ahead(self, number: int) -> CompileAhead | None:
        """Start `number` processes that compile code in advance, and return their handle.

        The processes import torch at once, and end with this session. Returns None if `number` is
        0. Also returns None if the memory that other processes hold is unknown, because the
        worker's own memory would then be unknown, too.
        """
        prober = self.prober
        if number == 0 or not prober.knows_memory_of_others:
            return None
        ahead = prober.ahead = CompileAhead(prober.device, self.logs, number, num_cores())
        self._opened.callback(ahead.close)
        ahead.launch()
        return ahead

    def optimizer(self, name: str, task: Task, seed: int) -> Optimizer:
        """Return the optimizer of a study, and create the study if necessary.

        The optimizer is closed together with this session.
        """
        optimizer = Optimizer.create(self.url, name, task.space, seed=seed, outages=self.outages)
        self._opened.callback(optimizer.close)
        return optimizer

    def evaluator(
        self,
        task: Task,
        terms: ProbeTerms,
        *,
        study: str,
        shape: ModelShape | None,
        shallow_only: bool = False,
        fresh: bool = False,
        budget_s: float = math.inf,
    ) -> Evaluator:
        """Return an evaluator for a task; its probes are stored under the name `study`.

        If `fresh` is True, the evaluator reuses no results of other studies. In the search, it
        repeats no probe that took more than REPEAT_SHARE of `budget_s`.
        """
        # The constants of the memory formula were measured only for these combinations of trainer
        # and objective.
        measured = task.trainer == "transformers" or task.workload.objective is not Objective.SFT
        by_formula = task.device.kind != "cpu" and measured
        return Evaluator(
            self.prober,
            self.store,
            study=study,
            logs=self.logs,
            request=lambda config: terms.request(task, config, self.prober.device),
            model=task.model_key,
            formula=partial(_breakdown, task) if by_formula else lambda *_: None,
            shape=shape,
            shallow_only=shallow_only,
            studies=(task.study, _explain_study_name(task.study)) if fresh else (),
            repeat_s=REPEAT_SHARE * budget_s,
        )


def _explain_study_name(study: str) -> str:
    """Return the name under which `explain` stores its probes of a study."""
    return f"{study}, explained"


def _breakdown(task: Task, config: TrainConfig, micro_steps: int) -> MemoryBreakdown | None:
    """Predict a probe's memory with the formula; a simulated rank uses no memory for NCCL."""
    objective = task.workload.objective
    breakdown = memory_of(
        task.model, task.workload.with_mask(config), micro_steps, objective=objective
    )
    return (
        replace(breakdown, nccl=0.0)
        if breakdown is not None and task.is_simulated(config)
        else breakdown
    )


class Leader:
    """The process that leads a study: it searches, confirms, and keeps the study's record.

    `on_resumed` is called once, with the trials of earlier sessions. `on_trial` is called with each
    new trial when it ends. `failure` holds an error that ended the search early. The caller raises
    this error after it has written the results so far.
    """

    def __init__(
        self,
        session: Session,
        plan: SessionPlan,
        *,
        on_resumed: Callable[[list[TrialRecord]], None] = lambda rows: None,
        on_trial: Callable[[TrialRecord], None] = lambda row: None,
    ) -> None:
        self.session = session
        self.plan = plan
        self.on_resumed = on_resumed
        self.on_trial = on_trial
        self.failure: AutotuneError | None = None
        # These processes and the worker import their libraries at the same time.
        self._ahead = session.compile_ahead(self._num_ahead())
        self._before = read_record(plan.url, plan.study)  # the record of earlier sessions
        self._earlier_seconds = self._before.wall_seconds if self._before else 0.0
        session.until = plan.search_until
        self._fingerprint = session.start_prober()

        target = plan.target
        note = session.progress.note
        if target.held_by_others_gib:
            held = fmt_gib(target.held_by_others_gib)
            note(f"other processes hold {held} of this GPU: {target.other_processes()}", "yellow")

        self.memory_gib = target.memory_cap_gib(
            session.prober.memory_gib,
            asked_gib=self._asked_gib(),
            may_exceed=plan.spec.shallow_only,
        )

        held_gib = session.prober.context_gib if target.card is None else 0.0
        if self.memory_gib * (1 - plan.spec.headroom) <= held_gib:
            raise UsageError(
                f"--memory-gib {self.memory_gib:g} leaves nothing for tensors: "
                f"the libraries hold {fmt_gib(held_gib)}",
                remedy=f"give more than {fmt_gib(held_gib / (1 - plan.spec.headroom))}, "
                "or omit --memory-gib",
            )

        if plan.spec.dataset is not None:
            taken = fmt_seconds(plan.preparation_s)
            note(f"preparing the dataset took {taken}, which does not count against the budget")

    def _asked_gib(self) -> float | None:
        """The memory in GiB that the user allows.

        If the CPU simulates an example card, the result is the card's memory plus the memory that
        the libraries hold.
        """
        spec = self.plan.spec
        example_gib = self.plan.setup.task.example_gib
        if example_gib is None:
            return spec.memory_gib
        return round(example_gib + self.session.prober.context_gib / (1 - spec.headroom), 2)

    def search(self) -> None:
        """Search for the fastest configurations, and measure them again with all their layers.

        If no configuration fits, the study still stores the results so far.

        Raises:
            UsageError: another process leads the study, or a resumed study has other options.
            Cancelled: the user asked to stop, or the budget was used up, before the search began.
        """
        session = self.session
        plan = self.plan
        spec = plan.spec
        terms = ProbeTerms(memory_gib=self.memory_gib, headroom=spec.headroom, seed=spec.seed)
        setup, shape = self._fit_setup()
        session.progress.plan(
            setup, fits_gib=self.memory_gib, trials=spec.trials, workers=spec.workers
        )

        evaluator = session.evaluator(
            setup.task,
            terms,
            study=plan.study,
            shape=shape,
            shallow_only=spec.shallow_only,
            fresh=spec.fresh,
            budget_s=plan.budget_s,
        )
        evaluator.learn_from_others()
        self._begin_lookahead(setup.task, evaluator)

        if self._before is not None and self._before.limits is not None:
            feasible = Feasible(tried=[], opens_reserve=self._before.reserve_opened)
        else:
            say = session.progress.say
            feasible = find_feasible(setup.task, setup.reserve, evaluator, say)
        self.failure = feasible.problem

        if feasible.opens_reserve:
            if feasible.problem is None:
                session.progress.note(
                    f"nothing else fits, so these values are searched too: {setup.reserved}",
                    "yellow",
                )
            setup = open_reserve(setup)

        self._optimizer = session.optimizer(plan.study, setup.task, spec.seed)
        record = StudyRecord(
            task=setup.task,
            fingerprint=self._fingerprint,
            terms=terms,
            spec=replace(spec, storage=None),  # the URL may hold a password
            out=to_stored_directory(plan.out, plan.url),
            reserve_opened=feasible.opens_reserve,
            shallow_only=spec.shallow_only,
        )
        start_record(self._optimizer, record)
        self._lead(setup.task, evaluator, feasible.tried)

    def _fit_setup(self) -> tuple[Setup, ModelShape | None]:
        """Restrict the setup to knob values that suit the model's layers.

        Return the setup, and the shape of the layers. Raises UsageError.
        """
        setup = self.plan.setup
        # All sessions of a study use the same conversion to the target GPU, so that their speeds
        # can be compared.
        if self._before is not None and setup.task.carried is not None:
            before = self._before.task
            setup = replace(
                setup,
                task=replace(setup.task, carried=before.carried, calibration=before.calibration),
            )

        shape = self.session.prober.describe(setup.task.model.config)
        if self.plan.spec.shallow_only and (shape is None or depths(shape, None) is None):
            raise UsageError(
                "--shallow-only: this model's layers cannot be left out "
                "(it has too few layers, or no two layers are alike)",
                remedy="omit --shallow-only",
            )
        return adapt_to_layers(setup, shape), shape

    def _lead(self, task: Task, evaluator: Evaluator, tried_configs: list[TrainConfig]) -> None:
        """Search and confirm as the study's only leader. Raises UsageError if there is another."""
        session = self.session
        plan = self.plan
        spec = plan.spec
        progress = session.progress
        stop = session.stop
        limits = Limits(budget_s=plan.budget_s, trials=spec.trials, patience=spec.patience)
        me = Worker.this_process(self._fingerprint.device, leads=True)

        with Leases(plan.url, plan.study, me, outages=session.outages).join() as leases:
            for worker in leases.confirmed_others(progress.say).values():
                if worker.leads:
                    raise UsageError(
                        f"study {plan.study!r} is being run by process {worker.pid} "
                        f"of {worker.host}",
                        remedy=f"join it with `{study_command('worker', plan.study)}`, or give "
                        "another name with --study",
                    )

            self.trials = SharedTrials(
                task=task,
                optimizer=self._optimizer,
                evaluator=evaluator,
                limits=limits,
                started=session.until - plan.budget_s,
                say=progress.say,
                should_stop=stop,
                coordinator=leases,
                new_rows=partial(session.store.new_rows, plan.study),
                on_begin=progress.trying,
                on_trial=self._on_trial,
                on_trial_of_others=self._on_trial,
            )

            self._look_ahead(self.trials)
            study = Study(self.trials)
            self.trials.resume(session.store.probes_of_study(plan.study))
            self.on_resumed(self.trials.rows)
            progress.resumed(self.trials.rows)
            self.trials.begin(tried_configs)
            self.update(
                limits=limits, earlier_seconds=self._earlier_seconds, phase=StudyPhase.SEARCHING
            )

            try:
                if self.failure is not None:
                    study.run_queue()
                    return
                with (
                    local_workers(
                        plan.cards, plan.study, plan.url, plan.out, progress, session.is_over
                    ),
                    ray_workers(
                        spec.ray, plan.study, plan.url, task.device, progress, session.is_over
                    ),
                ):
                    study.run()
                    self._end_lookahead()
                    self.update(phase=StudyPhase.CONFIRMING)  # this tells the workers to leave
                self.trials.sync(reap=True)
                if not stop() and not spec.shallow_only:
                    study.confirm()
                self.update(decomposition=self._decompose(evaluator))
            except (TooManyFailures, EnvironmentProblem) as error:
                self.failure = error
            except KeyboardInterrupt:
                # This exception is raised only if the caller does not handle signals, for example
                # in a notebook.
                stop.request()
            finally:
                # A search in which nothing fits has an answer, so it is finished.
                has_answer = self.failure is None or isinstance(self.failure, NothingFits)
                is_stopped = stop() or not has_answer
                self.update(
                    phase=StudyPhase.STOPPED if is_stopped else StudyPhase.ENDED,
                    too_short_for=() if stop() else self.trials.too_short_for,
                )
                self.trials.reap()
                self._optimizer.close_queue()
                self.update()

    def _num_ahead(self) -> int:
        """The number of processes that compile code in advance."""
        spec = self.plan.spec
        if COMPILED not in self.plan.setup.task.space.choices("compile"):
            return 0
        single_worker = spec.workers == 1 and spec.ray is None
        on_gpu = self.session.prober.device == "cuda"
        number = num_helpers(num_cores()) if single_worker and on_gpu else 0
        return {"auto": number, "always": max(number, 1), "never": 0}[spec.compile_ahead]

    def _begin_lookahead(self, task: Task, evaluator: Evaluator) -> None:
        """Begin to compile the code of the search's first configurations."""
        if self._ahead is not None:
            limit_gib = memory_limit_gib(self.memory_gib, self.plan.spec.headroom)
            seeds = formula_seeds(task, task.baselines[0], limit_gib)
            likely = compiled_variants(task.space, [*seeds, *task.baselines])
            self._ahead.compile_next(shallow_requests(evaluator, likely))

    def _look_ahead(self, trials: SharedTrials) -> None:
        """Make each trial request the compilation of likely next configurations.

        Also record which code is compiled.
        """
        ahead = self._ahead
        trying = trials.on_begin
        keys = dict[int, str]()
        lookahead = Lookahead(trials, ahead) if ahead else None

        def on_begin(number: int, config: TrainConfig) -> None:
            if lookahead is not None:
                lookahead.begin(config)
            trying(number, config)

        def is_compiled(config: TrainConfig) -> bool:
            new = [
                row
                for row in trials.rows
                if row.number not in keys and row.outcome is not Outcome.REFUSED
            ]
            keys.update({row.number: code_key(row.config) for row in new})
            key = code_key(config)
            return key in keys.values() or (ahead is not None and key in ahead.compile_seconds())

        trials.on_begin = on_begin
        trials.is_compiled = is_compiled
        trials.compiles_ahead = ahead is not None

    def _end_lookahead(self) -> None:
        """Stop compiling ahead, so that compilation does not disturb the confirmations."""
        if self._ahead is None:
            return
        compiled = self._ahead.compile_seconds()
        self._ahead.close()
        if compiled:
            each_s = sum(compiled.values()) / len(compiled)
            self.session.progress.say(
                f"compiled in advance: {len(compiled)} variants, {fmt_seconds(each_s)} each"
            )

    def _decompose(self, evaluator: Evaluator) -> Decomposition | None:
        """Measure how much each knob contributes to the speed-up, in the time that is left.

        The probes use models with fewer layers if possible.
        """
        trials = self.trials
        recipe = trials.selection.recipe(self._fingerprint)
        if recipe is None or recipe.baseline is None or recipe.speedup is None:
            return None

        shallow = (
            evaluator.shape is not None and depths_of(evaluator.shape, recipe.config) is not None
        )
        # The probes are stored under the name of a separate study, as in `explain`. No stored
        # result is reused, so that all speeds were measured at about the same time.
        separate_evaluator = replace(
            evaluator,
            study=_explain_study_name(trials.task.study),
            shallow_only=shallow,
            reuses=False,
        )

        known_s = evaluator.truncated_s if shallow else evaluator.whole_s
        lasts_s = trials.duration_predictor()

        def speed(config: TrainConfig) -> float | None:
            took_s = known_s.get(config, 0.0) or lasts_s(config)
            if trials.has_ended() or took_s > trials.left_s():
                return None
            try:
                result = separate_evaluator.evaluate(config, None).result
            except (Cancelled, TooManyFailures, ValueError):
                # A ValueError means that the micro batch size does not divide the global batch
                # size.
                return None
            if result.measurement is None or result.disturbed is not None:
                return None
            return run_performance(trials.task, config, [result.measurement]).tokens_per_second

        return decompose(recipe.config, recipe.baseline.config, recipe.speedup, speed)

    def _on_trial(self, row: TrialRecord) -> None:
        self.on_trial(row)
        self.update()
        self.session.progress.trial(row)

    def update(self, **changes: object) -> None:
        """Write fields of the study's record, and the wall seconds of all sessions so far."""
        update_record(self._optimizer, **changes, wall_seconds=self._wall_seconds)

    @property
    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.monotonic() - self.plan.started

    def finalists(self) -> list[Candidate]:
        """Return the candidates that may win, the best first."""
        selection = self.trials.selection
        return [
            selection.candidate(config)
            for config in selection.finalists(self.trials.limits.finalists)
        ]

    def summary(self, project: Project) -> StudySummary:
        """Return the study's result; `project` predicts the winner's run on other devices."""
        record = read_record(self.plan.url, self.plan.study)
        assert record is not None
        trials = self.trials
        stored = self.session.store.probes_of_study(self.plan.study)
        return summarize(
            record,
            trials.rows,
            trials.selection,
            stored,
            project=project,
            wall_seconds=self._wall_seconds,
        )


def find_record(name: str | None, url: str) -> StudyRecord:
    """Return the record of the study `name`, or of the newest study if `name` is None.

    Raises:
        UsageError: there is no such study, or another version of autotune wrote it.
        StorageError: the database cannot be read, or the record is damaged.
    """
    names = study_names(url)
    if not names:
        raise UsageError(
            "there is no study in this database",
            remedy="start one with `autotune run`, or give another --storage",
        )

    if name is None:
        name = names[-1]
    if name not in names:
        raise UsageError(
            f"there is no study {name!r} in this database",
            remedy=f"the studies are: {', '.join(names)}",
        )

    record = read_record(url, name)
    if record is None:
        raise UsageError(
            f"{name!r} is not a study of autotune", remedy="give a study that `autotune run` made"
        )
    return record


def read_summary(record: StudyRecord, url: str, project: Project) -> StudySummary:
    """Read a study's result so far; `project` predicts the winner's run on other devices."""
    task = record.task
    with closing(Optimizer.open(url, task.study, task.space)) as optimizer:
        finished = optimizer.finished()
    # The probes are read last, because a running study stores a probe before it finishes the trial.
    with closing(ProbeStore(url)) as store:
        stored = store.probes_of_study(task.study)

    rows, selection = restore(task, finished, stored)
    probed = sum(row.result.seconds.get("total", 0.0) for row in stored)
    # The record of a running study has the wall time at the end of its last trial. Without other
    # workers, the wall time is at least the total time of the stored probes.
    wall_seconds = max(record.wall_seconds, 0.0 if record.others_seconds else probed)
    return summarize(record, rows, selection, stored, project=project, wall_seconds=wall_seconds)


def read_nodes(record: StudyRecord, url: str) -> tuple[Node, ...]:
    """Read a study's workers (nodes) and their measurements of the baseline from its database."""
    with closing(ProbeStore(url)) as store:
        return nodes_of(record.task, store.probes_of_study(record.task.study))


def await_study(
    url: str, name: str, wait_s: float, say: Callable[[str], None] = lambda text: None
) -> StudyRecord:
    """Wait until the search of a study has begun, and return the study's record.

    Raises UsageError if the search has not begun within `wait_s` seconds.
    """
    until = time.monotonic() + wait_s
    is_announced = False

    while (record := read_record(url, name)) is None or record.limits is None:
        if time.monotonic() >= until:
            raise UsageError(
                f"there is no study {name!r} in this database that could be joined",
                remedy="start it with `autotune run --study NAME` and the same --storage, "
                "or --wait for it",
            )
        if not is_announced:
            say(f"waiting {fmt_seconds(wait_s)} at most for study {name!r} to begin")
            is_announced = True
        time.sleep(JOIN_RETRY_S)
    return record


def worker_folder(record: StudyRecord, url: str, out: Path | None) -> Path:
    """Return the directory for this worker's logs: `out`, or a new one in the study's directory."""
    if out is not None:
        return out
    return (
        from_stored_directory(record.out, url, record.task.study)
        / f"worker-{socket.gethostname()}-{os.getpid()}"
    )


def work(session: Session, record: StudyRecord, *, allow_mixed: bool = False) -> int:
    """Help with a study until its leader stops searching or a limit is reached.

    Returns the number of trials that this worker finished.

    Raises:
        EnvironmentProblem: the GPU or the packages differ from the study's.
        TooManyFailures: this worker's measurement of the baseline differs too much from the other
            workers' measurements, or this worker's probes keep failing.
    """
    assert record.limits is not None
    name = record.task.study
    task = record.task
    progress = session.progress
    differences = record.fingerprint.differences(session.start_prober())
    if differences and not allow_mixed:
        raise EnvironmentProblem(
            f"this machine differs from the machine that began the study: {'; '.join(differences)}",
            remedy="workers of one study need the same GPU and the same packages "
            "(--allow-mixed to try nevertheless)",
        )

    shape = session.prober.describe(task.model.config)
    evaluator = session.evaluator(
        task,
        record.terms,
        study=name,
        shape=shape,
        shallow_only=record.shallow_only,
        fresh=record.spec.fresh,
        budget_s=record.limits.budget_s,
    )
    evaluator.learn_from_others()

    me = Worker.this_process(session.prober.fingerprint.device)
    optimizer = session.optimizer(name, task, record.terms.seed + crc32(me.name.encode()))

    joined_at = time.monotonic()
    started = joined_at - record.wall_seconds + record.earlier_seconds
    session.until = started + record.limits.budget_s
    num_done = 0

    def on_trial(row: TrialRecord) -> None:
        nonlocal num_done
        num_done += 1
        add_worker_seconds(optimizer, me.name, time.monotonic() - joined_at)
        progress.trial(row)

    with Leases(session.url, name, me, outages=session.outages).join() as leases:
        trials = SharedTrials(
            task=task,
            optimizer=optimizer,
            evaluator=evaluator,
            limits=record.limits,
            started=started,
            say=progress.say,
            should_stop=session.stop,
            coordinator=leases,
            on_trial=on_trial,
        )
        trials.resume(session.store.probes_of_study(name))
        progress.resumed(trials.rows)
        trials.new_rows = _watched_rows(session, record, trials.selection, allow_mixed=allow_mixed)
        Study(trials).work(lambda: optimizer.recall("phase") != StudyPhase.SEARCHING)
        add_worker_seconds(optimizer, me.name, time.monotonic() - joined_at)
    return num_done


def _watched_rows(
    session: Session, record: StudyRecord, selection: Selection, *, allow_mixed: bool
) -> Callable[[], list[StoredProbe]]:
    """Compare this worker with the others; return a function that reads new results.

    The check measures the baseline (`NodeMonitor`). The returned function first repeats the check
    if the last check was at least 10 minutes ago.
    """
    node = NodeMonitor(
        session.prober,
        session.store,
        selection,
        lambda config: record.terms.request(record.task, config, session.prober.device),
        timed=record.task.device.kind != "cpu",
        log=session.logs / "node.log",
    )

    remedy = "check this node's other processes, its cooling and its clock rates"
    if (reasons := node.check()) and not allow_mixed:
        raise TooManyFailures(
            f"this node is not like the others: {'; '.join(reasons)}",
            remedy=f"{remedy}, or join anyway with --allow-mixed",
        )

    def new_rows() -> list[StoredProbe]:
        if node.is_due() and (reasons := node.check()):
            text = f"this node is not like the others any more: {'; '.join(reasons)}"
            if not allow_mixed:
                raise TooManyFailures(text, remedy=remedy)
            session.progress.note(text, "yellow")
        return session.store.new_rows(record.task.study)

    return new_rows


def worker_device(record: StudyRecord) -> str:
    """Return the device for a worker of this study, "cpu" or "cuda". Raises EnvironmentProblem."""
    remedy = "GPUs of different models never share a study: begin another study on this GPU"
    device = require_device(record.task.measured_on or record.task.device, remedy)
    if device == "cpu":
        return device

    card = find_target("auto").card
    assert card is not None
    free_gib = card.memory_gib - card.used_gib
    if free_gib < record.terms.memory_gib - IGNORED_GIB:
        raise EnvironmentProblem(
            f"the study uses {fmt_gib(record.terms.memory_gib)} of each GPU, "
            f"but only {fmt_gib(free_gib)} of this GPU are free",
            remedy="stop the processes that use this GPU's memory",
        )
    return device


def require_device(device: DeviceSpec, remedy: str, gpus: int = 1) -> str:
    """Return "cpu" or "cuda" if this machine has enough devices of this kind.

    Raises EnvironmentProblem otherwise.
    """
    kind = "cpu" if device.kind == "cpu" else "cuda"
    try:
        target = find_target("cpu" if kind == "cpu" else "auto")
        here = target.device.name
        is_here = target.card is None or is_product(target.card, device)
    except EnvironmentProblem:
        here = "no GPU"
        is_here = False

    if not is_here:
        raise EnvironmentProblem(
            f"the study is for {device.name}, but this machine has {here}", remedy=remedy
        )
    if kind == "cuda" and (number := len(visible())) < gpus:
        raise EnvironmentProblem(
            f"the study is for {gpus} GPUs, but only {number} of this machine's are visible",
            remedy=remedy,
        )
    return kind


def explain(
    session: Session, record: StudyRecord, winner: TrainConfig, baseline: TrainConfig
) -> Ablation:
    """Probe a study's winner with one knob reset, for each of its knobs, and record the results.

    A reset knob gets the baseline's value.

    Raises:
        EnvironmentProblem: the probe of the winner fails.
        Cancelled: the user asked to stop during a probe; finished probes are stored.
    """
    task = record.task
    session.start_prober()
    shape = session.prober.describe(task.model.config)
    shallow = shape is not None and depths_of(shape, winner) is not None

    # The probes are stored under a separate study's name, so that they cannot change this study's
    # winner.
    study = _explain_study_name(task.study)
    evaluator = session.evaluator(
        task,
        record.terms,
        study=study,
        shape=shape,
        shallow_only=shallow,
        fresh=record.spec.fresh,
    )

    ablation = ablate(
        task, evaluator, winner, baseline, say=session.progress.say, should_stop=session.stop
    )
    amend_record(session.url, record, ablation=ablation)
    return ablation


def profile(
    session: Session, record: StudyRecord, config: TrainConfig, trace: Path
) -> tuple[ProbeRequest, MicroBatchProfile, DeviceRates]:
    """Profile one micro batch of a configuration, and measure the device's speed and bandwidths.

    Raises:
        UsageError: the configuration is for several GPUs.
        EnvironmentProblem: the probe fails, or the driver does not show the GPU's work.
        Cancelled: the user asked to stop.
    """
    prober = session.prober
    if not isinstance(prober, WorkerProber):
        raise UsageError(
            "a profile covers one GPU, but the study probes several",
            remedy="profile a study of one GPU",
        )

    session.start_prober()
    base_request = record.terms.request(record.task, config, prober.device)
    request = replace(base_request, new_lengths=False)
    log = session.logs / "profile.log"
    session.progress.say(f"profiling a micro batch of {config.label()}")
    result, micro_profile = prober.profile(request, log, trace)
    if result.outcome is not Outcome.OK:
        raise EnvironmentProblem(
            f"the probe failed this time: {result.reason or result.outcome}",
            remedy=f"see {log}, and check whether another process uses the device"
            " (`autotune doctor`)",
        )
    if micro_profile is None:
        raise EnvironmentProblem(
            "the driver does not show what the GPU runs",
            remedy="allow this user to profile (NVreg_RestrictProfilingToAdminUsers=0), "
            "or end the other profiler",
        )

    session.progress.say("measuring the rates of the device")
    return request, micro_profile, prober.rates()


def amend_record(url: str, record: StudyRecord, **changes: Any) -> None:
    """Write fields of a study's record, even if the study is not running."""
    with closing(Optimizer.open(url, record.task.study, record.task.space)) as optimizer:
        update_record(optimizer, **changes)
