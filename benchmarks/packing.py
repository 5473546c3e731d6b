"""Compare the useful tokens per second that a study predicts for examples of many lengths with the exported run.

Each case pins one configuration, calls `autotune run`, and then runs the exported `train.py` on random tokens. The
lengths of the examples are those in `benchmarks/data/skewed_lengths.txt`, drawn from a log-normal distribution: 327
tokens on average, 2,058 at the 99th percentile.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import Rows, run_python, run_study, save, table

from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data

LENGTHS = Path(__file__).parent.absolute() / "data" / "skewed_lengths.txt"
PINS = {"method": "lora", "lora_rank": 16, "optimizer": "adamw_torch_fused", "attention": "sdpa"}
CASES: dict[str, dict[str, Any]] = {
    "padded": {"micro_batch_size": 4, "checkpointing": "none", "compile": "per_layer"},
    "packed": {"micro_batch_size": 2, "checkpointing": "none", "compile": "per_layer", "packing": True},
    "padded, recomputed": {"micro_batch_size": 8, "checkpointing": "full", "compile": "none"},
    "packed, recomputed": {"micro_batch_size": 2, "checkpointing": "full", "compile": "none", "packing": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--precision", default="bf16_mixed")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--max-steps", type=int, default=25)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call on the same machine to continue")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("packing", args.out, args.rows)
    fingerprint: dict[str, Any] = {}
    for case in args.cases:
        if not rows.has(case=case):
            rows.add(run_case(case, args))
        fingerprint = next(row for row in rows.all if row["case"] == case)["fingerprint"]
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows.all]
    summary = summarize(shown)
    save("packing", from_data(Fingerprint, fingerprint), summary, shown, args.out)
    table(shown, ["case", "predicted", "tokens_per_s", "error", "predicted_reserved_gib", "reserved_gib"])
    print(json.dumps(summary, indent=1))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_case = {row["case"]: row["tokens_per_s"] for row in rows}
    summary = {"error_max": max(abs(row["error"]) for row in rows), "cases": len(rows)}
    if {"packed", "padded"} <= by_case.keys():
        summary["packed_over_padded"] = by_case["packed"] / by_case["padded"]
    return summary


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Study one configuration, run its export, and return both results as a row."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    pins = PINS | CASES[case] | {"precision": args.precision, "seq_len": args.seq_len}
    options = [
        option for knob, value in pins.items() for option in ("--set", f"{knob}={json.dumps(value).strip(chr(34))}")
    ]
    options += ["--gpu", args.gpu, "--model", args.model, "--space", "lora", "--lengths", str(LENGTHS), "--trials", "1"]
    options += [
        "--global-batch",
        str(args.global_batch),
        "--budget",
        "4m",
        "--max-truncated",
        "1",
        "--out",
        "out",
    ]
    study = run_study(folder, *options)
    steps = ["--random-weights", "--lengths", str(LENGTHS), "--max-steps", str(args.max_steps)]
    run = json.loads(run_python(["out/export/train.py", *steps], folder).splitlines()[-1])
    winner = study["winner"]
    predicted = winner["performance"]["tokens_per_second"]
    return {
        "case": case,
        "config": winner["config"],
        "predicted": predicted,
        "tokens_per_s": run["tokens_per_second"],
        "error": predicted / run["tokens_per_second"] - 1.0,
        "predicted_reserved_gib": winner["memory"]["peak_reserved_gib"],
        "reserved_gib": run["peak_reserved_gib"],
        "fingerprint": {key: value for key, value in study["fingerprint"].items() if key != "digest"},
    }


if __name__ == "__main__":
    main()
