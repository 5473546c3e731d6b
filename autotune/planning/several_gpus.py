"""Plan the same run on one and on several GPUs of a kind, by formula: the best configuration of each strategy.

Every number is projected. Between hosts collectives run at the pace of the network, if that is the
slower.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.parallelism import FSDP2, STRATEGIES, Parallelism
from autotune.core.train_config import TrainConfig
from autotune.core.untested import untested
from autotune.planning.device_estimate import RANK_ACCURACY, limit_of, no_estimate, planned_device
from autotune.planning.observations import Say, silent
from autotune.planning.plan import candidates, distinguishable, planned_setup, say_removals
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

OF_RANKS = (
    "sharding",
    "copies",
    "sync_each_batch",
    "offload",
)  # knobs that candidates for one GPU do not have


def plan_spec(
    spec: StudySpec,
    gpus: Counts | None,
    *,
    nodes: Counts | None = None,
    network: str | float | None = None,
    within: str | float | None = None,
    observations: Sequence[Observation] = (),
    say: Say = silent,
) -> GpuPlan:
    """Plan a study for `gpus`, numbers of GPUs; without them, for the number in `spec.gpu`, such as 8xh100.

    With `nodes` they are those of each of so many hosts, which `network` links
    (`gpu_counts.parse_network`).

    Raises UsageError where a part of the spec, a number or the deadline is impossible, or no
    formula covers the model.
    """
    counted, gpu = split_count(spec.gpu)
    if counted is not None and gpus is not None:
        raise UsageError(
            f"--gpu says {counted} GPUs and --gpus {gpus}", remedy="leave out one of them"
        )
    numbers = counted if gpus is None else gpus
    if numbers is None and nodes is not None:
        numbers = MOST_GPUS
    if numbers is None:
        raise UsageError(
            "between which numbers of GPUs is to be chosen?", remedy="for example --gpus 1,2,4,8"
        )
    if spec.configs:
        raise UsageError(
            "--gpus plans a search space, and the spec names configurations",
            remedy="leave out one of them",
        )
    if reason := untested("objective", spec.objective, "several_gpus"):
        raise UsageError(reason, remedy="leave out --gpus, or plan for sft")
    counts, hosts, hours, device = (
        parse_gpus(numbers),
        parse_nodes(nodes),
        parse_within(within),
        planned_device(gpu),
    )
    network_gb_s = parse_network(network)
    if hosts[-1] > 1 and network_gb_s is None:
        raise UsageError(
            "--nodes: what links the hosts?",
            remedy=f"give --network GB_PER_S, or {', '.join(NETWORKS)}",
        )
    of_ranks = {knob: value for knob, value in spec.pins.items() if knob in OF_RANKS}
    pins = {knob: value for knob, value in spec.pins.items() if knob not in OF_RANKS}
    setup = planned_setup(replace(spec, gpu=gpu, gpus=None, pins=pins), device, say)
    say_removals(setup, say)
    links = {number: network_gb_s if number > 1 else None for number in hosts}
    limit_gib = limit_of(spec, device)
    return plan_gpus(
        setup.task,
        limit_gib,
        counts,
        observations,
        within_hours=hours,
        hosts=links,
        of_ranks=of_ranks,
    )


def plan_gpus(
    task: Task,
    limit_gib: float,
    numbers: Sequence[int],
    observations: Sequence[Observation] = (),
    *,
    within_hours: float | None = None,
    hosts: Mapping[int, float | None] = MappingProxyType({1: None}),
    of_ranks: Mapping[str, Any] = MappingProxyType({}),
) -> GpuPlan:
    """Plan the task for each of these numbers of GPUs, by each strategy.

    They are those of each host; `hosts` says how many there are, and the GB/s of what links so
    many. `of_ranks` pins knobs of OF_RANKS.

    Raises UsageError where no formula covers model or configuration.
    """
    baseline = task.baselines[0]
    if unsupported(task.model, baseline):
        raise UsageError(
            no_estimate(task, baseline, counted=False),
            remedy="leave out --gpus: `autotune plan` counts what one GPU needs",
        )
    configs = candidates(distinguishable(task.space, baseline))
    rows = [
        replace(
            _plan_rank(task, limit_gib, parallelism, configs, observations, network_gb_s),
            hosts=number_of_hosts,
        )
        for number_of_hosts, network_gb_s in hosts.items()
        for number in numbers
        for parallelism in _parallelisms(number, number_of_hosts, of_ranks)
    ]
    certain = [row for row in rows if row.state == FITS and row.hours is not None]
    alone = next((row for row in certain if row.num_gpus == 1), None)
    return GpuPlan(
        task=task,
        limit_gib=limit_gib,
        rows=with_efficiency(rows, alone),
        how_sure=RANK_ACCURACY,
        context_gib=CONTEXT_GIB,
        within_hours=within_hours,
    )


def _parallelisms(number: int, hosts: int, of_ranks: Mapping[str, Any]) -> Iterator[Parallelism]:
    """The ways to share out a training among so many GPUs of each host.

    HSDP shards within hosts alone, or within one host as `of_ranks` says.
    """
    total, wanted = hosts * number, of_ranks.get("sharding")
    of_shards = {knob: value for knob, value in of_ranks.items() if knob != "sharding"}
    copies = of_shards.pop("copies", 1)
    if hosts == 1 and number > copies and number % copies == 0:
        of_shards["copies"] = copies
    for strategy in STRATEGIES[:1] if total == 1 else [wanted] if wanted else STRATEGIES[1:]:
        yield Parallelism(
            num_gpus=total, strategy=strategy, **(of_shards if strategy in FSDP2 else {})
        )
    if hosts > 1 and number > 1 and wanted in (None, "fsdp2"):
        yield Parallelism(num_gpus=total, strategy="fsdp2", copies=hosts, **of_shards)


def _plan_rank(
    task: Task,
    limit_gib: float,
    parallelism: Parallelism,
    configs: Sequence[TrainConfig],
    observations: Sequence[Observation],
    network_gb_s: float | None,
) -> RankPlan:
    """The best configuration of a strategy, or the one that needs least if none surely fits, or why there is none."""
    problem = None
    found: dict[TrainConfig, Estimate] = {}
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
            found[config] = estimated

    fitting = [one for one in found.values() if one.state == FITS]
    if fitting:
        scored = [
            Scored(config=one.config, score=_score(one), free_fraction=-one.margin)
            for one in fitting
        ]
        winner = choose(scored, task.floors.slack).config
        unknown = sum(one.single_gpu is None for one in fitting if one.config != winner)
        return replace(_row(parallelism, found[winner]), num_without_speed=unknown)
    if found:
        return _row(parallelism, min(found.values(), key=lambda one: one.need_gib))
    return RankPlan(parallelism=parallelism, problem=problem or "no formula covers it")


def _row(parallelism: Parallelism, estimated: Estimate) -> RankPlan:
    """The row of an estimate; the step of one GPU alone has no communication to show."""
    step = estimated.step if parallelism.num_gpus > 1 else None
    return RankPlan(
        parallelism=parallelism, estimate=estimated, step=step, accumulation=estimated.accumulation
    )


def _score(estimated: Estimate) -> float:
    """What orders the configurations of a strategy: their speed, or that of one GPU alone if their link is unknown."""
    if estimated.tokens_per_s is not None:
        return estimated.tokens_per_s
    alone = estimated.single_gpu
    return estimated.config.tokens / alone.micro_s if alone else 1.0
