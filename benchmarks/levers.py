"""Measure the speed of levers, alone, side by side and together, and check that they keep gradients
and losses.
"""

import argparse
import functools
import itertools
import math
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import packing
import torch
from bench import (
    Mode,
    Rows,
    device_of,
    fingerprint_of,
    finish,
    run_program,
    run_study,
    save,
    scratch,
    set_options,
    speed,
    table,
    worker,
)
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments, set_seed

from autotune.catalog import resolve_device, resolve_model
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.meters import open_meter
from autotune.probe.model_settings import model_settings
from autotune.trainer import model_builder, rows
from autotune.trainer.chunked_loss import chunked_loss
from autotune.trainer.float8 import Float8Linear
from autotune.trainer.graphs import MicroBatchGraphs
from autotune.trainer.joined_lora import JoinedLayers
from autotune.trainer.lean_trainer import LeanTrainer, compile_layers, training_arguments

# --- reference

MODELS = ("mistral-7b", "llama-3.1-8b")
# The reference recomputes every layer and uses autocast over a bf16 base, with rank 16 on all
# linear layers.
LORA = TrainConfig(micro_batch_size=4, seq_len=2048)
FULL = TrainConfig(method="full", micro_batch_size=4, seq_len=2048, precision="bf16_pure")
# no other number format
TOGETHER = {"checkpointing": "none", "compile": "per_layer", "loss": "chunked"}
REFERENCE_LEVERS: dict[str, dict[str, Any]] = {
    "reference": {},
    "no checkpointing": {"checkpointing": "none"},
    "offloaded checkpoints": {"checkpointing": "offload"},
    "bf16 adapters": {"precision": "bf16_pure"},
    "layers compiled": {"compile": "per_layer"},
    "loss in chunks": {"loss": "chunked"},
    "cuDNN's attention": {"attention": "sdpa_cudnn"},
    "Liger's kernels": {"kernels": "liger"},
    "fp8 base": {"quantization": "fp8"},
    "8-bit AdamW": {"optimizer": "adamw_8bit"},
    "micro batch of 1": {"micro_batch_size": 1},
    "together": TOGETHER,
    "together, bf16 adapters": TOGETHER | {"precision": "bf16_pure"},
    "together, cuDNN's attention": TOGETHER | {"attention": "sdpa_cudnn"},
    "together, fp8 base": TOGETHER | {"quantization": "fp8"},
    "together, Liger's kernels, not compiled": TOGETHER | {"kernels": "liger", "compile": "none"},
    "together, micro batch of 1": TOGETHER | {"micro_batch_size": 1},
    "together, micro batch of 8": TOGETHER | {"micro_batch_size": 8},
}
# As a user would call it. 8-bit floats change the training, so they need consent.
STUDIES: dict[str, list[str]] = {
    "the study's winner": [],
    "the study's winner, fp8 allowed": ["--allow-quantized"],
}


LEVER_COLUMNS = ["lever", "config", "tokens_per_s", "mfu", "peak_reserved_gib"]


def run_reference(args: argparse.Namespace) -> None:
    """Measure each lever on the guides' reference configuration: alone, together, and in a study's
    winner.

    The studies are plain calls of `autotune run` for LoRA of rank 16 on rows of 2,048 tokens: one
    with the defaults and one that also allows 8-bit floats. All measurements are at full depth.
    """
    until = time.monotonic() + args.seconds
    rows = Rows.of(args)
    # The studies run right after the first reference, so that both are measured within the same
    # minutes.
    first, *others = [(name, reference) for name in args.models for reference in (LORA, FULL)]
    measure_reference(rows, args, [first], until)
    for name, options in STUDIES.items():
        if time.monotonic() < until and not rows.has(lever=name):
            rows.add(reference_study(args, name, options))
            table(rows.all[-1:], LEVER_COLUMNS)
    measure_reference(rows, args, others, until)
    finish(args, rows.fingerprint, rows.plain)


def summarize_reference(rows: list[dict[str, Any]]) -> dict[str, Any]:
    # the first row of a lever: LoRA of the first model
    by_lever = {row["lever"]: row for row in reversed(rows)}
    winner, reference = by_lever.get("the study's winner", {}), by_lever["reference"]
    in_fp8 = by_lever.get("the study's winner, fp8 allowed", {})

    def ratio(row: dict[str, Any]) -> float | None:
        return (
            row["tokens_per_s"] / reference["tokens_per_s"]
            if row and reference.get("tokens_per_s")
            else None
        )

    return {
        "winner_tokens_per_s": winner.get("tokens_per_s"),
        "reference_tokens_per_s": reference.get("tokens_per_s"),
        "ratio": ratio(winner),
        "mfu": winner.get("mfu"),
        "winner": winner.get("config"),
        "fp8_winner_tokens_per_s": in_fp8.get("tokens_per_s"),
        "fp8_ratio": ratio(in_fp8),
        "fp8_winner": in_fp8.get("config"),
    }


def measure_reference(
    rows: Rows, args: argparse.Namespace, cases: list[tuple[str, TrainConfig]], until: float
) -> None:
    """Measure each lever on each of these references, unless its row exists or the time is over."""
    device = resolve_device(args.gpu)
    # several levers may give the same configuration
    missing: dict[tuple[str, str], tuple[str, TrainConfig]] = {}
    for name, reference in cases:
        for lever, changes in REFERENCE_LEVERS.items():
            config = replace(reference, **changes)
            if not rows.has(model=resolve_model(name).short, config=config.label()):
                missing.setdefault((name, config.label()), (lever, config))
    if not missing or time.monotonic() > until:
        return
    with worker(device_of(device)) as prober:
        fingerprint = to_data(prober.fingerprint)
        for (name, _), (lever, config) in missing.items():
            if time.monotonic() < until:
                found = speed(prober, resolve_model(name), device, config, args.memory_gib)
                rows.add({"lever": lever, **found, "fingerprint": fingerprint})
                table(rows.all[-1:], LEVER_COLUMNS)


def reference_study(args: argparse.Namespace, name: str, options: list[str]) -> dict[str, Any]:
    """Run a study and return its winner with the study's own measurements as a row."""
    task = [
        "--gpu",
        args.gpu,
        "--model",
        args.models[0],
        "--tokens-per-example",
        "2048",
        "--budget",
        args.budget,
    ]
    task += [*set_options({"seq_len": 2048, "lora_rank": 16}), "--out", "study", *options]
    summary = run_study(scratch(), *task)
    winner = summary["winner"]
    return {
        "lever": name,
        "model": args.models[0],
        "config": TrainConfig(**winner["config"]).label(),
        "tokens_per_s": winner["performance"]["tokens_per_second"],
        "mfu": winner["performance"]["mfu"],
        "peak_reserved_gib": winner["memory"]["peak_reserved_gib"],
        "fingerprint": fingerprint_of(summary),
    }


# --- sides

# Each lever: the configuration without it, and with it.
SIDES_COMPILED = {
    "checkpointing": "none",
    "compile": "per_layer",
    "loss": "chunked",
    "padding": "max_length",
}
SIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together": ({}, TOGETHER),
    "joined adapters": (SIDES_COMPILED, SIDES_COMPILED | {"lora_kernels": "joined"}),
    "fp8 base": (SIDES_COMPILED, SIDES_COMPILED | {"quantization": "fp8"}),
    "selective_50": (
        SIDES_COMPILED | {"checkpointing": "every_2"},
        SIDES_COMPILED | {"checkpointing": "selective_50"},
    ),
}
SIDE_RANKS, LENGTHS = (16, 64), (1024, 4096)
CAP_GIB, LONG_ROW = 22.0, 16384
RECOMPUTED = ("none", "selective_80", "every_4", "selective_50", "every_2", "selective_30", "full")
GRAPHS: dict[str, dict[str, Any]] = {
    "1 x 512": {},
    "1 x 512, CUDA graphs": {"cuda_graphs": "micro_batch"},
    "1 x 512, compiled": {"compile": "per_layer"},
    "1 x 512, compiled, CUDA graphs": {"compile": "per_layer", "cuda_graphs": "micro_batch"},
}


def run_sides(args: argparse.Namespace) -> None:
    """Measure whole models with and without each lever, and check gradients and losses.

    The pairs have two ranks and two row lengths. Selective recomputation is also measured on long
    rows and under a memory cap, CUDA graphs on a small, CPU-bound micro batch, and packed rows
    beside full ones (`packing.py attention`). The mode `checks` explains the checks of gradients
    and losses. `--first` makes a short test of selective recomputation and CUDA graphs. Each row
    names its GPU, so one result can hold rows of several GPUs (`--rows`).
    """
    rows = Rows.of(args)
    measure_sides(rows, args, time.monotonic() + args.seconds)
    finish(args, rows.fingerprint, rows.plain)


def measure_sides(rows: Rows, args: argparse.Namespace, until: float) -> None:
    """Measure with and without each lever, and check gradients and losses.

    Start no measurement after `until`.
    """
    if time.monotonic() > until:
        return
    device = resolve_device(args.gpu)
    here = torch.device(device_of(device))
    with worker(here.type) as prober:
        card = {"card": prober.fingerprint.device}
        known = card | {"fingerprint": to_data(prober.fingerprint)}

        for part, lever, model, config, memory_gib in side_cases(args):
            short = resolve_model(model).short
            if time.monotonic() < until and not rows.has(
                **card, part=part, model=short, config=config.label()
            ):
                found = speed(prober, resolve_model(model), device, config, memory_gib)
                rows.add({"part": part, "lever": lever, **found, **known})
                table(rows.all[-1:], ["part", *LEVER_COLUMNS])

        for case in [] if args.first else packing.attention_cases(packing.CONFIG.seq_len):
            if time.monotonic() < until and not rows.has(**card, part="packed", case=case):
                found = packing.speed_of(
                    case, prober, resolve_model(args.model), device, args.memory_gib
                )
                rows.add({"part": "packed", **found, **known})
                table(rows.all[-1:], ["part", *packing.ATTENTION_COLUMNS])

    if time.monotonic() < until and here.type == "cuda" and not rows.has(**card, part="gradients"):
        found = gradient_difference(CONFIG, here)
        rows.add({"part": "gradients", "lever": "CUDA graphs", **found, **known})
        print(found, flush=True)
    check_sides(rows, args, until, here, known)


def check_sides(
    rows: Rows, args: argparse.Namespace, until: float, here: torch.device, card: dict[str, Any]
) -> None:
    """Compare losses, and measure which share of a small update arrives."""
    of_card = {"card": card["card"]}
    levers = ["selective_50"] if args.first else levers_of(here)
    missing = [lever for lever in levers if not rows.has(**of_card, part="losses", check=lever)]
    if time.monotonic() < until and missing:
        for row in loss_differences(here, levers=missing, seeds=args.seeds):
            if not rows.has(**of_card, part="losses", check=row["check"]):
                rows.add({"part": "losses", **row, **card})
                print(row, flush=True)
            if time.monotonic() > until:
                break
    if time.monotonic() < until and not rows.has(**of_card, part="updates"):
        for row in arriving(here):
            rows.add({"part": "updates", **row, **card})
        table([row for row in rows.all if row["part"] == "updates"], ["check", "update", "share"])


def side_cases(args: argparse.Namespace) -> list[tuple[str, str, str, TrainConfig, float]]:
    """The part, the lever, the model, the configuration and the
    memory limit of each measurement.
    """
    model, recomputed = args.model, ("every_2", "selective_30") if args.first else RECOMPUTED
    sizes = (2,) if args.first else (1, 2, 4)
    one = TrainConfig(
        micro_batch_size=1, seq_len=512, checkpointing="none", loss="chunked", padding="max_length"
    )
    graphs = [
        ("graphs", lever, "llama-3.2-1b", replace(one, **changes), 70.0)
        for lever, changes in GRAPHS.items()
    ]
    capped = []
    for value in recomputed:
        short = TrainConfig(**SIDES_COMPILED | {"checkpointing": value, "seq_len": 1024})
        capped += [
            ("cap", value, model, replace(short, micro_batch_size=size), CAP_GIB) for size in sizes
        ]
    if args.first:
        return graphs + capped
    found = []
    for rank, length in itertools.product(SIDE_RANKS, LENGTHS):
        for lever in SIDES:
            for side, config in zip(
                ("without", "with"), sides_of(lever, rank, length), strict=True
            ):
                found.append(("sides", f"{lever}, {side}", model, config, args.memory_gib))
    for value in recomputed:
        long = TrainConfig(
            **SIDES_COMPILED | {"checkpointing": value, "seq_len": LONG_ROW, "micro_batch_size": 1}
        )
        found.append(("long rows", value, model, long, args.memory_gib))
    return found + graphs + capped


def sides_of(lever: str, rank: int, length: int) -> list[TrainConfig]:
    """Return the configurations without and with a lever, for 8,192 tokens in a micro batch."""
    size = {"lora_rank": rank, "seq_len": length, "micro_batch_size": 8192 // length}
    return [TrainConfig(**size | changes) for changes in SIDES[lever]]


def worth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the speed with each lever divided by the speed
    without it, by lever, rank and length.
    """
    speeds = {
        row["config"]: row["tokens_per_s"]
        for row in rows
        if row["part"] == "sides" and row.get("tokens_per_s")
    }
    found = {}
    for lever, rank, length in itertools.product(SIDES, SIDE_RANKS, LENGTHS):
        without, with_it = (speeds.get(config.label()) for config in sides_of(lever, rank, length))
        if without and with_it:
            found[f"{lever}, r{rank}, {length}"] = with_it / without
    return found


def summarize_sides(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize each GPU. At the top, each key has its first known value of all GPUs."""
    names = dict.fromkeys(row["card"] for row in rows)
    cards = {name: summarize_card([row for row in rows if row["card"] == name]) for name in names}
    first = {
        key: next((one[key] for one in cards.values() if one[key] is not None), None)
        for key in summarize_card([])
    }
    return first | {"cards": cards}


def summarize_card(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ratios of speeds, and the largest differences. A ratio is None without both speeds."""

    def best(part: str, *levers: str) -> float | None:
        speeds = [
            row.get("tokens_per_s")
            for row in rows
            if row["part"] == part and row["lever"] in levers
        ]
        return max((value for value in speeds if value), default=None)

    def ratio(part: str, levers: tuple[str, ...], *others: str) -> float | None:
        with_it, without = best(part, *levers), best(part, *others)
        return with_it / without if with_it and without else None

    def winner(*, in_fp8: bool) -> float | None:
        found = [row for row in rows if row["part"] == "sides" and row.get("tokens_per_s")]
        found = [
            row
            for row in found
            if "lora r16 " in row["config"] and (" fp8 " in row["config"]) == in_fp8
        ]
        return max((row["tokens_per_s"] for row in found), default=None)

    selective = ("selective_80", "selective_50", "selective_30")
    gradients = next((row for row in rows if row["part"] == "gradients"), {})
    packed = packing.summarize_attention([row for row in rows if row["part"] == "packed"])
    return {
        "winner_tokens_per_s": winner(in_fp8=False),
        "fp8_winner_tokens_per_s": winner(in_fp8=True),
        "packed_over_full": packed.get("packed_over_full"),
        "packed_over_full_short": packed.get("packed_over_full_short"),
        "worth": worth(rows) or None,
        "selective_over_every_2_cap": ratio("cap", selective, "every_2"),
        "selective_over_every_2_long": ratio("long rows", selective, "every_2"),
        "graphs_over_none": ratio("graphs", ("1 x 512, CUDA graphs",), "1 x 512"),
        "graphs_over_compiled": ratio("graphs", ("1 x 512, CUDA graphs",), "1 x 512, compiled"),
        "compiled_graphs_over_best": ratio(
            "graphs",
            ("1 x 512, compiled, CUDA graphs",),
            "1 x 512, CUDA graphs",
            "1 x 512, compiled",
        ),
        "graph_gradient_difference": gradients.get("gradient_difference"),
        "graph_loss_difference": gradients.get("loss_difference"),
        **summarize_checks([row for row in rows if row["part"] in ("losses", "updates")]),
    }


# --- checks

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
CONFIG = TrainConfig(
    micro_batch_size=4,
    seq_len=512,
    lora_rank=16,
    checkpointing="none",
    padding="max_length",
    loss="chunked",
)
CHECKS_COMPILED = {"compile": "per_layer"}
EXACT: dict[str, Any] = {"precision": "fp32"}  # of the values in bf16
# Each lever alone. All others change the first.
CHECKS_LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "layers compiled": CHECKS_COMPILED,
    "whole loss": {"loss": "full"},
    "selective_50": {"checkpointing": "selective_50"},
    "CUDA graphs": {"cuda_graphs": "micro_batch"},
    "joined adapters, layers compiled": CHECKS_COMPILED | {"lora_kernels": "joined"},
    "fp8 base, layers compiled": CHECKS_COMPILED | {"quantization": "fp8"},
}
STEPS, LAST, ACCUMULATION, RATE = 50, 10, 2, 3e-3  # LAST: steps whose losses are averaged
BASE_STEPS, BASE_RATE = 300, 1e-3  # of training the base
SEEDS = (0, 1, 2)
UPDATED = ("none", "layers compiled", "joined adapters, layers compiled")
UPDATES = (1e-5, 3e-5, 1e-4, 1e-3)  # of each value of B, as a first step of Adam at such a rate


def built(
    config: TrainConfig,
    device: torch.device,
    seed: int = 0,
    weights: dict[str, torch.Tensor] | None = None,
) -> tuple[Any, nn.Module, JoinedLayers | None]:
    """The base, the model to train, and its joined layers: the same values for each configuration
    of a seed.

    The base has these weights, or random values.
    """
    set_seed(seed)
    settings = model_settings(replace(config, precision=CONFIG.precision), SHAPE["model_type"])
    base = model_builder.build(model_builder.config_of(SHAPE), settings, device)
    if weights is not None:
        _set_weights(base, weights)
        set_seed(seed)
    model_builder.set_checkpointing(base, settings)
    model = model_builder.trainable_model(base, settings, device)
    joined = JoinedLayers(base, model_builder.decoder_layers(model)) if settings.joined else None
    if config.compile == "per_layer":
        model_builder.require_input_gradients(base)
        compile_layers(model_builder.decoder_layers(model), config.activation_budget)
    return base, model.float() if config.precision == "fp32" else model, joined


@functools.cache
def trained_base(device: torch.device) -> dict[str, torch.Tensor]:
    """Weights of the base, in bf16, trained in 32 bits on the modules of the standard library."""
    set_seed(0)
    settings = model_settings(replace(CONFIG, **EXACT), SHAPE["model_type"])
    base = model_builder.build(model_builder.config_of(SHAPE), settings, device).requires_grad_(
        True
    )
    optimizer = torch.optim.AdamW(base.parameters(), lr=BASE_RATE)
    lines = text(BASE_STEPS * CONFIG.micro_batch_size, CONFIG.seq_len, "*.py")
    for step, batch in enumerate(DataLoader(lines, batch_size=CONFIG.micro_batch_size)):  # type: ignore[arg-type]
        tokens = batch.to(device)
        loss = base(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not step % 50:
            print(
                f"training the base: step {step} of {BASE_STEPS}, loss {loss.item():.2f}",
                flush=True,
            )
    return {name: weight.detach().to(torch.bfloat16) for name, weight in base.named_parameters()}


def _set_weights(base: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, module in base.named_modules():  # their weights are no parameters of these names
        if isinstance(module, Float8Linear):
            module.store(weights[f"{name}.weight"])
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])


def losses(
    config: TrainConfig, device: torch.device, steps: int = STEPS, seed: int = 0
) -> list[float]:
    """The loss of each step of a training on real text."""
    base, model, joined = built(config, device, seed, trained_base(device))
    arguments = training_arguments(config, accumulation=ACCUMULATION, on_cpu=device.type == "cpu")
    arguments |= {"learning_rate": RATE, "logging_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = LeanTrainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                save_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
            lambda examples: rows.collate([[one] for one in examples], [config.seq_len], False),
            text(steps * ACCUMULATION * config.micro_batch_size, config.seq_len, seed=seed),
            compute_loss_func=chunked_loss(base) if config.loss == "chunked" else None,
            cuda_graphs=config.cuda_graphs == "micro_batch",
            joined=joined,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def text(number: int, length: int, pattern: str = "*/*.py", seed: int = 0) -> list[torch.Tensor]:
    """Return rows of bytes of the standard library's packages or modules.

    A seed always gives the same rows.
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))
    paths = [path for path in paths if "-packages" not in path.parent.name]  # installed by others
    random.Random(seed).shuffle(paths)
    data = b"".join(path.read_bytes() for path in paths)[: number * length]
    return [
        torch.tensor(list(data[begin : begin + length]))
        for begin in range(0, len(data) - length + 1, length)
    ]


def levers_of(device: torch.device) -> list[str]:
    """List the levers that this device supports."""
    return [
        lever
        for lever, changes in CHECKS_LEVERS.items()
        if device.type == "cuda" or "cuda_graphs" not in changes
    ]


def loss_differences(
    device: torch.device,
    steps: int = STEPS,
    levers: Sequence[str] = tuple(CHECKS_LEVERS),
    seeds: Sequence[int] = SEEDS,
) -> Iterator[dict[str, Any]]:
    """For each lever the mean loss of the last steps, and its relative difference to the
    reference's with its error.

    The first row is the reference.
    """

    def ends(config: TrainConfig) -> tuple[float, list[float]]:
        curves = [losses(config, device, steps, seed) for seed in seeds]
        return curves[0][0], [statistics.fmean(curve[-LAST:]) for curve in curves]

    first, expected = ends(replace(CONFIG, **EXACT))
    yield {"check": "in 32 bits", "first_loss": first, "last_loss": statistics.fmean(expected)}
    for lever in levers:
        first, ended = ends(replace(CONFIG, **CHECKS_LEVERS[lever]))
        differences = [one / other - 1 for one, other in zip(ended, expected, strict=True)]
        row: dict[str, Any] = {
            "check": lever,
            "first_loss": first,
            "last_loss": statistics.fmean(ended),
        }
        row["difference"] = statistics.fmean(differences)
        row["difference_error"] = (
            statistics.stdev(differences) / math.sqrt(len(differences)) if seeds[1:] else None
        )
        yield row


def arriving(device: torch.device, ways: Sequence[str] = UPDATED) -> list[dict[str, Any]]:
    """Return the share of the loss reduction in 32 bits that an update of the adapters' B keeps, by
    size and way.
    """
    directions, exact = _lowered(replace(CONFIG, **EXACT), device)
    found = []
    for way in ways:
        _, lowered = _lowered(replace(CONFIG, **CHECKS_LEVERS[way]), device, directions)
        found += [
            {"check": way, "update": size, "share": one / other}
            for size, one, other in zip(UPDATES, lowered, exact, strict=True)
        ]
    return found


def _lowered(
    config: TrainConfig, device: torch.device, directions: list[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the gradient signs of each B, and the loss reduction of a step of each size against
    `directions`.
    """
    _, model, _ = built(config, device)
    ups = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    tokens = torch.stack(text(config.micro_batch_size, config.seq_len)).to(device)
    loss_of = _loss_of(model, config, device)
    before = loss_of(tokens)
    before.backward()
    signs = [up.grad.sign() for up in ups if up.grad is not None]
    lowered = []
    for size in UPDATES:
        with torch.no_grad():
            for up, sign in zip(ups, directions or signs, strict=True):  # each B is zero at first
                up.copy_(-size * sign)
            lowered.append(float(before.detach() - loss_of(tokens)))
    return signs, lowered


def _loss_of(
    model: nn.Module, config: TrainConfig, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's own loss of some tokens, in the precision of a configuration."""

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with (
            torch.autocast(device.type, torch.bfloat16)
            if config.precision == "bf16_mixed"
            else nullcontext()
        ):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    return loss_of


def gradient_difference(
    config: TrainConfig, device: torch.device, lever: dict[str, Any] | None = None
) -> dict[str, float]:
    """Losses and gradients of two micro batches with a lever, by default CUDA graphs: relative
    differences.

    The model is as of `losses`. Gradients add up from zero, after another micro batch that captures
    the graph.
    """
    first, second = (batch.unsqueeze(0).to(device) for batch in text(2, config.seq_len))
    with_it = replace(config, **(CHECKS_LEVERS["CUDA graphs"] if lever is None else lever))
    (plain_losses, plain), (its_losses, its) = (
        _gradients(one, device, first, second) for one in (config, with_it)
    )
    return {
        "loss_difference": max(
            abs(a / b - 1) for a, b in zip(its_losses, plain_losses, strict=True)
        ),
        "gradient_difference": float((its - plain).norm() / plain.norm()),
    }


def _gradients(
    config: TrainConfig, device: torch.device, first: torch.Tensor, second: torch.Tensor
) -> tuple[list[float], torch.Tensor]:
    _, model, _ = built(config, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss_of = _loss_of(model, config, device)
    for parameter in trained:  # parameters at zero would leave half of the gradients at zero
        nn.init.normal_(parameter, std=0.02)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(batch["tokens"])
        loss.backward()
        return loss.detach()

    run = MicroBatchGraphs(step, trained).run if config.cuda_graphs == "micro_batch" else step
    run({"tokens": first})
    model.zero_grad()
    found = [float(run({"tokens": tokens})) for tokens in (second, first)]
    return found, torch.cat(
        [parameter.grad.flatten() for parameter in trained if parameter.grad is not None]
    )


def summarize_checks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the relative loss difference of each lever, the largest, and the shares of updates
    that arrive.
    """
    differences = {row["check"]: row["difference"] for row in rows if "difference" in row}
    return {
        "loss_differences": differences or None,
        "loss_difference_max": max(map(abs, differences.values()), default=None),
        "arriving": {
            f"{row['check']}, {row['update']:g}": row["share"] for row in rows if "update" in row
        }
        or None,
    }


def run_checks(args: argparse.Namespace) -> None:
    """Check that a lever keeps the gradients of a micro batch and the loss of 50 steps on real
    text, on any machine.

    The reference for losses starts from the same values and computes in 32 bits. The lever "none"
    compares bf16 itself with it. Chance makes one training end a little higher or lower, so a
    difference is the mean over several trainings, each with its own values and text. `arriving`
    measures one cause: bf16 loses an update of an adapter that is small beside the output of the
    base.

    The text is the source of Python's standard library, with a token for each byte. For losses the
    base is first trained on its modules, because no weights are available, and then tuned on its
    packages by the exported script's loop. A base of random values would not serve: in 8 bits it
    becomes another base of random values, whose losses end 2 % higher or lower by chance. For
    gradients and updates random values are better: both are large beside the rounding of bf16.
    """
    here = torch.device("cpu" if args.gpu == "cpu" else "cuda")
    fingerprint = open_meter(here.type).fingerprint()
    rows = Rows(args.mode.result, args.out, None)
    levers = args.levers or levers_of(here)
    for row in chain(arriving(here), loss_differences(here, args.steps, levers, args.seeds)):
        rows.add(row)
        print(row, flush=True)
        save(args, fingerprint, rows.all)


MODES = {
    "sides": Mode(
        run=run_sides,
        result="levers",
        summarize=summarize_sides,
        options={
            "--gpu": "h200",
            "--model": "mistral-7b",
            "--memory-gib": 75.0,
            "--seconds": 540.0,
            "--rows": None,
            "--seeds": {
                "nargs": "+",
                "type": int,
                "default": list(range(12)),
                "help": "seeds of the losses",
            },
            "--first": {
                "default": False,
                "help": "a short test: selective recomputation and CUDA graphs",
            },
        },
    ),
    "checks": Mode(
        run=run_checks,
        result="lever_checks",
        summarize=summarize_checks,
        options={
            "--gpu": "auto",
            "--steps": STEPS,
            "--seeds": {"nargs": "+", "type": int, "default": list(SEEDS)},
            "--levers": {
                "nargs": "+",
                "choices": list(CHECKS_LEVERS),
                "help": "[all that the device supports]",
            },
        },
    ),
    "reference": Mode(
        run=run_reference,
        result="reference_levers",
        summarize=summarize_reference,
        options={
            "--gpu": "h200",
            "--models": list(MODELS),
            "--memory-gib": 135.0,
            "--budget": "4m",
            "--rows": None,
            "--seconds": 3600.0,
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
