"""Estimate one configuration on one device by formula: whether it fits, how fast it trains, what the full run costs.

The device's time is that of the reference card (`prediction/step_time`), transferred to the device
(`prediction/transfer`) and corrected by what others measured there with the same method. The host's time to issue the
work is that of a host of which nothing is known. Where there is a calibration, it replaces what is assumed of its card
and of its host.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.catalog import DeviceSpec, ModelSpec, list_devices, resolve_device, resolve_model
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.objective import Objective
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import memory_of, no_count, step_time_of
from autotune.planning.observations import Observation
from autotune.prediction.estimate import Estimate
from autotune.prediction.memory_formula import CONTEXT_GIB, ERROR, MemoryBreakdown, memory_breakdown, unsupported
from autotune.prediction.step_time import UNKNOWN_HOST, Host, StepTimeEstimate, estimate_step_time, host_of
from autotune.prediction.transfer import BETWEEN, REFERENCE, WITHIN, calibrated_parts, interval, speed_transfer
from autotune.problem.calibration import Calibration
from autotune.problem.performance import Performance
from autotune.problem.run_cost import FITS, OOM, TIGHT, run_cost
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import device_cap_gib, find_target
from autotune.problem.task import Task
from autotune.problem.workload import PROBED_MICRO_BATCHES, RunShape

ACCURACY = (
    "memory by a formula that was within 0.3 % of the 3 models on an H200 that it was made with, and 5.1 % of 11 "
    "others (LoRA, nf4, full fine-tuning); speed by another, 12 % off in the median of these"
)
NOT_MEASURED = "Nothing was measured here. Estimated"
# What `benchmarks/counts.py probes` and `benchmarks/counts.py speed` found.
COUNTED = (
    "memory by counting a training step without a GPU, 0.2 % off in the median and 0.5 % at worst for 36 kinds of "
    "model on an H100 (whole models on int8 bases with random weights held up to 9 % more); speed by its arithmetic "
    "and the bytes it moves, 1.7 % off in the median of 10 dense models on an H200 where the device sets the pace, and "
    "4.3 % of 11 others on an H100 (14 % before it was mended for these)"
)
# What `benchmarks/plan.py objectives` found.
OF_OBJECTIVES = (
    "memory by a formula that was within 0.9 % of 24 trainings for dpo, kto, reward and classification on an H200 "
    "(six models, LoRA, all recomputed); speed by another, 10 % off in the median of these and 25 % at worst"
)
CALIBRATED_METHOD = ("lora", "none")  # method and quantisation of the training in a calibration
MAX_DEVIATIONS = 6.0  # an observation further from the expected speed than so many standard deviations is ignored


def how_known(
    calibration: Calibration | None,
    device: DeviceSpec,
    *,
    counted: bool = False,
    objective: Objective = Objective.SFT,
) -> str:
    """What estimates for a card rest on, in a sentence without its stop; `counted` are those of a dry probe."""
    parts = calibrated_parts(calibration, device)
    how = how_sure(counted=counted, objective=objective)
    return f"{f'Estimated, {parts}' if parts else NOT_MEASURED}: {how}"


def how_sure(*, counted: bool, objective: Objective) -> str:
    """Where memory and speed come from, and how far they were off."""
    if counted:
        return COUNTED
    return ACCURACY if objective is Objective.SFT else OF_OBJECTIVES


def planned_device(name: str) -> DeviceSpec:
    """The catalogue's device of this name; `auto` means the GPU of this machine. Raises UsageError if there is none."""
    if name.strip().lower() != "auto":
        return resolve_device(name)
    try:
        return find_target(name).device
    except EnvironmentProblem:
        raise UsageError("which GPU? There is none here", remedy="name one: --gpu a10 (`autotune gpus`)") from None


def device_limit_gib(device: DeviceSpec, headroom: float, memory_gib: float | None = None) -> float:
    """GiB that tensors may take on the device: its memory without the reserved share and without a CUDA context.

    `memory_gib` can only lower the memory of the device. Raises UsageError if that is not known.
    """
    return max(memory_limit_gib(device_cap_gib(device, memory_gib), headroom, taken_gib=CONTEXT_GIB), 0.01)


def limit_of(spec: StudySpec, device: DeviceSpec) -> float:
    """`device_limit_gib` as the spec asks for it."""
    return device_limit_gib(device, spec.headroom, spec.memory_gib)


def smallest_card(fits: Callable[[DeviceSpec], bool]) -> DeviceSpec | None:
    """The card of known memory with the least of it for which `fits` holds."""
    cards = sorted((card for card in list_devices() if card.memory_gib), key=lambda card: card.memory_gib or 0.0)
    return next(filter(fits, cards), None)


def memory_state(need_gib: float, limit_gib: float, error: float = ERROR) -> str:
    """FITS, OOM, or TIGHT: the need is nearer to the limit than its relative error, by default the formula's."""
    if need_gib * (1 - error) > limit_gib:
        return OOM
    return TIGHT if need_gib * (1 + error) > limit_gib else FITS


def memory_estimate(task: Task, config: TrainConfig, memory: MemoryBreakdown, limit_gib: float) -> Estimate:
    """Whether a configuration that needs this memory fits the task's device; without a speed."""
    need = memory.peak_reserved_gib
    return Estimate(
        device=task.device,
        config=config,
        state=memory_state(need, limit_gib, memory.error),
        need_gib=need,
        limit_gib=limit_gib,
        price=task.price,
        memory=memory,
    )


def estimate(
    task: Task,
    config: TrainConfig,
    limit_gib: float,
    observations: Sequence[Observation] = (),
    *,
    counted: bool = False,
) -> Estimate | None:
    """Estimate one configuration of a task on the task's device; None where no formula covers it.

    With `counted`, a dry probe counts what no formula covers, in seconds.
    """
    memory = task_memory(task, config, counted=counted)
    if memory is None:
        return None
    without_speed = memory_estimate(task, config, memory, limit_gib)
    if without_speed.state not in (FITS, TIGHT):
        return without_speed
    time_by = step_time_of if counted else _step_time_by_formula
    shape, objective = task.workload.run_shape(config), task.workload.objective
    mean, host = task.workload.at_mean(config), host_of(task.calibration)
    step_time = time_by(task.model, mean, shape.probe_micro_steps, host, objective)
    return with_speed(without_speed, step_time, shape, observations, calibration=task.calibration)


def task_memory(task: Task, config: TrainConfig, *, counted: bool = False) -> MemoryBreakdown | None:
    """What a configuration of a task needs with the longest rows that occur; None where no formula covers it.

    With `counted`, a dry probe counts what no formula covers, in seconds.
    """
    workload = task.workload
    memory_by = memory_of if counted else memory_breakdown
    micro_steps = min(workload.accumulation(config), PROBED_MICRO_BATCHES)
    return memory_by(task.model, workload.at_longest(config), micro_steps, objective=workload.objective)


def _step_time_by_formula(
    model: ModelSpec, config: TrainConfig, micro_steps: int, host: Host, objective: Objective
) -> StepTimeEstimate | None:
    return estimate_step_time(model, config, host, objective)


def no_estimate(task: Task, config: TrainConfig, *, counted: bool) -> str:
    """Why `estimate` knows nothing of a configuration."""
    covers = f"there is no formula for {unsupported(task.model, config)}"
    if not counted:
        return covers
    workload = task.workload
    steps = workload.run_shape(config).probe_micro_steps
    reason = no_count(task.model, workload.at_longest(config), steps, workload.objective)
    return f"{covers}, and what it needs cannot be counted: {reason}"


def with_speed(
    estimated: Estimate,
    step_time: StepTimeEstimate | None,
    shape: RunShape,
    observations: Sequence[Observation] = (),
    *,
    num_steps: int | None = None,
    calibration: Calibration | None = None,
) -> Estimate:
    """Add speed and cost to an estimate of memory; unchanged where it does not fit, or no formula knows the speed.

    `step_time` is that of the reference card with the host in question. `num_steps` is given for a run that ends after
    so many steps.
    """
    device, config = estimated.device, estimated.config
    if estimated.state not in (FITS, TIGHT) or step_time is None:
        return estimated
    reference = resolve_device(REFERENCE)
    transfer = observed_transfer(reference, device, config, observations, calibration, side=step_time.side)
    if transfer is None:
        return estimated
    here = step_time.on(transfer)
    step_s = shape.accumulation * here.micro_s + here.rest_s
    timed = with_step_time(estimated, shape, step_s, interval(step_s, here.error), num_steps=num_steps)
    return replace(timed, num_observations=transfer.basis, calibration=calibration)


def with_step_time(
    estimated: Estimate,
    shape: RunShape,
    step_s: float,
    interval_s: tuple[float, float],
    *,
    num_steps: int | None = None,
) -> Estimate:
    """Add the speed and cost of a run of this shape whose optimizer steps take so many seconds."""
    shortest_s, longest_s = interval_s
    speed = Performance.of_steps(shape, step_s, spread=(shortest_s / step_s - 1, longest_s / step_s - 1))
    gpus, price, power_w = shape.world_size, estimated.price, estimated.device.tdp_w
    price = price and price.of_gpus(gpus)
    cost = run_cost(shape, speed, price, None if power_w is None else gpus * power_w, num_steps=num_steps)
    tokens_per_s = speed.tokens_per_second / gpus
    return replace(
        estimated,
        tokens_per_s=tokens_per_s,
        interval=(tokens_per_s * step_s / longest_s, tokens_per_s * step_s / shortest_s),
        samples_per_s=speed.samples_per_second / gpus,
        cost=replace(cost, evidence=Evidence.ESTIMATED),
    )


def measured_ratios(
    observations: Sequence[Observation], device: DeviceSpec, method: str, quantization: str
) -> list[float]:
    """How many times as fast as the formula expects others measured this device to be.

    Only what was measured in full, by transformers' Trainer, with the same method and base counts.
    """
    ratios = []
    for observed in observations:
        same = (observed.config.method, observed.config.quantization) == (method, quantization)
        complete = observed.evidence is Evidence.MEASURED and observed.trainer == "transformers"
        if observed.device != device.name or observed.model is None or not same or not complete:
            continue
        ratio = _ratio_to_formula(observed)
        # A measurement further off than any pair of cards in the published data is a mistake.
        if ratio and abs(math.log(ratio)) <= MAX_DEVIATIONS * math.hypot(BETWEEN, WITHIN):
            ratios.append(ratio)
    return ratios


@functools.cache
def _ratio_to_formula(observed: Observation) -> float | None:
    config = replace(observed.config, seq_len=round(observed.tokens_per_row or observed.config.seq_len))
    step_time = estimate_step_time(resolve_model(observed.model or ""), config, UNKNOWN_HOST)
    precision = "fp8" if config.quantization == "fp8" else "bf16"
    transfer = speed_transfer(resolve_device(REFERENCE), resolve_device(observed.device), precision=precision)
    if step_time is None or transfer is None:
        return None
    step_time = step_time.on(transfer)
    took_s = observed.accumulation * config.tokens / observed.tokens_per_s
    if 2 * observed.accumulation * step_time.host_s > took_s:
        return None  # where the host may have set the pace, it says little of the card
    return (observed.accumulation * step_time.device_s + step_time.rest_s) / took_s


def observed_transfer(
    source: DeviceSpec,
    target: DeviceSpec,
    config: TrainConfig,
    observations: Sequence[Observation],
    calibration: Calibration | None = None,
    *,
    side: float | None = None,
) -> SpeedTransfer | None:
    """How a speed transfers between two cards, corrected by what was measured on the target with this method and base.

    Either card may be calibrated. None where a rate of either is not known.
    """
    kind = config.method, config.quantization
    return speed_transfer(
        source,
        target,
        measured_ratios(observations, target, *kind),
        precision="fp8" if config.quantization == "fp8" else "bf16",
        calibration=calibration,
        side=side,
        alike=kind == CALIBRATED_METHOD,
    )


def corrected_by_observations(task: Task, observations: Sequence[Observation]) -> Task:
    """The task, its projection from another card corrected by what was measured on the task's own device."""
    if task.measured_on is None:
        return task
    transfer = observed_transfer(task.measured_on, task.device, task.baselines[0], observations, task.calibration)
    if transfer is None or not transfer.basis:
        return task
    return replace(task, carried=replace(transfer, host=task.carried.host if task.carried else None))
