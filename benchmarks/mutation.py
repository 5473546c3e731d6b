"""Measure the share of single changes of meaning, in the modules that matter, that the tests
notice.
"""

import argparse
import time
from collections import Counter
from typing import Any

from bench import Mode, finish, run_program

from tests import mutate


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`killed` is None in the rows of mutants that are equivalent; survivors stand first."""
    asked = [row for row in rows if row["killed"] is not None]
    survivors = [row["file"].split("/")[0] for row in asked if not row["killed"]]
    return {
        "mutants": len(asked),
        "killed_share": 1 - len(survivors) / len(asked),
        "equivalent": len(rows) - len(asked),
        "mutants_by_package": Counter(row["file"].split("/")[0] for row in asked),
        "survivors_by_package": Counter(survivors),
    }


def run(args: argparse.Namespace) -> None:
    """Ask the tests about single changes of meaning, and measure the share that they notice."""
    start = time.monotonic()
    chosen, equivalent = mutate.choose(mutate.mutants(), args.seed, args.count)
    answers = [*mutate.ask(chosen, args.jobs), *((mutant, None) for mutant in equivalent)]
    rows = [
        {
            "killed": killed,
            "file": mutant.file,
            "scope": mutant.scope,
            "was": mutant.was,
            "now": mutant.now,
        }
        for mutant, killed in sorted(
            answers, key=lambda answer: (answer[1] is not False, answer[0].name)
        )
    ]
    finish(args, None, rows, seed=args.seed, minutes=(time.monotonic() - start) / 60)


MODES = {
    "": Mode(
        run=run,
        result="mutation",
        summarize=summarize,
        options={"--seed": 0, "--count": 200, "--jobs": 2},
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
