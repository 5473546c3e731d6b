"""Makes figures for Plotly, as data that JSON can hold.

A figure without data is None; the report then has a sentence in its place.
"""

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

from autotune.catalog import ModelSpec
from autotune.core.micro_profile import Part, Stage
from autotune.core.probe_types import Rung
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_count, fmt_gib, fmt_hours, fmt_seconds, fmt_usd
from autotune.report.describe import LABELS, ablation_effect, memory_gib
from autotune.report.infos import TERMS, CellRow, Importance, ParallelInfo
from autotune.report.style import (
    ACCENT,
    BLUE,
    GREY,
    MARKERS,
    PALE_BLUE,
    PURPLE,
    YELLOW,
    empty,
    escape,
    finish,
)
from autotune.report.timeline import KINDS, TIMED, Slice, Span, TimelineInfo, slices
from autotune.report.values.comparison import Group
from autotune.report.values.estimate import Estimate
from autotune.report.values.profile import ProfileReport
from autotune.report.values.rent_or_buy import Bought, SizeCost
from autotune.report.values.trainable import METHODS, Trainable
from autotune.study.ablation import Ablation
from autotune.study.learning import Learning
from autotune.study.nodes import Node
from autotune.study.scaling import RankPlan, Scaling
from autotune.study.summary import Candidate, Quality, TrialRecord

TERM_COLOURS = dict(zip(TERMS, (BLUE, PALE_BLUE, YELLOW, ACCENT, GREY), strict=True))
KIND_COLOURS = dict(zip(KINDS, (GREY, YELLOW, BLUE, PURPLE), strict=True))
STAGE_COLOURS = {Stage.FORWARD: BLUE, Stage.RECOMPUTED: PALE_BLUE, Stage.BACKWARD: ACCENT}
# The groups of lines in the parallel-coordinates plot: number, name, colour and opacity. The
# fastest lines are drawn last, above the others.
LINES = (
    (2, "slower", GREY, 0.35),
    (1, "at least half as fast", BLUE, 0.7),
    (0, "within 5 % of the fastest", ACCENT, 0.95),
)
METHOD_MARKERS = {
    "full": (ACCENT, "square"),
    "lora": (BLUE, "circle"),
    "qlora": (PURPLE, "diamond"),
}
SERIES = (BLUE, ACCENT, PURPLE, YELLOW, GREY, PALE_BLUE)
DASHES = ("solid", "dash")
LONG_S = 900.0  # a time axis of more than this many seconds is labelled in minutes
FAR = 15  # if the speeds differ by a larger factor, a log axis labels only powers of ten
NARROW = 20  # a line of a model's name beside the figure has at most this many characters
WRAP = 26  # a line of a bar's name has at most this many characters
KNOB_WRAP = 14  # a line of a knob's name below its axis has at most this many characters
# The memory axis ends at this multiple of the limit; trials with more memory are drawn at its end.
EDGE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One horizontal bar.

    `interval` has the ends of the error bar. `text` is shown to the right of the bar. `hover` is
    the tooltip, as escaped HTML.
    """

    name: str
    value: float
    interval: tuple[float, float] | None = None
    text: str = ""
    hover: str = ""
    highlighted: bool = False


def scatter(
    rows: tuple[TrialRecord, ...], candidates: dict[str, Candidate], limit_gib: float | None
) -> dict[str, Any] | None:
    """Plot useful tokens/s against peak reserved memory for the trials whose memory is known.

    A circle and a name mark each of the `candidates`.
    """
    rows = tuple(row for row in rows if memory_gib(row) is not None)
    edge = float("inf") if limit_gib is None else limit_gib * EDGE
    speeds = [candidate.performance.tokens_per_second for candidate in candidates.values()]
    figure = _trials(
        rows, lambda row: min(memory_gib(row) or 0.0, edge), highest=max(speeds, default=0.0)
    )
    if figure is None:
        return None

    for name, candidate in candidates.items():
        speed = candidate.performance.tokens_per_second
        peak_gib = candidate.measurement.peak_reserved_gib
        figure.add_scatter(
            x=[peak_gib],
            y=[speed],
            mode="markers+text",
            marker={"size": 17, "symbol": "circle-open", "color": ACCENT, "line": {"width": 2.5}},
            text=[name],
            textposition="top center",
            textfont={"color": ACCENT, "size": 13},
            hovertext=[f"<b>{name}</b><br>{fmt_count(speed)} tokens/s<br>{fmt_gib(peak_gib)}"],
            cliponaxis=False,
            showlegend=False,
        )

    if limit_gib is not None:
        _add_limit_line(figure, limit_gib)
    figure.update_xaxes(range=_memory_range([memory_gib(row) or 0.0 for row in rows], limit_gib))
    return finish(figure, x="peak reserved memory, GiB", y="useful tokens/s", height=430)


def history(
    rows: tuple[TrialRecord, ...], best: tuple[tuple[int, float], ...]
) -> dict[str, Any] | None:
    """Plot useful tokens/s of each trial in order, with a line for the best so far."""
    figure = _trials(rows, lambda row: row.number)
    if figure is None:
        return None

    if len(best) > 1:
        figure.add_scatter(
            x=[number for number, _ in best],
            y=[speed for _, speed in best],
            mode="lines",
            line={"shape": "hv", "color": ACCENT, "width": 2},
            name="best so far",
        )
        figure.data = (figure.data[-1], *figure.data[:-1])  # draw the line below the points
    return finish(figure, x="trial", y="useful tokens/s", height=360)


def timeline(info: TimelineInfo) -> dict[str, Any] | None:
    """Plot how the study used its time, with a row for each rung (the type of probe).

    For a long study, stacked bars instead show how each of NUM_SLICES equal slices of the time was
    used. Bars above the plot show the GPU's utilization in timed steps.
    """
    if not info.spans:
        return None

    figure = empty()
    parts = slices(info)
    unit_s, unit = (60.0, "minutes") if info.length_s > LONG_S else (1.0, "seconds")
    rungs = [rung.value for rung in Rung if any(span.rung is rung for span in info.spans)]
    if parts:
        _add_slices(figure, parts, unit_s)
    else:
        _add_spans(figure, info.spans, unit_s)

    # Draw the utilization on a separate axis.
    busy: list[Slice | Span] = [
        part for part in parts or info.spans if part.utilization is not None
    ]
    if busy:
        figure.add_bar(
            x=[(part.start_s + part.seconds / 2) / unit_s for part in busy],
            width=[part.seconds / unit_s for part in busy],
            y=[part.utilization for part in busy],
            yaxis="y2",
            marker={"color": KIND_COLOURS[TIMED], "line": {"width": 0}},
            hovertext=[f"a kernel ran <b>{part.utilization:.0%}</b> of the time" for part in busy],
            showlegend=False,
        )
        scale = {
            "range": [0, 1],
            "tickformat": ".0%",
            "tickvals": [0, 0.5, 1],
            "title": {"text": "busy"},
        }
        figure.update_layout(
            yaxis={"domain": [0.0, 0.62]}, yaxis2={"domain": [0.7, 1.0], "anchor": "x"} | scale
        )

    figure.update_layout(legend_traceorder="normal")
    if parts:
        figure.update_layout(
            barmode="stack", bargap=0, yaxis={"range": [0, 1], "tickformat": ".0%"}
        )
    else:
        rows = {"type": "category", "categoryarray": rungs[::-1], "showgrid": False}
        figure.update_layout(barmode="overlay", bargap=0.3, yaxis=rows)
    height = 130 + 42 * (4 if parts else len(rungs)) + (100 if busy else 0)
    return finish(figure, x=f"{unit} since the first probe", height=height)


def horizontal_bars(
    bars: Sequence[Bar],
    *,
    x: str,
    ticks: str,
    row_px: int,
    line_at: float | None = None,
    end: float | None = None,
) -> dict[str, Any]:
    """Plot horizontal bars, one below another.

    `x` is the title of the axis, and `ticks` is the format of its labels (d3-format).

    `line_at` draws a vertical line. With `end`, the axis runs from 0 to slightly beyond `end`, so
    that the label at `end` fits.
    """
    figure = empty()
    names = [[escape(line) for line in textwrap.wrap(bar.name, WRAP)] for bar in bars]
    figure.add_bar(
        x=[bar.value for bar in bars],
        y=["<br>".join(lines) for lines in names],
        orientation="h",
        marker={"color": [ACCENT if bar.highlighted else BLUE for bar in bars]},
        text=[bar.text for bar in bars],
        textposition="outside",
        hovertext=[bar.hover for bar in bars] if any(bar.hover for bar in bars) else None,
        cliponaxis=False,
    )

    if errors := _error_bars([bar.value for bar in bars], [bar.interval for bar in bars]):
        figure.update_traces(error_x=errors)
    if line_at is not None:
        figure.add_vline(x=line_at, line={"color": ACCENT, "width": 1.5})
    if end is not None:
        figure.update_xaxes(range=[0.0, 1.04 * end])

    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    # On a phone, five labels such as "$0.50" would touch each other.
    figure.update_xaxes(tickformat=ticks, nticks=4, tickangle=0)
    return finish(figure, x=x, height=70 + max(row_px, 18 * max(map(len, names))) * len(bars))


def importances(shares: dict[str, Importance]) -> dict[str, Any] | None:
    """Plot the share of the variation in speed that each knob explains, with its interval.

    The bars are in the order of `shares`.
    """
    bars = [
        Bar(name=f"{knob} {one.share:.0%}", value=one.share, interval=one.interval)
        for knob, one in shares.items()
    ]
    if not bars:
        return None
    title = "share of the variation of speed"
    return horizontal_bars(bars, x=title, ticks=".0%", row_px=34, end=1.0)


def capability(rows: tuple[CellRow, ...]) -> dict[str, Any] | None:
    """Plot the cost of each learning cell relative to the winner's cost, the cheapest on top.

    A learning cell is a group of configurations with equal values of all knobs that affect
    learning. Cells that learn more than the winner are highlighted.
    """
    bars = []
    for row in rows:
        low, high = row.interval
        if row.changes:
            label = escape(row.candidate.config.label())
            evidence = row.candidate.evidence
            hover = f"{label}<br><b>{row.extra:+.1%}</b> ({low:+.1%} to {high:+.1%}) [{evidence}]"
            bars.append(
                Bar(
                    name=row.changes,
                    value=row.extra,
                    interval=row.interval,
                    hover=hover,
                    highlighted=row.learns_more,
                )
            )

    if not bars:
        return None
    return horizontal_bars(bars, x="cost against winner", ticks="+.3~%", row_px=38, line_at=0)


def cards(estimates: tuple[Estimate, ...], own: str | None = None) -> dict[str, Any] | None:
    """Plot the USD of the winner's run on each card with a known price, the cheapest on top.

    The study's own card, `own`, is highlighted.
    """
    bars = []
    for card in estimates:
        cost = card.cost
        if cost is not None and cost.full_run_usd is not None:
            name = card.device.name
            usd = cost.full_run_usd
            time = f"{fmt_hours(cost.full_run_hours)} [{cost.evidence}]"
            hover = f"{escape(name)}<br><b>{fmt_usd(usd)}</b>, {time}"
            bars.append(
                Bar(
                    name=name,
                    value=usd,
                    interval=cost.interval_usd,
                    hover=hover,
                    highlighted=name == own,
                )
            )

    if len(bars) <= 1:
        return None
    return horizontal_bars(bars, x="USD, on demand", ticks="$,.2f", row_px=26)


def scaling(info: Scaling) -> dict[str, Any] | None:
    """Plot the useful tokens/s of all GPUs together by number of GPUs, beside perfect scaling.

    Bars below the plot show the USD of the full run. The study's number of GPUs is highlighted.
    Return None if fewer than two numbers of GPUs have a speed.
    """
    rows = info.trainable
    if len(rows) < 2:
        return None

    figure = empty()
    numbers = [row.num_gpus for row in rows]
    colours = [ACCENT if number == info.own else BLUE for number in numbers]
    hovers = [_scaling_hover(info, row) for row in rows]
    speeds = [row.tokens_per_s or 0.0 for row in rows]

    figure.add_scatter(
        x=numbers,
        y=[speeds[0] / numbers[0] * number for number in numbers],
        mode="lines",
        line={"color": GREY, "width": 1.5, "dash": "dot"},
        name="if it scaled perfectly",
    )
    figure.add_scatter(
        x=numbers,
        y=speeds,
        mode="lines+markers+text",
        line={"color": BLUE, "width": 2},
        marker={"size": 10, "color": colours},
        error_y=_error_bars(speeds, [row.interval for row in rows]),
        text=[f"{row.efficiency or 0.0:.0%}" for row in rows],
        textposition="bottom right",
        hovertext=hovers,
        cliponaxis=False,
        name="this run, with its efficiency",
    )

    # Draw the cost on a separate axis if every row has a price.
    upper = {"title": {"text": "useful tokens/s"}, "tickformat": "~s", "nticks": 5}
    usd = [row.usd for row in rows if row.usd is not None]
    has_prices = len(usd) == len(rows)
    if has_prices:
        figure.add_bar(
            x=numbers,
            y=usd,
            error_y=_error_bars(usd, [row.usd_interval for row in rows]),
            marker={"color": colours},
            hovertext=hovers,
            yaxis="y2",
            width=0.6,
            showlegend=False,
        )
        lower = {
            "domain": [0.0, 0.28],
            "tickformat": "$,.2f",
            "nticks": 4,
            "title": {"text": "USD of the run"},
        }
        upper |= {"domain": [0.36, 1.0]}
        figure.update_layout(yaxis2=lower, xaxis={"anchor": "y2"})

    figure.update_layout(yaxis=upper)
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(tickvals=numbers, showgrid=False)
    return finish(figure, x="GPUs", height=480 if has_prices else 330)


def trainable(result: Trainable) -> dict[str, Any] | None:
    """Plot useful tokens/s of each model that fits, on a log axis, the smallest model on top.

    Each method has a colour and a symbol.
    """
    figure = empty()
    names = [_model_label(model) for model in result.models]
    rows = [
        (index, entry)
        for index, model in enumerate(result.models)
        for entry in result.row(model)
        if entry.tokens_per_s
    ]
    if not rows:
        return None

    # The markers of a model's methods are one below another in the model's row.
    for offset, (method, title) in enumerate(METHODS.items()):
        fits = [(index, entry) for index, entry in rows if entry.method == method]
        values = [entry.tokens_per_s or 0.0 for _, entry in fits]
        hovers = [
            f"{escape(one.model)}, {title}<br><b>{fmt_count(one.tokens_per_s)} tokens/s</b>"
            for _, one in fits
        ]
        colour, symbol = METHOD_MARKERS[method]
        figure.add_scatter(
            x=values,
            y=[index + 0.24 * (offset - 1) for index, _ in fits],
            mode="markers",
            marker={"size": 9, "color": colour, "symbol": symbol},
            error_x=_error_bars(values, [entry.interval for _, entry in fits]),
            hovertext=hovers,
            name=title,
        )

    last = max(index for index, _ in rows)
    figure.update_yaxes(
        tickvals=list(range(len(names))), ticktext=names, range=[last + 0.6, -0.6], showgrid=False
    )

    # A phone has room for few labels. So the axis has labels at 1, 10, 100 or at 1, 2, 5, 10.
    speeds = [entry.tokens_per_s or 0.0 for _, entry in rows]
    dtick = 1 if max(speeds) > FAR * min(speeds) else "D2"
    figure.update_xaxes(
        type="log", tickformat="~s", dtick=dtick, minor={"dtick": "D2", "showgrid": True}
    )
    return finish(figure, x="useful tokens/s", height=90 + 38 * (last + 1))


def _model_label(model: ModelSpec) -> str:
    """Return the name and the size of a model, in short lines."""
    name = model.short
    if model.params is not None:
        name += f", {model.params / 1e9:.3g}\u00a0B"
    return "<br>".join(map(escape, textwrap.wrap(name, NARROW)))


def _card_line(group: Group, card: str, how: str = "") -> dict[str, Any]:
    """Return the style of a card's line, with the colour that this card has in every figure.

    `how` is the line's dash style, such as 'dot'. By default, cards with the same colour get
    different styles.
    """
    number = [one.device.name for one in group.cards if one.cost].index(card)
    return {
        "color": SERIES[number % len(SERIES)],
        "dash": how or DASHES[number // len(SERIES) % len(DASHES)],
    }


def sizes(costs: Sequence[SizeCost], group: Group) -> dict[str, Any] | None:
    """Plot the USD of a run against its number of examples, on log axes.

    Each card with a price has a line. A card with a spot price also has a dotted line.
    """
    figure = empty()
    cards = list(dict.fromkeys(one.card for one in costs))
    on_demand = [(one, one.usd, (one.usd_low, one.usd_high)) for one in costs]
    at_spot = [(one, one.usd_spot, (one.usd_spot_low, one.usd_spot_high)) for one in costs]

    for card, (rows, how) in product(cards, ((on_demand, ""), (at_spot, " at spot"))):
        points = [
            (one, usd, (low or 0.0, high or 0.0))
            for one, usd, (low, high) in rows
            if one.card == card and usd
        ]
        name = f"{escape(card)}{how}"
        usds = [usd for _, usd, _ in points]
        if points:
            figure.add_scatter(
                x=[one.examples for one, _, _ in points],
                y=usds,
                mode="lines+markers",
                line=_card_line(group, card, "dot" if how else ""),
                marker={"symbol": "circle-open" if how else "circle"},
                error_y=_error_bars(usds, [interval for _, _, interval in points]),
                hovertext=[
                    f"{name}<br><b>{fmt_usd(usd)}</b>, {fmt_hours(one.hours)}"
                    for one, usd, _ in points
                ],
                name=name,
            )

    if not figure.data:
        return None
    figure.update_xaxes(
        type="log", tickvals=sorted({one.examples for one in costs}), tickformat=","
    )
    figure.update_yaxes(type="log", tickformat="$~g", dtick="D2")
    return finish(figure, x="examples", y="USD", height=430)


def buying(bought: Sequence[Bought], group: Group) -> dict[str, Any] | None:
    """Plot the USD spent over hours of use, for the card to buy and for renting the cheapest card.

    Renting has two lines: one for on-demand prices, one for spot prices. Return None if buying
    never gets cheaper than renting.
    """
    best = next(iter(bought), None)
    cheapest = group.cheapest
    at_spot = group.cheapest_at_spot
    own_card = next((card for card in group.cards if best and card.device.name == best.card), None)
    pays_after: list[float] = []
    if best:
        pays_after = [
            hours for hours in (best.pays_after_hours, best.pays_after_hours_at_spot) if hours
        ]
    if best is None or own_card is None or own_card.cost is None or not pays_after:
        return None

    # For each line: its name, the USD at the start, the USD per hour, the card and the dash style.
    lines = [(f"{best.card} bought", best.usd, best.electricity_usd_per_hour, best.card, "solid")]
    if cheapest is not None and cheapest.usd is not None:
        rate = cheapest.usd / own_card.cost.full_run_hours
        name = f"{cheapest.device.name} rented for the same work"
        lines.append((name, 0.0, rate, cheapest.device.name, "dash"))
    if at_spot is not None and at_spot.spot_usd is not None:
        rate = at_spot.spot_usd / own_card.cost.full_run_hours
        lines.append((f"{at_spot.device.name} at spot", 0.0, rate, at_spot.device.name, "dot"))

    figure = empty()
    hours = [0.0, 1.5 * max(pays_after)]
    for name, at_once, rate, card, how in lines:
        usd = [at_once + hour * rate for hour in hours]
        line = _card_line(group, card, how) | {"width": 2}
        figure.add_scatter(x=hours, y=usd, mode="lines", line=line, name=escape(name))
    figure.update_yaxes(tickformat="$,.0f", rangemode="tozero")
    figure.update_xaxes(tickformat=",.0f")
    return finish(figure, x=f"hours of use of {best.card}", y="USD", height=330)


def nodes(rows: Sequence[Node]) -> dict[str, Any] | None:
    """Plot the baseline's tokens/s on each node. Nodes that differ from the others are highlighted.

    Return None if fewer than two nodes have a speed.
    """
    bars = []
    for node in rows:
        if node.performance is not None:
            speed = node.performance.tokens_per_second
            low, high = node.performance.spread
            reasons = escape("; ".join(node.apart))
            bars.append(
                Bar(
                    name=node.name,
                    value=speed,
                    interval=(speed / (1 + high), speed / (1 + low)),
                    hover=f"{escape(node.name)}<br><b>{fmt_count(speed)} tokens/s</b><br>{reasons}",
                    highlighted=bool(node.apart),
                )
            )

    if len(bars) <= 1:
        return None
    return horizontal_bars(bars, x="useful tokens/s", ticks="~s", row_px=34)


def _error_bars(
    values: Sequence[float], intervals: Sequence[tuple[float, float] | None]
) -> dict[str, Any] | None:
    """Return error bars from the ends of the intervals, or None if no interval is known."""
    ends = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    above = [high - value for value, (_, high) in zip(values, ends, strict=True)]
    below = [value - low for value, (low, _) in zip(values, ends, strict=True)]
    if not any(above) and not any(below):
        return None
    return {"array": above, "arrayminus": below, "thickness": 1}


def _scaling_hover(info: Scaling, row: RankPlan) -> str:
    """Describe a point: strategy, speed, efficiency, time and cost."""
    gpus = "1 GPU" if row.num_gpus == 1 else f"{row.num_gpus} GPUs, {row.parallelism.name}"
    basis = "this study" if row.num_gpus in info.known else "projected"
    return (
        f"{gpus}<br><b>{fmt_count(row.tokens_per_s)} tokens/s</b>, {row.efficiency or 0.0:.0%}"
        f"<br>{fmt_hours(row.hours)}, {fmt_usd(row.usd)} [{basis}]"
    )


def explanation(ablation: Ablation | None) -> dict[str, Any] | None:
    """Plot, for each knob, the winner's speed with only this knob set back to the baseline's value.

    The slowest configuration is on top. A configuration that does not fit has no bar.
    """
    if ablation is None or not any(knob.tokens_per_s for knob in ablation.undone):
        return None

    bars = []
    for knob in ablation.ranked():
        speed = knob.tokens_per_s or 0.0
        effect = ablation_effect(ablation, knob)
        bars.append(
            Bar(
                name=f"{knob.knob} {getattr(knob.config, knob.knob)}",
                value=speed,
                interval=(speed * (1 - knob.error), speed * (1 + knob.error)),
                text="" if speed else "failed",
                hover=f"{escape(knob.config.label())}<br><b>{effect}</b> [{knob.evidence}]",
            )
        )

    winner_speed = ablation.winner.tokens_per_s
    return horizontal_bars(
        bars, x="tokens/s without it", ticks=",", row_px=38, line_at=winner_speed
    )


def micro_batch(report: ProfileReport) -> dict[str, Any] | None:
    """Plot the milliseconds of a profiled micro batch.

    Each part of the model has a bar that is stacked by stage, and the GPU's idle time has its own
    bar.
    """
    work = report.profile.micro_work
    names = dict[Part | None, str]()
    for one in sorted(work, key=lambda one: one.part is None):
        names[one.part] = one.part or "compiled layers"
    seconds_of = {part: sum(one.seconds for one in work if one.part is part) for part in names}
    parts = sorted((part for part in names if seconds_of[part]), key=lambda part: -seconds_of[part])
    if not parts:
        return None

    figure = empty()
    for stage, colour in STAGE_COLOURS.items():
        times = [
            sum(one.seconds for one in work if one.part is part and one.stage is stage)
            for part in parts
        ]
        if any(times):
            hovers = [
                f"{names[part]}, {stage}<br><b>{fmt_seconds(seconds)}</b>"
                for part, seconds in zip(parts, times, strict=True)
            ]
            figure.add_bar(
                x=[1000 * seconds for seconds in times],
                y=[names[part] for part in parts],
                orientation="h",
                name=stage.value,
                marker={"color": colour},
                hovertext=hovers,
            )

    if report.idle_s:
        figure.add_bar(
            x=[1000 * report.idle_s],
            y=["the GPU waits"],
            hovertext=[f"the GPU waits<br><b>{fmt_seconds(report.idle_s)}</b>"],
            orientation="h",
            name="idle",
            marker={"color": GREY},
        )
    figure.update_layout(barmode="stack", bargap=0.35, legend={"traceorder": "normal"})
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return finish(figure, x="milliseconds", height=130 + 34 * (len(parts) + 1))


def parallel_px(info: ParallelInfo) -> int:
    """Return the smallest readable width of the figure, in pixels.

    At this width, no label of an axis reaches the next axis.
    """
    values = max((len(value) for _, values in info.axes for value in values), default=0)
    names = max((len(line) for knob, _ in info.axes for line in _name_lines(knob)), default=0)
    return round((len(info.axes) + 1) * (12 + max(6.5 * max(values, 12), 7.5 * names)))


def parallel(info: ParallelInfo) -> dict[str, Any] | None:
    """Plot parallel coordinates: a line for each configuration, across an axis for each knob.

    Only knobs that vary have an axis. The last axis, at the right, is the speed. The fastest lines
    are drawn above the others.
    """
    if not info.axes:
        return None

    figure = empty()
    for group, name, colour, opacity in LINES:
        points: list[tuple[float | None, float | None, str]] = []
        for line in (line for line in info.lines if line.group == group):
            text = f"{fmt_count(line.tokens_per_second)} tokens/s<br>{escape(line.label)}"
            points += [(place, height, text) for place, height in enumerate(line.heights)]
            points.append((None, None, text))  # a gap before the next line of the trace
        if points:
            xs, ys, texts = zip(*points, strict=True)
            figure.add_scatter(
                x=xs,
                y=ys,
                mode="lines",
                name=name,
                line={"color": colour, "width": 1.4},
                opacity=opacity,
                hovertext=texts,
            )

    # Write the values of each knob beside its axis.
    for place, (_, values) in enumerate(info.axes):
        for index, value in enumerate(values):
            figure.add_annotation(
                text=escape(value),
                showarrow=False,
                font={"size": 11},
                x=place,
                y=index / (len(values) - 1),
                xanchor="left",
                xshift=3,
            )

    names = ["<br>".join(_name_lines(knob)) for knob, _ in info.axes]
    names.append(f"tokens/s<br>up to {fmt_count(info.fastest)}")
    figure.update_xaxes(
        tickvals=[*range(len(names))], ticktext=names, range=[-0.5, len(names) - 0.5], showgrid=True
    )
    figure.update_xaxes(ticklabeloverflow="allow", tickfont={"size": 12})
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])
    return finish(figure, x="", height=420)


def _name_lines(knob: str) -> list[str]:
    """Return the name of a knob in short lines, which end after an underscore."""
    lines = textwrap.wrap(knob.replace("_", "_ "), KNOB_WRAP, break_long_words=False)
    return [escape(line.replace("_ ", "_")) for line in lines]


def quality(results: Quality | None, winner: TrainConfig | None) -> dict[str, Any] | None:
    """Plot the finalists' held-out loss after training against the time of the full run.

    A line shows the Pareto front. Return None if fewer than two finalists have a loss.
    """
    if results is None:
        return None
    finalists = [finalist for finalist in results.ranked() if finalist.loss_after is not None]
    if len(finalists) < 2:
        return None

    figure = empty()
    front = results.pareto_front()
    figure.add_scatter(
        x=[finalist.full_run_hours for finalist in front],
        y=[finalist.loss_after for finalist in front],
        mode="lines",
        line={"color": ACCENT, "width": 1.5, "dash": "dot", "shape": "hv"},
        name="Pareto front",
    )

    for name, colour, is_winner in (("winner", ACCENT, True), ("other finalists", BLUE, False)):
        members = [finalist for finalist in finalists if (finalist.config == winner) is is_winner]
        figure.add_scatter(
            x=[finalist.full_run_hours for finalist in members],
            y=[finalist.loss_after for finalist in members],
            mode="markers",
            marker={"size": 11, "color": colour},
            name=name,
            hovertext=[
                f"{escape(member.config.label())}<br><b>{member.loss_after:.4f}</b>"
                for member in members
            ],
            cliponaxis=False,
        )
    return finish(figure, x="hours of the full run", y="held-out loss after training", height=360)


def rates(result: Learning | None) -> dict[str, Any] | None:
    """Plot the held-out loss, averaged over seeds, against the learning rate.

    Each number of steps has a line. Attempts that diverged are left out.
    """
    if result is None:
        return None

    figure = empty()
    rounds = sorted({attempt.steps for attempt in result.attempts})
    for steps, colour in zip(rounds, (PALE_BLUE, BLUE, ACCENT)[-len(rounds) :], strict=True):
        losses: dict[float, list[float]] = {}
        for attempt in result.attempts:
            if attempt.steps == steps and attempt.loss is not None:
                losses.setdefault(attempt.learning_rate, []).append(attempt.loss)
        learning_rates = sorted(losses)
        figure.add_scatter(
            x=learning_rates,
            y=[statistics.fmean(losses[rate]) for rate in learning_rates],
            mode="lines+markers",
            line={"color": colour},
            name=f"{steps} steps",
        )

    figure.update_xaxes(type="log")
    return finish(figure, x="learning rate", y="held-out loss after training", height=360)


def memory(bars: dict[str, dict[str, float]], limit_gib: float | None) -> dict[str, Any] | None:
    """Plot a stacked bar of memory terms in GiB for each candidate, with the limit as a line."""
    if not bars or limit_gib is None:
        return None

    figure = empty()
    totals = [sum(terms.values()) for terms in bars.values()]
    names = [f"{name}<br>{fmt_gib(total)}" for name, total in zip(bars, totals, strict=True)]
    for term in TERMS:
        values = [terms[term] for terms in bars.values()]
        figure.add_bar(
            x=values,
            y=names,
            orientation="h",
            name=term,
            marker={"color": TERM_COLOURS[term], "line": {"width": 0}},
            hovertext=[
                f"{name}: {term}<br><b>{fmt_gib(value)}</b>"
                for name, value in zip(names, values, strict=True)
            ],
        )

    _add_limit_line(figure, limit_gib)
    figure.update_xaxes(range=[0.0, 1.06 * max(limit_gib, *totals)])
    figure.update_layout(barmode="stack", bargap=0.45, legend={"traceorder": "normal"})
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return finish(figure, x="GiB allocated at the peak", height=170 + 62 * len(bars))


def phase_seconds(bars: dict[str, dict[str, float]]) -> dict[str, Any] | None:
    """Plot a timeline for each layout of a GRPO run: the seconds of its phases, in their order."""
    if not bars:
        return None

    figure = empty()
    phases = dict.fromkeys(phase for seconds in bars.values() for phase in seconds)
    for phase, colour in zip(phases, cycle(SERIES), strict=False):
        figure.add_bar(
            x=[seconds.get(phase, 0.0) for seconds in bars.values()],
            y=list(bars),
            orientation="h",
            name=phase,
            marker={"color": colour, "line": {"width": 0}},
            hovertext=[
                f"{escape(name)}: {phase}<br><b>{fmt_seconds(seconds.get(phase, 0.0))}</b>"
                for name, seconds in bars.items()
            ],
        )

    figure.update_layout(barmode="stack", bargap=0.45, legend={"traceorder": "normal"})
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return finish(figure, x="seconds", height=170 + 46 * len(bars))


def phase_memory(peaks: dict[str, float], limit_gib: float) -> dict[str, Any] | None:
    """Plot the peak of the GPU's memory in each phase of a GRPO run, with the limit as a line."""
    if not peaks:
        return None

    figure = empty()
    figure.add_bar(
        x=list(peaks.values()),
        y=list(peaks),
        orientation="h",
        marker={"color": BLUE, "line": {"width": 0}},
        hovertext=[f"{phase}<br><b>{fmt_gib(peak)}</b>" for phase, peak in peaks.items()],
    )
    _add_limit_line(figure, limit_gib)
    figure.update_xaxes(range=[0.0, 1.06 * max(limit_gib, *peaks.values())])
    figure.update_layout(bargap=0.45, showlegend=False)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return finish(figure, x="GiB in use on the GPU", height=150 + 38 * len(peaks))


def _add_limit_line(figure: Any, limit_gib: float) -> None:
    """Add the memory limit as a vertical line.

    The line's vertical label is to the right of the line, beyond the limit.
    """
    line = {"color": ACCENT, "width": 1.5, "dash": "dash"}
    upright = {"textangle": -90, "xanchor": "left", "yanchor": "top", "xshift": 2}
    figure.add_vline(
        x=limit_gib,
        line=line,
        layer="below",
        annotation={"text": f"limit {fmt_gib(limit_gib)}"} | upright,
    )


def _add_spans(figure: Any, spans: tuple[Span, ...], unit_s: float) -> None:
    """Add each span as a bar in the row of its rung."""
    for kind, colour in KIND_COLOURS.items():
        members = [span for span in spans if span.kind == kind]
        figure.add_bar(
            base=[span.start_s / unit_s for span in members],
            x=[span.seconds / unit_s for span in members],
            y=[span.rung.value for span in members],
            orientation="h",
            name=kind,
            marker={"color": colour, "line": {"width": 0}},
            hovertext=[
                f"{escape(span.label)}<br>{span.outcome}: <b>{fmt_seconds(span.seconds)}</b> {kind}"
                for span in members
            ],
        )


def _add_slices(figure: Any, parts: tuple[Slice, ...], unit_s: float) -> None:
    """Add each slice as a stacked bar of its shares of time."""
    for kind, colour in KIND_COLOURS.items():
        figure.add_bar(
            x=[(part.start_s + part.seconds / 2) / unit_s for part in parts],
            width=parts[0].seconds / unit_s,
            y=[part.shares[kind] for part in parts],
            name=kind,
            marker={"color": colour, "line": {"width": 0}},
            hovertext=[f"<b>{part.shares[kind]:.0%}</b> {kind}" for part in parts],
        )


def _memory_range(peaks: list[float], limit_gib: float | None) -> tuple[float, float]:
    """Return the two ends of the memory axis, with room for the labels of points and limit."""
    ends = [*peaks, *([limit_gib] if limit_gib else [])]
    low = min(ends)
    high = max(ends)
    if limit_gib:
        high = min(high, limit_gib * EDGE)
    room = 0.12 * max(high - low, 0.05 * high)
    return max(low - room, 0.0), high + room


def _trials(
    rows: tuple[TrialRecord, ...], x: Callable[[TrialRecord], float], highest: float = 0.0
) -> Any:
    """Return a figure with a point for each trial; its colour and symbol show the outcome.

    Return None if there are fewer than two trials, or if no speed is known. Trials without a speed
    are drawn below zero on the speed axis. The speed axis reaches above the fastest trial and above
    `highest`.
    """
    speeds = [row.tokens_per_second for row in rows if row.tokens_per_second is not None]
    if len(rows) < 2 or not speeds:
        return None

    figure = empty()
    fastest = max(*speeds, highest) or 1.0
    below = -0.045 * fastest if len(speeds) < len(rows) else 0.0
    for outcome, (colour, symbol) in MARKERS.items():
        members = [row for row in rows if row.outcome is outcome]
        line = {"width": 1.8 if symbol.endswith("open") else 0}
        if members:
            figure.add_scatter(
                x=[x(row) for row in members],
                y=[
                    below if row.tokens_per_second is None else row.tokens_per_second
                    for row in members
                ],
                mode="markers",
                name=LABELS[outcome],
                marker={
                    "color": colour,
                    "symbol": symbol,
                    "size": 9,
                    "opacity": 0.85,
                    "line": line,
                },
                hovertext=[_hover(row) for row in members],
                cliponaxis=False,
            )
    figure.update_yaxes(range=[2 * below, 1.1 * fastest], tickformat=",")
    return figure


def _hover(row: TrialRecord) -> str:
    """Return the tooltip of a trial."""
    has_speed = row.tokens_per_second is not None
    need_gib = memory_gib(row)
    lines = [f"<b>trial {row.number}</b>: {LABELS[row.outcome]}", escape(row.config.label())]
    if has_speed:
        lines.append(f"{fmt_count(row.tokens_per_second)} tokens/s")
    if need_gib is not None:
        lines.append(fmt_gib(need_gib) + (" peak reserved" if has_speed else " needed at least"))
    if row.reason:  # a tooltip cannot scroll; the table of trials has the whole reason
        lines.append(escape(row.reason[:90]))
    return "<br>".join(lines)
