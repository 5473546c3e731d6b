"""The steps of `main`, one function each, in the order of their calls."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.core.errors import (
    AutotuneError,
    BudgetTooShort,
    Interrupted,
    TooManyFailures,
    UsageError,
    VerificationFailed,
)
from autotune.core.json_view import json_data
from autotune.core.process import StopToken
from autotune.core.text import operands, short_path
from autotune.problem.setup import Setup
from autotune.problem.study_spec import StudySpec
from autotune.report import describe
from autotune.report.study_directory import TrialLog, write_study
from autotune.study.preparation import SessionPlan, prepare_session
from autotune.study.progress import Progress
from autotune.study.summary import StudySummary, summary_data

if TYPE_CHECKING:
    from autotune.study.named_configs import ConfigResult
    from autotune.study.session import Leader, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of one session of a study.

    `data` is the content of summary.json or suite.json, or None if neither file was written.
    `configs` has the results of the configurations that the spec lists by name. `error` is set if
    the session failed or the user stopped it.
    """

    plan: SessionPlan
    data: Any = None
    configs: "tuple[ConfigResult, ...]" = ()
    error: AutotuneError | None = None


# --- task


def prepare(
    spec: StudySpec,
    say: Callable[[str], None] = lambda text: None,
    *,
    began: float | None = None,
) -> SessionPlan:
    """Prepare a study, and find invalid options before GPU time is spent. Raises AutotuneError.

    `began` is the time.monotonic() at which the command began, by default now.
    """
    return prepare_session(spec, say, partial(_adjust, spec, say), began=began)


def _adjust(spec: StudySpec, say: Callable[[str], None], setup: Setup) -> Setup:
    """Correct a projection to another GPU with published speeds; check that --quality can run."""
    if setup.task.measured_on is not None:
        from autotune.planning.device_estimate import corrected_by_observations
        from autotune.planning.observations import known_observations

        setup = replace(
            setup, task=corrected_by_observations(setup.task, known_observations(say=say))
        )

    if spec.quality:
        from autotune.export.run.quality import measurement_obstacle

        if reason := measurement_obstacle(setup.task.model, setup.task.workload, spec.dataset):
            raise UsageError(
                f"--quality cannot run: {reason}",
                remedy="correct the problem, or omit --quality",
            )
    return setup


# --- study


@contextmanager
def session(plan: SessionPlan, progress: Progress, stop: StopToken) -> "Iterator[Session]":
    """Lock the study's directory, start the process that probes, and open the database.

    A stop request ends the body of the `with` statement without an exception.
    """
    from autotune.study.session import Session
    from autotune.study.storage.study_lock import locked

    num_gpus = plan.task.probing_gpus
    with (
        locked(plan.out, plan.study),
        Session(
            plan.url, plan.out, plan.device, num_gpus=num_gpus, stop=stop, progress=progress
        ) as opened_session,
        stop.suppress_cancelled(),
    ):
        yield opened_session


def probe_named(session: "Session", plan: SessionPlan) -> RunOutcome:
    """Probe the configurations that the spec lists by name; no search runs."""
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

    missing = [case.name for case in plan.spec.configs[len(results) :]]
    error = None
    if missing and not session.stop():
        error = _budget_too_short(plan, ", ".join(missing))
    return RunOutcome(plan=plan, data=json_data(results), configs=tuple(results), error=error)


def search(session: "Session", plan: SessionPlan) -> "Leader":
    """Search until the budget ends, and confirm the best configurations.

    If an error ends the search early, the returned leader's `failure` holds the error.
    """
    from autotune.study.session import Leader

    log = TrialLog(plan.out)
    leader = Leader(session, plan, on_resumed=log.begin, on_trial=log.add)
    leader.search()
    return leader


# --- answer and files


def render(leader: "Leader") -> StudySummary:
    """Compute the study's answer, and write the report, the exports and the data files."""
    from autotune.planning.projections import project_winner

    leader.session.progress.say("writing the report")
    answer = leader.summary(project_winner)
    write_study(leader.plan.out, answer)
    return answer


def train_finalists(leader: "Leader", answer: StudySummary) -> StudySummary:
    """Train the finalists on the dataset if --quality asks for it.

    The finalists' losses become part of the answer. A failure is reported, and the answer stays
    unchanged.
    """
    from autotune.export.run.quality import compare

    spec = leader.plan.spec
    progress = leader.session.progress
    if not (spec.quality and _can_run_export(leader, answer)):
        return answer
    assert spec.dataset is not None and answer.recipe is not None

    dataset = Path(spec.dataset).expanduser()
    try:
        quality = compare(
            answer.recipe,
            leader.finalists(),
            dataset,
            leader.plan.out,
            progress.say,
            leader.session.stop,
            split=spec.split,
        )
    except (UsageError, OSError) as error:
        progress.note(f"--quality could not run: {error}", "yellow")
        return answer
    if not quality.learned:  # the user stopped in the first training
        return answer

    leader.update(quality=quality)
    return render(leader)


def verify_export(leader: "Leader", answer: StudySummary) -> StudySummary:
    """Run the exported script on the device that ran the probes if --verify asks for it.

    The script's speed and memory become part of the answer.
    """
    from autotune.export.run.verify import verify

    if not (leader.plan.spec.verify and _can_run_export(leader, answer)):
        return answer
    assert answer.recipe is not None

    session = leader.session
    verification = verify(
        answer.recipe, leader.plan.out, say=session.progress.say, should_stop=session.stop
    )
    leader.update(verification=verification)
    return render(leader)


def _can_run_export(leader: "Leader", answer: StudySummary) -> bool:
    """Return whether there is a winner whose export can run.

    If so, end the process that probes, to free its memory.
    """
    if leader.failure is not None or answer.recipe is None or leader.session.stop():
        return False
    leader.session.prober.close()
    return True


def finish(leader: "Leader", answer: StudySummary) -> RunOutcome:
    """Show the answer, and return the outcome of the session."""
    out = leader.plan.out
    leader.session.progress.result(answer, short_path(out))
    return RunOutcome(
        plan=leader.plan,
        data=summary_data(answer, str(out)),
        error=leader.failure or _shortcoming(leader, answer),
    )


def _shortcoming(leader: "Leader", summary: StudySummary) -> AutotuneError | None:
    """Return the error of a search that was not interrupted but did not succeed, or None.

    The error says that no configuration succeeded, or that the verification failed.
    """
    if leader.session.stop():
        return None

    out = short_path(leader.plan.out)
    verification = summary.verification
    if leader.plan.spec.verify and verification is not None and not verification.holds:
        reason = describe.failed_verification(verification) or ""
        return VerificationFailed(
            reason, remedy=f"read {out}/logs/verify.log, and run the command again"
        )
    if summary.recipe is None:
        return TooManyFailures(
            "no configuration succeeded", remedy=f"see {out}/oom_report.md and {out}/logs"
        )
    return None


def with_interruption(outcome: RunOutcome, stop: StopToken) -> RunOutcome:
    """Add an error if the session measured nothing within its budget, or if the user stopped it."""
    plan = outcome.plan
    if stop.signal is None and outcome.data is None:
        missing = "the start of the worker and one probe that fits, so nothing was measured"
        return replace(outcome, error=_budget_too_short(plan, missing))
    if outcome.error is not None or stop.signal is None:
        return outcome

    began = outcome.data is not None  # without results, the database may not have the study
    interrupted = Interrupted(
        "stopped; the results so far are stored"
        if began
        else "stopped before the search; finished probes are stored and not repeated",
        remedy=f"continue with: {resume_command(plan)}" if began else "run the same command again",
        exit_code=128 + stop.signal,
    )
    return replace(outcome, error=interrupted)


def resume_command(plan: SessionPlan) -> str:
    """Return the command line that continues a study."""
    from autotune.study.storage.location import printed_options

    storage, set_variable = printed_options(plan.spec.storage)
    command = shlex.join(["autotune", "resume", *storage, *operands(plan.study)])
    return " && ".join(filter(None, (set_variable, command)))


def _budget_too_short(plan: SessionPlan, missing: str) -> BudgetTooShort:
    remedy = (
        "give a longer --budget or a smaller model; finished probes are stored and not repeated"
    )
    return BudgetTooShort(f"--budget {plan.spec.budget} was too short for {missing}", remedy=remedy)
