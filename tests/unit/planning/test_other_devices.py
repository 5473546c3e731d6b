"""The winner's run on other cards: where it fits, by what was measured; at what speed and cost, as
a projection.
"""

from dataclasses import replace
from datetime import date
from itertools import pairwise
from typing import Any

import pytest

from autotune.catalog import describe_price, find_price, list_devices, resolve_device, resolve_model
from autotune.core.probe_types import Evidence, Measurement
from autotune.core.train_config import TrainConfig
from autotune.planning.device_estimate import device_limit_gib
from autotune.planning.other_devices import _rank, estimate_other_devices
from autotune.prediction.estimate import Estimate
from autotune.prediction.memory_formula import ERROR
from autotune.prediction.projection import run_performance
from autotune.prediction.transfer import speed_transfer
from autotune.problem.run_cost import FITS, OOM, TIGHT, project
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.report import figures
from autotune.report.html import render
from autotune.study.selection import Selection
from autotune.study.summary import Candidate
from tests.helpers.factories import calibration, measurement, summary
from tests.helpers.sessions import subject_of

CONFIG = TrainConfig(micro_batch_size=4, checkpointing="none")
MEASURED = replace(measurement(0.25, 30.0), peak_reserved_gib=31.0, limit_gib=132.0)


def task(**changes: Any) -> Task:
    values = {"model": resolve_model("mistral-7b"), "workload": Workload(examples=10_000)} | changes
    return subject_of(**values)


def found(
    task: Task, config: TrainConfig = CONFIG, measurement: Measurement = MEASURED
) -> dict[str, Estimate]:
    speed = run_performance(task, config, [measurement])
    reported = Evidence.MEASURED if task.carried is None else Evidence.PROJECTED
    cost = replace(project(task.workload, config, speed, task.price), evidence=reported)
    winner = Candidate(
        config=config, performance=speed, measurement=measurement, cost=cost, evidence=reported
    )
    selection = Selection(task)
    selection.confirm(config, measurement)
    return {one.device.name: one for one in estimate_other_devices(selection, winner, 0.05)}


def test_the_own_card_is_measured_and_others_are_projected() -> None:
    cards = found(task())
    own, other = cards["h200-sxm"], cards["h100-sxm"]
    assert (
        own.cost is not None and own.cost.evidence is Evidence.MEASURED and own.limit_gib == 132.0
    )
    assert other.cost is not None and other.cost.evidence is Evidence.PROJECTED
    carried = speed_transfer(resolve_device("h200"), resolve_device("h100"))
    assert carried is not None and own.tokens_per_s is not None and own.cost is not None
    there = replace(task(), measured_on=resolve_device("h200"), carried=carried)
    assert other.tokens_per_s == pytest.approx(
        run_performance(there, CONFIG, [MEASURED]).tokens_per_second
    )
    assert carried.bytes < other.tokens_per_s / own.tokens_per_s < 1  # an H100 multiplies as fast
    low, high = other.cost.interval_hours
    assert low < other.cost.full_run_hours < high
    assert other.price is not None and other.cost.full_run_usd == pytest.approx(
        other.cost.full_run_hours * other.price.usd_per_hour
    )


def test_cards_that_are_too_small_or_lack_a_feature_have_no_cost() -> None:
    cards = found(task())
    assert cards["a10"].state == OOM and cards["a10"].cost is None and cards["a10"].cost is None
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
    assert there.tokens_per_s == pytest.approx(
        run_performance(task(), CONFIG, [MEASURED]).tokens_per_second
    )
    assert cards["a100-80gb-sxm"].cost is not None
    assert cards["a100-80gb-sxm"].cost.evidence is Evidence.PROJECTED


def test_measurements_of_others_are_counted() -> None:
    """Two of LoRA on an A10 come with the package."""
    cards = found(task(), measurement=replace(MEASURED, peak_reserved_gib=15.0))
    assert cards["a10"].state == FITS and cards["a10"].num_observations == 2
    assert cards["l40s"].state == FITS and cards["l40s"].num_observations == 0


def test_cards_go_by_whether_they_fit_then_dollars_then_hours_then_the_most_memory() -> None:
    """A card without a price comes after all that have one, and one without a speed after those."""
    base = found(task())["h200-sxm"]
    assert base.cost is not None

    def card(
        name: str,
        usd: float | None,
        hours: float | None,
        memory_gib: float | None,
        state: str = FITS,
    ) -> Any:
        cost = base.cost and hours and replace(base.cost, full_run_usd=usd, full_run_hours=hours)
        device = replace(base.device, name=name, memory_gib=memory_gib)
        return replace(base, device=device, state=state, cost=cost or None)

    ordered = [
        card("free", 0.0, 9.0, 1.0),
        card("cheap", 5.0, 9.0, 1.0),
        card("cheap and slow", 5.0, 10.0, 80.0),
        card("large", 6.0, 2.0, 80.0),
        card("small", 6.0, 2.0, 40.0),
        card("of unknown memory", 6.0, 2.0, None),
        card("without price", None, 1.0, 90.0),
        card("without price and slow", None, 2.0, 90.0),
        card("without speed, large", None, None, 99.0),
        card("without speed, small", None, None, 9.0),
        card("tight", 1.0, 1.0, 99.0, TIGHT),
        card("too small", None, None, 99.0, OOM),
        card("too small and smaller", None, None, 9.0, OOM),
        card("too small, of unknown memory", None, None, None, OOM),
    ]
    assert all(_rank(before) < _rank(after) for before, after in pairwise(ordered))


def test_every_card_of_the_vendor_is_estimated_once_with_its_own_limit_and_price() -> None:
    case = task(price=find_price("h100-sxm"))
    cards = found(case)
    known = {
        card.name: card for card in list_devices() if card.vendor == "nvidia" and card.memory_gib
    }
    assert cards.keys() == known.keys() and list(cards).count("h200-sxm") == 1
    for name, one in cards.items():
        assert (one.device, one.config, one.need_gib) == (known[name], CONFIG, 31.0)
        if name != "h200-sxm":
            assert (one.limit_gib, one.price) == (
                device_limit_gib(known[name], 0.05),
                find_price(name),
            )
            assert (one.cost is None) is (one.tokens_per_s is None) is (one.state != FITS)
    own = cards["h200-sxm"]
    assert own.price == case.price is not None and own.num_observations == 0
    speed = run_performance(case, CONFIG, [MEASURED])
    assert (own.state, own.tokens_per_s) == (FITS, speed.tokens_per_second)
    measured = project(case.workload, CONFIG, speed, case.price)
    assert own.cost == replace(measured, evidence=Evidence.MEASURED)


def test_several_gpus_are_projected_to_no_other_card() -> None:
    """Their speed depends on what links them."""
    case = task(price=find_price("h200-sxm"))
    (own,) = found(case, replace(CONFIG, num_gpus=2)).values()
    assert case.price is not None and own.price == case.price.multiply(2)


def test_a_card_that_the_need_fills_to_the_error_of_the_formula_has_no_speed() -> None:
    limit = device_limit_gib(resolve_device("h100"), 0.05)
    for share, state in (
        (1 + ERROR / 2, TIGHT),
        (1 + 1.01 * ERROR, FITS),
        (0.99, TIGHT),
        (1 - 1.01 * ERROR, OOM),
    ):
        one = found(task(), measurement=replace(MEASURED, peak_reserved_gib=limit / share))[
            "h100-sxm"
        ]
        assert one.state == state and (one.cost is not None) is (state == FITS)


@pytest.mark.parametrize(
    ("card", "knobs", "lacks"),
    [
        ("t4", {}, "has no bf16"),
        ("t4", {"precision": "bf16_pure"}, "has no bf16"),
        ("t4", {"precision": "fp16_mixed"}, None),
        ("a10", {"quantization": "fp8"}, "has no fp8"),
        ("l4", {"quantization": "fp8", "compile": "per_layer"}, None),
        ("a10", {"quantization": "nf4"}, None),
        ("t4", {"quantization": "fp8"}, "has no bf16"),
    ],
    ids=str,
)
def test_what_a_card_lacks(card: str, knobs: dict[str, Any], lacks: str | None) -> None:
    """Even where it is too small as well."""
    for peak_gib, state in ((5.0, FITS), (500.0, OOM)):
        one = found(
            task(), replace(CONFIG, **knobs), replace(MEASURED, peak_reserved_gib=peak_gib)
        )[card]
        assert one.state == (lacks or state) and (one.cost is not None) is (one.state == FITS)


def test_a_calibration_replaces_the_data_sheet_of_another_card() -> None:
    slow = calibration("h100-sxm", products={"bf16": {1024: 30.0}}, copy_gb_s=300.0)
    plain, calibrated = (
        found(task(calibration=made))["h100-sxm"].tokens_per_s for made in (None, slow)
    )
    assert plain is not None and calibrated is not None and calibrated < 0.3 * plain


def test_a_study_on_a_cpu_estimates_no_cards() -> None:
    assert found(task(device=resolve_device("cpu"), price=None)) == {}


def test_the_report_shows_other_cards() -> None:
    cards = tuple(found(task()).values())
    drawn = figures.cards(cards)
    priced = [one for one in cards if one.cost and one.cost.full_run_usd is not None]
    assert drawn is not None
    assert [name.replace("<br>", "") for name in drawn["data"][0]["y"]] == [
        one.device.name for one in priced
    ]
    assert figures.cards(cards[-2:]) is None
    page = render(replace(summary(), cards=cards), "out")
    assert (
        "The same run on other GPUs" in page
        and ">has no bf16</td>" in page
        and ">out of memory</td>" in page
    )
    assert describe_price(priced[0].price, date.today()) in page
    assert "The same run on other GPUs" not in render(summary(), "out")
