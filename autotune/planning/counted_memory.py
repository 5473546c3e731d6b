"""Memory and time of models and configurations that no formula covers, counted by a dry probe in its own process."""

import functools
from dataclasses import replace

from autotune.catalog import ModelSpec
from autotune.core.objective import Objective
from autotune.core.probe_types import ProbeRequest
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryAnswer, DryProber
from autotune.prediction.memory_formula import MemoryBreakdown, counted_breakdown, memory_breakdown, supported
from autotune.prediction.sharded_memory import TRAINER, Stack, breakdown_of
from autotune.prediction.step_time import Host, StepTimeEstimate, counted_step_time, estimate_step_time


def memory_of(
    model: ModelSpec,
    config: TrainConfig,
    micro_steps: int,
    stack: Stack = TRAINER,
    *,
    objective: Objective = Objective.SFT,
) -> MemoryBreakdown | None:
    """The memory of the whole model at the peak of a step: by formula, else counted; None where `no_count` says why.

    On several GPUs that of each, by formula alone, as `stack` trains it for the next token.
    """
    if config.num_gpus > 1:
        return breakdown_of(model, config, micro_steps, stack)
    by_formula = memory_breakdown(model, config, micro_steps, objective=objective)
    if by_formula is not None:
        return by_formula
    count = counted(model, config, micro_steps, objective).count
    return None if count is None else counted_breakdown(model, config, count, objective)


def step_time_of(
    model: ModelSpec, config: TrainConfig, micro_steps: int, host: Host, objective: Objective = Objective.SFT
) -> StepTimeEstimate | None:
    """The time of a step on the reference card: by formula, else counted; None where it is not known."""
    if supported(model, config) is not None:
        return estimate_step_time(model, config, host, objective)
    if config.packing and _knows_ends(config):
        return None  # its examples attend to less than the whole rows that are counted
    count = counted(model, config, micro_steps, objective).count
    return None if count is None else counted_step_time(config, count, host)


def no_count(model: ModelSpec, config: TrainConfig, micro_steps: int, objective: Objective = Objective.SFT) -> str:
    """Why `memory_of` has no answer, as a part of a sentence."""
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
    if _knows_ends(config) and (config.packing or not config.has_mask):
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


def _knows_ends(config: TrainConfig) -> bool:
    """Whether the attention of packed rows knows where their examples end, and computes no more."""
    return config.attention == "flash_attention_2" or config.packed_attention == "varlen"


@functools.cache
def _prober() -> DryProber:
    """One process serves all questions. It ends with this one."""
    return DryProber()
