"""Predicts with formulas whether a configuration fits a device, and its speed and cost there.

The step time on the device is the reference card's step time (`prediction/step_time`), converted to
the device (`prediction/transfer`). Other users' measurements of the same method on the device
correct the converted time. Without a calibration, the estimate assumes the CPU time that a typical
host takes to launch kernels. A calibration (`autotune calibrate`) replaces the assumptions about
card and host by measurements.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.catalog import DeviceSpec, list_devices, resolve_device
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.objective import Objective
from autotune.core.parallelism import ZERO, Parallelism
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import no_count
from autotune.prediction.memory_formula import CONTEXT_GIB, MemoryBreakdown, unsupported
from autotune.prediction.observed_speed import Observation, observed_transfer
from autotune.prediction.transfer import REFERENCE, is_measured_kind, replaces_data_sheet
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import device_cap_gib, find_target
from autotune.problem.task import Task

ACCURACY = (
    "memory by a formula that was within 0.3 % for the 3 models on an H200 that it was fitted to, "
    "and 5.1 % for 11 others (LoRA, nf4, full fine-tuning). The speed comes from another formula, "
    "5 % off in the median of these 11 models"
)
# Results of `benchmarks/counts.py probes` and `benchmarks/counts.py speed`
COUNTED = (
    "memory by counting a training step without a GPU, 0.2 % off in the median and 0.5 % at worst "
    "for 36 model families on an H100. Models in int8 with random weights needed up to 9 % more. "
    "The speed comes from the step's FLOPs and memory traffic: 1.7 % off in the median of 10 dense "
    "models on an H200 in GPU-bound steps. For 11 others on an H100, it is 4.3 % off (14 % before "
    "the formula was adapted to these 11)"
)
# Results of `benchmarks/longest.py`
TILED = (
    "With layers in tiles of tokens, the memory includes 3 % for the allocator, which took 2.1 % "
    "in one step on an H100 and over 3.7 % in another"
)
# Results of `benchmarks/plan.py objectives`
OF_OBJECTIVES = (
    "memory by a formula that was within 0.9 % for 24 trainings for dpo, kto, reward and "
    "classification on an H200 (six models, LoRA, every layer recomputed). The speed comes from "
    "another formula, 5 % off in the median of these trainings and 13 % at worst"
)

UPDATE = "memory of the update by the formula for dpo, which was within 0.9 % for 24 trainings"
COUNTED_UPDATE = "memory of the update by counting a training step for sft without a GPU"
OF_ROLLOUTS = (
    "the memory of the engine by constants from Qwen3-4B on an H100 and an H200, so the numbers "
    "are ranges"
)
RANK_ACCURACY = (
    "memory by formulas. Under FSDP2 they are off by at most 2.7 % for the four measured ranks and "
    "2.1 % for the 192 ranks that dry probes computed. Under DDP they are off by at most 1.6 % for "
    "six measured ranks, and under ZeRO by at most 1.5 % for eight. The speed on several GPUs "
    "comes from formulas that few measurements have checked"
)
# `benchmarks/counts.py mixture_ranks`
COUNTED_RANKS = (
    "memory by counting a training step of one GPU. Under FSDP2, the result for several GPUs was "
    "at most 9.7 % off for 92 ranks of three mixtures of experts that dry probes computed. It was "
    "up to 9.7 % too low in full fine-tuning with every layer recomputed, and at most 2.1 % too "
    "low otherwise. The speed on several GPUs comes from formulas that few measurements have "
    "checked"
)
# `benchmarks/sharded_nf4.py offload`. Other setups were compared only with dry probes.
UNCHECKED = (
    "With tensors in the host's memory, the memory of four ranks on two GPUs was off by at most "
    "1.6 %; their speed, the memory of other shards of a 4-bit base, and the memory of mixtures of "
    "experts under ZeRO are unchecked"
)
# The two bounds follow from the routing alone: one GPU gets at least the mean number of tokens.
DIVIDED_EXPERTS = (
    "the memory is a projection by counting a training step of one GPU with its part of the "
    "experts, which no GPU has checked. The lower end spreads the tokens evenly over the GPUs, and "
    "the upper end sends every token to this GPU. The time of the exchange of tokens is unknown"
)


# How a speed on an H200 is converted to the GPU, by what is known of that GPU. Results of
# `benchmarks/transfer.py compare` and `benchmarks/transfer.py pairs`
OF_H100 = (
    "Speeds on an H100 follow from those on an H200: 4.3 % off in the median of GPU-bound steps of "
    "two models"
)
OF_MEASURED_KIND = (
    "The speed on {gpu} follows from an H200's by their data sheets: 14 % off on average for "
    "574 published pairs of GPUs, and 8 % with a measurement on the GPU"
)
OF_OTHER_KIND = (
    "No published speed checks the conversion to {gpu}, so the range of the speed is wider"
)
LISTED = 4  # names of GPUs in a sentence; more are counted


def accuracy_text(
    task: Task | None = None,
    *,
    counted: bool = False,
    tiled: bool = False,
    objective: Objective = Objective.SFT,
    num_gpus: int = 1,
    link_by_rule: bool = False,
    unchecked: bool = False,
) -> str:
    """Say how memory and speed are estimated and how large the errors are.

    The text differs between one GPU and several GPUs, between formulas and counts, and between
    kinds of GPU; without `task`, it does not name the error of the GPU. With `link_by_rule`, the
    bandwidth between the GPUs was not measured. For `unchecked`, see `is_unchecked`.
    """
    if objective.generates:
        return f"{COUNTED_UPDATE if counted else UPDATE}; {OF_ROLLOUTS}"
    of_one_gpu = ACCURACY if objective is Objective.SFT else OF_OBJECTIVES
    text = COUNTED if counted else of_one_gpu
    if tiled:
        text = f"{text}. {TILED}"
    if num_gpus > 1 or unchecked:
        text = rank_accuracy(counted=counted, link_by_rule=link_by_rule, unchecked=unchecked)
    conversion = _conversion_accuracy(task) if task else None
    return f"{text}. {conversion.format(gpu='this GPU')}" if conversion else text


def conversions_accuracy(tasks: Sequence[Task]) -> str:
    """Say how accurate the conversions of speeds to the GPUs of these tasks are.

    Each kind of GPU has a sentence that names its GPUs. The result is "" if no speed is converted.
    """
    gpus: dict[str, list[str]] = {}
    for task in tasks:
        names = gpus.setdefault(_conversion_accuracy(task) or "", [])
        if task.device.name not in names:
            names.append(task.device.name)
    gpus.pop("", None)
    return ". ".join(text.format(gpu=_listed(names)) for text, names in gpus.items())


def _listed(names: Sequence[str]) -> str:
    """Return the names as part of a sentence, with the number of those beyond LISTED."""
    shown, rest = list(names), len(names) - LISTED
    if rest > 1:
        shown = [*names[:LISTED], f"{rest} other GPUs"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _conversion_accuracy(task: Task) -> str | None:
    """Say how accurate the conversion of speeds to the task's GPU is; "{gpu}" stands for its name.

    The result is None for the GPU on which the formulas were fitted, and for a calibrated one.
    """
    device = task.device
    if device.name == REFERENCE or replaces_data_sheet(task.calibration, device):
        return None
    if device.name == "h100-sxm":
        return OF_H100
    return OF_MEASURED_KIND if is_measured_kind(device) else OF_OTHER_KIND


def rank_accuracy(*, counted: bool, link_by_rule: bool, unchecked: bool) -> str:
    """Say how memory and speed on several GPUs are estimated and how large the errors are."""
    sentences = [COUNTED_RANKS if counted else RANK_ACCURACY]
    if unchecked:
        sentences.append(UNCHECKED)
    if link_by_rule:
        sentences.append("The bandwidth between the GPUs is from the data sheet, not measured")
    return ". ".join(sentences)


def is_unchecked(
    config: TrainConfig, parallelism: Parallelism, memory: MemoryBreakdown | None
) -> bool:
    """Return whether few or no measurements check the formulas for this memory (UNCHECKED)."""
    if memory is None or parallelism.strategy == "none":
        return False
    in_4_bits = config.quantization == "nf4" and parallelism.shards
    under_zero = memory.counted and parallelism.strategy in ZERO
    return under_zero or in_4_bits or memory.host > 0


def planned_device(name: str) -> DeviceSpec:
    """Return the device with this name; `auto` means this machine's GPU.

    Raises UsageError for an unknown name, and for `auto` if this machine has no GPU.
    """
    if name.strip().lower() != "auto":
        return resolve_device(name)
    try:
        return find_target(name).device
    except EnvironmentProblem:
        raise UsageError(
            "no GPU is given, and this machine has none",
            remedy="name one: --gpu a10 (`autotune gpus`)",
        ) from None


def device_limit_gib(device: DeviceSpec, headroom: float, memory_gib: float | None = None) -> float:
    """Return the GiB that tensors may use: the memory minus the headroom and a CUDA context.

    `memory_gib` caps the device's memory; a value above the device's own memory has no effect.
    Raises UsageError if the memory is unknown.
    """
    return max(
        memory_limit_gib(device_cap_gib(device, memory_gib), headroom, taken_gib=CONTEXT_GIB), 0.01
    )


def limit_of(spec: StudySpec, device: DeviceSpec) -> float:
    """Return `device_limit_gib` for the headroom and the `memory_gib` that the spec sets."""
    return device_limit_gib(device, spec.headroom, spec.memory_gib)


def smallest_card(fits: Callable[[DeviceSpec], bool]) -> DeviceSpec | None:
    """Return the smallest card, by memory, that `fits` accepts, or None if it accepts no card."""
    cards = sorted(
        (card for card in list_devices() if card.memory_gib),
        key=lambda card: card.memory_gib or 0.0,
    )
    return next(filter(fits, cards), None)


def no_estimate(task: Task, config: TrainConfig, *, counted: bool) -> str:
    """Return the reason that `estimate` returns None for a configuration."""
    covers = f"there is no formula for {unsupported(task.model, config)}"
    if not counted or config.num_gpus > 1:
        return covers

    workload = task.workload
    steps = workload.run_shape(config).probe_micro_steps
    reason = no_count(task.model, workload.longest_row_config(config), steps, workload.objective)
    return f"{covers}, and the run's memory cannot be counted: {reason}"


def corrected_by_observations(task: Task, observations: Sequence[Observation]) -> Task:
    """Return the task with its speed transfer corrected by measured speeds on the task's device.

    The speed transfer converts a speed on the card `task.measured_on` to a speed on the task's
    device.
    """
    if task.measured_on is None:
        return task

    transfer = observed_transfer(
        task.measured_on, task.device, task.baselines[0], observations, task.calibration
    )
    if transfer is None or not transfer.basis:
        return task
    return replace(
        task, carried=replace(transfer, host=task.carried.host if task.carried else None)
    )
