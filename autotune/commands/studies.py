"""`autotune status`, `oom`, `export` and `report`: what a study that exists says. No GPU, no torch."""

import json
import sys
from pathlib import Path
from typing import Any

from autotune.commands.outputs import write_exports, write_study
from autotune.commands.session import StoredStudy, open_study, running
from autotune.errors import NothingFits, UsageError
from autotune.recipe import summary_data
from autotune.units import fmt_count, fmt_seconds, fmt_usd


def status(name: str | None, storage: str | None, as_json: bool) -> None:
    """How far a study is, and its best so far."""
    found = open_study(name, storage)
    summary, counts, process = found.summary, found.summary.counts(), running(found.out)
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
        speed = f"{fmt_count(best.performance.tokens_per_second)} tokens/s"
        cost = f"{fmt_usd(best.cost.full_run_usd)}, {fmt_seconds(best.cost.full_run_hours * 3600)}"
        lines["best"] = f"{best.config.label()}: {speed} [{best.evidence}]; full run {cost}"
    for key, text in lines.items():
        print(f"{key:>7}  {text}")


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
