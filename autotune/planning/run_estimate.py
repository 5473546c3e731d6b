"""Estimate a run that another tool's file describes, on one card: what it needs, and how long it takes.

Where no formula covers the model or its int8 base, a dry probe counts its memory. Other configurations without a
formula are bounded by two that are covered, or from below.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec, Price, resolve_device
from autotune.catalog.model_sizes import Sizes
from autotune.core.parallelism import Parallelism
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.planning.counted_memory import memory_of, step_time_of
from autotune.planning.device_estimate import observed_transfer, with_speed, with_step_time
from autotune.planning.foreign_config import FP32_BASE, ForeignConfig
from autotune.planning.foreign_sharding import stack_of
from autotune.planning.observations import Observation
from autotune.prediction.collectives import rank_step_time, traffic
from autotune.prediction.estimate import Estimate
from autotune.prediction.memory_formula import MemoryBreakdown
from autotune.prediction.step_time import StepTimeEstimate, host_of
from autotune.prediction.transfer import REFERENCE
from autotune.problem.calibration import Calibration
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.workload import RunShape, Workload

Edits = dict[str, Any]
OFFLOADED = 1.06  # times as long: measured by `benchmarks/levers.py reference`, Mistral-7B on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBounds:
    """The least and the most that a run may need at the peak of a step.

    They are equal where a formula covers the configuration, or a dry probe counts it; `most` is None where nothing
    bounds it.
    """

    least: MemoryBreakdown
    most: MemoryBreakdown | None

    @property
    def reported(self) -> MemoryBreakdown:
        """The upper bound where there is one."""
        return self.most or self.least

    def state(self, limit_gib: float) -> str:
        """FITS or OOM beyond the error of what is known, or TIGHT where neither is certain."""
        if self.least.peak_reserved_gib * (1 - self.least.error) > limit_gib:
            return OOM
        certain = self.most is not None and self.most.peak_reserved_gib * (1 + self.most.error) <= limit_gib
        return FITS if certain else TIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """What the verdict depends on besides the run. `workload` holds the examples; its global batch is not used."""

    model: ModelSpec
    device: DeviceSpec
    limit_gib: float
    workload: Workload
    price: Price | None = None
    observations: tuple[Observation, ...] = ()
    calibration: Calibration | None = None

    def bounds(self, run: ForeignConfig) -> MemoryBounds | None:
        """What a run needs with these examples; None where that is not known."""
        return memory_bounds(self.model, replace(run, config=self.at_longest(run.config)))

    def at_longest(self, config: TrainConfig) -> TrainConfig:
        """The configuration whose memory is asked for: with the longest rows that occur, as far as these are known."""
        return config if self.workload.lengths.source == "assumed" else self.workload.at_longest(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run with its estimate, which has no speed and cost if it does not fit.

    `edits` are the changes of the file that make it this run: keys of its own tool with the values to write.
    """

    run: ForeignConfig
    bounds: MemoryBounds
    estimate: Estimate
    edits: Edits

    @property
    def state(self) -> str:
        """FITS, TIGHT or OOM."""
        return self.estimate.state


def check_run(context: CheckContext, run: ForeignConfig, edits: Edits | None = None) -> CheckedRun | None:
    """Estimate a run; None where it is not known what it needs."""
    bounds = context.bounds(run)
    if bounds is None:
        return None
    without_speed = Estimate(
        device=context.device,
        config=run.config,
        state=bounds.state(context.limit_gib),
        need_gib=bounds.reported.peak_reserved_gib,
        limit_gib=context.limit_gib,
        price=context.price,
        memory=bounds.reported,
    )
    shape = context.workload.run_shape(run.config, accumulation=run.accumulation, world_size=run.num_gpus or 1)
    shape = replace(shape, epochs=run.epochs or 1)
    step_time = _step_time(context, run) if without_speed.state in (FITS, TIGHT) else None
    if run.config.num_gpus > 1:
        estimated = _with_rank_speed(context, run, without_speed, step_time, shape)
    else:
        estimated = with_speed(
            without_speed,
            step_time,
            shape,
            context.observations,
            num_steps=run.max_steps,
            calibration=context.calibration,
        )
    return CheckedRun(run=run, bounds=bounds, estimate=estimated, edits=edits or {})


def _with_rank_speed(
    context: CheckContext,
    run: ForeignConfig,
    estimated: Estimate,
    step_time: StepTimeEstimate | None,
    shape: RunShape,
) -> Estimate:
    """Add speed and cost on several GPUs, where their link is known."""
    device, config, link_gb_s = context.device, run.config, context.device.link_gb_s
    parallelism = Parallelism.of(config)
    sent = traffic(context.model, config, parallelism)
    if step_time is None or sent is None or link_gb_s is None:
        return estimated
    reference, given = resolve_device(REFERENCE), (context.observations, context.calibration)
    transfer = observed_transfer(reference, device, config, *given, side=step_time.side)
    if transfer is None:
        return estimated
    here = step_time.on(transfer)
    step = rank_step_time(here, config, parallelism, sent, accumulation=shape.accumulation, link_gb_s=link_gb_s)
    timed = with_step_time(estimated, shape, step.step_s, step.interval_s, num_steps=run.max_steps)
    return replace(timed, num_observations=transfer.basis, calibration=context.calibration)


def memory_bounds(model: ModelSpec, run: ForeignConfig) -> MemoryBounds | None:
    """What a run needs at least and at most; None where no formula covers the model and it cannot be counted."""
    config, steps, sizes = run.config, min(run.accumulation, 2), Sizes.of(model)
    known = replace(_checkpoints_on_gpu(config), dora=False)  # DoRA takes more; how much was not measured
    low = high = memory_of(model, known, steps, stack_of(run), objective=run.objective)
    is_int8 = config.quantization == "int8"
    if is_int8 and low is None:
        low = high = memory_of(model, replace(known, quantization="nf4"), steps, objective=run.objective)
    if low is None or high is None:
        return None
    if sizes is None or (is_int8 and low.counted):
        return _bounded_count(run, low)
    if FP32_BASE in run.notes:
        low, high = (_with_fp32_base(sizes, _checkpoints_on_gpu(config), memory) for memory in (low, high))
    if config.offloads:
        in_host_memory = gib(config.tokens * sizes.layers * sizes.hidden * (2 if config.method == "lora" else 4))
        low = replace(low, activations=max(low.activations - in_host_memory, 0.0))
    return MemoryBounds(least=low, most=None if config.dora or is_int8 or run.needs_more else high)


def _bounded_count(run: ForeignConfig, counted: MemoryBreakdown) -> MemoryBounds:
    """What a run needs that is only counted: counts know no offloading, and no base in float32."""
    in_fp32 = FP32_BASE in run.notes
    low = high = counted
    if in_fp32 and run.config.quantization == "none":
        low = replace(low, weights=2 * low.weights)  # 4 bytes a value instead of 2, and casts of them besides
    if run.config.offloads:
        low = replace(low, activations=0.0)
    return MemoryBounds(least=low, most=None if run.config.dora or in_fp32 or run.needs_more else high)


def _checkpoints_on_gpu(config: TrainConfig) -> TrainConfig:
    return replace(config, checkpointing="full") if config.offloads else config


def _with_fp32_base(sizes: Sizes, config: TrainConfig, memory: MemoryBreakdown) -> MemoryBreakdown:
    """The memory with a frozen base in float32 under autocast, which keeps no cast of frozen weights.

    Each product casts its weight again, and the autograd graph holds that cast until the layer's backward pass: of all
    layers that are not recomputed, and of the head while its logits exist (a test counts those of the layers).
    """
    quantized = config.quantization != "none"
    frozen = sizes.params - (sizes.linear_params if quantized else 0)
    every = config.checkpoint_every
    recomputed = 0 if every is None else math.ceil(sizes.layers / every)
    casts = 0 if quantized else min(sizes.layers - recomputed + 1, sizes.layers) * sizes.linear_params / sizes.layers
    checkpoints = config.tokens * recomputed * sizes.hidden  # 4 bytes a value instead of 2
    head = sizes.embedding if memory.logits else 0
    return replace(
        memory,
        weights=memory.weights + gib(2 * frozen),
        activations=memory.activations + gib(2 * (casts + checkpoints)),
        logits=memory.logits + gib(2 * head),
    )


def _step_time(context: CheckContext, run: ForeignConfig) -> StepTimeEstimate | None:
    """The times of a step on the reference card; None where no formula covers the model or the configuration."""
    config = context.workload.at_mean(run.config)
    if FP32_BASE in run.notes and Sizes.of(context.model) is None:
        return None  # what its casts take is not counted
    steps, host = min(run.accumulation, 2), host_of(context.calibration)
    step_time = step_time_of(context.model, _checkpoints_on_gpu(config), steps, host, run.objective)
    if step_time is None:
        return None
    cast = _cast_s(context.model, run)
    longer = OFFLOADED if config.offloads else 1.0
    step_time = replace(step_time, products_s=longer * step_time.products_s, bytes_s=longer * step_time.bytes_s + cast)
    cast_error = cast / step_time.device_s / 2
    return replace(step_time, device_error=math.hypot(step_time.device_error, cast_error))


def _cast_s(model: ModelSpec, run: ForeignConfig) -> float:
    """Seconds in which the reference card casts a float32 base for one micro batch: 4 bytes read, 2 written a value."""
    sizes, config = Sizes.of(model), run.config
    if sizes is None or FP32_BASE not in run.notes:
        return 0.0
    every = config.checkpoint_every
    passes = 1.0 if every is None else 1.0 + 1.0 / every
    cast = sizes.embedding + (0 if config.quantization == "nf4" else sizes.linear_params * passes)
    return 6 * cast / ((resolve_device(REFERENCE).bandwidth_gb_s or math.nan) * 1e9)
