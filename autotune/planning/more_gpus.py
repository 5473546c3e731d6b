"""The winner's run on other numbers of GPUs of its kind: its measured speed, scaled by the formulas of several GPUs.

The configuration stays, but for the micro batch where more GPUs leave too little of the global batch for each. `plan
--gpus` looks for the best configuration of each number, by formula alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.catalog import resolve_device
from autotune.core.objective import Objective
from autotune.core.parallelism import PROBED, Parallelism
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.planning.device_estimate import memory_state, observed_transfer, with_step_time
from autotune.planning.several_gpus import RankPlan
from autotune.prediction.collectives import RankStepTime, rank_step_time, traffic
from autotune.prediction.estimate import Estimate
from autotune.prediction.sharded_memory import rank_breakdown
from autotune.prediction.step_time import StepTimeEstimate, estimate_step_time, host_of
from autotune.prediction.transfer import EIGHTY_PERCENT, REFERENCE, interval
from autotune.problem.run_cost import FITS
from autotune.problem.workload import RunShape
from autotune.study.summary import Candidate, Recipe

NUMBERS = (1, 2, 4, 8)
LARGER_BATCH = 1.05  # how much larger a global batch of packed rows may be, which whole micro batches round


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The run on each number of GPUs, the fewest first.

    The winner takes `own` GPUs. Of the numbers that are `known` the rows are what the study knows of their best
    configurations, of others they are the winner's, scaled.
    """

    own: int
    known: tuple[int, ...] = ()
    rows: tuple[RankPlan, ...] = ()

    @property
    def trainable(self) -> tuple[RankPlan, ...]:
        """The rows that have a speed."""
        return tuple(row for row in self.rows if row.tokens_per_s is not None)

    def efficiency(self, row: RankPlan) -> float | None:
        """The speed over that of as many GPUs of the row with the fewest; None without a speed."""
        if row.tokens_per_s is None:
            return None
        fewest = self.trainable[0]
        return row.tokens_per_s / row.num_gpus * fewest.num_gpus / (fewest.tokens_per_s or math.nan)

    def waits(self, row: RankPlan) -> float | None:
        """The share of a step that waits for other GPUs, by formula; None where no step is known."""
        return None if row.step is None else row.step.exposed_s / row.step.step_s


def on_other_numbers(recipe: Recipe) -> Scaling:
    """The study's best for each number of GPUs, where it compared several.

    Else the winner's run on NUMBERS of GPUs, by DDP or FSDP2, whichever is faster. Then there are no rows where no
    formula covers the model, or nobody published what links the cards.
    """
    own = recipe.config.num_gpus
    if len(recipe.by_gpus) > 1:
        rows = [_as_measured(recipe, candidate) for candidate in recipe.by_gpus]
        return Scaling(own=own, known=tuple(row.num_gpus for row in rows), rows=tuple(rows))
    known = _as_measured(recipe, recipe.winner)
    if known.step is None:
        return Scaling(own=own)
    ratio = recipe.winner.performance.step_time_s / known.step.step_s
    rows = [known if number == own else _best(recipe, number, ratio) for number in sorted({*NUMBERS, own})]
    return Scaling(own=own, known=(own,), rows=tuple(rows))


def _as_measured(recipe: Recipe, candidate: Candidate) -> RankPlan:
    """What the study knows of a candidate, as each GPU's share; its step is by formula, where there is one."""
    config, shape = candidate.config, recipe.workload.run_shape(candidate.config)
    each = candidate.performance.tokens_per_second / config.num_gpus
    slowest, fastest = candidate.performance.spread  # of step times: the shortest first
    alone = _alone(recipe, config)
    return RankPlan(
        parallelism=Parallelism.of(config),
        estimate=Estimate(
            device=recipe.device,
            config=config,
            state=FITS,
            need_gib=candidate.measurement.peak_reserved_gib,
            limit_gib=candidate.measurement.limit_gib,
            tokens_per_s=each,
            interval=(each / (1 + fastest), each / (1 + slowest)),
            cost=candidate.cost,
        ),
        step=None if alone is None else _step(recipe, config, shape, alone),
        accumulation=shape.accumulation,
    )


def _best(recipe: Recipe, number: int, ratio: float) -> RankPlan:
    """The fastest strategy that fits on so many GPUs, or the one that needs least, or why there is none."""
    rows, problem = [], "no formula covers it"
    for strategy in PROBED if number > 1 else ("none",):
        parallelism = Parallelism(num_gpus=number, strategy=strategy)
        try:
            rows.append(_on(recipe, parallelism, ratio))
        except ValueError as error:
            problem = str(error)
    known = [row for row in rows if row.estimate is not None]
    fitting = [row for row in known if row.tokens_per_s is not None]
    if fitting:
        return max(fitting, key=lambda row: row.tokens_per_s or 0.0)
    least = min(known, key=lambda row: row.estimate.need_gib if row.estimate else 0.0, default=None)
    return least or RankPlan(parallelism=Parallelism(num_gpus=number, strategy=strategy), problem=problem)


def _on(recipe: Recipe, parallelism: Parallelism, ratio: float) -> RankPlan:
    """The winner under a strategy; without a speed where it may not fit. Raises ValueError for what cannot be."""
    config, shape = _divided(recipe, parallelism)
    parallelism = Parallelism.of(config)  # with what else the winner asks of FSDP2
    if (reason := parallelism.refusal(config)) is not None:
        raise ValueError(reason)
    memory = rank_breakdown(recipe.model, recipe.workload.at_longest(config), parallelism, shape.probe_micro_steps)
    if memory is None:
        raise ValueError("no formula covers it")
    limit_gib = recipe.winner.measurement.limit_gib
    estimated = Estimate(
        device=recipe.device,
        config=config,
        state=memory_state(memory.peak_reserved_gib, limit_gib, memory.error),
        need_gib=memory.peak_reserved_gib,
        limit_gib=limit_gib,
        price=recipe.price and recipe.price.of_gpus(1 / recipe.config.num_gpus),
        memory=memory,
    )
    row = RankPlan(parallelism=parallelism, estimate=estimated, accumulation=shape.accumulation)
    alone = _alone(recipe, config)
    if estimated.state != FITS or alone is None:
        return row
    step = _step(recipe, config, shape, _corrected(recipe, alone, ratio, config))
    if step is None:
        return row
    estimated = with_step_time(estimated, shape, step.step_s, step.interval_s)
    assert estimated.cost is not None
    cost = replace(estimated.cost, evidence=Evidence.PROJECTED)
    return replace(row, step=step, estimate=replace(estimated, cost=cost))


def _divided(recipe: Recipe, parallelism: Parallelism) -> tuple[TrainConfig, RunShape]:
    """The winner with as many GPUs, and the largest micro batch by which the global batch stays what it is."""
    own, largest = recipe.config, LARGER_BATCH * max(recipe.shape.examples_per_step, recipe.workload.global_batch)
    for micro_batch_size in _halves(own.micro_batch_size):
        config = replace(
            own,
            micro_batch_size=micro_batch_size,
            num_gpus=parallelism.num_gpus,
            sharding=parallelism.strategy,
        )
        try:
            shape = recipe.workload.run_shape(config)
        except ValueError:
            continue
        if shape.examples_per_step <= largest:
            return config, shape
    raise ValueError(f"a global batch of {recipe.workload.global_batch} cannot be divided so")


def _halves(number: int) -> Iterator[int]:
    while number:
        yield number
        number //= 2


def _alone(recipe: Recipe, config: TrainConfig) -> StepTimeEstimate | None:
    """The time of one GPU by formula; None where none covers it."""
    on_reference = estimate_step_time(recipe.model, recipe.workload.at_mean(config), host_of(None))
    if on_reference is None or recipe.workload.objective is not Objective.SFT:
        return None
    transfer = observed_transfer(resolve_device(REFERENCE), recipe.device, config, (), side=on_reference.side)
    return None if transfer is None else on_reference.on(transfer)


def _corrected(recipe: Recipe, alone: StepTimeEstimate, ratio: float, config: TrainConfig) -> StepTimeEstimate:
    """The formula's time, as many times as long as what was measured. With another micro batch its error stays."""
    scaled = alone.longer(ratio, rest=ratio)
    if config.micro_batch_size != recipe.config.micro_batch_size:
        return scaled
    error = max(math.log1p(abs(end)) for end in recipe.winner.performance.spread) / EIGHTY_PERCENT
    return replace(scaled, device_error=error, host_error=error)


def _step(recipe: Recipe, config: TrainConfig, shape: RunShape, alone: StepTimeEstimate) -> RankStepTime | None:
    """The time of a step, with what several GPUs send each other; None where that, or their link, is unknown."""
    if config.num_gpus == 1:
        step_s = shape.accumulation * alone.micro_s + alone.rest_s
        return RankStepTime(step_s=step_s, interval_s=interval(step_s, alone.error), communication_s=0.0, exposed_s=0.0)
    parallelism, link = Parallelism.of(config), recipe.device.link_gb_s
    sent = traffic(recipe.model, config, parallelism)
    if sent is None or link is None:
        return None
    waiting = alone.longer(1 + recipe.workload.waiting_share(config))
    return rank_step_time(waiting, config, parallelism, sent, accumulation=shape.accumulation, link_gb_s=link)
