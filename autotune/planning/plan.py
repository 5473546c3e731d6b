"""Plans a study: finds the best configuration of its search space with formulas, without probes.

Every number is an estimate (see `device_estimate`). The winner is chosen by the same rule as in a
measured study.
"""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.errors import UsageError
from autotune.core.knobs import KNOBS
from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import count
from autotune.planning.counted_plan import count_grouped, count_leanest, largest_that_fits
from autotune.planning.device_estimate import accuracy_text, limit_of, no_estimate, planned_device
from autotune.planning.observations import Say, ignore_message
from autotune.prediction.estimate import (
    Estimate,
    FittingChange,
    estimate,
    memory_of,
    memory_state,
)
from autotune.prediction.memory_formula import KEPT_ANSWERS, MemoryBreakdown, unsupported
from autotune.prediction.observed_speed import Observation
from autotune.prediction.transfer import calibrated_parts
from autotune.problem.length_distribution import Lengths
from autotune.problem.run_cost import FITS, OOM
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import Setup, open_reserve, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.report.values.plan import (
    LITTLE_KNOWN,
    NO_SPEED,
    ONLY_BASELINE,
    ONLY_GROUPED,
    ONLY_LEANEST,
    Cell,
    Plan,
)
from autotune.study.ranking import Scored, choose, explain_choice

MAX_CONFIGS = 10_000  # the most configurations to estimate; this takes about two seconds
# Every n-th configuration of a large space is estimated, with n up to this number. For a larger n,
# enumerating the space would take longer than the estimates, so a random sample is estimated
# instead.
MAX_STRIDE = 300
BATCHES = (1, 2, 4, 8, 16, 32)
# For these knobs, the value that needs the least memory depends on the other knobs.
DEPENDENT = ("micro_batch_size", "optimizer", "checkpointing", "compile", "loss", "kernels")
# The knobs that determine the memory that stays in use between steps
_LASTING = operator.attrgetter(
    "method", "precision", "quantization", "double_quant", "lora_rank", "lora_targets", "optimizer"
)
_ALL_BUT_ROWS = operator.attrgetter(*(name for name in KNOBS if name != "micro_batch_size"))
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def plan(
    spec: StudySpec,
    *,
    device: DeviceSpec | None = None,
    observations: Sequence[Observation] = (),
    say: Say = ignore_message,
    counted: bool = False,
) -> Plan:
    """Plan the study that `autotune run` would do with this spec, on its GPU or on `device`.

    If no configuration of the space fits, the plan is for the reserve space, which has more values
    (`setup.open_reserve`). If none of these fits either, other options are tried (`memory_savers`).
    `say` gets warnings and progress. If no formula covers the model and
    `counted` is true, a dry probe computes the baseline's memory on the meta device.

    Raises UsageError if the spec has an unknown name or an invalid value, or if the memory of the
    card or of the baseline is unknown.
    """
    device = device or planned_device(spec.gpu)
    setup = planned_setup(spec, device, say)
    limit_gib = limit_of(spec, device)
    result = plan_setup(setup, limit_gib, observations, counted=counted)
    change = least = None
    if result.best is None and result.reason not in LITTLE_KNOWN:
        change = _first_change(spec, result.leanest, device, limit_gib, observations, counted)
        least = least_memory(open_reserve(setup).task, limit_gib)
    return replace(
        result,
        change=change,
        least=least,
        what_fits=memory_tables(result),
        left_out=tuple(map(str, setup.removals)),
        warnings=setup.warnings,
    )


def _first_change(
    spec: StudySpec,
    leanest: TrainConfig,
    device: DeviceSpec,
    limit_gib: float,
    observations: Sequence[Observation],
    counted: bool,
) -> FittingChange | None:
    """Return the first change of the options with which a plan finds a configuration that fits."""
    for options, changed in memory_savers(spec, leanest):
        with suppress(UsageError):  # another option excludes this change
            setup = planned_setup(changed, device)
            result = plan_setup(setup, limit_gib, observations, counted=counted)
            if result.best is not None:
                return FittingChange(options=options, estimate=result.best)
    return None


def memory_savers(spec: StudySpec, leanest: TrainConfig) -> Iterator[tuple[str, StudySpec]]:
    """Yield changes of the options, as text and applied to `spec`, which save memory.

    A change that alters the training's result less comes first. `leanest` is the configuration of
    the space that needs the least memory.
    """
    options = ""
    is_full = leanest.method == "full"
    for space, saves in (("lora", is_full), ("qlora", is_full or leanest.quantization != "nf4")):
        if saves:
            options = f"--space {space}"
            spec = replace(spec, space=space)
            yield options, spec
    if "lora_targets" not in spec.pins:  # also allows the experts of a mixture in 4 bits
        pins = spec.pins | {"lora_targets": "attention"}
        yield f"{options} --set lora_targets=attention".strip(), replace(spec, pins=pins)


def planned_setup(spec: StudySpec, device: DeviceSpec, say: Say = ignore_message) -> Setup:
    """Set up the study that `autotune run` would do on this card. `say` gets the warnings.

    Raises UsageError in the cases of `set_up`, and if the study is for several GPUs.
    """
    setup = set_up(spec, device, say)
    numbers = setup.task.numbers_of_gpus
    if numbers != (1,):
        numbers_text = ",".join(map(str, numbers))
        raise UsageError(
            f"this plan is for one GPU, not {numbers_text}",
            remedy=f"`autotune plan --gpus {numbers_text}` plans several GPUs",
        )

    for warning in setup.warnings:
        say(f"warning: {warning}")
    return setup


def plan_setup(
    setup: Setup,
    limit_gib: float,
    observations: Sequence[Observation] = (),
    *,
    counted: bool = False,
) -> Plan:
    """Plan a study. If no configuration fits, use its reserve space, which has more values.

    Raises UsageError for the same reasons as `plan`.
    """
    result = plan_task(setup.task, limit_gib, observations, counted=counted)
    if (
        result.best is not None
        or result.reason in LITTLE_KNOWN
        or setup.reserve == setup.task.space
    ):
        return result

    reserve = plan_task(open_reserve(setup).task, limit_gib, observations, counted=counted)

    if reserve.best is None and reserve.reason not in LITTLE_KNOWN:
        return replace(result, leanest=reserve.leanest)
    reason = f"a run only fits with one of these values: {setup.reserved}; {reserve.reason}"
    return replace(reserve, from_reserve=True, reason=reason)


def plan_task(
    task: Task, limit_gib: float, observations: Sequence[Observation] = (), *, counted: bool = False
) -> Plan:
    """Find the best configuration of the task's search space with formulas.

    The winner is chosen by the same rule as in a study. `limit_gib` is the GiB that tensors may
    use. If no formula covers the model, a dry probe computes the memory of the baseline on the meta
    device. If the baseline does not fit, a dry probe also computes the memory of the configuration
    that needs the least memory. All other configurations are left out.

    Raises UsageError if the baseline's memory cannot be estimated.
    """
    baseline = _baseline(task, limit_gib, observations, counted=counted)
    if unsupported(task.model, baseline.config):
        return _counted_plan(task, limit_gib, observations, baseline)

    space = distinguishable(task.space, baseline.config)
    configs = candidates(space)
    estimates, no_speed = _fitting(task, configs, limit_gib, observations)
    result = replace(
        _baseline_plan(task, limit_gib, observations, baseline),
        num_estimated=len(configs),
        space_size=space.size(),
    )
    if estimates:
        scored = [
            Scored(config=config, score=one.tokens_per_s or 0.0, free_fraction=-one.margin)
            for config, one in estimates.items()
        ]
        winner = choose(scored, task.floors.slack)
        best = estimate(task, winner.config, limit_gib, observations)
        reason = explain_choice(winner, scored, task.floors.slack, task.space, configs)
        if no_speed:
            reason += (
                f"; {len(no_speed):,} more configurations fit, but no formula gives their speed:"
                " `autotune run` measures it"
            )
        return replace(result, best=best, reason=reason)
    if no_speed:
        return replace(result, reason=NO_SPEED, fitting=min(no_speed, key=lambda one: one.need_gib))
    return result


@functools.lru_cache(maxsize=32)
def candidates(space: SearchSpace) -> tuple[TrainConfig, ...]:
    """Return each configuration of a space once, or about MAX_CONFIGS of a larger space.

    The result is cached, because most compared cards have the same space.
    """
    # Take every n-th configuration of a large space, or a random sample if n is too large.
    stride = math.ceil(space.size() / MAX_CONFIGS)
    choices: Iterator[dict[str, Any]]
    if stride <= MAX_STRIDE:
        choices = islice(space.enumerate(), 0, None, stride)
    else:
        choices = space.sample(MAX_CONFIGS)
    return tuple(dict.fromkeys(map(space.config, choices)))


def _fitting(
    task: Task,
    configs: Sequence[TrainConfig],
    limit_gib: float,
    observations: Sequence[Observation],
) -> tuple[dict[TrainConfig, Estimate], list[Estimate]]:
    """Return the estimates of the configurations that certainly fit and whose speed is known.

    Also return the estimates of those that certainly fit but whose speed is unknown. The estimates
    have no cost, because only the winner's cost is needed. Most configurations do not fit on a
    card, so a configuration is skipped if a similar configuration that needs less memory did not
    fit.
    """
    estimates: dict[TrainConfig, Estimate] = {}
    no_speed: list[Estimate] = []
    # Maps a key of all other knobs to the smallest micro batch that does not fit with them
    too_large: dict[tuple[Any, ...], int] = {}
    # Combinations of values of the knobs in _LASTING with which the memory that stays in use
    # between steps alone exceeds the limit
    hopeless = set()
    for config in configs:
        lasting = _LASTING(config)
        if lasting in hopeless:
            continue
        key = key_without_micro_batch(task, config)
        if config.micro_batch_size > too_large.get(key, config.micro_batch_size):
            continue

        estimated = estimate(task, config, limit_gib, observations, with_cost=False)
        if estimated is None:
            continue

        if estimated.state == FITS and estimated.tokens_per_s:
            estimates[config] = estimated
        elif estimated.state == FITS:
            no_speed.append(estimated)
        elif estimated.state == OOM:
            too_large[key] = config.micro_batch_size
            if (memory := estimated.memory) and memory_state(
                memory.lasting_gib - memory.returned, limit_gib, memory.error
            ) == OOM:
                hopeless.add(lasting)

    return estimates, no_speed


def key_without_micro_batch(task: Task, config: TrainConfig) -> tuple[Any, ...]:
    """Return a key that configurations share if they differ only in the rows of a micro batch.

    Among configurations with the same key, more rows never need less memory.
    """
    # With gradient accumulation, the gradients also exist during the forward pass, so the memory
    # differs.
    accumulates = task.workload.accumulation(config) > 1
    return *_ALL_BUT_ROWS(config), accumulates


def least_memory(task: Task, limit_gib: float) -> Estimate | None:
    """Return the configuration of the space that needs the least memory, or None if unknown.

    If the memory formula covers no configuration of the space, each knob gets the value that needs
    the least memory, and a dry probe computes the memory of this configuration on the meta device.
    """
    space = task.space
    for name, value in space.leanest().items():
        if name in KNOBS and name not in DEPENDENT:
            space = space.pin(name, value)
    configs = candidates(space) if Sizes.of(task.model) else ()

    # If configurations differ only in the micro batch size, the configuration with the smallest
    # size needs the least memory.
    smallest: dict[tuple[Any, ...], TrainConfig] = {}
    for config in configs:
        key = key_without_micro_batch(task, config)
        smallest[key] = min(smallest.get(key, config), config, key=lambda one: one.micro_batch_size)

    needs = {
        config: memory
        for config in smallest.values()
        if (memory := _longest_memory(task.model, task.workload, config)) is not None
    }

    if not needs:
        return count_leanest(
            task, functools.partial(estimate, task, limit_gib=limit_gib, count=count)
        )
    return estimate(task, min(needs, key=lambda config: needs[config].peak_reserved_gib), limit_gib)


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _longest_memory(
    model: ModelSpec, workload: Workload, config: TrainConfig
) -> MemoryBreakdown | None:
    """Return the memory that the formula predicts for a configuration with the longest rows.

    The result is cached, because it is the same for all compared cards.
    """
    micro_steps = workload.run_shape(config).probe_micro_steps
    longest = workload.longest_row_config(config)
    return memory_of(model, longest, micro_steps, objective=workload.objective)


def _baseline_plan(
    task: Task, limit_gib: float, observations: Sequence[Observation], baseline: Estimate
) -> Plan:
    """Return a plan that contains only the baseline."""
    counted = baseline.memory is not None and baseline.memory.counted

    return Plan(
        task=task,
        limit_gib=limit_gib,
        best=None,
        baseline=baseline,
        reason="no configuration is certain to fit",
        num_estimated=1,
        space_size=task.space.size(),
        leanest=task.space.config(task.space.leanest()),
        how_sure=accuracy_text(
            task,
            counted=counted,
            tiled=baseline.config.tiling != "none",
            objective=task.workload.objective,
        ),
        calibrated=calibrated_parts(task.calibration, task.device),
        seen=tuple(
            observed.source for observed in observations if observed.device == task.device.name
        ),
    )


def _counted_plan(
    task: Task, limit_gib: float, observations: Sequence[Observation], baseline: Estimate
) -> Plan:
    """Return the plan of a model that no formula covers.

    A dry probe has computed the memory of `baseline`. If the model is a mixture of experts, dry
    probes also compute the memory with its fastest kernels, grouped matrix products. If neither
    configuration fits, a dry probe computes the memory of the configuration that needs the least
    memory.
    """
    result = _baseline_plan(task, limit_gib, observations, baseline)
    estimate_of = functools.partial(
        estimate, task, limit_gib=limit_gib, observations=observations, count=count
    )
    grouped = count_grouped(task, estimate_of)
    counted = [one for one in (grouped, baseline) if one is not None and one.state == FITS]
    if counted:
        best = max(counted, key=lambda one: one.tokens_per_s or 0.0)
        reason = ONLY_BASELINE if grouped is None else ONLY_GROUPED
    else:
        leanest = count_leanest(task, estimate_of)
        if leanest is None or leanest.state != FITS:
            return result
        best = leanest
        reason = ONLY_LEANEST

    if best.tokens_per_s:
        return replace(result, best=best, reason=reason)
    return replace(result, reason=NO_SPEED, fitting=best)


def _baseline(
    task: Task, limit_gib: float, observations: Sequence[Observation], *, counted: bool
) -> Estimate:
    """Return the estimate of the baseline with the largest micro batch that fits.

    If no micro batch fits, return the estimate for the largest micro batch that can be estimated.
    Raises UsageError if no formula covers the baseline and no dry probe can compute its memory.
    """
    estimate_of = functools.partial(
        estimate,
        task,
        limit_gib=limit_gib,
        observations=observations,
        count=count if counted else None,
    )
    found = largest_that_fits(task.baselines, estimate_of, counted=counted)
    if found is None:
        raise UsageError(
            no_estimate(task, task.baselines[0], counted=counted),
            remedy="`autotune run` on a GPU measures the memory, or says at once why it cannot; "
            "if the GPU is too small, add --shallow-only",
        )
    return found


def distinguishable(space: SearchSpace, baseline: TrainConfig) -> SearchSpace:
    """Return the space without the values that no formula covers.

    A knob on which no formula depends is pinned to its value in `baseline`.
    """
    for name in ("attention", "dora", "rslora", "loader_workers"):
        if (knob := space.knob(name)) and getattr(baseline, name) in knob.choices():
            space = space.pin(name, getattr(baseline, name))
    for name, value in (("quantization", "int8"), ("checkpointing", "offload")):
        if (knob := space.knob(name)) and knob.choices() != (value,):
            space, _ = space.narrow(
                name, functools.partial(operator.ne, value), "no formula covers this value"
            )
    return space


# --- tables of the row lengths and micro batches that fit


def memory_tables(study_plan: Plan) -> dict[str, tuple[Cell, ...]]:
    """Return tables by name. A table shows which combinations of row length and micro batch fit.

    The tables are for LoRA, QLoRA, full fine-tuning, and full fine-tuning in pure bf16 with 8-bit
    AdamW.
    """
    task = study_plan.task
    longest = task.model.max_seq_len or max(LENGTHS)
    lengths = [length for length in LENGTHS if length <= longest] or [longest]
    baseline = task.baselines[0]

    usual = TrainConfig(
        precision=task.device.usual_precision,
        attention=baseline.attention,
        lora_targets=baseline.lora_targets,
    )
    full = replace(usual, method="full")
    lora = replace(usual, lora_rank=baseline.lora_rank or usual.lora_rank)
    bases = [
        lora,
        replace(lora, quantization="nf4", double_quant=True),
        full,
        replace(full, precision="bf16_pure", optimizer="adamw_8bit"),
    ]

    # KTO cannot train on a micro batch of one answer.
    batches = BATCHES[1:] if task.workload.objective is Objective.KTO else BATCHES
    tables = {
        _table_name(base): tuple(table_cells(task, base, study_plan.limit_gib, batches, lengths))
        for base in bases
    }

    # Leave out a table without cells: no formula covers its configurations.
    return {name: cells for name, cells in tables.items() if cells}


def _table_name(config: TrainConfig) -> str:
    """Return the name of a table: the knobs that all its cells share."""
    kind = "full fine-tuning" if config.method == "full" else f"LoRA r{config.lora_rank}"
    if config.lora_targets != TrainConfig().lora_targets:
        kind += f" of {config.lora_targets}"
    base = f" on {config.quantization}" if config.quantization != "none" else ""
    return f"{kind}{base}, {config.precision}, {config.optimizer}"


def table_cells(
    task: Task, base: TrainConfig, limit_gib: float, batches: Sequence[int], lengths: Sequence[int]
) -> Iterator[Cell]:
    """Yield the cells of a table, for each length and each micro batch.

    All other knobs have the values that they have in `base`.
    """
    row_lengths = Lengths.constant(max(lengths))  # every row has the full length
    workload = Workload(
        lengths=row_lengths, global_batch=2 * math.lcm(*batches), objective=task.workload.objective
    )
    table_task = replace(task, workload=workload)

    for length in lengths:
        for size in batches:
            config = replace(base, micro_batch_size=size, seq_len=length)

            plain = estimate(table_task, replace(config, checkpointing="none"), limit_gib)
            recomputed = estimate(table_task, replace(config, checkpointing="full"), limit_gib)
            if plain is not None and recomputed is not None:
                yield Cell(
                    micro_batch_size=size, seq_len=length, plain=plain, recomputed=recomputed
                )
