"""Measure 8-bit floats: LoRA on an fp8 base, full fine-tuning on two GPUs, and losses."""

import argparse
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from bench import TINY_MODEL, Mode, Rows, finish, run_program, save, scratch
from exported import RunFailed, run_export, run_settings, write_export
from levers import BASE_RATE, text
from transformers import PrinterCallback, TrainingArguments, set_seed

from autotune.catalog import resolve_model
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.meters import open_meter
from autotune.probe.model_settings import model_settings
from autotune.trainer import model_builder, rows
from autotune.trainer.float8_training import train_in_16_bits
from autotune.trainer.lean_trainer import LeanTrainer, compile_layers, training_arguments

# --- exported runs

RUN_COLUMNS = ("case", "config", "tokens_per_s", "peak_reserved_gib", "seconds", "failed")


def run_case(
    args: argparse.Namespace, case: str, config: TrainConfig, lengths: list[int]
) -> dict[str, Any]:
    """Run the exported script with random weights, and return its clock's numbers as a row.

    A failed run gives a row with its last error.
    """
    on_cpu = args.device == "cpu"
    shape = TINY_MODEL if on_cpu else dict(resolve_model(args.model).config)
    settings = run_settings(config, shape["model_type"], lengths, args.steps, on_cpu=on_cpu)
    folder = scratch()
    write_export(folder, settings, shape)
    if case == EARLIER:
        path = folder / "runtime" / "float8.py"
        source = path.read_text(encoding="utf-8")
        if EARLIER_CAST[0] not in source:
            raise SystemExit(f"{path} has another cast than this benchmark knows")
        path.write_text(source.replace(*EARLIER_CAST), encoding="utf-8")
    began = time.monotonic()
    row: dict[str, Any] = {
        "case": case,
        "config": config.label(),
        "model": args.model,
        "num_gpus": config.num_gpus,
    }
    try:
        found = run_export(folder, args.steps, args.longest)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"over {args.longest:g} s", "seconds": args.longest}
    except RunFailed as error:
        return row | {"failed": str(error), "seconds": time.monotonic() - began}

    seconds = found["seconds_per_step"]
    return row | {
        "seconds": time.monotonic() - began,
        "tokens_per_s": config.tokens / seconds if seconds else None,  # of each GPU
        "step_s": seconds,
        "tokens_per_step": config.tokens,
        "peak_reserved_gib": found["peak_reserved_gib"],
        "steps": found["steps"],
    }


def run_cases(
    args: argparse.Namespace, cases: Iterable[tuple[str, TrainConfig]], lengths: list[int]
) -> None:
    """Run each case that has no row yet, and store each row at once.

    Begins no run that would end after `--seconds`, if it takes as long as the longest so far.
    """
    stored, began = Rows.of(args), time.monotonic()
    fingerprint = stored.fingerprint or to_data(open_meter(args.device).fingerprint())
    slowest = 0.0
    for number, (case, config) in enumerate(cases):
        # A case that is measured twice has two numbers. A failed run is repeated.
        if stored.has(number=number, failed=None):
            continue
        if time.monotonic() - began + slowest > args.seconds:
            print(f"{case}: left to the next call, with --rows", flush=True)
            continue
        row = run_case(args, case, config, lengths)
        slowest = max(slowest, row["seconds"])
        stored.add({"number": number, **row, "fingerprint": fingerprint})
        print(", ".join(f"{key} {row[key]}" for key in RUN_COLUMNS if key in row), flush=True)
        save(args, fingerprint, stored.plain)
    finish(args, fingerprint, stored.plain, RUN_COLUMNS)


def small(config: TrainConfig, device: str) -> TrainConfig:
    """Return the configuration, on a CPU with short rows and in one process."""
    if device != "cpu":
        return config
    return replace(config, seq_len=64, num_gpus=1, sharding="none", packed_attention="mask")


def speeds(found: list[dict[str, Any]], *cases: str) -> list[float]:
    """Return the measured speeds of these cases."""
    return [row["tokens_per_s"] for row in found if row["case"] in cases and "step_s" in row]


def num_failed(found: list[dict[str, Any]]) -> int:
    """Return the number of cases without any successful run."""
    done = {row["number"] for row in found if "failed" not in row}
    return len({row["number"] for row in found} - done)


# --- lora

# Packed rows of 4,096 tokens with examples of 256, in two rows for each micro batch
LORA = TrainConfig(
    micro_batch_size=2,
    seq_len=4096,
    lora_rank=16,
    checkpointing="none",
    compile="per_layer",
    loss="chunked",
    packing=True,
    packed_attention="varlen",
    quantization="fp8",
)
JOINED = replace(LORA, lora_kernels="joined")
BEFORE, NOW, EARLIER = "before", "joined on fp8", "before, earlier cast"
# The cast of earlier versions read each tensor once more for its largest value.
EARLIER_CAST = ("values.aminmax(dim=-1)", "values.aminmax()")
# Both sides alternate, so that a change of the clock rate meets both.
LORA_CASES = (
    (BEFORE, LORA),
    (NOW, JOINED),
    (NOW, JOINED),
    (BEFORE, LORA),
    ("joined on fp8, bf16 adapters", replace(JOINED, precision="bf16_pure")),
    ("joined on fp8, 4 rows", replace(JOINED, micro_batch_size=4)),
    ("joined in bf16", replace(JOINED, quantization="none")),
    (EARLIER, LORA),
    (NOW, JOINED),
    (EARLIER, LORA),
)
EXAMPLE = 256


def run_lora(args: argparse.Namespace) -> None:
    """Measure LoRA on an fp8 base in the exported run, with joined adapters and without.

    `before` is the fp8 base with PEFT's own products, as it was before joined adapters worked on
    it. Its speed and that of joined adapters are medians of runs that alternate. `before, earlier
    cast` also reads each tensor once more for its largest value, as versions before joined adapters
    did; `lora_over_earlier` compares joined adapters with it. A step has
    one micro batch of two packed rows of 4,096 tokens, and the clock includes the optimizer. The
    other cases show what 16-bit adapters, longer micro batches and a base in bf16 give. The speed
    `lora_tokens_per_s` is the best of all cases with an fp8 base and fp32 adapters.
    """
    cases = [(case, small(config, args.device)) for case, config in LORA_CASES]
    run_cases(args, cases, [EXAMPLE if args.device != "cpu" else 16])


def summarize_lora(found: list[dict[str, Any]]) -> dict[str, Any]:
    before, now, earlier = (speeds(found, case) for case in (BEFORE, NOW, EARLIER))
    both = before and now
    best = speeds(found, NOW, "joined on fp8, 4 rows")
    return {
        "lora_over_before": statistics.median(now) / statistics.median(before) if both else None,
        "lora_tokens_per_s": max(best, default=None),
        "lora_over_earlier": statistics.median(now) / statistics.median(earlier)
        if now and earlier
        else None,
        "before_tokens_per_s": statistics.median(before) if before else None,
        "joined_tokens_per_s": statistics.median(now) if now else None,
        "bf16_tokens_per_s": max(speeds(found, "joined in bf16"), default=None),
        "bf16_adapters_tokens_per_s": max(
            speeds(found, "joined on fp8, bf16 adapters"), default=None
        ),
        "failed": num_failed(found),
    }


# --- full

FULL = TrainConfig(
    method="full",
    micro_batch_size=1,
    seq_len=8192,
    checkpointing="none",
    compile="per_layer",
    loss="chunked",
    padding="max_length",
    num_gpus=2,
    sharding="fsdp2",
)
# The settings that each side may choose from, the likely best first
SETTINGS: dict[str, dict[str, Any]] = {
    "kept": {"sharding": "fsdp2_keep"},
    "two rows": {"micro_batch_size": 2},
    "resharded": {},
    "recomputed": {"checkpointing": "every_2"},  # for GPUs of 80 GB
}
SIDES = ("none", "tensorwise", "rowwise")
FULL_CASES = tuple(
    (f"{scales}, {name}", replace(FULL, fp8_products=scales, **changes))
    for name, changes in SETTINGS.items()
    for scales in SIDES
)


def run_full(args: argparse.Namespace) -> None:
    """Measure full fine-tuning of Llama 3.1 8B on two GPUs, in bf16 and with fp8 products.

    Each exported run has fp32 master weights that FSDP2 shards, and rows of 8,192 tokens. The
    clock includes the optimizer. `full_over_bf16` divides the best speed with fp8 products by the
    best in bf16, each with its own best settings. Speeds are of one GPU. On a CPU, a trial run has
    one process and a tiny model.
    """
    cases = [(case, small(config, args.device)) for case, config in FULL_CASES]
    run_cases(args, cases, [cases[0][1].seq_len])


def summarize_full(found: list[dict[str, Any]]) -> dict[str, Any]:
    best: dict[str, float | None] = {
        scales: max(speeds(found, *(f"{scales}, {name}" for name in SETTINGS)), default=None)
        for scales in SIDES
    }
    in_fp8 = [speed for scales, speed in best.items() if scales != "none" and speed is not None]
    plain = best["none"]
    return {
        "full_over_bf16": max(in_fp8) / plain if in_fp8 and plain else None,
        "full_tokens_per_s": max(in_fp8, default=None),
        "bf16_tokens_per_s": plain,
        **{f"{scales}_tokens_per_s": best[scales] for scales in SIDES[1:]},
        **{
            f"{scales}_over_bf16": speed / plain if (speed := best[scales]) and plain else None
            for scales in SIDES[1:]
        },
        "failed": num_failed(found),
    }


# --- losses

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
LEARNER = TrainConfig(
    method="full",
    micro_batch_size=16,
    seq_len=512,
    checkpointing="none",
    compile="per_layer",
    padding="max_length",
)
STEPS, BASE_STEPS, HELD_OUT, RATE = 1000, 500, 256, 3e-4
SEEDS = (0, 1, 2, 3, 4, 5)
LOSS_COLUMNS = ("scales", "seed", "loss_before", "loss", "difference", "seconds")


def learn(
    args: argparse.Namespace, scales: str, weights: dict[str, Any] | None, seed: int, **of: Any
) -> tuple[Any, dict[str, Any]]:
    """Train a small model on the source of Python's standard library, a token for each byte.

    `of` has the number of steps, the learning rate and the files. Without weights, the model begins
    with random values. Returns the model, and a row with its held-out losses. They are computed
    with products in bf16, as later users of the weights compute.
    """
    device = torch.device("cuda:0" if args.device != "cpu" else "cpu")
    # On a CPU, the compiler's C++ code takes long to build.
    compiles = device.type == "cuda"
    config = replace(LEARNER, fp8_products=scales)
    if not compiles:
        config = replace(config, micro_batch_size=4, seq_len=64)
    settings = model_settings(config, SHAPE["model_type"])
    set_seed(seed)
    base = model_builder.build(model_builder.config_of(args.shape), settings, device)
    model = model_builder.trainable_model(base, settings, device).train()
    if weights is not None:
        model.load_state_dict(weights)
    if compiles:
        torch._dynamo.reset()
        compile_layers(model_builder.decoder_layers(model))

    # If the library has too little text, the Trainer repeats it in another order.
    number = of["steps"] * config.micro_batch_size + args.held_out
    data = text(number, config.seq_len, of["files"], seed)
    if len(data) < 2 * args.held_out:
        raise SystemExit(f"{of['files']} gives only {len(data)} rows of text")
    trained = data[: -args.held_out]
    held_out = torch.stack(data[-args.held_out :]).to(device)
    before = None if weights is None else held_out_loss(model, held_out, config)

    arguments = training_arguments(config, accumulation=1, on_cpu=device.type == "cpu")
    arguments |= {"learning_rate": of["rate"], "lr_scheduler_type": "cosine"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trainer = LeanTrainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=of["steps"],
                save_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
            lambda examples: rows.collate([[one] for one in examples], [config.seq_len], False),
            trained,
        )
        trainer.remove_callback(PrinterCallback)
        set_seed(seed)  # the Trainer's constructor has set another
        trainer.train()
    seconds = time.monotonic() - began
    model = trainer.model
    model.__dict__.pop("forward", None)  # accelerate's autocast
    return model, {
        "scales": scales,
        "seed": seed,
        "config": config.label(),
        "steps": of["steps"],
        "rows": len(trained),
        "loss_before": before,
        "loss": held_out_loss(model, held_out, config),
        "seconds": seconds,
    }


@torch.no_grad()
def held_out_loss(model: Any, held_out: torch.Tensor, config: TrainConfig) -> float:
    """Return the mean loss of the rows, with all products in bf16."""
    kinds = {module: type(module) for module in model.modules()}
    compiled = {module: module._compiled_call_impl for module in model.modules()}
    for module in compiled:
        module._compiled_call_impl = None
    train_in_16_bits(model)
    with torch.autocast(held_out.device.type, torch.bfloat16):
        losses = [
            float(model(input_ids=batch, labels=batch).loss)
            for batch in held_out.split(config.micro_batch_size)
        ]
    for module, kind in kinds.items():
        module.__class__ = kind
        module._compiled_call_impl = compiled[module]
    return statistics.fmean(losses)


def run_losses(args: argparse.Namespace) -> None:
    """Compare the losses of full fine-tuning with fp8 products and in bf16, in pairs of seeds.

    A small Llama is first trained in bf16 on the modules of Python's standard library. Then all its
    weights are trained on the library's packages, from the same values and with the same order of
    rows on both sides. A difference is the held-out loss with fp8 products, divided by the loss in
    bf16, minus 1. Both losses are computed in bf16.
    """
    args.shape = SHAPE if args.device != "cpu" else SHAPE | TINY_MODEL
    stored, began = Rows.of(args), time.monotonic()
    fingerprint = stored.fingerprint or to_data(open_meter(args.device).fingerprint())
    of_base = {"steps": args.base_steps, "rate": BASE_RATE, "files": "*.py"}
    base, row = learn(args, "none", None, 0, **of_base)
    weights = {name: value.detach().clone() for name, value in base.state_dict().items()}
    if not stored.has(scales="base"):
        stored.add({**row, "scales": "base", "fingerprint": fingerprint})

    of = {"steps": args.steps, "rate": RATE, "files": "*/*.py"}
    slowest = row["seconds"]
    for seed in args.seeds:
        for scales in SIDES:
            if stored.has(scales=scales, seed=seed):
                continue
            if time.monotonic() - began + 1.2 * slowest > args.seconds:
                print(f"{scales}, seed {seed}: left to the next call, with --rows", flush=True)
                continue
            _, row = learn(args, scales, weights, seed, **of)
            slowest = max(slowest, row["seconds"])
            stored.add({**row, "fingerprint": fingerprint})
            print(", ".join(f"{key} {row[key]}" for key in LOSS_COLUMNS if key in row), flush=True)
            save(args, fingerprint, stored.plain)
    finish(args, fingerprint, stored.plain, [name for name in LOSS_COLUMNS if name != "difference"])


def summarize_losses(found: list[dict[str, Any]]) -> dict[str, Any]:
    by_side = {(row["scales"], row["seed"]): row["loss"] for row in found}
    plain = {seed: loss for (scales, seed), loss in by_side.items() if scales == "none"}
    summary: dict[str, Any] = {"seeds": len(plain)}
    for scales in SIDES[1:]:
        differences = [
            by_side[scales, seed] / loss - 1
            for seed, loss in plain.items()
            if (scales, seed) in by_side
        ]
        spread = statistics.stdev(differences) if differences[1:] else None
        summary |= {
            f"{scales}_difference": statistics.fmean(differences) if differences else None,
            f"{scales}_spread": spread,
            f"{scales}_error": spread / math.sqrt(len(differences)) if spread else None,
            f"{scales}_largest": max(map(abs, differences), default=None),
        }
    fallen = [row["loss"] / row["loss_before"] for row in found if row["loss_before"]]
    return summary | {"loss_over_first": statistics.fmean(fallen) if fallen else None}


RUN_OPTIONS: dict[str, Any] = {
    "--device": "cuda",
    "--longest": {"type": float, "default": 200.0, "help": "end a run after this time, in s"},
    "--rows": None,
}
MODES = {
    "lora": Mode(
        run=run_lora,
        result="fp8_lora",
        summarize=summarize_lora,
        options=RUN_OPTIONS | {"--model": "llama-2-7b", "--steps": 30, "--seconds": 270.0},
    ),
    "full": Mode(
        run=run_full,
        result="fp8_full",
        summarize=summarize_full,
        options=RUN_OPTIONS | {"--model": "llama-3.1-8b", "--steps": 14, "--seconds": 370.0},
    ),
    "losses": Mode(
        run=run_losses,
        result="fp8_losses",
        summarize=summarize_losses,
        options={
            "--device": "cuda",
            "--steps": STEPS,
            "--base-steps": BASE_STEPS,
            "--held-out": HELD_OUT,
            "--seeds": {"nargs": "+", "type": int, "default": list(SEEDS)},
            "--seconds": 540.0,
            "--rows": None,
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
