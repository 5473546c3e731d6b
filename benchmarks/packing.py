"""Compare ways to make rows of many lengths: padded, bucketed and packed rows, and the attention of
packed rows.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import (
    DATA,
    Mode,
    Rows,
    device_of,
    fingerprint_of,
    finish,
    run_exported,
    run_program,
    run_study,
    scratch,
    set_options,
    speed,
    table,
    worker,
)

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device, resolve_model
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.packing import packed_rows
from autotune.problem.workload import Workload

# --- padding

# log-normal: 327 tokens on average, 2,058 at the 99th percentile
SKEWED = DATA / "skewed_lengths.txt"


PINS = {"method": "lora", "lora_rank": 16, "optimizer": "adamw_torch_fused", "attention": "sdpa"}
CASES: dict[str, dict[str, Any]] = {
    "padded": {"micro_batch_size": 4, "checkpointing": "none", "compile": "per_layer"},
    "packed": {
        "micro_batch_size": 2,
        "checkpointing": "none",
        "compile": "per_layer",
        "packing": True,
    },
    "padded, recomputed": {"micro_batch_size": 8, "checkpointing": "full", "compile": "none"},
    "packed, recomputed": {
        "micro_batch_size": 2,
        "checkpointing": "full",
        "compile": "none",
        "packing": True,
    },
}


def run_padding(args: argparse.Namespace) -> None:
    """Compare the useful tokens/s that a study predicts for examples of many lengths with the
    exported run.

    Each case pins one configuration, calls `autotune run`, and then runs the exported `train.py` on
    random tokens. The examples have the lengths in `benchmarks/data/skewed_lengths.txt`, drawn from
    a log-normal
    distribution: 327 tokens on average, 2,058 at the 99th percentile.
    """
    rows = Rows.of(args)
    for case in args.cases:
        if not rows.has(case=case):
            rows.add(run_case(case, args))
    columns = [
        "case",
        "predicted",
        "tokens_per_s",
        "error",
        "predicted_reserved_gib",
        "reserved_gib",
    ]
    finish(args, rows.fingerprint, rows.plain, columns)


def summarize_padding(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_case = {row["case"]: row["tokens_per_s"] for row in rows}
    summary = {"error_max": max(abs(row["error"]) for row in rows), "cases": len(rows)}
    if {"packed", "padded"} <= by_case.keys():
        summary["packed_over_padded"] = by_case["packed"] / by_case["padded"]
    return summary


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Study one configuration, run its export, and return both results as a row."""
    folder = scratch()
    options = set_options(
        PINS | CASES[case] | {"precision": args.precision, "seq_len": args.seq_len}
    )
    options += [
        "--gpu",
        args.gpu,
        "--model",
        args.model,
        "--space",
        "lora",
        "--lengths",
        str(SKEWED),
        "--trials",
        "1",
    ]
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
    run = run_exported(folder, "--lengths", str(SKEWED), "--max-steps", str(args.max_steps))
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
        "fingerprint": fingerprint_of(study),
    }


# --- attention

SHORT = [64 + 37 * number % 129 for number in range(1000)]  # 64 to 192 tokens, 128 on average
CONFIG = TrainConfig(
    micro_batch_size=2, seq_len=2048, lora_rank=16, checkpointing="none", compile="per_layer"
)
ATTENTION_WAYS = ("mask", "varlen")
# rows come again, so that there is something to learn in random tokens
STEPS, DIFFERENT_ROWS, RATE = 50, 5, 1e-3
ATTENTION_COLUMNS = ["case", "tokens_per_s", "peak_reserved_gib", "seconds"]


def run_attention(args: argparse.Namespace) -> None:
    """Compare the attention of packed rows, with a mask and example by example, with full rows of
    one example.

    The whole model is probed, compiled, with examples of usual lengths
    (`benchmarks/data/skewed_lengths.txt`) and with short ones. Then it trains twice on the same
    packed rows of random tokens, with the mask and without it, and the losses of the steps are
    compared.
    """
    until = time.monotonic() + args.seconds
    rows, model = Rows.of(args), resolve_model(args.model)
    config = replace(CONFIG, seq_len=args.seq_len, compile=args.compile)
    device = resolve_device(args.gpu)
    with worker(device_of(device)) as prober:
        fingerprint = to_data(prober.fingerprint)
        for case in attention_cases(args.seq_len):
            if time.monotonic() < until and not rows.has(case=case):
                found = speed_of(case, prober, model, device, args.memory_gib, config)
                rows.add(found | {"fingerprint": fingerprint})
                table(rows.all[-1:], ATTENTION_COLUMNS)
    for way in ATTENTION_WAYS:
        if time.monotonic() < until and not rows.has(losses_of=way):
            began = time.monotonic()
            losses = train_packed(
                model, replace(config, packing=True, packed_attention=way), device.kind
            )
            rows.add({"losses_of": way, "losses": losses, "seconds": time.monotonic() - began})
    finish(args, rows.fingerprint, rows.plain)


def speed_of(
    case: str,
    prober: WorkerProber,
    model: ModelSpec,
    device: DeviceSpec,
    memory_gib: float,
    config: TrainConfig = CONFIG,
) -> dict[str, Any]:
    """Return the row of a case: its useful tokens/s, and the seconds of the measurement."""
    began, (knobs, lengths) = time.monotonic(), attention_cases(config.seq_len)[case]
    workload = Workload(
        examples=10_000, lengths=lengths, global_batch=round(32 * config.seq_len / lengths.mean)
    )
    found = speed(prober, model, device, replace(config, **knobs), memory_gib, workload)
    return {"case": case, **found, "seconds": time.monotonic() - began}


def attention_cases(seq_len: int) -> dict[str, tuple[dict[str, Any], Lengths]]:
    """Return the changes to CONFIG and the lengths of the examples of each case.

    Full rows come first and last.
    """
    usual = Lengths.of([int(line) for line in SKEWED.read_text().split()], "counted")
    short = Lengths.of(SHORT, "counted")
    full: dict[str, Any] = {"padding": "max_length"}
    packed = {
        f"{name}, {way}": ({"packing": True, "packed_attention": way}, lengths)
        for name, lengths in (("usual", usual), ("short", short))
        for way in ATTENTION_WAYS
    }
    whole = Lengths.constant(seq_len)
    return {"full": (full, whole), **packed, "full again": (full, whole)}


def train_packed(model: ModelSpec, config: TrainConfig, kind: str) -> list[float]:
    """The losses of STEPS steps of the whole model, not compiled, with one packed row of short
    examples in each.
    """
    import torch

    from autotune.core.probe_types import MicroBatch
    from autotune.probe.harness import random_rows
    from autotune.probe.model_settings import model_settings
    from autotune.trainer.model_builder import build, config_of, trainable_model
    from autotune.trainer.varlen import join_rows

    device = torch.device("cpu" if kind == "cpu" else "cuda:0")
    torch.manual_seed(0)
    settings = model_settings(config, model.config["model_type"])
    base = build(config_of(model.config), settings, device)
    trained = trainable_model(base, settings, device).train()
    optimizer = torch.optim.AdamW(
        [one for one in trained.parameters() if one.requires_grad], lr=RATE
    )
    packed = packed_rows(Lengths.of(SHORT, "counted"), config.seq_len)
    examples = [rows.examples for rows in packed for _ in range(rows.number)][:DIFFERENT_ROWS]
    kinds = [MicroBatch(rows=(row,), length=config.seq_len, share=1.0) for row in examples]
    generator = torch.Generator().manual_seed(0)
    batches = [
        join_rows(random_rows(kind, base.config.vocab_size, generator, packing=True))
        for kind in kinds
    ]
    losses = []
    for step in range(STEPS):
        batch = {name: value.to(device) for name, value in batches[step % len(batches)].items()}
        if config.packed_attention == "mask":
            del batch["segments"]
        with torch.autocast(device.type, torch.bfloat16):
            loss = trained(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def summarize_attention(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the speeds of packed rows divided by the speed of full rows, and the largest relative
    loss difference.
    """
    speeds = {row["case"]: row["tokens_per_s"] for row in rows if row.get("outcome") == "ok"}
    losses = {row["losses_of"]: row["losses"] for row in rows if "losses_of" in row}
    summary: dict[str, Any] = {"cases": len(rows)}
    full = [speeds[case] for case in ("full", "full again") if case in speeds]
    if full:
        over = {case: value * len(full) / sum(full) for case, value in speeds.items()}
        summary["full_differs"] = max(full) / min(full) - 1
        names = {"usual, varlen": "packed_over_full", "usual, mask": "masked_over_full"}
        names |= {
            "short, varlen": "packed_over_full_short",
            "short, mask": "masked_over_full_short",
        }
        summary |= {name: over[case] for case, name in names.items() if case in over}
    if len(losses) == len(ATTENTION_WAYS):
        pairs = list(zip(*losses.values(), strict=True))
        summary["loss_first"], summary["loss_last"] = pairs[0][0], pairs[-1][0]
        summary["loss_difference_max"] = max(abs(one / other - 1) for one, other in pairs)
    return summary


# --- passes

UNPACKED = {"packing": "false"}
PASSES_BASELINE = UNPACKED | {
    "padding": "masked",
    "compile": "none",
    "checkpointing": "full",
    "loss": "full",
}
PASSES_BASELINE |= {
    "micro_batch_size": "8",
    "lora_rank": "16",
    "seq_len": "4096",
    "optimizer": "adamw_torch_fused",
}
PASSES_WAYS: dict[str, dict[str, str]] = {
    "baseline": PASSES_BASELINE,
    # with TRL's mask, and its loss
    "trl": PASSES_BASELINE | {"padding": "longest", "loss": "chunked"},
    "padded": UNPACKED | {"padding": "longest"},
    "bucketed": UNPACKED | {"padding": "bucket"},
    "packed": {"packing": "true"},
}
PASSES_COLUMNS = [
    "way",
    "config",
    "tokens_per_s",
    "projected_s",
    "took_s",
    "error",
    "tokens_off",
    "error_with_start",
    "reason",
]


def run_passes(args: argparse.Namespace) -> None:
    """Compare ways to make rows on a long-tailed set: a usual baseline, and the best padded,
    bucketed and packed run.

    Each study pins one way to make rows, on the 3,000 examples of the mode `long-tails`. Its
    exported script then trains on the whole set with random weights, and its time is compared with
    the projection. Chance decides which examples share a micro batch, and more passes average it:
    `tokens_off` compares the tokens of the passes, padding included, with their expected number.
    The way `trl` studies the same baseline with TRL's trainer and runs it with `trl sft`:
    `trl_error` is the error of that study, and `trl_slower` compares the baseline of train.py with
    it. An error is the prediction divided by the measurement, minus 1. The scripts save no
    checkpoint, so the projection leaves out its time.
    """
    rows = Rows.of(args)
    for way in args.ways:
        if not rows.has(way=way):
            rows.add(run_way(way, args))
            table(rows.all[-1:], PASSES_COLUMNS)
    finish(args, rows.fingerprint, rows.plain)


def run_way(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Study one way to make rows, then pass over all examples with the exported script."""
    folder = scratch()
    lengths = write_lengths(folder)
    options = [
        "--gpu",
        args.gpu,
        "--model",
        args.model,
        "--space",
        args.space,
        "--lengths",
        str(lengths),
    ]
    options += ["--epochs", str(args.epochs), "--out", "out", "--budget", args.budget]
    options += ["--trials", "1"] if way in ("baseline", "trl") else []
    options += ["--trainer", "trl"] if way == "trl" else []
    row: dict[str, Any] = {"way": way, "model": args.model, "error": None}
    try:
        study = run_study(folder, *options, *set_options(PASSES_WAYS[way]))
        return row | (
            by_trl(folder, study, args.micro_steps)
            if way == "trl"
            else pass_over(folder, lengths, study)
        )
    except SystemExit as error:
        return row | {"reason": str(error)}


def pass_over(folder: Path, lengths: Path, study: dict[str, Any]) -> dict[str, Any]:
    """Run the exported script over all examples and compare its time with the projection."""
    winner, progress = study["winner"], folder / "progress.jsonl"
    cost = winner["cost"]
    projected, startup = cost["full_run_hours"] * 3600, cost["startup_s"]
    projected -= (cost["pauses"] or {}).get("checkpoint_s") or 0.0

    begin = time.monotonic()
    done = run_exported(
        folder, "--output-dir", "", "--progress", str(progress), "--lengths", str(lengths)
    )
    wall = time.monotonic() - begin
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    # The projection covers training only. A step that compiles counts as start-up beyond its usual
    # time.
    took = done["seconds_per_step"] * done["steps"]

    config = TrainConfig(**winner["config"])
    counted = Lengths.of(long_tailed_lengths(), "counted")
    workload = Workload(examples=NUM_EXAMPLES, lengths=counted, dealt=True)
    baseline = study["baseline"]
    return {
        "config": config.label(),
        "judged": study["trials"]["judged"],
        "evidence": winner["evidence"],
        "tokens_per_s": winner["performance"]["tokens_per_second"],
        "measured_tokens_per_s": done["tokens_per_second"],
        "baseline_tokens_per_s": baseline and baseline["performance"]["tokens_per_second"],
        "steps": done["steps"],
        "projected_s": projected,
        "startup_s": startup,
        "took_s": took,
        "with_first_step_s": lines[-1]["seconds"],
        "with_start_s": wall,
        "error": projected / took - 1,
        "tokens_off": done["padded_tokens_per_step"] / workload.run_shape(config).tokens_per_step
        - 1,
        "error_with_start": None if startup is None else (projected + startup) / wall - 1,
        "step_seconds": [
            round(after["seconds"] - before["seconds"], 3) for before, after in pairwise(lines)
        ],
        "fingerprint": fingerprint_of(study),
    }


def by_trl(folder: Path, study: dict[str, Any], micro_steps: int) -> dict[str, Any]:
    """Run the winner of a study with `trl sft`, as `autotune verify` does for this number of micro
    batches.

    `autotune verify` converts the measurement to the tokens, and to the share of new lengths, of
    the whole run.
    """
    line = [sys.executable, "-m", "autotune", "verify", "--json", "--micro-steps", str(micro_steps)]
    output = subprocess.run(line, cwd=folder, check=False, stdout=subprocess.PIPE, text=True).stdout
    done = json.loads(output) if output else {"reason": "autotune verify printed no result"}
    predicted, found = study["winner"]["performance"]["tokens_per_second"], done.get("tokens_per_s")
    return {
        "config": study["winner"]["config"],
        "evidence": study["winner"]["evidence"],
        "tokens_per_s": predicted,
        "measured_tokens_per_s": found,
        "error": found and found / predicted - 1,
        "reason": done.get("reason") or done.get("error"),
    }


def summarize_passes(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The speed-ups are of measured full passes, in useful tokens."""
    by_way = {row["way"]: row for row in rows if row["error"] is not None}
    base = by_way.get("baseline", {})
    measured, trl = base.get("measured_tokens_per_s"), by_way.get("trl", {})
    # An earlier form of the rows has the baseline by both trainers, on one host.
    by_sft = base.get("trl_tokens_per_s") or trl.get("measured_tokens_per_s")

    def speedup(way: str) -> float | None:
        own = by_way.get(way, {}).get("measured_tokens_per_s")
        return own / measured if own and measured else None

    return {
        "error_max": max(
            (abs(row["error"]) for row in by_way.values() if row["way"] != "trl"), default=None
        ),
        "trl_error": trl.get("error"),
        "trl_slower": base["tokens_per_s"] / by_sft - 1 if base and by_sft else None,
        "speedup_padded": speedup("padded"),
        "speedup_bucketed": speedup("bucketed"),
        "speedup_packed": speedup("packed"),
    }


# --- studies

NUM_EXAMPLES, MEAN, LONGEST, SEED = 3_000, 376, 4_096, 22
SIGMA = 1.0  # of the log-normal distribution
STUDIES: dict[str, tuple[str, str, str]] = {  # model, space, budget
    "small": ("qwen2.5-1.5b", "full", "60s"),
    "large": ("llama-3.1-70b", "qlora", "3m30s"),
}
STUDIES_COLUMNS = [
    "study",
    "judged",
    "seconds",
    "winner",
    "tokens_per_s",
    "mfu",
    "evidence",
    "baseline_evidence",
    "speedup",
]


def run_studies(args: argparse.Namespace) -> None:
    """Count the configurations that short studies judge if rows are long and whole models are slow.

    The lengths are drawn here with a fixed seed: 3,000 examples of 376 tokens on average and at
    most 4,096. Two studies by the command line tune for them: full fine-tuning of a 1.5B in one
    minute, and QLoRA of a 70B in three and a half. A probe of the whole 70B takes up to a minute,
    so a search that measured whole models would end with the baseline.

    `--gpu cpu --model demo-3m --space cpu` makes a trial run on a CPU.
    """
    folder = args.keep or scratch()
    folder.mkdir(parents=True, exist_ok=True)
    path = write_lengths(folder.absolute())
    rows: list[dict[str, Any]] = []
    for name in args.studies:
        model, space, budget = STUDIES[name]
        options = [
            "--gpu",
            args.gpu,
            "--model",
            args.model or model,
            "--space",
            args.space or space,
        ]
        options += [
            "--budget",
            args.budget or budget,
            "--lengths",
            str(path),
            "--study",
            name,
            "--out",
            name,
        ]
        begin = time.monotonic()
        study = run_study(
            folder, *options, "--storage", f"sqlite:///{folder.absolute()}/autotune.db"
        )
        rows.append(row_of(name, study) | {"seconds": time.monotonic() - begin})
        table(rows[-1:], STUDIES_COLUMNS)
    finish(args, fingerprint_of(study), rows)


def write_lengths(folder: Path) -> Path:
    """Write the long-tailed lengths to a file and return its path."""
    path = folder / "lengths.txt"
    path.write_text("".join(f"{length}\n" for length in long_tailed_lengths()))
    return path


def long_tailed_lengths() -> list[int]:
    """Draw log-normal lengths of at least 16 tokens, scaled to the mean MEAN.

    The longest has LONGEST tokens.
    """
    generator = random.Random(SEED)
    drawn = [generator.lognormvariate(0.0, SIGMA) for _ in range(NUM_EXAMPLES - 1)]

    def scaled(median: float) -> list[int]:
        return [*(min(LONGEST, max(16, round(median * value))) for value in drawn), LONGEST]

    low, high = 1.0, float(LONGEST)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.fmean(scaled(middle)) < MEAN else (low, middle)
    return scaled(high)


def row_of(name: str, study: dict[str, Any]) -> dict[str, Any]:
    """Return the findings in the summary of a study."""
    winner, baseline = study["winner"], study["baseline"]
    return {
        "study": name,
        "model": study["model"],
        "judged": study["trials"]["judged"],
        "trials": study["trials"],
        "winner": winner["config"],
        "tokens_per_s": winner["performance"]["tokens_per_second"],
        "mfu": winner["performance"]["mfu"],
        "evidence": winner["evidence"],
        "baseline": baseline and baseline["config"],
        "baseline_evidence": baseline and baseline["evidence"],
        "baseline_tokens_per_s": baseline and baseline["performance"]["tokens_per_second"],
        "speedup": study["speedup"],
        "caveats": study["caveats"],
    }


def summarize_studies(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_study = {row["study"]: row for row in rows}
    small, large = by_study.get("small", {}), by_study.get("large", {})
    return {
        "small_judged": small.get("judged"),
        "large_judged": large.get("judged"),
        "large_mfu": large.get("mfu"),
        "small_speedup": small.get("speedup"),
        "large_speedup": large.get("speedup"),
    }


MODES = {
    "export": Mode(
        run=run_padding,
        result="packing",
        summarize=summarize_padding,
        options={
            "--gpu": "h200",
            "--model": "mistral-7b",
            "--seq-len": 2048,
            "--precision": "bf16_mixed",
            "--global-batch": 32,
            "--max-steps": 25,
            "--cases": {"nargs": "*", "default": list(CASES), "choices": list(CASES)},
            "--rows": None,
        },
    ),
    "attention": Mode(
        run=run_attention,
        result="packed_attention",
        summarize=summarize_attention,
        options={
            "--gpu": "h200",
            "--model": "mistral-7b",
            "--seq-len": CONFIG.seq_len,
            "--memory-gib": 75.0,
            "--compile": {"default": CONFIG.compile, "choices": ["none", "per_layer"]},
            "--seconds": 150.0,
            "--rows": None,
        },
    ),
    "passes": Mode(
        run=run_passes,
        result="real_data",
        summarize=summarize_passes,
        options={
            "--gpu": "h200",
            "--model": "qwen2.5-1.5b",
            "--space": "lora",
            "--budget": "90s",
            "--ways": {"nargs": "*", "default": list(PASSES_WAYS), "choices": list(PASSES_WAYS)},
            "--epochs": 2,
            "--micro-steps": {"default": 96, "help": "micro batches of the run of trl sft"},
            "--rows": None,
        },
    ),
    "long-tails": Mode(
        run=run_studies,
        result="long_tails",
        summarize=summarize_studies,
        options={
            "--gpu": "h100",
            "--model": {"help": "use this model in both studies"},
            "--space": {"help": "use this search space in both studies"},
            "--budget": {"help": "use this budget in both studies"},
            "--studies": {"nargs": "*", "default": list(STUDIES), "choices": list(STUDIES)},
            "--keep": None,
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
