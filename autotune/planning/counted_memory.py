"""Memory and time of models and configurations that no formula covers, counted by a dry probe in its own process."""

import functools
from dataclasses import replace

from autotune.catalog import ModelSpec
from autotune.core.objective import Objective
from autotune.core.probe_types import DryCount, ProbeRequest
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryAnswer, DryProber


def count(model: ModelSpec, config: TrainConfig, micro_steps: int, objective: Objective) -> DryCount | None:
    """Count a training step of the whole model, the counter of `estimate`; None if `no_count` says why."""
    return counted(model, config, micro_steps, objective).count


def no_count(model: ModelSpec, config: TrainConfig, micro_steps: int, objective: Objective = Objective.SFT) -> str:
    """Why `count` has no answer, as a part of a sentence."""
    return printable(counted(model, config, micro_steps, objective).refused or "it can be counted").rstrip(".")


def counted(
    model: ModelSpec,
    config: TrainConfig,
    micro_steps: int,
    objective: Objective = Objective.SFT,
    depth: int | None = None,
) -> DryAnswer:
    """What a dry probe counts of the whole model, or of `depth` of its layers, or why it counts nothing."""
    if model.sees_images:
        return DryAnswer(refused="the images of its rows are not counted")
    if config.knows_ends and (config.packing or not config.has_mask):
        # torch's own flash attention holds the same, and needs no package to be counted. These keep packed examples
        # apart without a mask, so that their rows are counted as if each held one.
        config = replace(
            config, attention="sdpa", packing=False, padding="max_length" if config.packing else config.padding
        )
    # What may be used of the memory of a card does not change what is needed.
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
    """One process serves all questions. It ends with this one."""
    return DryProber()
