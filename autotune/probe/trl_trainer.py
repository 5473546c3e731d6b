"""TRL's SFTTrainer as the loop of a probe, without weights: what it wants beside a model is made here."""

from typing import Any

import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

from autotune.probe.synthetic_model import tokenizer


def config(seq_len: int, **settings: Any) -> TrainingArguments:
    """SFTConfig with these settings of TrainingArguments. Rows come tokenised, as SFTTrainer makes them beforehand."""
    made: TrainingArguments = SFTConfig(max_length=seq_len, dataset_kwargs={"skip_prepare_dataset": True}, **settings)
    return made


def rows(tokens: torch.Tensor, number: int) -> Any:
    """`number` rows of a dataset of the kind that SFTTrainer trains on, from tokens (rows x length), over and over."""
    dataset = Dataset.from_dict({"input_ids": tokens.tolist()})
    return dataset.select([index % len(tokens) for index in range(number)])


__all__ = ["SFTTrainer", "config", "rows", "tokenizer"]
