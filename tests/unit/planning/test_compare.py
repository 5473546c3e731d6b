"""Comparing cards: who is named, what a budget allows, when an own card pays, each form of output,
and the command.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.catalog import Price, find_price, list_devices, resolve_device
from autotune.cli.app import app
from autotune.core.errors import NothingFits, UsageError
from autotune.core.json_view import json_data
from autotune.core.probe_types import DryCount
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH
from autotune.dry.prober import DryAnswer
from autotune.planning import compare as rules
from autotune.planning import counted_memory
from autotune.planning.compare import (
    Budget,
    ComparedCard,
    Comparison,
    Group,
    Owned,
    compare_card,
    smallest_holding,
)
from autotune.planning.device_estimate import (
    ACCURACY,
    COUNTED,
    OF_MEASURED_KIND,
    device_limit_gib,
)
from autotune.planning.plan import (
    ONLY_BASELINE,
    ONLY_GROUPED,
    ONLY_LEANEST,
    Plan,
    least_memory,
    plan_task,
    planned_setup,
)
from autotune.prediction.estimate import estimate, memory_state
from autotune.problem.performance import Performance
from autotune.problem.run_cost import FITS, OOM, project
from autotune.problem.study_spec import NamedConfig, StudySpec
from autotune.report.compared_answer import group_answer
from autotune.report.comparison import COLUMNS, cells, verdicts
from autotune.report.values.compared import card_row, to_compared
from autotune.report.values.comparison import Advice, OwnRun, speed_interval, usd_interval

TODAY = date(2026, 11, 22)
A10 = resolve_device("a10")
SMALL = {"model": "smollm2-135m", "pins": {"seq_len": 512, "lora_rank": 16, "packing": False}}
PINNED = ("--seq-len", "512", "--rank", "16", "--set", "packing=false")


def setup(gpu: str = "a10", **spec: Any) -> Any:
    return planned_setup(StudySpec(**SMALL | spec), resolve_device(gpu))


def task(gpu: str = "a10", **spec: Any) -> Any:
    return setup(gpu, **spec).task


@cache
def plan() -> Plan:
    return plan_task(task(), device_limit_gib(A10, 0.05))


def entry(
    gpu: str,
    hours: float = 1.0,
    usd: float | None = 1.0,
    price: Price | None = None,
    **changes: Any,
) -> ComparedCard:
    """A card that takes so long, at so many USD an hour, each give or take a tenth."""
    device = resolve_device(gpu)
    if price is None and usd is not None:
        price = Price(provider="test", device=device.name, usd_per_hour=usd, source="test")
    speed, best = 10_000 / hours, plan().best
    assert best is not None
    speeds = {
        "samples_per_second": speed / 3600,
        "tokens_per_second": speed,
        "step_time_s": hours * 3600 / 313,
    }
    took = Performance(**speeds, spread=(-0.1, 0.1), mfu=None)
    cost = project(plan().task.workload, best.config, took, price, power_w=200.0)
    best = replace(best, tokens_per_s=speed, interval=(0.9 * speed, 1.1 * speed), cost=cost)
    made = replace(plan(), task=replace(plan().task, price=price), best=best)
    return ComparedCard(**{"device": device, "plan": made, "least": best} | changes)


def too_large(gpu: str) -> ComparedCard:
    held = plan().baseline
    large = replace(held, state=OOM, need_gib=31.5)
    made = replace(plan(), best=None, baseline=large, limit_gib=10.0)
    return ComparedCard(device=resolve_device(gpu), plan=made, least=large)


def group(*cards: ComparedCard, **names: Any) -> Group:
    return Group(**{"model": "m", "method": "lora"} | names, cards=cards)


def comparison(*cards: ComparedCard, **changes: Any) -> Comparison:
    return Comparison(groups=(group(*cards),), **changes)


def advise(held: Group, budget: Budget, owned: Owned | None = None) -> Advice:
    advice = Comparison(groups=(held,), budget=budget, owned=owned).advice(held)
    assert advice is not None
    return advice


def own_run(owned: Owned, *cards: ComparedCard) -> OwnRun | None:
    made = comparison(*cards, owned=owned)
    return made.own_run(made.groups[0])


def said(*cards: ComparedCard, **changes: Any) -> list[str]:
    made = comparison(*cards, **changes)
    return verdicts(made, made.groups[0])


# Who is named


def test_the_cheapest_and_the_fastest() -> None:
    held = group(entry("a10", 4, 0.5), entry("h100", 1, 3.0), entry("l4", 6, None), too_large("t4"))
    assert held.cheapest is held.cards[0] and held.fastest is held.cards[1]
    assert [held.relative_speed(one) for one in held.cards] == [
        0.25,
        1.0,
        pytest.approx(1 / 6),
        None,
    ]
    assert held.smallest_compared == resolve_device("a10")  # by 6 MiB


def test_a_card_of_a_kind_that_nobody_measured_is_not_named() -> None:
    """Unless there is no other; what others measured on it counts."""
    kind = resolve_device("mi300x")
    made = entry("mi300x", 0.5, 0.5)
    assert made.plan and made.best
    guess = replace(made, plan=replace(made.plan, best=replace(made.best, device=kind)))
    known = replace(
        made, plan=replace(made.plan, best=replace(made.best, device=kind, num_observations=1))
    )
    other = entry("a10", 4, 0.5)
    assert guess.is_guess and not known.is_guess and not too_large("mi300x").is_guess
    assert group(guess, other).cheapest is group(guess, other).fastest is other
    assert group(guess, too_large("a10")).fastest is group(guess).cheapest is guess
    assert group(known, other).cheapest is group(known, other).fastest is known
    texts = [cells(group(one, other), one, date(2026, 1, 1))["evidence"] for one in (guess, known)]
    assert texts == [
        "estimated, no measurement of this kind of GPU",
        "estimated, narrowed by measurements on this GPU: 1",
    ]


def test_the_faster_of_two_equally_cheap_cards_is_the_cheapest() -> None:
    held = group(entry("a10", 4, 0.5), entry("h100", 1, 2.0))
    chosen = advise(held, Budget(max_usd=3)).chosen
    assert held.cheapest is held.cards[1] and chosen and chosen.name == "h100-sxm"


def test_cards_with_overlapping_intervals_are_rivals() -> None:
    held = group(
        entry("a10", 1, 1.00), entry("l4", 1, 1.15), entry("h100", 1, 1.30), entry("t4", 1, None)
    )
    assert held.rivals(held.cheapest, usd_interval) == ("l4",)
    assert "cheapest: a10, $1.00; no clear difference from l4" in said(*held.cards)
    assert held.rivals(None, usd_interval) == ()


def test_an_unknown_price_is_a_dash_and_never_nothing() -> None:
    held = group(entry("l4", 1, None))
    shown = cells(held, held.cards[0], TODAY)
    assert [shown[name] for name in ("USD (80 %)", "USD at spot (80 %)", "USD/1,000 samples")] == [
        DASH
    ] * 3
    assert (
        card_row(held, held.cards[0]).usd is None
        and shown["price"] == "– (no price is known)"
        and held.cheapest is None
    )
    assert f"cheapest: {DASH} (no price is known)" in said(*held.cards)


def test_the_price_of_a_part_of_an_instance_names_provider_and_age() -> None:
    price = Price(
        provider="aws",
        device="x",
        usd_per_hour=4.1,
        count=8,
        as_of="2024",
        source="x",
        quotable=False,
    )
    one = entry("a100-40gb", price=price)
    assert (
        cells(group(one), one, TODAY)["price"]
        == "$4.10/h, aws, 2 years old, 1/8 of an instance with 8 GPUs, a reference and not a quote"
    )


def test_a_card_that_is_too_small_shows_the_need() -> None:
    one = too_large("t4")
    shown = cells(group(one), one, TODAY)
    assert re.fullmatch(
        r"out of memory: at least 3\d\.\d of 10\.0 \(baseline: 3\d\.\d\)", shown["GiB of limit"]
    )
    assert {shown[name] for name in (column.title for column in COLUMNS if column.numeric)} == {
        DASH
    }


def test_observations_on_the_card_are_reported() -> None:
    one = entry("a10")
    assert one.best is not None
    assert cells(group(one), one, TODAY)["evidence"] == "estimated"
    one = replace(one, plan=replace(plan(), best=replace(one.best, num_observations=2)))
    assert (
        cells(group(one), one, TODAY)["evidence"]
        == "estimated, narrowed by measurements on this GPU: 2"
    )


def test_cards_that_train_differently_are_named() -> None:
    one, other = entry("a10", 2), entry("h100", 1)
    assert one.best is not None
    one = replace(
        one,
        plan=replace(plan(), best=replace(one.best, config=replace(one.best.config, lora_rank=8))),
    )
    difference = "training on a10 is not the same as on the fastest GPU: lora_rank 8 instead of 16"
    assert difference in said(one, other)


# The budget


def test_the_cheapest_within_the_budget_and_why_not_the_others() -> None:
    rented = [
        entry("a10", 4, 0.5),
        entry("h100", 1, 3.0),
        entry("l40s", 2, 1.2),
        entry("l4", 1, None),
    ]
    held = group(*rented, too_large("t4"))
    advice = advise(held, Budget(max_usd=2.5, max_hours=3))
    assert advice.chosen is not None and advice.chosen.name == "l40s"
    assert advice.breaks == ("$2.64 is over $2.50",)
    assert dict(advice.excluded) == {
        "a10": "4 h is over 3 h",
        "h100-sxm": "$3.00 is over $2.50",
        "l4": "no price is known",
        "t4": OOM,
    }
    assert advise(held, Budget(max_usd=2.7, max_hours=3)).breaks == ()


def test_without_a_limit_in_usd_an_unknown_price_comes_last() -> None:
    free, priced = entry("l4", 1, None), entry("a10", 2, 9.0)
    chosen = [advise(group(*held), Budget(max_hours=3)).chosen for held in ([free, priced], [free])]
    assert [one and one.name for one in chosen] == ["a10", "l4"]


def test_what_costs_nothing_is_the_cheapest() -> None:
    free, cheap = entry("l4", 2, 0.0), entry("a10", 1, 0.5)
    advice = advise(group(cheap, free), Budget(max_hours=3))
    assert advice.cheapest and advice.cheapest.name == "l4"


def test_if_nothing_is_within_the_budget_the_needed_amounts_are_reported() -> None:
    held = comparison(
        entry("a10", 4, 0.5), entry("h100", 1, 3.0), budget=Budget(max_usd=1, max_hours=0.5)
    )
    text = held.unmet_reason()
    assert text is not None and text.splitlines() == [
        "nothing is within $1.00 and 30 min",
        "m, lora: cheapest is a10 ($2.00, 4 h), fastest is h100-sxm ($3.00, 1 h)",
    ]
    assert held.remedy() == "allow more than $1.00 and 30 min, or compare other GPUs"
    slow, silent = entry("a10", 4, 0.5), entry("l4", plan=replace(plan(), best=None))
    assert silent.holds_it and silent.cost is None
    text = comparison(slow, silent, budget=Budget(max_usd=1)).unmet_reason()
    assert text is not None and text.splitlines()[:2] == [
        "nothing of known speed is within $1.00",
        "no formula gives the speed of l4",
    ]
    assert (
        replace(held, budget=Budget(max_usd=3)).unmet_reason()
        is replace(held, budget=Budget()).unmet_reason()
        is None
    )


def test_if_nothing_fits_the_smallest_card_is_named() -> None:
    held = Comparison(groups=(group(too_large("t4"), smallest=resolve_device("h100")),))
    assert (
        held.unmet_reason() == "no configuration is certain to fit any of these GPUs\n"
        "m, lora: the smallest GPU that holds the run is h100-sxm"
    )
    assert (
        held.remedy() == "take a larger GPU, a smaller model, --space qlora or a shorter --seq-len"
    )


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_a_budget_is_a_positive_number(wrong: float) -> None:
    with pytest.raises(UsageError, match="max_usd cannot be"):
        Budget(max_usd=wrong)
    with pytest.raises(UsageError, match="max_hours cannot be"):
        Budget(max_hours=wrong)
    with pytest.raises(UsageError, match="owned_hours cannot be"):
        Owned(device=resolve_device("a10"), usd=1, hours=wrong)


# The own card

RTX = resolve_device("rtx-4090")
OWNED = Owned(device=RTX, usd=1800, usd_per_kwh=0.5)


def test_an_own_card_pays_after_so_many_runs() -> None:
    cards = (entry("rtx-4090", 2, None), entry("h100", 1, 3.0))
    own = own_run(OWNED, *cards)
    assert own is not None and own.electricity_usd == pytest.approx(0.4 * 0.5)
    assert own.usd == pytest.approx(
        2 * 1800 / 10_000 + 0.2
    ) and own.pays_after_runs == pytest.approx(1800 / (3.0 - 0.2))
    text = said(*cards, owned=OWNED)[-1]
    assert (
        "over 10,000 h, $0.50 a kWh at its power limit" in text
        and "it pays off after 643 such runs" in text
    )
    assert (
        "more than its" not in text
        and "more than its 100 h)" in said(*cards, owned=replace(OWNED, hours=100))[-1]
    )


def test_an_own_card_never_pays_where_electricity_costs_more() -> None:
    made = comparison(entry("rtx-4090", 2, None), entry("h100", 1, 0.1), owned=OWNED)
    assert "it never pays off against h100-sxm rented at $0.1" in verdicts(made, made.groups[0])[-1]
    assert json_data(to_compared(made))["groups"][0]["own_run"]["never_pays"] is True


def test_an_own_card_with_unknown_price_or_speed() -> None:
    unpriced, large = entry("rtx-4090", 2, None), too_large("rtx-4090")
    alone = own_run(OWNED, unpriced)
    assert (
        alone is not None
        and alone.pays_after_runs is None
        and not alone.never_pays
        and own_run(OWNED, large) is None
    )
    assert said(large, entry("h100"), owned=OWNED)[-1].startswith("your own rtx-4090: –")
    assert "it is unknown when it pays off" in said(unpriced, owned=OWNED)[-1]


def test_an_own_card_is_an_option_within_the_budget() -> None:
    held = group(entry("rtx-4090", 2, None), entry("h100", 1, 3.0))
    advice = advise(held, Budget(max_usd=1), OWNED)
    assert advice.chosen is not None and advice.chosen.name == "your own rtx-4090"
    assert dict(advice.excluded) == {
        "rtx-4090": "no price is known",
        "h100-sxm": "$3.00 is over $1.00",
    }


# By the formulas


@pytest.mark.parametrize("space", ["full", "qlora"])
def test_least_is_the_least_of_the_whole_space(space: str) -> None:
    case = task(space=space)
    one, all_ = (
        least_memory(case, 20.0),
        [estimate(case, case.space.config(knobs), 20.0) for knobs in case.space.enumerate()],
    )
    assert one and one.need_gib == min(other.need_gib for other in all_ if other)


def test_the_smallest_card_holds_it_and_none_below_does() -> None:
    need = least_memory(task("h100", model="llama-2-13b", space="qlora"), 80.0)
    assert need is not None
    found = smallest_holding({True: need, False: need}, 0.05)
    assert found is not None and memory_state(need.need_gib, device_limit_gib(found, 0.05)) == FITS
    smaller = [
        card for card in list_devices() if 0 < (card.memory_gib or 0) < (found.memory_gib or 0)
    ]
    assert smaller
    assert not any(
        memory_state(need.need_gib, device_limit_gib(card, 0.05)) == FITS for card in smaller
    )
    with_bf16 = smallest_holding({True: need}, 0.05)
    assert with_bf16 is not None and with_bf16.supports_bf16
    # 3 % below the limit of a card is within the error of the formula, and beyond that of a count.
    assert need.memory is not None
    near = replace(need, need_gib=0.97 * device_limit_gib(found, 0.05))
    assert smallest_holding({True: near, False: near}, 0.05) is not found
    counted = replace(near, memory=replace(need.memory, counted=True))
    assert smallest_holding({True: counted, False: counted}, 0.05) is found
    large = {True: replace(need, need_gib=1e6)}
    assert smallest_holding(large, 0.05) is smallest_holding({}, 0.05) is None


def test_a_limit_never_makes_a_card_larger() -> None:
    specs = [StudySpec(**SMALL, memory_gib=size) for size in (None, 1000.0, 10.0)]
    plans = [made.cards[0].plan for made in rules.compare(specs, gpus=["a10"]).groups]
    limits = [made.limit_gib for made in plans if made]
    assert limits[0] == limits[1] > limits[2]


def test_the_reserve_is_opened_if_nothing_else_fits() -> None:
    case = setup(model="llama-2-13b")
    limit_gib = device_limit_gib(case.task.device, 0.05)
    closed = compare_card(replace(case, reserve=case.task.space), limit_gib)
    assert closed.state == OOM and closed.plan and not closed.plan.from_reserve
    held = compare_card(case, limit_gib)
    assert held.state == FITS and held.plan and held.plan.from_reserve
    assert (
        "on a10, the run fits only with settings that change learning,"
        " which the other GPUs do not need" in said(held)
    )


# The command


def run(*args: str, model: str = "smollm2-135m") -> Any:
    return CliRunner().invoke(app, ["compare", "--model", model, *PINNED, *args])


def test_a_table_with_every_cell_whole() -> None:
    result = run("--gpus", "a10,l4", "--gpus", "gb200", "--max-hours", "100", "--details")
    assert result.exit_code == 0, result.output
    assert "Nothing was measured here" in result.stdout and "…" not in result.stdout
    assert "1/4 of an instance with 4 GPUs" in result.stdout and "within 100 h: " in result.stdout
    assert "narrowed by measurements on this GPU: 2" in result.stdout


def test_settings_that_change_learning_are_named_under_the_table() -> None:
    """Full fine-tuning has no quantised base."""
    for model, gpus, space, named in (
        ("llama-3.1-8b", "h100,h200", "full", "precision bf16_pure"),
        ("llama-2-13b", "a10,h200", "default", "quantization nf4"),
    ):
        result = CliRunner().invoke(
            app, ["compare", "--model", model, "--gpus", gpus, "--space", space]
        )
        assert f"*: fits only with settings that change learning: {named}\n" in result.stdout


def test_all_cards_with_a_price_are_compared_by_default_at_one_rank() -> None:
    asked = ["compare", "--model", "smollm2-135m", "--seq-len", "512", "--space", "lora"]
    group = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["groups"][0]
    names = [card["card"] for card in group["cards"]]
    assert names == [device.name for device in list_devices() if find_price(device.name)]
    ranks = {card["configuration"].split()[1] for card in group["cards"] if card["configuration"]}
    assert ranks == {"r16"} and len(names) > 40

    lines = CliRunner().invoke(app, asked).stdout.splitlines()
    assert lines[0].startswith(f"{group['cheapest']} trains SmolLM2-135M cheapest: LoRA r16, ")
    rows = [line.split()[1] for line in lines if line.startswith("│ ")]
    assert len(rows) == 10 and rows[0] == group["cheapest"]


def test_an_own_card_joins_the_comparison() -> None:
    result = run("--gpus", "l4", "--owned", "rtx-4090", "--owned-usd", "1800", "--format", "json")
    first = json.loads(result.stdout)["groups"][0]
    assert [one["card"] for one in first["cards"]] == ["l4", "rtx-4090"] and first["own_run"][
        "usd"
    ] > 0


def test_cards_that_the_user_describes_are_compared_and_marked(tmp_path: Path) -> None:
    words = "memory=16,bf16_tflops=60,bandwidth_gb_s=300"
    result = run(
        "--gpus", f"l4,{words},a10", "--owned", f"{words},tdp_w=100,name=mine", "--owned-usd", "500"
    )
    assert result.exit_code == 0, result.output
    assert (
        "card-16gb (as you described it)" in result.stdout
        and "mine (as you described it)" in result.stdout
    )
    assert "your own mine" in result.stdout
    data = json.loads(run("--gpus", f"l4,{words}", "--format", "json").stdout)["groups"][0]["cards"]
    assert [(one["card"], one["own_card"]) for one in data] == [("l4", None), ("card-16gb", words)]
    assert data[1]["tokens_per_s"] > 0 and data[1]["is_guess"] is True


NOT_COUNTED = (
    "there is no formula for mixtral models, and the run's memory cannot be counted:"
    " It has no layers"
)
COUNT = DryCount(
    model_gib=10.0,
    adapters_gib=0.0,
    gradients_gib=1.0,
    optimizer_gib=1.0,
    segment_peak_gib={"backward_layer": 15.0},
    peak_allocated_gib=15.0,
    trainable_params=10,
    total_params=100,
)


@pytest.fixture
def not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry probe that refuses; the real one is tested with the real probe."""
    monkeypatch.setattr(
        counted_memory, "dry_count", lambda *asked, **_: DryAnswer(refused="It has no layers.")
    )


def test_a_family_without_a_formula_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 GiB are in use at the peak of whatever is counted: too much for a T4.

    No speed is known of it.
    """
    monkeypatch.setattr(counted_memory, "dry_count", lambda *asked, **_: DryAnswer(count=COUNT))
    asked = ("--gpus", "t4,a10,h100", "--methods", "lora")
    first = run(*asked, model="mixtral-8x7b").stdout.splitlines()[0]
    assert first.startswith("Mixtral-8x7B-v0.1 fits ") and "at an unknown speed: it needs" in first
    result = run(*asked, "--details", model="mixtral-8x7b")
    assert result.exit_code == 0, result.output
    assert f": {COUNTED}. " in result.stdout and ACCURACY not in result.stdout
    assert f"cheapest: {DASH} (no formula gives the speed)" in result.stdout
    assert "of all known GPUs, a10 of these" in result.stdout
    made = rules.compare([StudySpec(model="mixtral-8x7b", space="lora")], gpus=["t4,a10"])
    small, large = made.groups[0].cards
    assert (small.holds_it, small.state) == (False, OOM)
    assert (large.holds_it, large.state, large.best) == (
        True,
        "fits, at an unknown speed",
        None,
    )
    assert small.least is not None and small.least.memory is not None and small.least.memory.counted
    limited = rules.compare(
        [StudySpec(model="mixtral-8x7b", space="lora")], gpus=["a10"], budget=Budget(max_usd=1.0)
    )
    assert (
        limited.unmet_reason()
        == "it is unknown whether any GPU is within $1.00: no formula gives the speed"
    )
    mixed = run("--model", "mixtral-8x7b", "--gpus", "a10", "--methods", "lora", "--format", "json")
    assert json.loads(mixed.stdout)[
        "how_sure"
    ] == f"{ACCURACY}. If no formula covers a model: {COUNTED}. " + OF_MEASURED_KIND.format(
        gpu="a10"
    )


def test_the_baseline_of_a_family_without_a_formula_has_a_speed_where_its_work_was_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked = replace(COUNT, flops={"mm": 10**14}, moved_bytes={"other": 10**11}, operations=2000)
    monkeypatch.setattr(counted_memory, "dry_count", lambda *asked, **_: DryAnswer(count=worked))
    made = rules.compare([StudySpec(model="gpt2", space="lora")], gpus=["a10,h100"])
    group = made.groups[0]
    assert group.fastest is not None and group.fastest.device.name == "h100-sxm"
    assert (
        group.cheapest is not None and group.plan is not None and group.plan.reason == ONLY_BASELINE
    )
    assert all(
        card.best is not None and card.best == card.plan.baseline
        for card in group.cards
        if card.plan
    )
    assert ONLY_BASELINE in verdicts(made, group)

    assert json_data(group.plan)["how_sure"].startswith(COUNTED) and json_data(plan())[
        "how_sure"
    ].startswith(ACCURACY)


def counted(
    asked: list[TrainConfig],
    gib: Callable[[TrainConfig], float],
    refuses: Callable[[TrainConfig], bool] = lambda config: False,
) -> Callable[..., DryAnswer]:
    """Dry probes that need so many GiB, or refuse; what they are asked for is noted."""
    work: Any = {"flops": {"mm": 10**14}, "moved_bytes": {"other": 10**11}, "operations": 2000}

    def answer(model: object, config: TrainConfig, *_: object, **__: object) -> DryAnswer:
        asked.append(config)
        peak = gib(config)
        if refuses(config):
            return DryAnswer(refused="its head cannot")
        return DryAnswer(
            count=replace(
                COUNT, peak_allocated_gib=peak, segment_peak_gib={"backward_layer": peak}, **work
            )
        )

    return answer


def of_mixtral(gpu: str, method: str) -> ComparedCard:
    made = rules.planned_setup(StudySpec(model="mixtral-8x7b", space=method), resolve_device(gpu))
    return compare_card(made, device_limit_gib(resolve_device(gpu), 0.05))


def test_where_a_counted_baseline_does_not_fit_the_leanest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In full fine-tuning of the reserve: only lion with weights in pure bf16 needs less than an
    A10 has.
    """
    asked: list[TrainConfig] = []
    answer = counted(asked, lambda config: 15.0 if config.precision == "bf16_pure" else 60.0)
    monkeypatch.setattr(counted_memory, "dry_count", answer)
    card = of_mixtral("a10", "full")
    assert (
        card.best is not None
        and card.plan is not None
        and card.plan.from_reserve
        and card.state == FITS
    )
    assert (card.best.config.precision, card.best.config.optimizer) == ("bf16_pure", "lion_8bit")
    assert card.best.tokens_per_s and card.plan.reason.endswith(ONLY_LEANEST)
    assert card.best == card.least
    held = Group(model="m", method="full", cards=(card,))
    assert f"a10: {ONLY_LEANEST}" in verdicts(Comparison(groups=(held,)), held)
    assert ONLY_BASELINE not in verdicts(Comparison(groups=(held,)), held)
    assert (
        card_row(held, card).memory_by == "counted"
        and json_data(card.plan)["best"]["memory_by"] == "counted"
    )
    assert json_data(plan())["baseline"]["memory_by"] == "formula"


def test_a_mixture_is_counted_with_grouped_products_and_if_need_be_a_leaner_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gib(config: TrainConfig) -> float:
        state = 12.0 if config.optimizer == "adamw_torch_fused" else 2.0
        whole_weights = 20.0 if config.lora_kernels == "peft" else 0.0
        return 20.0 + state + whole_weights + config.micro_batch_size

    monkeypatch.setattr(counted_memory, "dry_count", counted([], gib))
    for gpu, size, optimizer in (
        ("a100-80gb-sxm", 8, "adamw_torch_fused"),
        ("rtx-5090", 4, "adamw_8bit"),  # 28.4 GiB
    ):
        card = of_mixtral(gpu, "lora")
        assert card.best is not None and card.plan is not None
        config = card.best.config
        assert (config.lora_kernels, config.compile, config.loss) == (
            *("grouped", "per_layer"),
            "chunked",
        )
        assert (config.micro_batch_size, config.optimizer) == (size, optimizer)
        assert card.plan.reason == ONLY_GROUPED
        held = Group(model="m", method="lora", cards=(card,))
        assert ONLY_GROUPED in verdicts(Comparison(groups=(held,)), held)


def test_no_smaller_baseline_is_counted_where_the_smallest_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[TrainConfig] = []
    monkeypatch.setattr(counted_memory, "dry_count", counted(asked, lambda config: 60.0))
    card = of_mixtral("a10", "lora")
    assert (
        card.state == OOM
        and card.plan is not None
        and card.plan.baseline.config.micro_batch_size == 8
    )
    assert {config.micro_batch_size for config in asked} == {8, 1}
    by_size = counted([], lambda config: 16.0 + 2 * config.micro_batch_size)
    monkeypatch.setattr(counted_memory, "dry_count", by_size)
    card = of_mixtral("l40s", "lora")
    assert card.best is not None and card.best.config.micro_batch_size == 8
    card = of_mixtral("rtx-5090", "lora")
    assert card.best is not None and card.best.config.micro_batch_size == 4


def test_the_leanest_has_the_whole_loss_where_the_head_has_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count that was refused was taken for a model that fits nowhere."""
    asked: list[TrainConfig] = []
    answer = counted(
        asked,
        lambda config: 15.0 * config.micro_batch_size,
        lambda config: config.loss == "chunked",
    )
    monkeypatch.setattr(counted_memory, "dry_count", answer)
    least = least_memory(setup("a10", model="mixtral-8x7b", space="lora", pins={}).task, 20.0)
    assert least is not None and least.state == FITS and least.config.loss == "full"
    assert least.config.micro_batch_size == 1 and [config.loss for config in asked[:2]] == [
        "chunked",
        "full",
    ]


def test_the_leanest_is_counted_where_adapters_cannot_be_grouped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without adapters on experts, a count refuses `grouped`, the leanest of `lora_kernels`."""
    answer = counted([], lambda config: 15.0, lambda config: config.lora_kernels == "grouped")
    monkeypatch.setattr(counted_memory, "dry_count", answer)
    of_lora = setup("a10", model="mixtral-8x7b", space="lora", pins={}).task
    assert set(of_lora.space.choices("lora_kernels")) >= {"peft", "grouped"}
    least = least_memory(of_lora, 20.0)
    assert least is not None and least.state == FITS and least.config.lora_kernels == "peft"


def test_the_leanest_of_a_mixture_has_experts_in_4_bits_where_they_can_be_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts of some families are not on the interface that quantises them."""
    asked: list[TrainConfig] = []
    task = setup("a10", model="mixtral-8x7b", space="qlora", pins={}).task
    for refused in (False, True):
        answer = counted(
            asked,
            lambda config: 15.0 if config.quantize_experts else 18.0,
            lambda config, refused=refused: refused and config.quantize_experts,
        )
        monkeypatch.setattr(counted_memory, "dry_count", answer)
        least = least_memory(task, 22.0)
        assert least is not None and least.config.quantize_experts is not refused
        assert least.state == FITS and least.config.quantization == "nf4"


@pytest.mark.usefixtures("not_counted")
def test_a_family_that_cannot_be_counted_leaves_the_others(tmp_path: Path) -> None:
    out = tmp_path / "cards.csv"
    result = run(
        "--model", "mixtral-8x7b", "--gpus", "l4,h100", "--methods", "lora", "--out", str(out)
    )
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [one["state"] for one in rows] == [FITS, FITS, *[NOT_COUNTED] * 2]
    assert result.exit_code == 0 and result.stdout == ""


@pytest.mark.usefixtures("not_counted")
def test_where_nothing_is_known_the_comparison_is_an_error() -> None:
    result = run("--gpus", "a10,cpu", model="mixtral-8x7b")
    assert isinstance(result.exception, UsageError) and result.exception.remedy
    assert str(result.exception).splitlines()[0] == NOT_COUNTED


def test_methods_that_a_card_cannot_run_are_reported_in_their_rows() -> None:
    pinned = ("--set", "precision=bf16_pure")
    result = run("--gpus", "t4,a10", "--methods", "full,lora", *pinned, "--format", "json")
    full, lora = json.loads(result.stdout)["groups"]
    assert (full["method"], lora["method"]) == ("full", "lora")
    for group in (full, lora):
        assert "t4 has no bf16" in group["cards"][0]["state"] and group["cards"][1]["state"] == FITS


def test_nothing_within_the_budget_is_an_exit_code_of_its_own() -> None:
    result = run("--gpus", "h100", "--max-usd", "0.0001", "--details")
    assert isinstance(result.exception, NothingFits) and "within $0.0001: none" in result.stdout
    result = run("--gpus", "t4", model="llama-3.1-70b")
    assert result.stdout.startswith("Llama-3.1-70B surely fits none of these GPUs: it needs at ")
    assert isinstance(
        result.exception, NothingFits
    ) and "the smallest GPU that holds the run is" in str(result.exception)


def test_a_hostile_directory_through_the_command(tmp_path: Path) -> None:
    name = tmp_path / "[bold]<script>|=cmd"
    name.mkdir()
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
    }
    (name / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 100, **sizes})
    )
    for form in ("table", "markdown", "csv", "html", "json"):
        result = run("--gpus", "l4", "--format", form, "--details", model=str(name))
        assert result.exit_code == 0, result.output
        assert ("[bold]<script>" in result.stdout) is (form in ("table", "csv", "json"))
        assert form != "table" or "[bold]<script>|=cmd: default" in result.stdout


def test_the_users_price_file_is_used(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("- {provider: mine, device: l4, usd: 8.0, count: 8, as_of: 2026-11-01}\n")
    cell = json.loads(run("--gpus", "l4", "--prices", str(prices), "--format", "json").stdout)[
        "groups"
    ][0]["cards"][0]
    assert (cell["usd_per_hour"], cell["price_of_instance_of"], cell["provider"]) == (
        1.0,
        8,
        "mine",
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpus", " , "], "no GPU is named"),
        (["--gpus", "a10x"], "unknown gpu 'a10x'"),
        (["--gpus", "a10,memory=24"], "--gpu memory=24: say how fast the GPU multiplies"),
        (["--gpus", "a10,no.yaml"], "cannot read no.yaml"),
        (["--gpus", "a10", "--format", "pdf"], "there is no format 'pdf'"),
        (
            ["--gpus", "a10", "--methods", "qlorra"],
            "unknown search space 'qlorra'; did you mean 'qlora'",
        ),
        (
            ["--gpus", "a10", "--methods", "lora", "--space", "full"],
            "--methods and a search space",
        ),
        (["--gpus", "a10", "--owned", "a10"], "--owned and --owned-usd go together"),
        (["--gpus", "a10", "--max-usd", "nan"], "max_usd cannot be nan"),
        (["--gpus", "a10", "--model", "no-such"], "unknown model 'no-such'"),
        (["--gpus", "a10,h100", "--prices", "no.yaml"], "cannot read no.yaml"),
    ],
)
def test_impossible_options(args: list[str], message: str) -> None:
    result = run(*args)
    assert isinstance(result.exception, UsageError) and str(result.exception).startswith(message)
    assert result.exception.remedy and "\n" not in str(result.exception) and result.stdout == ""


def test_one_card_stands_for_all_with_bf16_and_one_for_those_without() -> None:
    spec = StudySpec(**SMALL)
    for here, other in (("a10", False), ("t4", True)):
        limit = device_limit_gib(resolve_device(here), 0.05)
        needs = rules._least_by_bf16(spec, [compare_card(setup(here), limit)], lambda text: None)
        assert needs[not other].device.name == here
        assert needs[other].device.supports_bf16 is other and needs[other].device.kind != "cpu"
        assert (
            needs[True].config.precision.startswith("bf16")
            and needs[False].config.precision == "fp16_mixed"
        )
        assert needs[other].state == FITS
    assert rules._least_by_bf16(spec, [], lambda text: None) == {}


def test_methods_are_for_specs_without_a_space_or_configurations() -> None:
    plain, own = StudySpec(model="a"), StudySpec(model="b", space="full")
    assert [one.space for one in rules._studies([plain], ["lora, full", "lora"])] == [
        "lora",
        "full",
    ]
    assert rules._studies([plain, own], []) == [plain, own]
    for specs in ([own], [plain, own], [own, plain]):
        with pytest.raises(UsageError, match="cannot be given together"):
            rules._studies(specs, ["lora"])


def test_all_of_a_budget_may_be_spent() -> None:
    budget = Budget(max_usd=2.0, max_hours=3.0)
    assert budget.exceeded_limits(2.0, 3.0) == () and bool(budget) and not Budget()
    assert budget.exceeded_limits(2.01, 3.0) == ("$2.01 is over $2.00",)
    assert budget.exceeded_limits(2.0, 3.5) == ("3 h 30 min is over 3 h",)
    assert budget.exceeded_limits(None, 4.0) == ("no price is known", "4 h is over 3 h")
    assert (
        Budget(max_hours=3.0).exceeded_limits(None, 3.0)
        == ()
        == Budget(max_usd=0.5).exceeded_limits(0.5, 1e9)
    )
    assert [str(one) for one in (budget, Budget(max_usd=2), Budget(max_hours=1))] == [
        "$2.00 and 3 h",
        "$2.00",
        "1 h",
    ]


def test_an_own_card_that_costs_as_much_as_a_rented_one_never_pays() -> None:
    """200 W for 2 h at $0.50 a kWh are 20 cents, as much as the rent."""
    cards = (entry("rtx-4090", 2, None), entry("h100", 1, 0.2))
    own = own_run(OWNED, *cards)
    assert own is not None and (own.never_pays, own.pays_after_runs, own.rented) == (
        True,
        None,
        "h100-sxm",
    )
    cheaper = own_run(OWNED, cards[0], entry("h100", 1, 0.21))
    assert cheaper is not None and not cheaper.never_pays
    assert cheaper.pays_after_runs == pytest.approx(1800 / 0.01)
    assert comparison(*cards).own_card(group(*cards)) is None  # nobody owns one


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"usd": 0.0}, "owned_usd"),
        ({"usd": math.inf}, "owned_usd"),
        ({"usd_per_kwh": -0.1}, "usd_per_kwh"),
    ],
)
def test_an_own_card_has_a_price(wrong: dict[str, float], name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot be") as caught:
        Owned(**{"device": RTX, "usd": 1.0} | wrong)
    assert caught.value.remedy == "give a positive number"
    free = Owned(device=RTX, usd=1.0, usd_per_kwh=0.0)
    assert (free.hours, Owned(device=RTX, usd=1.0).usd_per_kwh) == (10_000.0, 0.3)


def test_the_state_of_a_card_says_what_is_not_known() -> None:
    fits, large = entry("a10"), too_large("t4")
    assert (fits.state, large.state) == (FITS, OOM)
    assert plan().best is not None and fits.plan is not None
    unknown = replace(
        fits, plan=replace(fits.plan, best=None), least=replace(plan().baseline, state=FITS)
    )
    assert unknown.state == "fits, at an unknown speed"
    assert unknown.tokens_per_s == 0.0 and unknown.cost is unknown.usd is unknown.best is None
    nothing = ComparedCard(device=A10)
    assert (
        nothing.state == "unknown" and replace(nothing, problem="no formula").state == "no formula"
    )
    assert replace(fits, least=None).state == "unknown"


def test_of_an_advice_the_cheapest_has_a_price_and_the_fastest_need_not() -> None:
    free, priced = entry("l4", 1, None), entry("a10", 2, 9.0)
    advice = advise(group(free, priced), Budget(max_hours=3))
    assert advice.cheapest is not None and advice.fastest is not None
    assert (advice.cheapest.name, advice.fastest.name) == ("a10", "l4")
    assert (advice.cheapest.usd, advice.cheapest.hours) == (18.0, 2.0)
    assert advice.cheapest.usd_high == pytest.approx(
        19.8
    ) and advice.cheapest.hours_high == pytest.approx(2.2)
    assert (
        str(advice.cheapest) == "a10 ($18.00, 2 h)"
        and str(advice.fastest) == "l4 (no price is known, 1 h)"
    )
    assert advice.fastest.usd_high is None
    nothing = advise(group(too_large("t4")), Budget(max_hours=3))
    assert (nothing.chosen, nothing.cheapest, nothing.fastest, nothing.breaks) == (
        None,
        None,
        None,
        (),
    )
    assert nothing.excluded == (("t4", OOM),)
    assert comparison(free).advice(group(free)) is None


def test_the_fastest_of_a_group_fits() -> None:
    assert group(too_large("t4")).fastest is None and group(too_large("t4")).cheapest is None
    held = group(too_large("t4"), entry("a10", 4), entry("l4", 2))
    assert held.fastest is held.cards[2] and held.plan is held.cards[0].plan
    assert held.relative_speed(held.cards[1]) == 0.5
    assert Group(model="m", method="lora", cards=(ComparedCard(device=A10),)).plan is None


def test_rivals_touch_the_interval_of_the_chosen_card() -> None:
    """Of $0.90 to $1.10 those that end or begin there; a tenth either way of each."""
    chosen = entry("a10", 1, 1.0)
    bounds = {
        "a10": (1.0, 2.0),
        "l4": (2.0, 3.0),
        "t4": (2.01, 3.0),
        "h100-sxm": (0.5, 1.0),
        "l40s": (0.1, 0.99),
    }
    others = [entry(name) for name in ("l4", "t4", "h100", "l40s", "rtx-4090")]
    held = group(chosen, *others)
    assert held.rivals(chosen, lambda card: bounds.get(card.device.name)) == ("l4", "h100-sxm")
    assert held.rivals(chosen, lambda card: None) == ()


def test_progress_is_said_every_two_seconds_and_a_warning_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that goes on by 1.1 s whenever it is looked at: every second card is said."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.1
        return now[0]

    monkeypatch.setattr(rules, "time", SimpleNamespace(monotonic=clock))
    said: list[str] = []
    spec = StudySpec(**SMALL | {"examples": 8})
    made = rules.compare([spec], gpus=["a10,l4", "t4"], methods=["lora, qlora"], say=said.append)
    assert [one.method for one in made.groups] == ["lora", "qlora"]
    assert [[card.device.name for card in one.cards] for one in made.groups] == [
        ["a10", "l4", "t4"]
    ] * 2
    model = made.groups[0].model
    assert [text for text in said if " of 6: " in text] == [
        f"1 of 6: {model}, lora, l4",
        f"3 of 6: {model}, qlora, a10",
        f"5 of 6: {model}, qlora, t4",
    ]
    warnings = [text for text in said if "do not fill a global batch" in text]
    assert len(warnings) == 1 and (made.budget, made.owned) == (Budget(), None)


def test_a_comparison_says_nothing_where_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "time", SimpleNamespace(monotonic=lambda: 5.0))
    said: list[str] = []
    made = rules.compare(
        [StudySpec(**SMALL, tokens_per_example=512)],
        gpus=["a10", "l4"],
        owned=OWNED,
        say=said.append,
    )
    assert said == [] and [card.device.name for card in made.groups[0].cards] == [
        "a10",
        "l4",
        "rtx-4090",
    ]
    assert made.owned is OWNED and made.groups[0].method == "default"
    assert made.groups[0].smallest is not None and made.groups[0].smallest.memory_gib


def test_suites_are_not_compared() -> None:
    suite = StudySpec(model="smollm2-135m", configs=(NamedConfig(name="a"),))
    with pytest.raises(UsageError, match="a suite names its configurations, so") as caught:
        rules.compare([suite], gpus=["a10"])
    assert caught.value.remedy == "use `autotune plan`"


def test_one_model_that_fits_somewhere_is_enough() -> None:
    fits, large = group(entry("a10", 4, 0.5)), group(too_large("t4"))
    for groups in ((fits, large), (large, fits)):
        made = Comparison(groups=groups)
        assert made.unmet_reason() is None
        assert replace(made, budget=Budget(max_usd=3)).unmet_reason() is None
        poor = replace(made, budget=Budget(max_usd=1))
        lines = (poor.unmet_reason() or "").splitlines()
        assert lines[0] == "nothing is within $1.00" and "m, lora: fits none of these GPUs" in lines
        assert poor.remedy() == "allow more than $1.00, or compare other GPUs"


@pytest.mark.usefixtures("not_counted")
def test_what_no_formula_covers_needs_nothing_that_is_known() -> None:
    assert least_memory(task("h100", model="mixtral-8x7b"), 80.0) is None


def test_a_card_that_could_not_be_planned_for_is_passed_over() -> None:
    unplanned, priced = ComparedCard(device=A10, problem="no formula"), entry("l4", 1, 1.0)
    held = group(unplanned, priced)
    assert held.plan is priced.plan and held.cheapest is held.fastest is priced
    assert held.smallest_compared == priced.device and held.relative_speed(unplanned) is None
    assert advise(held, Budget(max_usd=3)).excluded == (("a10", "no formula"),)
    own = replace(OWNED, device=A10)
    assert comparison(unplanned, owned=own).own_card(group(unplanned)) is None
    assert comparison(too_large("a10"), owned=own).own_card(group(too_large("a10"))) is None
    mine = entry("a10")
    assert comparison(mine, owned=own).own_card(group(priced, mine)) is mine
    assert mine.best is not None and mine.best.cost is not None
    unpowered = replace(mine.best, cost=replace(mine.best.cost, kwh=None))
    unknown = replace(mine, plan=replace(plan(), best=unpowered))
    assert comparison(unknown, owned=own).own_card(group(unknown)) is None


def test_what_may_help_is_said_of_the_leanest_of_all_cards() -> None:
    """Of a base in four bits before others, and of the shorter rows of those."""
    config = plan().baseline.config
    nf4 = replace(config, quantization="nf4", seq_len=256)
    long, short, plain = replace(nf4, seq_len=2048), nf4, replace(config, seq_len=128)

    def remedy(*configs: Any) -> str:
        held = [
            replace(too_large("t4"), least=replace(plan().baseline, config=one, state=OOM))
            for one in configs
        ]
        return Comparison(groups=(group(*held),)).remedy()

    assert remedy(plain, long) == "take a larger GPU, a smaller model or a shorter --seq-len"
    assert remedy(long, short) == remedy(short, plain) == "take a larger GPU or a smaller model"
    assert remedy(plain) == "take a larger GPU, a smaller model or --space qlora"


def test_the_intervals_of_a_card_are_those_of_its_best_configuration() -> None:
    """A tenth either way of 10,000 tokens/s, and of $2.00."""
    one = entry("a10", 1, 2.0)
    assert speed_interval(one) == pytest.approx((9_000.0, 11_000.0))
    assert usd_interval(one) == pytest.approx((1.8, 2.2))
    assert speed_interval(too_large("t4")) is usd_interval(too_large("t4")) is None


def test_the_slowest_card_that_was_measured_comes_before_a_guess() -> None:
    """Half a token a second, on a card whose kind was measured."""
    slow, fast = entry("a10", 20_000), entry("mi300x", 1)
    assert fast.plan and fast.best
    guess = replace(
        fast, plan=replace(fast.plan, best=replace(fast.best, device=resolve_device("mi300x")))
    )
    assert (slow.tokens_per_s, guess.is_guess) == (0.5, True)
    assert group(guess, slow).fastest is group(slow, guess).fastest is slow


def test_a_budget_chooses_the_card_that_is_chosen_without_one() -> None:
    """A guess wins only if it alone is within the budget, and is named if it looks cheaper."""
    known, made = entry("a10", 1, 2.0), entry("mi300x", 1, 1.0)
    assert made.plan and made.best and known.usd and made.usd
    kind = resolve_device("mi300x")
    guess = replace(
        made,
        plan=replace(made.plan, best=replace(made.best, device=kind)),
        least=replace(made.best, device=kind),
    )
    held = group(guess, known)
    assert guess.is_guess and guess.usd and guess.usd < known.usd and held.cheapest is known
    for budget, named, verdict in (
        (Budget(), "a10", "trains m cheapest: "),
        (Budget(max_usd=known.usd), "a10", f"trains m within ${known.usd:.2f}: "),
        (Budget(max_usd=guess.usd), "mi300x", f"trains m within ${guess.usd:.2f}: "),
        (Budget(max_usd=0.01), "a10", "trains m cheapest, but not within $0.01: "),
    ):
        answer = group_answer(Comparison(groups=(held,), budget=budget), held, None)
        assert answer.answer.startswith(f"{named} {verdict}"), answer.answer
        left_out = ", without mi300x, whose speed is only a guess"
        assert (left_out in answer.reason) is (named == "a10"), answer.reason
    unmet = advise(held, Budget(max_usd=0.01))
    assert unmet.cheapest and unmet.fastest
    assert unmet.cheapest.name == unmet.fastest.name == "a10"


@pytest.mark.usefixtures("not_counted")
def test_a_model_without_a_formula_is_one_error_with_its_remedy() -> None:
    """Said once for one card or more; a card that cannot be planned for has its own sentence."""
    spec = StudySpec(**SMALL | {"model": "mixtral-8x7b"})
    for gpus in (["a10"], ["a10,l4"]):
        with pytest.raises(UsageError, match=rf"^{NOT_COUNTED}$") as caught:
            rules.compare([spec], gpus=gpus)
        assert caught.value.remedy.startswith("`autotune run` on a GPU measures the memory")
    pure = StudySpec(**SMALL | {"space": "full", "pins": {"precision": "bf16_pure"}})
    with pytest.raises(UsageError, match="t4 has no bf16") as caught:
        rules.compare([pure], gpus=["t4"])
    first = caught.value.remedy
    with pytest.raises(UsageError) as caught:
        rules.compare([pure, spec], gpus=["t4"])
    assert len(str(caught.value).splitlines()) == 2 and caught.value.remedy == first


def test_cards_that_cannot_run_the_space_do_not_stand_for_others() -> None:
    """Weights in bf16 alone cannot be trained on cards like a T4."""
    pure = {"space": "full", "pins": {**SMALL["pins"], "precision": "bf16_pure"}}
    spec = StudySpec(**SMALL | pure)
    needs = rules._least_by_bf16(
        spec, [compare_card(setup("a10", **pure), 20.0)], lambda text: None
    )
    assert list(needs) == [True] and needs[True].config.method == "full"
    assert Comparison(groups=(group(too_large("t4")),)).unmet_reason() == (
        "no configuration is certain to fit any of these GPUs\nm, lora: no GPU holds it"
    )


def test_of_cards_that_hold_it_the_one_of_known_and_least_memory_is_the_smallest() -> None:
    large, small, unknown = entry("h100"), entry("a10"), entry("cpu")
    assert unknown.device.memory_gib is None
    for cards in ((large, small, unknown), (unknown, large, small), (small, unknown, large)):
        assert group(*cards, too_large("t4")).smallest_compared == small.device
    assert (
        group(unknown).smallest_compared == unknown.device
        and group(too_large("t4")).smallest_compared is None
    )
