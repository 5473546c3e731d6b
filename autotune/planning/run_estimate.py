"""Estimate a run that another tool's file describes, on one card: what it needs, and how long it takes.

Where no formula covers the model or its int8 base, a dry probe counts its memory. Other
configurations without a formula are bounded by two that are covered, or from below.
"""

import math
from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device
from autotune.catalog.model_sizes import Sizes
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.planning.counted_memory import count
from autotune.planning.foreign_sharding import buffers_of
from autotune.prediction.estimate import MemoryBounds, estimate, memory_of, on_device, step_time_of
from autotune.prediction.memory_formula import MemoryBreakdown
from autotune.prediction.observed_speed import Observation
from autotune.prediction.step_time import StepTimeEstimate, host_of
from autotune.prediction.transfer import REFERENCE
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.report.values.check import FP32_BASE, CheckedRun, Edits, ForeignConfig

OFFLOADED = (
    1.06  # times as long: measured by `benchmarks/levers.py reference`, Mistral-7B on an H200
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """What the verdict depends on besides the run. The examples of `task` count; its space and global batch do not."""

    task: Task
    limit_gib: float
    observations: tuple[Observation, ...] = ()

    @property
    def model(self) -> ModelSpec:
        """The model that is trained."""
        return self.task.model

    @property
    def device(self) -> DeviceSpec:
        """The GPU."""
        return self.task.device

    @property
    def workload(self) -> Workload:
        """The examples."""
        return self.task.workload

    def at_longest(self, config: TrainConfig) -> TrainConfig:
        """The configuration whose memory is asked for: with the longest rows that occur, as far as these are known."""
        return (
            config
            if self.workload.lengths.source == "assumed"
            else self.workload.at_longest(config)
        )


def bounds_of(context: CheckContext, run: ForeignConfig) -> MemoryBounds | None:
    """The memory that a run needs with the examples of `context`; None if it is unknown."""
    return memory_bounds(context.model, replace(run, config=context.at_longest(run.config)))


def check_run(
    context: CheckContext, run: ForeignConfig, edits: Edits | None = None
) -> CheckedRun | None:
    """Estimate a run; None where it is not known what it needs."""
    bounds = bounds_of(context, run)
    if bounds is None:
        return None
    task, config, seen = context.task, run.config, context.observations
    shape = context.workload.run_shape(
        config, accumulation=run.accumulation, world_size=run.num_gpus or 1
    )
    estimated = estimate(
        task,
        config,
        context.limit_gib,
        shape=replace(shape, epochs=run.epochs or 1),
        num_steps=run.max_steps,
        memory=bounds,
        clock=lambda: on_device(task, config, _step_time(context, run), seen),
    )
    assert estimated is not None  # its memory is known
    return CheckedRun(run=run, bounds=bounds, estimate=estimated, edits=edits or {})


def memory_bounds(model: ModelSpec, run: ForeignConfig) -> MemoryBounds | None:
    """What a run needs at least and at most; None where no formula covers the model and it cannot be counted."""
    config, steps, sizes = run.config, min(run.accumulation, 2), Sizes.of(model)
    known = replace(
        _checkpoints_on_gpu(config), dora=False
    )  # DoRA takes more; how much was not measured
    low = high = memory_of(
        model, known, steps, buffers=buffers_of(run), objective=run.objective, count=count
    )
    is_int8 = config.quantization == "int8"
    if is_int8 and low is None:
        in_4_bits = replace(known, quantization="nf4")
        low = high = memory_of(model, in_4_bits, steps, objective=run.objective, count=count)
    if low is None or high is None:
        return None
    if sizes is None or (is_int8 and low.counted):
        return _bounded_count(run, low)
    if FP32_BASE in run.notes:
        low, high = (
            _with_fp32_base(sizes, _checkpoints_on_gpu(config), memory) for memory in (low, high)
        )
    if config.offloads:
        in_host_memory = gib(
            config.tokens * sizes.layers * sizes.hidden * (2 if config.method == "lora" else 4)
        )
        low = replace(low, activations=max(low.activations - in_host_memory, 0.0))
    return MemoryBounds(least=low, most=None if config.dora or is_int8 or run.needs_more else high)


def _bounded_count(run: ForeignConfig, counted: MemoryBreakdown) -> MemoryBounds:
    """What a run needs that is only counted: counts know no offloading, and no base in float32."""
    in_fp32 = FP32_BASE in run.notes
    low = high = counted
    if in_fp32 and run.config.quantization == "none":
        low = replace(
            low, weights=2 * low.weights
        )  # 4 bytes a value instead of 2, and casts of them besides
    if run.config.offloads:
        low = replace(low, activations=0.0)
    return MemoryBounds(
        least=low, most=None if run.config.dora or in_fp32 or run.needs_more else high
    )


def _checkpoints_on_gpu(config: TrainConfig) -> TrainConfig:
    return replace(config, checkpointing="full") if config.offloads else config


def _with_fp32_base(sizes: Sizes, config: TrainConfig, memory: MemoryBreakdown) -> MemoryBreakdown:
    """The memory with a frozen base in float32 under autocast, which keeps no cast of frozen weights.

    Each product casts its weight again, and the autograd graph holds that cast until the layer's
    backward pass: of all layers that are not recomputed, and of the head while its logits exist (a
    test counts those of the layers).
    """
    quantized = config.quantization != "none"
    frozen = sizes.params - (sizes.linear_params if quantized else 0)
    every = config.checkpoint_every
    recomputed = 0 if every is None else math.ceil(sizes.layers / every)
    casts = (
        0
        if quantized
        else min(sizes.layers - recomputed + 1, sizes.layers) * sizes.linear_params / sizes.layers
    )
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
    steps, host, known = (
        min(run.accumulation, 2),
        host_of(context.task.calibration),
        _checkpoints_on_gpu(config),
    )
    step_time = step_time_of(
        context.model, known, steps, host, objective=run.objective, count=count
    )
    if step_time is None:
        return None
    cast = _cast_s(context.model, run)
    longer = OFFLOADED if config.offloads else 1.0
    step_time = replace(
        step_time,
        products_s=longer * step_time.products_s,
        bytes_s=longer * step_time.bytes_s + cast,
    )
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
