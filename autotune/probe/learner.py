"""The process that trains one model repeatedly: it answers each line of input with one line.

The process loads the weights and tokenises the examples once, with the code of the exported script.
Each training begins with the same weights, and its loss is computed on the same held-out examples.
"""

import json
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import TrainerCallback, set_seed

from autotune.core.process import die_with_parent
from autotune.trainer import model_builder, rows
from autotune.trainer.chunked_loss import chunked_loss
from autotune.trainer.command_line import parse_options
from autotune.trainer.lean_trainer import compile_layers, run_layers_eagerly
from autotune.trainer.patches import choose_attention, load_attention
from autotune.trainer.settings import Options, RunSettings
from autotune.trainer.train import (
    RECOMPILE_LIMIT,
    add_adapters,
    initialize_device,
    load,
    make_rows,
    make_trainer,
)
from autotune.trainer.train import read_examples as read

LOGGED = 20  # the approximate number of losses that each training logs
LOST = 1.5  # a training has diverged if a loss exceeds its first loss by this factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A request for one training, which is one line of the input."""

    learning_rate: float
    warmup_steps: int
    steps: int
    seed: int


class _Curve(TrainerCallback):
    """Keeps the training losses, and stops a training that diverges.

    A training diverges if its loss is not finite or exceeds LOST times its first loss.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.diverged = False

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep a logged loss, which is the mean loss of the steps since the previous log."""
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        self.points.append((state.global_step, float(loss)))
        if not math.isfinite(float(loss)) or float(loss) > LOST * self.points[0][1]:
            self.diverged = True
            control.should_training_stop = True


class Learner:
    """Holds the examples and a model on the device, and trains the model for each request."""

    def __init__(self, settings: RunSettings, options: Options) -> None:
        """Read the examples and load the weights."""
        self._settings = settings
        self._options = options
        device = initialize_device(settings)
        trained, self._held_out = rows.split(
            read(settings, options), settings.seq_len, options.held_out, options.held_out_tokens
        )
        self._rows = make_rows(settings, trained)

        base = load(settings, options, device)
        choose_attention(cudnn=settings.padding != "longest")
        if settings.padding == "masked":
            load_attention(base, device)
        model_builder.set_checkpointing(base, settings.model_settings)
        self._model = add_adapters(base, settings, device)

        self._layers = model_builder.decoder_layers(self._model)
        self._joined = model_builder.set_lora_kernels(base, settings.model_settings)
        self._loss = chunked_loss(base) if settings.loss == "chunked" else None
        self._compiles = settings.compile == "per_layer"
        if self._compiles and settings.model_settings.lora_rank is not None:
            model_builder.require_input_gradients(base)

        # Each training initialises the adapters with its seed, and resets all other trained
        # parameters to the values that are stored here.
        self._first = {
            name: parameter.detach().cpu().clone()
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and ".lora_" not in name
        }

    def train(self, training: Training) -> dict[str, Any]:
        """Train, and return the held-out loss and the curve of training losses.

        The held-out loss is None if the training diverged.
        """
        self._begin(training.seed)
        settings = replace(
            self._settings,
            learning_rate=training.learning_rate,
            warmup_steps=training.warmup_steps,
        )
        options = replace(self._options, max_steps=training.steps)
        curve = _Curve()
        data = self._rows, self._held_out
        trainer = make_trainer(
            settings, options, self._model, self._loss, curve, *data, self._joined
        )
        logging_steps = max(1, training.steps // LOGGED)
        trainer.args.disable_tqdm = True
        trainer.args.per_device_eval_batch_size = settings.micro_batch_size
        trainer.args.logging_steps = logging_steps
        trainer.args.logging_first_step = False  # each point of the curve covers as many steps
        trainer.state.logging_steps = logging_steps

        if self._compiles:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            compile_layers(self._layers, settings.model_settings.activation_budget)

        # The seed sets the order of the rows. The seed is set here again, because the Trainer's
        # constructor has set another seed.
        set_seed(training.seed)
        trainer.train()

        run_layers_eagerly(self._layers)
        loss = math.nan if curve.diverged else float(trainer.evaluate()["eval_loss"])
        _forget(trainer, self._model)
        return {"loss": loss if math.isfinite(loss) else None, "curve": curve.points}

    def _begin(self, seed: int) -> None:
        """Reset the adapters with this seed, and other trained weights to their first values."""
        set_seed(seed)
        for module in self._model.modules():
            if isinstance(module, LoraLayer):
                module.reset_lora_parameters("default", True)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name in self._first:
                    parameter.copy_(self._first[name])
        self._model.zero_grad()


def _forget(trainer: Any, model: nn.Module) -> None:
    """Undo the changes that accelerate and a Trainer made to a model, before the next Trainer."""
    trainer.callback_handler.callbacks.clear()
    trainer.accelerator.free_memory()
    for name in ("forward", "_original_forward", "_is_accelerate_prepared", "train"):
        model.__dict__.pop(name, None)


def main() -> None:
    """Answer requests until the input ends.

    Arguments: the parent's process id, an exported folder, options of its script.
    """
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # text that libraries print goes to stderr, not into the answers
    settings = RunSettings.read(Path(sys.argv[2], "train_config.json"))

    learner = Learner(settings, parse_options(settings, sys.argv[3:]))
    for line in sys.stdin:
        answers.write(json.dumps(learner.train(Training(**json.loads(line)))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
