"""Compare the final losses of adapters on the experts of a small mixture: grouped products with
PEFT's own wrappers, and experts in nf4 with the same values in 16 bits.

The mixture is first trained here, because no weights are available: on the modules of Python's
standard library, with a token for each byte. Its adapters are then trained on other text, the
docstrings of the library's packages, by the exported script's code. Both sides of a pair begin with
the same adapters and see the same rows in the same order.
"""

import argparse
import ast
import functools
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench import Mode, Rows, finish, largest, run_program, scratch, table
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from autotune.core.train_config import TrainConfig
from autotune.probe.meters import open_meter
from autotune.probe.model_settings import model_settings
from autotune.trainer import model_builder, rows
from autotune.trainer.lean_trainer import LeanTrainer, training_arguments
from autotune.trainer.settings import ModelSettings

FAMILY, VOCABULARY = "qwen3_moe", 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the mixture and of its trainings."""

    hidden: int
    layers: int
    experts: int
    length: int = 256  # bytes of a row
    batch: int = 32  # rows of a step
    base_steps: int
    steps: int
    held_out: int  # rows

    @property
    def shape(self) -> dict[str, Any]:
        """The content of the mixture's config.json."""
        return {
            "model_type": FAMILY,
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden,
            "moe_intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32,
            "num_key_value_heads": self.hidden // 64,
            "head_dim": 32,
            "num_experts": self.experts,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.01,
            "max_position_embeddings": self.length,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }


SIZES = {
    "cuda": Size(hidden=256, layers=4, experts=16, base_steps=400, steps=50, held_out=256),
    "cpu": Size(
        hidden=64, layers=2, experts=8, length=128, batch=8, base_steps=200, steps=30, held_out=64
    ),
}
BASE_RATE, RATE = 2e-3, 2e-3
SEEDS = (0, 1, 2, 3, 4)

GROUPED = TrainConfig(
    lora_rank=8,
    lora_targets="attention_experts",
    lora_kernels="grouped",
    checkpointing="none",
    padding="max_length",
    optimizer="adamw_torch",
)
PACKED = replace(GROUPED, quantization="nf4", double_quant=True, quantize_experts=True)
# Both references have weights in 16 bits and PEFT's wrappers. The reference of `nf4` has the values
# of the dequantised weights.
REFERENCE = replace(GROUPED, lora_kernels="peft")
PAIRS = {"split": GROUPED, "nf4": PACKED}
COLUMNS = ["pair", "seed", "loss_first", "loss", "reference_loss", "difference"]


# --- text that lies on every machine


def library(pattern: str) -> Iterator[str]:
    """Yield the sources of the standard library, in an order that is always the same."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.glob(pattern) if "-packages" not in path.parts[-2])
    random.Random(0).shuffle(paths)
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="ignore")


def docstrings() -> Iterator[str]:
    """Yield the docstrings of the library's packages."""
    for text in library("*/*.py"):
        try:
            nodes = ast.walk(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield (ast.get_docstring(node) or "") + "\n"


def cut(texts: Iterator[str], size: Size, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at most `number` rows of bytes to train on, and the held-out rows, from the end."""
    data = bytearray()
    for text in texts:
        data += text.encode()
        if len(data) >= (number + size.held_out) * size.length:
            break
    count = min(len(data) // size.length, number + size.held_out)
    made = torch.tensor(data[: count * size.length], dtype=torch.long).view(count, size.length)
    return made[: -size.held_out], made[-size.held_out :]


@functools.cache
def rows_of_docstrings(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all trainings of adapters, and the held-out rows."""
    return cut(docstrings(), size, size.steps * size.batch)


# --- the models


def settings_of(config: TrainConfig) -> ModelSettings:
    return model_settings(config, FAMILY)


def pretrain(folder: Path, size: Size, device: torch.device) -> dict[str, Any]:
    """Train all weights from random values, and save them in 16 bits."""
    trained, held_out = cut(library("*.py"), size, size.base_steps * size.batch)
    set_seed(0)
    config = model_builder.config_of(size.shape)
    # in 32 bits, for which the loop over the experts needs no kernel
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    ).to(device)
    first = held_out_loss(model, held_out, size)

    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, BASE_RATE, size.base_steps)
    for _ in range(size.base_steps):
        tokens = trained[torch.randint(len(trained), (size.batch,))].to(device)
        # The auxiliary loss makes the routers use all experts.
        loss = model(input_ids=tokens, labels=tokens, output_router_logits=True).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.to(torch.bfloat16).save_pretrained(folder)
    return {
        "pair": "base",
        "parameters": model.num_parameters(),
        "steps": size.base_steps,
        "loss_first": first,
        "loss": held_out_loss(model, held_out, size),
    }


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: torch.Tensor, size: Size) -> float:
    """Return the mean loss of rows in the model's present mode; the model has no dropout."""
    here = next(model.parameters()).device
    with torch.autocast(here.type, torch.bfloat16):
        batches = [batch.to(here) for batch in held_out.split(size.batch)]
        return statistics.fmean(float(model(input_ids=one, labels=one).loss) for one in batches)


def dequantise(source: Path, folder: Path, device: torch.device) -> None:
    """Save the model of `source` in 16 bits, with the values that its weights have in nf4.

    bitsandbytes itself dequantises them.
    """
    from bitsandbytes.functional import dequantize_4bit

    packed = dict(model_builder.load(str(source), settings_of(PACKED), device).named_parameters())
    plain = model_builder.load(str(source), settings_of(REFERENCE), device)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            one: Any = packed[name]
            if hasattr(one, "quant_state"):
                weight.copy_(dequantize_4bit(one.data, one.quant_state))
    plain.save_pretrained(folder)


def attach(config: TrainConfig, source: Path, seed: int, device: torch.device) -> nn.Module:
    """Load a base and add new adapters, whose values follow from the seed."""
    settings = settings_of(config)
    base = model_builder.load(str(source), settings, device)
    model_builder.set_checkpointing(base, settings)
    set_seed(seed)
    model = model_builder.trainable_model(base, settings, device)
    model_builder.set_lora_kernels(base, settings)
    # Loaded models are in evaluation mode. In this mode, bitsandbytes (0.50) repacks 4-bit weights
    # on some CPUs, and gives their inputs no gradients from then on.
    return model.train()


def tune(
    config: TrainConfig, source: Path, seed: int, size: Size, device: torch.device
) -> tuple[float, float]:
    """Train adapters, and return the held-out losses before and after.

    The seed also decides the order of the rows.
    """
    trained, held_out = rows_of_docstrings(size)
    model = attach(config, source, seed, device)
    before = held_out_loss(model, held_out, size)

    arguments = training_arguments(config, accumulation=1, on_cpu=device.type == "cpu")
    arguments |= {"learning_rate": RATE, "lr_scheduler_type": "cosine"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = LeanTrainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=size.steps,
                save_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
            lambda examples: rows.collate([[one] for one in examples], [size.length], False),
            list(trained),
        )
        trainer.remove_callback(PrinterCallback)
        set_seed(seed)  # the Trainer's constructor has set another
        trainer.train()
    return before, held_out_loss(model, held_out, size)


# --- the comparison


def compare(pair: str, seed: int, folder: Path, size: Size, device: torch.device) -> dict[str, Any]:
    """Train both sides of a pair from one seed."""
    config, reference = (
        replace(one, micro_batch_size=size.batch, seq_len=size.length)
        for one in (PAIRS[pair], REFERENCE)
    )
    theirs = "dequantised" if pair == "nf4" else "base"
    first, loss = tune(config, folder / "base", seed, size, device)
    reference_first, reference_loss = tune(reference, folder / theirs, seed, size, device)
    return {
        "pair": pair,
        "seed": seed,
        "config": config.label(),
        "reference": reference.label(),
        "loss_first": first,
        "loss": loss,
        "reference_loss_first": reference_first,
        "reference_loss": reference_loss,
        "difference": loss / reference_loss - 1,
    }


def run(args: argparse.Namespace) -> None:
    """Train the mixture, and then both sides of each pair from each seed."""
    device = torch.device("cpu" if args.device == "cpu" else "cuda:0")
    disable_progress_bar()
    size = SIZES[device.type]
    size = replace(
        size, base_steps=args.base_steps or size.base_steps, steps=args.steps or size.steps
    )
    found = Rows(args.mode.result, args.out, None)
    fingerprint = open_meter(device.type).fingerprint()
    measure(found, args.seeds, size, device)
    finish(args, fingerprint, found.all, COLUMNS)


def measure(found: Rows, seeds: list[int], size: Size, device: torch.device) -> None:
    """Add the rows of the base and of all pairs."""
    folder, began = scratch(), time.monotonic()
    found.add(pretrain(folder / "base", size, device) | {"device": device.type})
    dequantise(folder / "base", folder / "dequantised", device)
    for seed in seeds:
        for pair in PAIRS:
            found.add(compare(pair, seed, folder, size, device))
            table(found.all[-1:], COLUMNS)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each pair, the difference of the final losses over the seeds.

    `mean` is the absolute value of the mean difference, and `spread` the standard deviation of the
    differences. `size` is the mean of their absolute values. `fall` is the smallest share of the
    held-out loss that a training removed. `between_seeds` is the relative standard deviation of the
    reference's final losses, as a scale for the differences. `nf4_rise` is the relative change of
    the base's loss by the quantisation.
    """
    base = next(row for row in rows if row["pair"] == "base")
    summary: dict[str, Any] = {"loss_before": base["loss_first"], "loss_after": base["loss"]}
    for pair in PAIRS:
        own = [row for row in rows if row["pair"] == pair]
        differences = [row["difference"] for row in own]
        theirs = [row["reference_loss"] for row in own]
        falls = [1 - row["loss"] / row["loss_first"] for row in own]
        falls += [1 - row["reference_loss"] / row["reference_loss_first"] for row in own]
        summary |= {
            "seeds": len(own),
            f"{pair}_difference_mean": abs(statistics.fmean(differences)),
            f"{pair}_difference_spread": statistics.stdev(differences) if own[1:] else None,
            f"{pair}_difference_size": statistics.fmean(map(abs, differences)),
            f"{pair}_difference_max": largest(own, "difference"),
            f"{pair}_fall": min(falls),
            f"{pair}_between_seeds": (
                statistics.stdev(theirs) / statistics.fmean(theirs) if own[1:] else None
            ),
        }
    by_pair = {row["pair"]: row for row in rows}
    rise = by_pair["nf4"]["loss_first"] / by_pair["split"]["loss_first"] - 1
    return summary | {"nf4_rise": rise}


MODES = {
    "": Mode(
        run=run,
        result="mixtures_quality",
        summarize=summarize,
        options={
            "--device": "cuda",
            "--seeds": {"nargs": "+", "type": int, "default": list(SEEDS)},
            "--base-steps": {"default": 0, "help": "of the base's training [by the device]"},
            "--steps": {"default": 0, "help": "of the adapters' trainings [by the device]"},
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
