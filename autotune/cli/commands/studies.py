"""`autotune list`, `status`, `oom`, `export`, `report`, `resume` and `delete`: studies that exist."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.cli.commands.session import StoredStudy, load, open_study
from autotune.core.errors import AutotuneError, NothingFits, UsageError
from autotune.core.units import fmt_count, fmt_seconds
from autotune.report.describe import candidate_line
from autotune.report.study_directory import write_exports, write_study
from autotune.study.storage.location import running_process, storage_url
from autotune.study.summary import summary_data


def status(name: str | None, storage: str | None, as_json: bool) -> None:
    """How far a study is, and its best so far."""
    found = open_study(name, storage)
    summary, counts, process = found.summary, found.summary.counts(), running_process(found.out)
    if as_json:
        _json(summary_data(summary, str(found.out)) | {"running": process is not None})
        return
    recipe = summary.recipe
    lines = {
        "study": summary.study + (f", being run by process {process}" if process else ""),
        "trials": ", ".join(f"{count} {kind}" for kind, count in counts.items() if count or kind == "total"),
        "time": f"{fmt_seconds(summary.wall_seconds)} in all, {fmt_seconds(summary.probe_seconds)} of it probing",
        "files": str(found.out),
    }
    if recipe is not None:
        best = recipe.winner
        lines["best"] = f"{best.config.label()}: {candidate_line(best)}"
    for key, text in lines.items():
        print(f"{key:>7}  {text}")


def list_all(storage: str | None, as_json: bool) -> None:
    """The studies of a database: what they tune, how far they are, and their best."""
    from autotune.cli.commands.catalogs import print_table
    from autotune.study.storage.optuna_storage import all_attributes
    from autotune.study.storage.study_record import StudyRecord

    url, rows = storage_url(storage), list[dict[str, Any]]()
    for name, attributes in all_attributes(url).items():
        try:
            record = StudyRecord.from_attributes(name, attributes)
        except AutotuneError as error:
            print(error, file=sys.stderr)
            continue
        if record is None:
            continue
        found = load(name, url, record)
        recipe = found.summary.recipe
        rows.append(
            {
                "study": name,
                "model": found.task.model.short,
                "device": found.task.device.name,
                "trials": len(found.summary.trials),
                "running": running_process(found.out) is not None,
                "tokens_per_s": recipe.winner.performance.tokens_per_second if recipe else None,
                "files": str(found.out),
            }
        )
    if as_json:
        _json(rows)
        return
    if not rows:
        print("there is no study in this database: start one with `autotune run`, or name --storage")
        return
    columns = {"study": "left", "model": "left", "device": "left", "trials": "right", "tokens/s": "right", "": "left"}
    print_table(
        None,
        columns,
        [
            (
                *(str(row[key]) for key in ("study", "model", "device", "trials")),
                fmt_count(row["tokens_per_s"]),
                "running" if row["running"] else "",
            )
            for row in rows
        ],
    )


def delete(name: str, storage: str | None, *, sure: bool) -> None:
    """Forget a study: its trials and its probes, which no other study can use then. Its files stay.

    Raises:
        UsageError: no such study, somebody is at work on it, or nobody is `sure` and none can be asked.
    """
    from autotune.study.storage.leases import Leases, Worker
    from autotune.study.storage.optuna_storage import delete_study
    from autotune.study.storage.probe_store import ProbeStore

    found, url = open_study(name, storage), storage_url(storage)
    coordinator = Leases(url, name, Worker.here(""))
    if at_work := coordinator.certainly(partial(print, file=sys.stderr)):
        hosts = ", ".join(f"process {one.pid} of {one.host}" for one in at_work.values())
        raise UsageError(f"study {name!r} is being worked on by {hosts}", remedy="stop it first")
    if not sure:
        if not sys.stdin.isatty():
            raise UsageError("nobody can be asked here", remedy="add --yes")
        answer = input(f"delete study {name} with its {len(found.summary.trials)} trials? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return
    delete_study(url, name)
    store = ProbeStore(url)
    store.forget(name)
    store.close()
    coordinator.clear()
    print(f"deleted; its files are still in {found.out}")


def resume(name: str | None, storage: str | None, changes: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Continue a study with what it was begun with, but for what is given anew."""
    from autotune.cli.commands.run import run

    found = open_study(name, storage)
    spec = found.record.spec
    given = {key: value for key, value in changes.items() if value is not None}
    spec = replace(spec, **given, study=found.summary.study, storage=storage, out=str(found.out))
    run(spec, as_json=as_json, quiet=quiet)


def oom(name: str | None, storage: str | None, as_json: bool) -> None:
    """Every OOM and refusal of a study, with what to change."""
    from autotune.report import oom_report

    report = oom_report(open_study(name, storage).summary)
    if as_json:
        _json(report.data())
    else:
        print(report.markdown())


def export(name: str | None, storage: str | None, formats: list[str], out: Path | None) -> None:
    """Write the exports of a study again, all of them or some."""
    from autotune.export import FORMATS

    for wanted in formats:
        if wanted not in FORMATS:
            raise UsageError(f"there is no format {wanted!r}", remedy=f"the formats are {', '.join(FORMATS)}")
    found = open_study(name, storage)
    _must_have_winner(found)
    for path in write_exports(out or found.out, found.summary, formats or None):
        print(path)


def report(name: str | None, storage: str | None, out: Path | None) -> None:
    """Write summary, reports and exports of a study again."""
    found = open_study(name, storage)
    folder = out or found.out
    write_study(folder, found.summary)
    print(folder / "report.html")


def _must_have_winner(found: StoredStudy) -> None:
    if found.summary.recipe is None:
        raise NothingFits(
            f"study {found.summary.study!r} has no configuration that came through",
            remedy="see `autotune oom`, or let the study go on with `autotune run --study NAME`",
        )


def _json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
