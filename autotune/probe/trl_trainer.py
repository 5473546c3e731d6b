"""TRL's SFTTrainer as the loop of a probe: its config, its rows and its tokenizer, which need no real weights."""

from typing import Any

import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

from autotune.probe.synthetic_model import tokenizer


def config(seq_len: int, **settings: Any) -> TrainingArguments:
    """SFTConfig with these settings of TrainingArguments. Its rows are tokenised already."""
    made: TrainingArguments = SFTConfig(max_length=seq_len, dataset_kwargs={"skip_prepare_dataset": True}, **settings)
    return made


def rows(tokens: torch.Tensor, number: int) -> Any:
    """A dataset for SFTTrainer of `number` rows, which repeat `tokens` (rows x length)."""
    dataset = Dataset.from_dict({"input_ids": tokens.tolist()})
    return dataset.select([index % len(tokens) for index in range(number)])


__all__ = ["SFTTrainer", "config", "rows", "tokenizer"]
