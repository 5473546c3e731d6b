"""Parallel coordinates: what the fast trials have in common, knob by knob."""

from dataclasses import dataclass
from typing import Any

from autotune.core.train_config import KNOBS, TrainConfig
from autotune.study.summary import StudySummary

CLOSE, HALF = 0.95, 0.5  # of the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One configuration: its place on each axis, 0 to 1, the last of which is its speed; `group` is 0 for the best."""

    label: str
    tokens_per_second: float
    places: tuple[float, ...]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelInfo:
    """`axes` are the knobs that were varied, with their values from bottom to top; `fastest` is the speed axis' end."""

    axes: tuple[tuple[str, tuple[str, ...]], ...]
    lines: tuple[Line, ...]
    fastest: float


def parallel(summary: StudySummary) -> ParallelInfo:
    """The configurations whose speed is known, each once; no axes where fewer than two knobs were varied."""
    speeds: dict[TrainConfig, float] = {}
    for row in summary.trials:
        if row.tokens_per_second is not None:
            speeds[row.config] = max(row.tokens_per_second, speeds.get(row.config, 0.0))
    values = {knob: _ordered({getattr(config, knob) for config in speeds}) for knob in KNOBS}
    values = {knob: found for knob, found in values.items() if len(found) > 1}
    fastest = max(speeds.values(), default=0.0)
    if len(values) < 2 or not fastest:
        return ParallelInfo(axes=(), lines=(), fastest=fastest)
    lines = []
    for config, speed in sorted(speeds.items(), key=lambda item: item[1]):
        places = [found.index(getattr(config, knob)) / (len(found) - 1) for knob, found in values.items()]
        share = speed / fastest
        group = 0 if share >= CLOSE else 1 if share >= HALF else 2
        lines.append(
            Line(label=config.label(), tokens_per_second=speed, places=(*places, share), group=group),
        )
    axes = tuple((knob, tuple(map(str, found))) for knob, found in values.items())
    return ParallelInfo(axes=axes, lines=tuple(lines), fastest=fastest)


def _ordered(values: set[Any]) -> list[Any]:
    """Numbers by size, words by the alphabet, None first."""
    return sorted(values, key=lambda one: (one is not None, not isinstance(one, int), one if one is not None else 0))
