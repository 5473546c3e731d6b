"""`autotune run` and `autotune resume`: run or continue a study, with progress and result."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.options import Json, Quiet, Storage, StudyName
from autotune.cli.stop import stop_on_signals
from autotune.cli.study_options import ALL, spec_of, with_study_options
from autotune.cli.terminal import print_answer_json, print_note
from autotune.core.errors import Cancelled, Interrupted, NothingFits, UsageError
from autotune.core.objective import Objective
from autotune.core.process import StopToken
from autotune.core.text import study_command
from autotune.problem.study_spec import ROLLOUTS
from autotune.study.storage.location import existing_url, from_stored_directory

if TYPE_CHECKING:
    from autotune.problem.study_spec import StudySpec
    from autotune.study.preparation import SessionPlan


@with_study_options(*ALL, *ROLLOUTS)
def run(
    json_: Json = False,
    events: Annotated[
        bool,
        typer.Option(
            "--events", help="Print a line of JSON on stdout for each event, the result last."
        ),
    ] = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Run or continue the study that these options describe."""
    if json_ and events:
        raise UsageError(
            "--events already ends with the output of --json", remedy="leave one of them out"
        )
    spec = spec_of(options)
    if Objective(spec.objective).generates:
        if events:
            raise UsageError("--events knows no phases of grpo", remedy="give --json instead")
        run_grpo(spec, as_json=json_, quiet=quiet)
        return
    run_spec(spec, as_json=json_, quiet=quiet, events=events)


def run_grpo(spec: "StudySpec", *, as_json: bool = False, quiet: bool = False) -> None:
    """Search for the fastest layout of a GRPO run, and print it.

    Raises:
        AutotuneError: the search could not begin.
        NothingFits: no layout fits.
        Interrupted: stopped by a signal.
    """
    from autotune.api.rollouts import run_rollouts
    from autotune.cli.plan_text import print_rollout_study

    say = (lambda text: None) if quiet else partial(print, file=sys.stderr, flush=True)
    with stop_on_signals() as stop:
        try:
            study = run_rollouts(spec, say=say, stop=stop)
        except Cancelled:
            raise Interrupted("stopped", exit_code=128 + (stop.signal or 2)) from None
    if as_json:
        print_answer_json(study)
    else:
        print_rollout_study(study)
    if study.best is None:
        raise NothingFits(
            f"no layout of the training and its engine fits {study.task.device.name}",
            remedy="give --space qlora, shorter completions, or take a larger GPU",
        )


def resume(
    study: StudyName = None,
    budget: Annotated[
        str | None, typer.Option(help="Wall time from now: 90s, 15m, 1h. [as before]")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Total number of trials, over all sessions. [as before]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="GPUs of this machine to probe on. [as before]")
    ] = None,
    storage: Storage = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a study with its original options; the options given here replace them.

    Raises UsageError if no name is given and the newest study has finished, because the user may
    mean another study.
    """
    from autotune.study.session import find_record
    from autotune.study.storage.study_record import StudyPhase

    url = existing_url(storage)
    record = find_record(study, url)
    if study is None and record.phase is StudyPhase.ENDED:
        raise UsageError(
            f"the newest study, {record.task.study!r}, is finished",
            remedy="to continue its search, give its name: "
            f"`{study_command('resume', record.task.study)} --budget {record.spec.budget}`",
        )

    changes: dict[str, Any] = {"budget": budget, "trials": trials, "workers": workers}
    values = {key: value for key, value in changes.items() if value is not None}
    name = record.task.study
    spec = replace(
        record.spec,
        **values,
        study=name,
        storage=storage,
        out=str(from_stored_directory(record.out, url, name)),
    )
    run_spec(spec, as_json=json_, quiet=quiet)


def run_spec(
    spec: "StudySpec", *, as_json: bool = False, quiet: bool = False, events: bool = False
) -> None:
    """Run or continue a study. Raises AutotuneError for every failure that a user can act on."""
    began = time.monotonic()
    if not quiet and sys.stderr.isatty():  # print something before imports that take seconds
        title = f"looking for the best way to train {spec.model} (--gpu {spec.gpu})"
        print_note(f"{title}: the answer comes after the search, which takes {spec.budget} at most")

    from autotune.api.main import main
    from autotune.cli.console import Display

    stop = StopToken()

    @contextmanager
    def shown(plan: "SessionPlan") -> Iterator[Display]:
        """Show the search on a Display while the block runs, and stop the search on a signal."""
        display = Display(
            budget_s=plan.budget_s,
            started=plan.started,
            quiet=quiet,
            events=events,
            as_json=as_json,
            storage=plan.spec.storage,
        )
        with stop_on_signals(stop), display:
            yield display

    say = (lambda text: None) if quiet else partial(print, file=sys.stderr)
    outcome = main(spec, shown, say=say, stop=stop, began=began)

    if as_json and outcome.data is not None:
        sys.stdout.write(json.dumps(outcome.data) + "\n")
    elif outcome.configs and not events:
        from autotune.cli.terminal import print_table
        from autotune.study.named_configs import COLUMNS

        print_table(None, dict(COLUMNS), [result.cells() for result in outcome.configs])
    if outcome.error is not None:
        raise outcome.error
