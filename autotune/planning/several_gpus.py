"""Plans a run for several numbers of GPUs, with the best configuration of each sharding strategy.

All results are projected by formula. If no formula covers the model, dry probes of a few
configurations replace it (`counted_plan`). Collectives between hosts are assumed to run at the
bandwidth of the network or of the GPUs' link, whichever is lower. If each host has one GPU, only
the network counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec
from autotune.core.errors import UsageError
from autotune.core.parallelism import FSDP2, SHARDING_KNOBS, STRATEGIES, Parallelism
from autotune.core.train_config import TrainConfig
from autotune.core.untested import untested
from autotune.dry.prober import obstacle
from autotune.planning.counted_memory import count
from autotune.planning.counted_plan import count_best
from autotune.planning.device_estimate import (
    DIVIDED_EXPERTS,
    accuracy_text,
    is_unchecked,
    limit_of,
    no_estimate,
    planned_device,
)
from autotune.planning.observations import Say, ignore_message
from autotune.planning.plan import candidates, distinguishable, memory_savers, planned_setup
from autotune.prediction.estimate import Estimate, FittingChange, estimate, single_gpu_time
from autotune.prediction.memory_formula import CONTEXT_GIB, unsupported
from autotune.prediction.observed_speed import Observation
from autotune.problem.constraints import space_of_rank
from autotune.problem.gpu_counts import (
    MOST_GPUS,
    NETWORKS,
    Counts,
    counted_gpu,
    parse_gpus,
    parse_network,
    parse_nodes,
    parse_within,
)
from autotune.problem.run_cost import FITS
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.study.ranking import Scored, choose
from autotune.study.scaling import GpuPlan, RankPlan, with_efficiency

_SAVERS = ("sync_each_batch", "offload")  # settings that save memory and cost time


def plan_spec(
    spec: StudySpec,
    gpus: Counts | None,
    *,
    nodes: Counts | None = None,
    network: str | float | None = None,
    within: str | float | None = None,
    observations: Sequence[Observation] = (),
    say: Say = ignore_message,
) -> GpuPlan:
    """Plan a study for the numbers of GPUs in `gpus`, or in `spec.gpu` (such as 8xh100).

    `nodes` lists the numbers of hosts to plan for; with `nodes`, each number in `gpus` is the
    number of GPUs per host. `network` is the bandwidth between the hosts
    (`gpu_counts.parse_network`).

    Raises UsageError if a value of the spec, a number of GPUs or hosts, or the deadline is invalid,
    or if no formula covers the model.
    """
    spec_count, gpu = counted_gpu(spec.gpu, gpus)
    numbers = spec_count if gpus is None else gpus
    if numbers is None and nodes is not None:
        numbers = MOST_GPUS
    if numbers is None:
        raise UsageError(
            "--gpus is missing",
            remedy="list the numbers of GPUs to compare, for example --gpus 1,2,4,8",
        )

    if spec.configs:
        raise UsageError(
            "--gpus plans a search space, but the spec names configurations",
            remedy="leave out one of them",
        )
    if reason := untested("objective", spec.objective, "several_gpus"):
        raise UsageError(reason, remedy="leave out --gpus, or plan for sft")

    counts = parse_gpus(numbers)
    hosts = parse_nodes(nodes)
    hours = parse_within(within)
    device = planned_device(gpu)

    network_gb_s = parse_network(network)
    if hosts[-1] > 1 and network_gb_s is None:
        raise UsageError(
            "--nodes needs the bandwidth between the hosts",
            remedy=f"give --network GB_PER_S, or {', '.join(NETWORKS)}",
        )

    sharding_pins = {knob: value for knob, value in spec.pins.items() if knob in SHARDING_KNOBS}
    pins = {knob: value for knob, value in spec.pins.items() if knob not in SHARDING_KNOBS}

    of_one_gpu = replace(spec, gpu=gpu, gpus=None, pins=pins, expert_parallel=1)
    setup = planned_setup(of_one_gpu, device, say)
    if spec.expert_parallel > 1:
        totals = [number * host for number in counts for host in hosts]
        _check_expert_parallel(setup.task.model, spec.expert_parallel, totals, sharding_pins)
    for knob, value in sharding_pins.items():
        setup.task.space.pin(knob, value)  # only checks the value: the space is for one GPU
    _check_sharding_pins(sharding_pins, counts, hosts)
    plan_setup = partial(
        plan_gpus,
        limit_gib=limit_of(spec, device),
        numbers=counts,
        observations=observations,
        within_hours=hours,
        hosts={number: network_gb_s if number > 1 else None for number in hosts},
        sharding_pins=sharding_pins,
        expert_parallel=spec.expert_parallel,
        say=say,
    )
    result = plan_setup(setup.task)
    change = None
    if not result.fits:
        change = _first_change(of_one_gpu, device, plan_setup)
    return replace(result, change=change, left_out=tuple(map(str, setup.removals)))


def _check_expert_parallel(
    model: ModelSpec, expert_parallel: int, totals: Sequence[int], sharding_pins: Mapping[str, Any]
) -> None:
    """Raise UsageError if the GPUs cannot share out the experts of the model equally.

    `totals` are the numbers of GPUs to plan for.
    """
    experts = model.num_experts
    if experts is None:
        raise UsageError(
            f"expert_parallel {expert_parallel}: {model.short} has no experts to share out",
            remedy="leave out expert_parallel",
        )
    if experts % expert_parallel:
        divisors = [number for number in range(2, experts + 1) if experts % number == 0]
        raise UsageError(
            f"expert_parallel {expert_parallel} does not divide the {experts} experts of"
            f" {model.short}",
            remedy=f"set it to {' or '.join(map(str, divisors))}",
        )
    undivided = next((total for total in totals if total % expert_parallel), None)
    if undivided is not None:
        raise UsageError(
            f"expert_parallel {expert_parallel} does not divide {undivided} GPUs",
            remedy=f"plan for multiples of {expert_parallel} GPUs",
        )
    if sharding_pins.keys() - {"sharding"} or sharding_pins.get("sharding", "ddp") != "ddp":
        raise UsageError(
            "expert_parallel is only estimated with ddp: each GPU holds all weights but the"
            " experts'",
            remedy=f"leave out {' and '.join(sharding_pins)}",
        )


def _check_sharding_pins(
    pins: Mapping[str, Any], counts: Sequence[int], hosts: Sequence[int]
) -> None:
    """Raise UsageError for a pin of sharding that no plan can follow.

    A number of GPUs among others is planned without the pins that it cannot follow, for comparison.
    """
    active = _active_pins(pins)
    strategy = active.get("sharding")
    copies = active.get("copies", 1)

    need, change = None, "--gpus"
    for knob, value in active.items():
        if [*counts, *hosts] == [1, 1]:
            need = "several GPUs"
        elif knob != "sharding" and strategy not in (None, *FSDP2):
            need, change = f"sharding {' or '.join(FSDP2)}, not {strategy}", "sharding"
        elif knob == "copies" and not any(
            _holds_copies(number, host, copies) for number in counts for host in hosts
        ):
            need = f"GPUs of one host in {copies} equal groups of two or more"
        if need:
            raise UsageError(
                f"{knob} {str(value).lower()} has no effect: it needs {need}",
                remedy=f"leave --set {knob} out, or change {change}",
            )


def _active_pins(pins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pins of sharding whose values differ from those of one GPU."""
    one_gpu = TrainConfig()
    return {knob: value for knob, value in pins.items() if value != getattr(one_gpu, knob)}


def _ignored_pins(way: Parallelism, pins: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the pins of sharding, such as offload=true, that this way to use GPUs ignores.

    One GPU has nothing to shard, so it ignores neither `sharding` nor `sync_each_batch`.
    """
    values: dict[str, Any] = {"offload": way.offload, "copies": way.copies}
    if way.num_gpus > 1:
        values |= {"sharding": way.strategy, "sync_each_batch": way.sync_each_batch}
    return tuple(
        f"{knob}={str(value).lower()}"
        for knob, value in pins.items()
        if values.get(knob, value) != value
    )


def _holds_copies(number: int, hosts: int, copies: int) -> bool:
    """Return whether `number` GPUs on each host can hold this number of copies of the model."""
    return hosts == 1 and number > copies and number % copies == 0


def _first_change(
    spec: StudySpec, device: DeviceSpec, plan_setup: Callable[[Task], GpuPlan]
) -> FittingChange | None:
    """Return the first change of the options with which one of the numbers of GPUs surely fits."""
    space = planned_setup(spec, device).task.space
    for options, changed in memory_savers(spec, space.config(space.leanest())):
        with suppress(UsageError):  # another option excludes this change
            result = plan_setup(planned_setup(changed, device).task)
            fitting = next((row for row in result.choices if row.state == FITS), None)
            if fitting is not None and fitting.estimate is not None:
                return FittingChange(options=options, estimate=fitting.estimate)
    return None


def plan_gpus(
    task: Task,
    limit_gib: float,
    numbers: Sequence[int],
    observations: Sequence[Observation] = (),
    *,
    within_hours: float | None = None,
    hosts: Mapping[int, float | None] = MappingProxyType({1: None}),
    sharding_pins: Mapping[str, Any] = MappingProxyType({}),
    expert_parallel: int = 1,
    say: Say = ignore_message,
) -> GpuPlan:
    """Plan the task for each number of GPUs in `numbers`, with each sharding strategy.

    Each number in `numbers` is the number of GPUs per host. `hosts` maps each number of hosts to
    the GB/s of the link between the hosts. `sharding_pins` has the knobs of SHARDING_KNOBS that the
    user pinned, with their values. `expert_parallel` GPUs share out the experts of a mixture. `say`
    gets progress messages.

    Raises UsageError if no formula covers the model, and this machine runs no dry probes.
    """
    baseline = task.baselines[0]
    configs: Sequence[TrainConfig] | None = None
    if unsupported(task.model, baseline) is None:
        configs = candidates(distinguishable(task.space, baseline))
    elif (reason := obstacle()) is not None:
        raise UsageError(
            f"{no_estimate(task, baseline, counted=False)}, and {reason}",
            remedy="leave out --gpus, or plan on a Linux machine with torch",
        )

    # A formula's step time of one GPU is the same for every number of GPUs.
    single_gpu = cache(partial(single_gpu_time, task, observations=observations))

    def estimate_of(config: TrainConfig, **distribution: Any) -> Estimate | None:
        own = {"clock": partial(single_gpu, config)} if configs else {"count": count}
        return estimate(task, config, limit_gib, observations, **own, **distribution)

    rows = [
        replace(
            row,
            hosts=number_of_hosts,
            ignored_pins=_ignored_pins(row.parallelism, sharding_pins),
        )
        for number_of_hosts, network_gb_s in hosts.items()
        for number in numbers
        for row in _plan_number(
            partial(
                _plan_rank,
                task,
                configs,
                partial(estimate_of, hosts=number_of_hosts, network_gb_s=network_gb_s),
                say,
            ),
            list(_parallelisms(number, number_of_hosts, sharding_pins, expert_parallel)),
            sharding_pins,
        )
    ]

    fitting = [row for row in rows if row.state == FITS and row.hours is not None]
    by_rule = task.device.link_by_rule and any(row.uses_link_of_catalogue(task) for row in rows)
    one_gpu = next((row for row in fitting if row.num_gpus == 1), None)
    unchecked = any(
        row.estimate and is_unchecked(row.estimate.config, row.parallelism, row.estimate.memory)
        for row in rows
    )

    return GpuPlan(
        task=task,
        network_gb_s=next(filter(None, hosts.values()), None),
        limit_gib=limit_gib,
        rows=with_efficiency(rows, one_gpu),
        how_sure=DIVIDED_EXPERTS
        if expert_parallel > 1
        else accuracy_text(
            task,
            counted=configs is None,
            num_gpus=max(row.num_gpus for row in rows),
            link_by_rule=by_rule,
            unchecked=unchecked,
        ),
        context_gib=CONTEXT_GIB,
        within_hours=within_hours,
    )


def _plan_number(
    plan: Callable[[Parallelism], RankPlan],
    ways: Sequence[Parallelism],
    sharding_pins: Mapping[str, Any],
) -> Iterator[RankPlan]:
    """Yield the plan of each way to use a number of GPUs.

    If FSDP2 does not surely fit, it is also planned with gradients that are sharded after each
    micro batch, which saves memory if a step has several. If no way surely fits, it is also planned
    with the model in the host's memory.
    """
    rows = [plan(way) for way in ways]
    yield from rows
    fits = any(row.state == FITS for row in rows)
    own = {name: value for name, value in sharding_pins.items() if name in _SAVERS}
    for row in rows:
        way = row.parallelism
        if row.estimate is None or row.state == FITS or way.strategy != "fsdp2":
            continue
        synced = replace(way, sync_each_batch=True)
        leaner = [synced]
        if not fits:
            leaner += [replace(way, offload=True), replace(synced, offload=True)]
        for other in leaner:
            if other == way or any(getattr(other, name) != value for name, value in own.items()):
                continue
            found = plan(other)
            yield found
            if found.state == FITS:
                break


def _parallelisms(
    number: int, hosts: int, sharding_pins: Mapping[str, Any], expert_parallel: int = 1
) -> Iterator[Parallelism]:
    """Yield the ways to distribute a training over `number` GPUs on each host.

    For several hosts, one of these ways is HSDP, with one copy of the model on each host. On one
    host, `sharding_pins` sets the number of copies. Divided experts are planned only with DDP.
    """
    total = hosts * number
    if expert_parallel > 1:
        yield Parallelism(num_gpus=total, strategy="ddp", expert_parallel=expert_parallel)
        return
    strategy_pin = sharding_pins.get("sharding")
    shard_pins = {knob: value for knob, value in sharding_pins.items() if knob != "sharding"}
    copies = shard_pins.pop("copies", 1)
    if _holds_copies(number, hosts, copies):
        shard_pins["copies"] = copies

    strategies: Sequence[str] = STRATEGIES[1:]
    if total == 1:
        strategies = STRATEGIES[:1]
    elif strategy_pin:
        strategies = [strategy_pin]
    elif _active_pins(shard_pins):
        strategies = FSDP2  # the other strategies would ignore these pins
    for strategy in strategies:
        yield Parallelism(
            num_gpus=total, strategy=strategy, **(shard_pins if strategy in FSDP2 else {})
        )
    if hosts > 1 and number > 1 and strategy_pin in (None, "fsdp2"):
        yield Parallelism(num_gpus=total, strategy="fsdp2", copies=hosts, **shard_pins)


def _plan_rank(
    task: Task,
    configs: Sequence[TrainConfig] | None,
    estimate_of: Callable[..., Estimate | None],
    say: Say,
    parallelism: Parallelism,
) -> RankPlan:
    """Return the plan of the best configuration for one number of GPUs and one sharding strategy.

    If no configuration is certain to fit, the plan is for the configuration that needs the least
    memory. If no configuration has an estimate, the plan's `problem` says why. If no formula covers
    the model, `configs` is None.
    """
    problems: list[str] = []

    def of_rank(config: TrainConfig, *, with_cost: bool = True) -> Estimate | None:
        try:
            return estimate_of(config, parallelism=parallelism, with_cost=with_cost)
        except ValueError as error:
            problems.append(str(error))
            return None

    if configs is None:
        say(f"counting the memory of {parallelism.num_gpus} GPUs, {parallelism.name}")
        try:
            space = space_of_rank(task.space, parallelism, task.workload.global_batch)
        except UsageError as error:
            return RankPlan(parallelism=parallelism, problem=str(error))
        counted = count_best(replace(task, space=space), of_rank)
        problems.append("no formula covers it, and it cannot be counted")
        return (
            RankPlan(parallelism=parallelism, problem=problems[0])
            if counted is None
            else _row(parallelism, counted)
        )

    found = (of_rank(config, with_cost=False) for config in configs)
    estimates = [one for one in found if one is not None]
    problems.append("no formula covers it")
    if not estimates:
        return RankPlan(parallelism=parallelism, problem=problems[0])

    fitting = [one for one in estimates if one.state == FITS]
    best = min(estimates, key=lambda one: one.need_gib).config
    if fitting:
        scored = [
            Scored(config=one.config, score=_score(one), free_fraction=-one.margin)
            for one in fitting
        ]
        best = choose(scored, task.floors.slack).config
    with_cost = of_rank(best)
    assert with_cost is not None  # its estimate without the cost is known
    num_unknown = sum(one.single_gpu is None for one in fitting if one.config != best)
    return replace(_row(parallelism, with_cost), num_without_speed=num_unknown)


def _row(parallelism: Parallelism, estimated: Estimate) -> RankPlan:
    """Convert an estimate to the plan of one rank.

    With one GPU, the plan has no `step`, because a step on one GPU has no communication to show.
    """
    step = estimated.step if parallelism.num_gpus > 1 else None
    return RankPlan(
        parallelism=parallelism, estimate=estimated, step=step, accumulation=estimated.accumulation
    )


def _score(estimated: Estimate) -> float:
    """Return the speed that is used to compare the configurations of one sharding strategy.

    If the link's bandwidth is unknown, the result is the speed of one GPU without communication. If
    that speed is unknown too, the result is 1.
    """
    if estimated.tokens_per_s is not None:
        return estimated.tokens_per_s
    single_gpu = estimated.single_gpu
    return estimated.config.tokens / single_gpu.micro_s if single_gpu else 1.0
