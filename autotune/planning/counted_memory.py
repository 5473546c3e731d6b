"""Computes the memory and the work of a training step without a GPU, for models without a formula.

A dry probe runs the step on torch's meta device, in a separate process. It adds up the bytes of all
tensors, the FLOPs, and the bytes that operations read and write.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from autotune.catalog import ModelSpec
from autotune.core.objective import Objective
from autotune.core.other_trainer import USUAL, OtherTrainer
from autotune.core.probe_types import DryCount, ExpertShard, ModelShape, ProbeRequest
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryAnswer, DryProber, obstacle


def count(
    model: ModelSpec,
    config: TrainConfig,
    micro_steps: int,
    objective: Objective,
    experts: ExpertShard | None = None,
) -> DryCount | None:
    """Compute the memory, the FLOPs and the memory traffic of a training step of the whole model.

    With `experts`, the model has only one GPU's part of its experts. Returns None if the dry probe
    cannot run the step; `no_count` says why.
    """
    return dry_count(model, config, micro_steps, objective, experts=experts).count


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
    other: OtherTrainer = USUAL,
    experts: ExpertShard | None = None,
) -> DryAnswer:
    """Run a dry probe of a training step of the whole model, or of a copy with `depth` layers.

    The trainer is autotune's, or `other`. With `experts`, the model has
    only one GPU's part of its experts.

    The answer holds the memory and the work of the step, or the reason why the dry probe failed.
    """
    if config.knows_ends:
        # Replace the configured attention by torch's own flash attention, which needs the same
        # memory and no extra package. Padded rows keep their mask, whose few bytes count too.
        # Without a mask, torch's attention cannot separate packed examples, although the configured
        # attention can. So treat each packed row as a single example.
        config = replace(
            config,
            attention="sdpa",
            packing=False,
            padding="max_length" if config.packing else config.padding,
        )

    if objective.generates:
        # The update of GRPO computes the head in tiles, as the chunked loss does.
        objective = Objective.SFT

    # A request must have a memory limit, but the limit does not change the computed memory.
    request = ProbeRequest(
        config=config,
        model=model.config,
        memory_gib=1.0,
        micro_steps=micro_steps,
        depth=depth,
        objective=objective,
        trainer=objective.trainers[0],
        experts=experts,
    )

    return _prober().count(request, other)


def shape_of(model: ModelSpec) -> ModelShape | None:
    """Return the pattern and the properties of a model's layers.

    Returns None if this machine runs no dry probes, or if the model cannot be built.
    """
    if obstacle() is not None:
        return None
    shape = _prober().describe(model.config)
    return None if isinstance(shape, str) else shape


@contextmanager
def stop_counting_if(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Inside this block, a dry probe raises Cancelled as soon as `should_stop` returns True."""
    prober = _prober()
    before = prober.should_stop
    prober.should_stop = should_stop
    try:
        yield
    finally:
        prober.should_stop = before


@contextmanager
def counting_says(say: Callable[[str], None]) -> Iterator[None]:
    """Inside this block, `say` gets the configuration that a dry probe counts."""
    prober = _prober()
    before = prober.say
    prober.say = say
    try:
        yield
    finally:
        prober.say = before


@functools.cache
def _prober() -> DryProber:
    """Return this process's prober; one worker process answers all its requests."""
    return DryProber()
