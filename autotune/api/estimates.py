"""Estimates from Python.

`plan`, `compare` and `check` need no GPU. `longest` also runs real steps if this machine has the
GPU. `calibrate` measures this machine.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from autotune.core.errors import UsageError
from autotune.core.memory_budget import HEADROOM
from autotune.core.notebook import progress_or_default
from autotune.core.objective import Objective
from autotune.problem.search_space import SearchSpace
from autotune.problem.study_spec import StudySpec

if TYPE_CHECKING:
    from autotune.planning.longest import Longest
    from autotune.problem.calibration import Calibration
    from autotune.report.values.check import CheckReport
    from autotune.report.values.comparison import Budget, Comparison, Owned
    from autotune.report.values.longest import LongestRow
    from autotune.report.values.plan import Plan
    from autotune.report.values.rollouts import RolloutPlan
    from autotune.study.scaling import GpuPlan


@overload
def plan(
    model: str,
    *,
    objective: Literal["grpo"],
    gpu: str = ...,
    space: str | SearchSpace | None = ...,
    **options: Any,
) -> "RolloutPlan": ...


@overload
def plan(
    model: str,
    *,
    gpu: str = ...,
    space: str | SearchSpace | None = ...,
    gpus: None = ...,
    within: None = ...,
    **options: Any,
) -> "Plan": ...


@overload
def plan(
    model: str,
    *,
    gpu: str = ...,
    space: str | SearchSpace | None = ...,
    gpus: int | Sequence[int],
    nodes: int | Sequence[int] | None = ...,
    network: str | float | None = ...,
    within: str | float | None = ...,
    **options: Any,
) -> "GpuPlan": ...


def plan(
    model: str,
    *,
    gpu: str = "auto",
    space: str | SearchSpace | None = None,
    gpus: int | Sequence[int] | None = None,
    nodes: int | Sequence[int] | None = None,
    network: str | float | None = None,
    within: str | float | None = None,
    **options: Any,
) -> "Plan | GpuPlan | RolloutPlan":
    """Estimate memory, speed and cost on a GPU by formula; needs no GPU.

    If no formula covers the model, a dry probe (a step on the meta device) counts memory and FLOPs
    within seconds. With `gpus`, such as [1, 2, 4, 8], the result is a GpuPlan for these GPU counts
    on one host. `within` is the deadline of the run: "6h", or a number of hours. `nodes` lists
    numbers of hosts. `gpus` then counts the GPUs of each host. `network` is the speed of the link
    between hosts: the GB/s that leave a host, or a name such as "ethernet-100". For the objective
    grpo, the result is a RolloutPlan: the layout of training and vLLM, without a speed. `options`
    are the options of `autotune plan`, with underscores. Raises AutotuneError.
    """
    from autotune.planning import plan as planning
    from autotune.planning.observations import known_observations

    spec = StudySpec(model=model, gpu=gpu, space=space, **options)
    if Objective(spec.objective).generates:
        from autotune.planning.rollout_plan import plan_rollouts

        return plan_rollouts(spec)

    observations = known_observations()
    if gpus is None and nodes is None and network is None and within is None:
        return planning.plan(spec, observations=observations, counted=True)

    from autotune.planning.several_gpus import plan_spec

    return plan_spec(
        spec, gpus, nodes=nodes, network=network, within=within, observations=observations
    )


def compare(
    models: str | Sequence[str],
    gpus: Sequence[str] = (),
    *,
    methods: Sequence[str] = (),
    budget: "Budget | None" = None,
    owned: "Owned | None" = None,
    **options: Any,
) -> "Comparison":
    """Compare GPUs by formula for the same run of each model; needs no GPU.

    Without `gpus`, all GPUs of the catalogue with a price are compared.
    `options` are the options of `autotune plan`, with underscores. Raises AutotuneError.
    """
    from autotune.planning import compare as planning
    from autotune.planning.observations import known_observations

    names = [models] if isinstance(models, str) else models
    specs = [StudySpec(model=name, **options) for name in names]
    observations = known_observations()
    return planning.compare(
        specs, gpus=gpus, methods=methods, budget=budget, owned=owned, observations=observations
    )


def check(file: str | Path, **options: Any) -> "CheckReport":
    """Check by formula whether the run in a TRL, Axolotl or LLaMA-Factory YAML file fits a GPU.

    The check needs no GPU. `options` are the options of `autotune check`, with underscores. Raises
    AutotuneError.
    """
    from autotune.planning import run_check as planning
    from autotune.planning.observations import known_observations

    return planning.check(Path(file), options, observations=known_observations())


def longest(
    model: str,
    gpu: str = "auto",
    *,
    methods: Sequence[str] = (),
    rank: int = 16,
    knobs: Mapping[str, Any] | None = None,
    memory_gib: float | None = None,
    headroom: float = HEADROOM,
    host_memory_gib: float | None = None,
    most_tokens: int | None = None,
    probe: bool = True,
    progress: Callable[[str], Any] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> "tuple[Longest, list[LongestRow]]":
    """Find the longest sequence (row of tokens) that fits a GPU with each fine-tuning method.

    The methods are full, lora and qlora.

    Formulas predict the length of the row without a GPU. With `probe`, real steps confirm the
    length if this machine has the GPU. `memory_gib` limits the memory of the card,
    `host_memory_gib` the memory of the host, and `most_tokens` the length of a row. The share
    `headroom` of the card's memory stays free, as in a study. `knobs` sets values of other knobs,
    such as {"checkpointing": "offload"}.

    Raises:
        AutotuneError: a name or a knob is unknown, a value is invalid, or the GPU cannot be probed.
        Cancelled: `should_stop` returned True.
    """
    from autotune.catalog import resolve_model
    from autotune.planning.longest import METHODS, find_longest

    return find_longest(
        resolve_model(model),
        gpu,
        methods or tuple(METHODS),
        rank=rank,
        knobs=knobs,
        memory_gib=memory_gib,
        headroom=headroom,
        host_memory_gib=host_memory_gib,
        most_tokens=most_tokens,
        probe=probe,
        say=progress_or_default(progress),
        should_stop=should_stop,
    )


def calibrate(
    gpu: str = "auto",
    *,
    progress: Callable[[str], Any] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> "Calibration":
    """Measure this machine's device and host, and save the result for estimates.

    Raises:
        AutotuneError: the device is missing or cannot be measured, or the result cannot be saved.
        Cancelled: `should_stop` returned True, so the result is not saved.
    """
    from autotune.probe.calibrate import calibrate as measure
    from autotune.problem.calibration import kept_path, write_calibration
    from autotune.problem.target import find_target

    target = find_target(gpu)
    if target.measured_on is not None:
        raise UsageError(
            f"{target.device.name} is not in this machine, which has {target.measured_on.name}",
            remedy="omit --gpu to calibrate the GPU of this machine",
        )

    calibration = measure(target, say=progress_or_default(progress), should_stop=should_stop)
    write_calibration(calibration, kept_path(calibration.device))
    return calibration
