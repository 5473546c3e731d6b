"""Renders a page with two studies side by side: the winners, their differences and two figures."""

from typing import Any

from autotune.catalog import NO_PRICE
from autotune.core.probe_types import Evidence, weakest
from autotune.core.units import fmt_count, fmt_gib, fmt_seconds, fmt_usd
from autotune.report import describe, figures, infos
from autotune.report.html import glossary, page, script_json, stats
from autotune.report.infos import CompareRow
from autotune.report.style import plotly_js
from autotune.study.summary import Recipe, StudySummary

ASKED = "What was asked for"
CLEAR = 1.1  # a speed ratio below this is shown as a percentage


def render(first: StudySummary, second: StudySummary) -> str:
    """Render the whole page. Both studies must have a winner."""
    assert first.recipe is not None
    assert second.recipe is not None
    pair = (first.recipe, second.recipe)
    rows = (*compare_tasks(*pair), *infos.compare_winners(*pair))
    unchanged = [
        row.name for row in rows if row.group in (ASKED, "Configuration") and not row.changed
    ]

    drawn = {}
    for name, study in {"first": first, "second": second}.items():
        limit_gib = infos.limit_gib(study)
        figure = figures.scatter(study.trials, infos.candidates(study), limit_gib)
        if figure is not None:
            drawn[name] = figure

    view = {
        "headline": headline(*pair),
        "sentences": sentences(*pair),
        "rows": rows,
        "unchanged": unchanged,
        "studies": [
            _column("first", first, first.recipe),
            _column("second", second, second.recipe),
        ],
        "glossary": glossary(),
        "drawn": drawn,
        "figures_json": script_json(drawn),
        "plotly_js": plotly_js(),
    }
    return page("versus.html.j2", view)


def compare_tasks(first: Recipe, second: Recipe) -> tuple[CompareRow, ...]:
    """Compare the tasks of the two studies.

    If the tasks differ, the configuration is not the only reason why the speeds differ.
    """
    theirs, ours = map(_facts, (first, second))
    return tuple(
        CompareRow(
            group=ASKED,
            name=name,
            winner=ours[name],
            baseline=theirs[name],
            changed=ours[name] != theirs[name],
        )
        for name in ours
    )


def _facts(recipe: Recipe) -> dict[str, str]:
    """Return the facts of a study's task, as texts."""
    packages = recipe.fingerprint.packages
    return {
        "model": recipe.model.name,
        "device": recipe.device.label,
        "price of an hour": fmt_usd(recipe.price.usd_per_hour) if recipe.price else NO_PRICE,
        "examples": describe.workload(recipe.workload),
        "lengths": str(recipe.workload.lengths),
        "global batch": fmt_count(recipe.workload.global_batch),
        "objective": recipe.workload.objective.value,
        "trainer": recipe.trainer,
        "torch": packages.get("torch", "unknown"),
        "transformers": packages.get("transformers", "unknown"),
    }


def headline(first: Recipe, second: Recipe) -> str:
    """Name the study with the faster winner, and say how much faster this winner is."""
    for recipe in (first, second):
        if recipe.winner.evidence is Evidence.DISTURBED:
            return (
                "The machine was too unsteady to compare speeds: every measurement of the winner "
                f"of {recipe.study} was disturbed"
            )
    low, high = infos.speed_ratio(first, second)
    if low <= 1.0 <= high:
        return "No measurable difference in speed"
    fast, slow = (second, first) if low > 1.0 else (first, second)
    ratio = fast.winner.performance.tokens_per_second / slow.winner.performance.tokens_per_second
    if ratio >= CLEAR:
        return f"{fast.study} is {ratio:.1f} times as fast as {slow.study}"
    return f"{fast.study} is {ratio - 1:.0%} faster than {slow.study}"


def sentences(first: Recipe, second: Recipe) -> list[str]:
    """Compare the second winner's speed, time, cost and memory with the first winner's.

    The last sentences say how certain the comparison is, and how else the studies differ.
    """
    low, high = infos.speed_ratio(first, second)
    one = second.winner
    other = first.winner
    speeds = [fmt_count(winner.performance.tokens_per_second) for winner in (one, other)]
    times = [fmt_seconds(winner.cost.full_run_hours * 3600) for winner in (one, other)]
    peaks = [fmt_gib(winner.measurement.peak_reserved_gib) for winner in (one, other)]

    lines = [
        f"{second.study} trains {speeds[0]} useful tokens/s, "
        f"{first.study} {speeds[1]}: {low:.2f} to {high:.2f} times as many.",
        f"The full run takes {times[0]} instead of {times[1]}, "
        f"and {peaks[0]} instead of {peaks[1]} at the peak.",
    ]
    if one.cost.full_run_usd is not None and other.cost.full_run_usd is not None:
        ranges = [describe.usd_range(winner.cost) for winner in (one, other)]
        usd = [fmt_usd(winner.cost.full_run_usd) for winner in (one, other)]
        lines.append(
            f"The full run costs {usd[0]} ({ranges[0]}) instead of {usd[1]} ({ranges[1]})."
        )

    weaker = weakest(one.evidence, other.evidence)
    lines.append(f"The comparison has the weaker evidence of the two winners: {weaker}.")
    if differing := [row.name for row in compare_tasks(first, second) if row.changed]:
        lines.append(f"The studies differ in more than the configuration: {', '.join(differing)}.")
    return lines


def _column(place: str, summary: StudySummary, recipe: Recipe) -> dict[str, Any]:
    """Return the page's view of one study."""
    return {
        "place": place,
        "name": summary.study,
        "evidence": recipe.winner.evidence.value,
        "subject": f"{recipe.model.name} on {recipe.device.label}",
        "label": recipe.config.label(),
        "tried": describe.breakdown(summary),
        "stats": stats(recipe, summary),
        "phrases": describe.configuration(recipe),
        "reason": recipe.reason,
        "caveats": [*recipe.caveats, *summary.notes],
    }
