"""TRL's trainers for probes, and a clock for runs of TRL's own scripts."""

from typing import Any

import torch
from datasets import Dataset
from torch import nn
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from autotune.core.objective import Objective
from autotune.probe.synthetic_model import tokenizer
from autotune.trainer.clock import Clock
from autotune.trainer.patches import load_attention
from autotune.trainer.rows import IGNORED

KINDS: dict[Objective, tuple[Any, Any]] = {
    Objective.SFT: (SFTConfig, SFTTrainer),
    Objective.DPO: (DPOConfig, DPOTrainer),
    Objective.KTO: (KTOConfig, KTOTrainer),
    Objective.REWARD: (RewardConfig, RewardTrainer),
}


def trl_trainer(
    mixin: type,
    model: nn.Module,
    settings: dict[str, Any],
    rows: list[dict[str, torch.Tensor]],
    held_out: list[dict[str, torch.Tensor]],
    objective: Objective = Objective.SFT,
    reference: nn.Module | None = None,
) -> Any:
    """TRL's trainer for the objective on these rows, with the class `mixin` mixed in.

    The rows are tokenised already, and most of them occur many times. TRL pads the rows itself.
    `settings` are keyword arguments of TRL's config. `reference` is the untrained reference model,
    which is given only in full fine-tuning.
    """
    config, kind = KINDS[objective]
    # All trainers must keep the rows unchanged. SFTTrainer has an argument for this. In the other
    # trainers, the method `_prepare_dataset` is replaced.
    methods: dict[str, Any] = {}
    if objective is Objective.SFT:
        settings = settings | {"dataset_kwargs": {"skip_prepare_dataset": True}}
    else:
        methods = {"_prepare_dataset": lambda self, dataset, *_: dataset}

    # Each distinct row is stored once.
    different = {id(row): row for row in rows}
    places = {key: place for place, key in enumerate(different)}
    examples = examples_of(list(different.values()), objective)

    trainer: Any = type("TrlProbeTrainer", (mixin, kind), methods)(
        model=model,
        args=config(**settings),
        train_dataset=examples.select([places[id(row)] for row in rows]),
        eval_dataset=examples_of(held_out, objective),
        processing_class=tokenizer(),
        **({"ref_model": reference} if reference is not None else {}),
    )
    if "ref" in getattr(model, "peft_config", {}):
        # If TRL did not make the adapters itself, it assumes that they are trained already, and
        # keeps a copy of them. In a run of TRL's own script, TRL makes the adapters, so there is no
        # such copy.
        model.delete_adapter("ref")
    return trainer


def examples_of(rows: list[dict[str, torch.Tensor]], objective: Objective) -> Any:
    """The rows without their padding, as TRL's tokenised examples.

    A row's padding begins after its last label, because padding has no label. The second answer of
    a pair has the tokens of the first answer in reverse.
    """
    lengths = [1 + int((row["labels"] != IGNORED).nonzero()[-1]) for row in rows]
    pairs = list(zip(rows, lengths, strict=True))
    tokens = [row["input_ids"][:length].tolist() for row, length in pairs]

    if objective is Objective.SFT:
        return Dataset.from_dict(
            {
                "input_ids": tokens,
                "labels": [row["labels"][:length].tolist() for row, length in pairs],
            }
        )
    if objective is Objective.REWARD:
        return Dataset.from_dict(
            {"chosen_ids": tokens, "rejected_ids": [ids[::-1] for ids in tokens]}
        )

    read = [max(1, int((row["labels"] != IGNORED).nonzero()[0])) for row in rows]
    prompts = [ids[:number] for ids, number in zip(tokens, read, strict=True)]
    answers = [ids[number:] for ids, number in zip(tokens, read, strict=True)]
    others = [ids[::-1] for ids in answers]
    if objective is Objective.DPO:
        return Dataset.from_dict(
            {"prompt_ids": prompts, "chosen_ids": answers, "rejected_ids": others}
        )
    wanted = [index % 2 == 0 for index in range(len(rows))]
    return Dataset.from_dict(
        {
            "prompt_ids": prompts,
            "completion_ids": answers,
            "KL_completion_ids": others,
            "label": wanted,
        }
    )


def num_tokens(example: dict[str, Any]) -> int:
    """The number of tokens in an example of any TRL trainer.

    For a pair of answers, this is the length of the prompt plus the length of the longer answer.
    """
    answers = [
        example[name]
        for name in ("input_ids", "completion_ids", "chosen_ids", "rejected_ids")
        if name in example
    ]
    return len(example.get("prompt_ids", ())) + max(map(len, answers))


class TrlClock(Clock):
    """A clock whose time for the last step excludes the evaluation and save at the run's end."""

    num_steps = 0
    tokens_per_step = 0.0

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Load attention's kernels, and compute a step's mean number of tokens without padding."""
        load_attention(model, args.device)
        super().on_train_begin(args, state, control, model)

        rows = train_dataloader.dataset
        mean_tokens = sum(map(num_tokens, rows)) / len(rows)
        num_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.tokens_per_step = num_rows * mean_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step. After the last step, also mark its end."""
        super().on_step_end(args, state, control)
        self.num_steps = state.global_step
        if self.num_steps == state.max_steps:
            self.mark()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do nothing, because `on_step_end` has already marked the end of the last step."""
