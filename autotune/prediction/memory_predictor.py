"""The memory gate: refuses, before anything is launched, what is known not to fit.

Frontier: a configuration that needs at least as much memory as one that ran out, in every knob, runs out too.
MemoryModel: what a configuration will need, learned from what others needed.
"""

import math
import statistics
from dataclasses import dataclass
from functools import cache

from autotune.core.knobs import KNOBS, affecting
from autotune.core.probe_types import Measurement, OomDetail, Phase
from autotune.core.train_config import TrainConfig

LINE_DOUBT = 0.02  # of what a line adds beyond its points; assumed: `benchmarks/oom_gate.py` is to hold it to account

HEAD_CHUNK = 1024  # tokens, from which on a loss in chunks takes no more for its logits (`chunked_loss.CHUNK_TOKENS`)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOom:
    """A configuration that ran out of memory, in which trial (None outside the search), and how.

    `micro_steps` above 1 says that gradients of one micro batch were alive during the next.
    """

    trial: int | None
    config: TrainConfig
    micro_steps: int
    detail: OomDetail


class Frontier:
    """Known OOMs on one device under one limit."""

    def __init__(self) -> None:
        self._known: list[KnownOom] = []

    def add(self, known: KnownOom) -> None:
        self._known.append(known)

    def refuses(self, config: TrainConfig, micro_steps: int) -> KnownOom | None:
        """The known OOM that this configuration is at least as large as in every memory knob, if there is one."""
        return next(
            (
                known
                for known in self._known
                if micro_steps >= min(known.micro_steps, 2) and needs_at_least(config, known.config)
            ),
            None,
        )


def needs_at_least(config: TrainConfig, other: TrainConfig) -> bool:
    """Whether `config` surely needs as much memory as `other`. False where they cannot be compared."""
    return all(knob.surely_needs_at_least(getattr(config, name), getattr(other, name)) for name, knob in KNOBS.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What one configuration needs at full depth, measured or extrapolated."""

    config: TrainConfig
    measurement: Measurement

    @property
    def way(self) -> tuple[object, ...]:
        return _way(self.config, self.measurement.micro_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Reserved memory that a configuration will need at full depth: between `low_gib` and `high_gib`, likely `gib`.

    `phase` is where the peak is likely to be, `basis` the number of configurations it was learned from. `bounded` is
    whether the upper bound is one: not where steps of two micro batches had to do, or paged state is not known.
    """

    low_gib: float
    gib: float
    high_gib: float
    limit_gib: float
    phase: Phase
    basis: int
    bounded: bool = True

    @property
    def margin(self) -> float:
        """Signed: likely need / limit - 1."""
        return self.gib / self.limit_gib - 1.0


class MemoryPredictor:
    """Predicts peaks from those of other configurations of one model on one device.

    The peak of each segment of a step is what always stays (weights, adapters, gradients, optimizer state) plus what
    comes and goes. The first is known term by term, since each follows from the rank, the quantisation or the optimizer
    alone. The second is affine in the tokens of a micro batch for each way of computing (`_way`), neither part of it
    below 0: from one number of tokens it is bounded on both sides, from two on it is a line.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], _Known] = {}

    def learn(self, config: TrainConfig, measurement: Measurement) -> None:
        """Of the whole model, measured or extrapolated; what was measured outranks."""
        key = (config.digest, measurement.micro_steps)
        if key not in self._known or not measurement.time_error:
            self._known[key] = _Known(config=config, measurement=measurement)

    def predict(self, config: TrainConfig, micro_steps: int, offered_gib: float) -> MemoryEstimate | None:
        """None where nothing is known that this could be told from. `offered_gib` is the device's, less headroom."""
        alike = self._alike(config, micro_steps)
        statics = self._statics(config, micro_steps)
        if not alike or statics is None:
            return None
        names = set.intersection(*(set(_segments(one.measurement)) for one in alike))
        if not names:
            return None
        low = gib = high = 0.0
        largest = Phase.FORWARD.value
        for name in names:
            moving = [
                _segments(one.measurement)[name] - static_gib(one.measurement, one.measurement.micro_steps)
                for one in alike
            ]
            points = [(one.config.tokens, max(moved, -statics)) for one, moved in zip(alike, moving, strict=True)]
            bounds = _at(points, config.tokens)
            if bounds[1] > gib:
                largest = name
            low, gib, high = max(low, bounds[0]), max(gib, bounds[1]), max(high, bounds[2])
        beyond = [one.measurement.peak_reserved_gib / one.measurement.peak_allocated_gib for one in alike]
        same_state = [one for one in alike if one.config.optimizer == config.optimizer]
        paged = max(
            (one.measurement.managed_gib * _rank(config) / _rank(one.config) for one in same_state), default=0.0
        )
        contexts = [one.measurement.context_gib for one in alike if one.measurement.context_gib is not None]
        return MemoryEstimate(
            low_gib=(statics + low) * min(beyond),
            gib=(statics + gib) * statistics.median(beyond),
            high_gib=(statics + high) * max(beyond),
            limit_gib=offered_gib - min(contexts, default=0.0) - paged,
            phase=Phase.BACKWARD if largest.startswith(Phase.BACKWARD) else Phase(largest),
            basis=len(alike),
            bounded=alike[0].way == _way(config, micro_steps)
            and (bool(same_state) or not config.optimizer.startswith("paged_")),
        )

    def _alike(self, config: TrainConfig, micro_steps: int) -> list[_Known]:
        """Those that compute in the same way; for a single micro batch a step else those of two, as a lower bound.

        They differ by gradients that are there from the start, or come as the backward pass goes: few, with adapters.
        """
        by_steps = {steps: [one for one in self._known.values() if one.way == _way(config, steps)] for steps in (1, 2)}
        same = by_steps[min(micro_steps, 2)]
        return same or (by_steps[2] if config.method == "lora" else [])

    def _statics(self, config: TrainConfig, micro_steps: int) -> float | None:
        """What stays in memory through the steps of a configuration; None where a part of it is unknown."""
        bases = [one for one in self._known.values() if _base(one.config) == _base(config)]
        states = [one for one in bases if one.config.optimizer == config.optimizer]
        if not states:
            return None
        # Adapters, and with them gradients and state, are proportional to the rank.
        nearest = min(states, key=lambda one: abs(_rank(one.config) - _rank(config)))
        measured, scale = nearest.measurement, _rank(config) / _rank(nearest.config)
        return measured.model_gib + scale * (static_gib(measured, micro_steps) - measured.model_gib)


def static_gib(measurement: Measurement, micro_steps: int) -> float:
    """Weights, adapters and optimizer state, and gradients where those of one micro batch wait for the next."""
    held = measurement.model_gib + measurement.adapters_gib + measurement.optimizer_gib
    return held + (measurement.gradients_gib if micro_steps > 1 else 0.0)


def _way(config: TrainConfig, micro_steps: int) -> tuple[object, ...]:
    """How a step computes: configurations alike in this keep the same bytes a token."""
    # Only kernels that never hold the scores of a whole row against itself are linear in its length; nor must they need
    # a mask of that form, as packed rows do.
    length = 0 if config.attention != "eager" and not config.packing else config.seq_len
    return (
        *(getattr(config, name) for name in _compute_knobs()),
        config.optimizer if config.method == "full" else None,
        min(micro_steps, 2),
        length,
        min(config.tokens, HEAD_CHUNK) if config.loss == "chunked" else 0,
    )


@cache
def _compute_knobs() -> tuple[str, ...]:
    """The knobs that decide how many bytes a token takes: all with an effect on memory but sizes and the optimizer."""
    return tuple(
        name for name in affecting("memory") if KNOBS[name].form != "integer" and not KNOBS[name].surely_leanest_first
    )


def _base(config: TrainConfig) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in affecting("weights"))


def _rank(config: TrainConfig) -> int:
    return config.lora_rank or 1


def _segments(measurement: Measurement) -> dict[str, float]:
    return measurement.segment_peak_gib or {phase.value: peak for phase, peak in measurement.phase_peak_gib.items()}


def _at(points: list[tuple[int, float]], tokens: int) -> tuple[float, float, float]:
    """(low, likely, high) of what comes and goes at `tokens`, from (tokens, GiB) of others.

    The line has no negative part. Between and beyond its points it is allowed the points' own distance from it, and a
    part of what it adds beyond them.
    """
    counts = sorted({count for count, _ in points})
    nearest = min(counts, key=lambda count: abs(math.log(count / tokens)))
    there = [value for count, value in points if count == nearest]
    if len(counts) == 1 or tokens == nearest:
        ends = (min(there), min(there) * tokens / nearest, max(there), max(there) * tokens / nearest)
        likely = statistics.median(there) * (tokens / nearest if min(there) > 0 else 1.0)
        return min(ends), likely, max(ends)
    line = statistics.linear_regression([count for count, _ in points], [value for _, value in points])
    likely = line.intercept + line.slope * tokens
    apart = max(abs(value - line.intercept - line.slope * count) for count, value in points)
    outside = max(counts[0] - tokens, tokens - counts[-1], 0)
    doubt = apart + LINE_DOUBT * abs(line.slope) * outside
    return likely - doubt, likely, likely + doubt
