"""Estimates the configurations listed in a spec, to compare them with their published results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from autotune.catalog import DeviceSpec
from autotune.core.other_trainer import USUAL
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import count, dry_count
from autotune.planning.device_estimate import limit_of, no_estimate
from autotune.planning.observations import Say, ignore_message
from autotune.planning.plan import planned_setup
from autotune.prediction.estimate import (
    Clock,
    Estimate,
    MemoryBounds,
    device_step_time,
    estimate,
    memory_of,
)
from autotune.prediction.memory_formula import (
    CONTEXT_GIB,
    ERROR,
    counted_breakdown,
    in_fixed_segments,
)
from autotune.prediction.observed_speed import Observation
from autotune.prediction.sharded_memory import MAX_LIVE, ShardingSettings
from autotune.prediction.step_time import counted_step_time, host_of
from autotune.problem.constraints import refusal
from autotune.problem.run_cost import OOM, TIGHT
from autotune.problem.setup import known_shape
from autotune.problem.study_spec import NamedConfig, Published, StudySpec
from autotune.problem.task import Task
from autotune.study.named_configs import ConfigResult, cases, with_doubts

# DeepSpeed's own defaults, which published runs rarely change
DEFAULTS = ShardingSettings(live=MAX_LIVE)


def estimate_named_configs(
    spec: StudySpec,
    *,
    device: DeviceSpec,
    observations: Sequence[Observation] = (),
    say: Say = ignore_message,
    counted: bool = False,
) -> list[ConfigResult]:
    """Estimate each configuration listed in the spec. Raises UsageError for an invalid spec.

    If `counted` is true and no formula covers a configuration, a dry probe computes its memory on
    the meta device. It also computes the memory of published runs whose trainer computes in another
    way (`NamedConfig.trainer`). The measurements of other users in `observations` correct an
    estimate only if the configuration has no published result. Otherwise, the published result
    could correct the very estimate that is compared with it. A configuration with a published
    result is estimated even if this package's trainer refuses it, because the result came from
    another trainer. A published speed that cannot be right is marked (`with_doubts`).
    """
    task = planned_setup(replace(spec, pins={}), device, say).task
    limit_gib = limit_of(spec, device)
    results: list[ConfigResult] = []
    models = []

    for case, config, case_task in cases(spec, task):
        result = ConfigResult(
            case=case, config=config, outcome=Outcome.REFUSED, evidence=Evidence.ESTIMATED
        )
        models.append(case_task.model)
        reason = case.excluded
        estimated: Estimate | None = None
        # A configuration with a published result is estimated even if this trainer refuses it.
        if not reason and not case.published:
            reason = refusal(
                config, case_task.model, case_task.trainer, known_shape(case_task.model), device
            )
        if not reason:
            usable = () if case.published else observations
            theirs, reason = _of_other_trainer(case, case_task, config, counted=counted)
            if not reason:
                estimated, reason = _estimate(
                    case_task, config, limit_gib, usable, counted=counted, theirs=theirs
                )

        if estimated is None:
            results.append(replace(result, reason=reason))
        else:
            results.append(_with_numbers(result, case_task, estimated))

    return with_doubts(results, models, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replaced:
    """What replaces the memory and the step time of autotune's own trainer."""

    memory: MemoryBounds | None = None
    clock: Clock | None = None


def _estimate(
    task: Task,
    config: TrainConfig,
    limit_gib: float,
    observations: Sequence[Observation],
    *,
    counted: bool,
    theirs: _Replaced,
) -> tuple[Estimate | None, str | None]:
    """Return the estimate of one configuration, or the reason that no estimate exists."""
    try:
        estimated = estimate(
            task,
            config,
            limit_gib,
            observations,
            count=count if counted else None,
            memory=theirs.memory,
            clock=theirs.clock,
        )
    except ValueError as error:
        return None, str(error)
    return estimated, None if estimated else no_estimate(task, config, counted=counted)


def _of_other_trainer(
    case: NamedConfig, task: Task, config: TrainConfig, *, counted: bool
) -> tuple[_Replaced, str | None]:
    """Return the memory and the time of a run that another trainer made.

    The second value is the reason that they are unknown, or None. On several GPUs, the tool that
    shards the model has its own defaults.
    """
    objective = task.workload.objective
    steps = task.workload.run_shape(config, world_size=config.num_gpus).probe_micro_steps
    if config.num_gpus > 1 and case.published:
        query = count if counted else None
        sharded = memory_of(
            task.model, config, steps, objective=objective, settings=DEFAULTS, count=query
        )
        if sharded is None:
            return _Replaced(), None
        return _Replaced(memory=MemoryBounds(least=sharded, most=sharded)), None
    if config.num_gpus > 1 or case.trainer == USUAL:
        return _Replaced(), None
    if not counted:
        return _Replaced(), "only a count knows how much memory this trainer needs"

    answer = dry_count(
        task.model, config, steps, objective, _counted_layers(case, task, config), case.trainer
    )
    if answer.count is None:
        return _Replaced(), f"the run's memory cannot be counted: {answer.refused}"
    needed = in_fixed_segments(
        counted_breakdown(task.model, config, answer.count, objective, case.trainer), answer.count
    )
    # Products in 32 bits have no tensor cores, and their speed was never measured.
    step = None
    if not case.trainer.unpacks_to_input:
        step = counted_step_time(config, answer.count, host_of(task.calibration))
    clock = partial(device_step_time, task, config, step)
    return _Replaced(memory=MemoryBounds(least=needed, most=needed), clock=clock), None


def _counted_layers(case: NamedConfig, task: Task, config: TrainConfig) -> int | None:
    """Return the number of layers to count, or None if counts of few layers are extrapolated.

    The layout of segments that cannot grow is not affine in the number of layers, so all layers are
    counted if the published memory includes such segments. This takes ten times as long.
    """
    published = case.published or Published()
    reserved = (
        published.reserved_gib,
        published.reserved_gb,
        published.process_gib,
        published.peak_gb,
    )
    if config.allocator == "fixed" and any(reserved):
        return task.model.num_layers
    return None


def _with_numbers(result: ConfigResult, task: Task, estimated: Estimate) -> ConfigResult:
    """Add the estimates to the result: the memory of one GPU and the speed of all GPUs."""
    config = result.config
    memory = estimated.memory
    error = memory.error if memory else ERROR
    # Free segments may have been given back.
    held_gib = estimated.held_gib
    needed_gib = min(held_gib, memory.needed_gib) if memory else held_gib
    result = replace(
        result,
        outcome=Outcome.OOM if estimated.state == OOM else Outcome.OK,
        reason="too close to tell" if estimated.state == TIGHT else None,
        tight=estimated.state == TIGHT,
        peak_allocated_gib=memory.peak_gib if memory else None,
        peak_reserved_gib=held_gib,
        nccl_gib=memory.nccl if memory else 0.0,
        interval_gib=(needed_gib * (1 - error), held_gib * (1 + error)),
        with_context_gib=held_gib + CONTEXT_GIB,
    )
    if not (estimated.samples_per_s and estimated.tokens_per_s and estimated.interval):
        return result

    shape = task.workload.run_shape(config, world_size=config.num_gpus)
    samples_per_s = config.num_gpus * estimated.samples_per_s
    rows_per_s = samples_per_s / shape.examples_per_row
    low, high = (useful / estimated.tokens_per_s for useful in estimated.interval)
    tokens_per_s = rows_per_s * config.seq_len

    return replace(
        result,
        tokens_per_s=tokens_per_s,
        interval=(low * tokens_per_s, high * tokens_per_s),
        samples_per_s=samples_per_s,
        step_time_s=shape.rows_per_step / rows_per_s,
        host_share=estimated.single_gpu.host_share if estimated.single_gpu else None,
    )
