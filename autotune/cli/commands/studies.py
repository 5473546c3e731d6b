"""The commands about studies that exist: list, status, oom, export, report, resume, delete and fleet."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.api import StudyResult, load_study, result_of
from autotune.cli.commands.catalogs import print_json
from autotune.core.errors import AutotuneError, UsageError
from autotune.core.files import write_atomic
from autotune.core.units import fmt_count, fmt_seconds
from autotune.study.storage.location import running_process, storage_url


def status(name: str | None, storage: str | None, as_json: bool) -> None:
    """Print how far a study is, and its best configuration so far."""
    from autotune.report.describe import candidate_line

    study = load_study(name, storage)
    summary = study.summary
    process = running_process(study.out)
    if as_json:
        print_json(study.data() | {"running": process is not None})
        return
    counts = [f"{count} {kind}" for kind, count in summary.counts().items() if count or kind == "total"]
    lines = {
        "study": summary.study + (f", being run by process {process}" if process else ""),
        "trials": ", ".join(counts),
        "time": f"{fmt_seconds(summary.wall_seconds)} in all, {fmt_seconds(summary.probe_seconds)} of it probing",
        "files": str(study.out),
    }
    if summary.recipe is not None:
        best = summary.recipe.winner
        lines["best"] = f"{best.config.label()}: {candidate_line(best)}"
    for key, text in lines.items():
        print(f"{key:>7}  {text}")


def list_all(storage: str | None, as_json: bool) -> None:
    """Print the studies of a database: what they tune, how far they are, and their best."""
    from autotune.cli.commands.catalogs import print_table
    from autotune.study.storage.optuna_storage import all_attributes
    from autotune.study.storage.study_record import StudyRecord

    url = storage_url(storage)
    rows = []
    for name, attributes in all_attributes(url).items():
        try:
            record = StudyRecord.from_attributes(name, attributes)
            if record is not None:
                rows.append(_row(result_of(record, url)))
        except AutotuneError as error:  # of another version: the others are still listed
            print(error, file=sys.stderr)
    if as_json:
        print_json(rows)
        return
    if not rows:
        print("there is no study in this database: start one with `autotune run`, or name --storage")
        return
    columns = {"study": "left", "model": "left", "device": "left", "trials": "right", "tokens/s": "right", "": "left"}
    cells = []
    for row in rows:
        known = tuple(str(row[key]) for key in ("study", "model", "device", "trials"))
        cells.append((*known, fmt_count(row["tokens_per_s"]), "running" if row["running"] else ""))
    print_table(None, columns, cells)


def _row(study: StudyResult) -> dict[str, Any]:
    recipe = study.summary.recipe
    return {
        "study": study.summary.study,
        "model": study.task.model.short,
        "device": study.task.device.name,
        "trials": len(study.summary.trials),
        "running": running_process(study.out) is not None,
        "tokens_per_s": recipe.winner.performance.tokens_per_second if recipe else None,
        "files": str(study.out),
    }


def delete(name: str, storage: str | None, *, sure: bool) -> None:
    """Delete a study: its trials and its probes, which no other study can use then. Its files stay.

    Raises:
        UsageError: no such study, somebody is working on it, or nobody is `sure` and none can be asked.
    """
    from contextlib import closing

    from autotune.study.storage.leases import Leases, Worker
    from autotune.study.storage.optuna_storage import delete_study
    from autotune.study.storage.probe_store import ProbeStore

    study = load_study(name, storage)
    with closing(Leases(study.url, name, Worker.here(""))) as leases:
        at_work = leases.confirmed_others(partial(print, file=sys.stderr)).values()
        if at_work:
            hosts = ", ".join(f"process {worker.pid} of {worker.host}" for worker in at_work)
            raise UsageError(f"study {name!r} is being worked on by {hosts}", remedy="stop it first")
        if not sure:
            if not sys.stdin.isatty():
                raise UsageError("nobody can be asked here", remedy="add --yes")
            answer = input(f"delete study {name} with its {len(study.summary.trials)} trials? [y/N] ")
            if answer.strip().lower() not in ("y", "yes"):
                print("nothing was deleted")
                return
        delete_study(study.url, name)
        with closing(ProbeStore(study.url)) as store:
            store.forget(name)
        leases.clear()
    print(f"deleted; its files are still in {study.out}")


def resume(name: str | None, storage: str | None, changes: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Continue a study with the options it was begun with, except those that are given anew."""
    from autotune.cli.commands.run import run
    from autotune.study.session import find_record

    record = find_record(name, storage_url(storage))
    given = {key: value for key, value in changes.items() if value is not None}
    spec = replace(record.spec, **given, study=record.task.study, storage=storage, out=record.out)
    run(spec, as_json=as_json, quiet=quiet)


def oom(name: str | None, storage: str | None, as_json: bool) -> None:
    """Print every OOM and refusal of a study, with what to change."""
    from autotune.report import oom_report

    report = oom_report(load_study(name, storage).summary)
    if as_json:
        print_json(report.data())
    else:
        print(report.markdown())


def export(name: str | None, storage: str | None, formats: list[str], out: Path | None) -> None:
    """Write the exports of a study again, all of them or some."""
    from autotune.export import FORMATS

    require_formats(formats, FORMATS)
    for path in load_study(name, storage).export(*formats, out=out):
        print(path)


def require_formats(wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raises UsageError for a format that is not known."""
    names = list(known)
    for name in wanted:
        if name not in names:
            raise UsageError(f"there is no format {name!r}", remedy=f"the formats are {', '.join(names)}")


def report(name: str | None, storage: str | None, out: Path | None) -> None:
    """Write summary, reports and exports of a study again."""
    print(load_study(name, storage).report(out))


def fleet(name: str | None, storage: str | None, *, workers: int, formats: list[str], out: Path | None) -> None:
    """Write the files that start a study's workers on clusters, and print their paths.

    Raises UsageError if no other machine could reach the study.
    """
    from autotune.export.clusters import SYSTEMS, render, workers_job

    require_formats(formats, SYSTEMS)
    if storage_url(storage).startswith("sqlite"):
        raise UsageError(
            "the study is in an SQLite file, which other machines cannot share",
            remedy="run it with --storage postgresql+psycopg://..., or with --workers N on this machine alone",
        )
    study = load_study(name, storage)
    if study.record.limits is None:
        raise UsageError(
            f"study {study.summary.study!r} cannot be joined yet", remedy="wait until `autotune run` has begun it"
        )
    job = workers_job(
        study=study.summary.study,
        device=study.task.measured_on or study.task.device,
        fingerprint=study.record.fingerprint,
        budget_s=study.record.limits.budget_s,
        count=workers,
    )
    folder = out or study.out
    folder.mkdir(parents=True, exist_ok=True)
    for wanted in formats or SYSTEMS:
        for file, text in render(job, wanted).items():
            write_atomic(folder / file, text)
            print(folder / file)
