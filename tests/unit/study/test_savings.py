"""The savings of a full run: their intervals and signs, and the cost of the search beside them."""

from dataclasses import replace

import pytest

from autotune.core.probe_types import Evidence
from autotune.problem.run_cost import CostProjection
from autotune.study.savings import Savings, run_savings
from autotune.study.summary import StudySummary
from tests.helpers.factories import summary


def cost(hours: float, usd: float | None = None, error: float = 0.0) -> CostProjection:
    return CostProjection(
        examples=100,
        epochs=1,
        num_steps=10,
        full_run_hours=hours,
        interval_hours=(hours * (1 - error), hours * (1 + error)),
        usd_per_hour=None if usd is None else usd / hours,
        full_run_usd=usd,
        interval_usd=None,
        spot_usd=None,
        cost_per_1000_samples_usd=None,
        kwh=None,
    )


def of(
    winner: CostProjection, baseline: CostProjection, search_usd: float | None = None
) -> Savings:
    ratio = baseline.full_run_hours / winner.full_run_hours
    interval = (ratio * 0.95, ratio * 1.05)
    return run_savings(winner, baseline, ratio, interval, search_hours=0.1, search_usd=search_usd)


def test_savings_are_the_difference_within_the_interval_of_the_speed_up() -> None:
    found = of(cost(1.0, 2.0), cost(2.0, 4.0), 0.5)
    assert (found.hours, found.usd) == (1.0, 2.0)
    assert found.interval_hours == pytest.approx((2 - 1 / 0.95, 2 - 1 / 1.05))
    assert found.interval_usd == pytest.approx((4 - 2 / 0.95, 4 - 2 / 1.05))
    assert found.pays is True and found.runs_to_pay == 1

    wide = of(cost(1.0), cost(2.0, error=0.5))
    assert wide.interval_hours == pytest.approx((0.5 * (2 - 1 / 0.95), 1.5 * (2 - 1 / 1.05)))
    assert wide.usd is None and wide.interval_usd is None and wide.pays is True


@pytest.mark.parametrize(
    ("search_usd", "pays", "runs"), [(1.0, True, 1), (2.0, None, 1), (3.0, False, 2)]
)
def test_a_search_pays_if_the_whole_interval_is_above_its_cost(
    search_usd: float, pays: bool | None, runs: int
) -> None:
    found = of(cost(1.0, 2.0), cost(2.0, 4.0), search_usd)
    assert (found.pays, found.runs_to_pay) == (pays, runs)


def test_a_faster_run_on_more_gpus_may_cost_more() -> None:
    found = of(cost(1.0, 8.0), cost(2.0, 4.0), 0.5)
    assert (found.hours, found.usd) == (1.0, -4.0)
    assert found.interval_usd is not None and found.interval_usd[0] < -4.0 < found.interval_usd[1]
    assert found.pays is False and found.runs_to_pay is None


def test_without_a_price_times_are_compared() -> None:
    assert of(cost(1.0), cost(2.0), 99.0).pays is True
    assert of(cost(0.05), cost(0.1)).pays is False


def test_a_study_has_savings_only_if_the_speeds_differ() -> None:
    study = summary()
    recipe = study.recipe
    assert recipe is not None and recipe.baseline is not None and study.savings is not None
    difference = (recipe.baseline.cost.full_run_usd or 0) - (recipe.winner.cost.full_run_usd or 0)
    assert study.savings.usd == difference > 0 and study.savings.search_usd == study.search_usd

    def without(**changes: object) -> StudySummary:
        return replace(study, recipe=replace(recipe, **changes))  # type: ignore[arg-type]

    same = without(winner=recipe.baseline)
    disturbed = without(winner=replace(recipe.winner, evidence=Evidence.DISTURBED))
    for other in (same, without(baseline=None), disturbed, without(alone=True)):
        assert other.savings is None
    assert replace(study, recipe=None).savings is None


def test_savings_follow_the_interval_of_a_speed_up_whose_measurements_disagree() -> None:
    study = summary()
    recipe = study.recipe
    assert recipe is not None and study.savings is not None
    speed = recipe.winner.performance
    faster = replace(speed, step_time_s=speed.step_time_s * 0.8)
    wide = replace(recipe.winner, performance=speed.cover(faster))
    found = replace(study, recipe=replace(recipe, winner=wide, disagreement="by 25%")).savings
    assert found is not None and found.interval_usd is not None and study.savings.interval_usd
    assert found.usd == study.savings.usd
    assert found.interval_usd[0] == pytest.approx(study.savings.interval_usd[0])
    assert found.interval_usd[1] > study.savings.interval_usd[1]
