"""Run the program on inputs like the ones in public reports, and compare each result with the
correct one.

The cases are in `tests/helpers/reported.py`, with their files. The tests run the same cases without
their slow steps.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench import Mode, finish, run_program

from tests.helpers.reported import CASES, unmet


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many cases have their correct result."""
    return {"cases": len(rows), "right": sum(not row["unmet"] for row in rows)}


def run(args: argparse.Namespace) -> None:
    """Run all cases, each in an empty folder."""
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = unmet(case, Path(folder))
        rows.append(
            {
                "case": case.name,
                "sources": case.sources,
                "expected": case.right,
                "steps": len(case.steps),
                "unmet": found,
            }
        )
        print(case.name, "right" if not found else "\n".join(["", *found]), flush=True)
    finish(args, None, rows, ["case", "steps"])


MODES = {"": Mode(run=run, result="reports", summarize=summarize)}


if __name__ == "__main__":
    run_program(MODES, __doc__)
