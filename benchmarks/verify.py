"""Compare predicted speed and memory with exported runs: short runs of many winners, and one
complete long run.

Each case pins one configuration and calls `autotune run` and `autotune verify`. Every case counts.
CPU-bound cases are also summarised on their own, by the rule with which the study itself warns
(`Measurement.host_bound`) before the exported run starts. Rows of an earlier version have no
`host_share`; a call that names them in `--rows` measures them again. The long run (`--long
SECONDS`) trains for about this time and compares its duration with the hours that the study
projected. An error is the prediction divided by the measurement, minus 1.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import (
    DATA,
    Mode,
    Rows,
    fingerprint_of,
    finish,
    run_exported,
    run_program,
    run_study,
    scratch,
    set_options,
    table,
)

from autotune.core.probe_types import HOST_SHARE
from autotune.core.train_config import TrainConfig

VERIFIED = [
    "file",
    "micro_steps",
    "promised_tokens_per_s",
    "tokens_per_s",
    "promised_gib",
    "reserved_gib",
    "reason",
]
LENGTHS = DATA / "skewed_lengths.txt"
PINS = {
    "method": "lora",
    "lora_rank": 16,
    "precision": "bf16_mixed",
    "optimizer": "adamw_torch_fused",
}
PINS |= {
    "attention": "sdpa",
    "micro_batch_size": 2,
    "seq_len": 1024,
    "checkpointing": "none",
    "compile": "none",
}
PINS |= {"loss": "full", "packing": False}
COMPILED, RECOMPUTED = {"compile": "per_layer"}, {"checkpointing": "full"}
CHUNKED = {"loss": "chunked"}
PACKED = {"packing": True, "micro_batch_size": 1, "seq_len": 2048}
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
    "full, packed, bf16": (
        MISTRAL,
        "transformers",
        FULL | PACKED | RECOMPUTED | {"precision": "bf16_pure"},
    ),
    "trl, lora": (MISTRAL, "trl", CHUNKED | FOUR),
    "trl, lora, compiled": (PHI, "trl", CHUNKED | FOUR | COMPILED),
    "trl, nf4": (LLAMA, "trl", CHUNKED | FOUR | NF4),
    "trl, full": (PHI, "trl", CHUNKED | FOUR | FULL),
    # The same with fewer tokens in a micro batch
    "lora, recomputed, small": (MISTRAL, "transformers", RECOMPUTED | {"precision": "bf16_pure"}),
    "lora, packed, small": (PHI, "transformers", PACKED),
    "nf4, compiled, small": (MISTRAL, "transformers", NF4 | COMPILED),
    "nf4, packed, recomputed, small": (LLAMA, "transformers", NF4 | PACKED | RECOMPUTED | CHUNKED),
    # Models of new families: one stored in FP8, a wrapper, and one with short convolutions
    "Ministral 3, chunked": ("ministral-3-3b", "transformers", CHUNKED | FOUR),
    "Gemma 4, recomputed": ("gemma-4-e2b", "transformers", FOUR | RECOMPUTED),
    "LFM2": ("lfm2-1.2b", "transformers", FOUR),
}
LONG = "lora, compiled"  # the case of the long run
STUDY_S, START_S = 120.0, 60.0  # time allowed for a study, and for the start of a script
COLUMNS = [
    "case",
    "model",
    "promised_tokens_per_s",
    "tokens_per_s",
    "error",
    "promised_gib",
    "reserved_gib",
]
COLUMNS += ["peak_error", "host_share", "reason"]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the successful rows. The other rows hold the reason of their failure."""
    done = [row for row in rows if row["case"] in CASES and row["error"] is not None]
    told = [row for row in done if row.get("host_share") is not None]
    paced = [abs(row["error"]) for row in told if row["host_share"] >= HOST_SHARE]
    others = [abs(row["error"]) for row in told if row["host_share"] < HOST_SHARE]
    speeds = [abs(row["error"]) for row in done]
    return {
        "winners": len(done),
        "tokens_error_median": statistics.median(speeds) if speeds else None,
        "tokens_error_max": max(speeds, default=None),
        "winners_within_3_percent": sum(speed <= 0.03 for speed in speeds),
        "peak_error_max": max(
            (abs(row["peak_error"]) for row in done if row["peak_error"] is not None), default=None
        ),
        "hosts_pace": len(paced) if told else None,
        "hosts_pace_error_max": max(paced, default=None),
        "devices_pace_error_max": max(others, default=None),
        "pace_not_told": len(done) - len(told),
        **{
            f"long_run_{key}": next((row[key] for row in rows if row["case"] == "long run"), None)
            for key in ("error", "error_with_start")
        },
    }


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Study one configuration, verify its export, and return both results as a row."""
    folder = scratch()
    row: dict[str, Any] = {
        "case": case,
        "model": args.model or CASES[case][0],
        "host_share": None,
        "error": None,
        "peak_error": None,
    }
    try:
        study = run_study(folder, *run_options(case, args))
    except SystemExit as error:
        return row | {"reason": str(error)}
    line = [
        sys.executable,
        "-m",
        "autotune",
        "verify",
        "--json",
        "--micro-steps",
        str(args.micro_steps),
    ]
    output = subprocess.run(line, cwd=folder, check=False, stdout=subprocess.PIPE, text=True).stdout
    if not output:
        return row | {"reason": "autotune verify printed no result"}
    done = json.loads(output)
    return row | {
        "config": TrainConfig(**done["config"]).label(),
        "host_share": study["winner"]["host_share"],
        "error": done["speed_error"],
        "peak_error": done["memory_error"],
        **{name: done[name] for name in VERIFIED},
        "fingerprint": fingerprint_of(study),
    }


def run_options(case: str, args: argparse.Namespace, examples: int = 10_000) -> list[str]:
    """Return the options of `autotune run` for a case."""
    model, trainer, changes = CASES[case]
    pins = PINS | changes
    pins |= {"precision": args.precision} if args.precision else {}
    pins |= {"seq_len": args.seq_len} if args.seq_len else {}
    space = "full" if pins["method"] == "full" else "qlora" if "quantization" in pins else "lora"
    options = [
        "--gpu",
        args.gpu,
        "--model",
        args.model or model,
        "--trainer",
        trainer,
        "--space",
        space,
    ]
    options += [
        "--out",
        "out",
        "--trials",
        "1",
        "--budget",
        "4m",
        "--global-batch",
        str(args.global_batch),
    ]
    options += ["--examples", str(examples)]
    rows = ["--lengths", str(LENGTHS), "--max-truncated", "1"]
    options += rows if pins["packing"] else ["--tokens-per-example", str(pins["seq_len"])]
    return options + set_options({knob: value for knob, value in pins.items() if value is not None})


def long_run(args: argparse.Namespace, rows: Rows, until: float) -> dict[str, Any] | None:
    """Run the export of one winner to its end and compare its duration with the projection.

    The examples last about `args.long` seconds at the measured speed of the case. Returns None if
    the case has no row yet, or if too little time is left.
    """
    folder = (args.work or scratch()).absolute() / "long"
    summary, progress = folder / "out" / "summary.json", folder / "progress.jsonl"
    if not summary.exists():
        speed = next((row.get("tokens_per_s") for row in rows.all if row["case"] == LONG), None)
        if speed is None or time.monotonic() + STUDY_S > until:
            print(
                f"the long run needs a row of {LONG!r} and more time: call again with --rows",
                flush=True,
            )
            return None
        folder.mkdir(parents=True, exist_ok=True)
        run_study(
            folder,
            *run_options(
                LONG, args, math.ceil(args.long * speed / (args.seq_len or PINS["seq_len"]))
            ),
        )
    study = json.loads(summary.read_text())
    cost = study["winner"]["cost"]
    projected, startup = cost["full_run_hours"] * 3600, cost["startup_s"]
    if time.monotonic() + START_S + 1.1 * projected > until:
        print("no time left for the long run: call again with --rows and --work", flush=True)
        return None
    progress.unlink(missing_ok=True)
    begin = time.monotonic()
    done = run_exported(folder, "--output-dir", "", "--progress", str(progress))
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    # The projected hours cover training only. The first step, which compiles, counts as start-up.
    seconds = (lines[-1]["seconds"] - lines[0]["seconds"]) * done["steps"] / (done["steps"] - 1)
    wall = time.monotonic() - begin
    return {
        "case": "long run",
        "model": study["model"],
        "config": TrainConfig(**study["winner"]["config"]).label(),
        "steps": done["steps"],
        "projected_s": projected,
        "startup_s": startup,
        "took_s": seconds,
        "with_first_step_s": lines[-1]["seconds"],
        "with_start_s": wall,
        "error": projected / seconds - 1.0,
        "error_with_start": None if startup is None else (projected + startup) / wall - 1.0,
        "fingerprint": fingerprint_of(study),
    }


def run(args: argparse.Namespace) -> None:
    """Run all cases, and the long run if asked."""
    until = time.monotonic() + args.seconds
    rows = Rows.of(args)
    for case in args.cases:
        if any(row["case"] == case and "host_share" in row for row in rows.all):
            continue
        if CASES[case][1] == "trl" and find_spec("trl") is None:
            print(f"skipped {case}: TRL is not installed", flush=True)
        elif time.monotonic() + STUDY_S > until:
            print(f"no time left for {case}: call again with --rows", flush=True)
        else:
            rows.add(run_case(case, args))
            table(rows.all[-1:], COLUMNS)
    if args.long and not rows.has(case="long run") and (row := long_run(args, rows, until)):
        rows.add(row)
    latest = {row["case"]: row for row in rows.plain}.values()  # a row measured again comes later
    finish(args, rows.fingerprint, list(latest), COLUMNS)


MODES = {
    "": Mode(
        run=run,
        result="verify",
        summarize=summarize,
        options={
            "--gpu": "h200",
            "--model": {"help": "use this for all cases"},
            "--precision": {"help": "use this for all cases"},
            "--seq-len": {"type": int, "help": "use this for all cases"},
            "--global-batch": 32,
            "--micro-steps": 200,
            "--cases": {"nargs": "*", "default": list(CASES), "choices": list(CASES)},
            "--long": {
                "type": float,
                "metavar": "SECONDS",
                "help": "also run a complete run of about this duration, e.g. 490",
            },
            "--work": {
                "type": Path,
                "help": "folder that keeps the study of the long run between calls",
            },
            "--rows": None,
            "--seconds": {
                "default": math.inf,
                "help": "start nothing that would not end within this time",
            },
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
