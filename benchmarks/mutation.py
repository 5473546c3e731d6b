"""Measure which share of single changes of meaning, in the modules that matter, the tests notice."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import save

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests import mutate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.monotonic()
    chosen, equivalent = mutate.choose(mutate.mutants(), args.seed, args.count)
    answers = [*mutate.ask(chosen, args.jobs), *((mutant, None) for mutant in equivalent)]
    rows = [
        {"killed": killed, "file": mutant.file, "scope": mutant.scope, "was": mutant.was, "now": mutant.now}
        for mutant, killed in sorted(answers, key=lambda answer: (answer[1] is not False, answer[0].name))
    ]
    summary = summarize(rows) | {"seed": args.seed, "minutes": (time.monotonic() - start) / 60}
    save("mutation", None, summary, rows, args.out)
    print(summary)


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


if __name__ == "__main__":
    main()
