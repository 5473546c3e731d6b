"""Infos -> plotly figures as JSON-able data. One that has nothing to show is None: the report says so in a sentence."""

from typing import Any

from autotune.core.probe_types import Outcome, Rung
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_count, fmt_gib, fmt_seconds, fmt_usd
from autotune.report.describe import ablation_effect
from autotune.report.infos import TERMS, HistoryInfo, MemoryBar, Point, ScatterInfo
from autotune.report.parallel import ParallelInfo
from autotune.report.style import ACCENT, OUTCOMES, empty, escape, finish
from autotune.report.timeline import KINDS, TimelineInfo, slices
from autotune.report.tradeoffs import CellRow
from autotune.study.ablation import Ablation
from autotune.study.summary import OnCard, Quality

TERM_COLOURS = dict(zip(TERMS, ("#2a7fc4", "#8fc1ea", "#d99a00", "#d9541e", "#8a8f98"), strict=True))
SPENT_COLOURS = dict(zip(KINDS, ("#8a8f98", "#d99a00", "#2a7fc4", "#8c63c7"), strict=True))
LONG_S = 900.0  # from here on the time axis is in minutes
# What misses the limit by more than this is drawn at the edge, so that one far miss does not squeeze the rest.
EDGE = 1.5


def scatter(info: ScatterInfo) -> dict[str, Any] | None:
    """Useful tokens/s against peak reserved memory; what did not run stands below zero."""
    if not _worth_drawing(info.points):
        return None
    figure = empty()
    top, below = _heights(info.points, [marked.tokens_per_second for marked in info.marked])
    edge = None if info.limit_gib is None else info.limit_gib * EDGE
    for outcome, points in _by_outcome(info.points):
        peaks = [point.peak_gib or 0.0 for point in points]
        figure.add_scatter(
            x=[peak if edge is None else min(peak, edge) for peak in peaks],
            y=[below if point.tokens_per_second is None else point.tokens_per_second for point in points],
            **_markers(outcome, points),
        )
    for marked in info.marked:
        text = f"<b>{marked.name}</b><br>{fmt_count(marked.tokens_per_second)} tokens/s<br>{fmt_gib(marked.peak_gib)}"
        figure.add_scatter(
            x=[marked.peak_gib],
            y=[marked.tokens_per_second],
            mode="markers+text",
            marker={"size": 17, "symbol": "circle-open", "color": ACCENT, "line": {"width": 2.5}},
            text=[marked.name],
            textposition="top center",
            textfont={"color": ACCENT, "size": 13},
            hovertext=[text],
            hoverinfo="text",
            cliponaxis=False,
            showlegend=False,
        )
    if info.limit_gib is not None:
        figure.add_vline(
            x=info.limit_gib,
            line={"color": ACCENT, "width": 1.5, "dash": "dash"},
            layer="below",
            # Upright at the far side of the line, where nothing that fits can be.
            annotation={
                "text": f"limit {fmt_gib(info.limit_gib)}",
                "textangle": -90,
                "xanchor": "left",
                "yanchor": "top",
            },
        )
    figure.update_xaxes(range=_around([one.peak_gib or 0.0 for one in info.points], info.limit_gib))
    figure.update_yaxes(range=[2 * below, top], tickformat=",")
    return finish(figure, x="peak reserved memory, GiB", y="useful tokens/s", height=430)


def history(info: HistoryInfo) -> dict[str, Any] | None:
    """Tokens/s of each trial in order, with the best so far as a line; those without a speed stand below zero."""
    if not _worth_drawing(info.points):
        return None
    figure = empty()
    top, below = _heights(info.points, [])
    if len(info.best) > 1:
        figure.add_scatter(
            x=[number for number, _ in info.best],
            y=[speed for _, speed in info.best],
            mode="lines",
            line={"shape": "hv", "color": ACCENT, "width": 2},
            name="best so far",
            hoverinfo="skip",
        )
    for outcome, points in _by_outcome(info.points):
        figure.add_scatter(
            x=[point.number for point in points],
            y=[below if point.tokens_per_second is None else point.tokens_per_second for point in points],
            **_markers(outcome, points),
        )
    figure.update_yaxes(range=[2 * below, top], tickformat=",")
    return finish(figure, x="trial", y="useful tokens/s", height=360)


def timeline(info: TimelineInfo) -> dict[str, Any] | None:
    """A row a rung, each second in the colour of what it was spent on; above it how busy the device was when timed.

    A long study is drawn in slices, by what share of each was spent on what.
    """
    if not info.spans:
        return None
    figure, cut = empty(), slices(info)
    unit, name = (60.0, "minutes") if info.length_s > LONG_S else (1.0, "seconds")
    rungs = [rung.value for rung in Rung if any(one.rung is rung for one in info.spans)]
    for kind in KINDS:
        style = {"name": kind, "marker": {"color": SPENT_COLOURS[kind], "line": {"width": 0}}, "hoverinfo": "text"}
        if cut:
            texts = [f"<b>{one.shares[kind]:.0%}</b> {kind}" for one in cut]
            places = {"x": [(one.start_s + one.seconds / 2) / unit for one in cut], "width": cut[0].seconds / unit}
            figure.add_bar(y=[one.shares[kind] for one in cut], hovertext=texts, **places, **style)
            continue
        spans = [one for one in info.spans if one.kind == kind]
        figure.add_bar(
            base=[one.start_s / unit for one in spans],
            x=[one.seconds / unit for one in spans],
            y=[one.rung.value for one in spans],
            orientation="h",
            hovertext=[
                f"{escape(one.label)}<br>{one.outcome}: <b>{fmt_seconds(one.seconds)}</b> {kind}" for one in spans
            ],
            **style,
        )
    busy = [one for one in cut or info.busy if one.utilization is not None]
    if busy:
        figure.add_bar(
            x=[(one.start_s + one.seconds / 2) / unit for one in busy],
            width=[one.seconds / unit for one in busy],
            y=[one.utilization for one in busy],
            yaxis="y2",
            marker={"color": SPENT_COLOURS["timed steps"], "line": {"width": 0}},
            hovertext=[f"a kernel ran <b>{one.utilization:.0%}</b> of the time" for one in busy],
            hoverinfo="text",
            showlegend=False,
        )
        scale = {"range": [0, 1], "tickformat": ".0%", "tickvals": [0, 0.5, 1], "title": {"text": "busy"}}
        figure.update_layout(yaxis={"domain": [0.0, 0.62]}, yaxis2={"domain": [0.7, 1.0], "anchor": "x"} | scale)
    figure.update_layout(barmode="overlay", bargap=0.3, legend={"traceorder": "normal"})
    if cut:
        figure.update_layout(barmode="stack", bargap=0, yaxis={"range": [0, 1], "tickformat": ".0%"})
    else:
        figure.update_layout(yaxis={"type": "category", "categoryarray": rungs[::-1], "showgrid": False})
    height = 130 + 42 * (4 if cut else len(rungs)) + (100 if busy else 0)
    return finish(figure, x=f"{name} since the first probe", y=None, height=height)


def importances(shares: tuple[tuple[str, float], ...]) -> dict[str, Any] | None:
    """Bars, the largest on top."""
    if len(shares) < 2:
        return None
    figure = empty()
    figure.add_bar(
        x=[share for _, share in shares],
        y=[escape(knob) for knob, _ in shares],
        orientation="h",
        marker={"color": OUTCOMES[Outcome.OK][0]},
        text=[f"{share:.0%}" for _, share in shares],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(tickformat=".0%")
    # The longest bar has its number beside it.
    figure.update_xaxes(range=[0.0, 1.16 * shares[0][1] or 1.0])
    return finish(figure, x="share of the variation explained", y=None, height=56 + 34 * len(shares))


def capability(rows: tuple[CellRow, ...]) -> dict[str, Any] | None:
    """What each other learning cell costs against the winner, with its interval; the cheapest on top."""
    others = [row for row in rows if row.changes]
    if not others:
        return None
    figure = empty()
    figure.add_bar(
        x=[row.extra for row in others],
        y=[escape(row.changes) for row in others],
        orientation="h",
        marker={"color": OUTCOMES[Outcome.OK][0]},
        error_x={
            "array": [row.interval[1] - row.extra for row in others],
            "arrayminus": [row.extra - row.interval[0] for row in others],
            "thickness": 1,
        },
        hovertext=[
            f"{escape(row.candidate.config.label())}<br><b>{row.extra:+.1%}</b> "
            f"({row.interval[0]:+.1%} to {row.interval[1]:+.1%}) [{row.candidate.evidence}]"
            for row in others
        ],
        hoverinfo="text",
    )
    figure.add_vline(x=0, line={"color": ACCENT, "width": 1.5})
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(tickformat="+.0%")
    return finish(figure, x="cost against the winner", y=None, height=76 + 38 * len(others))


def cards(found: tuple[OnCard, ...]) -> dict[str, Any] | None:
    """USD of the winner's run on each card whose price is known, with its interval; the cheapest on top."""
    priced = [(one, one.cost) for one in found if one.cost and one.cost.full_run_usd is not None]
    if len(priced) < 2:
        return None
    figure = empty()
    usd = [cost.full_run_usd or 0.0 for _, cost in priced]
    bounds = [cost.interval_usd or (0.0, 0.0) for _, cost in priced]
    figure.add_bar(
        x=usd,
        y=[escape(one.device.name) for one, _ in priced],
        orientation="h",
        marker={"color": [ACCENT if one.own else OUTCOMES[Outcome.OK][0] for one, _ in priced]},
        error_x={
            "array": [high - value for value, (_, high) in zip(usd, bounds, strict=True)],
            "arrayminus": [value - low for value, (low, _) in zip(usd, bounds, strict=True)],
            "thickness": 1,
        },
        hovertext=[
            f"{escape(one.device.name)}<br><b>{fmt_usd(cost.full_run_usd)}</b>, "
            f"{fmt_seconds(cost.full_run_hours * 3600)} [{cost.evidence}]"
            for one, cost in priced
        ],
        hoverinfo="text",
    )
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(tickformat="$,.2f", rangemode="tozero")
    return finish(figure, x="USD, on demand", y=None, height=66 + 26 * len(priced))


def parallel(info: ParallelInfo) -> dict[str, Any] | None:
    """A line for each configuration over the knobs that were varied, its speed at the right; the best drawn last."""
    if not info.axes:
        return None
    figure = empty()
    groups = ((2, "slower", "#8a8f98", 0.35), (1, "at least half as fast", "#2a7fc4", 0.7))
    for group, name, colour, opacity in (*groups, (0, "within 5 % of the fastest", ACCENT, 0.95)):
        xs: list[float | None] = []
        ys: list[float | None] = []
        texts: list[str] = []
        for line in (one for one in info.lines if one.group == group):
            xs += [*range(len(line.places)), None]  # a gap between two lines of one trace
            ys += [*line.places, None]
            texts += [f"{fmt_count(line.tokens_per_second)} tokens/s<br>{escape(line.label)}"] * (len(line.places) + 1)
        if xs:
            style = {"color": colour, "width": 1.4}
            figure.add_scatter(
                x=xs, y=ys, mode="lines", name=name, line=style, opacity=opacity, hovertext=texts, hoverinfo="text"
            )
    for place, (_, values) in enumerate(info.axes):
        for index, value in enumerate(values):
            height = index / (len(values) - 1)
            figure.add_annotation(x=place, y=height, text=escape(value), showarrow=False, xanchor="left", xshift=3)
    names = [escape(knob) for knob, _ in info.axes] + [f"tokens/s, to {fmt_count(info.fastest)}"]
    figure.update_xaxes(tickvals=[*range(len(names))], ticktext=names, range=[-0.5, len(names) - 0.5], showgrid=True)
    figure.update_xaxes(ticklabeloverflow="allow")
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])
    return finish(figure, x="", y=None, height=420)


def explanation(found: Ablation | None) -> dict[str, Any] | None:
    """The winner's speed with one knob after another set back; the slowest on top, nothing where it does not fit."""
    if found is None or not any(one.tokens_per_s for one in found.undone):
        return None
    figure, rows = empty(), found.ranked()
    figure.add_bar(
        x=[one.tokens_per_s or 0.0 for one in rows],
        y=[f"{one.knob} {escape(str(getattr(one.config, one.knob)))}" for one in rows],
        orientation="h",
        marker={"color": OUTCOMES[Outcome.OK][0]},
        error_x={"array": [one.error * (one.tokens_per_s or 0.0) for one in rows], "thickness": 1},
        text=["" if one.tokens_per_s else "does not come through" for one in rows],
        textposition="outside",
        hovertext=[
            f"{escape(one.config.label())}<br><b>{ablation_effect(found, one)}</b> [{one.evidence}]" for one in rows
        ],
        hoverinfo="text",
    )
    figure.add_vline(x=found.winner.tokens_per_s, line={"color": ACCENT, "width": 1.5})
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(tickformat=",")
    return finish(figure, x="tokens/s without it", y=None, height=76 + 38 * len(rows))


def quality(found: Quality | None, winner: TrainConfig | None) -> dict[str, Any] | None:
    """Held-out loss of the finalists after training against the time of the full run, with the Pareto front."""
    learned = [one for one in found.ranked() if one.loss_after is not None] if found else []
    if found is None or len(learned) < 2:
        return None
    figure = empty()
    front = found.front()
    figure.add_scatter(
        x=[one.full_run_hours for one in front],
        y=[one.loss_after for one in front],
        mode="lines",
        line={"color": ACCENT, "width": 1.5, "dash": "dot", "shape": "hv"},
        name="Pareto front",
        hoverinfo="skip",
    )
    for name, members in (
        ("winner", [one for one in learned if one.config == winner]),
        ("other finalists", [one for one in learned if one.config != winner]),
    ):
        figure.add_scatter(
            x=[one.full_run_hours for one in members],
            y=[one.loss_after for one in members],
            mode="markers",
            marker={"size": 11, "color": ACCENT if name == "winner" else OUTCOMES[Outcome.OK][0]},
            name=name,
            hovertext=[f"{escape(one.config.label())}<br><b>{one.loss_after:.4f}</b>" for one in members],
            hoverinfo="text",
            cliponaxis=False,
        )
    return finish(figure, x="hours of the full run", y="held-out loss after training", height=360)


def memory(bars: tuple[MemoryBar, ...]) -> dict[str, Any] | None:
    """One stacked bar a candidate, with the limit as a line."""
    if not bars:
        return None
    figure = empty()
    names = [f"{escape(bar.name)}<br>{fmt_gib(sum(bar.terms.values()))}" for bar in bars]
    for term in TERMS:
        values = [bar.terms[term] for bar in bars]
        figure.add_bar(
            x=values,
            y=names,
            orientation="h",
            name=term,
            marker={"color": TERM_COLOURS[term], "line": {"width": 0}},
            hovertext=[f"{name}: {term}<br><b>{fmt_gib(value)}</b>" for name, value in zip(names, values, strict=True)],
            hoverinfo="text",
        )
    limit = max(bar.limit_gib for bar in bars)
    figure.add_vline(
        x=limit,
        layer="below",
        line={"color": ACCENT, "width": 1.5, "dash": "dash"},
        annotation={
            "text": f"limit {fmt_gib(limit)}",
            "textangle": -90,
            "xanchor": "left",
            "yanchor": "top",
            "xshift": 2,
        },
    )
    figure.update_xaxes(range=[0.0, 1.06 * max(limit, *(sum(bar.terms.values()) for bar in bars))])
    figure.update_layout(barmode="stack", bargap=0.45, legend={"traceorder": "normal"})
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return finish(figure, x="GiB allocated at the peak", y=None, height=170 + 62 * len(bars))


def _around(peaks: list[float], limit_gib: float | None) -> tuple[float, float]:
    """The ends of the memory axis, with room for names at the points and at the limit."""
    ends = [*peaks, *([limit_gib] if limit_gib else [])]
    low, high = min(ends), max(ends)
    if limit_gib:
        high = min(high, limit_gib * EDGE)
    room = 0.12 * max(high - low, 0.05 * high)
    return max(low - room, 0.0), high + room


def _by_outcome(points: tuple[Point, ...]) -> list[tuple[Outcome, list[Point]]]:
    groups = [(outcome, [point for point in points if point.outcome is outcome]) for outcome in OUTCOMES]
    return [(outcome, members) for outcome, members in groups if members]


def _worth_drawing(points: tuple[Point, ...]) -> bool:
    return len(points) > 1 and any(point.tokens_per_second is not None for point in points)


def _heights(points: tuple[Point, ...], more: list[float]) -> tuple[float, float]:
    """The upper end of the speed axis, and where below zero the trials without a speed stand."""
    fastest = max([point.tokens_per_second or 0.0 for point in points] + more) or 1.0
    without = any(point.tokens_per_second is None for point in points)
    return 1.1 * fastest, -0.045 * fastest if without else 0.0


def _markers(outcome: Outcome, points: list[Point]) -> dict[str, Any]:
    colour, symbol, name = OUTCOMES[outcome]
    line = {"width": 1.8 if symbol.endswith("open") else 0}
    return {
        "mode": "markers",
        "name": name,
        "marker": {"color": colour, "symbol": symbol, "size": 9, "opacity": 0.85, "line": line},
        "hovertext": [_hover(point) for point in points],
        "hoverinfo": "text",
        "cliponaxis": False,
    }


def _hover(point: Point) -> str:
    ran = point.tokens_per_second is not None
    peak = fmt_gib(point.peak_gib) + (" peak reserved" if ran else " needed at least")
    lines = [f"<b>trial {point.number}</b>: {OUTCOMES[point.outcome][2]}", escape(point.label)]
    lines += [f"{fmt_count(point.tokens_per_second)} tokens/s"] if ran else []
    lines += [peak] if point.peak_gib is not None else []
    # A tooltip has no scroll bar; the whole reason stands in the table.
    lines += [escape(point.reason[:90])] if point.reason else []
    return "<br>".join(lines)
