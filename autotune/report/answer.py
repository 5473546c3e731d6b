"""Answers a question with sentences, tables and figures, for a terminal and as an HTML page.

The questions are: Which models can a GPU (card) train? Is it cheaper to rent or to buy a GPU? How
do the nodes of a study (the processes that ran its probes) differ? The terminal and the page show
the same sentences and tables. An answer states the result first, and then its basis. The page
contains plotly.js, so it opens offline.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any

from autotune.catalog import NO_PRICE, ModelSpec, age, describe_price
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_usd
from autotune.problem.run_cost import OOM, TIGHT
from autotune.problem.task import Task
from autotune.report import figures
from autotune.report.comparison import basis_sentence, heading, workload_text
from autotune.report.describe import estimate_basis
from autotune.report.html import FEW, answer_glossary, script_json
from autotune.report.html import page as html_page
from autotune.report.style import plotly_js
from autotune.report.values.comparison import Comparison, Group
from autotune.report.values.rent_or_buy import (
    Bought,
    PurchaseBudget,
    SizeCost,
    purchases,
    size_costs,
)
from autotune.report.values.trainable import METHODS, Entry, Trainable
from autotune.study.nodes import Node

PHONE = 40  # a phone shows this many characters of a table row
SPOT = (
    "At a spot price, the cloud may take the GPU back at any time. "
    "The run then continues from its last checkpoint "
    "(with autotune train --resume or the exported cluster jobs), "
    "and these numbers include the work that it repeats, and the restarts. "
    "A day has 24 hours, a week 168. A dash: the price is unknown."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of texts. `columns` maps each heading to the alignment of the column's cells."""

    title: str
    columns: dict[str, str]
    rows: tuple[tuple[str, ...], ...]

    @property
    def is_wide(self) -> bool:
        """Whether the rows are wider than a phone's screen. Headings wrap at spaces."""
        columns = zip(self.columns, *self.rows, strict=True)
        return sum(max(map(len, (*name.split(), *cells))) for name, *cells in columns) > PHONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer: sentences with the result (`found`) and its basis (`notes`), tables and figures.

    `drawings` maps each caption to a function that makes the figure. A terminal calls none of these
    functions, so it does not import Plotly. Each function returns the arguments of Plotly.newPlot,
    or None if there is no data.
    """

    title: str
    found: tuple[str, ...]
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    drawings: dict[str, Callable[[], dict[str, Any] | None]]

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return {caption: figure} for the figures that have data."""
        return {caption: figure for caption, draw in self.drawings.items() if (figure := draw())}


def page(answer: Answer, today: date) -> str:
    """Render the answer as an HTML page, which also explains the words in its tables."""
    words = [
        text
        for table in answer.tables
        for text in (*table.columns, *(row[0] for row in table.rows))
    ]
    drawn = answer.figures()

    view = {
        "answer": answer,
        "drawn": drawn,
        "figures_json": script_json(drawn),
        "plotly_js": plotly_js(),
        "glossary": answer_glossary(words),
        "few": FEW,
        "today": today,
    }
    return html_page("answer.html.j2", view)


# --- the models that a card trains


def trainable_answer(result: Trainable, today: date) -> Answer:
    """Return an answer with a table for each method.

    Each table has a row for each model, ordered by size.
    """
    columns = {"model": "left", "billion": "right", "verdict": "left"}
    columns |= dict.fromkeys(("tokens/s (80 %)", "USD/1,000 samples"), "right")
    tables = [
        Table(
            title=title,
            columns=columns,
            rows=tuple(_model_row(result, model, method) for model in result.models),
        )
        for method, title in METHODS.items()
    ]

    lengths = result.lengths.removesuffix(" each")
    notes = [
        f"{fmt_gib(result.device.memory_gib)}, {fmt_gib(result.limit_gib)} of it for tensors. "
        f"{estimate_basis(result.how_sure, result.calibrated)}.",
        f"Samples of {lengths}; price of an hour: {describe_price(result.price, today)}.",
        "A verdict gives the longest sequence, in tokens, that surely fits. "
        "tight: too close to the limit to tell. *: fits only with a setting that changes "
        "learning, such as pure bf16 or an optimizer other than AdamW.",
        f"{len(result.models)} models, one of each size; --model NAME plans any other model.",
        *_refusals(result.entries),
    ]
    if any(entry.tokens_per_s for entry in result.entries) and result.is_guess:
        notes.append("No GPU of this kind was measured: the speeds are guesses.")

    caption = "Tokens/s by model and method, with 80 % intervals"
    return Answer(
        title=f"What {result.device.label} can train",
        found=tuple(_largest_models(result)),
        notes=tuple(notes),
        tables=tuple(tables),
        drawings={caption: partial(figures.trainable, result)},
    )


def _largest_models(result: Trainable) -> Iterator[str]:
    """For each method, name the largest model that certainly fits.

    A model that fits only with a setting that changes learning does not count.
    """
    for method, title in METHODS.items():
        entry = result.largest(method)
        if entry is None:
            yield f"{title}: none of these models surely fits."
        else:
            largest = next(model for model in result.models if model.name == entry.model)
            size = ""
            if largest.params is not None:
                size = f" ({largest.params / 1e9:.3g} billion parameters)"
            yield f"{title}: {largest.short}{size} is the largest of these models that surely fits."


def _model_row(result: Trainable, model: ModelSpec, method: str) -> tuple[str, ...]:
    """Return the row of a model in the table of a method."""
    entry = next(one for one in result.row(model) if one.method == method)
    size = DASH if model.params is None else f"{model.params / 1e9:.3g}"
    return model.short, size, _verdict(entry), _speed(entry), fmt_usd(entry.usd_per_1000)


def _verdict(entry: Entry) -> str:
    """Return the verdict on a model and a method.

    For example 'fits, sequences to 8,192', 'fits*, sequences to 2,048', 'tight', 'no: needs 63 GiB'
    or 'refused'. A star means that the model fits only with a setting that changes learning.
    """
    if entry.problem:
        return "refused"
    if entry.state == OOM:
        return "no" if entry.least_gib is None else f"no: needs {entry.least_gib:,.0f} GiB"

    state = entry.state + "*" * entry.learns_differently
    if entry.state == TIGHT or entry.longest_row is None:
        return state
    return f"{state}, sequences to {entry.longest_row:,}"


def _speed(entry: Entry) -> str:
    """Format the speed and its interval."""
    if entry.tokens_per_s is None or entry.interval is None:
        return DASH
    low, high = map(fmt_count, entry.interval)
    return f"{fmt_count(entry.tokens_per_s)} ({low} to {high})"


def _refusals(entries: Sequence[Entry]) -> list[str]:
    """Say why models cannot be trained. A reason that holds for several methods is given once."""
    return [
        f"{name}: {why}."
        for name, why in dict.fromkeys((one.model, one.problem) for one in entries)
        if why
    ]


# --- the cost of runs by number of examples, and the purchase of a card


def costs_answer(
    comparison: Comparison, sizes: Sequence[int], budget: PurchaseBudget | None, today: date
) -> Answer:
    """Return the prices of the cards and the cost of the run, for each model and method.

    The answer has the cost for each number of examples in `sizes`. With a purchase budget, it also
    says which card to buy.
    """
    sentences: list[str] = []
    tables: list[Table] = []
    drawings: dict[str, Callable[[], dict[str, Any] | None]] = {}
    notes = [f"{basis_sentence(comparison)}.", SPOT]

    for group in comparison.groups:
        costs = size_costs(group, sizes)
        group_tables = [
            _prices_table(group, today),
            *(size_table(costs, examples) for examples in sizes),
        ]
        group_drawings: dict[str, Callable[[], dict[str, Any] | None]] = {}
        group_sentences: list[str] = []

        if budget is not None:
            bought = purchases(group, budget)
            if bought:
                group_tables += [_buying_table(bought, budget), _paying_table(bought, budget)]
            caption = "USD by hours of use, bought and rented"
            group_drawings[caption] = partial(figures.buying, bought, group)
            group_sentences += buying_sentences(bought, budget)
            notes.append(_buying_basis(budget))
        group_sentences += _cheapest(costs, max(sizes))
        caption = "USD by number of examples, on demand and at spot, with 80 % intervals"
        group_drawings[caption] = partial(figures.sizes, costs, group)

        # If there are several groups, each title and sentence starts with its group's name.
        prefix = f"{heading(group)}: " * (len(comparison.groups) > 1)
        tables += [replace(table, title=prefix + table.title) for table in group_tables]
        drawings |= {prefix + name: draw for name, draw in group_drawings.items()}
        sentences += [prefix + sentence for sentence in group_sentences]
        notes.insert(1, f"{heading(group)}, {workload_text(group)}.")

    title = "Rent or buy" if budget else "Cost by size"
    if len(comparison.groups) == 1:
        group = comparison.groups[0]
        title += f": {group.model.rpartition('/')[2]}, {group.method}"
    return Answer(
        title=title,
        found=tuple(sentences),
        notes=tuple(dict.fromkeys(notes)),
        tables=tuple(tables),
        drawings=drawings,
    )


def _prices_table(group: Group, today: date) -> Table:
    """Return a table with each GPU's price for an hour, a day, a week, and an hour at spot."""
    rows = []
    for card in group.cards:
        price = card.plan.task.price if card.plan else None
        hourly = describe_price(price, today)
        daily = fmt_usd(price.usd_per_day if price else None)
        weekly = fmt_usd(price.usd_per_week if price else None)
        at_spot = DASH
        if (spot := card.spot) is not None:
            source = f"{spot.provider}, {age(spot.as_of, today)}"
            at_spot = f"{fmt_usd(spot.spot_usd_per_hour)} ({source})"
        rows.append((card.device.label, hourly, daily, weekly, at_spot))

    columns = {"GPU": "left", "price": "left", "a day": "right", "a week": "right"}
    return Table(
        title="Prices of one GPU", columns=columns | {"an hour at spot": "left"}, rows=tuple(rows)
    )


def _usd(usd: float | None, low: float | None, high: float | None) -> str:
    """Format a cost in USD with its interval."""
    return DASH if usd is None else f"{fmt_usd(usd)} ({fmt_usd(low)} to {fmt_usd(high)})"


def _cheapest(costs: Sequence[SizeCost], examples: int) -> Iterator[str]:
    """Name the card that is cheapest for this number of examples, on demand and at spot prices.

    A card whose speed is a guess is named only if the speeds of all cards are guesses.
    """
    rows = [one for one in costs if one.examples == examples]

    for how, priced in {
        "on demand": [(one, one.usd, one.usd_low, one.usd_high) for one in rows],
        "at spot": [(one, one.usd_spot, one.usd_spot_low, one.usd_spot_high) for one in rows],
    }.items():
        known = [
            (usd, low or 0.0, high or 0.0, one) for one, usd, low, high in priced if usd is not None
        ]
        if not known:
            continue

        # A rival is a card whose interval overlaps the cheapest card's interval.
        usd, low, high, best = min(known, key=lambda row: (row[-1].is_guess, row[0], row[-1].hours))
        rivals = [
            one.card
            for _, least, most, one in known
            if one != best and least <= high and low <= most
        ]
        doubt = f"; no clear difference from {' and '.join(rivals)}" if rivals else ""
        cost = f"{best.card}, {_usd(usd, low, high)}{doubt}"
        yield f"Cheapest {how} for {examples:,} examples: {cost}"


def size_table(costs: Sequence[SizeCost], examples: int) -> Table:
    """Return the table of each card's hours and USD for one number of examples."""
    columns = {"GPU": "left"} | dict.fromkeys(
        ("hours (80 %)", "USD on demand (80 %)", "USD at spot (80 %)"), "right"
    )
    rows = [
        (
            one.card,
            f"{fmt_count(one.hours)} ({fmt_count(one.hours_low)} to {fmt_count(one.hours_high)})",
            _usd(one.usd, one.usd_low, one.usd_high),
            _usd(one.usd_spot, one.usd_spot_low, one.usd_spot_high),
        )
        for one in costs
        if one.examples == examples
    ]
    return Table(title=f"{examples:,} examples", columns=columns, rows=tuple(rows))


def _buying_table(bought: Sequence[Bought], budget: PurchaseBudget) -> Table:
    """Return the table of the cards that the budget buys."""
    columns = {"GPU": "left", "USD, at launch": "left", "tokens/s (80 %)": "right", "W": "right"}
    rows = []
    for one in bought:
        low, high = map(fmt_count, (one.tokens_per_s_low, one.tokens_per_s_high))
        speed = f"{fmt_count(one.tokens_per_s)} ({low} to {high})" + ", a guess" * one.is_guess
        usd = f"{fmt_usd(one.usd)} ({one.as_of[:4]})"
        rows.append(
            (one.card, usd, speed, f"{one.power_w:.0f}", fmt_usd(one.electricity_usd_per_hour))
        )
    title = f"What {fmt_usd(budget.budget_usd)} buys"
    return Table(title=title, columns=columns | {"electricity/h": "right"}, rows=tuple(rows))


def _paying_table(bought: Sequence[Bought], budget: PurchaseBudget) -> Table:
    """Return the table of the hours of use after which buying is cheaper than renting.

    Each card has two rows. The first row compares buying the card with renting the same card, and
    the second row compares it with renting the cheapest card.
    """
    rows = []
    for one in bought:
        itself = (
            _pays(
                one.pays_after_hours_against_itself, budget, known=one.rent_usd_per_hour is not None
            ),
            _pays(
                one.pays_after_hours_against_its_spot,
                budget,
                known=one.spot_usd_per_hour is not None,
            ),
        )
        cheapest = (
            _pays(one.pays_after_hours, budget, known=one.rented is not None, rented=one.rented),
            _pays(
                one.pays_after_hours_at_spot,
                budget,
                known=bool(one.rented_at_spot),
                rented=one.rented_at_spot,
            ),
        )
        rows += [(one.card, "the same GPU", *itself), (one.card, "the cheapest", *cheapest)]

    columns = {"GPU": "left", "against renting": "left", "on demand": "right", "at spot": "right"}
    title = f"Hours of use until buying pays off, and months at {budget.hours_per_week:g} h a week"
    return Table(title=title, columns=columns, rows=tuple(rows))


def _pays(
    hours: float | None, budget: PurchaseBudget, *, known: bool, rented: str | None = None
) -> str:
    """Format the hours of use as '3,863 h, 22.2 months', 'never', or a dash if no price is known.

    Buying is cheaper than renting after `hours` of use, or never if `hours` is None. If `rented`
    names the rented card, the text ends with this name.
    """
    if not known:
        return DASH
    after = "never" if hours is None else f"{hours:,.0f} h, {budget.months(hours):,.1f} months"
    return f"{after} ({rented})" if rented else after


def buying_sentences(bought: Sequence[Bought], budget: PurchaseBudget) -> list[str]:
    """Name the card to buy, and the hours of use after which it beats renting the cheapest card."""
    if not bought:
        return [f"No GPU that surely fits is known to cost at most {fmt_usd(budget.budget_usd)}"]

    best = bought[0]
    rivals = buying_rivals(bought)
    text = f"Buy {best.card}, the fastest for at most {fmt_usd(budget.budget_usd)}"
    text += f"; no clear difference from {' and '.join(rivals)}" if rivals else ""

    pays = [
        _pays_sentence(hours, budget, f"{rented} rented {how}")
        for how, rented, hours in (
            ("on demand", best.rented, best.pays_after_hours),
            ("at spot", best.rented_at_spot, best.pays_after_hours_at_spot),
        )
        if rented
    ]
    return [text, *(pays or [f"It is unknown when the GPU pays off: {NO_PRICE}"])]


def buying_rivals(bought: Sequence[Bought]) -> list[str]:
    """Return the names of the cards that may be as fast as the first card."""
    least = bought[0].tokens_per_s_low or 0.0
    return [one.card for one in bought[1:] if (one.tokens_per_s_high or 0.0) >= least]


def _pays_sentence(hours: float | None, budget: PurchaseBudget, against: str) -> str:
    """Say after how many hours of use buying the card is cheaper than renting."""
    if hours is None:
        return f"The GPU never pays off against {against}"
    months = f"{budget.months(hours):,.1f} months at {budget.hours_per_week:g} h a week"
    return f"The GPU pays off after {hours:,.0f} h of use ({months}) against {against}"


def _buying_basis(budget: PurchaseBudget) -> str:
    """Return the assumptions about the cost of a purchased card."""
    source = "from Wikipedia's list, with the year"
    return (
        f"A bought GPU costs its launch price ({source}), "
        f"and electricity at its power limit for {fmt_usd(budget.usd_per_kwh)} a kWh. "
        "The rest of the computer and the GPU's resale value do not count. "
        "The hours until a GPU pays off against renting the cheapest GPU depend on estimated "
        "speeds. "
        "A dash: no price is known."
    )


# --- the nodes of a study


def nodes_answer(nodes: Sequence[Node], task: Task) -> Answer:
    """Say which nodes of a study differ from the others, with three tables of all nodes.

    A node is a process that ran probes for the study.
    """
    label = next((node.config.label() for node in nodes if node.config), None)
    baseline = f", {label}" if label else ""
    several = len(nodes) > 1
    notes = [
        f"Each node measured the baseline{baseline}. The tables show the latest measurement, "
        "with the GPU driver's readings during this measurement. Times are UTC.",
        "to others: the node's speed against the median of the other nodes. " * several
        + "variation: the standard deviation of the timed micro batches divided by their mean. "
        + "apart: more than 5 % of speed, 2 % of memory or 10 C from the median of the other "
        "nodes, or the baseline fails on the node. " * several + "A dash: unknown.",
    ]
    if several and task.device.kind == "cpu":
        notes.append("Nodes on one machine share its processors, so only their memory is compared.")

    caption = "Tokens/s of the baseline, with the range of the timed steps"
    return Answer(
        title=f"Nodes of {task.study}",
        found=tuple(_node_findings(nodes, has_speeds=task.device.kind != "cpu")),
        notes=tuple(notes),
        tables=(_node_speeds(nodes), _node_memory(nodes), _node_probes(nodes)),
        drawings={caption: partial(figures.nodes, nodes)},
    )


def _node_findings(nodes: Sequence[Node], *, has_speeds: bool) -> Iterator[str]:
    """Yield a sentence for each node that differs from the others, is slowed down or not measured.

    If all nodes are alike and measured, one sentence says so.
    """
    quiet = True
    for node in nodes:
        throttling = node.telemetry.throttle_reasons
        reasons = list(node.apart)
        if throttling:
            reasons.append(f"slowed down by {', '.join(throttling)}")
        if node.unmeasured and not node.apart:
            reasons.append(f"not measured: {node.unmeasured}")
        if reasons:
            quiet = False
            yield f"{node.name}{' is apart' if node.apart else ''}: {'; '.join(reasons)}"

    if quiet and len(nodes) > 1:
        scope = "" if has_speeds else " in memory (on a CPU, speeds are not compared)"
        yield f"None of the {len(nodes)} nodes is apart from the others{scope}."
    if len(nodes) == 1:
        yield "There is only one node, so there is no comparison."


def _node_speeds(nodes: Sequence[Node]) -> Table:
    """Return the table of the nodes' speeds.

    If there is only one node, the columns that compare nodes are left out.
    """
    cells = [_speed_cells(node) for node in nodes]
    comparisons = () if len(nodes) > 1 else ("to others", "apart")
    columns = [column for column in cells[0] if column not in comparisons] if cells else ["node"]

    rows = [tuple(row[column] for column in columns) for row in cells]
    return Table(
        title="Speed", columns=dict.fromkeys(columns, "right") | {"node": "left"}, rows=tuple(rows)
    )


def _speed_cells(node: Node) -> dict[str, str]:
    """Return the texts of a node's row in the table of speeds, by column."""
    speed = node.performance
    apart = DASH if node.unmeasured else "no"
    return {
        "node": node.name,
        "samples/s": DASH if speed is None else f"{speed.samples_per_second:,.2f}",
        "tokens/s": fmt_count(speed.tokens_per_second if speed else None),
        "to others": DASH if node.relative_speed is None else f"{node.relative_speed - 1:+.1%}",
        "variation": DASH if node.variation is None else f"{node.variation:.1%}",
        "apart": "yes" if node.apart else apart,
    }


def _node_memory(nodes: Sequence[Node]) -> Table:
    """Return the table of each node's memory and cost."""
    columns = dict.fromkeys(("peak GiB", "reserved GiB", "USD/1,000 samples"), "right")
    rows = []
    for node in nodes:
        peak = node.measurement
        peaks = (peak.peak_allocated_gib, peak.peak_reserved_gib) if peak else (None, None)
        gib = (DASH if value is None else f"{value:,.2f}" for value in peaks)
        rows.append((node.name, *gib, fmt_usd(node.cost_per_1000_samples_usd)))
    return Table(title="Memory and cost", columns={"node": "left"} | columns, rows=tuple(rows))


def _node_probes(nodes: Sequence[Node]) -> Table:
    """Return the table of each node's sensor readings and numbers of probes."""
    columns = dict.fromkeys(("C", "MHz", "W", "probes", "failed", "last seen"), "right")
    rows = []
    for node in nodes:
        sensors = node.telemetry
        readings = (sensors.temperature_c, sensors.sm_clock_mhz, sensors.power_w)
        card = (DASH if value is None else f"{value:.0f}" for value in readings)
        probes = (f"{node.num_probes:,}", f"{node.num_failed:,}")
        last_seen = DASH if node.last_seen is None else node.last_seen[:16].replace("T", " ")
        rows.append((node.name, *card, *probes, last_seen))
    return Table(title="GPU and probes", columns={"node": "left"} | columns, rows=tuple(rows))
