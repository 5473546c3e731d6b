"""What levers must leave as it is: the gradients of a micro batch, and the loss of 50 steps on real text.

The reference of losses has the same values and computes in 32 bits: with bf16 itself it is compared too, as lever
"none". One training ends a little higher or lower by chance, so a difference is the mean over several, each with values
and text of its own.
`arriving` looks at one cause: bf16 loses an update of an adapter that is small beside the output of the base.

The text is the source of Python's standard library, a token for each byte. For losses the base is trained on its
modules first, as no weights are at hand, and then tuned on its packages, by the exported script's loop. A base of
random values would not do: in 8 bits it is another base of random values, whose losses end 2 % higher or lower by
chance. For gradients and updates it is better: there they are large beside what bf16 rounds.
`levers.py` calls it; by itself it makes the comparison on any machine.
"""

import argparse
import functools
import math
import random
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from common import Rows, save
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments, set_seed

from autotune.core.train_config import TrainConfig
from autotune.probe.meters import open_meter
from autotune.probe.model_settings import model_settings
from autotune.trainer import model_builder, rows
from autotune.trainer.chunked_loss import chunked_loss
from autotune.trainer.float8 import Float8Linear
from autotune.trainer.graphs import MicroBatchGraphs
from autotune.trainer.joined_lora import Joined
from autotune.trainer.lean_trainer import LeanTrainer, compile_layers, training_arguments

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
    micro_batch_size=4, seq_len=512, lora_rank=16, checkpointing="none", padding="max_length", loss="chunked"
)
COMPILED = {"compile": "per_layer"}
EXACT: dict[str, Any] = {"precision": "fp32"}  # of the values in bf16
# Each alone; the first is what all others change.
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "layers compiled": COMPILED,
    "whole loss": {"loss": "full"},
    "selective_50": {"checkpointing": "selective_50"},
    "CUDA graphs": {"cuda_graphs": "micro_batch"},
    "joined adapters, layers compiled": COMPILED | {"lora_kernels": "joined"},
    "fp8 base, layers compiled": COMPILED | {"quantization": "fp8"},
}
STEPS, LAST, ACCUMULATION, RATE = 50, 10, 2, 3e-3  # LAST: steps whose losses are averaged
BASE_STEPS, BASE_RATE = 300, 1e-3  # in which the base is trained
SEEDS = (0, 1, 2)
UPDATED = ("none", "layers compiled", "joined adapters, layers compiled")
UPDATES = (1e-5, 3e-5, 1e-4, 1e-3)  # of each value of B, as a first step of Adam at such a rate


def built(
    config: TrainConfig, device: torch.device, seed: int = 0, weights: dict[str, torch.Tensor] | None = None
) -> tuple[Any, nn.Module, Joined | None]:
    """The base, the model to train, and its joined layers: the same values for each configuration of a seed.

    The base has these weights, or random values.
    """
    set_seed(seed)
    settings = model_settings(replace(config, precision=CONFIG.precision), SHAPE["model_type"])
    base = model_builder.build(model_builder.config_of(SHAPE), settings, device)
    if weights is not None:
        _set_weights(base, weights)
        set_seed(seed)
    model_builder.set_checkpointing(base, settings)
    model = model_builder.to_train(base, settings, device)
    joined = Joined(base, model_builder.decoder_layers(model)) if settings.joined else None
    if config.compile == "per_layer":
        model_builder.require_input_gradients(base)
        compile_layers(model_builder.decoder_layers(model), config.activation_budget)
    return base, model.float() if config.precision == "fp32" else model, joined


@functools.cache
def trained_base(device: torch.device) -> dict[str, torch.Tensor]:
    """Weights of the base, in bf16, trained in 32 bits on the modules of the standard library."""
    set_seed(0)
    settings = model_settings(replace(CONFIG, **EXACT), SHAPE["model_type"])
    base = model_builder.build(model_builder.config_of(SHAPE), settings, device).requires_grad_(True)
    optimizer = torch.optim.AdamW(base.parameters(), lr=BASE_RATE)
    lines = text(BASE_STEPS * CONFIG.micro_batch_size, CONFIG.seq_len, "*.py")
    for step, batch in enumerate(DataLoader(lines, batch_size=CONFIG.micro_batch_size)):  # type: ignore[arg-type]
        tokens = batch.to(device)
        loss = base(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not step % 50:
            print(f"training the base: step {step} of {BASE_STEPS}, loss {loss.item():.2f}", flush=True)
    return {name: weight.detach().to(torch.bfloat16) for name, weight in base.named_parameters()}


def _set_weights(base: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, module in base.named_modules():  # their weights are no parameters of these names
        if isinstance(module, Float8Linear):
            module.keep(weights[f"{name}.weight"])
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])


def losses(config: TrainConfig, device: torch.device, steps: int = STEPS, seed: int = 0) -> list[float]:
    """The loss of each step of a training on real text."""
    base, model, joined = built(config, device, seed, trained_base(device))
    arguments = training_arguments(config, accumulation=ACCUMULATION, on_cpu=device.type == "cpu")
    arguments |= {"learning_rate": RATE, "logging_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = LeanTrainer(
            model,
            TrainingArguments(output_dir=folder, max_steps=steps, save_strategy="no", disable_tqdm=True, **arguments),
            lambda examples: rows.collate([[one] for one in examples], [config.seq_len], False),
            text(steps * ACCUMULATION * config.micro_batch_size, config.seq_len, seed=seed),
            compute_loss_func=chunked_loss(base) if config.loss == "chunked" else None,
            cuda_graphs=config.cuda_graphs == "micro_batch",
            joined=joined,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def text(number: int, length: int, pattern: str = "*/*.py", seed: int = 0) -> list[torch.Tensor]:
    """Rows of bytes of the standard library's packages or modules, always the same of one seed."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))
    paths = [path for path in paths if "-packages" not in path.parent.name]  # which others installed
    random.Random(seed).shuffle(paths)
    data = b"".join(path.read_bytes() for path in paths)[: number * length]
    return [torch.tensor(list(data[begin : begin + length])) for begin in range(0, len(data) - length + 1, length)]


def levers_of(device: torch.device) -> list[str]:
    """The levers that this device has."""
    return [lever for lever, changes in LEVERS.items() if device.type == "cuda" or "cuda_graphs" not in changes]


def loss_differences(
    device: torch.device, steps: int = STEPS, levers: Sequence[str] = tuple(LEVERS), seeds: Sequence[int] = SEEDS
) -> Iterator[dict[str, Any]]:
    """For each lever the mean loss of the last steps, and its relative difference to the reference's with its error.

    The first row is the reference.
    """

    def ends(config: TrainConfig) -> tuple[float, list[float]]:
        curves = [losses(config, device, steps, seed) for seed in seeds]
        return curves[0][0], [statistics.fmean(curve[-LAST:]) for curve in curves]

    first, expected = ends(replace(CONFIG, **EXACT))
    yield {"check": "in 32 bits", "first_loss": first, "last_loss": statistics.fmean(expected)}
    for lever in levers:
        first, ended = ends(replace(CONFIG, **LEVERS[lever]))
        differences = [one / other - 1 for one, other in zip(ended, expected, strict=True)]
        row: dict[str, Any] = {"check": lever, "first_loss": first, "last_loss": statistics.fmean(ended)}
        row["difference"] = statistics.fmean(differences)
        row["difference_error"] = statistics.stdev(differences) / math.sqrt(len(differences)) if seeds[1:] else None
        yield row


def arriving(device: torch.device, ways: Sequence[str] = UPDATED) -> list[dict[str, Any]]:
    """How much of what an update of the adapters' B lowers the loss by in 32 bits is left, by its size and the way."""
    directions, exact = _lowered(replace(CONFIG, **EXACT), device)
    found = []
    for way in ways:
        _, lowered = _lowered(replace(CONFIG, **LEVERS[way]), device, directions)
        found += [
            {"check": way, "update": size, "share": one / other}
            for size, one, other in zip(UPDATES, lowered, exact, strict=True)
        ]
    return found


def _lowered(
    config: TrainConfig, device: torch.device, directions: list[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], list[float]]:
    """The signs of the gradients of each B, and what a step of each size against `directions` lowers the loss by."""
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


def _loss_of(model: nn.Module, config: TrainConfig, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's own loss of some tokens, in the precision of a configuration."""

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16_mixed" else nullcontext():
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    return loss_of


def gradient_difference(
    config: TrainConfig, device: torch.device, lever: dict[str, Any] | None = None
) -> dict[str, float]:
    """Losses and gradients of two micro batches with a lever, by default CUDA graphs: relative differences.

    The model is as of `losses`. Gradients add up, from zero, after another micro batch, with which a graph is captured.
    """
    first, second = (batch.unsqueeze(0).to(device) for batch in text(2, config.seq_len))
    with_it = replace(config, **(LEVERS["CUDA graphs"] if lever is None else lever))
    (plain_losses, plain), (its_losses, its) = (_gradients(one, device, first, second) for one in (config, with_it))
    return {
        "loss_difference": max(abs(a / b - 1) for a, b in zip(its_losses, plain_losses, strict=True)),
        "gradient_difference": float((its - plain).norm() / plain.norm()),
    }


def _gradients(
    config: TrainConfig, device: torch.device, first: torch.Tensor, second: torch.Tensor
) -> tuple[list[float], torch.Tensor]:
    _, model, _ = built(config, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss_of = _loss_of(model, config, device)
    for parameter in trained:  # those that begin at zero would leave half of the gradients at zero
        nn.init.normal_(parameter, std=0.02)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(batch["tokens"])
        loss.backward()
        return loss.detach()

    run = MicroBatchGraphs(step, trained).run if config.cuda_graphs == "micro_batch" else step
    run({"tokens": first})
    model.zero_grad()
    found = [float(run({"tokens": tokens})) for tokens in (second, first)]
    return found, torch.cat([parameter.grad.flatten() for parameter in trained if parameter.grad is not None])


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The relative difference of each lever's loss to the reference's, and the largest; what arrives."""
    differences = {row["check"]: row["difference"] for row in rows if "difference" in row}
    return {
        "loss_differences": differences or None,
        "loss_difference_max": max(map(abs, differences.values()), default=None),
        "arriving": {f"{row['check']}, {row['update']:g}": row["share"] for row in rows if "update" in row} or None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--gpu", default="auto", help="or cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--levers", nargs="+", choices=list(LEVERS), help="by default those that the device has")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cpu" if args.gpu == "cpu" else "cuda"
    fingerprint = open_meter(device).fingerprint()
    here, rows = torch.device(device), Rows("lever_checks", args.out, None)
    levers = args.levers or levers_of(here)
    for row in chain(arriving(here), loss_differences(here, args.steps, levers, args.seeds)):
        rows.add(row)
        print(row, flush=True)
        save("lever_checks", fingerprint, summarize(rows.all), rows.all, args.out)


if __name__ == "__main__":
    main()
