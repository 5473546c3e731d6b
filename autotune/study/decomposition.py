"""What the speed-up consists of: the way from the baseline to the winner, one group of knobs after another.

The factors multiply to the speed-up. A step on the way that cannot be probed, or for which there is no time, shares one
factor with the next. Ablation (`study/ablation`) looks back from the winner instead, and its effects do not multiply.
"""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig

# In an order in which what is on the way fits more often than not: what takes less memory comes first.
GROUPS: dict[str, tuple[str, ...]] = {
    "loss in chunks": ("loss",),
    "precision": ("precision", "quantization", "double_quant"),
    "optimizer": ("optimizer",),
    "kernels": ("attention", "kernels"),
    "padding or packing": ("padding", "packing", "packed_attention", "group_by_length"),
    "batch": ("micro_batch_size",),
    "recomputation": ("checkpointing",),
    "compilation": ("compile",),
    "joined adapters": ("lora_kernels",),
    "CUDA graphs": ("cuda_graphs",),
    "GPUs": ("num_gpus", "sharding"),
}
OTHER = "other knobs"
WHOLE = "whole models instead of a few layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """By which factor these knobs, named together, change the useful tokens/s."""

    name: str
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """The factors of a speed-up, in the order of the way from the baseline to the winner."""

    winner: TrainConfig
    baseline: TrainConfig
    factors: tuple[Factor, ...]


def decompose(
    winner: TrainConfig, baseline: TrainConfig, speedup: float, speed: Callable[[TrainConfig], float | None]
) -> Decomposition | None:
    """Decompose a speed-up; `speed` gives the tokens/s of a configuration on the way, None where it is not known.

    None if the speed of winner or baseline is not known by the same means, or both are the same. The last factor is the
    difference between these means and the speed-up.
    """
    if winner == baseline:
        return None
    first, last = speed(baseline), speed(winner)
    if not first or not last:
        return None
    factors: list[Factor] = []
    shared: list[str] = []
    before = first
    for name, config in way(winner, baseline):
        shared.append(name)
        reached = last if config == winner else speed(config)
        if reached:
            factors.append(Factor(name=" + ".join(shared), factor=reached / before))
            shared, before = [], reached
    factors.append(Factor(name=WHOLE, factor=speedup * first / last))
    return Decomposition(winner=winner, baseline=baseline, factors=tuple(factors))


def way(winner: TrainConfig, baseline: TrainConfig) -> list[tuple[str, TrainConfig]]:
    """Each group of knobs in which they differ, with the configuration that has the winner's values up to it."""
    grouped = {knob for group in GROUPS.values() for knob in group}
    groups = GROUPS | {OTHER: tuple(knob for knob in KNOBS if knob not in grouped)}
    values, steps = baseline.as_dict(), [("", baseline)]
    for name, knobs in groups.items():
        values |= {knob: getattr(winner, knob) for knob in knobs if knob in KNOBS}
        config = TrainConfig(**values)
        if config != steps[-1][1]:
            steps.append((name, config))
    return steps[1:]
