"""The winner's run on other cards: where it fits, by what was measured; at what speed and cost, as a projection."""

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from autotune.catalog import describe_price, resolve_device, resolve_model
from autotune.core.probe_types import Evidence, Measurement
from autotune.core.train_config import TrainConfig
from autotune.planning.other_devices import estimate_other_devices
from autotune.prediction.transfer import speed_transfer
from autotune.problem.run_cost import FITS, OOM, DeviceEstimate, project
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.report import figures
from autotune.report.html import render
from autotune.study.selection import Selection
from autotune.study.summary import Candidate, device_estimate_data
from tests.helpers.factories import measurement, summary
from tests.helpers.sessions import subject_of

CONFIG = TrainConfig(micro_batch_size=4, checkpointing="none")
MEASURED = replace(measurement(0.25, 30.0), peak_reserved_gib=31.0, limit_gib=132.0)


def task(**changes: Any) -> Task:
    values = {"model": resolve_model("mistral-7b"), "workload": Workload(examples=10_000)} | changes
    return subject_of(**values)


def found(task: Task, config: TrainConfig = CONFIG, measurement: Measurement = MEASURED) -> dict[str, DeviceEstimate]:
    speed = task.performance(config, [measurement])
    reported = Evidence.MEASURED if task.carried is None else Evidence.PROJECTED
    cost = replace(project(task.workload, config, speed, task.price), evidence=reported)
    winner = Candidate(config=config, performance=speed, measurement=measurement, cost=cost, evidence=reported)
    selection = Selection(task)
    selection.confirm(config, measurement)
    return {one.device.name: one for one in estimate_other_devices(selection, winner, 0.05)}


def test_the_own_card_is_measured_and_others_are_projected() -> None:
    cards = found(task())
    own, other = cards["h200-sxm"], cards["h100-sxm"]
    assert own.cost is not None and own.cost.evidence is Evidence.MEASURED and own.limit_gib == 132.0
    assert other.cost is not None and other.cost.evidence is Evidence.PROJECTED
    carried = speed_transfer(resolve_device("h200"), resolve_device("h100"))
    assert carried is not None and own.tokens_per_s is not None and own.cost is not None
    there = replace(task(), measured_on=resolve_device("h200"), carried=carried)
    assert other.tokens_per_s == pytest.approx(there.performance(CONFIG, [MEASURED]).tokens_per_second)
    assert carried.bytes < other.tokens_per_s / own.tokens_per_s < 1  # an H100 multiplies as fast
    low, high = other.cost.interval_hours
    assert low < other.cost.full_run_hours < high
    assert other.price is not None and other.cost.full_run_usd == pytest.approx(
        other.cost.full_run_hours * other.price.usd_per_hour
    )


def test_cards_that_are_too_small_or_lack_a_feature_have_no_cost() -> None:
    cards = found(task())
    assert (
        cards["a10"].state == OOM
        and cards["a10"].cost is None
        and device_estimate_data(cards["a10"])["full_run_usd"] is None
    )
    assert cards["v100-sxm2-32gb"].state == "has no bf16" and cards["v100-sxm2-32gb"].cost is None
    assert "mi300x" not in cards and "cpu" not in cards
    assert found(task(), replace(CONFIG, quantization="fp8"))["a100-80gb-sxm"].state == "has no fp8"


def test_the_cheapest_card_comes_first_and_too_small_ones_last() -> None:
    cards = list(found(task()).values())
    usd = [one.cost.full_run_usd for one in cards if one.cost and one.cost.full_run_usd is not None]
    assert len(usd) > 3 and usd == sorted(usd)
    states = [one.state == FITS for one in cards]
    assert states == sorted(states, reverse=True) and not states[-1]


def test_the_card_that_probed_for_another_counts_as_measured() -> None:
    h200, a100 = resolve_device("h200"), resolve_device("a100-80gb-sxm")
    carried = speed_transfer(h200, a100, [0.4])
    cards = found(task(device=a100, measured_on=h200, carried=carried))
    assert cards["a100-80gb-sxm"].num_observations == 1 and cards["h200-sxm"].num_observations == 0
    there = cards["h200-sxm"]
    assert there.cost is not None and there.cost.evidence is Evidence.MEASURED
    assert there.tokens_per_s == pytest.approx(task().performance(CONFIG, [MEASURED]).tokens_per_second)
    assert cards["a100-80gb-sxm"].cost is not None
    assert cards["a100-80gb-sxm"].cost.evidence is Evidence.PROJECTED


def test_measurements_of_others_are_counted() -> None:
    """Two of LoRA on an A10 come with the package."""
    cards = found(task(), measurement=replace(MEASURED, peak_reserved_gib=15.0))
    assert cards["a10"].state == FITS and cards["a10"].num_observations == 2
    assert cards["l40s"].state == FITS and cards["l40s"].num_observations == 0


def test_a_study_on_a_cpu_estimates_no_cards() -> None:
    assert found(task(device=resolve_device("cpu"), price=None)) == {}


def test_the_report_shows_other_cards() -> None:
    cards = tuple(found(task()).values())
    drawn = figures.cards(cards)
    priced = [one for one in cards if one.cost and one.cost.full_run_usd is not None]
    assert drawn is not None
    assert [name.replace("<br>", "") for name in drawn["data"][0]["y"]] == [one.device.name for one in priced]
    assert figures.cards(cards[-2:]) is None
    page = render(replace(summary(), cards=cards), "out")
    assert "The same run on other cards" in page and ">has no bf16</td>" in page and ">out of memory</td>" in page
    assert describe_price(priced[0].price, date.today()) in page
    assert "The same run on other cards" not in render(summary(), "out")
