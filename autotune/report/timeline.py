"""The study over wall time: what each second was spent on, and how busy the GPU was in the steps that were timed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from autotune.core.probe_types import Outcome, ProbeResult, Rung
from autotune.core.units import fmt_seconds
from autotune.study.summary import StudySummary

# What a probe spends its seconds on, in the order in which it does; the rest is building and cleaning up.
SPENT = {
    "first steps": ("first_step",),
    "timed steps": ("steady",),
    "evaluation and save": ("evaluate", "save"),
}
SET_UP = "set-up and clean-up"
KINDS = (SET_UP, *SPENT)
MANY = 400  # stretches; with more of them a bar would be narrower than a pixel
SLICES = 100
PAUSE_S = 120.0  # between two probes of one session less than this passes; more is a study that was continued


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of one probe. `start_s` counts from the study's first probe, pauses left out."""

    rung: Rung
    kind: str
    start_s: float
    seconds: float
    label: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """How busy the GPU was in one probe's timed steps: `utilization` is the share of time in which a kernel ran."""

    start_s: float
    seconds: float
    utilization: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """An equal part of a long study: what share of it went to each of KINDS, and how busy the GPU was when timed."""

    start_s: float
    seconds: float
    shares: dict[str, float]
    utilization: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineInfo:
    """`spent` are seconds by KINDS. `utilization` is the mean over the timed seconds of which it is known."""

    spans: tuple[Span, ...]
    busy: tuple[Busy, ...]
    spent: dict[str, float]
    wall_s: float
    pauses: int
    utilization: float | None

    @property
    def probe_s(self) -> float:
        return sum(self.spent.values())

    @property
    def length_s(self) -> float:
        """To the end of the last probe."""
        return max((one.start_s + one.seconds for one in self.spans), default=0.0)

    def share(self, seconds: float) -> float | None:
        """Of the study's wall time, over all its sessions."""
        return min(seconds / self.wall_s, 1.0) if self.wall_s > 0 else None

    def said(self) -> tuple[str, ...]:
        """Where the time went, in sentences; () where no probe ran."""
        if not self.probe_s or not self.wall_s:
            return ()
        most = sorted(((seconds, kind) for kind, seconds in self.spent.items() if seconds), reverse=True)
        parts = ", ".join(f"{fmt_seconds(seconds)} {kind}" for seconds, kind in most)
        told = [
            f"for {self.share(self.probe_s):.0%} of {fmt_seconds(self.wall_s)} a probe had the device: {parts}",
            f"{self.share(self.spent['timed steps']):.0%} were timed steps"
            + (
                ", and how busy the device was in them is not known"
                if self.utilization is None
                else f", in which a kernel ran {self.utilization:.0%} of the time"
            ),
        ]
        if self.pauses:
            told.append(f"{'a pause is' if self.pauses == 1 else f'{self.pauses} pauses are'} left out of the figure")
        return tuple(told)


def timeline(summary: StudySummary) -> TimelineInfo:
    """From the probes whose start is known; what was answered without one takes no time."""
    spans: list[Span] = []
    busy: list[Busy] = []
    spent = dict.fromkeys(KINDS, 0.0)
    pauses, ended, left_out = 0, 0.0, 0.0
    for start, probe in _started(summary.probes):
        total = probe.seconds["total"]
        if start - left_out - ended > PAUSE_S:
            pauses, left_out = pauses + 1, start - ended
        # Starts were once kept in whole seconds, rounded down; probes come one after another.
        at = ended = max(start - left_out, ended)
        for kind, seconds in _stretches(probe):
            spans.append(
                Span(
                    rung=probe.rung,
                    kind=kind,
                    start_s=ended,
                    seconds=seconds,
                    label=probe.config.label(),
                    outcome=probe.outcome,
                )
            )
            read = probe.measurement.telemetry if probe.measurement else None
            if kind == "timed steps" and read and read.utilization is not None:
                busy.append(Busy(start_s=ended, seconds=seconds, utilization=read.utilization))
            spent[kind] += seconds
            ended += seconds
        ended = max(ended, at + total)
    known = sum(one.seconds for one in busy)
    return TimelineInfo(
        spans=tuple(spans),
        busy=tuple(busy),
        spent=spent,
        wall_s=summary.wall_seconds,
        pauses=pauses,
        utilization=sum(one.utilization * one.seconds for one in busy) / known if known else None,
    )


def slices(info: TimelineInfo) -> tuple[Slice, ...]:
    """The same in SLICES equal parts, where it has too many stretches to be drawn one by one; else ()."""
    if len(info.spans) <= MANY:
        return ()
    width = info.length_s / SLICES
    spent = [dict.fromkeys(KINDS, 0.0) for _ in range(SLICES)]
    busy = [[0.0, 0.0] for _ in range(SLICES)]  # seconds in which a kernel ran, of seconds
    for span in info.spans:
        for place, seconds in _parts(span.start_s, span.seconds, width):
            spent[place][span.kind] += seconds
    for one in info.busy:
        for place, seconds in _parts(one.start_s, one.seconds, width):
            busy[place][0] += one.utilization * seconds
            busy[place][1] += seconds
    return tuple(
        Slice(
            start_s=place * width,
            seconds=width,
            shares={kind: seconds / width for kind, seconds in kinds.items()},
            utilization=ran / known if known else None,
        )
        for place, (kinds, (ran, known)) in enumerate(zip(spent, busy, strict=True))
    )


def _parts(start_s: float, seconds: float, width: float) -> Iterator[tuple[int, float]]:
    """(slice, seconds in it)"""
    end_s = start_s + seconds
    for place in range(int(start_s / width), min(int(end_s / width) + 1, SLICES)):
        yield place, max(min(end_s, (place + 1) * width) - max(start_s, place * width), 0.0)


def _started(probes: Iterable[ProbeResult]) -> list[tuple[float, ProbeResult]]:
    """Seconds since the first, of those that took time at a known one."""
    found = [
        (datetime.fromisoformat(probe.started_at).timestamp(), probe)
        for probe in probes
        if probe.started_at and probe.seconds.get("total")
    ]
    found.sort(key=lambda one: one[0])
    return [(at - found[0][0], probe) for at, probe in found]


def _stretches(probe: ProbeResult) -> list[tuple[str, float]]:
    """(kind, seconds) in order; what none of the clocks saw is set-up."""
    took = probe.seconds
    known = [(kind, sum(took.get(name, 0.0) for name in names)) for kind, names in SPENT.items()]
    cleanup = took.get("cleanup", 0.0)
    load = max(took["total"] - cleanup - sum(seconds for _, seconds in known), 0.0)
    return [(kind, seconds) for kind, seconds in ((SET_UP, load), *known, (SET_UP, cleanup)) if seconds > 0]
