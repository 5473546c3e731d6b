"""The study directory: what is written, under which names. Every file is written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from autotune.core.errors import StorageError
from autotune.core.files import storage_errors, write_atomic
from autotune.core.serialization import to_data
from autotune.study.summary import StudySummary, TrialRecord, summary_data

FREE_BYTES = 200 * 2**20


def prepare(out: Path) -> None:
    """Make the directory and prove that it can be written, before any GPU time is spent. Raises StorageError."""
    with storage_errors(out):
        (out / "logs").mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_text("")
        probe.unlink()
        space = os.statvfs(out)
    if space.f_bavail * space.f_frsize < FREE_BYTES:
        raise StorageError(
            f"less than {FREE_BYTES >> 20} MiB are free at {out}", remedy="free some, or give another --out"
        )


class TrialLog:
    """trials.jsonl: a line a trial, as it ends."""

    def __init__(self, out: Path, rows: list[TrialRecord]) -> None:
        self._path = out / "trials.jsonl"
        write_atomic(self._path, "".join(self._line(row) for row in rows))

    def add(self, row: TrialRecord) -> None:
        with storage_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(self._line(row))

    @staticmethod
    def _line(row: TrialRecord) -> str:
        return json.dumps(to_data(row)) + "\n"


def write_study(out: Path, summary: StudySummary, formats: list[str] | None = None) -> dict[str, Any]:
    """Write summary, projection, reports and exports; returns what summary.json holds."""
    from autotune.report import oom_report, render

    data = summary_data(summary, str(out))
    write_atomic(out / "summary.json", json.dumps(data, indent=2) + "\n")
    report = oom_report(summary)
    write_atomic(out / "oom_report.md", report.markdown())
    write_atomic(out / "oom_report.json", json.dumps(report.data(), indent=2) + "\n")
    write_atomic(out / "report.html", render(summary, out.name))
    recipe = summary.recipe
    if recipe is not None:
        projection = {"schema_version": 1, "study": summary.study, "winner": to_data(recipe.winner.cost)}
        projection["by_examples"] = [to_data(cost) for cost in recipe.by_examples]
        projection["price"] = to_data(recipe.price) if recipe.price else None
        projection["workload"] = recipe.workload.facts()
        write_atomic(out / "projection.json", json.dumps(projection, indent=2) + "\n")
        write_exports(out, summary, formats)
    return data


def write_exports(out: Path, summary: StudySummary, formats: list[str] | None = None) -> list[Path]:
    """recipe.yaml beside the summary, every other export under export/."""
    from autotune.export import USUAL, export_all

    assert summary.recipe is not None
    written = []
    for name, text in export_all(summary.recipe, formats or USUAL).items():
        path = out / name if name == "recipe.yaml" else out / "export" / name
        write_atomic(path, text, executable=name.endswith(".sh"))
        written.append(path)
    return written
