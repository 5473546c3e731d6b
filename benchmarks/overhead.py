"""Measure the time of the program itself: the start of
commands, and the report of a large study.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

from bench import Mode, finish, run_program, worker

from autotune.cli import app
from autotune.core.probe_types import Fingerprint
from tests.helpers.factories import summary as make_summary


def cpu_fingerprint() -> Fingerprint:
    """Return the fingerprint of this machine's processors."""
    with worker("cpu") as prober:
        return prober.fingerprint


# --- startup

COMMANDS = {
    "python -c pass": None,
    "--help": ["--help"],
    **{f"{name} --help": [name, "--help"] for name in app.COMMANDS},
    "gpus": ["gpus"],
    "models": ["models"],
    "spaces": ["spaces"],
    "an argument error": ["run", "--gpu", "a10x", "--model", "mistral-7b"],
}


def run_startup(args: argparse.Namespace) -> None:
    """Measure the time from start to exit of commands that need no torch: the median of several
    runs.
    """
    environment = dict(os.environ)
    # Without this, each run would compile the files that an installation compiles once.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in COMMANDS.items():
            command = [sys.executable, "-c", "pass"]
            if arguments is not None:
                command = [sys.executable, "-m", "autotune", *arguments]
            times = []
            for _ in range(args.runs):
                start = time.perf_counter()
                subprocess.run(
                    command, cwd=folder, env=environment, capture_output=True, check=False
                )
                times.append((time.perf_counter() - start) * 1000)
            rows.append(
                {"command": name, "median_ms": statistics.median(times), "max_ms": max(times)}
            )
    finish(args, cpu_fingerprint(), rows, ["command", "median_ms", "max_ms"])


def summarize_startup(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"help_ms": rows[1]["median_ms"], "slowest_ms": max(row["median_ms"] for row in rows)}


# --- report


def run_report(args: argparse.Namespace) -> None:
    """Measure the time to build a report of many trials, and its size."""
    study = make_summary(trials=args.trials)
    study = replace(
        study, trials=tuple(replace(row, log=f"trial-{row.number:04d}.log") for row in study.trials)
    )
    rows = []
    started = time.perf_counter()
    # the first run loads plotly and jinja2, as the command does
    from autotune.report.html import render

    for run in range(args.runs):
        page = render(study, "out")
        rows.append(
            {"run": run, "seconds": time.perf_counter() - started, "bytes": len(page.encode())}
        )
        started = time.perf_counter()
    finish(args, cpu_fingerprint(), rows, trials=len(study.trials))


def summarize_report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": rows[0]["seconds"],
        "bytes": rows[0]["bytes"],
        "seconds_again": statistics.median(row["seconds"] for row in rows[1:]),
    }


MODES = {
    "startup": Mode(
        run=run_startup, result="startup", summarize=summarize_startup, options={"--runs": 15}
    ),
    "report": Mode(
        run=run_report,
        result="report",
        summarize=summarize_report,
        options={"--trials": 1000, "--runs": 5},
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
