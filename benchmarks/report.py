"""Measure the time to build a report of many trials, and its size."""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import save

from autotune.probe.supervisor import WorkerProber

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.helpers.factories import summary as make_summary  # the study of the report's tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    study = make_summary(trials=args.trials)
    study = replace(study, trials=tuple(replace(row, log=f"trial-{row.number:04d}.log") for row in study.trials))
    rows = []
    started = time.perf_counter()
    from autotune.report.html import render  # the first run loads plotly and jinja2, as the command does

    for run in range(args.runs):
        page = render(study, "out")
        rows.append({"run": run, "seconds": time.perf_counter() - started, "bytes": len(page.encode())})
        started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, WorkerProber("cpu", Path(folder)) as prober:
        fingerprint = prober.fingerprint
    summary = summarize(rows) | {"trials": len(study.trials)}
    save("report", fingerprint, summary, rows, args.out)
    print(summary)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": rows[0]["seconds"],
        "bytes": rows[0]["bytes"],
        "seconds_again": statistics.median(row["seconds"] for row in rows[1:]),
    }


if __name__ == "__main__":
    main()
