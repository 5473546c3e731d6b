"""Time the tests as README says to run them: the seconds and the processor seconds of each whole
run.
"""

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

from bench import ROOT, Mode, finish, run_program

PASSED = re.compile(r"(\d+) passed")
LINES_SHOWN = 30  # of a run that failed


def run_gate(args: argparse.Namespace) -> None:
    """Run all tests several times, or some tests with more hostile inputs if --out is given.

    `--fuzz 20 --runs 1 --tests tests/system/test_fuzz.py` runs 20,000 hostile inputs.
    """
    if (args.tests or args.fuzz > 1) and args.out is None:
        raise SystemExit("--tests and --fuzz need --out: the stored result is of the gate's tests")

    rows = []
    for _ in range(args.runs):
        rows.append(timed(args.tests, args.fuzz))
        print(rows[-1], flush=True)
    finish(args, None, rows, ["seconds", "cpu_seconds", "tests", "load_at_start"])


def timed(tests: list[Path], fuzz: int) -> dict[str, Any]:
    """Run pytest once. Raises SystemExit if a test fails."""
    load, start, used = os.getloadavg()[0], time.monotonic(), cpu_seconds()
    command = [sys.executable, "-m", "pytest", "-q", *map(str, tests)]
    environment = os.environ | {"AUTOTUNE_FUZZ": str(fuzz)}
    # Without this, each process would compile torch and transformers anew: 18 seconds of processor
    # time. `.ci/run` does the same.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, text=True
    )

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
    """Return the processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowest run and the highest load."""
    return {
        "runs": len(rows),
        "seconds": max(row["seconds"] for row in rows),
        "median_seconds": statistics.median(row["seconds"] for row in rows),
        "cpu_seconds": statistics.median(row["cpu_seconds"] for row in rows),
        "tests": min(row["tests"] for row in rows),
        "load_at_start": max(row["load_at_start"] for row in rows),
    }


OPTIONS = {
    "--runs": 3,
    "--fuzz": {"default": 1, "help": "times the hostile inputs of the gate"},
    "--tests": {"nargs": "*", "type": Path, "default": [], "help": "run only these tests"},
}
MODES = {"": Mode(run=run_gate, result="gate", summarize=summarize, options=OPTIONS)}


if __name__ == "__main__":
    run_program(MODES, __doc__)
