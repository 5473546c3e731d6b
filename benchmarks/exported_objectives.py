"""Search with other objectives, and train what was exported: predicted and measured speed and memory.

Each is one call of `autotune run --objective X --verify`, whose exported file trains for 200 micro batches. An error is
the prediction divided by the measurement, minus 1.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import Rows, largest, run_study, save, table

from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig

COLUMNS = ["objective", "file", "promised_tokens_per_s", "tokens_per_s", "speed_error", "promised_gib"]
COLUMNS += ["reserved_gib", "memory_error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--model", default="qwen2.5-3b")
    parser.add_argument("--budget", default="55s")
    parser.add_argument("--objectives", nargs="*", default=["reward", "classification", "dpo"])
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call on the same machine to continue")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("exported_objectives", args.out, args.rows)
    for objective in args.objectives:
        if not rows.has(objective=objective):
            rows.add(exported(objective, args))
            table(rows.all[-1:], COLUMNS)
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows.all]
    fingerprint = from_data(Fingerprint, rows.all[0]["fingerprint"])
    save("exported_objectives", fingerprint, summarize(shown), shown, args.out)
    print(summarize(shown))


def exported(objective: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row with what the study promised of its winner, and what the exported run took."""
    options = ["--gpu", args.gpu, "--model", args.model, "--objective", objective, "--budget", args.budget, "--verify"]
    study = run_study(Path(tempfile.mkdtemp(prefix="autotune-bench-")), *options, "--out", "out")
    done = study["verification"]
    speed = done["promised_tokens_per_s"] * done["promised_step_s"] / done["seconds_per_step"]
    return {
        "objective": objective,
        "model": args.model,
        "config": TrainConfig(**done["config"]).label(),
        "file": done["file"],
        "micro_steps": done["micro_steps"],
        "promised_tokens_per_s": done["promised_tokens_per_s"],
        "tokens_per_s": speed,
        "speed_error": done["promised_tokens_per_s"] / speed - 1,
        "promised_gib": done["promised_gib"],
        "reserved_gib": done["reserved_gib"],
        "memory_error": done["promised_gib"] / done["reserved_gib"] - 1,
        "fingerprint": {key: value for key, value in study["fingerprint"].items() if key != "digest"},
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "objectives": len(rows),
        "speed_error_max": largest(rows, "speed_error"),
        "memory_error_max": largest(rows, "memory_error"),
    }


if __name__ == "__main__":
    main()
