"""autotune from Python: tune a model, load a study, plan without a GPU. The command line stands on these functions."""

import html
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from autotune.core.errors import (
    AutotuneError,
    BudgetTooShort,
    Interrupted,
    NothingFits,
    TooManyFailures,
    UsageError,
    VerificationFailed,
)
from autotune.core.json_view import json_data
from autotune.core.process import StopToken
from autotune.core.text import short_path, study_command
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import Setup
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.report import describe
from autotune.report.study_directory import TrialLog, write_exports, write_study, write_versus
from autotune.study.preparation import SessionPlan, prepare_session
from autotune.study.progress import Progress, TextProgress
from autotune.study.storage.location import existing_url, opened_out
from autotune.study.storage.study_record import StudyRecord
from autotune.study.summary import Quality, Recipe, StudySummary, Verification, summary_data

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from autotune.planning.longest import Longest
    from autotune.problem.calibration import Calibration
    from autotune.report.values.check import CheckReport
    from autotune.report.values.comparison import Budget, Comparison, Owned
    from autotune.report.values.longest import LongestRow
    from autotune.report.values.plan import Plan
    from autotune.study.named_configs import ConfigResult
    from autotune.study.scaling import GpuPlan
    from autotune.study.session import Leader, Session

__all__ = [
    "AutotuneError",
    "SearchSpace",
    "StudyResult",
    "StudySpec",
    "TrainConfig",
    "calibrate",
    "check",
    "compare",
    "load_study",
    "longest",
    "plan",
    "tune",
]


def tune(
    model: str,
    *,
    gpu: str = "auto",
    space: str | SearchSpace | None = None,
    gpus: int | str | Sequence[int] | None = None,
    progress: Callable[[str], Any] | None = None,
    **options: Any,
) -> "StudyResult":
    """Search for the best configuration with real probes, as `autotune run` does, and return the study.

    `options` are those of the command, with underscores: budget="10m", examples=50_000, pins={"lora_rank": 32}. With
    several numbers of `gpus`, such as [1, 2, 4, 8], the study compares them. The study's files and its database are
    written as the command writes them. Nothing is printed; `progress` gets a line for each step and trial, for example
    `print`. Ctrl-C during the search ends it as Interrupted, after the files are written; the study can be continued by
    its name.

    Raises:
        AutotuneError: what the command would end with, as an exception with `remedy` and `exit_code`.
        TypeError: an unknown option.
    """
    counts = gpus if isinstance(gpus, int | str | None) else tuple(gpus)
    spec = StudySpec(model=model, gpu=gpu, space=space, gpus=counts, **options)
    if spec.configs:
        raise UsageError("a suite has no best to return", remedy="probe its configurations with `autotune run --spec`")
    plan = prepare_study(spec, progress or (lambda text: None))
    outcome = run_study(plan, progress=TextProgress(progress) if progress else None)
    if outcome.error is not None:
        raise outcome.error
    return load_study(plan.study, plan.url)


def load_study(name: str | None = None, storage: str | None = None) -> "StudyResult":
    """A study by name, running or finished; the newest if none is given.

    Raises:
        UsageError: there is no such study, or another version of autotune wrote it.
        StorageError: the database cannot be read.
    """
    from autotune.study.session import find_record

    url = existing_url(storage)
    return result_of(find_record(name, url), url)


def result_of(record: StudyRecord, url: str) -> "StudyResult":
    """The study of this record, with what its database holds now."""
    from autotune.planning.projections import project_winner
    from autotune.study.session import read_summary

    return StudyResult(summary=read_summary(record, url, project_winner), record=record, url=url)


@overload
def plan(
    model: str,
    *,
    gpu: str = ...,
    space: str | SearchSpace | None = ...,
    gpus: None = ...,
    within: None = ...,
    **options: Any,
) -> "Plan": ...


@overload
def plan(
    model: str,
    *,
    gpu: str = ...,
    space: str | SearchSpace | None = ...,
    gpus: int | Sequence[int],
    nodes: int | Sequence[int] | None = ...,
    network: str | float | None = ...,
    within: str | float | None = ...,
    **options: Any,
) -> "GpuPlan": ...


def plan(
    model: str,
    *,
    gpu: str = "auto",
    space: str | SearchSpace | None = None,
    gpus: int | Sequence[int] | None = None,
    nodes: int | Sequence[int] | None = None,
    network: str | float | None = None,
    within: str | float | None = None,
    **options: Any,
) -> "Plan | GpuPlan":
    """Estimate by formula what fits a GPU, how fast it trains and what that costs; needs no GPU.

    A dry probe counts what no formula covers, in seconds. With `gpus`, such as [1, 2, 4, 8], the answer is a GpuPlan
    for these numbers of GPUs of one host, and `within` is its deadline: "6h", or a number of hours. With `nodes` they
    are those of each of so many hosts, which `network` links: GB/s out of a host, or a name such as "ethernet-100".
    `options` are those of `autotune plan`, with underscores. Raises AutotuneError.
    """
    from autotune.planning import plan as planning
    from autotune.planning.observations import known_observations

    spec, observations = StudySpec(model=model, gpu=gpu, space=space, **options), known_observations()
    if gpus is None and nodes is None and network is None and within is None:
        return planning.plan(spec, observations=observations, counted=True)
    from autotune.planning.several_gpus import plan_spec

    return plan_spec(spec, gpus, nodes=nodes, network=network, within=within, observations=observations)


def compare(
    models: str | Sequence[str],
    gpus: Sequence[str],
    *,
    methods: Sequence[str] = (),
    budget: "Budget | None" = None,
    owned: "Owned | None" = None,
    **options: Any,
) -> "Comparison":
    """Compare GPUs by formula for the same run of each model; needs no GPU.

    `options` are those of `autotune plan`, with underscores. Raises AutotuneError.
    """
    from autotune.planning import compare as planning
    from autotune.planning.observations import known_observations

    names = [models] if isinstance(models, str) else models
    specs = [StudySpec(model=name, **options) for name in names]
    observations = known_observations()
    return planning.compare(specs, gpus=gpus, methods=methods, budget=budget, owned=owned, observations=observations)


def check(file: str | Path, **options: Any) -> "CheckReport":
    """Check by formula whether the run of a YAML file of TRL, Axolotl or LLaMA-Factory fits a GPU; needs no GPU.

    `options` are those of `autotune check`, with underscores. Raises AutotuneError.
    """
    from autotune.planning import run_check as planning
    from autotune.planning.observations import known_observations

    return planning.check(Path(file), options, observations=known_observations())


def longest(
    model: str,
    gpu: str = "auto",
    *,
    methods: Sequence[str] = (),
    rank: int = 16,
    knobs: Mapping[str, Any] | None = None,
    memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    most_tokens: int | None = None,
    probe: bool = True,
    progress: Callable[[str], Any] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> "tuple[Longest, list[LongestRow]]":
    """The longest row that fits a GPU by each method (full, lora, qlora), as `autotune longest` finds it.

    Rows are predicted without a GPU, and with `probe` tried by real steps where the GPU is here. `memory_gib` and
    `host_memory_gib` bound what may be used of the card and of the host, `most_tokens` the rows; `knobs` are pinned.

    Raises:
        AutotuneError: a name or a knob is unknown or impossible, or the GPU cannot be probed.
        Cancelled: `should_stop` returned True.
    """
    from autotune.catalog import resolve_model
    from autotune.planning.longest import METHODS, find_longest

    return find_longest(
        resolve_model(model),
        gpu,
        methods or tuple(METHODS),
        rank=rank,
        knobs=knobs,
        memory_gib=memory_gib,
        host_memory_gib=host_memory_gib,
        most_tokens=most_tokens,
        probe=probe,
        say=progress,
        should_stop=should_stop,
    )


def calibrate(
    gpu: str = "auto",
    *,
    progress: Callable[[str], Any] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> "Calibration":
    """Measure the device of this machine and its host, and keep the result for estimates, as `autotune calibrate` does.

    Raises:
        AutotuneError: there is no such device here, it cannot be measured, or the result cannot be kept.
        Cancelled: `should_stop` returned True; nothing is kept.
    """
    from autotune.probe.calibrate import calibrate as measure
    from autotune.problem.calibration import kept_path, write_calibration
    from autotune.problem.target import find_target

    target = find_target(gpu)
    if target.measured_on is not None:
        raise UsageError(
            f"{target.device.name} is not here, but {target.measured_on.name}",
            remedy="calibrate the card that is here: leave --gpu out",
        )
    made = measure(target, say=progress, should_stop=should_stop)
    write_calibration(made, kept_path(made.device))
    return made


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StudyResult:
    """What a study found. Shows itself in a few words, and as a table in a notebook."""

    summary: StudySummary
    record: StudyRecord
    url: str = ""  # of the database; it may hold a password

    @property
    def task(self) -> Task:
        """What was tuned for what."""
        return self.record.task

    @property
    def out(self) -> Path:
        """The study's directory."""
        return opened_out(self.record.out, self.url, self.summary.study)

    @property
    def recipe(self) -> Recipe:
        """The winner, the baseline, and what they rest on. Raises NothingFits if no configuration succeeded."""
        if self.summary.recipe is None:
            name = self.summary.study
            raise NothingFits(
                f"study {name!r} has no configuration that succeeded",
                remedy=f"see `{study_command('oom', name)}`, or let it go on: `{study_command('resume', name)}`",
            )
        return self.summary.recipe

    @property
    def winner(self) -> TrainConfig:
        """The best configuration. Raises NothingFits if no configuration succeeded."""
        return self.recipe.config

    @property
    def trials(self) -> list[dict[str, Any]]:
        """A dict for each trial, fit for a data frame: its knobs, outcome, tokens/s, GiB, evidence and reason."""
        return [
            {
                "number": row.number,
                **row.config.as_dict(),
                "outcome": row.outcome.value,
                "tokens_per_second": row.tokens_per_second,
                "peak_reserved_gib": row.peak_reserved_gib,
                "limit_gib": row.limit_gib,
                "evidence": row.evidence.value,
                "reason": row.reason,
            }
            for row in self.summary.trials
        ]

    @property
    def figures(self) -> "dict[str, Figure]":
        """The report's figures by name, those that have something to show."""
        from plotly.graph_objects import Figure

        from autotune.report.html import draw

        return {name: Figure(drawn) for name, drawn in draw(self.summary).items() if drawn is not None}

    def data(self) -> dict[str, Any]:
        """What summary.json holds."""
        return summary_data(self.summary, str(self.out))

    def report(self, out: str | Path | None = None, *, against: "StudyResult | None" = None) -> Path:
        """Write report.html and the other files of the study, into its own directory by default.

        With `against` write one page instead, with the winners of both studies side by side. Raises NothingFits where
        one of them has no winner.
        """
        folder = Path(out) if out else self.out
        if against is not None:
            _ = self.recipe, against.recipe  # which raise where there is none
            return write_versus(folder, self.summary, against.summary)
        write_study(folder, self.summary)
        return folder / "report.html"

    def export(self, *formats: str, out: str | Path | None = None) -> list[Path]:
        """Write the winner for trainers, by default the usual ones.

        Raises:
            NothingFits: no configuration succeeded.
            UsageError: there is no such format.
        """
        return write_exports(Path(out) if out else self.out, self.recipe, list(formats) or None)

    def reload(self) -> "StudyResult":
        """The same study as its database holds it now."""
        return load_study(self.summary.study, self.url)

    def _facts(self) -> dict[str, str]:
        facts = {"study": self.summary.study}
        recipe = self.summary.recipe
        if recipe is None:
            return facts | {"winner": "no configuration succeeded"}
        facts |= {"model": recipe.model.name, "device": recipe.device.name}
        for name, candidate in {"winner": recipe.winner, "baseline": recipe.baseline}.items():
            if candidate is not None:
                facts[name] = f"{candidate.config.label()}; {describe.candidate_line(candidate)}"
        return facts

    def __repr__(self) -> str:
        return f"StudyResult({', '.join(f'{name}={text!r}' for name, text in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in self._facts().items())
        return f"<table>{''.join(rows)}</table>"


# --- what `autotune run` does, with its progress and its error as values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a session of a study ended. `data` is what summary.json or suite.json holds, None if nothing was written.

    `configs` are the results of named configurations. `error` says why the session did not end as it should.
    """

    data: Any = None
    configs: "tuple[ConfigResult, ...]" = ()
    error: AutotuneError | None = None


def prepare_study(spec: StudySpec, say: Callable[[str], None] = lambda text: None) -> SessionPlan:
    """Find everything that can be wrong with a study before GPU time is spent. Raises AutotuneError."""
    return prepare_session(spec, say, partial(_adjust, spec, say))


def _adjust(spec: StudySpec, say: Callable[[str], None], setup: Setup) -> Setup:
    """Refine the projection to another card by what was measured there, and check what --quality needs."""
    if setup.task.measured_on is not None:
        from autotune.planning.device_estimate import corrected_by_observations
        from autotune.planning.observations import known_observations

        setup = replace(setup, task=corrected_by_observations(setup.task, known_observations(say=say)))
    if spec.quality:
        from autotune.export.run.quality import impossible

        if reason := impossible(setup.task.model, setup.task.workload, spec.dataset):
            raise UsageError(f"--quality cannot run: {reason}", remedy="give what it needs, or leave --quality out")
    return setup


def run_study(plan: SessionPlan, *, progress: Progress | None = None, stop: StopToken | None = None) -> RunOutcome:
    """Search, confirm, and write the study's files. All that it opens is closed when it returns.

    Raises:
        AutotuneError: the study could not begin. A later error is in the outcome, after the files are written.
    """
    from autotune.study.session import Session
    from autotune.study.storage.study_lock import locked

    stop = stop or StopToken()
    outcome = RunOutcome()
    with (
        locked(plan.out, plan.study),
        Session(
            plan.url, plan.out, plan.device, num_gpus=plan.task.probing_gpus, stop=stop, progress=progress
        ) as session,
        stop.ending(),
    ):
        outcome = _probe_configs(session, plan) if plan.spec.configs else _search(session, plan)
    if stop.signal is None and outcome.data is None:
        missed = "the start of the worker and a first probe that fits: nothing was measured"
        return replace(outcome, error=_too_short(plan, missed))
    if outcome.error is not None or stop.signal is None:
        return outcome
    interrupted = Interrupted(
        "stopped; the results so far are stored",
        remedy=f"continue with the same command and --study={shlex.quote(plan.study)}",
        exit_code=128 + stop.signal,
    )
    return replace(outcome, error=interrupted)


def _too_short(plan: SessionPlan, missed: str) -> BudgetTooShort:
    remedy = "give a longer --budget or a smaller model; what was probed is stored and not probed again"
    return BudgetTooShort(f"--budget {plan.spec.budget} was too short for {missed}", remedy=remedy)


def _probe_configs(session: "Session", plan: SessionPlan) -> RunOutcome:
    """Probe the named configurations of a spec in place of a search."""
    from autotune.study.named_configs import probe_configs
    from autotune.study.session import Leader

    leader = Leader(session, plan)
    results = probe_configs(
        plan.spec,
        plan.task,
        session.prober,
        session.store,
        plan.out,
        memory_gib=leader.memory_gib,
        say=session.progress.say,
        should_stop=session.is_over,
    )
    if results:
        session.progress.configs(results, short_path(plan.out))
    missed = [case.name for case in plan.spec.configs[len(results) :]]
    error = _too_short(plan, ", ".join(missed)) if missed and not session.stop() else None
    return RunOutcome(data=json_data(results), configs=tuple(results), error=error)


def _search(session: "Session", plan: SessionPlan) -> RunOutcome:
    """Search, confirm, write the files, then train the finalists and verify the export if the spec asks for it."""
    from autotune.planning.projections import project_winner
    from autotune.study.session import Leader

    log = TrialLog(plan.out)
    leader = Leader(session, plan, on_resumed=log.begin, on_trial=log.add)
    leader.search()
    session.progress.say("writing the report")
    summary = leader.summary(project_winner)
    data = write_study(plan.out, summary)
    for is_wanted, act in ((plan.spec.quality, _compare_quality), (plan.spec.verify, _verify)):
        if is_wanted and leader.failure is None and summary.recipe is not None and not session.stop():
            session.prober.close()  # its memory is needed
            leader.update(**act(leader, summary.recipe))
            summary = leader.summary(project_winner)
            data = write_study(plan.out, summary)
    session.progress.result(summary, short_path(plan.out))
    return RunOutcome(data=data, error=leader.failure or _shortcoming(leader, summary))


def _shortcoming(leader: "Leader", summary: StudySummary) -> AutotuneError | None:
    """Why a search that ended in order is not a success: no configuration succeeded, or the verification failed."""
    if leader.session.stop():
        return None
    out = short_path(leader.plan.out)
    verification = summary.verification
    if leader.plan.spec.verify and verification is not None and not verification.holds:
        reason = describe.failed_verification(verification) or ""
        return VerificationFailed(reason, remedy=f"read {out}/logs/verify.log, and run it again")
    if summary.recipe is None:
        return TooManyFailures("no configuration succeeded", remedy=f"see {out}/oom_report.md and {out}/logs")
    return None


def _compare_quality(leader: "Leader", recipe: Recipe) -> dict[str, Quality]:
    """Train the finalists on the dataset; empty if that failed, which is reported, or was stopped in the first."""
    from autotune.export.run.quality import compare

    session, plan = leader.session, leader.plan
    assert plan.spec.dataset is not None
    dataset = Path(plan.spec.dataset).expanduser()
    try:
        say, split = session.progress.say, plan.spec.split
        quality = compare(recipe, leader.finalists(), dataset, plan.out, say, session.stop, split=split)
    except (UsageError, OSError) as error:
        session.progress.note(f"--quality could not run: {error}", "yellow")
        return {}
    return {"quality": quality} if quality.learned else {}


def _verify(leader: "Leader", recipe: Recipe) -> dict[str, Verification]:
    """Run what was exported, on the device that the probes had."""
    from autotune.export.run.verify import verify

    session = leader.session
    return {"verification": verify(recipe, leader.plan.out, say=session.progress.say, should_stop=session.stop)}
