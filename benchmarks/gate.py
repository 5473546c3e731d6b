"""Time the tests as README says to run them: the seconds and the processor's seconds of each whole run."""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, save, table

PASSED = re.compile(r"(\d+) passed")
LINES_SHOWN = 30  # of a run that failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fuzz", type=int, default=1, help="how many times the hostile inputs of the gate")
    parser.add_argument("--out", type=Path)
    parser.add_argument("tests", nargs="*", help="run only these tests, and write the result to --out")
    args = parser.parse_args()
    if (args.tests or args.fuzz > 1) and args.out is None:
        parser.error("a run of other tests than the gate's needs --out")

    rows = []
    for _ in range(args.runs):
        rows.append(timed(args.tests, args.fuzz))
        print(rows[-1], flush=True)

    save("gate", None, summarize(rows), rows, args.out)
    table(rows, ["seconds", "cpu_seconds", "tests", "load_at_start"])


def timed(tests: list[str], fuzz: int) -> dict[str, Any]:
    """Run pytest once. Raises SystemExit if a test fails."""
    load, start, used = os.getloadavg()[0], time.monotonic(), cpu_seconds()
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    environment = os.environ | {"AUTOTUNE_FUZZ": str(fuzz)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, text=True)

    if ended.returncode:
        print("\n".join(ended.stdout.splitlines()[-LINES_SHOWN:]))
        raise SystemExit(f"pytest ended with code {ended.returncode}")
    return {
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(cpu_seconds() - used, 1),
        "tests": int(PASSED.findall(ended.stdout)[-1]),
        "load_at_start": round(load, 2),
        "cores": os.cpu_count(),
    }


def cpu_seconds() -> float:
    """The processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest run, and medians of the rest."""
    return {
        "runs": len(rows),
        "seconds": max(row["seconds"] for row in rows),
        "median_seconds": statistics.median(row["seconds"] for row in rows),
        "cpu_seconds": statistics.median(row["cpu_seconds"] for row in rows),
        "tests": min(row["tests"] for row in rows),
        "load_at_start": max(row["load_at_start"] for row in rows),
    }


if __name__ == "__main__":
    main()
