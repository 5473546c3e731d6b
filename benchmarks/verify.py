"""The promise against reality: winners of many kinds, each run as exported, and one long run from its start to its end.

Each case is one configuration, pinned, through `autotune run` and `autotune verify` as a person would call them. The
long run (`--long SECONDS`) is a whole exported run of about so many seconds: what it took is held against the hours
that its study projected. Errors are what was promised over what was done, minus 1.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Rows, ran, save, studied, table

from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig
from autotune.study.summary import Verification

LENGTHS = Path(__file__).parent.absolute() / "data" / "skewed_lengths.txt"
PINS = {"method": "lora", "lora_rank": 16, "precision": "bf16_mixed", "optimizer": "adamw_torch_fused"}
PINS |= {"attention": "sdpa", "micro_batch_size": 2, "seq_len": 1024, "checkpointing": "none", "compile": "none"}
PINS |= {"loss": "full", "packing": False}
COMPILED, RECOMPUTED = {"compile": "per_layer"}, {"checkpointing": "full"}
CHUNKED = {"loss": "chunked"}
PACKED = {"packing": True, "micro_batch_size": 1, "seq_len": 2048}
# What is not compiled may win with so many tokens; with fewer the host, which launches each operation, sets its pace:
# rows of such cases (1 x 2048 or 2 x 1024, else the same) are told apart, under this name.
HOSTS_PACE = "host's pace: "
LARGE = {"micro_batch_size": 4, "seq_len": 2048}
FOUR = {"micro_batch_size": 4}
NF4 = {"quantization": "nf4", "double_quant": True}
FULL = {"method": "full", "lora_rank": None}
MISTRAL, LLAMA, PHI = "mistral-7b", "llama-3.1-8b", "phi-3-mini"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora, compiled": (MISTRAL, "transformers", COMPILED),
    "lora, recomputed": (MISTRAL, "transformers", LARGE | RECOMPUTED | {"precision": "bf16_pure"}),
    "lora, packed, compiled": (MISTRAL, "transformers", PACKED | COMPILED),
    "lora, chunked, compiled": (LLAMA, "transformers", CHUNKED | COMPILED),
    "lora, packed": (PHI, "transformers", PACKED | LARGE),
    "nf4, compiled": (MISTRAL, "transformers", NF4 | LARGE | COMPILED),
    "nf4, packed, recomputed": (LLAMA, "transformers", NF4 | PACKED | LARGE | RECOMPUTED | CHUNKED),
    "full, compiled": (PHI, "transformers", FULL | COMPILED),
    "full, packed, bf16": (MISTRAL, "transformers", FULL | PACKED | RECOMPUTED | {"precision": "bf16_pure"}),
    "trl, lora": (MISTRAL, "trl", CHUNKED | FOUR),
    "trl, lora, compiled": (PHI, "trl", CHUNKED | FOUR | COMPILED),
    "trl, nf4": (LLAMA, "trl", CHUNKED | FOUR | NF4),
    "trl, full": (PHI, "trl", CHUNKED | FOUR | FULL),
}
LONG = "lora, compiled"  # what the long run trains
STUDY_S, START_S = 120.0, 60.0  # what a study, and the start of a script, may take
COLUMNS = ["case", "model", "promised_tokens_per_s", "tokens_per_s", "error", "promised_gib", "reserved_gib"]
COLUMNS += ["peak_error", "reason"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", help="for all cases, instead of their own")
    parser.add_argument("--precision", help="for all cases, instead of their own")
    parser.add_argument("--seq-len", type=int, help="for all cases, instead of their own")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-steps", type=int, default=200)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--long", type=float, metavar="SECONDS", help="a whole run of about so long, such as 490")
    parser.add_argument("--work", type=Path, help="where the study of the long run stays between calls")
    parser.add_argument("--rows", type=Path, help="the rows of an earlier call on the same machine, to go on from")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin nothing that would not end within so long"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    rows = Rows("verify", args.out, args.rows)
    for case in args.cases:
        if rows.has(case=case):
            continue
        if CASES[case][1] == "trl" and find_spec("trl") is None:
            print(f"left out: {case}: TRL is not installed", flush=True)
        elif time.monotonic() + STUDY_S > until:
            print(f"no time left for {case}: call again with --rows", flush=True)
        else:
            rows.add(measured(case, args))
            table(rows.all[-1:], COLUMNS)
    if args.long and not rows.has(case="long run") and (row := long_run(args, rows, until)):
        rows.add(row)
    told = summary(rows.all)
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows.all]
    fingerprints = [row["fingerprint"] for row in rows.all if row.get("fingerprint")]
    save("verify", from_data(Fingerprint, fingerprints[0]) if fingerprints else None, told, shown, args.out)
    table(shown, COLUMNS)
    print(json.dumps(told, indent=1))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what came through; the rows say of the others why not."""
    done = [row for row in rows if row["case"] in CASES and row["error"] is not None]
    paced = [row for row in rows if row["case"].startswith(HOSTS_PACE)]
    speeds = [abs(row["error"]) for row in done]
    return {
        "winners": len(done),
        "tokens_error_median": statistics.median(speeds) if speeds else None,
        "tokens_error_max": max(speeds, default=None),
        "peak_error_max": max((abs(row["peak_error"]) for row in done if row["peak_error"] is not None), default=None),
        "hosts_pace_error_max": max((abs(row["error"]) for row in paced), default=None),
        **{
            f"long_run_{key}": next((row[key] for row in rows if row["case"] == "long run"), None)
            for key in ("error", "error_with_start")
        },
    }


def measured(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """One winner: what its study says of it, and what its export does."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    about: dict[str, Any] = {"case": case, "model": args.model or CASES[case][0], "error": None, "peak_error": None}
    try:
        study = studied(folder, *options(case, args))
    except SystemExit as error:
        return about | {"reason": str(error)}
    line = [sys.executable, "-m", "autotune", "verify", "--json", "--micro-steps", str(args.micro_steps)]
    told = subprocess.run(line, cwd=folder, check=False, stdout=subprocess.PIPE, text=True).stdout
    if not told:
        return about | {"reason": "autotune verify said nothing"}
    values = json.loads(told)
    del values["holds"]
    done = from_data(Verification, values)
    return about | {
        "file": done.file,
        "config": done.config.label(),
        "micro_steps": done.micro_steps,
        "promised_tokens_per_s": done.promised_tokens_per_s,
        "tokens_per_s": done.tokens_per_s,
        "error": done.speed_error,
        "promised_gib": done.promised_gib,
        "reserved_gib": done.reserved_gib,
        "peak_error": done.memory_error,
        "reason": done.reason,
        "fingerprint": fingerprint(study),
    }


def options(case: str, args: argparse.Namespace, examples: int = 10_000) -> list[str]:
    """What `autotune run` is called with."""
    model, trainer, changes = CASES[case]
    pins = PINS | changes
    pins |= {"precision": args.precision} if args.precision else {}
    pins |= {"seq_len": args.seq_len} if args.seq_len else {}
    space = "full" if pins["method"] == "full" else "qlora" if "quantization" in pins else "lora"
    found = ["--gpu", args.gpu, "--model", args.model or model, "--trainer", trainer, "--space", space, "--out", "out"]
    found += ["--trials", "1", "--budget", "4m", "--global-batch", str(args.global_batch), "--examples", str(examples)]
    rows = ["--lengths", str(LENGTHS), "--max-truncated", "1"]
    found += rows if pins["packing"] else ["--tokens-per-example", str(pins["seq_len"])]
    written = {knob: json.dumps(value).strip('"') for knob, value in pins.items() if value is not None}
    return found + [option for knob, value in written.items() for option in ("--set", f"{knob}={value}")]


def fingerprint(study: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in study["fingerprint"].items() if key != "digest"}


def long_run(args: argparse.Namespace, rows: Rows, until: float) -> dict[str, Any] | None:
    """Run one winner's export whole, with as many examples as last `args.long` seconds at the speed of the case's row.

    None where there is no such row, or no time left for it.
    """
    folder = (args.work or Path(tempfile.mkdtemp(prefix="autotune-bench-"))).absolute() / "long"
    summary, progress = folder / "out" / "summary.json", folder / "progress.jsonl"
    if not summary.exists():
        speed = next((row.get("tokens_per_s") for row in rows.all if row["case"] == LONG), None)
        if speed is None or time.monotonic() + STUDY_S > until:
            print(f"the long run wants a row of {LONG!r}, and time: call again with --rows", flush=True)
            return None
        folder.mkdir(parents=True, exist_ok=True)
        studied(folder, *options(LONG, args, math.ceil(args.long * speed / (args.seq_len or PINS["seq_len"]))))
    study = json.loads(summary.read_text())
    cost = study["winner"]["cost"]
    projected, startup = cost["full_run_hours"] * 3600, cost["startup_s"]
    if time.monotonic() + START_S + 1.1 * projected > until:
        print("no time left for the long run: call again with --rows and --work", flush=True)
        return None
    progress.unlink(missing_ok=True)
    begin = time.monotonic()
    script = ["out/export/train.py", "--random-weights", "--output-dir", "", "--progress", str(progress)]
    done = json.loads(ran(script, folder).splitlines()[-1])
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    # Hours are projected for training alone: the first step, in which a process compiles, belongs to the start-up.
    took = (lines[-1]["seconds"] - lines[0]["seconds"]) * done["steps"] / (done["steps"] - 1)
    wall = time.monotonic() - begin
    return {
        "case": "long run",
        "model": study["model"],
        "config": TrainConfig(**study["winner"]["config"]).label(),
        "steps": done["steps"],
        "projected_s": projected,
        "startup_s": startup,
        "took_s": took,
        "with_first_step_s": lines[-1]["seconds"],
        "with_start_s": wall,
        "error": projected / took - 1.0,
        "error_with_start": None if startup is None else (projected + startup) / wall - 1.0,
        "fingerprint": fingerprint(study),
    }


if __name__ == "__main__":
    main()
