"""Estimates the memory and the time on one card of a run that another tool's file describes.

If no formula covers the model or its int8 base, a dry probe computes the memory on the meta device.
For other configurations without a formula, the lower bound of the memory, and sometimes the upper
bound, come from similar configurations with a formula.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device
from autotune.catalog.model_sizes import Sizes
from autotune.core.probe_types import Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.planning.counted_memory import count
from autotune.planning.foreign_config import EXPERTS_BY_VERSION
from autotune.planning.foreign_file import table
from autotune.planning.foreign_sharding import settings_of
from autotune.prediction.estimate import (
    MemoryBounds,
    device_step_time,
    estimate,
    memory_of,
    step_time_of,
)
from autotune.prediction.memory_formula import EVALUATES, MemoryBreakdown, largest_logits_gib
from autotune.prediction.observed_speed import Observation
from autotune.prediction.rollout_memory import largest, phases
from autotune.prediction.step_time import StepTimeEstimate, host_of
from autotune.prediction.transfer import REFERENCE
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.report.values.check import FP32_BASE, CheckedRun, Edits, ForeignConfig

PADDED_TO = 64  # Axolotl pads rows to a multiple of 64 tokens, LLaMA-Factory of 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """All inputs of a check except the run.

    A check uses the examples of `task`, but not its search space and not its global batch.
    `limit_gib` is the memory of a GPU for tensors.
    """

    task: Task
    limit_gib: float
    observations: tuple[Observation, ...] = ()

    @property
    def model(self) -> ModelSpec:
        """The model that is trained."""
        return self.task.model

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the run is checked for."""
        return self.task.device

    @property
    def card_gib(self) -> float:
        """The memory of the whole GPU, of which vLLM takes a share."""
        return self.device.memory_gib or self.limit_gib

    @property
    def workload(self) -> Workload:
        """The examples of the training and their lengths."""
        return self.task.workload

    def longest_row_config(self, run: ForeignConfig) -> TrainConfig:
        """Return the run's configuration with its longest rows, if the lengths are known.

        The memory of a run is estimated for this configuration. Its rows are padded to a multiple
        of PADDED_TO, or of the file's larger number, but not beyond the run's own length.
        """
        config = run.config
        if self.workload.lengths.source == "assumed":
            return config
        longest = self.workload.longest_row_config(config)
        own = run.values.get("pad_to_multiple_of")
        multiple = max(PADDED_TO, own) if isinstance(own, int) else PADDED_TO
        padded = math.ceil(longest.seq_len / multiple) * multiple
        return replace(longest, seq_len=min(padded, config.seq_len))


def bounds_of(context: CheckContext, run: ForeignConfig) -> MemoryBounds | None:
    """Return the memory that a run needs for the examples of `context`, or None if unknown."""
    if run.rollouts is not None:
        found = phases_of(context, run)
        bounds = None if found is None else largest(found)
    else:
        longest = replace(run, config=context.longest_row_config(run))
        bounds = memory_bounds(context.model, longest)
    if bounds is not None and context.task.device.unified_memory:
        return bounds.in_one_pool()
    return bounds


def phases_of(context: CheckContext, run: ForeignConfig) -> dict[Phase, MemoryBounds] | None:
    """Return the memory of each phase of a GRPO step on the GPU of `context`, or None if unknown.

    Every completion is assumed to reach its longest length.
    """
    rollouts = run.rollouts
    assert rollouts is not None
    model = context.model
    trained = memory_bounds(model, run)
    scored = _bounds(model, run, EVALUATES) if rollouts.scores else None
    if trained is None or (rollouts.scores and scored is None):
        return None
    return phases(model, run.config, rollouts, context.card_gib, trained, scored)


def check_run(
    context: CheckContext, run: ForeignConfig, edits: Edits | None = None
) -> CheckedRun | None:
    """Estimate a run; return None if the memory that it needs is unknown."""
    bounds = bounds_of(context, run)
    if bounds is None:
        return None

    task = context.task
    config = run.config
    shape = context.workload.run_shape(
        config, accumulation=run.accumulation, world_size=run.num_gpus or 1
    )

    estimated = estimate(
        task,
        config,
        context.limit_gib,
        parallelism=run.parallelism,
        settings=settings_of(run),
        count=count,
        shape=replace(shape, epochs=run.epochs or 1),
        num_steps=run.max_steps,
        memory=bounds,
        clock=lambda: device_step_time(
            task, config, _step_time(context, run), context.observations
        ),
    )
    assert estimated is not None  # `estimate` returns None only if the memory is unknown
    return CheckedRun(run=run, bounds=bounds, estimate=estimated, edits=edits or {})


def memory_bounds(model: ModelSpec, run: ForeignConfig) -> MemoryBounds | None:
    """Return the bounds of the memory that a run needs in its training steps and evaluations.

    Returns None if no formula covers the model and no dry probe can compute the memory.
    """
    bounds = _bounds(model, run, min(run.accumulation, 2))
    evaluation = run.evaluation
    if bounds is None or evaluation is None or evaluation.needs_less(run.config):
        return bounds

    evaluates = replace(run, config=evaluation.batch_of(run.config))
    evaluated = _bounds(model, evaluates, EVALUATES)
    if evaluated is None:
        return None
    most = evaluated.most
    least = bounds.least if evaluation.answers_only else evaluated.least
    return bounds.include_evaluation(
        MemoryBounds(
            least=evaluation.with_kept(least),
            most=None if most is None else evaluation.with_kept(most),
        )
    )


def _bounds(model: ModelSpec, run: ForeignConfig, steps: int) -> MemoryBounds | None:
    """Return the memory bounds of a step of `steps` micro batches.

    If `steps` is EVALUATES, the bounds are for an evaluation batch.
    """
    config = run.config
    sizes = Sizes.of(model)
    # DoRA needs more memory; the additional amount was not measured.
    covered = replace(_checkpoints_on_gpu(config), dora=False)
    of_config = partial(
        memory_of,
        model,
        micro_steps=steps,
        settings=settings_of(run),
        objective=run.objective,
        parallelism=run.parallelism,
        count=count,
    )
    low = high = of_config(covered)
    if low is not None and table("notes")[EXPERTS_BY_VERSION] in run.notes:
        # If memory is short, the allocator gives unused memory back.
        on_attention = replace(covered, lora_targets="attention")
        low = replace(of_config(on_attention) or low, reserved=0.0)
    is_int8 = config.quantization == "int8"
    if is_int8 and low is None:
        in_4_bits = replace(covered, quantization="nf4")
        low = high = memory_of(model, in_4_bits, steps, objective=run.objective, count=count)
    if low is None or high is None:
        return None

    if sizes is None or (is_int8 and low.counted):
        bounds = _bounded_count(run, low, _with_whole_logits(model, run, high))
        if run.uncounted is None:
            return bounds
        return replace(bounds, least=_least(model, run, steps, bounds.least))
    if FP32_BASE in run.notes:
        low, high = (
            _with_fp32_base(sizes, _checkpoints_on_gpu(config), memory) for memory in (low, high)
        )
    if config.offloads:
        offloaded_gib = gib(
            config.tokens * sizes.layers * sizes.hidden * (2 if config.method == "lora" else 4)
        )
        moved_gib = min(low.activations, offloaded_gib)
        low = replace(low, activations=low.activations - moved_gib, host=low.host + moved_gib)
    if run.uncounted is not None:
        low = _least(model, run, steps, low)
    is_unknown = config.dora or is_int8 or run.needs_more
    return MemoryBounds(
        least=low, most=None if is_unknown else _with_whole_logits(model, run, high)
    )


def _with_whole_logits(
    model: ModelSpec, run: ForeignConfig, memory: MemoryBreakdown
) -> MemoryBreakdown:
    """Return the memory with the most that the logits take if the loss holds all of them."""
    if not run.whole_logits:
        return memory
    rows = run.config.micro_batch_size * run.objective.rows_per_example
    logits = largest_logits_gib(model, rows * run.config.seq_len)
    return replace(memory, logits=max(memory.logits, logits))


def _least(
    model: ModelSpec, run: ForeignConfig, steps: int, memory: MemoryBreakdown
) -> MemoryBreakdown:
    """Return the lower bound of the memory.

    The bound assumes that every tensor is sharded and offloaded if possible. Runs that shard or
    offload weights compute in 16 bits. So autocast keeps no 16-bit copies of weights, and the
    32-bit weights are sharded or offloaded as part of the optimizer's state.
    """
    uncounted = run.uncounted
    assert uncounted is not None
    config = _checkpoints_on_gpu(run.config)
    if uncounted.exchanges and config.num_gpus == 1 and config.precision.endswith("mixed"):
        pure = replace(config, precision="bf16_pure", dora=False)
        in_16_bits = memory_of(model, pure, steps, objective=run.objective, count=count)
        if in_16_bits is not None:
            smaller = {
                name: min(getattr(memory, name), getattr(in_16_bits, name))
                for name in ("weights", "adapters", "gradients", "activations", "logits")
            }
            memory = replace(memory, **smaller)
    return uncounted.least(memory)


def _bounded_count(run: ForeignConfig, low: MemoryBreakdown, high: MemoryBreakdown) -> MemoryBounds:
    """Return the memory bounds of a run whose memory a dry probe computed.

    The dry probe that computed `low` and `high` had no offloaded checkpoints and no float32 base.
    The bounds add their effects.
    """
    in_fp32 = FP32_BASE in run.notes
    if in_fp32 and run.config.quantization == "none":
        # In float32, a weight takes 4 bytes instead of 2. The memory of its 16-bit copies is
        # unknown.
        low = replace(low, weights=2 * low.weights)
    if run.config.offloads:
        low = replace(low, activations=0.0)

    return MemoryBounds(
        least=low, most=None if run.config.dora or in_fp32 or run.needs_more else high
    )


def _checkpoints_on_gpu(config: TrainConfig) -> TrainConfig:
    return replace(config, checkpointing="full") if config.offloads else config


def _with_fp32_base(sizes: Sizes, config: TrainConfig, memory: MemoryBreakdown) -> MemoryBreakdown:
    """Return the memory of a run whose frozen base is in float32 under autocast.

    Autocast caches no casts of frozen weights. Each matrix product casts its weight to 16 bits
    again, and the autograd graph holds this copy until the layer's backward pass. So 16-bit copies
    exist for all layers that are not recomputed, and for the head while its logits exist. A unit
    test checks the number of copies in the layers.
    """
    quantized = config.quantization != "none"
    frozen = sizes.params - (sizes.linear_params if quantized else 0)

    every = 1 if memory.phase is Phase.EVALUATE else config.checkpoint_every
    num_recomputed = 0 if every is None else math.ceil(sizes.layers / every)
    casts = (
        0
        if quantized
        else min(sizes.layers - num_recomputed + 1, sizes.layers)
        * sizes.linear_params
        / sizes.layers
    )
    # With a float32 base, a hidden state takes 4 bytes per value instead of 2. An evaluation holds
    # four hidden states besides the tensors inside the current layer.
    num_hidden = 4 if memory.phase is Phase.EVALUATE else num_recomputed
    checkpoints = config.tokens * num_hidden * sizes.hidden
    head = sizes.embedding if memory.logits else 0

    return replace(
        memory,
        weights=memory.weights + gib(2 * frozen),
        activations=memory.activations + gib(2 * (casts + checkpoints)),
        logits=memory.logits + gib(2 * head),
    )


def _step_time(context: CheckContext, run: ForeignConfig) -> StepTimeEstimate | None:
    """Return the step time on the reference card, or None if no formula covers the run."""
    config = context.workload.mean_row_config(run.config)
    if run.rollouts is not None:
        return None  # the time to generate completions is unknown
    if run.uncounted is not None and run.uncounted.exchanges:
        return None  # the time to send weights or gradients is unknown
    if FP32_BASE in run.notes and Sizes.of(context.model) is None:
        return None  # a dry probe leaves out the time to cast a float32 base

    steps = min(run.accumulation, 2)
    host = host_of(context.task.calibration)
    covered = _checkpoints_on_gpu(config)
    step_time = step_time_of(
        context.model,
        covered,
        steps,
        host,
        objective=run.objective,
        shards=run.parallelism.shards,
        count=count,
    )
    if step_time is None:
        return None

    if config.offloads:
        step_time = step_time.with_offloading()

    cast_s = _cast_s(context.model, run)
    step_time = replace(step_time, bytes_s=step_time.bytes_s + cast_s)

    cast_error = cast_s / step_time.device_s / 2
    return replace(step_time, device_error=math.hypot(step_time.device_error, cast_error))


def _cast_s(model: ModelSpec, run: ForeignConfig) -> float:
    """Return the seconds per micro batch that casts of a float32 base take on the reference card.

    For each value, a cast reads 4 bytes and writes 2 bytes.
    """
    sizes = Sizes.of(model)
    config = run.config
    if sizes is None or FP32_BASE not in run.notes:
        return 0.0

    every = config.checkpoint_every
    passes = 1.0 if every is None else 1.0 + 1.0 / every
    num_values = sizes.embedding + (
        0 if config.quantization == "nf4" else sizes.linear_params * passes
    )
    return 6 * num_values / ((resolve_device(REFERENCE).bandwidth_gb_s or math.nan) * 1e9)
