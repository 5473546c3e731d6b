"""The decomposition of the winner's speed-up into factors, one for each group of knobs.

The groups change one after another, from the baseline's values to the winner's, and the product of
the factors is the speed-up. If the configuration after the change of a group cannot be probed, for
example because no time is left, this group and the next group share a factor. Ablation
(`study/ablation`), in contrast, resets single knobs of the winner, and the product of its effects
is not the speed-up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig

# Groups that save memory come first, so that most intermediate configurations fit.
GROUPS: dict[str, tuple[str, ...]] = {
    "loss in chunks": ("loss",),
    "precision": ("precision", "quantization", "double_quant", "quantize_experts"),
    "optimizer": ("optimizer",),
    "kernels": ("attention", "kernels"),
    "padding or packing": ("padding", "packing", "packed_attention", "group_by_length"),
    "batch": ("micro_batch_size",),
    "recomputation": ("checkpointing",),
    "compilation": ("compile",),
    "products of adapters": ("lora_kernels",),
    "CUDA graphs": ("cuda_graphs",),
    "GPUs": ("num_gpus", "sharding"),
}
OTHER = "other settings"
WHOLE = "whole models instead of a few layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The useful tokens/s after a group of knobs changed, divided by the previous tokens/s."""

    name: str
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """The factors of a speed-up, in order from the baseline to the winner."""

    winner: TrainConfig
    baseline: TrainConfig
    factors: tuple[Factor, ...]


def decompose(
    winner: TrainConfig,
    baseline: TrainConfig,
    speedup: float,
    speed: Callable[[TrainConfig], float | None],
) -> Decomposition | None:
    """Decompose a speed-up into factors.

    `speed` returns the tokens/s of a configuration, usually from truncated models, or None if the
    speed is unknown. `speedup` comes from whole models. The last factor, WHOLE, is chosen so that
    the product of all factors is `speedup`. Returns None if the winner is the baseline, or if the
    speed of either is unknown.
    """
    if winner == baseline:
        return None
    first = speed(baseline)
    last = speed(winner)
    if not first or not last:
        return None

    factors: list[Factor] = []
    shared: list[str] = []
    speed_before = first
    for name, config in intermediate_configs(winner, baseline):
        shared.append(name)
        speed_after = last if config == winner else speed(config)
        if speed_after:
            factors.append(Factor(name=" + ".join(shared), factor=speed_after / speed_before))
            shared = []
            speed_before = speed_after

    factors.append(Factor(name=WHOLE, factor=speedup * first / last))
    return Decomposition(winner=winner, baseline=baseline, factors=tuple(factors))


def intermediate_configs(
    winner: TrainConfig, baseline: TrainConfig
) -> list[tuple[str, TrainConfig]]:
    """Return each group of knobs that changes, with the configuration after this group's change.

    This configuration has the winner's values in this group and all earlier groups, and the
    baseline's values in all later groups.
    """
    grouped = {knob for group in GROUPS.values() for knob in group}
    groups = GROUPS | {OTHER: tuple(knob for knob in KNOBS if knob not in grouped)}
    values = baseline.as_dict()
    steps = [("", baseline)]
    for name, knobs in groups.items():
        values |= {knob: getattr(winner, knob) for knob in knobs if knob in KNOBS}
        config = TrainConfig(**values)
        if config != steps[-1][1]:
            steps.append((name, config))
    return steps[1:]
