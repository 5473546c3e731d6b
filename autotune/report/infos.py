"""What figures and tables of the report show, as plain values: a StudySummary in, no plotly, no HTML.

Numbers stay numbers and unknown ones are None. `html` formats them, `figures` draws them, `describe` has the words.
"""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig, learning_differences
from autotune.core.units import DASH, EIGHTY_PERCENT
from autotune.problem.run_cost import CostProjection
from autotune.report import describe
from autotune.study.summary import Candidate, Recipe, StudySummary, TrialRecord

# More distinct values than this on one axis of the map are grouped by powers of two.
MAX_AXIS = 10
TERMS = ("weights", "adapters", "gradients", "optimizer", "activations and the rest")
# Groups of the parallel coordinates, as shares of the fastest speed.
CLOSE, HALF = 0.95, 0.5
SHORTEST_ROW = 128
# The share of the variation needs so many measured configurations, and so many of each of two values of the knob.
MIN_MEASURED, MIN_OF_VALUE = 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCell:
    """One micro batch x seq_len. `state`: fits, oom, refused, mixed (other knobs decide), failed, untried."""

    state: str
    num_tried: int = 0
    best_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One line of winner against baseline, ready to print.

    `ratio` is winner / baseline where it means something and, for speed and what follows from it, can be measured.
    """

    group: str
    name: str
    winner: str
    baseline: str
    changed: bool = False
    ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A configuration: its height on each axis, 0 to 1, the last of which is its speed; `group` 0 is the fastest."""

    label: str
    tokens_per_second: float
    heights: tuple[float, ...]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelInfo:
    """`axes` are the knobs that vary, with their values from bottom to top; `fastest` ends the speed axis."""

    axes: tuple[tuple[str, tuple[str, ...]], ...]
    lines: tuple[Line, ...]
    fastest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """The share of the variation of speed that lies between the values of a knob. 80 % of cases are in `interval`."""

    share: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """The best candidate of one learning cell.

    `extra` is its cost per useful token over the winner's, minus 1, with `interval` from both spreads; `is_clear` if
    that leaves out 0. `changes` names the learning knobs that differ, and `learns_more` says in which direction. `cut`
    is the share of all tokens cut off, `padding` that of its rows.
    """

    candidate: Candidate
    changes: str
    extra: float
    interval: tuple[float, float]
    cut: float
    padding: float
    is_winner: bool
    learns_more: bool

    @property
    def is_clear(self) -> bool:
        """Whether its cost can be told from the winner's."""
        return not self.interval[0] <= 0.0 <= self.interval[1]

    @property
    def cost(self) -> str:
        """The difference in cost, in words where it cannot be measured."""
        return f"{self.extra:+.1%} cost" if self.is_clear else "no measurable difference in cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """Rows of `seq_len` tokens: the shares of examples and tokens cut, and of the rows filled, unpacked and packed."""

    seq_len: int
    examples_cut: float
    tokens_cut: float
    fill: float
    packed_fill: float
    examples_a_row: float
    is_winner: bool


def candidates(summary: StudySummary) -> dict[str, Candidate]:
    """Winner and baseline by these names, those that exist."""
    if summary.recipe is None:
        return {}
    pair = {"winner": summary.recipe.winner, "baseline": summary.recipe.baseline}
    return {name: candidate for name, candidate in pair.items() if candidate is not None}


def limit_gib(summary: StudySummary) -> float | None:
    """The winner's memory limit; the median of the trials' limits without a winner."""
    if summary.recipe:
        return summary.recipe.winner.measurement.limit_gib
    limits = [row.limit_gib for row in summary.trials if row.limit_gib is not None]
    return statistics.median(limits) if limits else None


def best_so_far(summary: StudySummary) -> tuple[tuple[int, float], ...]:
    """(trial, best tokens/s so far) at each improvement and at the last trial."""
    best: list[tuple[int, float]] = []
    for row in summary.trials:
        speed = row.tokens_per_second
        if row.outcome is Outcome.OK and speed is not None and (not best or speed > best[-1][1]):
            best.append((row.number, speed))
    if best and summary.trials[-1].number > best[-1][0]:
        best.append((summary.trials[-1].number, best[-1][1]))
    return tuple(best)


def feasibility(summary: StudySummary) -> dict[str, dict[str, MapCell]]:
    """How the trials of each micro batch (outer keys) and row length (inner keys) ended; labels in ascending order."""
    micro_of = _labels({row.config.micro_batch_size for row in summary.trials})
    length_of = _labels({row.config.seq_len for row in summary.trials})
    groups: dict[tuple[str, str], list[TrialRecord]] = {}
    for row in summary.trials:
        key = (micro_of[row.config.micro_batch_size], length_of[row.config.seq_len])
        groups.setdefault(key, []).append(row)
    return {
        micro: {length: _cell(groups.get((micro, length), [])) for length in length_of.values()}
        for micro in micro_of.values()
    }


def memory(summary: StudySummary) -> dict[str, dict[str, float]]:
    """GiB by TERMS for winner and baseline; activations, logits and the allocator's rest are one term."""
    bars = {}
    for name, candidate in candidates(summary).items():
        peak = candidate.measurement
        terms = (peak.model_gib, peak.adapters_gib, peak.gradients_gib, peak.optimizer_gib)
        # Not everything is alive at the peak, so these terms can exceed it; the rest is never negative.
        rest = max(0.0, peak.peak_allocated_gib - sum(terms))
        bars[name] = dict(zip(TERMS, (*terms, rest), strict=True))
    return bars


def compare(recipe: Recipe) -> tuple[CompareRow, ...]:
    """Winner and baseline knob by knob, then performance, memory and cost, without what is unknown of both."""
    baseline = recipe.baseline
    theirs = None if baseline is None else (recipe, baseline)
    return _compare((recipe, recipe.winner), theirs, differs=recipe.differs)


def compare_winners(first: Recipe, second: Recipe) -> tuple[CompareRow, ...]:
    """The same of the winners of two studies, where the second one stands as the winner."""
    low, high = speed_ratio(first, second)
    return _compare((second, second.winner), (first, first.winner), differs=not low <= 1.0 <= high)


def speed_ratio(first: Recipe, second: Recipe) -> tuple[float, float]:
    """The interval of the second winner's useful tokens/s over the first one's."""
    ours, theirs = second.winner.performance, first.winner.performance
    if second.device.name == first.device.name:
        return ours.times(theirs)
    ratio = ours.tokens_per_second / theirs.tokens_per_second  # what a projection may be off by counts
    return ratio * (1 + ours.spread[0]) / (1 + theirs.spread[1]), ratio * (1 + ours.spread[1]) / (1 + theirs.spread[0])


def _compare(
    ours: tuple[Recipe, Candidate], theirs: tuple[Recipe, Candidate] | None, *, differs: bool
) -> tuple[CompareRow, ...]:
    """Candidates of recipes. `differs` says whether their speeds can be told apart."""
    settings, others = _settings(*ours), _settings(*theirs) if theirs else {}
    rows = [
        CompareRow(
            group="Configuration",
            name=name,
            winner=value_text(settings.get(name)),
            baseline=value_text(others.get(name)),
            changed=theirs is not None and settings.get(name) != others.get(name),
        )
        for name in (*KNOBS, "accumulation steps")
        if name in settings or name in others
    ]
    numbers = describe.numbers(theirs[1]) if theirs else {}
    for name, number in describe.numbers(ours[1]).items():
        other = numbers.get(name)
        ratio = None
        if number.value is not None and other and other.value and (differs or number.group == describe.MEMORY):
            ratio = number.value / other.value
        text = other.text if other else DASH
        rows.append(CompareRow(group=number.group, name=name, winner=number.text, baseline=text, ratio=ratio))
    return tuple(row for row in rows if (row.winner, row.baseline) != (DASH, DASH))


def costs(recipe: Recipe) -> tuple[CostProjection, ...]:
    """The user's workload and the table sizes, by size, each once."""
    sizes = {cost.examples: cost for cost in (*recipe.by_examples, recipe.winner.cost)}
    return tuple(sizes[examples] for examples in sorted(sizes))


def fingerprint(recipe: Recipe) -> dict[str, str]:
    """Each field of the fingerprint, and each package."""
    data: dict[str, Any] = to_data(recipe.fingerprint)
    packages: dict[str, str] = data.pop("packages")
    return {name: value_text(value) for name, value in (data | packages).items()}


def parallel(summary: StudySummary) -> ParallelInfo:
    """The configurations with a known speed, each once; no axes where fewer than two knobs vary."""
    speeds: dict[TrainConfig, float] = {}
    for row in summary.trials:
        if row.tokens_per_second is not None:
            speeds[row.config] = max(row.tokens_per_second, speeds.get(row.config, 0.0))
    values = {knob: sorted({getattr(config, knob) for config in speeds}, key=_order) for knob in KNOBS}
    values = {knob: several for knob, several in values.items() if len(several) > 1}
    fastest = max(speeds.values(), default=0.0)
    if len(values) < 2 or not fastest:
        return ParallelInfo(axes=(), lines=(), fastest=fastest)
    lines = []
    for config, speed in sorted(speeds.items(), key=lambda item: item[1]):
        heights = [several.index(getattr(config, knob)) / (len(several) - 1) for knob, several in values.items()]
        share = speed / fastest
        group = 0 if share >= CLOSE else 1 if share >= HALF else 2
        lines.append(Line(label=config.label(), tokens_per_second=speed, heights=(*heights, share), group=group))
    axes = tuple((knob, tuple(map(str, several))) for knob, several in values.items())
    return ParallelInfo(axes=axes, lines=tuple(lines), fastest=fastest)


def measured_speeds(summary: StudySummary) -> dict[TrainConfig, float]:
    """Useful tokens/s of each configuration whose whole model was timed."""
    return {
        row.config: row.tokens_per_second
        for row in summary.trials
        if row.outcome is Outcome.OK and row.evidence is Evidence.MEASURED and row.tokens_per_second is not None
    }


def importances(summary: StudySummary) -> dict[str, Importance]:
    """Each knob that varied enough, the largest share first; empty where too few configurations were measured."""
    speeds = measured_speeds(summary)
    shares = {}
    for knob in KNOBS if len(speeds) >= MIN_MEASURED else ():
        pairs = [(getattr(config, knob), speed) for config, speed in speeds.items()]
        if sum(count >= MIN_OF_VALUE for count in Counter(value for value, _ in pairs).values()) > 1:
            shares[knob] = _importance(pairs)
    return dict(sorted(shares.items(), key=lambda item: -item[1].share))


def _importance(pairs: list[tuple[Any, float]]) -> Importance:
    """The share with its interval, by leaving out every twentieth pair in turn (a jackknife of blocks)."""
    share = _explained(pairs)
    others = [
        _explained([pair for index, pair in enumerate(pairs) if index % MIN_MEASURED != left_out])
        for left_out in range(MIN_MEASURED)
    ]
    error = EIGHTY_PERCENT * math.sqrt((MIN_MEASURED - 1) * statistics.pvariance(others))
    return Importance(share=share, interval=(max(share - error, 0.0), min(share + error, 1.0)))


def _explained(pairs: list[tuple[Any, float]]) -> float:
    """The share of the variance of numbers that lies between the means of their groups, corrected for chance."""
    groups: dict[Any, list[float]] = {}
    for value, number in pairs:
        groups.setdefault(value, []).append(number)
    within = sum(len(numbers) * statistics.pvariance(numbers) for numbers in groups.values())
    total = statistics.variance(number for _, number in pairs)
    return max(1 - within / (len(pairs) - len(groups)) / total, 0.0) if total else 0.0


def learning_cells(recipe: Recipe) -> tuple[CellRow, ...]:
    """The best of each learning cell, the winner first and then the cheapest."""
    rows = []
    winner = recipe.winner.performance
    for candidate in recipe.cells:
        low, high = winner.times(candidate.performance)
        rows.append(
            CellRow(
                candidate=candidate,
                changes=learning_differences(candidate.config, recipe.config),
                extra=winner.tokens_per_second / candidate.performance.tokens_per_second - 1,
                interval=(low - 1, high - 1),
                cut=recipe.workload.truncated(candidate.config.seq_len),
                padding=1.0 - recipe.workload.fill(candidate.config),
                is_winner=candidate.config == recipe.config,
                learns_more=candidate.config.capability > recipe.config.capability,
            )
        )
    return tuple(sorted(rows, key=lambda row: (not row.is_winner, row.extra)))


def trade_offs(recipe: Recipe) -> list[str]:
    """What the best of each other learning cell would cost against the winner, the cheapest first."""
    winner_cut = recipe.workload.truncated(recipe.config.seq_len)
    lines = []
    for row in learning_cells(recipe):
        if row.changes:
            cut = f", {row.cut:.1%} instead of {winner_cut:.1%} of the tokens cut off" if row.cut != winner_cut else ""
            lines.append(f"{row.changes}: {row.cost}{cut} [{row.candidate.evidence}]")
    return lines


def row_lengths(summary: StudySummary) -> tuple[LengthRow, ...]:
    """Each seq_len that was tried, and the powers of two below and just above; () where all have one length."""
    recipe = summary.recipe
    if recipe is None or len(recipe.workload.lengths.counts) == 1:
        return ()
    workload = recipe.workload
    lengths = {row.config.seq_len for row in summary.trials}
    longest = 2 * min(workload.lengths.longest, max(lengths, default=SHORTEST_ROW))
    lengths |= {2**power for power in range(64) if SHORTEST_ROW <= 2**power < longest}
    rows = []
    for seq_len in sorted(lengths):
        alone = TrainConfig(seq_len=seq_len, micro_batch_size=recipe.config.micro_batch_size)
        packed = replace(alone, packing=True)
        rows.append(
            LengthRow(
                seq_len=seq_len,
                examples_cut=workload.lengths.longer(seq_len),
                tokens_cut=workload.truncated(seq_len),
                fill=workload.fill(alone),
                packed_fill=workload.fill(packed),
                examples_a_row=workload.examples_per_row(packed),
                is_winner=seq_len == recipe.config.seq_len,
            )
        )
    return tuple(rows)


def value_text(value: Any) -> str:
    """A knob's or a field's value in a table."""
    if value is None:
        return DASH
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _settings(recipe: Recipe, candidate: Candidate) -> dict[str, Any]:
    """The knobs of a candidate and its accumulation steps."""
    return candidate.config.as_dict() | {"accumulation steps": recipe.workload.run_shape(candidate.config).accumulation}


def _labels(values: set[int]) -> dict[int, str]:
    """The label of each value in ascending order; several values share one where there are many."""
    if len(values) <= MAX_AXIS:
        return {value: f"{value:,}" for value in sorted(values)}
    lows = {value: 2 ** int(math.log2(value)) for value in sorted(values)}
    return {value: f"{low:,} to {2 * low - 1:,}" if low > 1 else "1" for value, low in lows.items()}


def _cell(rows: list[TrialRecord]) -> MapCell:
    count = Counter(row.outcome for row in rows)
    fitting = count[Outcome.OK] + count[Outcome.SLOW]
    too_large = count[Outcome.OOM] + count[Outcome.REFUSED]
    if fitting:
        state = "mixed" if too_large else "fits"
    elif too_large:
        state = "oom" if count[Outcome.OOM] else "refused"
    else:
        state = "failed" if rows else "untried"
    speeds = [row.tokens_per_second for row in rows if row.outcome is Outcome.OK and row.tokens_per_second is not None]
    return MapCell(
        state=state, num_tried=len({row.config for row in rows}), best_tokens_per_second=max(speeds, default=None)
    )


def _order(value: Any) -> tuple[bool, bool, Any]:
    """A key that sorts None first, then numbers by size, then words by the alphabet."""
    return value is not None, not isinstance(value, int), value or 0
