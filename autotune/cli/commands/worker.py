"""`autotune worker`: join a running study with this machine's GPU."""

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Json, Quiet, Storage, StudyName
from autotune.cli.stop import stop_on_signals
from autotune.cli.terminal import print_answer_json
from autotune.core.errors import PREEMPTED, Interrupted, UsageError
from autotune.core.process import die_with_parent
from autotune.core.units import parse_duration
from autotune.report.values.commands import Worked
from autotune.study.storage.location import make_writable, shared_url


def worker(
    study: StudyName = None,
    storage: Storage = None,
    named: Annotated[str | None, typer.Option("--study", help="The same as STUDY.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for logs. [the study's]")] = None,
    allow_mixed: Annotated[
        bool,
        typer.Option("--allow-mixed", help="Join although this machine differs from the others."),
    ] = False,
    wait: Annotated[
        str | None, typer.Option(help="How long to wait for the study to begin, such as 15m.")
    ] = None,
    parent: Annotated[
        int | None, typer.Option(hidden=True, help="End when the process with this number ends.")
    ] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Work on a study until the search of its leader (`autotune run`) ends, or a limit is reached.

    Raises:
        UsageError: there is no such study, two names are given, or the database cannot be shared by
            machines.
        EnvironmentProblem: this machine's hardware or software differs from the study's.
        TooManyFailures: this worker's speed or memory differs from the other workers', or its
            probes keep failing.
        Interrupted: stopped by a signal; the current trial is queued again. After SIGTERM, the exit
            code is 75.
    """
    from autotune.cli.console import Display
    from autotune.study import session

    if parent is not None:
        die_with_parent(parent, number=signal.SIGTERM)
    if study is not None and named is not None:
        raise UsageError("the study has two names", remedy="give STUDY, or --study, but not both")

    url = shared_url(storage)
    study = study or named or session.find_record(None, url).task.study
    try:
        wait_s = parse_duration(wait) if wait else 0.0
    except ValueError as error:
        raise UsageError(f"--wait: {error}", remedy="for example --wait 15m") from None

    record = session.await_study(
        url, study, wait_s, (lambda text: None) if quiet else partial(print, file=sys.stderr)
    )
    device = session.worker_device(record)
    folder = session.worker_folder(record, url, out)
    make_writable(folder)
    assert record.limits is not None

    with (
        stop_on_signals() as stop,
        Display(budget_s=record.limits.budget_s, quiet=quiet) as display,
        session.Session(
            url,
            folder,
            device,
            num_gpus=record.task.probing_gpus,
            stop=stop,
            progress=display,
            reached=True,
        ) as own_session,
        stop.suppress_cancelled(),
    ):
        num_done = session.work(own_session, record, allow_mixed=allow_mixed)
        display.note(f"{num_done} trials of study {study} were done here")
        if json_:
            print_answer_json(Worked(study=study, trials=num_done))

    if stop.signal is not None:
        code = PREEMPTED if stop.signal == signal.SIGTERM else 128 + stop.signal
        raise Interrupted("stopped; the current trial is queued again", exit_code=code)
