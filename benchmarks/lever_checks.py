"""What levers must leave as it is: the gradients of a micro batch, and the loss of 50 steps on real text.

The text is the source of Python's standard library, a token for each byte. The loop is the exported script's.
`lever_sides.py` calls it; by itself it compares two levers on this machine, in a few steps.
"""

import random
import statistics
import sysconfig
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments, set_seed

from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.probe.runtime import model_builder, rows
from autotune.probe.runtime.chunked_loss import chunked_loss
from autotune.probe.runtime.graphs import MicroBatchGraphs
from autotune.probe.runtime.joined_lora import Joined
from autotune.probe.runtime.lean_trainer import LeanTrainer, compile_layers, training_arguments

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
# Each alone, and against the same without it.
LEVERS: dict[str, dict[str, Any]] = {
    "layers compiled": COMPILED,
    "whole loss": {"loss": "full"},
    "every second layer": {"checkpointing": "every_2"},
    "selective_80": {"checkpointing": "selective_80"},
    "selective_50": {"checkpointing": "selective_50"},
    "selective_30": {"checkpointing": "selective_30"},
    "CUDA graphs": {"cuda_graphs": "micro_batch"},
    "joined adapters, layers compiled": COMPILED | {"lora_kernels": "joined"},
    "fp8 base, layers compiled": COMPILED | {"quantization": "fp8"},
}
STEPS, LAST, ACCUMULATION, RATE = 50, 10, 2, 3e-3  # LAST: steps whose losses are averaged


def built(config: TrainConfig, device: torch.device) -> tuple[Any, nn.Module, Joined | None]:
    """The base, the model to train, and its joined layers: the same random values for each configuration."""
    set_seed(0)
    settings = model_settings(config, SHAPE["model_type"])
    base = model_builder.build(model_builder.config_of(SHAPE), settings, device)
    model_builder.set_checkpointing(base, settings)
    model = model_builder.to_train(base, settings, device)
    joined = Joined(base, model_builder.decoder_layers(model)) if settings.joined else None
    if config.compile == "per_layer":
        model_builder.require_input_gradients(base)
        compile_layers(model_builder.decoder_layers(model), config.activation_budget)
    return base, model, joined


def losses(config: TrainConfig, device: torch.device, steps: int = STEPS) -> list[float]:
    """The loss of each step of a training on real text."""
    base, model, joined = built(config, device)
    arguments = training_arguments(config, accumulation=ACCUMULATION, on_cpu=device.type == "cpu")
    arguments |= {"learning_rate": RATE, "logging_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = LeanTrainer(
            model,
            TrainingArguments(output_dir=folder, max_steps=steps, save_strategy="no", disable_tqdm=True, **arguments),
            lambda examples: rows.collate([[one] for one in examples], [config.seq_len], False),
            text(steps * ACCUMULATION * config.micro_batch_size, config.seq_len),
            compute_loss_func=chunked_loss(base) if config.loss == "chunked" else None,
            cuda_graphs=config.cuda_graphs == "micro_batch",
            joined=joined,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def text(number: int, length: int) -> list[torch.Tensor]:
    """Rows of bytes of the standard library, always the same."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(paths)
    data = b"".join(path.read_bytes() for path in paths)[: number * length]
    return [torch.tensor(list(data[begin : begin + length])) for begin in range(0, len(data) - length + 1, length)]


def loss_differences(device: torch.device, steps: int = STEPS, levers: list[str] | None = None) -> list[dict[str, Any]]:
    """For each lever the mean loss of the last steps, and its relative difference to the reference's."""
    reference = losses(CONFIG, device, steps)
    expected = statistics.fmean(reference[-LAST:])
    found = [{"check": "reference", "first_loss": reference[0], "last_loss": expected, "difference": 0.0}]
    for lever in levers or LEVERS:
        curve = losses(replace(CONFIG, **LEVERS[lever]), device, steps)
        last = statistics.fmean(curve[-LAST:])
        row = {"check": lever, "first_loss": curve[0], "last_loss": last, "difference": abs(last / expected - 1)}
        found.append(row)
    return found


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
    autocast = torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16_mixed" else nullcontext()
    for parameter in trained:  # those that begin at zero would leave half of the gradients at zero
        nn.init.normal_(parameter, std=0.02)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with autocast:
            loss: torch.Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    run = MicroBatchGraphs(step, trained).run if config.cuda_graphs == "micro_batch" else step
    run({"input_ids": first, "labels": first})
    model.zero_grad()
    found = [float(run({"input_ids": tokens, "labels": tokens})) for tokens in (second, first)]
    return found, torch.cat([parameter.grad.flatten() for parameter in trained if parameter.grad is not None])


if __name__ == "__main__":
    for row in loss_differences(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"), 4, ["selective_50", "every second layer"]
    ):
        print(row)
