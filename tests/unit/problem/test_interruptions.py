"""The expected cost of spot instances, against simulated runs that are interrupted at random."""

import math
import random

import pytest

from autotune.core.train_config import TrainConfig
from autotune.problem.interruptions import Interruptions
from autotune.problem.run_cost import project, run_cost
from autotune.problem.run_options import RunOptions
from tests.unit.problem.test_run_cost import PRICE, SPEED, WORKLOAD

CONFIG = TrainConfig()
HOURS = 2.0  # of WORKLOAD at SPEED: 200 steps of 36 s


def simulated_hours(
    work: float, save: float, restart: float, per_hour: float, chance: random.Random
) -> float:
    """Rent instances one after another until the work is done, and return the paid hours."""
    paid = saved = 0.0
    waits = 0.0  # the first instance needs no restart
    while True:
        lost_after = chance.expovariate(per_hour)
        trained = lost_after - waits
        if trained >= work - saved:
            return paid + waits + work - saved
        paid += lost_after
        saved += save * max(0, math.floor(trained / save))
        waits = restart


@pytest.mark.parametrize(
    ("per_day", "save_steps", "restart_minutes"),
    [(6, 50, 10), (24, 30, 20), (96, 7, 3), (1, 150, 60)],
)
def test_the_cost_at_spot_is_the_mean_cost_of_ten_thousand_interrupted_runs(
    per_day: float, save_steps: int, restart_minutes: float
) -> None:
    options = RunOptions(
        interruptions_per_day=per_day, save_steps=save_steps, restart_minutes=restart_minutes
    )
    cost = run_cost(WORKLOAD.run_shape(CONFIG), SPEED, PRICE, options=options)
    chance = random.Random(65)
    runs = [
        simulated_hours(HOURS, save_steps * 36 / 3600, restart_minutes / 60, per_day / 24, chance)
        for _ in range(10_000)
    ]
    simulated_usd = 1.25 * sum(runs) / len(runs)
    assert cost.spot_usd == pytest.approx(simulated_usd, rel=0.02)
    assert cost.spot_usd > 1.25 * HOURS and cost.full_run_usd == pytest.approx(6.0)


def test_without_interruptions_a_run_at_spot_takes_its_own_time() -> None:
    cost = run_cost(
        WORKLOAD.run_shape(CONFIG), SPEED, PRICE, options=RunOptions(interruptions_per_day=0)
    )
    assert cost.spot_usd == pytest.approx(2.5)
    assert cost.spot_interval(1.25) == pytest.approx((2.25, 3.125))


def test_the_interval_covers_the_assumed_rates() -> None:
    shape = WORKLOAD.run_shape(CONFIG)
    low, high = run_cost(shape, SPEED, PRICE).spot_interval(1.25) or (0.0, 0.0)
    for per_day in (0, 1, 6):
        known = run_cost(shape, SPEED, PRICE, options=RunOptions(interruptions_per_day=per_day))
        least, most = known.spot_interval(1.25) or (0.0, 0.0)
        assert low <= least < most <= high


def test_a_study_uses_the_same_interruptions_as_an_estimate() -> None:
    options = RunOptions(interruptions_per_day=12, restart_minutes=30, save_steps=20)
    estimated = run_cost(WORKLOAD.run_shape(CONFIG), SPEED, PRICE, options=options)
    assert project(WORKLOAD, CONFIG, SPEED, PRICE, options=options).spot_usd == estimated.spot_usd


def test_saving_more_often_loses_less_work() -> None:
    costs = [
        run_cost(
            WORKLOAD.run_shape(CONFIG),
            SPEED,
            PRICE,
            options=RunOptions(interruptions_per_day=24, save_steps=steps),
        ).spot_usd
        for steps in (1, 10, 100, 1000)
    ]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_a_run_that_practically_never_ends_has_no_cost() -> None:
    one = Interruptions(per_hour=(0.0, 60.0, 60.0), restart_hours=1.0, save_hours=0.5)
    assert one.paid_hours(10.0) is None and one.paid_interval(9.0, 11.0) is None
    cost = run_cost(
        WORKLOAD.run_shape(CONFIG),
        SPEED,
        PRICE,
        options=RunOptions(interruptions_per_day=1440, restart_minutes=600),
    )
    assert cost.spot_usd is None and cost.full_run_usd == pytest.approx(6.0)
