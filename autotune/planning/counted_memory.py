"""Counts memory and time of models without a formula, by a dry probe in its own process."""

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
    """Count a training step of the whole model, or return None (see `no_count`)."""
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
    """Count the whole model, or `depth` of its layers, by a dry probe; or say why not."""
    if config.knows_ends and (config.packing or not config.has_mask):
        # torch's own flash attention needs the same memory and no extra package. The configuration
        # keeps packed examples apart without a mask, so each row is counted as if it held one
        # example.
        config = replace(
            config,
            attention="sdpa",
            packing=False,
            padding="max_length" if config.packing else config.padding,
        )

    # The request needs a limit, but the limit does not change the count.
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
