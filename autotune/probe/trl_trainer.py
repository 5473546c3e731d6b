"""TRL's SFTTrainer as the loop of a probe, and the clock of a run by TRL's own script."""

from typing import Any

import torch
from datasets import Dataset
from torch import nn
from trl import SFTConfig, SFTTrainer

from autotune.probe.runtime.clock import Clock
from autotune.probe.runtime.patches import load_attention
from autotune.probe.runtime.rows import IGNORED
from autotune.probe.synthetic_model import tokenizer


def trl_trainer(
    recorded: type,
    model: nn.Module,
    settings: dict[str, Any],
    rows: list[dict[str, torch.Tensor]],
    held_out: list[dict[str, torch.Tensor]],
) -> Any:
    """An SFTTrainer on these rows, with the class `recorded` mixed in. Most rows are there several times.

    TRL pads them itself.

    `settings` are keyword arguments of SFTConfig. The rows are tokenised already.
    """
    trainer: Any = type("TrlProbeTrainer", (recorded, SFTTrainer), {})
    different = {id(row): row for row in rows}
    places = {key: place for place, key in enumerate(different)}
    return trainer(
        model=model,
        args=SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **settings),
        train_dataset=unpadded(list(different.values())).select([places[id(row)] for row in rows]),
        eval_dataset=unpadded(held_out),
        processing_class=tokenizer(),
    )


def unpadded(rows: list[dict[str, torch.Tensor]]) -> Any:
    """The rows without their padding: the last token of an example has a label, padding has none."""
    lengths = [1 + int((row["labels"] != IGNORED).nonzero()[-1]) for row in rows]
    pairs = list(zip(rows, lengths, strict=True))
    return Dataset.from_dict(
        {name: [row[name][:length].tolist() for row, length in pairs] for name in ("input_ids", "labels")}
    )


class TrlClock(Clock):
    """A clock that ends the last step before the evaluation and the save at the end of the run."""

    num_steps = 0
    tokens_per_step = 0.0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Load attention's kernels, and count the tokens of a mean step, padding not included."""
        load_attention(model, args.device)
        super().on_train_begin(args, state, control, model)
        rows = train_dataloader.dataset
        mean_tokens = sum(map(len, rows["input_ids"])) / len(rows)
        self.tokens_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * mean_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and end it here if it is the last."""
        super().on_step_end(args, state, control)
        self.num_steps = state.global_step
        if self.num_steps == state.max_steps:
            self.mark()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do nothing: the last step has ended already."""
