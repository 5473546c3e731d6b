"""Run the README's first command on a CPU, and the script that it exports: is the run as fast as was said?

Each repetition is a study of its own, and passes over all examples. The machine should do nothing else. `ratio` is what
was said divided by what was measured, both in useful tokens per second: the median of the repetitions.
"""

import argparse
import json
import re
import shlex
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, run_python, run_study, save, table

from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data

FIRST_COMMAND = re.compile(r"^pip install .* && autotune run (.*)$", re.MULTILINE)
COLUMNS = ["config", "said", "measured", "ratio", "low", "high"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = shlex.split(FIRST_COMMAND.findall((ROOT / "README.md").read_text())[0])
    rows: list[dict[str, Any]] = []
    fingerprint: dict[str, Any] = {}
    for _ in range(args.repeats):
        folder = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
        study = run_study(folder, *options, "--out", "out")
        script = ["out/export/train.py", "--random-weights", "--output-dir", ""]
        done = json.loads(run_python(script, folder).splitlines()[-1])
        rows.append(row_of(study["winner"], done))
        table(rows[-1:], COLUMNS)
        fingerprint = {key: value for key, value in study["fingerprint"].items() if key != "digest"}
    summary = summarize(rows)
    save("cpu_truth", from_data(Fingerprint, fingerprint), summary, rows, args.out)
    print(summary)


def row_of(winner: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    """What the study said of its winner, with the bounds of its interval, and what the run did; tokens per second."""
    said, measured = winner["performance"]["tokens_per_second"], done["tokens_per_second"]
    hours, interval = winner["cost"]["full_run_hours"], winner["cost"]["interval_hours"]
    return {
        "config": winner["config"],
        "said": said,
        "low": said * hours / interval[1],
        "high": said * hours / interval[0],
        "measured": measured,
        "steps": done["steps"],
        "ratio": said / measured,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows]
    return {
        "repeats": len(rows),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "inside": sum(row["low"] <= row["measured"] <= row["high"] for row in rows),
    }


if __name__ == "__main__":
    main()
