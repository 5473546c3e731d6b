"""Makes the content of the report's figures and tables from a StudySummary, as plain values.

This module needs neither plotly nor HTML. Numbers stay numbers; unknown numbers are None. `html`
formats the values, `figures` draws them, and `describe` makes the texts.
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

# The map of micro batch sizes and row lengths has two axes. If an axis has more than this many
# distinct values, values between two powers of two are grouped.
MAX_AXIS = 10
TERMS = ("weights", "adapters", "gradients", "optimizer", "activations and the rest")
# The lines of the parallel coordinates form three groups by speed. The fastest group begins at
# CLOSE times the fastest speed, and the next group at HALF of the fastest speed.
CLOSE = 0.95
HALF = 0.5
SHORTEST_ROW = 128  # the shortest row length in the table of row lengths, in tokens
# A knob's share of the variation in speed is computed only if at least MIN_MEASURED configurations
# were measured, and if at least two values of the knob were each measured in MIN_OF_VALUE of them.
MIN_MEASURED = 20
MIN_OF_VALUE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCell:
    """The state of all trials with the same micro batch size and the same seq_len.

    `state` is fits, oom, refused, failed, untried or mixed. Mixed means that some trials fit, and
    others do not.
    """

    state: str
    num_tried: int = 0
    best_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """A line of the comparison between winner and baseline, with texts that are ready to print.

    `ratio` is the winner's number divided by the baseline's number, or None if this ratio has no
    meaning. For speed, and for numbers that follow from speed, `ratio` is also None if the two
    numbers differ by less than the measurement error.
    """

    group: str
    name: str
    winner: str
    baseline: str
    changed: bool = False
    ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A configuration as a line of the parallel-coordinates plot.

    `heights` has the line's height on each axis, from 0 to 1. The last axis is the speed. `group`
    is the number of the configuration's speed group (see CLOSE); 0 is the fastest group.
    """

    label: str
    tokens_per_second: float
    heights: tuple[float, ...]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelInfo:
    """The data of the parallel-coordinates plot.

    `axes` has a pair for each knob that varies: the knob's name, and its values from bottom to top.
    `fastest` is the highest tokens/s, which is at the upper end of the speed axis.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...]
    lines: tuple[Line, ...]
    fastest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """The share of the variance of speed that the values of a knob explain.

    `interval` should contain the true share in 80 % of cases.
    """

    share: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """The best candidate of one learning cell.

    A learning cell is a group of configurations with equal values of the knobs that affect
    learning.

    `extra` is the candidate's cost per useful token divided by the winner's, minus 1. `interval` is
    the interval of `extra`, which follows from the spreads of both measured speeds. `changes` names
    the knobs that affect learning and whose values differ from the winner's values. `learns_more`
    says whether the candidate is more capable than the winner. `cut` is the share of the dataset's
    tokens that the candidate cuts off, and `padding` the share of padding tokens in its rows.
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
        """Whether the cost clearly differs from the winner's: `extra`'s interval excludes 0."""
        return not self.interval[0] <= 0.0 <= self.interval[1]

    @property
    def cost(self) -> str:
        """The extra cost, such as '+3.1% cost', or a phrase if the difference is not clear."""
        return f"{self.extra:+.1%} cost" if self.is_clear else "no measurable difference in cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """The effect of limiting rows (training sequences) to `seq_len` tokens.

    `examples_cut` is the share of examples that lose tokens, and `tokens_cut` the share of tokens
    that are cut off. `fill` is the share of tokens that are not padding if rows are not packed, and
    `packed_fill` is this share if rows are packed.
    """

    seq_len: int
    examples_cut: float
    tokens_cut: float
    fill: float
    packed_fill: float
    examples_a_row: float
    is_winner: bool


def candidates(summary: StudySummary) -> dict[str, Candidate]:
    """Return the study's winner and baseline under the keys "winner" and "baseline", if known."""
    if summary.recipe is None:
        return {}
    pair = {"winner": summary.recipe.winner, "baseline": summary.recipe.baseline}
    return {name: candidate for name, candidate in pair.items() if candidate is not None}


def limit_gib(summary: StudySummary) -> float | None:
    """Return the winner's memory limit or, without a winner, the median limit of the trials."""
    if summary.recipe:
        return summary.recipe.winner.measurement.limit_gib
    limits = [row.limit_gib for row in summary.trials if row.limit_gib is not None]
    return statistics.median(limits) if limits else None


def best_so_far(summary: StudySummary) -> tuple[tuple[int, float], ...]:
    """Return (trial, best tokens/s so far) at each improvement and at the last trial."""
    best: list[tuple[int, float]] = []
    for row in summary.trials:
        speed = row.tokens_per_second
        if row.outcome is Outcome.OK and speed is not None and (not best or speed > best[-1][1]):
            best.append((row.number, speed))

    if best and summary.trials[-1].number > best[-1][0]:
        best.append((summary.trials[-1].number, best[-1][1]))
    return tuple(best)


def feasibility(summary: StudySummary) -> dict[str, dict[str, MapCell]]:
    """Return {micro batch size: {row length: cell}}; a cell says whether these configurations fit.

    The sizes and lengths are labels, in ascending order.
    """
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
    """Return the GiB of each term in TERMS, for winner and baseline.

    Activations, logits and all other tensors are added up and form a single term.
    """
    bars = {}
    for name, candidate in candidates(summary).items():
        peak = candidate.measurement
        terms = (peak.model_gib, peak.adapters_gib, peak.gradients_gib, peak.optimizer_gib)
        # Not all of these terms exist at the peak, so their sum can exceed the peak.
        rest = max(0.0, peak.peak_allocated_gib - sum(terms))
        bars[name] = dict(zip(TERMS, (*terms, rest), strict=True))
    return bars


def compare(recipe: Recipe) -> tuple[CompareRow, ...]:
    """Compare winner and baseline: first each knob, then performance, memory and cost.

    Rows that are unknown for both candidates are left out.
    """
    baseline = recipe.baseline
    theirs = None if baseline is None else (recipe, baseline)
    return _compare((recipe, recipe.winner), theirs, differs=recipe.differs)


def compare_winners(first: Recipe, second: Recipe) -> tuple[CompareRow, ...]:
    """Compare the winners of two studies in the same way as `compare`.

    In the rows, `winner` holds the second study's winner, and `baseline` the first study's winner.
    """
    low, high = speed_ratio(first, second)
    steady = Evidence.DISTURBED not in (first.winner.evidence, second.winner.evidence)
    differs = steady and not low <= 1.0 <= high
    return _compare((second, second.winner), (first, first.winner), differs=differs)


def speed_ratio(first: Recipe, second: Recipe) -> tuple[float, float]:
    """Return the interval of the ratio of the second winner's speed to the first winner's speed."""
    ours = second.winner.performance
    theirs = first.winner.performance
    if second.device.name == first.device.name:
        return ours.times(theirs)

    # If the devices differ, the interval also includes the possible errors of projected speeds.
    ratio = ours.tokens_per_second / theirs.tokens_per_second
    low = ratio * (1 + ours.spread[0]) / (1 + theirs.spread[1])
    high = ratio * (1 + ours.spread[1]) / (1 + theirs.spread[0])
    return low, high


def _compare(
    ours: tuple[Recipe, Candidate], theirs: tuple[Recipe, Candidate] | None, *, differs: bool
) -> tuple[CompareRow, ...]:
    """Compare two candidates, each given with the recipe of its study.

    `differs` says whether their speeds clearly differ.
    """
    settings = _settings(*ours)
    others = _settings(*theirs) if theirs else {}
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
        # Show ratios of speed, time and cost only if the speeds differ. Always show ratios of
        # memory.
        has_ratio = differs or number.group == describe.MEMORY
        ratio = None
        if number.value is not None and other and other.value and has_ratio:
            ratio = number.value / other.value
        text = other.text if other else DASH
        rows.append(
            CompareRow(
                group=number.group, name=name, winner=number.text, baseline=text, ratio=ratio
            )
        )

    return tuple(row for row in rows if (row.winner, row.baseline) != (DASH, DASH))


def costs(recipe: Recipe) -> tuple[CostProjection, ...]:
    """Return the run's cost for several numbers of examples, the smallest first.

    The numbers are the user's number of examples and the usual numbers in `by_examples`.
    """
    sizes = {cost.examples: cost for cost in (*recipe.by_examples, recipe.winner.cost)}
    return tuple(sizes[examples] for examples in sorted(sizes))


def fingerprint(recipe: Recipe) -> dict[str, str]:
    """Return {name: text} for each field and each package version in the fingerprint."""
    data: dict[str, Any] = to_data(recipe.fingerprint)
    packages: dict[str, str] = data.pop("packages")
    return {name: value_text(value) for name, value in (data | packages).items()}


def parallel(summary: StudySummary) -> ParallelInfo:
    """Return the data of parallel coordinates: a line for each configuration with a known speed.

    The axes are the knobs that vary, and the speed. If fewer than two knobs vary, there are no
    axes.
    """
    speeds: dict[TrainConfig, float] = {}
    for row in summary.trials:
        if row.tokens_per_second is not None:
            speeds[row.config] = max(row.tokens_per_second, speeds.get(row.config, 0.0))

    values = {
        knob: sorted({getattr(config, knob) for config in speeds}, key=_order) for knob in KNOBS
    }
    values = {knob: several for knob, several in values.items() if len(several) > 1}
    fastest = max(speeds.values(), default=0.0)
    if len(values) < 2 or not fastest:
        return ParallelInfo(axes=(), lines=(), fastest=fastest)

    lines = []
    for config, speed in sorted(speeds.items(), key=lambda item: item[1]):
        heights = [
            several.index(getattr(config, knob)) / (len(several) - 1)
            for knob, several in values.items()
        ]
        share = speed / fastest
        lines.append(
            Line(
                label=config.label(),
                tokens_per_second=speed,
                heights=(*heights, share),
                group=_speed_group(share),
            )
        )

    axes = tuple((knob, tuple(map(str, several))) for knob, several in values.items())
    return ParallelInfo(axes=axes, lines=tuple(lines), fastest=fastest)


def _speed_group(share: float) -> int:
    """Return the speed group for a speed divided by the fastest speed; 0 is the fastest group."""
    if share >= CLOSE:
        return 0
    return 1 if share >= HALF else 2


def measured_speeds(summary: StudySummary) -> dict[TrainConfig, float]:
    """Return the useful tokens/s of each configuration whose whole model was timed."""
    return {
        row.config: row.tokens_per_second
        for row in summary.trials
        if row.outcome is Outcome.OK
        and row.evidence is Evidence.MEASURED
        and row.tokens_per_second is not None
    }


def importances(summary: StudySummary) -> dict[str, Importance]:
    """Return the importance of each knob that varied enough, the most important first.

    The dict is empty if too few configurations were measured.
    """
    speeds = measured_speeds(summary)
    shares = {}
    for knob in KNOBS if len(speeds) >= MIN_MEASURED else ():
        pairs = [(getattr(config, knob), speed) for config, speed in speeds.items()]
        counts = Counter(value for value, _ in pairs).values()
        if sum(count >= MIN_OF_VALUE for count in counts) > 1:
            shares[knob] = _importance(pairs)
    return dict(sorted(shares.items(), key=lambda item: -item[1].share))


def _importance(pairs: list[tuple[Any, float]]) -> Importance:
    """Return the share of the speeds' variance that a knob explains, with a jackknife interval.

    The block jackknife divides the pairs into MIN_MEASURED blocks, and leaves out one block in each
    round.
    """
    share = _explained_share(pairs)
    others = [
        _explained_share(
            [pair for index, pair in enumerate(pairs) if index % MIN_MEASURED != left_out]
        )
        for left_out in range(MIN_MEASURED)
    ]
    error = EIGHTY_PERCENT * math.sqrt((MIN_MEASURED - 1) * statistics.pvariance(others))
    return Importance(share=share, interval=(max(share - error, 0.0), min(share + error, 1.0)))


def _explained_share(pairs: list[tuple[Any, float]]) -> float:
    """Return the share of the numbers' variance that their groups explain, corrected for chance.

    Each pair is (name of the group, number).
    """
    groups: dict[Any, list[float]] = {}
    for value, number in pairs:
        groups.setdefault(value, []).append(number)
    within = sum(len(numbers) * statistics.pvariance(numbers) for numbers in groups.values())
    total = statistics.variance(number for _, number in pairs)
    return max(1 - within / (len(pairs) - len(groups)) / total, 0.0) if total else 0.0


def learning_cells(recipe: Recipe) -> tuple[CellRow, ...]:
    """Return the best candidate of each learning cell: the winner, then others by rising cost."""
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
    """Say what training with other learning settings, such as another rank, would cost.

    Each line describes the best candidate with these settings. The cheapest comes first.
    """
    winner_cut = recipe.workload.truncated(recipe.config.seq_len)
    lines = []
    for row in learning_cells(recipe):
        if row.changes:
            cut = (
                f", {row.cut:.1%} instead of {winner_cut:.1%} of the tokens cut off"
                if row.cut != winner_cut
                else ""
            )
            lines.append(f"{row.changes}: {row.cost}{cut} [{row.candidate.evidence}]")
    return lines


def row_lengths(summary: StudySummary) -> tuple[LengthRow, ...]:
    """Return a table row for each tested seq_len, and for powers of two from SHORTEST_ROW on.

    The powers end with the first one that reaches the longest example or the largest tested
    seq_len, whichever is shorter. The result is empty if all examples have the same length.
    """
    recipe = summary.recipe
    if recipe is None or len(recipe.workload.lengths.counts) == 1:
        return ()

    workload = recipe.workload
    lengths = {row.config.seq_len for row in summary.trials}
    longest = 2 * min(workload.lengths.longest, max(lengths, default=SHORTEST_ROW))
    lengths |= {2**power for power in range(64) if SHORTEST_ROW <= 2**power < longest}

    rows = []
    for seq_len in sorted(lengths):
        unpacked = TrainConfig(seq_len=seq_len, micro_batch_size=recipe.config.micro_batch_size)
        packed = replace(unpacked, packing=True)
        rows.append(
            LengthRow(
                seq_len=seq_len,
                examples_cut=workload.lengths.longer(seq_len),
                tokens_cut=workload.truncated(seq_len),
                fill=workload.fill(unpacked),
                packed_fill=workload.fill(packed),
                examples_a_row=workload.examples_per_row(packed),
                is_winner=seq_len == recipe.config.seq_len,
            )
        )
    return tuple(rows)


def value_text(value: Any) -> str:
    """Format a knob's or a field's value for a table."""
    if value is None:
        return DASH
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _settings(recipe: Recipe, candidate: Candidate) -> dict[str, Any]:
    """Return the knobs of a candidate and its accumulation steps."""
    return candidate.config.as_dict() | {
        "accumulation steps": recipe.workload.run_shape(candidate.config).accumulation
    }


def _labels(values: set[int]) -> dict[int, str]:
    """Return {value: label} for the values in ascending order.

    If there are more than MAX_AXIS values, values between the same two powers of two share a label.
    """
    if len(values) <= MAX_AXIS:
        return {value: f"{value:,}" for value in sorted(values)}
    lows = {value: 2 ** int(math.log2(value)) for value in sorted(values)}
    return {value: f"{low:,} to {2 * low - 1:,}" if low > 1 else "1" for value, low in lows.items()}


def _cell(rows: list[TrialRecord]) -> MapCell:
    """Return the cell of these trials."""
    count = Counter(row.outcome for row in rows)
    fitting = count[Outcome.OK] + count[Outcome.SLOW]
    too_large = count[Outcome.OOM] + count[Outcome.REFUSED]

    if fitting:
        state = "mixed" if too_large else "fits"
    elif too_large:
        state = "oom" if count[Outcome.OOM] else "refused"
    else:
        state = "failed" if rows else "untried"

    speeds = [
        row.tokens_per_second
        for row in rows
        if row.outcome is Outcome.OK and row.tokens_per_second is not None
    ]
    return MapCell(
        state=state,
        num_tried=len({row.config for row in rows}),
        best_tokens_per_second=max(speeds, default=None),
    )


def _order(value: Any) -> tuple[bool, bool, Any]:
    """Return a sort key: None is first, then numbers by size, then words in alphabetical order."""
    return value is not None, not isinstance(value, int), value or 0
