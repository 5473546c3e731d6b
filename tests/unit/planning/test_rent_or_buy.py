"""What sizes of runs cost on each card, and when a card that is bought pays."""

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.catalog import Price, find_price, find_purchase, resolve_device
from autotune.cli.app import app
from autotune.core.errors import NothingFits, UsageError
from autotune.planning.compare import compare
from autotune.planning.plan import plan
from autotune.problem.study_spec import StudySpec
from autotune.report.answer import _cheapest, costs_answer
from autotune.report.figures import buying, sizes
from autotune.report.values.comparison import Comparison, usd_interval
from autotune.report.values.rent_or_buy import (
    WEEKS_PER_MONTH,
    PurchaseBudget,
    affordable_cards,
    parse_sizes,
    purchases,
    size_costs,
)

SPEC = StudySpec(model="qwen2.5-1.5b", space="lora", tokens_per_example=512, examples=20_000)
BUDGET = PurchaseBudget(budget_usd=2000, usd_per_kwh=0.30, hours_per_week=20)
CARDS = ["rtx-4090", "rtx-3090", "h100", "a2", "rtx-a6000"]


@pytest.fixture(scope="module")
def made() -> Comparison:
    return compare([SPEC], gpus=CARDS)


def test_a_size_costs_what_a_plan_of_so_many_examples_does(made: Comparison) -> None:
    costs = {
        (one.card, one.examples): one for one in size_costs(made.groups[0], (10_000, 1_000_000))
    }
    assert len(costs) == 2 * len(CARDS)
    for name in ("rtx-4090", "h100-sxm"):
        spec = replace(SPEC, examples=1_000_000, pins={"lora_rank": 16})  # as all compared cards
        best = plan(spec, device=resolve_device(name)).best
        cost = best and best.cost
        found = costs[name, 1_000_000]
        assert cost is not None and found.hours == pytest.approx(cost.full_run_hours)
        assert (found.usd, found.usd_low) == pytest.approx(
            (cost.full_run_usd, (cost.interval_usd or (0,))[0])
        )
        assert (found.hours_low, found.hours_high) == pytest.approx(cost.interval_hours)
        spot_price = 1.62 if name == "h100-sxm" else None
        assert found.usd_spot == (spot_price and pytest.approx(cost.spot_cost(spot_price)))
        assert (found.usd_spot_low, found.usd_spot_high) == (
            pytest.approx(cost.spot_interval(spot_price)) if spot_price else (None, None)
        )
    at_spot = costs["h100-sxm", 10_000]
    assert at_spot.usd_spot_low == pytest.approx(at_spot.hours_low * 1.62)  # no interruption
    assert at_spot.hours * 1.62 < at_spot.usd_spot < at_spot.usd_spot_high
    assert costs["rtx-4090", 10_000].usd_spot is costs["rtx-4090", 10_000].usd_spot_low is None
    a2 = costs["a2", 10_000]
    assert a2.hours > 0 and a2.usd is a2.usd_low is a2.usd_high is a2.usd_spot is None


def test_a_size_costs_its_micro_batches(made: Comparison) -> None:
    card = made.groups[0].cards[0]
    assert card.cost is not None and card.best is not None and card.plan is not None
    shape = card.plan.task.workload.run_shape(card.best.config)
    in_step = round(shape.examples_per_step)
    costs = size_costs(made.groups[0], (1, in_step, 20_001))
    one, step, more = (cost for cost in costs if cost.card == card.device.name)
    assert step.hours == pytest.approx(card.cost.full_run_hours / shape.whole_steps())
    assert shape.accumulation > 1 and one.hours == pytest.approx(step.hours / shape.accumulation)
    micro_batches = more.hours / one.hours
    assert micro_batches == pytest.approx(math.ceil(20_001 / in_step * shape.accumulation))


def test_the_cheapest_of_a_size_has_the_rivals_that_the_comparison_names() -> None:
    """A card of a kind that nobody measured may be cheaper,
    though it is not named as the cheapest.
    """
    group = compare([replace(SPEC, model="llama-3.2-1b")], gpus=["h100", "mi300x"]).groups[0]
    best = group.cheapest
    assert best and [card.is_guess for card in group.cards] == [False, True]
    assert group.rivals(best, usd_interval) == ("mi300x",)
    costs = size_costs(group, (20_000,))
    on_demand, at_spot = _cheapest(costs, 20_000)
    assert on_demand.startswith("Cheapest on demand for 20,000 examples: h100-sxm, ")
    assert on_demand.endswith("; no clear difference from mi300x") and "clear" not in at_spot
    cheaper = [
        replace(one, usd_low=0.001, usd_high=0.002) if one.is_guess else one for one in costs
    ]
    # it can be told: it is cheaper, if the guess is right
    assert "told" not in next(_cheapest(cheaper, 20_000))


def test_when_a_card_pays(made: Comparison) -> None:
    group = made.groups[0]
    bought = purchases(group, BUDGET)
    # no price, or beyond the budget: the others
    assert [one.card for one in bought] == ["rtx-4090", "rtx-3090"]
    best, price = bought[0], find_price("rtx-4090")
    assert price is not None and best.electricity_usd_per_hour == pytest.approx(0.45 * 0.30)
    assert best.pays_after_hours_against_itself == pytest.approx(
        1599 / (price.usd_per_hour - 0.135)
    )
    cheapest, own = group.cheapest, group.cards[0]
    assert cheapest is not None and cheapest.usd is not None and own.cost is not None
    runs = best.usd / (cheapest.usd - own.cost.full_run_hours * 0.135)
    assert best.rented == cheapest.device.name
    assert best.pays_after_hours == pytest.approx(runs * own.cost.full_run_hours)
    assert best.pays_after_months == pytest.approx(best.pays_after_hours / 20 / WEEKS_PER_MONTH)


def test_when_a_card_pays_against_spot(made: Comparison) -> None:
    group = made.groups[0]
    best, own, at_spot = purchases(group, BUDGET)[0], group.cards[0], group.cheapest_at_spot
    assert (
        at_spot is not None
        and at_spot.spot_usd is not None
        and at_spot.spot is not None
        and own.cost is not None
    )
    assert at_spot.spot_usd == min(
        card.spot_usd for card in group.cards if card.spot_usd is not None
    )
    runs = best.usd / (at_spot.spot_usd - own.cost.full_run_hours * 0.135)
    assert best.rented_at_spot == at_spot.device.name
    assert best.pays_after_hours_at_spot == pytest.approx(runs * own.cost.full_run_hours)
    assert best.pays_after_months_at_spot == BUDGET.months(best.pays_after_hours_at_spot)
    # nobody publishes it
    assert best.spot_usd_per_hour is best.pays_after_hours_against_its_spot is None
    card = purchases(group, replace(BUDGET, budget_usd=1e5))
    priced = next(one for one in card if one.spot_usd_per_hour is not None)
    rented = next(one for one in group.cards if one.device.name == priced.card)
    assert rented.spot_usd is not None and rented.cost is not None
    spot_rate = rented.spot_usd / rented.cost.full_run_hours  # with the interruptions
    assert priced.spot_usd_per_hour < spot_rate < 1.1 * priced.spot_usd_per_hour
    saved = spot_rate - priced.electricity_usd_per_hour
    assert priced.pays_after_hours_against_its_spot == (
        pytest.approx(priced.usd / saved) if saved > 0 else None
    )


def test_dear_electricity_never_pays_and_no_price_is_unknown(made: Comparison) -> None:
    dear = purchases(made.groups[0], replace(BUDGET, usd_per_kwh=5.0))[0]
    assert (
        dear.pays_after_hours,
        dear.pays_after_months,
        dear.pays_after_hours_against_itself,
    ) == (None, None, None)
    assert dear.rented is not None
    alone = compare([SPEC], gpus=["rtx-5060-ti-8gb"]).groups[0]
    bought = purchases(alone, BUDGET)[0]
    assert (
        find_price(bought.card) is None
        and bought.rented is None
        and bought.pays_after_hours is None
    )


def test_a_price_of_ones_own_has_no_spot() -> None:
    card = compare([replace(SPEC, price=9.0)], gpus=["h100"]).groups[0].cards[0]
    assert card.spot is None and card.spot_usd is None and card.usd is not None
    assert isinstance(compare([SPEC], gpus=["h100"]).groups[0].cards[0].spot, Price)


def test_what_a_budget_buys() -> None:
    names = affordable_cards(700)
    assert "rtx-3080-10gb" in names and "rtx-4090" not in names and "h100-sxm" not in names
    assert all((find_purchase(name) or pytest.fail(name)).usd <= 700 for name in names)
    assert affordable_cards(100) == []


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"budget_usd": 0.0}, "--buy cannot be 0"),
        ({"usd_per_kwh": -1}, "--electricity cannot be -1"),
        ({"hours_per_week": 169}, "--hours-per-week cannot be 169"),
    ],
)
def test_impossible_purchase_budgets_name_the_option(numbers: dict[str, float], told: str) -> None:
    with pytest.raises(UsageError) as error:
        replace(BUDGET, **numbers)
    assert str(error.value) == told


def test_sizes() -> None:
    assert parse_sizes(None) == (10_000, 50_000, 100_000)
    assert parse_sizes("5,5, 7_000") == (5, 7000)
    for text in ("", "x", "0", "1,-2", "1e3"):
        with pytest.raises(UsageError, match="numbers of examples"):
            parse_sizes(text)


# --- the command


def run(*args: str) -> Any:
    return CliRunner().invoke(
        app, ["compare", "--model", "qwen2.5-1.5b", "--tokens-per-example", "512", *args]
    )


def test_the_details_have_sizes() -> None:
    assert "examples\n" not in run("--gpus", "rtx-4090,h100").stdout
    one_size = run("--gpus", "rtx-4090,h100", "--sizes", "7").stdout
    assert "7 examples" in one_size and "10,000 examples\n" not in one_size
    result = run("--gpus", "rtx-4090,h100", "--details")
    assert result.exit_code == 0, result.output
    assert "Cost by size" in result.stdout and "Rent or buy" not in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith("│ h100-sxm ")]
    titles = [f"{size} examples" for size in ("10,000", "50,000", "100,000")]
    assert set(titles) <= {line.strip() for line in result.stdout.splitlines()} and len(rows) == 6
    assert "Cheapest on demand for 100,000 examples: " in result.stdout
    assert "Cheapest at spot for 100,000 examples: h100-sxm, " in result.stdout
    assert "the cloud may take the GPU back" in result.stdout
    assert any("$64.56" in row and "$451.92" in row and "$1.62 (verda" in row for row in rows)


def test_the_command_says_what_to_buy(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    asked = ("--gpus", "rtx-4090,rtx-3090", "--buy", "2000", "--electricity", "0.2")
    result = run(*asked, "--html", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("rtx-4090 is the GPU to buy for at most $2,000.00: $1,599.00, ")
    assert " h of use (" in result.stdout and len(result.stdout.splitlines()) < 20
    details = run(*asked, "--details").stdout
    assert "Buy rtx-4090, the fastest for at most $2,000.00" in details
    assert "$0.20 a kWh" in details
    page = file.read_text(encoding="utf-8")
    assert (
        "<title>Rent or buy: Qwen2.5-1.5B, default – autotune</title>" in page
        and page.count("data-figure=") == 2
    )


def test_a_card_has_one_colour_in_both_figures(made: Comparison) -> None:
    """The card to buy is also rented, and two cards are the cheapest, on demand and at spot."""
    group = made.groups[0]
    drawn = buying(purchases(group, BUDGET), group), sizes(size_costs(group), group)
    colours: dict[str, set[str]] = {}
    for figure in drawn:
        assert figure is not None
        for line in figure["data"]:
            colours.setdefault(line["name"].split()[0], set()).add(line["line"]["color"])
    assert len(colours) > 2 and all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(colours)
    looks = [(line["line"]["color"], line["line"]["dash"]) for line in (drawn[0] or {})["data"]]
    assert len(looks) == len(set(looks)) > 1


def test_a_model_without_a_card_to_buy_has_no_table_of_cards(made: Comparison) -> None:
    answer = costs_answer(made, (10_000,), replace(BUDGET, budget_usd=10.0), date(2026, 11, 1))
    assert [table.title for table in answer.tables] == ["Prices of one GPU", "10,000 examples"]
    assert "No GPU that surely fits is known to cost at most $10.00" in answer.found


def test_the_command_as_json() -> None:
    data = json.loads(
        run("--gpus", "rtx-4090,h100", "--sizes", "7", "--buy", "1600", "--json").stdout
    )
    group = data["groups"][0]
    assert [one["examples"] for one in group["sizes"]] == [7, 7]
    assert group["buying"]["buy"] == "rtx-4090" and group["buying"]["cards"][0]["usd"] == 1599
    assert group["cards"][1]["usd_per_day"] == pytest.approx(24 * 2.69)


def test_what_the_command_refuses() -> None:
    nothing = run("--gpus", "h100", "--buy", "500")
    assert isinstance(nothing.exception, NothingFits)
    assert "no GPU that surely fits the run is known to cost at most $500" in str(nothing.exception)
    assert "┃" not in nothing.stdout  # what is wrong, and no table of nothing
    assert isinstance(run("--buy", "-3").exception, UsageError)
    for unseen in (["--buy", "3000"], ["--sizes", "10000"]):
        assert "shows neither the results of --sizes nor" in str(
            run("--format", "markdown", *unseen).exception
        )
    assert "no GPU is known to cost at most $100" in str(run("--buy", "100").exception)
