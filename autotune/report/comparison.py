"""Renders a comparison of cards as HTML, Markdown, CSV or JSON.

`COLUMNS` defines a card's row once for all forms that people read, and `values.compared` defines
the row for programs. Names come from users, so each form escapes them. An unknown value is a dash
in the forms for people, and empty in the forms for programs.
"""

import csv
import io
import json
import math
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
from autotune.report.values.compared import CardRow, card_row, to_compared
from autotune.report.values.comparison import (
    ComparedCard,
    Comparison,
    Group,
    speed_interval,
    spot_interval,
    usd_interval,
)
from autotune.report.values.plan import ONLY_BASELINE, ONLY_GROUPED, ONLY_LEANEST

Data = dict[str, Any]


def _with_range(row: CardRow, name: str, fmt: Callable[[float | None], str] = fmt_count) -> str:
    """Format a number of the row with its interval as '1,109 (934 to 1,318)'."""
    value, low, high = (fmt(getattr(row, f"{name}{end}")) for end in ("", "_low", "_high"))
    return DASH if getattr(row, name) is None else f"{value} ({low} to {high})"


def _gib(value: float | None) -> str:
    """Format GiB without the unit."""
    return fmt_gib(value).removesuffix(" GiB")


def _usd(value: float | None) -> str:
    """Format USD without the dollar sign."""
    return fmt_usd(value).removeprefix("$")


def _memory(row: CardRow) -> str:
    """Describe the needed memory and the limit; say so if no configuration is certain to fit."""
    limit = _gib(row.limit_gib)
    if row.configuration:
        return f"{_gib(row.need_gib)} of {limit}"
    if row.limit_gib is None:
        return str(row.state)
    need = f"at least {_gib(row.need_gib)} of {limit} (baseline: {_gib(row.guides_need_gib)})"
    return f"{row.state}: {need}"


def _card(row: CardRow) -> str:
    """Return the name of the card, marked if the user described it."""
    return str(row.card) if row.own_card is None else f"{row.card} (as you described it)"


def _evidence(row: CardRow) -> str:
    """Describe the evidence, the number of measurements behind it, and the calibration."""
    count = row.measurements_on_this_card
    guess = ", no measurement of this kind of GPU" if row.is_guess else ""
    basis = f", narrowed by measurements on this GPU: {count}" if count else guess
    calibration = f", {row.calibrated}" if row.calibrated else ""
    return (row.evidence or DASH) + basis + calibration


def _relative_speed(row: CardRow) -> str:
    """Format the card's speed as a share of the fastest card's speed."""
    return DASH if row.relative_speed is None else f"{row.relative_speed:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column for people: its heading, and the function that formats a row's data.

    The page divides the columns into several narrow tables. `table` is the name of this column's
    table.
    """

    title: str
    table: str
    text: Callable[[CardRow], str]
    numeric: bool = False


COLUMNS = (
    Column(title="GPU", table="speed", text=_card),
    Column(title="GiB of limit", table="speed", text=_memory),
    Column(
        title="tokens/s (80 %)",
        table="speed",
        numeric=True,
        text=lambda row: _with_range(row, "tokens_per_s"),
    ),
    Column(title="relative", table="speed", numeric=True, text=_relative_speed),
    Column(
        title="hours (80 %)",
        table="speed",
        numeric=True,
        text=lambda row: _with_range(row, "hours"),
    ),
    Column(
        title="kWh at most",
        table="speed",
        numeric=True,
        text=lambda row: fmt_count(row.kwh_at_most),
    ),
    Column(
        title="USD (80 %)",
        table="cost",
        numeric=True,
        text=lambda row: _with_range(row, "usd", _usd),
    ),
    Column(
        title="USD at spot (80 %)",
        table="cost",
        numeric=True,
        text=lambda row: _with_range(row, "usd_spot", _usd),
    ),
    Column(
        title="USD/1,000 samples",
        table="cost",
        numeric=True,
        text=lambda row: _usd(row.usd_per_1000_samples),
    ),
    Column(title="price", table="prices", text=lambda row: ""),
    Column(title="configuration", table="basis", text=lambda row: row.configuration or DASH),
    Column(title="evidence", table="basis", text=_evidence),
)


def cells(group: Group, card: ComparedCard, today: date) -> dict[str, str]:
    """Return a card's row for people as {title of the column: text}."""
    price = card.plan.task.price if card.plan else None
    row = card_row(group, card)
    return {column.title: column.text(row) for column in COLUMNS} | {
        "price": describe_price(price, today)
    }


# --- sentences about a group


def basis_sentence(comparison: Comparison) -> str:
    """Return the basis of the estimates, as a sentence without the full stop."""
    basis = describe.NOT_MEASURED
    if comparison.calibrated:
        basis = "Estimated, calibrated as each GPU's evidence says"
    return f"{basis}: {comparison.how_sure}"


def heading(group: Group) -> str:
    """Return the heading of a group, such as 'mistralai/Mistral-7B-v0.3: lora'."""
    return f"{group.model}: {group.method}"


def workload_text(group: Group) -> str:
    """Describe the workload. The text is empty if no card of the group has a plan."""
    if group.plan is None:
        return ""
    work = group.plan.task.workload
    assumed = " (assumed)" if work.examples_assumed else ""
    examples = f"{work.examples:,} examples{assumed} x {work.epochs}"
    return f"{examples}, {work.lengths}, global batch {work.global_batch}"


def verdicts(comparison: Comparison, group: Group) -> list[str]:
    """Describe the cheapest, fastest and smallest card, the budget and the user's card.

    If the group has no plan, the sentences say why no card has a plan.
    """
    if group.plan is None:
        return list(dict.fromkeys(card.state for card in group.cards))

    sentences = list(_cheapest_cards(group))
    fastest = group.fastest
    if fastest is not None:
        rivals = _rivals(group.rivals(fastest, speed_interval))
        speed = fmt_count(fastest.tokens_per_s or None)
        sentences.append(f"fastest: {fastest.device.name}, {speed} tokens/s{rivals}")
    of_all, of_these = (
        card.name if card else "none" for card in (group.smallest, group.smallest_compared)
    )
    sentences.append(
        f"smallest GPU that holds the run: {of_all} of all known GPUs, {of_these} of these GPUs"
    )

    # Caveats of the comparison: plans that estimated only a few configurations, cards whose plan
    # comes from the reserve space (values to try only if all others do not fit), and cards that
    # would train with other settings.
    counted_cards = [
        card
        for card in group.cards
        if card.best is not None and card.plan is not None and card.plan.counted
    ]
    reasons = {card.device.name: card.plan.reason for card in counted_cards if card.plan}
    sentences += [
        few
        for few in (ONLY_BASELINE, ONLY_GROUPED)
        if any(reason.endswith(few) for reason in reasons.values())
    ]
    leanest = [name for name, reason in reasons.items() if reason.endswith(ONLY_LEANEST)]
    if leanest:
        sentences.append(f"{' and '.join(leanest)}: {ONLY_LEANEST}")
    reserve = [card.device.name for card in group.cards if card.plan and card.plan.from_reserve]
    if reserve:
        sentences.append(
            f"on {' and '.join(reserve)}, the run fits only with settings that change learning,"
            " which the other GPUs do not need"
        )
    for difference, names in group.training_differences().items():
        sentences.append(
            f"training on {' and '.join(names)} is not the same as on the fastest GPU: {difference}"
        )

    if (advice := comparison.advice(group)) is not None:
        text = f"within {comparison.budget}: {advice.chosen or 'none'}"
        if advice.breaks:
            text += f"; the upper end of its range breaks the budget: {', '.join(advice.breaks)}"
        sentences.append(text)
        if advice.excluded:
            sentences.append(
                "left out: " + "; ".join(f"{name} ({why})" for name, why in advice.excluded)
            )
    if comparison.owned is not None:
        sentences.append(own_card_sentence(comparison, group))
    return sentences


def _cheapest_cards(group: Group) -> Iterator[str]:
    """Describe the cheapest card on demand and, if spot prices are published, at spot prices."""
    cheapest = group.cheapest
    at_spot = group.cheapest_at_spot
    if cheapest is None:
        yield f"cheapest: {DASH} ({_no_cost_reason(group)})"
    else:
        rivals = _rivals(group.rivals(cheapest, usd_interval))
        yield f"cheapest: {cheapest.device.name}, {fmt_usd(cheapest.usd)}{rivals}"

    if at_spot is not None and at_spot.spot is not None:
        rivals = _rivals(group.rivals(at_spot, spot_interval))
        usd = f"{fmt_usd(at_spot.spot_usd)} ({at_spot.spot.provider})"
        yield f"cheapest at spot: {at_spot.device.name}, {usd}{rivals}"


def _no_cost_reason(group: Group) -> str:
    """Say why no card has a known cost."""
    if group.fastest:
        return NO_PRICE
    if any(card.holds_it for card in group.cards):
        return "no formula gives the speed"
    return "no GPU surely fits"


def _rivals(names: tuple[str, ...]) -> str:
    """Name the cards that may be better than the chosen one."""
    return f"; no clear difference from {' and '.join(names)}" if names else ""


def own_card_sentence(comparison: Comparison, group: Group) -> str:
    """Describe the cost of a run on the user's card, and when the card is cheaper than renting."""
    owned = comparison.owned
    own_run = comparison.own_run(group)
    card = comparison.own_card(group)
    assert owned is not None
    name = f"your own {owned.device.name}"
    if own_run is None or card is None or card.cost is None:
        return f"{name}: {DASH}, since the run may not fit, or the GPU's speed or power is unknown"

    text = (
        f"{name}: {fmt_usd(own_run.usd)} a run, "
        f"{fmt_usd(own_run.electricity_usd)} of it electricity "
        f"({fmt_usd(owned.usd)} over {owned.hours:,.0f} h, "
        f"{fmt_usd(owned.usd_per_kwh)} a kWh at its power limit)"
    )
    against = (
        f"against {own_run.rented} rented at {fmt_usd(group.cheapest.usd)}"
        if group.cheapest
        else ""
    )
    if own_run.never_pays:
        return f"{text}; it never pays off {against}: its electricity costs no less than this rent"
    if own_run.pays_after_runs is None:
        return f"{text}; it is unknown when it pays off: {NO_PRICE}"

    hours = own_run.pays_after_runs * card.cost.full_run_hours
    late = f", more than its {owned.hours:,.0f} h" if hours > owned.hours else ""
    runs = f"{math.ceil(own_run.pays_after_runs):,} such runs ({fmt_hours(hours)}{late})"
    return f"{text}; it pays off after {runs} {against}"


# --- output formats


def as_csv(comparison: Comparison, today: date) -> str:
    """Return CSV with a line for each card.

    A text that a spreadsheet would take for a formula gets a leading apostrophe.
    """
    rows = [asdict(card_row(group, card)) for group in comparison.groups for card in group.cards]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _no_formula(value: Any) -> Any:
    """Return the value, with an apostrophe before a text that looks like a formula."""
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in tuple("=+-@") else value


def _view(comparison: Comparison, today: date) -> Data:
    """Return all values that the templates read."""
    functions = {
        "heading": heading,
        "workload": workload_text,
        "verdicts": verdicts,
        "cells": cells,
    }
    numbers = [column for column in COLUMNS if column.table in ("speed", "cost")]
    texts = [column for column in COLUMNS if column not in numbers]

    values = {
        "comparison": comparison,
        "today": today,
        "columns": COLUMNS,
        "fits": FITS,
        "drawn": {},
    }
    values["glossary"] = answer_glossary(column.title for column in COLUMNS)
    return (
        functions
        | values
        | {"how_estimated": basis_sentence(comparison), "tables": (numbers, [COLUMNS[0], *texts])}
    )


def as_markdown(comparison: Comparison, today: date) -> str:
    """Return Markdown with a table and sentences for each group."""
    template = environment("autotune.report").get_template("comparison.md.j2")
    return template.render(_view(comparison, today))


FORMATS: dict[str, Callable[[Comparison, date], str]] = {
    "markdown": as_markdown,
    "csv": as_csv,
    "html": lambda comparison, today: page("comparison.html.j2", _view(comparison, today)),
    "json": lambda comparison, today: (
        json.dumps(json_data(to_compared(comparison)), indent=2) + "\n"
    ),
}
