"""The memory gate: refuses, before anything is launched, what is known not to fit.

Frontier: a configuration that needs at least as much memory as one that ran out, in every knob, runs out too.
"""

from dataclasses import dataclass

from autotune.config import TrainConfig
from autotune.result import OomDetail

# Bytes of optimizer state a parameter, in order; optimizers that are not here are compared only with themselves.
_STATE_ORDER = {"paged_adamw_8bit": 0, "lion_8bit": 1, "adamw_8bit": 2, "adamw_torch": 3, "adamw_torch_fused": 3}
_SAME = ("method", "precision", "quantization", "double_quant", "attention", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOom:
    """A configuration that ran out of memory, in which trial (None outside the search), and how.

    `micro_steps` above 1 says that gradients of one micro batch were alive during the next.
    """

    trial: int | None
    config: TrainConfig
    micro_steps: int
    detail: OomDetail


class Frontier:
    """Known OOMs on one device under one limit."""

    def __init__(self) -> None:
        self._known: list[KnownOom] = []

    def add(self, known: KnownOom) -> None:
        self._known.append(known)

    def refuses(self, config: TrainConfig, micro_steps: int) -> KnownOom | None:
        """The known OOM that this configuration is at least as large as in every memory knob, if there is one."""
        return next(
            (
                known
                for known in self._known
                if micro_steps >= min(known.micro_steps, 2) and needs_at_least(config, known.config)
            ),
            None,
        )


def needs_at_least(config: TrainConfig, other: TrainConfig) -> bool:
    """Whether `config` surely needs as much memory as `other`. False where they cannot be compared."""
    if any(getattr(config, name) != getattr(other, name) for name in _SAME):
        return False
    if config.optimizer != other.optimizer:
        state, other_state = _STATE_ORDER.get(config.optimizer), _STATE_ORDER.get(other.optimizer)
        if state is None or other_state is None or state < other_state:
            return False
    return (
        config.micro_batch_size >= other.micro_batch_size
        and config.seq_len >= other.seq_len
        and (config.lora_rank or 0) >= (other.lora_rank or 0)
        and _kept(config) >= _kept(other)
    )


def _kept(config: TrainConfig) -> float:
    """The share of layers whose activations are kept for the backward pass."""
    every = config.checkpoint_every
    return 1.0 if every is None else 1.0 - 1.0 / every
