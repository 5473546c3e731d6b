"""The answer to one question as tables for a terminal and as a page: what a card trains, rent or buy, how nodes differ.

An answer has sentences, tables and figures, each made once for both. The page opens offline and holds plotly.js.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from autotune.catalog import NO_PRICE, ModelSpec, age, describe_price
from autotune.core.pages import environment
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.planning.compare import Comparison, Group
from autotune.planning.device_estimate import how_known
from autotune.planning.rent_or_buy import Bought, Purse, SizeCost, purchases, size_costs
from autotune.planning.trainable import METHODS, Entry, Trainable
from autotune.prediction.transfer import is_measured_kind
from autotune.problem.run_cost import OOM, TIGHT
from autotune.problem.task import Task
from autotune.report import figures
from autotune.report.comparison import heading, how_estimated
from autotune.report.html import script_json
from autotune.report.style import plotly_js
from autotune.study.nodes import Node

SPOT = "A day is 24 hours and a week 168. Spot prices leave out what interruptions cost; a dash is not known."


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts; `columns` has each heading with the side to which its cells keep."""

    title: str
    columns: dict[str, str]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question's answer. `figures` are what Plotly.newPlot takes, by their caption."""

    title: str
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    figures: dict[str, dict[str, Any]]


def page(answer: Answer, today: date) -> str:
    """The answer as one page of HTML."""
    from markupsafe import Markup

    return (
        environment("autotune.report")
        .get_template("answer.html.j2")
        .render(
            title=answer.title,
            notes=answer.notes,
            tables=answer.tables,
            figures=answer.figures,
            figures_json=script_json(answer.figures),
            plotly_js=Markup(plotly_js() if answer.figures else ""),  # noqa: S704 (the library's own file)
            today=today,
        )
    )


# --- what a card can train


def trainable_answer(made: Trainable, today: date) -> Answer:
    """A table for each method, with a row for each model, the smallest first."""
    columns = {"model": "left", "billion": "right", "verdict": "left"}
    columns |= dict.fromkeys(("tokens/s (80 %)", "USD/1,000 samples"), "right")
    notes = [
        f"{fmt_gib(made.device.memory_gib)}, {fmt_gib(made.limit_gib)} of it for tensors. "
        f"{how_known(made.calibration, made.device)}.",
        f"Samples of {made.lengths.removesuffix(' each')}; price of an hour: {describe_price(made.price, today)}.",
        "A verdict has the longest row, in tokens, of which one surely fits. tight: too close to tell. *: fits only "
        "with what learns differently, pure bf16 or another optimizer than AdamW.",
        f"{len(made.models)} models, one of each size; --model NAME plans any other.",
        *_refusals(made.entries),
    ]
    if any(entry.tokens_per_s for entry in made.entries) and not is_measured_kind(made.device):
        notes.append("Nobody measured such a card: its speeds are guesses.")
    tables = [
        Table(title=title, columns=columns, rows=tuple(_model_row(made, model, method) for model in made.models))
        for method, title in METHODS.items()
    ]
    drawn = figures.trainable(made)
    return Answer(
        title=f"What {made.device.label} can train",
        notes=tuple(notes),
        tables=tuple(tables),
        figures={"Tokens/s by model and method, with 80 % intervals": drawn} if drawn else {},
    )


def _model_row(made: Trainable, model: ModelSpec, method: str) -> tuple[str, ...]:
    entry = next(one for one in made.row(model) if one.method == method)
    size = DASH if model.params is None else f"{model.params / 1e9:.3g}"
    return model.short, size, _verdict(entry), _speed(entry), fmt_usd(entry.usd_per_1000)


def _verdict(entry: Entry) -> str:
    """'fits, rows to 8,192', 'fits*, rows to 2,048', 'tight', 'no: needs 63 GiB', 'refused'."""
    if entry.problem:
        return "refused"
    if entry.state == OOM:
        return "no" if entry.least_gib is None else f"no: needs {entry.least_gib:,.0f} GiB"
    state = entry.state + "*" * entry.learns_differently
    return state if entry.state == TIGHT or entry.longest_row is None else f"{state}, rows to {entry.longest_row:,}"


def _speed(entry: Entry) -> str:
    if entry.tokens_per_s is None or entry.interval is None:
        return DASH
    low, high = map(fmt_count, entry.interval)
    return f"{fmt_count(entry.tokens_per_s)} ({low} to {high})"


def _refusals(entries: Sequence[Entry]) -> list[str]:
    return [f"{name}: {why}." for name, why in dict.fromkeys((one.model, one.problem) for one in entries) if why]


# --- what sizes cost, and whether to buy


def costs_answer(made: Comparison, sizes: Sequence[int], purse: Purse | None, today: date) -> Answer:
    """For each model and method: prices of the cards, the cost of each size on each, and with a purse what to buy."""
    tables, drawn, notes = [], {}, [f"{how_estimated(made)}.", SPOT]
    for group in made.groups:
        costs, name = size_costs(group, sizes), heading(group)
        tables += [_prices_table(group, name, today), _sizes_table(costs, name)]
        if figure := figures.sizes(costs):
            drawn[f"{name}: USD on demand by number of examples, with 80 % intervals"] = figure
        if purse is not None:
            bought = purchases(group, purse)
            tables.append(_buying_table(bought, purse, name))
            notes += [*(f"{name}: {sentence}" for sentence in buying_sentences(bought, purse)), _buying_basis(purse)]
            if figure := figures.buying(bought, group):
                drawn[f"{name}: USD by hours of use, bought and rented"] = figure
    return Answer(
        title="Rent or buy" if purse else "Cost by size",
        notes=tuple(dict.fromkeys(notes)),
        tables=tuple(tables),
        figures=drawn,
    )


def _prices_table(group: Group, name: str, today: date) -> Table:
    rows = []
    for card in group.cards:
        price = card.plan.task.price if card.plan else None
        spot = card.spot
        at_spot = (
            DASH if spot is None else f"{fmt_usd(spot.spot_usd_per_hour)} ({spot.provider}, {age(spot.as_of, today)})"
        )
        longer = (price.usd_per_hour, price.usd_per_day, price.usd_per_week) if price else (None, None, None)
        source = f"{price.provider}, {age(price.as_of, today)}" if price else NO_PRICE
        rows.append((card.device.label, *map(fmt_usd, longer), source, at_spot))
    columns = {"card": "left", "an hour": "right", "a day": "right", "a week": "right", "price": "left"}
    return Table(title=f"{name}: prices of one GPU", columns=columns | {"an hour at spot": "left"}, rows=tuple(rows))


def _sizes_table(costs: Sequence[SizeCost], name: str) -> Table:
    columns = {"card": "left"} | dict.fromkeys(("examples", "hours (80 %)", "USD (80 %)", "USD at spot"), "right")
    rows = [
        (
            one.card,
            f"{one.examples:,}",
            f"{fmt_hours(one.hours)} ({fmt_hours(one.hours_low)} to {fmt_hours(one.hours_high)})",
            DASH if one.usd is None else f"{fmt_usd(one.usd)} ({fmt_usd(one.usd_low)} to {fmt_usd(one.usd_high)})",
            fmt_usd(one.usd_spot),
        )
        for one in costs
    ]
    return Table(title=f"{name}: cost by size", columns=columns, rows=tuple(rows))


def _buying_table(bought: Sequence[Bought], purse: Purse, name: str) -> Table:
    columns = {"card": "left", "USD, at launch": "left", "tokens/s (80 %)": "right", "W": "right"}
    columns |= dict.fromkeys(("electricity/h", "pays against renting itself", "against the cheapest rented"), "right")
    columns[f"at {purse.hours_per_week:g} h a week"] = "right"
    rows = []
    for one in bought:
        low, high = map(fmt_count, (one.tokens_per_s_low, one.tokens_per_s_high))
        speed = f"{fmt_count(one.tokens_per_s)} ({low} to {high})" + ", a guess" * one.is_guess
        after = (_after(one.pays_after_hours_against_itself), _after(one.pays_after_hours))
        rented = "" if one.pays_after_hours is None else f" ({one.rented})"
        months = DASH if one.pays_after_months is None else f"{one.pays_after_months:,.1f} months"
        usd = f"{fmt_usd(one.usd)} ({one.as_of[:4]})"
        cells = (usd, speed, f"{one.power_w:.0f}", fmt_usd(one.electricity_usd_per_hour), after[0], after[1] + rented)
        rows.append((one.card, *cells, months))
    return Table(title=f"{name}: what {fmt_usd(purse.budget_usd)} buys", columns=columns, rows=tuple(rows))


def _after(hours: float | None) -> str:
    return DASH if hours is None else f"{hours:,.0f} h"


def buying_sentences(bought: Sequence[Bought], purse: Purse) -> list[str]:
    """Which card to buy, and what that rests on."""
    if not bought:
        return [f"nothing that surely fits costs at most {fmt_usd(purse.budget_usd)}"]
    best = bought[0]
    rivals = [one.card for one in bought[1:] if (one.tokens_per_s_high or 0.0) >= (best.tokens_per_s_low or 0.0)]
    text = f"buy {best.card}, the fastest for at most {fmt_usd(purse.budget_usd)}"
    text += f"; {' and '.join(rivals)} cannot be told from it" if rivals else ""
    if best.pays_after_hours is None or best.pays_after_months is None:
        pays = (
            f"it never pays against {best.rented} rented"
            if best.rented
            else f"whether it pays is not known: {NO_PRICE}"
        )
    else:
        months = f"{best.pays_after_months:,.1f} months at {purse.hours_per_week:g} h a week"
        pays = f"it pays after {best.pays_after_hours:,.0f} h of use ({months}) against {best.rented} rented"
    return [text, pays]


def _buying_basis(purse: Purse) -> str:
    source = "Wikipedia's list; each with its year"
    return (
        f"Cards are bought at the price of their launch ({source}), and take their power limit at "
        f"{fmt_usd(purse.usd_per_kwh)} a kWh. The rest of the computer and what the card is worth later do not count. "
        "A dash: it never pays, or no price is known."
    )


# --- the nodes of a study


def nodes_answer(nodes: Sequence[Node], task: Task) -> Answer:
    """A row for each node of a study, with why it is apart from the others."""
    columns = {"node": "left"} | dict.fromkeys(
        ("samples/s", "tokens/s", "to others", "USD/1,000 samples", "peak GiB", "reserved GiB"), "right"
    )
    columns |= dict.fromkeys(("C", "MHz", "W", "variation", "probes", "failed", "last seen"), "right")
    table = Table(title="Nodes", columns=columns | {"apart": "left"}, rows=tuple(map(_node_row, nodes)))
    measured = next((node.config.label() for node in nodes if node.config), None)
    notes = [
        f"Each node measured the baseline{f', {measured}' if measured else ''}; its latest reading is shown, with what "
        "the driver reported meanwhile. Times are UTC.",
        "to others: its speed against the median of theirs. "
        "variation: the standard deviation of the timed micro batches over their mean. apart: more than 5 % of speed, "
        "2 % of memory or 10 C from the median of the others. A dash is not known.",
    ]
    if task.device.kind == "cpu":
        notes.append("Nodes on one machine share its processors: only their memory is compared.")
    if len(nodes) < 2:
        notes.append("There is one node, and nothing to compare it with.")
    drawn = figures.nodes(nodes)
    return Answer(
        title=f"Nodes of {task.study}",
        notes=tuple(notes),
        tables=(table,),
        figures={"Tokens/s of the baseline, with the range of the timed steps": drawn} if drawn else {},
    )


def _node_row(node: Node) -> tuple[str, ...]:
    speed, measured, told = node.performance, node.measurement, node.telemetry
    slowed = f"slowed down by {', '.join(told.throttle_reasons)}" if told.throttle_reasons else ""
    return (
        node.name,
        DASH if speed is None else f"{speed.samples_per_second:,.2f}",
        fmt_count(speed.tokens_per_second if speed else None),
        DASH if node.relative_speed is None else f"{node.relative_speed - 1:+.1%}",
        fmt_usd(node.cost_per_1000_samples_usd),
        DASH if measured is None else f"{measured.peak_allocated_gib:,.2f}",
        DASH if measured is None else f"{measured.peak_reserved_gib:,.2f}",
        *(DASH if value is None else f"{value:.0f}" for value in (told.temperature_c, told.sm_clock_mhz, told.power_w)),
        DASH if node.variation is None else f"{node.variation:.1%}",
        f"{node.num_probes:,}",
        f"{node.num_failed:,}",
        DASH if node.last_seen is None else node.last_seen[:16].replace("T", " "),
        "; ".join(filter(None, (*node.apart, slowed))) or ("no" if measured else "not measured"),
    )
