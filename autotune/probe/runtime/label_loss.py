"""The cross-entropy of labels, one for each row, over all micro batches of a step alike."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy


def label_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """The `compute_loss_func` of a Trainer: the sum over the rows, divided by the labels of the whole step.

    transformers' own loss takes the mean of each micro batch, and Trainer would add these up.
    """
    total = cross_entropy(outputs.logits.float(), labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)
