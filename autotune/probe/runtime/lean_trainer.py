"""transformers' Trainer without what it does to every module of a model for every micro batch.

This file goes with the exported script.
"""

import weakref
from typing import Any

from torch import nn
from transformers import Trainer


class LeanTrainer(Trainer):
    """Walks over the modules only when the mode changes, and counts no floating-point operations (`total_flos` is 0).

    On a 7B with adapters either takes the host milliseconds, in which the device idles if the micro batch is small.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        walk_on_change(self.model)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0


def walk_on_change(model: nn.Module) -> None:
    """From here on `model.train()` does nothing where the model itself, whatever its parts, is in training already."""
    model.train()
    reference, walk = weakref.ref(model), type(model).train  # a model that holds itself would outlive its use

    def train(mode: bool = True) -> Any:
        model = reference()
        return model if model is None or model.training is mode else walk(model, mode)

    model.train = train
