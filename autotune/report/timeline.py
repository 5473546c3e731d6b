"""Computes how a study used its wall time, and the GPU's utilization in timed steps."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from autotune.core.probe_types import Outcome, ProbeResult, Rung
from autotune.core.units import fmt_seconds
from autotune.study.summary import StudySummary

# CLOCKS maps each stage of a probe to keys of `ProbeResult.seconds`, whose sum is the time of the
# stage. All other time is SET_UP.
TIMED = "timed steps"
CLOCKS = {
    "first steps": ("first_step",),
    TIMED: ("steady",),
    "evaluation and save": ("evaluate", "save"),
}
SET_UP = "set-up and clean-up"
KINDS = (SET_UP, *CLOCKS)
MAX_SPANS = 200  # with more spans, each would be narrower than three pixels
NUM_SLICES = 100
PAUSE_S = 120.0  # a longer time between two probes means that the study was stopped and continued


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time in one probe.

    `start_s` is the number of seconds since the start of the study's first probe, without pauses.
    `utilization` is the share of the timed steps' duration in which a kernel ran, or None if it is
    unknown.
    """

    rung: Rung
    kind: str
    start_s: float
    seconds: float
    label: str
    outcome: Outcome
    utilization: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One of NUM_SLICES equally long parts of a long study.

    `shares` maps each kind in KINDS to its share of the slice's time. `utilization` is the GPU's
    utilization in the slice's timed steps.
    """

    start_s: float
    seconds: float
    shares: dict[str, float]
    utilization: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineInfo:
    """The spans of all probes in order. `wall_s` is the study's wall time over all sessions."""

    spans: tuple[Span, ...]
    wall_s: float
    pauses: int

    @property
    def spent(self) -> dict[str, float]:
        """The total seconds of the spans of each kind in KINDS."""
        seconds = dict.fromkeys(KINDS, 0.0)
        for span in self.spans:
            seconds[span.kind] += span.seconds
        return seconds

    @property
    def probe_s(self) -> float:
        """The total seconds of all probes."""
        return sum(self.spent.values())

    @property
    def length_s(self) -> float:
        """The seconds until the end of the last probe."""
        return max((span.start_s + span.seconds for span in self.spans), default=0.0)

    @property
    def utilization(self) -> float | None:
        """The mean utilization over the timed seconds for which it is known, or None."""
        known = [
            (span.utilization, span.seconds) for span in self.spans if span.utilization is not None
        ]
        shares, seconds = zip(*known, strict=True) if known else ((), ())
        return statistics.fmean(shares, weights=seconds) if known else None

    def sentences(self) -> tuple[str, ...]:
        """Describe how the study used its time. The result is empty if no probe ran."""
        spent = self.spent
        if not self.probe_s or not self.wall_s:
            return ()

        longest_first = sorted(
            ((seconds, kind) for kind, seconds in spent.items() if seconds), reverse=True
        )
        parts = ", ".join(f"{fmt_seconds(seconds)} {kind}" for seconds, kind in longest_first)
        busy = "the GPU's utilization in them is unknown"
        if self.utilization is not None:
            busy = f"a kernel ran in {self.utilization:.0%} of that time"

        probing = f"{min(self.probe_s / self.wall_s, 1.0):.0%} of {fmt_seconds(self.wall_s)}"
        sentences = (
            f"Probes ran for {probing}: {parts}.",
            f"Timed steps took {min(spent[TIMED] / self.wall_s, 1.0):.0%}; {busy}.",
        )
        pauses = "one pause" if self.pauses == 1 else f"{self.pauses} pauses"
        return (*sentences, f"The figure leaves out {pauses}.") if self.pauses else sentences


def timeline(summary: StudySummary) -> TimelineInfo:
    """Return the timeline of the probes with a known start.

    A result that was stored earlier, and so needed no probe, takes no time.
    """
    spans: list[Span] = []
    pauses = 0
    end_s = 0.0
    paused_s = 0.0

    for started_s, probe in _starts(summary.probes):
        if started_s - paused_s - end_s > PAUSE_S:
            pauses += 1
            paused_s = started_s - end_s

        # Older versions rounded starts down to whole seconds. Probes run one after another, so
        # correct a start that is earlier than the end of the previous probe.
        start_s = max(started_s - paused_s, end_s)
        end_s = start_s
        for kind, seconds in _stretches(probe):
            telemetry = probe.measurement.telemetry if probe.measurement and kind == TIMED else None
            spans.append(
                Span(
                    rung=probe.rung,
                    kind=kind,
                    start_s=end_s,
                    seconds=seconds,
                    label=probe.config.label(),
                    outcome=probe.outcome,
                    utilization=telemetry.utilization if telemetry else None,
                )
            )
            end_s += seconds
        end_s = max(end_s, start_s + probe.seconds["total"])

    return TimelineInfo(spans=tuple(spans), wall_s=summary.wall_seconds, pauses=pauses)


def slices(info: TimelineInfo) -> tuple[Slice, ...]:
    """Divide a timeline into NUM_SLICES equal parts if it has too many spans to draw them all.

    The result is empty for a timeline with up to MAX_SPANS spans.
    """
    if len(info.spans) <= MAX_SPANS:
        return ()

    width_s = info.length_s / NUM_SLICES
    spent = [dict.fromkeys(KINDS, 0.0) for _ in range(NUM_SLICES)]
    kernel_s = [0.0] * NUM_SLICES
    known_s = [0.0] * NUM_SLICES
    for span in info.spans:
        for index, seconds in _overlaps(span, width_s):
            spent[index][span.kind] += seconds
            if span.utilization is not None:
                kernel_s[index] += span.utilization * seconds
                known_s[index] += seconds

    return tuple(
        Slice(
            start_s=index * width_s,
            seconds=width_s,
            shares={kind: seconds / width_s for kind, seconds in spent[index].items()},
            utilization=kernel_s[index] / known_s[index] if known_s[index] else None,
        )
        for index in range(NUM_SLICES)
    )


def _overlaps(span: Span, width_s: float) -> Iterator[tuple[int, float]]:
    """Yield the index of each slice that the span overlaps, and the span's seconds in the slice."""
    end_s = span.start_s + span.seconds
    for index in range(int(span.start_s / width_s), min(int(end_s / width_s) + 1, NUM_SLICES)):
        yield (
            index,
            max(min(end_s, (index + 1) * width_s) - max(span.start_s, index * width_s), 0.0),
        )


def _starts(probes: Iterable[ProbeResult]) -> list[tuple[float, ProbeResult]]:
    """Return each probe with its start in seconds since the first probe's start, in order.

    Probes without a known start or without a duration are left out.
    """
    starts = [
        (datetime.fromisoformat(probe.started_at).timestamp(), probe)
        for probe in probes
        if probe.started_at and probe.seconds.get("total")
    ]
    starts.sort(key=lambda pair: pair[0])
    return [(start - starts[0][0], probe) for start, probe in starts]


def _stretches(probe: ProbeResult) -> list[tuple[str, float]]:
    """Divide a probe's time into stretches, and return (kind, seconds) for each, in order.

    Seconds that belong to no stage of the probe count as set-up.
    """
    clocks = probe.seconds
    stages = [
        (kind, sum(clocks.get(name, 0.0) for name in names)) for kind, names in CLOCKS.items()
    ]
    cleanup = clocks.get("cleanup", 0.0)
    load = max(clocks["total"] - cleanup - sum(seconds for _, seconds in stages), 0.0)
    return [
        (kind, seconds)
        for kind, seconds in ((SET_UP, load), *stages, (SET_UP, cleanup))
        if seconds > 0
    ]
