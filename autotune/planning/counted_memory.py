"""Counts the memory and the work of a training step by a dry probe, for models without a formula.

The dry probe runs in its own process and needs no GPU.
"""

import functools
from dataclasses import replace

from autotune.catalog import ModelSpec
from autotune.core.objective import Objective
from autotune.core.probe_types import DryCount, ProbeRequest
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryAnswer, DryProber


def count(
    model: ModelSpec, config: TrainConfig, micro_steps: int, objective: Objective
) -> DryCount | None:
    """Count the memory and the work of a training step of the whole model.

    Returns None if the step cannot be counted; `no_count` says why.
    """
    return dry_count(model, config, micro_steps, objective).count


def no_count(
    model: ModelSpec, config: TrainConfig, micro_steps: int, objective: Objective = Objective.SFT
) -> str:
    """Return the reason that `count` returns None, as part of a sentence."""
    return printable(
        dry_count(model, config, micro_steps, objective).refused or "it can be counted"
    ).rstrip(".")


def dry_count(
    model: ModelSpec,
    config: TrainConfig,
    micro_steps: int,
    objective: Objective = Objective.SFT,
    depth: int | None = None,
) -> DryAnswer:
    """Count a training step by a dry probe, of the whole model or of `depth` of its layers.

    The answer has the count, or the reason that the step cannot be counted.
    """
    is_flex = config.attention == "flex_attention"  # it cannot be compiled on the meta device
    if is_flex or (config.knows_ends and (config.packing or not config.has_mask)):
        # Count with torch's own flash attention. It needs the same memory as the configured
        # attention, and no extra package. But it cannot separate packed examples without a mask,
        # and the configured attention can. To avoid the mask, count each row as one example.
        config = replace(
            config,
            attention="sdpa",
            packing=False,
            padding="max_length" if config.packing else config.padding,
        )

    # A request must have a memory limit, but the limit does not change the count.
    request = ProbeRequest(
        config=config,
        model=model.config,
        memory_gib=1.0,
        micro_steps=micro_steps,
        depth=depth,
        objective=objective,
        trainer=objective.trainers[0],
    )

    return _prober().count(request)


@functools.cache
def _prober() -> DryProber:
    """Return this process's prober; one worker process answers all its requests."""
    return DryProber()
