"""The commands for existing studies: list, status, oom, export, report, delete and fleet."""

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.answers import print_answer
from autotune.cli.options import Directory, Html, Json, Storage, StudyName
from autotune.cli.terminal import (
    console,
    print_answer_json,
    print_json,
    print_table,
    print_text,
)
from autotune.core.errors import AutotuneError, UsageError
from autotune.core.files import write_atomic
from autotune.core.text import kebab_case, study_command
from autotune.core.units import fmt_count, fmt_seconds
from autotune.report.values.commands import Files, StudyRow
from autotune.study.storage.location import existing_url, named_url

if TYPE_CHECKING:
    from autotune.api import StudyResult
    from autotune.study.summary import StudySummary

Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        help="recipe, trl, train, axolotl, llamafactory (these by default), transformers, "
        "accelerate, kubernetes, skypilot, slurm; repeatable.",
    ),
]


def status(
    study: StudyName = None,
    storage: Storage = None,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes",
            help="Compare the study's nodes (its worker processes): speed, memory, clocks.",
        ),
    ] = False,
    json_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --nodes: write a JSON file for each node."),
    ] = None,
    html: Html = None,
    json_: Json = False,
) -> None:
    """Print a study's progress and best configuration so far.

    With `nodes`, compare the processes that ran the study's probes instead.

    Raises:
        UsageError: there is no such study, or `json_dir` or `html` is given without `nodes`.
        StorageError: the database cannot be read, or a file cannot be written.
    """
    from autotune.api import load_study
    from autotune.study.storage.study_lock import running_process
    from autotune.study.summary import Status, SummaryFile

    if not nodes and (json_dir or html):
        raise UsageError(
            "--json-dir and --html need --nodes",
            remedy="`autotune report` writes a study's page",
        )

    result = load_study(study, storage)
    if nodes:
        _print_nodes(result, json_dir=json_dir, html=html, as_json=json_)
        return

    summary = result.summary
    process = running_process(result.out)
    if json_:
        file = SummaryFile(summary=summary, out_dir=str(result.out))
        print_answer_json(Status(file=file, running=process is not None))
        return

    first, *rest = status_lines(summary, process, str(result.out)).items()
    print_text(first[1])
    for key, text in rest:
        print_text(text, f"{key:>7}  ")


def status_lines(summary: "StudySummary", process: str | None, out_dir: str) -> dict[str, str]:
    """Return the lines of a study's status by name, the answer first.

    `process` names the process that runs the study, or is None.
    """
    from autotune.report.describe import candidate_line, headline, savings

    # Here, "reused" counts only results of other studies, not results that this study measured.
    count = summary.counts() | {"reused": summary.num_from_others}
    counts = [f"{number} {kind}" for kind, number in count.items() if number or kind == "total"]
    lines = {
        "answer": f"So far: {headline(summary)}" if process else headline(summary),
        "study": summary.study + (f", being run by process {process}" if process else ""),
        "trials": ", ".join(counts),
        "time": f"{fmt_seconds(summary.wall_seconds)} in all, "
        f"{fmt_seconds(summary.probe_seconds)} of it probing",
        "files": out_dir,
    }

    if summary.recipe is not None:
        best = summary.recipe.winner
        lines["best"] = f"{best.config.label()}: {candidate_line(best)}"
        lines["search"] = savings(summary)
    return lines


def _print_nodes(
    result: "StudyResult", *, json_dir: Path | None, html: Path | None, as_json: bool
) -> None:
    """Print the nodes of a study as tables or JSON, and write the requested files."""
    from autotune.core.json_view import json_data
    from autotune.report.answer import nodes_answer
    from autotune.study.nodes import node_row
    from autotune.study.session import read_nodes

    nodes = read_nodes(result.record, result.url)
    rows: list[dict[str, Any]] = [json_data(node_row(node, result.task)) for node in nodes]
    if json_dir is not None:
        for row in rows:
            write_atomic(
                json_dir / f"{kebab_case(row['node'])}.json", json.dumps(row, indent=2) + "\n"
            )

    if as_json:
        print_json(rows)
    print_answer(lambda today: nodes_answer(nodes, result.task), html=html, silent=as_json)


def list_all(storage: Storage = None, json_: Json = False) -> None:
    """Print the studies of a database: the model, device, progress and best result of each study.

    Raises UsageError if the database `storage` does not exist.
    """
    from autotune.api import result_of
    from autotune.study.storage.optuna_storage import all_attributes
    from autotune.study.storage.study_record import StudyRecord

    rows = []
    try:
        url = existing_url(storage)
        attributes_by_study = all_attributes(url)
    except UsageError:
        if named_url(storage) is not None:
            raise
        url = ""
        # The database has no tables, because no study was ever started with it.
        attributes_by_study = {}
    for name, attributes in attributes_by_study.items():
        try:
            record = StudyRecord.from_attributes(name, attributes)
            if record is not None:
                rows.append(_row(result_of(record, url)))
        # Another version of autotune wrote this study; the other studies are still listed.
        except AutotuneError as error:
            print(error, file=sys.stderr)

    if json_:
        print_answer_json(rows)
        return
    if not rows:
        print(
            "there is no study in this database: start one with `autotune run`, or name another "
            "database with --storage"
        )
        return

    running = sum(row.running for row in rows)
    newest = rows[-1]
    speed = fmt_count(newest.tokens_per_s)
    print_text(
        f"{len(rows)} {'study' if len(rows) == 1 else 'studies'}, {running} running; the newest is "
        f"{newest.study}: {newest.model} on {newest.device}, {speed} tokens/s"
    )

    columns = {
        "study": "left",
        "model": "left",
        "device": "left",
        "trials": "right",
        "tokens/s": "right",
    }
    columns |= {"running": "left"}
    cells: list[tuple[str, ...]] = []
    for row in rows:
        facts = (row.study, row.model, row.device, str(row.trials))
        cells.append((*facts, fmt_count(row.tokens_per_s), "yes" if row.running else "no"))
    print_table(None, columns, cells)


def _row(study: "StudyResult") -> StudyRow:
    from autotune.study.storage.study_lock import running_process

    recipe = study.summary.recipe
    return StudyRow(
        study=study.summary.study,
        model=study.task.model.short,
        device=study.task.device.name,
        trials=len(study.summary.trials),
        running=running_process(study.out) is not None,
        tokens_per_s=recipe.winner.performance.tokens_per_second if recipe else None,
        files=str(study.out),
    )


def delete(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Delete a study's trials and probes from the database. The study's files stay.

    Other studies can then no longer reuse the probes. Raises UsageError if there is no such study,
    if a process works on the study, or if `yes` is false and stdin is not a terminal.
    """
    from contextlib import closing

    from autotune.api import load_study
    from autotune.study.storage.leases import Leases, Worker
    from autotune.study.storage.optuna_storage import delete_study
    from autotune.study.storage.probe_store import ProbeStore

    result = load_study(study, storage)
    with closing(Leases(result.url, study, Worker.this_process(""))) as leases:
        other_workers = leases.confirmed_others(partial(print, file=sys.stderr)).values()
        if other_workers:
            hosts = ", ".join(f"process {worker.pid} of {worker.host}" for worker in other_workers)
            raise UsageError(
                f"study {study!r} is being worked on by {hosts}", remedy="stop this work first"
            )

        if not yes:
            if not sys.stdin.isatty():
                raise UsageError(
                    "deleting needs a confirmation, but stdin is no terminal", remedy="add --yes"
                )
            answer = input(
                f"delete study {study} with its {len(result.summary.trials)} trials? [y/N] "
            )
            if answer.strip().lower() not in ("y", "yes"):
                print("nothing was deleted", file=sys.stderr if json_ else sys.stdout)
                return

        delete_study(result.url, study)
        with closing(ProbeStore(result.url)) as store:
            store.forget(study)
        leases.clear()

    if json_:
        print_answer_json(Files(study=study, files=(str(result.out),)))
    else:
        print(f"deleted; its files are still in {result.out}")


def oom(
    study: Annotated[
        str | None,
        typer.Argument(
            metavar="STUDY|MESSAGE",
            help="Name of the study; the newest by default. Or the out-of-memory error of another "
            "training: its message in quotation marks, its log file, or - for stdin.",
        ),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Print each configuration that did not fit, and its use of memory, as Markdown.",
        ),
    ] = False,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Print why trials of a study did not fit, and the first change to make.

    With `details`, print each configuration that did not fit, with proposed changes, as Markdown.
    A terminal shows the Markdown as formatted text. If `study` is an error message, print the cause
    and the first change.

    Raises UsageError if there is no such study, or if the text has no out-of-memory error.
    """
    from autotune.api import load_study
    from autotune.cli.oom_input import MESSAGE_FORMS, message_of
    from autotune.report.oom import oom_report

    if (message := message_of(study)) is not None:
        if json_:
            print_answer_json(message)
        else:
            for sentence in message.answer():
                print_text(sentence)
        return

    try:
        report = oom_report(load_study(study, storage).summary)
    except UsageError as error:
        if study and len(study.split()) > 1:
            problem = "this text has no out-of-memory error, and no study has this name"
            whole = "pass the whole message in quotation marks, its log file, or - for stdin"
            raise UsageError(problem, remedy=whole) from None
        raise UsageError(str(error), remedy=f"{error.remedy}; {MESSAGE_FORMS}") from None
    if json_:
        print_answer_json(report)
    elif not details:
        for sentence in report.answer():
            print_text(sentence)
        if report.entries:
            print_text("Every trial with its memory, and more changes:")
            print(f"  {study_command('oom', report.study)} --details")
    elif (screen := console()).is_terminal:
        from rich.markdown import Markdown

        screen.print(Markdown(report.markdown()))
    else:
        print(report.markdown(), end="")


def _print_files(study: str, paths: Iterable[Path], *, as_json: bool) -> None:
    """Print the paths of the files, one per line; the copy of the trainer is one folder."""
    if as_json:
        print_answer_json(Files(study=study, files=tuple(map(str, paths))))
        return

    from autotune.export.rollouts import RUNTIME

    for path in dict.fromkeys(one.parent if one.parent.name == RUNTIME else one for one in paths):
        print(path)


def export(
    study: StudyName = None,
    format_: Formats = None,
    out: Directory = None,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Write the exports of a study again: all, or the formats in `format_`."""
    from autotune.api import load_study
    from autotune.export.formats import FORMATS, require_formats

    require_formats(format_ or (), FORMATS)
    result = load_study(study, storage)
    _print_files(result.summary.study, result.export(*format_ or (), out=out), as_json=json_)


def report(
    study: StudyName = None,
    against: Annotated[
        str | None,
        typer.Argument(help="Another study: write one page with the winners of both instead."),
    ] = None,
    out: Directory = None,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Write a study's summary, reports and exports again, or one page that compares two studies.

    Print the answer, and the path of the page.

    Raises UsageError if there is no such study or if two studies train different models, and
    NothingFits if one of two studies has no winner.
    """
    from autotune.api import load_study
    from autotune.report import describe, versus

    result = load_study(study, storage)
    other = None if against is None else load_study(against, storage)
    file = result.report(out, against=other)
    if not json_:
        if other is None:
            print_text(describe.headline(result.summary))
        else:
            print_text(versus.headline(result.recipe, other.recipe))
            for sentence in versus.sentences(result.recipe, other.recipe):
                print_text(sentence)
    _print_files(result.summary.study, [file], as_json=json_)


def fleet(
    study: StudyName = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Number of workers, besides the `autotune run` that leads the study."
        ),
    ] = 1,
    format_: Annotated[
        list[str] | None,
        typer.Option("--format", help="kubernetes, skypilot, slurm (all by default); repeatable."),
    ] = None,
    out: Directory = None,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Write the files that start a study's workers on clusters, and print their paths.

    Raises UsageError if other machines cannot reach the study's database.
    """
    from autotune.api import load_study
    from autotune.export.clusters import SYSTEMS, render, workers_job
    from autotune.export.formats import require_formats

    require_formats(format_ or (), SYSTEMS)
    if existing_url(storage).startswith("sqlite"):
        raise UsageError(
            "the study is in an SQLite file, which other machines cannot share",
            remedy="run it with --storage postgresql+psycopg://..., or with --workers N on this "
            "machine alone",
        )

    result = load_study(study, storage)
    if result.record.limits is None:
        raise UsageError(
            f"study {result.summary.study!r} cannot be joined yet",
            remedy="wait until `autotune run` has begun it",
        )

    job = workers_job(
        study=result.summary.study,
        device=result.task.measured_on or result.task.device,
        fingerprint=result.record.fingerprint,
        budget_s=result.record.limits.budget_s,
        count=workers,
    )

    folder = out or result.out
    paths: list[Path] = []
    for system in format_ or SYSTEMS:
        for file, text in render(job, system).items():
            write_atomic(folder / file, text)
            paths.append(folder / file)
    _print_files(result.summary.study, paths, as_json=json_)
