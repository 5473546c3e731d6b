"""Check the runs of public reports about GRPO's memory, and compare each verdict with the report's
outcome.
"""

import argparse
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from bench import DATA, Mode, finish, run_program

from autotune.core.errors import UsageError
from autotune.planning.run_check import check
from autotune.problem.run_cost import FITS, OOM

REPORTS = DATA / "grpo_reports.yaml"
RIGHT = {"ran": FITS, "oom": OOM, "refused": "refused"}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`dangerous` counts the runs that failed although the verdict says that they fit."""
    return {
        "reports": len(rows),
        "sources": len({row["source"] for row in rows}),
        "agree": sum(row["verdict"] == RIGHT[row["outcome"]] for row in rows),
        "dangerous": sum(row["verdict"] == FITS and row["outcome"] != "ran" for row in rows),
    }


def checked(report: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on a report's run, and its lowest and highest memory in GiB."""

    def version(name: str) -> str:
        if name != "trl":
            return of(name)
        return report["trl"].partition(" ")[0].replace(".x", ".12")

    of = metadata.version
    with tempfile.TemporaryDirectory() as folder, patch.object(metadata, "version", version):
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump({"reward_funcs": "a_reward"} | report["settings"]))
        options = {"gpu": report["gpu"], "tokens_per_example": report.get("prompt_tokens")}
        try:
            found = check(file, options)
        except UsageError as error:
            return {"verdict": "refused", "why": str(error).partition(": ")[2]}
    least, most = found.checked.bounds.bounds_gib
    return {
        "verdict": found.checked.state,
        "least_gib": round(least, 1),
        "most_gib": None if most is None else round(most, 1),
        "limit_gib": round(found.limit_gib, 1),
    }


def run(args: argparse.Namespace) -> None:
    """Check the run of each report."""
    rows = []
    for report in yaml.safe_load(REPORTS.read_text()):
        facts = {name: report.get(name) for name in ("name", "source", "gpu", "outcome")}
        rows.append(facts | {"reported_gib": report.get("reported_gib")} | checked(report))
        print(*(f"{value}" for value in rows[-1].values()), sep="  ", flush=True)
    finish(args, None, rows, ["name", "outcome", "verdict"])


MODES = {"": Mode(run=run, result="rollout_reports", summarize=summarize)}


if __name__ == "__main__":
    run_program(MODES, __doc__)
