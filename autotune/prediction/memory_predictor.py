"""Refuses configurations that cannot fit into memory, before they are probed (the memory gate).

`refused_by` compares a new configuration with each configuration that ran out of memory. If every
knob of that configuration has a value that surely needs no more memory than the new configuration's
value, the new configuration is refused. `MemoryPredictor` predicts the memory of a configuration
from other configurations' measurements.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from autotune.core.knobs import KNOBS, knobs_affecting
from autotune.core.probe_types import Measurement, OomDetail, Phase
from autotune.core.train_config import TrainConfig
from autotune.trainer.settings import chunk_tokens

# A straight line predicts memory outside its measured points. The memory that the line adds after
# the nearest measured point is assumed to have this relative error. `benchmarks/memory.py gate`
# checks this assumption.
LINE_DOUBT = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOom:
    """A configuration that ran out of memory, with its details and its trial.

    `trial` is None for a configuration outside the search.

    If `micro_steps` is above 1, the gradients of one micro batch were alive during the next micro
    batch.
    """

    trial: int | None
    config: TrainConfig
    micro_steps: int
    detail: OomDetail


def refused_by(
    known_ooms: Iterable[KnownOom], config: TrainConfig, micro_steps: int
) -> KnownOom | None:
    """Return the first known OOM whose configuration surely needs no more memory than `config`."""
    for known in known_ooms:
        if micro_steps >= min(known.micro_steps, 2) and needs_at_least(config, known.config):
            return known
    return None


def needs_at_least(config: TrainConfig, other: TrainConfig) -> bool:
    """Return whether `config` surely needs at least as much memory as `other`."""
    return all(
        knob.surely_needs_at_least(getattr(config, name), getattr(other, name))
        for name, knob in KNOBS.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A configuration and its memory with all layers of the model, measured or extrapolated."""

    config: TrainConfig
    measurement: Measurement

    @property
    def signature(self) -> tuple[object, ...]:
        """A key for the temporary memory of this configuration.

        For all configurations with the same key, the temporary memory is the same affine function
        of the number of tokens.
        """
        return _compute_signature(self.config, self.measurement.micro_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The reserved memory that a configuration needs with all layers of the model.

    The memory is between `low_gib` and `high_gib`, and most likely `gib`. The peak is most likely
    in `phase`. `basis` is the number of other configurations whose measurements the estimate uses.
    `high_gib` is an upper bound only if `bounded` is true. There is no upper bound in two cases.
    First, a step of this configuration has one micro batch, but the steps of the other
    configurations have two. Second, this configuration's optimizer is paged, and no other
    configuration has the same optimizer.
    """

    low_gib: float
    gib: float
    high_gib: float
    limit_gib: float
    phase: Phase
    basis: int
    bounded: bool = True


class MemoryPredictor:
    """Predicts the peak memory of a configuration from measurements of other configurations.

    All measurements are of the same model on the same device. The peak of each segment of a step is
    static memory plus temporary memory. Static memory is weights, adapters, gradients and optimizer
    state. Static memory is taken from a known configuration with the same base weights and
    optimizer, and the parts that belong to adapters are scaled to the LoRA rank. For configurations
    with the same `_compute_signature`, temporary memory is affine in the tokens of a micro batch: a
    straight line whose two coefficients are not negative. So a measurement at one number of tokens
    gives an upper and a lower bound at any other number of tokens. Measurements at two numbers of
    tokens give the line.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Known] = {}

    def learn(self, config: TrainConfig, measurement: Measurement) -> None:
        """Add a measurement of the whole model.

        An extrapolated measurement never replaces a real measurement of the same configuration.
        """
        key = (config.digest, measurement.micro_steps)
        if key not in self._known or not measurement.time_error:
            self._known[key] = Known(config=config, measurement=measurement)

    def predict(
        self, config: TrainConfig, micro_steps: int, available_gib: float
    ) -> MemoryEstimate | None:
        """Return the estimate for a configuration, or None if no measurement allows one.

        `available_gib` is the memory that the run may use, including its CUDA context. The headroom
        is already subtracted.
        """
        similar = self._similar(config, micro_steps)
        statics = self._statics(config, micro_steps)
        if not similar or statics is None:
            return None

        names = set.intersection(*(set(_segments(known.measurement)) for known in similar))
        if not names:
            return None

        # The largest temporary memory of any part of a step: its lower bound, likely value and
        # upper bound
        low = gib = high = 0.0
        largest = Phase.FORWARD.value
        for name in names:
            points = []
            for known in similar:
                static = static_gib(known.measurement, known.measurement.micro_steps)
                temporary = _segments(known.measurement)[name] - static
                points.append((known.config.tokens, max(temporary, -statics)))
            bounds = _temporary_gib(points, config.tokens)
            if bounds[1] > gib:
                largest = name
            low = max(low, bounds[0])
            gib = max(gib, bounds[1])
            high = max(high, bounds[2])

        reserved_ratios = [
            known.measurement.peak_reserved_gib / known.measurement.peak_allocated_gib
            for known in similar
        ]
        same_state = [known for known in similar if known.config.optimizer == config.optimizer]
        paged_gib = max(
            (
                known.measurement.managed_gib * _rank(config) / _rank(known.config)
                for known in same_state
            ),
            default=0.0,
        )
        contexts = [
            known.measurement.context_gib
            for known in similar
            if known.measurement.context_gib is not None
        ]

        # On several GPUs, the reserved memory includes free blocks in the pools of side streams.
        # The lower bound leaves out these blocks.
        least_ratio = min(reserved_ratios) if config.num_gpus == 1 else 1.0
        return MemoryEstimate(
            low_gib=(statics + low) * least_ratio,
            gib=(statics + gib) * statistics.median(reserved_ratios),
            high_gib=(statics + high) * max(reserved_ratios),
            limit_gib=available_gib - min(contexts, default=0.0) - paged_gib,
            phase=Phase(largest.partition("_")[0]),
            basis=len(similar),
            bounded=similar[0].signature == _compute_signature(config, micro_steps)
            and (bool(same_state) or not config.optimizer.startswith("paged_")),
        )

    def nearest(self, config: TrainConfig, micro_steps: int) -> Known | None:
        """Return the configuration among `_similar` with the closest number of tokens."""

        def distance(known: Known) -> float:
            return abs(math.log(known.config.tokens / config.tokens))

        return min(self._similar(config, micro_steps), key=distance, default=None)

    def _similar(self, config: TrainConfig, micro_steps: int) -> list[Known]:
        """Return the known configurations with the same `_compute_signature` as `config`.

        If `micro_steps` is 1, and no known configuration has one micro batch per step, LoRA
        configurations with two micro batches are returned. The temporary memory of these
        configurations is a lower bound: during the whole second micro batch, all gradients exist,
        so they are part of the static memory. With one micro batch, the gradients appear only
        during the backward pass. The gradients of adapters are small, so the bound is close.
        """

        def with_steps(steps: int) -> list[Known]:
            signature = _compute_signature(config, steps)
            return [known for known in self._known.values() if known.signature == signature]

        same = with_steps(min(micro_steps, 2))
        if same or config.method != "lora":
            return same
        return with_steps(2)

    def _statics(self, config: TrainConfig, micro_steps: int) -> float | None:
        """Return a configuration's static memory in GiB, or None if a part of it is unknown."""
        bases = [known for known in self._known.values() if _base(known.config) == _base(config)]
        states = [known for known in bases if known.config.optimizer == config.optimizer]
        if not states:
            return None
        # Adapters, their gradients and their optimizer state are proportional to the rank.
        nearest = min(states, key=lambda known: abs(_rank(known.config) - _rank(config)))
        measured = nearest.measurement
        scale = _rank(config) / _rank(nearest.config)
        return measured.model_gib + scale * (static_gib(measured, micro_steps) - measured.model_gib)


def static_gib(measurement: Measurement, micro_steps: int) -> float:
    """Return weights, adapters, optimizer state, and gradients of earlier micro batches, in GiB."""
    static = measurement.model_gib + measurement.adapters_gib + measurement.optimizer_gib
    return static + (measurement.gradients_gib if micro_steps > 1 else 0.0)


def _compute_signature(config: TrainConfig, micro_steps: int) -> tuple[object, ...]:
    """Return a key that is the same for configurations with the same bytes of memory per token."""
    # Memory depends on the number of tokens, not on the length of a row, unless attention scores or
    # a mask are stored for each pair of tokens.
    length = 0 if config.attention != "eager" and not config.has_mask else config.seq_len
    return (
        *(getattr(config, name) for name in _compute_knobs()),
        config.has_mask,
        config.optimizer if config.method == "full" else None,
        min(micro_steps, 2),
        length,
        chunk_tokens(config.tokens) if config.loss == "chunked" else 0,
    )


@cache
def _compute_knobs() -> tuple[str, ...]:
    """Return the knobs that determine the bytes needed for each token.

    The result has all knobs that affect memory, except the optimizer and the sizes of the micro
    batch.
    """
    return tuple(
        name
        for name in knobs_affecting("memory")
        if KNOBS[name].form != "integer" and not KNOBS[name].surely_leanest_first
    )


def _base(config: TrainConfig) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in knobs_affecting("weights"))


def _rank(config: TrainConfig) -> int:
    return config.lora_rank or 1


def _segments(measurement: Measurement) -> dict[str, float]:
    return measurement.segment_peak_gib or {
        phase.value: peak for phase, peak in measurement.phase_peak_gib.items()
    }


def _temporary_gib(points: list[tuple[int, float]], tokens: int) -> tuple[float, float, float]:
    """Return the (low, likely, high) temporary memory at `tokens`, from other configurations.

    `points` has a pair (tokens, GiB) for each of the other configurations. The error of the line is
    the largest distance of a point from the line. If `tokens` is outside the range of the points,
    the error grows by LINE_DOUBT times the line's change from the nearest point to `tokens`.
    """
    counts = sorted({count for count, _ in points})
    nearest = min(counts, key=lambda count: abs(math.log(count / tokens)))
    at_nearest = [value for count, value in points if count == nearest]

    if len(counts) == 1 or tokens == nearest:
        ends = (
            min(at_nearest),
            min(at_nearest) * tokens / nearest,
            max(at_nearest),
            max(at_nearest) * tokens / nearest,
        )
        likely = statistics.median(at_nearest) * (tokens / nearest if min(at_nearest) > 0 else 1.0)

        return min(ends), likely, max(ends)
    line = statistics.linear_regression(
        [count for count, _ in points], [value for _, value in points]
    )
    likely = line.intercept + line.slope * tokens
    distance = max(abs(value - line.intercept - line.slope * count) for count, value in points)
    outside = max(counts[0] - tokens, tokens - counts[-1], 0)
    error = distance + LINE_DOUBT * abs(line.slope) * outside
    return likely - error, likely, likely + error
