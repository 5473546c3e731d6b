"""Projects the winner's run to other numbers of the same GPU.

The measured speed is scaled by the formulas for several GPUs. The configuration stays the same, but
the micro batch shrinks if the global batch leaves too few rows per GPU. In contrast, `plan --gpus`
searches for the best configuration for each number of GPUs, and uses only formulas.
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
# With packed rows, a global batch is rounded to whole micro batches. Rounding may increase the
# global batch at most by this factor.
LARGER_BATCH = 1.05


def project_gpu_counts(recipe: Recipe) -> Scaling:
    """Return the memory, speed and cost of the winner's run for several numbers of GPUs.

    If the study compared several numbers of GPUs, the result has the best measured configuration
    for each of them. Otherwise the winner's run is projected to each number of GPUs in NUMBERS,
    with the fastest of the strategies in PROBED. The result has no rows if no formula gives the
    winner's step time.
    """
    own = recipe.config.num_gpus
    if len(recipe.by_gpus) > 1:
        rows = [_measured_plan(recipe, candidate) for candidate in recipe.by_gpus]
        return Scaling(
            own=own, known=tuple(row.num_gpus for row in rows), rows=_rows_with_efficiency(rows)
        )

    own_plan = _measured_plan(recipe, recipe.winner)
    if own_plan.step is None:
        return Scaling(own=own)
    ratio = recipe.winner.performance.step_time_s / own_plan.step.step_s
    rows = [
        own_plan if number == own else _best(recipe, number, ratio)
        for number in sorted({*NUMBERS, own})
    ]
    return Scaling(own=own, known=(own,), rows=_rows_with_efficiency(rows))


def _rows_with_efficiency(rows: list[RankPlan]) -> tuple[RankPlan, ...]:
    """Return the rows, each with its efficiency relative to the first row that has a speed.

    The rows are in ascending order of their numbers of GPUs.
    """
    return with_efficiency(rows, next((row for row in rows if row.tokens_per_s is not None), None))


def _task(recipe: Recipe) -> Task:
    """Return a recipe's task, for use in estimates, with the price of one GPU."""
    return Task(
        study=recipe.study,
        model=recipe.model,
        device=recipe.device,
        price=recipe.price and recipe.price.multiply(1 / recipe.config.num_gpus),
        workload=recipe.workload,
        floors=Floors(),
        space=SearchSpace.of(),
    )


def _measured_plan(recipe: Recipe, candidate: Candidate) -> RankPlan:
    """Return a candidate's measured memory and speed per GPU, and its step time by formula."""
    config = candidate.config
    shape = recipe.workload.run_shape(config)
    tokens_per_s = candidate.performance.tokens_per_second / config.num_gpus
    slowest, fastest = candidate.performance.spread  # shortest and longest step time
    return RankPlan(
        parallelism=Parallelism.of(config),
        estimate=Estimate(
            device=recipe.device,
            config=config,
            state=FITS,
            need_gib=candidate.measurement.peak_reserved_gib,
            limit_gib=candidate.measurement.limit_gib,
            tokens_per_s=tokens_per_s,
            interval=(tokens_per_s / (1 + fastest), tokens_per_s / (1 + slowest)),
            cost=candidate.cost,
        ),
        step=_step_by_formula(recipe, config),
        accumulation=shape.accumulation,
    )


def _step_by_formula(recipe: Recipe, config: TrainConfig) -> RankStepTime | None:
    """Return the step time that the formula predicts, or None if it does not cover `config`."""
    if recipe.workload.objective is not Objective.SFT:
        return None
    estimated = estimate(_task(recipe), config, math.inf)
    return None if estimated is None else estimated.step


def _best(recipe: Recipe, number: int, ratio: float) -> RankPlan:
    """Return the plan of the fastest sharding strategy that makes the winner fit on `number` GPUs.

    If the winner does not fit with any strategy, return the plan of the strategy that needs the
    least memory. If no strategy has an estimate, the plan's `problem` says why.
    """
    rows = []
    problem = "no formula covers it"
    for strategy in PROBED if number > 1 else ("none",):
        parallelism = Parallelism(num_gpus=number, strategy=strategy)
        try:
            rows.append(_scaled_plan(recipe, parallelism, ratio))
        except ValueError as error:
            problem = str(error)

    estimates = [row for row in rows if row.estimate is not None]
    fitting = [row for row in estimates if row.tokens_per_s is not None]
    if fitting:
        return max(fitting, key=lambda row: row.tokens_per_s or 0.0)
    leanest = min(
        estimates, key=lambda row: row.estimate.need_gib if row.estimate else 0.0, default=None
    )
    return leanest or RankPlan(
        parallelism=Parallelism(num_gpus=number, strategy=strategy), problem=problem
    )


def _scaled_plan(recipe: Recipe, parallelism: Parallelism, ratio: float) -> RankPlan:
    """Return the winner's plan under a strategy, without a speed if the run may not fit.

    Raises ValueError if the strategy is impossible or if no formula covers the strategy.
    """
    config = _config_for(recipe, parallelism)
    task = _task(recipe)
    limit_gib = recipe.winner.measurement.limit_gib
    by_formula = estimate(task, config, math.inf)

    def measured_pace() -> StepTimeEstimate | None:
        """Return the formula's step time on one GPU, multiplied by `ratio`."""
        single = by_formula.single_gpu if by_formula else None
        return single and _scale_to_measured(recipe, single, ratio, config)

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


def _config_for(recipe: Recipe, parallelism: Parallelism) -> TrainConfig:
    """Return the winner's configuration on several GPUs, with the same global batch.

    The winner's micro batch is halved until the micro batches of all GPUs together divide the
    global batch. Raises ValueError if no such micro batch exists.
    """
    own = recipe.config
    largest = LARGER_BATCH * max(recipe.shape.examples_per_step, recipe.workload.global_batch)

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

    raise ValueError(
        f"a global batch of {recipe.workload.global_batch} cannot be divided over these GPUs"
    )


def _halves(number: int) -> Iterator[int]:
    while number:
        yield number
        number //= 2


def _scale_to_measured(
    recipe: Recipe, single_gpu_step: StepTimeEstimate, ratio: float, config: TrainConfig
) -> StepTimeEstimate:
    """Return the formula's step time multiplied by `ratio`, with the error of the result.

    `ratio` is the winner's measured step time divided by the step time that the formula predicts
    for the winner. If `config` has the winner's micro batch size, the result's error is the error
    of that measurement. Otherwise the result keeps the formula's error.
    """
    scaled = single_gpu_step.longer(ratio, rest=ratio)
    if config.micro_batch_size != recipe.config.micro_batch_size:
        return scaled
    error = max(math.log1p(abs(end)) for end in recipe.winner.performance.spread) / EIGHTY_PERCENT
    return replace(scaled, device_error=error, host_error=error)
