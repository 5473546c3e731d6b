"""Plans a run for several numbers of GPUs, with the best configuration of each sharding strategy.

All results are projected by formula. Collectives between hosts are assumed to run at the bandwidth
of the network or of the GPUs' link, whichever is lower.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.parallelism import FSDP2, STRATEGIES, Parallelism
from autotune.core.train_config import TrainConfig
from autotune.core.untested import untested
from autotune.planning.device_estimate import (
    accuracy_text,
    is_unchecked,
    limit_of,
    no_estimate,
    planned_device,
)
from autotune.planning.observations import Say, ignore_message
from autotune.planning.plan import candidates, distinguishable, planned_setup
from autotune.prediction.estimate import Estimate, estimate
from autotune.prediction.memory_formula import CONTEXT_GIB, unsupported
from autotune.prediction.observed_speed import Observation
from autotune.problem.gpu_counts import (
    MOST_GPUS,
    NETWORKS,
    Counts,
    parse_gpus,
    parse_network,
    parse_nodes,
    parse_within,
    split_count,
)
from autotune.problem.run_cost import FITS
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.study.ranking import Scored, choose
from autotune.study.scaling import GpuPlan, RankPlan, with_efficiency

# Knobs that only have an effect on several GPUs. The search space for one GPU lacks them.
SHARDING_KNOBS = ("sharding", "copies", "sync_each_batch", "offload")


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
    spec_count, gpu = split_count(spec.gpu)
    if spec_count is not None and gpus is not None:
        raise UsageError(
            f"--gpu says {spec_count} GPUs and --gpus {gpus}", remedy="leave out one of them"
        )

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

    setup = planned_setup(replace(spec, gpu=gpu, gpus=None, pins=pins), device, say)
    links = {number: network_gb_s if number > 1 else None for number in hosts}
    limit_gib = limit_of(spec, device)
    result = plan_gpus(
        setup.task,
        limit_gib,
        counts,
        observations,
        within_hours=hours,
        hosts=links,
        sharding_pins=sharding_pins,
    )
    return replace(result, left_out=tuple(map(str, setup.removals)))


def plan_gpus(
    task: Task,
    limit_gib: float,
    numbers: Sequence[int],
    observations: Sequence[Observation] = (),
    *,
    within_hours: float | None = None,
    hosts: Mapping[int, float | None] = MappingProxyType({1: None}),
    sharding_pins: Mapping[str, Any] = MappingProxyType({}),
) -> GpuPlan:
    """Plan the task for each number of GPUs in `numbers`, with each sharding strategy.

    Each number in `numbers` is the number of GPUs per host. `hosts` maps each number of hosts to
    the GB/s of the link between the hosts. `sharding_pins` has the knobs of SHARDING_KNOBS that the
    user pinned, with their values.

    Raises UsageError if no formula covers the model or the configuration.
    """
    baseline = task.baselines[0]
    if unsupported(task.model, baseline):
        raise UsageError(
            no_estimate(task, baseline, counted=False),
            remedy="leave out --gpus: `autotune plan` computes the memory for one GPU",
        )

    configs = candidates(distinguishable(task.space, baseline))
    rows = [
        replace(row, hosts=number_of_hosts)
        for number_of_hosts, network_gb_s in hosts.items()
        for number in numbers
        for row in _plan_number(
            partial(
                _plan_rank,
                task,
                limit_gib,
                configs=configs,
                observations=observations,
                network_gb_s=network_gb_s,
            ),
            list(_parallelisms(number, number_of_hosts, sharding_pins)),
        )
    ]

    fitting = [row for row in rows if row.state == FITS and row.hours is not None]
    by_rule = any(row.step and task.is_link_by_rule(row.parallelism) for row in rows)
    one_gpu = next((row for row in fitting if row.num_gpus == 1), None)
    unchecked = any(
        row.estimate and is_unchecked(row.estimate.config, row.parallelism, row.estimate.memory)
        for row in rows
    )

    return GpuPlan(
        task=task,
        limit_gib=limit_gib,
        rows=with_efficiency(rows, one_gpu),
        how_sure=accuracy_text(
            task, num_gpus=max(numbers), link_by_rule=by_rule, unchecked=unchecked
        ),
        context_gib=CONTEXT_GIB,
        within_hours=within_hours,
    )


def _plan_number(
    plan: Callable[[Parallelism], RankPlan], ways: Sequence[Parallelism]
) -> Iterator[RankPlan]:
    """Yield the plan of each way to use a number of GPUs.

    If none surely fits, the model in the host's memory is planned, too.
    """
    rows = [plan(way) for way in ways]
    yield from rows
    if not any(row.state == FITS for row in rows):
        for row in rows:
            way = row.parallelism
            if row.estimate and way.strategy == "fsdp2" and not way.offload:
                yield plan(replace(way, offload=True))


def _parallelisms(
    number: int, hosts: int, sharding_pins: Mapping[str, Any]
) -> Iterator[Parallelism]:
    """Yield the ways to distribute a training over `number` GPUs on each host.

    For several hosts, one of these ways is HSDP, with one copy of the model on each host. On one
    host, `sharding_pins` sets the number of copies.
    """
    total = hosts * number
    strategy_pin = sharding_pins.get("sharding")
    shard_pins = {knob: value for knob, value in sharding_pins.items() if knob != "sharding"}
    copies = shard_pins.pop("copies", 1)
    if hosts == 1 and number > copies and number % copies == 0:
        shard_pins["copies"] = copies

    strategies: Sequence[str] = STRATEGIES[1:]
    if total == 1:
        strategies = STRATEGIES[:1]
    elif strategy_pin:
        strategies = [strategy_pin]
    for strategy in strategies:
        yield Parallelism(
            num_gpus=total, strategy=strategy, **(shard_pins if strategy in FSDP2 else {})
        )
    if hosts > 1 and number > 1 and strategy_pin in (None, "fsdp2"):
        yield Parallelism(num_gpus=total, strategy="fsdp2", copies=hosts, **shard_pins)


def _plan_rank(
    task: Task,
    limit_gib: float,
    parallelism: Parallelism,
    configs: Sequence[TrainConfig],
    observations: Sequence[Observation],
    network_gb_s: float | None,
) -> RankPlan:
    """Return the plan of the best configuration for one number of GPUs and one sharding strategy.

    If no configuration is certain to fit, the plan is for the configuration that needs the least
    memory. If no configuration has an estimate, the plan's `problem` says why.
    """
    problem = None
    estimates: dict[TrainConfig, Estimate] = {}
    for config in configs:
        try:
            estimated = estimate(
                task,
                config,
                limit_gib,
                observations,
                parallelism=parallelism,
                network_gb_s=network_gb_s,
            )
        except ValueError as error:
            problem = problem or str(error)
            continue
        if estimated is not None:
            estimates[config] = estimated

    fitting = [one for one in estimates.values() if one.state == FITS]
    if fitting:
        scored = [
            Scored(config=one.config, score=_score(one), free_fraction=-one.margin)
            for one in fitting
        ]
        winner = choose(scored, task.floors.slack).config
        num_unknown = sum(one.single_gpu is None for one in fitting if one.config != winner)
        return replace(_row(parallelism, estimates[winner]), num_without_speed=num_unknown)
    if estimates:
        return _row(parallelism, min(estimates.values(), key=lambda one: one.need_gib))
    return RankPlan(parallelism=parallelism, problem=problem or "no formula covers it")


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
