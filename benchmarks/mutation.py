"""Measure which share of single changes of meaning, in the modules that matter, the tests notice."""

import argparse
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

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
    survivors = [mutant for mutant, killed in mutate.ask(chosen, args.jobs) if not killed]
    summary = {
        "mutants": len(chosen),
        "killed_share": 1 - len(survivors) / len(chosen),
        "equivalent": len(equivalent),
        "minutes": (time.monotonic() - start) / 60,
        "mutants_by_package": Counter(mutant.package for mutant in chosen),
        "survivors_by_package": Counter(mutant.package for mutant in survivors),
    }
    keys = ("file", "scope", "line", "was", "now")
    rows = [{key: asdict(mutant)[key] for key in keys} for mutant in sorted(survivors, key=lambda m: m.name)]
    save("mutation", None, summary, rows, args.out)
    print(summary)


if __name__ == "__main__":
    main()
