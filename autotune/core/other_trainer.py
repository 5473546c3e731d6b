"""How a trainer of another project computes a step, if TrainConfig has no setting for it."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTrainer:
    """What another trainer computes in another way than autotune's trainer.

    Only dry probes follow it: they count the memory of a run whose result others published.

    Attributes:
        autocast: Whether products have 16 bits although some inputs have 32.
        upcasts_logits: Whether the loss is computed in 32 bits instead of the logits' dtype.
        keeps_logits: Whether the logits are alive until the step ends, because the loop holds the
            model's outputs while it calls `loss.backward()`.
        unpacks_to_input: Whether products with a 4-bit base have the dtype of their input.
            bitsandbytes does so without a `bnb_4bit_compute_dtype`.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    autocast: bool = True
    upcasts_logits: bool = True
    keeps_logits: bool = False
    unpacks_to_input: bool = False


USUAL = OtherTrainer()
