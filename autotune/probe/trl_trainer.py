"""TRL's trainers as the loop of a probe, and the clock of a run by TRL's own scripts."""

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
    recorded: type,
    model: nn.Module,
    settings: dict[str, Any],
    rows: list[dict[str, torch.Tensor]],
    held_out: list[dict[str, torch.Tensor]],
    objective: Objective = Objective.SFT,
    reference: nn.Module | None = None,
) -> Any:
    """TRL's trainer for the objective on these rows, with the class `recorded` mixed in. Most rows are there often.

    TRL pads them itself.

    `settings` are keyword arguments of its config. The rows are tokenised already. `reference` is the untrained model
    where all weights are trained.
    """
    config, kind = KINDS[objective]
    # SFTTrainer has an argument to leave the rows as they are.
    as_they_are = (
        {}
        if objective is Objective.SFT
        else {"_prepare_dataset": lambda self, dataset, *_: dataset}
    )
    if objective is Objective.SFT:
        settings = settings | {"dataset_kwargs": {"skip_prepare_dataset": True}}
    different = {id(row): row for row in rows}
    places = {key: place for place, key in enumerate(different)}
    made: Any = type("TrlProbeTrainer", (recorded, kind), as_they_are)(
        model=model,
        args=config(**settings),
        train_dataset=examples_of(list(different.values()), objective).select(
            [places[id(row)] for row in rows]
        ),
        eval_dataset=examples_of(held_out, objective),
        processing_class=tokenizer(),
        **({"ref_model": reference} if reference is not None else {}),
    )
    if "ref" in getattr(model, "peft_config", {}):
        # TRL takes adapters that it did not make for trained ones, and keeps a copy. Its script makes them itself.
        model.delete_adapter("ref")
    return made


def examples_of(rows: list[dict[str, torch.Tensor]], objective: Objective) -> Any:
    """The rows without their padding as TRL's examples, tokenised: the last token of a row has a label, padding none.

    The other answer of a pair has the tokens of the first in reverse.
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
    """The tokens of an example of any of TRL's trainers; of a pair, those of the longer answer with the prompt."""
    answers = [
        example[name]
        for name in ("input_ids", "completion_ids", "chosen_ids", "rejected_ids")
        if name in example
    ]
    return len(example.get("prompt_ids", ())) + max(map(len, answers))


class TrlClock(Clock):
    """A clock that ends the last step before the evaluation and the save at the end of the run."""

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
        """Load attention's kernels, and count the tokens of a mean step, padding not included."""
        load_attention(model, args.device)
        super().on_train_begin(args, state, control, model)
        rows = train_dataloader.dataset
        mean_tokens = sum(map(num_tokens, rows)) / len(rows)
        self.tokens_per_step = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * mean_tokens
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and end it here if it is the last."""
        super().on_step_end(args, state, control)
        self.num_steps = state.global_step
        if self.num_steps == state.max_steps:
            self.mark()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do nothing: the last step has ended already."""
