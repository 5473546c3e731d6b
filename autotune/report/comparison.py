"""A comparison of cards as a page, a document, a spreadsheet or data for a program.

`COLUMNS` says once what a card's row shows, for every form that people read; `values.compared` has it for programs.
Names come from users and must stay text in each form. An unknown value is a dash for people and empty for programs.
"""

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from autotune.catalog import NO_PRICE, describe_price
from autotune.core.json_view import json_data
from autotune.core.pages import environment
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.problem.run_cost import FITS
from autotune.report import describe
from autotune.report.html import answer_glossary, page
from autotune.report.values.compared import CardRow, card_row, compared
from autotune.report.values.comparison import (
    ComparedCard,
    Comparison,
    Group,
    speed_interval,
    spot_interval,
    usd_interval,
)
from autotune.report.values.plan import ONLY_BASELINE, ONLY_LEANEST

Data = dict[str, Any]


def _with_range(row: CardRow, name: str, fmt: Callable[[float | None], str] = fmt_count) -> str:
    """'1,109 (934 to 1,318)'."""
    value, low, high = (fmt(getattr(row, f"{name}{end}")) for end in ("", "_low", "_high"))
    return DASH if getattr(row, name) is None else f"{value} ({low} to {high})"


def _gib(value: float | None) -> str:
    return fmt_gib(value).removesuffix(" GiB")


def _usd(value: float | None) -> str:
    return fmt_usd(value).removeprefix("$")


def _memory(row: CardRow) -> str:
    limit = _gib(row.limit_gib)
    if row.configuration:
        return f"{_gib(row.need_gib)} of {limit}"
    if row.limit_gib is None:
        return str(row.state)
    return f"{row.state}: at least {_gib(row.need_gib)} of {limit} (guides: {_gib(row.guides_need_gib)})"


def _card(row: CardRow) -> str:
    return str(row.card) if row.own_card is None else f"{row.card} (as you described it)"


def _evidence(row: CardRow) -> str:
    count = row.measurements_on_this_card
    guess = ", no measurement of this kind of card" if row.is_guess else ""
    calibrated = f", {row.calibrated}" if row.calibrated else ""
    tightened = f", tightened by {count} measured on this card" if count else guess
    return (row.evidence or DASH) + tightened + calibrated


def _relative(row: CardRow) -> str:
    return DASH if row.relative_speed is None else f"{row.relative_speed:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column for people: its heading, and the text that it makes of a row's data. `table` groups narrow tables."""

    title: str
    table: str
    text: Callable[[CardRow], str]
    numeric: bool = False


COLUMNS = (
    Column(title="card", table="speed", text=_card),
    Column(title="GiB of limit", table="speed", text=_memory),
    Column(title="tokens/s (80 %)", table="speed", numeric=True, text=lambda row: _with_range(row, "tokens_per_s")),
    Column(title="relative", table="speed", numeric=True, text=_relative),
    Column(title="hours (80 %)", table="speed", numeric=True, text=lambda row: _with_range(row, "hours")),
    Column(title="kWh at most", table="speed", numeric=True, text=lambda row: fmt_count(row.kwh_at_most)),
    Column(title="USD (80 %)", table="cost", numeric=True, text=lambda row: _with_range(row, "usd", _usd)),
    Column(title="USD at spot (80 %)", table="cost", numeric=True, text=lambda row: _with_range(row, "usd_spot", _usd)),
    Column(title="USD/1,000 samples", table="cost", numeric=True, text=lambda row: _usd(row.usd_per_1000_samples)),
    Column(title="price", table="prices", text=lambda row: ""),
    Column(title="configuration", table="basis", text=lambda row: row.configuration or DASH),
    Column(title="evidence", table="basis", text=_evidence),
)


def cells(group: Group, card: ComparedCard, today: date) -> dict[str, str]:
    """A card's row for people: text by the title of its column."""
    price = card.plan.task.price if card.plan else None
    row = card_row(group, card)
    return {column.title: column.text(row) for column in COLUMNS} | {"price": describe_price(price, today)}


# --- sentences about a group


def how_estimated(comparison: Comparison) -> str:
    """The basis of the estimates, in a sentence without its stop."""
    how = "Estimated, calibrated as each card's evidence says" if comparison.calibrated else describe.NOT_MEASURED
    return f"{how}: {comparison.how_sure}"


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


def as_csv(comparison: Comparison, today: date) -> str:
    """A line for each card. Text that a spreadsheet would take for a formula begins with an apostrophe."""
    rows = [asdict(card_row(group, card)) for group in comparison.groups for card in group.cards]
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
    "json": lambda comparison, today: json.dumps(json_data(compared(comparison)), indent=2) + "\n",
}
