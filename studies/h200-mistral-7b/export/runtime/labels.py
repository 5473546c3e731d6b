# -*- coding: utf-8 -*-
"""Makes the token examples, the batches and the loss for training a text classifier.

An example has the tokens of its text, which are not trained on, followed by the number of its
label.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from .examples import BATCH, label_of
from .reading import Located
from .rows import IGNORED, Row, collate, num_tokens

BLANK = torch.tensor([-1, IGNORED])  # an example whose label the loss ignores


class LabelEncoder:
    """Makes examples of at most `longest` tokens, with a tokenizer of transformers.

    This class has the same methods as `examples.Encoder`, so it can be used instead of an Encoder.
    """

    def __init__(self, tokenizer: Any, names: Sequence[Any], longest: int) -> None:
        self._tokenizer = tokenizer
        self._numbers = {name: number for number, name in enumerate(names)}
        self._longest = longest
        self.key = ("labels", *names, longest)

    def describe_notes(self, number: int) -> list[str]:
        """Return no notes: without a chat template, no part of a text is left out."""
        return []

    def encode(self, rows: Iterable[Located]) -> Iterator[list[int]]:
        """Yield one example for each row: the text's tokens and the number of its label."""
        remaining = iter(rows)
        while batch := list(islice(remaining, BATCH)):
            texts = self._tokenizer([row["text"] for _, row in batch])["input_ids"]
            for (_, row), tokens in zip(batch, texts, strict=True):
                text = [-1 - token for token in tokens[: self._longest - 1]]
                yield [*text, self._numbers[label_of(row)]]


def collate_labels(
    rows: list[Row], padded_lengths: Sequence[int], padding: int, *, masked: bool = False
) -> dict[str, torch.Tensor]:
    """Return a batch as `rows.collate` does, with a label for each row.

    `padding` is the padding token. In each row, the classification head reads the last token that
    is not padding.
    """
    texts = [[row[0][:-1]] for row in rows]
    batch = collate(texts, padded_lengths, False, masked=masked)
    lengths = torch.tensor([num_tokens(text) for text in texts])
    is_padding = torch.arange(batch["input_ids"].shape[1]) >= lengths[:, None]
    batch["input_ids"] = batch["input_ids"].masked_fill(is_padding, padding)
    return batch | {"labels": torch.tensor([int(row[0][-1]) for row in rows])}


def label_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Compute the loss; a Trainer uses this function as its `compute_loss_func`.

    The loss is the sum over the rows, divided by the number of labels in the whole step. The loss
    function of transformers returns the mean of each micro batch, and the Trainer would add up
    these means.
    """
    total = cross_entropy(outputs.logits.float(), labels, reduction="sum", ignore_index=IGNORED)
    return total / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)
