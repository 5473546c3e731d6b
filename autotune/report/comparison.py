"""A comparison of cards as a page, a document, a spreadsheet or data for a program.

`COLUMNS` says once what a card's row shows, for every form that people read; `card_data` holds the same for programs.
Names come from users and must stay text in each form. An unknown value is a dash for people and empty for programs.
"""

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from autotune.catalog import NO_PRICE, describe_price
from autotune.core.objective import Objective
from autotune.core.pages import environment
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.planning.compare import ComparedCard, Comparison, Group, speed_interval, spot_interval, usd_interval
from autotune.planning.device_estimate import NOT_MEASURED, how_sure
from autotune.planning.plan import ONLY_BASELINE, ONLY_LEANEST
from autotune.planning.rent_or_buy import Purse, buying_data, size_costs
from autotune.problem.run_cost import FITS, TABLE_EXAMPLES
from autotune.report.html import answer_glossary, page

Data = dict[str, Any]


def card_data(group: Group, card: ComparedCard) -> Data:
    """A card's row as plain data; what is not known is None."""
    best, cost, plan = card.best, card.cost, card.plan
    price = plan and plan.task.price
    need = best or card.least
    return {
        "model": group.model,
        "method": group.method,
        "card": card.device.name,
        "own_card": card.device.given,
        "state": card.state,
        "from_reserve": plan is not None and plan.from_reserve,
        "need_gib": need and need.need_gib,
        "memory_by": need and need.memory_by,
        "limit_gib": plan and plan.limit_gib,
        "guides_need_gib": plan and plan.baseline.need_gib,
        **_ranged("tokens_per_s", card.tokens_per_s or None, speed_interval(card)),
        "relative_speed": group.relative_speed(card),
        **_ranged("hours", cost.full_run_hours if cost else None, cost.interval_hours if cost else None),
        **_ranged("usd", card.usd, usd_interval(card)),
        **_ranged("usd_spot", card.spot_usd, spot_interval(card)),
        "spot_usd_per_hour": card.spot and card.spot.spot_usd_per_hour,
        "spot_provider": card.spot and card.spot.provider,
        "spot_as_of": card.spot and card.spot.as_of,
        "usd_per_1000_samples": cost and cost.cost_per_1000_samples_usd,
        "kwh_at_most": cost and cost.kwh,
        "configuration": best and best.config.label(),
        "evidence": best and "estimated",
        "measurements_on_this_card": best and best.tokens_per_s and best.num_observations,
        "is_guess": card.is_guess,
        "calibrated": best and best.tokens_per_s and best.calibrated,
        "usd_per_hour": price and price.usd_per_hour,
        "usd_per_day": price and price.usd_per_day,
        "usd_per_week": price and price.usd_per_week,
        "provider": price and price.provider,
        "price_as_of": price and price.as_of,
        "price_of_instance_of": price and price.count,
    }


def _ranged(name: str, value: float | None, bounds: tuple[float, float] | None) -> Data:
    low, high = bounds or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _with_range(data: Data, name: str, fmt: Callable[[float | None], str] = fmt_count) -> str:
    """'1,109 (934 to 1,318)'."""
    value, low, high = (fmt(data[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return DASH if data[name] is None else f"{value} ({low} to {high})"


def _gib(value: float | None) -> str:
    return fmt_gib(value).removesuffix(" GiB")


def _usd(value: float | None) -> str:
    return fmt_usd(value).removeprefix("$")


def _memory(data: Data) -> str:
    limit = _gib(data["limit_gib"])
    if data["configuration"]:
        return f"{_gib(data['need_gib'])} of {limit}"
    if data["limit_gib"] is None:
        return str(data["state"])
    return f"{data['state']}: at least {_gib(data['need_gib'])} of {limit} (guides: {_gib(data['guides_need_gib'])})"


def _card(data: Data) -> str:
    return str(data["card"]) if data["own_card"] is None else f"{data['card']} (as you described it)"


def _evidence(data: Data) -> str:
    count = data["measurements_on_this_card"]
    guess = ", no measurement of this kind of card" if data["is_guess"] else ""
    calibrated = f", {data['calibrated']}" if data["calibrated"] else ""
    tightened = f", tightened by {count} measured on this card" if count else guess
    return (data["evidence"] or DASH) + tightened + calibrated


def _relative(data: Data) -> str:
    return DASH if data["relative_speed"] is None else f"{data['relative_speed']:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column for people: its heading, and the text that it makes of a row's data. `table` groups narrow tables."""

    title: str
    table: str
    text: Callable[[Data], str]
    numeric: bool = False


COLUMNS = (
    Column(title="card", table="speed", text=_card),
    Column(title="GiB of limit", table="speed", text=_memory),
    Column(title="tokens/s (80 %)", table="speed", numeric=True, text=lambda row: _with_range(row, "tokens_per_s")),
    Column(title="relative", table="speed", numeric=True, text=_relative),
    Column(title="hours (80 %)", table="speed", numeric=True, text=lambda row: _with_range(row, "hours")),
    Column(title="kWh at most", table="speed", numeric=True, text=lambda row: fmt_count(row["kwh_at_most"])),
    Column(title="USD (80 %)", table="cost", numeric=True, text=lambda row: _with_range(row, "usd", _usd)),
    Column(title="USD at spot (80 %)", table="cost", numeric=True, text=lambda row: _with_range(row, "usd_spot", _usd)),
    Column(title="USD/1,000 samples", table="cost", numeric=True, text=lambda row: _usd(row["usd_per_1000_samples"])),
    Column(title="price", table="prices", text=lambda row: str(row["price"])),
    Column(title="configuration", table="basis", text=lambda row: row["configuration"] or DASH),
    Column(title="evidence", table="basis", text=_evidence),
)


def cells(group: Group, card: ComparedCard, today: date) -> dict[str, str]:
    """A card's row for people: text by the title of its column."""
    price = card.plan.task.price if card.plan else None
    data = card_data(group, card) | {"price": describe_price(price, today)}
    return {column.title: column.text(data) for column in COLUMNS}


# --- sentences about a group


def how_estimated(comparison: Comparison) -> str:
    """What the estimates rest on, in a sentence without its stop."""
    plans = [card.plan for group in comparison.groups for card in group.cards if card.plan]
    calibrated = any(plan.task.calibration for plan in plans)
    how = "Estimated, calibrated as each card's evidence says" if calibrated else NOT_MEASURED
    return f"{how}: {_how_sure(comparison)}"


def _how_sure(comparison: Comparison) -> str:
    """What memory and speed come from."""
    needs = [card.least for group in comparison.groups for card in group.cards if card.least]
    counted = {need.memory is not None and need.memory.counted for need in needs}
    plans = (card.plan for group in comparison.groups for card in group.cards if card.plan)
    objective = next((plan.task.workload.objective for plan in plans), Objective.SFT)
    kinds = [False] * (counted != {True}) + [True] * (True in counted)
    how = (how_sure(counted=kind, objective=objective) for kind in kinds)
    return "; where no formula covers a model, ".join(how)


def heading(group: Group) -> str:
    """'mistralai/Mistral-7B-v0.3: lora'."""
    return f"{group.model}: {group.method}"


def workload_text(group: Group) -> str:
    """What the run is; empty where nothing is planned."""
    if group.plan is None:
        return ""
    work = group.plan.task.workload
    assumed = " (assumed)" if work.examples_assumed else ""
    return f"{work.examples:,} examples{assumed} x {work.epochs}, {work.lengths}, global batch {work.global_batch}"


def verdicts(comparison: Comparison, group: Group) -> list[str]:
    """Sentences: the cheapest, the fastest, the smallest, what the budget allows, and the own card."""
    if group.plan is None:
        return list(dict.fromkeys(card.state for card in group.cards))
    sentences, fastest = list(_cheapest(group)), group.fastest
    if fastest is not None:
        rivals = _rivals(group.rivals(fastest, speed_interval))
        speed = fmt_count(fastest.tokens_per_s or None)
        sentences.append(f"fastest: {fastest.device.name}, {speed} tokens/s{rivals}")
    of_all, of_these = (card.name if card else "none" for card in (group.smallest, group.smallest_compared))
    sentences.append(f"smallest card that holds it: {of_all} of all known, {of_these} of these")
    counted = [card for card in group.cards if card.best is not None and card.plan is not None and card.plan.counted]
    leanest = [card.device.name for card in counted if card.plan and card.best is not card.plan.baseline]
    if len(leanest) < len(counted):
        sentences.append(ONLY_BASELINE)
    if leanest:
        sentences.append(f"{' and '.join(leanest)}: {ONLY_LEANEST}")
    if reserve := [card.device.name for card in group.cards if card.plan and card.plan.from_reserve]:
        sentences.append(f"nothing fits on {' and '.join(reserve)} but what learns differently")
    for difference, names in group.training_differences().items():
        sentences.append(f"not the same training on {' and '.join(names)} as on the fastest: {difference}")
    if (advice := comparison.advice(group)) is not None:
        text = f"within {comparison.budget}: {advice.chosen or 'none'}"
        if advice.breaks:
            text += f"; the upper end of its range breaks the budget: {', '.join(advice.breaks)}"
        sentences.append(text)
        if advice.excluded:
            sentences.append("left out: " + "; ".join(f"{name} ({why})" for name, why in advice.excluded))
    if comparison.owned is not None:
        sentences.append(_own_card(comparison, group))
    return sentences


def _cheapest(group: Group) -> Iterator[str]:
    """The cheapest on demand, and at spot where that is published."""
    cheapest, at_spot = group.cheapest, group.cheapest_at_spot
    if cheapest is None:
        held = any(card.holds_it for card in group.cards)
        why = NO_PRICE if group.fastest else "no formula knows the speed" if held else "none surely fits"
        yield f"cheapest: {DASH} ({why})"
    else:
        rivals = _rivals(group.rivals(cheapest, usd_interval))
        yield f"cheapest: {cheapest.device.name}, {fmt_usd(cheapest.usd)}{rivals}"
    if at_spot is not None and at_spot.spot is not None:
        rivals = _rivals(group.rivals(at_spot, spot_interval))
        usd = f"{fmt_usd(at_spot.spot_usd)} ({at_spot.spot.provider})"
        yield f"cheapest at spot: {at_spot.device.name}, {usd}{rivals}"


def _rivals(names: tuple[str, ...]) -> str:
    return f"; but {' and '.join(names)} cannot be told from it" if names else ""


def _own_card(comparison: Comparison, group: Group) -> str:
    owned, own, card = comparison.owned, comparison.own_run(group), comparison.own_card(group)
    assert owned is not None
    name = f"your own {owned.device.name}"
    if own is None or card is None or card.cost is None:
        return f"{name}: {DASH}, since it does not surely fit, or its speed or power is not known"
    text = (
        f"{name}: {fmt_usd(own.usd)} a run, {fmt_usd(own.electricity_usd)} of it electricity "
        f"({fmt_usd(owned.usd)} over {owned.hours:,.0f} h, {fmt_usd(owned.usd_per_kwh)} a kWh at its power limit)"
    )
    against = f"against {own.rented} rented at {fmt_usd(group.cheapest.usd)}" if group.cheapest else ""
    if own.never_pays:
        return f"{text}; it never pays {against}: its electricity alone costs as much"
    if own.pays_after_runs is None:
        return f"{text}; whether that pays is not known: {NO_PRICE}"
    hours = own.pays_after_runs * card.cost.full_run_hours
    late = f", more than its {owned.hours:,.0f} h" if hours > owned.hours else ""
    return f"{text}; it pays after {math.ceil(own.pays_after_runs):,} such runs ({fmt_hours(hours)}{late}) {against}"


# --- forms


def comparison_data(comparison: Comparison, sizes: Sequence[int] = TABLE_EXAMPLES, purse: Purse | None = None) -> Data:
    """The comparison as plain data; with a purse, what can be bought too."""
    owned = comparison.owned
    return {
        "how_sure": _how_sure(comparison),
        "budget": asdict(comparison.budget),
        "owned": owned and asdict(owned) | {"device": owned.device.name},
        "groups": [
            _group_data(comparison, group)
            | {
                "sizes": [asdict(one) for one in size_costs(group, sizes)],
                "buying": purse and buying_data(group, purse),
            }
            for group in comparison.groups
        ],
    }


def _group_data(comparison: Comparison, group: Group) -> Data:
    advice, own = comparison.advice(group), comparison.own_run(group)
    return {
        "model": group.model,
        "method": group.method,
        "workload": group.plan and group.plan.task.workload.facts(),
        "cards": [card_data(group, card) for card in group.cards],
        "cheapest": group.cheapest and group.cheapest.device.name,
        "cheapest_rivals": group.rivals(group.cheapest, usd_interval),
        "fastest": group.fastest and group.fastest.device.name,
        "fastest_rivals": group.rivals(group.fastest, speed_interval),
        "smallest_card": group.smallest and group.smallest.name,
        "smallest_compared": group.smallest_compared and group.smallest_compared.name,
        "advice": advice and asdict(advice),
        "own_run": own and asdict(own),
    }


def as_csv(comparison: Comparison, today: date) -> str:
    """A line for each card. Text that a spreadsheet would take for a formula begins with an apostrophe."""
    rows = [card_data(group, card) for group in comparison.groups for card in group.cards]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in tuple("=+-@") else value


def _escaped(text: str) -> str:
    """Text for Markdown without markup, without an end of the cell, and without a formula between dollars."""
    return re.sub(r"([\\|`*~$\[\]])", r"\\\1", html.escape(text, quote=False))


def _view(comparison: Comparison, today: date) -> Data:
    """Everything that the templates read."""
    functions = {"heading": heading, "workload": workload_text, "verdicts": verdicts, "cells": cells}
    numbers = [column for column in COLUMNS if column.table in ("speed", "cost")]
    texts = [column for column in COLUMNS if column not in numbers]
    values = {"comparison": comparison, "today": today, "columns": COLUMNS, "fits": FITS, "drawn": {}}
    values["glossary"] = answer_glossary(column.title for column in COLUMNS)
    return functions | values | {"how_estimated": how_estimated(comparison), "tables": (numbers, [COLUMNS[0], *texts])}


def as_markdown(comparison: Comparison, today: date) -> str:
    """A table for each group, and sentences."""
    pages = environment("autotune.report")
    pages.filters["markdown"] = _escaped
    return pages.get_template("comparison.md.j2").render(_view(comparison, today))


FORMATS: dict[str, Callable[[Comparison, date], str]] = {
    "markdown": as_markdown,
    "csv": as_csv,
    "html": lambda comparison, today: page("comparison.html.j2", _view(comparison, today)),
    "json": lambda comparison, today: json.dumps(comparison_data(comparison), indent=2) + "\n",
}
