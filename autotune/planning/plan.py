"""Plan a study by formula: the best configuration of its search space on a card, before anything is measured.

Every number is an estimate (`device_estimate`). The rule that chooses is that of a measured study.
"""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from autotune.catalog import DeviceSpec
from autotune.core.errors import UsageError
from autotune.core.knobs import KNOBS
from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import count
from autotune.planning.device_estimate import how_sure, limit_of, no_estimate, planned_device
from autotune.planning.observations import Say, silent
from autotune.prediction.estimate import Estimate, estimate, memory_state
from autotune.prediction.memory_formula import unsupported
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
    ONLY_LEANEST,
    Cell,
    Plan,
)
from autotune.study.ranking import Scored, choose, why

MAX_CONFIGS = 10_000  # estimated in about two seconds
MAX_STRIDE = 300  # between two configurations of a large space: a longer walk takes longer than the estimates
BATCHES = (1, 2, 4, 8, 16, 32)
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
    say: Say = silent,
    counted: bool = False,
) -> Plan:
    """Plan the study that `autotune run` would do with this spec, on its GPU or on `device`.

    The reserve of the space is opened where nothing else fits. `say` gets warnings, progress, and what is left out of
    the space and why. With `counted`, a dry probe counts what the baseline of a model without a formula needs. Raises
    UsageError if a part of the spec is unknown or impossible, or nothing is known of model and card.
    """
    device = device or planned_device(spec.gpu)
    setup = planned_setup(spec, device, say)
    say_removals(setup, say)
    made = plan_setup(setup, limit_of(spec, device), observations, counted=counted)
    return replace(made, what_fits=memory_tables(made))


def say_removals(setup: Setup, say: Say) -> None:
    """Say what is left out of the space, and why."""
    for removal in setup.removals:
        say(f"left out: {removal}")


def planned_setup(spec: StudySpec, device: DeviceSpec, say: Say = silent) -> Setup:
    """The study that `autotune run` would do on this card; its warnings go to `say`. Raises UsageError."""
    setup = set_up(spec, device, say)
    numbers = setup.task.numbers_of_gpus
    if numbers != (1,):
        listed = ",".join(map(str, numbers))
        raise UsageError(
            f"this plans one GPU, not {listed}",
            remedy=f"`autotune plan --gpus {listed}` plans several",
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
    """The plan of a study that is set up, or of its reserve where nothing else fits. Raises UsageError."""
    made = plan_task(setup.task, limit_gib, observations, counted=counted)
    if made.best is not None or made.reason in LITTLE_KNOWN or setup.reserve == setup.task.space:
        return made
    reserve = plan_task(open_reserve(setup).task, limit_gib, observations, counted=counted)
    if reserve.best is None and reserve.reason not in LITTLE_KNOWN:
        return replace(made, leanest=reserve.leanest)
    reason = f"nothing fits without one of these: {setup.reserved}; {reserve.reason}"
    return replace(reserve, from_reserve=True, reason=reason)


def plan_task(
    task: Task, limit_gib: float, observations: Sequence[Observation] = (), *, counted: bool = False
) -> Plan:
    """Find the best configuration of the task's space by formula, under the rule that chooses a winner.

    `limit_gib` is what tensors may take. Without a formula only the baseline is counted; where that does not fit, what
    needs the least memory. Raises UsageError if no formula covers the model or the card.
    """
    baseline = _baseline(task, limit_gib, observations, counted=counted)
    if unsupported(task.model, baseline.config):
        return _counted_plan(task, limit_gib, observations, baseline)
    space = distinguishable(task.space, baseline.config)
    configs = candidates(space)
    estimates, no_speed = _fitting(task, configs, limit_gib, observations)
    made = replace(
        _plan_of(task, limit_gib, observations, baseline),
        num_estimated=len(configs),
        space_size=space.size(),
    )
    if estimates:
        scored = [
            Scored(config=config, score=one.tokens_per_s or 0.0, free_fraction=-one.margin)
            for config, one in estimates.items()
        ]
        winner = choose(scored, task.floors.slack)
        reason = why(winner, scored, task.floors.slack, task.space, configs)
        if no_speed:
            reason += (
                f"; {no_speed:,} more fit whose speed no formula knows: `autotune run` measures it"
            )
        return replace(made, best=estimates[winner.config], reason=reason)
    return replace(made, reason=NO_SPEED) if no_speed else made


@functools.lru_cache(maxsize=32)
def candidates(space: SearchSpace) -> tuple[TrainConfig, ...]:
    """Each configuration of a space once, or MAX_CONFIGS of them. Cards that are compared mostly share their space."""
    stride = math.ceil(
        space.size() / MAX_CONFIGS
    )  # evenly spread over a space that is too large to estimate all
    choices = (
        islice(space.enumerate(), 0, None, stride)
        if stride <= MAX_STRIDE
        else space.sample(MAX_CONFIGS)
    )
    return tuple(dict.fromkeys(map(space.config, choices)))


def _fitting(
    task: Task,
    configs: Sequence[TrainConfig],
    limit_gib: float,
    observations: Sequence[Observation],
) -> tuple[dict[TrainConfig, Estimate], int]:
    """Those that surely fit and whose speed is known, and the number of those whose speed is not.

    Most of a card's do not fit, and are left out by what others need.
    """
    found: dict[TrainConfig, Estimate] = {}
    no_speed = 0
    too_large: dict[
        tuple[Any, ...], int
    ] = {}  # the smallest micro batch without room, of configurations else alike
    hopeless = set()  # by what decides the memory between steps, which alone has no room
    for config in configs:
        alike, lasting = alike_but_for_rows(task, config), _LASTING(config)
        if lasting in hopeless or config.micro_batch_size > too_large.get(
            alike, config.micro_batch_size
        ):
            continue
        estimated = estimate(task, config, limit_gib, observations)
        if estimated is None:
            continue
        if estimated.state == FITS and estimated.tokens_per_s:
            found[config] = estimated
        elif estimated.state == FITS:
            no_speed += 1
        elif estimated.state == OOM:
            too_large[alike] = config.micro_batch_size
            if (memory := estimated.memory) and memory_state(
                memory.lasting_gib, limit_gib, memory.error
            ) == OOM:
                hopeless.add(lasting)
    return found, no_speed


def alike_but_for_rows(task: Task, config: TrainConfig) -> tuple[Any, ...]:
    """What two configurations have in common where the one with more rows in a micro batch needs no less memory."""
    return *_ALL_BUT_ROWS(config), task.workload.accumulation(
        config
    ) > 1  # gradients then wait in the forward pass


def _plan_of(
    task: Task, limit_gib: float, observations: Sequence[Observation], baseline: Estimate
) -> Plan:
    """A plan that knows the baseline alone."""
    counted = baseline.memory is not None and baseline.memory.counted
    return Plan(
        task=task,
        limit_gib=limit_gib,
        best=None,
        baseline=baseline,
        reason="nothing fits beyond doubt",
        num_estimated=1,
        space_size=task.space.size(),
        leanest=task.space.config(task.space.leanest()),
        how_sure=how_sure(counted=counted, objective=task.workload.objective),
        calibrated=calibrated_parts(task.calibration, task.device),
        seen=tuple(
            observed.source for observed in observations if observed.device == task.device.name
        ),
    )


def _counted_plan(
    task: Task, limit_gib: float, observations: Sequence[Observation], baseline: Estimate
) -> Plan:
    """The plan where no formula covers the baseline, which was counted."""
    made = _plan_of(task, limit_gib, observations, baseline)
    found, reason = baseline, ONLY_BASELINE
    if baseline.state != FITS:
        leanest = count_leanest(task, limit_gib, observations)
        if leanest is None or leanest.state != FITS:
            return made
        found, reason = leanest, ONLY_LEANEST
    return (
        replace(made, best=found, reason=reason)
        if found.tokens_per_s
        else replace(made, reason=NO_SPEED)
    )


def count_leanest(
    task: Task, limit_gib: float, observations: Sequence[Observation] = ()
) -> Estimate | None:
    """Count what the configuration that needs the least memory needs; None where it cannot be counted."""
    spaces = [task.space]
    if "full" in task.space.choices("loss"):
        spaces.append(
            task.space.pin("loss", "full")
        )  # the logits of some heads cannot be made in chunks
    configs = dict.fromkeys(space.config(space.leanest()) for space in spaces)
    estimates = (estimate(task, config, limit_gib, observations, count=count) for config in configs)
    return next((found for found in estimates if found is not None), None)


def _baseline(
    task: Task, limit_gib: float, observations: Sequence[Observation], *, counted: bool
) -> Estimate:
    """What guides give, with the largest micro batch that fits, else with their own. Raises UsageError."""
    first = None
    for number, config in enumerate(task.baselines):
        estimated = estimate(
            task, config, limit_gib, observations, count=count if counted else None
        )
        if estimated is not None and estimated.state == FITS:
            return estimated
        first = first or estimated
        if (
            counted and number == 0
        ):  # a count takes seconds, and where the smallest does not fit, none does
            smallest = estimate(task, task.baselines[-1], limit_gib, observations, count=count)
            first = first or smallest
            if smallest is not None and smallest.state != FITS:
                break
    if first is None:
        raise UsageError(
            no_estimate(task, task.baselines[0], counted=counted),
            remedy="`autotune run` on a GPU probes it, or says at once why not; --shallow-only if the GPU is too small",
        )
    return first


def distinguishable(space: SearchSpace, baseline: TrainConfig) -> SearchSpace:
    """The space without values that no formula covers; knobs that no formula depends on are as in `baseline`."""
    for name in ("attention", "dora", "rslora", "loader_workers"):
        if (knob := space.knob(name)) and getattr(baseline, name) in knob.choices():
            space = space.pin(name, getattr(baseline, name))
    for name, value in (("quantization", "int8"), ("checkpointing", "offload")):
        if (knob := space.knob(name)) and knob.choices() != (value,):
            space, _ = space.narrow(
                name, functools.partial(operator.ne, value), "there is no formula for it"
            )
    return space


# --- tables of what fits


def memory_tables(made: Plan) -> dict[str, tuple[Cell, ...]]:
    """What fits by length and micro batch, for LoRA, QLoRA and full fine-tuning as guides give them, by their name."""
    task = made.task
    longest = task.model.max_seq_len or max(LENGTHS)
    lengths = [length for length in LENGTHS if length <= longest] or [longest]
    precision, baseline = task.device.usual_precision, task.baselines[0]
    usual = TrainConfig(
        precision=precision, attention=baseline.attention, lora_targets=baseline.lora_targets
    )
    full, lora = (
        replace(usual, method="full"),
        replace(usual, lora_rank=baseline.lora_rank or usual.lora_rank),
    )
    bases = [
        lora,
        replace(lora, quantization="nf4", double_quant=True),
        full,
        replace(full, precision="bf16_pure", optimizer="adamw_8bit"),
    ]
    batches = (
        BATCHES[1:] if task.workload.objective is Objective.KTO else BATCHES
    )  # which one answer cannot train
    tables = {
        _table_name(base): tuple(table_cells(task, base, made.limit_gib, batches, lengths))
        for base in bases
    }
    return {
        name: cells for name, cells in tables.items() if cells
    }  # no formula covers those of some models


def _table_name(config: TrainConfig) -> str:
    """What all cells of a table have in common."""
    kind = "full fine-tuning" if config.method == "full" else f"LoRA r{config.lora_rank}"
    if config.lora_targets != TrainConfig().lora_targets:
        kind += f" of {config.lora_targets}"
    base = f" on {config.quantization}" if config.quantization != "none" else ""
    return f"{kind}{base}, {config.precision}, {config.optimizer}"


def table_cells(
    task: Task, base: TrainConfig, limit_gib: float, batches: Sequence[int], lengths: Sequence[int]
) -> Iterator[Cell]:
    """The cells of a table, row by row of the lengths; all other knobs are as in `base`."""
    full = Lengths.constant(max(lengths))  # every row is as long as may be
    workload = Workload(
        lengths=full, global_batch=2 * math.lcm(*batches), objective=task.workload.objective
    )
    divisible = replace(task, workload=workload)
    for length in lengths:
        for size in batches:
            config = replace(base, micro_batch_size=size, seq_len=length)
            plain = estimate(divisible, replace(config, checkpointing="none"), limit_gib)
            recomputed = estimate(divisible, replace(config, checkpointing="full"), limit_gib)
            if plain is not None and recomputed is not None:
                yield Cell(
                    micro_batch_size=size, seq_len=length, plain=plain, recomputed=recomputed
                )
