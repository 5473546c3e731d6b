"""What each figure and table of the report says, as plain values: StudySummary in, dataclasses out, no plotly.

Numbers stay numbers here and unknown ones None; `html` formats them and `figures` draws them.
"""

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from autotune.core.probe_types import Outcome, to_data
from autotune.core.train_config import KNOBS
from autotune.core.units import DASH
from autotune.problem.run_cost import CostProjection
from autotune.report import describe
from autotune.study.summary import Candidate, Recipe, StudySummary, TrialRecord

# More distinct values than this on one axis of the map are grouped by powers of two.
MAX_AXIS = 10
TERMS = ("weights", "adapters", "gradients", "optimizer", "activations and the rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One trial in a figure. `peak_gib` is reserved memory, or what was needed at least if it did not fit."""

    number: int
    label: str
    outcome: Outcome
    tokens_per_second: float | None
    peak_gib: float | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The winner or the baseline in the scatter."""

    name: str
    tokens_per_second: float
    peak_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterInfo:
    """Speed against memory. A point without a speed did not run to its end, one without memory is left out."""

    points: tuple[Point, ...]
    marked: tuple[Marked, ...]
    limit_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryInfo:
    """Trials in order, and (trial, best tokens/s so far) at each improvement and at the end."""

    points: tuple[Point, ...]
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCell:
    """One micro batch x seq_len. `state`: fits, oom, refused, mixed (other knobs decide), failed, untried."""

    state: str
    num_tried: int = 0
    best_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MapInfo:
    """`cells[i][j]` is micro batch `rows[i]` at seq_len `columns[j]`; both are labels, ascending."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[MapCell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """One candidate. `terms` in the order of TERMS; they sum to the allocated peak."""

    name: str
    terms: dict[str, float]
    reserved_gib: float
    limit_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One line of winner against baseline, ready to print. `ratio` is winner / baseline where that says something."""

    group: str
    name: str
    winner: str
    baseline: str
    changed: bool = False
    ratio: float | None = None


def scatter(summary: StudySummary) -> ScatterInfo:
    points = tuple(point for point in map(_point, summary.trials) if point.peak_gib is not None)
    return ScatterInfo(points=points, marked=_marked(summary.recipe), limit_gib=limit_gib(summary))


def limit_gib(summary: StudySummary) -> float | None:
    """The winner's memory limit; the median of the trials' where there is no winner."""
    if summary.recipe:
        return summary.recipe.winner.measurement.limit_gib
    limits = [row.limit_gib for row in summary.trials if row.limit_gib is not None]
    return statistics.median(limits) if limits else None


def history(summary: StudySummary) -> HistoryInfo:
    best: list[tuple[int, float]] = []
    for row in summary.trials:
        speed = row.tokens_per_second
        if row.outcome is Outcome.OK and speed is not None and (not best or speed > best[-1][1]):
            best.append((row.number, speed))
    if best and summary.trials[-1].number > best[-1][0]:
        best.append((summary.trials[-1].number, best[-1][1]))
    return HistoryInfo(points=tuple(map(_point, summary.trials)), best=tuple(best))


def importances(summary: StudySummary) -> tuple[tuple[str, float], ...]:
    """(knob, share), the largest first."""
    return tuple(sorted(summary.importances.items(), key=lambda item: (-item[1], item[0])))


def feasibility(summary: StudySummary) -> MapInfo:
    """Which micro batches and lengths were tried, and what became of them."""
    micro, micro_of = _axis({row.config.micro_batch_size for row in summary.trials})
    lengths, length_of = _axis({row.config.seq_len for row in summary.trials})
    groups: dict[tuple[str, str], list[TrialRecord]] = {}
    for row in summary.trials:
        key = (micro_of[row.config.micro_batch_size], length_of[row.config.seq_len])
        groups.setdefault(key, []).append(row)
    cells = tuple(tuple(_cell(groups.get((one, other), [])) for other in lengths) for one in micro)
    return MapInfo(rows=micro, columns=lengths, cells=cells)


def memory(summary: StudySummary) -> tuple[MemoryBar, ...]:
    """Winner and baseline; what no term names is activations, logits and the allocator's rest."""
    if summary.recipe is None:
        return ()
    return tuple(_bar(name, candidate) for name, candidate in _candidates(summary.recipe))


def compare(recipe: Recipe) -> tuple[CompareRow, ...]:
    """Knob by knob, then performance, memory and cost; the baseline's side is a dash where there is none."""
    winner, baseline = recipe.winner, recipe.baseline
    ours, theirs = winner.config.as_dict(), baseline.config.as_dict() if baseline else {}
    rows = [
        CompareRow(
            group="Configuration",
            name=knob,
            winner=value_text(ours.get(knob)),
            baseline=value_text(theirs.get(knob)),
            changed=baseline is not None and ours.get(knob) != theirs.get(knob),
        )
        for knob in KNOBS
        if knob in ours or knob in theirs
    ]
    accumulation = [str(recipe.accumulation), DASH]
    if baseline:
        accumulation[1] = str(recipe.workload.run_shape(baseline.config).accumulation)
    rows.append(
        CompareRow(
            group="Configuration",
            name="accumulation steps",
            winner=accumulation[0],
            baseline=accumulation[1],
            changed=baseline is not None and accumulation[0] != accumulation[1],
        )
    )
    others = describe.numbers(baseline) if baseline else {}
    for name, number in describe.numbers(winner).items():
        other = others.get(name)
        ratio = number.value / other.value if number.value is not None and other and other.value else None
        text = other.text if other else DASH
        rows.append(CompareRow(group=number.group, name=name, winner=number.text, baseline=text, ratio=ratio))
    return tuple(rows)


def costs(recipe: Recipe) -> tuple[CostProjection, ...]:
    """The workload that was asked for and the table sizes, by size; equal ones once."""
    sizes = {one.examples: one for one in (*recipe.by_examples, recipe.winner.cost)}
    return tuple(sizes[examples] for examples in sorted(sizes))


def fingerprint(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """(field, value), packages one by one."""
    data: dict[str, Any] = to_data(recipe.fingerprint)
    packages: dict[str, str] = data.pop("packages")
    return tuple((name, value_text(value)) for name, value in (data | packages).items())


def value_text(value: Any) -> str:
    """A knob's or a field's value in a table."""
    if value is None:
        return DASH
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _point(row: TrialRecord) -> Point:
    return Point(
        number=row.number,
        label=row.config.label(),
        outcome=row.outcome,
        tokens_per_second=row.tokens_per_second,
        peak_gib=describe.memory_gib(row),
        reason=row.reason,
    )


def _candidates(recipe: Recipe) -> list[tuple[str, Candidate]]:
    return [("winner", recipe.winner)] + ([("baseline", recipe.baseline)] if recipe.baseline else [])


def _marked(recipe: Recipe | None) -> tuple[Marked, ...]:
    if recipe is None:
        return ()
    return tuple(
        Marked(
            name=name,
            tokens_per_second=candidate.performance.tokens_per_second,
            peak_gib=candidate.measurement.peak_reserved_gib,
        )
        for name, candidate in _candidates(recipe)
    )


def _axis(values: set[int]) -> tuple[tuple[str, ...], dict[int, str]]:
    """Labels in order, and the label of each value."""
    if len(values) <= MAX_AXIS:
        names = {value: f"{value:,}" for value in sorted(values)}
    else:
        names = {}
        for value in sorted(values):
            low = 2 ** int(math.log2(value))
            names[value] = f"{low:,} to {2 * low - 1:,}" if low > 1 else "1"
    return tuple(dict.fromkeys(names.values())), names


def _cell(rows: list[TrialRecord]) -> MapCell:
    count = Counter(row.outcome for row in rows)
    fitting, not_fitting = count[Outcome.OK] + count[Outcome.SLOW], count[Outcome.OOM] + count[Outcome.REFUSED]
    if fitting and not_fitting:
        state = "mixed"
    elif fitting:
        state = "fits"
    elif count[Outcome.OOM]:
        state = "oom"
    elif count[Outcome.REFUSED]:
        state = "refused"
    else:
        state = "failed" if rows else "untried"
    speeds = [row.tokens_per_second for row in rows if row.outcome is Outcome.OK and row.tokens_per_second is not None]
    return MapCell(state=state, num_tried=len(rows), best_tokens_per_second=max(speeds, default=None))


def _bar(name: str, candidate: Candidate) -> MemoryBar:
    peak = candidate.measurement
    named = (peak.model_gib, peak.adapters_gib, peak.gradients_gib, peak.optimizer_gib)
    # Not everything is alive at the peak, so the named terms can exceed it; the rest is never negative.
    rest = max(0.0, peak.peak_allocated_gib - sum(named))
    return MemoryBar(
        name=name,
        terms=dict(zip(TERMS, (*named, rest), strict=True)),
        reserved_gib=peak.peak_reserved_gib,
        limit_gib=peak.limit_gib,
    )
