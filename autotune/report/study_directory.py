"""Writes the files of the study directory.

Every file is written whole or not at all, except trials.jsonl, which gets a line for each trial.
"""

import json
from pathlib import Path
from typing import Any

from autotune.core.files import write_atomic, write_errors
from autotune.core.json_view import json_data
from autotune.core.serialization import to_data
from autotune.core.text import short_path, slug
from autotune.study.summary import Recipe, StudySummary, TrialRecord, summary_data


class TrialLog:
    """The file trials.jsonl of a study's directory.

    Each trial is a line, written when the trial ends.
    """

    def __init__(self, out: Path) -> None:
        self._path = out / "trials.jsonl"

    def begin(self, rows: list[TrialRecord]) -> None:
        """Replace the file with one that has the earlier sessions' trials. Raises StorageError."""
        write_atomic(self._path, "".join(self._line(row) for row in rows))

    def add(self, row: TrialRecord) -> None:
        """Append a trial. Raises StorageError."""
        with write_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(self._line(row))

    @staticmethod
    def _line(row: TrialRecord) -> str:
        return json.dumps(to_data(row)) + "\n"


def write_study(
    out: Path, summary: StudySummary, formats: list[str] | None = None
) -> dict[str, Any]:
    """Write the summary, the projection, the reports and the exports.

    Return the content of summary.json. Raises StorageError.
    """
    from autotune.report.html import render
    from autotune.report.oom import oom_report

    data = summary_data(summary, str(out))
    write_atomic(out / "summary.json", json.dumps(data, indent=2) + "\n")

    report = oom_report(summary)
    write_atomic(out / "oom_report.md", report.markdown())
    write_atomic(out / "oom_report.json", json.dumps(json_data(report), indent=2) + "\n")
    write_atomic(out / "report.html", render(summary, short_path(out)))

    recipe = summary.recipe
    if recipe is not None:
        projection = {
            "schema_version": 1,
            "study": summary.study,
            "winner": to_data(recipe.winner.cost),
        }
        projection["by_examples"] = [to_data(cost) for cost in recipe.by_examples]
        projection["price"] = to_data(recipe.price) if recipe.price else None
        projection["workload"] = recipe.workload.facts()
        write_atomic(out / "projection.json", json.dumps(projection, indent=2) + "\n")
        write_exports(out, recipe, formats)
    return data


def write_versus(out: Path, first: StudySummary, second: StudySummary) -> Path:
    """Write the page of two studies side by side and return its path.

    Both studies must have a winner. Raises StorageError.
    """
    from autotune.report.versus import render

    path = out / f"against-{slug(second.study)}.html"
    write_atomic(path, render(first, second))
    return path


def write_exports(out: Path, recipe: Recipe, formats: list[str] | None = None) -> list[Path]:
    """Write recipe.yaml into `out` and every other export into out/export.

    Return the paths. Raises StorageError.
    """
    from autotune.export.formats import export_all, usual_formats

    paths = []
    for name, text in export_all(recipe, formats or usual_formats(recipe)).items():
        path = out / name if name == "recipe.yaml" else out / "export" / name
        write_atomic(path, text, executable=name.endswith(".sh"))
        paths.append(path)
    return paths
