"""Measure the time from process start to exit of commands that need no torch: the median of several runs."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save, table

from autotune.cli import app
from autotune.probe.supervisor import WorkerProber

COMMANDS = {
    "python -c pass": None,
    "--help": ["--help"],
    **{f"{name} --help": [name, "--help"] for name in app.COMMANDS},
    "gpus": ["gpus"],
    "models": ["models"],
    "spaces": ["spaces"],
    "an argument error": ["run", "--gpu", "a10x", "--model", "mistral-7b"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each run would compile what an installation compiles once
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in COMMANDS.items():
            command = [sys.executable, "-c", "pass"]
            if arguments is not None:
                command = [sys.executable, "-m", "autotune", *arguments]
            times = []
            for _ in range(args.runs):
                start = time.perf_counter()
                subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
                times.append((time.perf_counter() - start) * 1000)
            rows.append({"command": name, "median_ms": statistics.median(times), "max_ms": max(times)})
        with WorkerProber("cpu", Path(folder)) as prober:
            fingerprint = prober.fingerprint
    save("startup", fingerprint, summarize(rows), rows, args.out)
    table(rows, ["command", "median_ms", "max_ms"])


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"help_ms": rows[1]["median_ms"], "slowest_ms": max(row["median_ms"] for row in rows)}


if __name__ == "__main__":
    main()
