"""The winner's run on other numbers of GPUs of its kind: its measured speed, scaled by the formulas of several GPUs.

The configuration stays, but for the micro batch where more GPUs leave too little of the global batch for each. `plan
--gpus` looks for the best configuration of each number, by formula alone.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from autotune.core.objective import Objective
from autotune.core.parallelism import PROBED, Parallelism
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.core.units import EIGHTY_PERCENT
from autotune.prediction.collectives import RankStepTime
from autotune.prediction.estimate import Estimate, estimate
from autotune.prediction.step_time import StepTimeEstimate
from autotune.problem.constraints import Floors
from autotune.problem.run_cost import FITS
from autotune.problem.search_space import SearchSpace
from autotune.problem.task import Task
from autotune.study.scaling import RankPlan, Scaling, with_efficiency
from autotune.study.summary import Candidate, Recipe

NUMBERS = (1, 2, 4, 8)
LARGER_BATCH = (
    1.05  # how much larger a global batch of packed rows may be, which whole micro batches round
)


def on_other_numbers(recipe: Recipe) -> Scaling:
    """The study's best for each number of GPUs, where it compared several.

    Else the winner's run on NUMBERS of GPUs, by DDP or FSDP2, whichever is faster. Then there are no rows where no
    formula covers the model, or nobody published what links the cards.
    """
    own = recipe.config.num_gpus
    if len(recipe.by_gpus) > 1:
        rows = [_as_measured(recipe, candidate) for candidate in recipe.by_gpus]
        return Scaling(own=own, known=tuple(row.num_gpus for row in rows), rows=_compared(rows))

    known = _as_measured(recipe, recipe.winner)
    if known.step is None:
        return Scaling(own=own)
    ratio = recipe.winner.performance.step_time_s / known.step.step_s
    rows = [
        known if number == own else _best(recipe, number, ratio)
        for number in sorted({*NUMBERS, own})
    ]
    return Scaling(own=own, known=(own,), rows=_compared(rows))


def _compared(rows: list[RankPlan]) -> tuple[RankPlan, ...]:
    """The rows with their efficiency against the fewest GPUs that have a speed."""
    return with_efficiency(rows, next((row for row in rows if row.tokens_per_s is not None), None))


def _task(recipe: Recipe) -> Task:
    """The study of a recipe, as far as an estimate depends on it; the price is that of one GPU."""
    return Task(
        study=recipe.study,
        model=recipe.model,
        device=recipe.device,
        price=recipe.price and recipe.price.of_gpus(1 / recipe.config.num_gpus),
        workload=recipe.workload,
        floors=Floors(),
        space=SearchSpace.of(),
    )


def _as_measured(recipe: Recipe, candidate: Candidate) -> RankPlan:
    """What the study knows of a candidate, as each GPU's share; its step is by formula, where there is one."""
    config, shape = candidate.config, recipe.workload.run_shape(candidate.config)
    each = candidate.performance.tokens_per_second / config.num_gpus
    slowest, fastest = candidate.performance.spread  # of step times: the shortest first
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
        step=_step_by_formula(recipe, config),
        accumulation=shape.accumulation,
    )


def _step_by_formula(recipe: Recipe, config: TrainConfig) -> RankStepTime | None:
    """The step time by formula; None if no formula covers it."""
    if recipe.workload.objective is not Objective.SFT:
        return None
    by_formula = estimate(_task(recipe), config, math.inf)
    return None if by_formula is None else by_formula.step


def _best(recipe: Recipe, number: int, ratio: float) -> RankPlan:
    """The fastest strategy that fits on so many GPUs, or the one that needs least, or why there is none."""
    rows, problem = [], "no formula covers it"
    for strategy in PROBED if number > 1 else ("none",):
        parallelism = Parallelism(num_gpus=number, strategy=strategy)
        try:
            rows.append(_scaled_plan(recipe, parallelism, ratio))
        except ValueError as error:
            problem = str(error)
    known = [row for row in rows if row.estimate is not None]
    fitting = [row for row in known if row.tokens_per_s is not None]
    if fitting:
        return max(fitting, key=lambda row: row.tokens_per_s or 0.0)
    least = min(known, key=lambda row: row.estimate.need_gib if row.estimate else 0.0, default=None)
    return least or RankPlan(
        parallelism=Parallelism(num_gpus=number, strategy=strategy), problem=problem
    )


def _scaled_plan(recipe: Recipe, parallelism: Parallelism, ratio: float) -> RankPlan:
    """The winner under a strategy; without a speed where it may not fit. Raises ValueError for what cannot be."""
    config = _divided(recipe, parallelism)
    task, limit_gib = _task(recipe), recipe.winner.measurement.limit_gib
    by_formula = estimate(task, config, math.inf)

    def measured_pace() -> StepTimeEstimate | None:
        """The formula's time of one GPU, times the ratio of the measured time to it."""
        single = by_formula.single_gpu if by_formula else None
        return single and _corrected(recipe, single, ratio, config)

    estimated = estimate(task, config, limit_gib, clock=measured_pace)
    if estimated is None:
        raise ValueError("no formula covers it")

    row = RankPlan(parallelism=Parallelism.of(config), accumulation=estimated.accumulation)
    if estimated.state != FITS or estimated.cost is None:
        without_speed = replace(
            estimated, tokens_per_s=None, interval=None, samples_per_s=None, cost=None, step=None
        )
        return replace(row, estimate=without_speed)
    cost = replace(estimated.cost, evidence=Evidence.PROJECTED)
    return replace(row, estimate=replace(estimated, cost=cost), step=estimated.step)


def _divided(recipe: Recipe, parallelism: Parallelism) -> TrainConfig:
    """The winner with as many GPUs, and the largest micro batch by which the global batch stays what it is."""
    own, largest = (
        recipe.config,
        LARGER_BATCH * max(recipe.shape.examples_per_step, recipe.workload.global_batch),
    )
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
            return config
    raise ValueError(f"a global batch of {recipe.workload.global_batch} cannot be divided so")


def _halves(number: int) -> Iterator[int]:
    while number:
        yield number
        number //= 2


def _corrected(
    recipe: Recipe, alone: StepTimeEstimate, ratio: float, config: TrainConfig
) -> StepTimeEstimate:
    """The formula's time, as many times as long as what was measured. With another micro batch its error stays."""
    scaled = alone.longer(ratio, rest=ratio)
    if config.micro_batch_size != recipe.config.micro_batch_size:
        return scaled
    error = max(math.log1p(abs(end)) for end in recipe.winner.performance.spread) / EIGHTY_PERCENT
    return replace(scaled, device_error=error, host_error=error)
