"""The memory gate: refuses configurations that are known not to fit before a probe is launched.

`refused_by` refuses every configuration that needs at least as much memory, in every knob, as one that ran out.
`MemoryPredictor` predicts the memory of a configuration from measurements of others.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from autotune.core.knobs import KNOBS, affecting
from autotune.core.probe_types import Measurement, OomDetail, Phase
from autotune.core.train_config import TrainConfig

LINE_DOUBT = 0.02  # relative error of what a line adds beyond its points; assumed, checked by `benchmarks/memory.py gate`

HEAD_CHUNK = (
    1024  # tokens whose logits a chunked loss holds; equals `CHUNK_TOKENS` of trainer/chunked_loss
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOom:
    """A configuration that ran out of memory, its trial (None outside the search), and the details.

    With `micro_steps` above 1, gradients of one micro batch were alive during the next.
    """

    trial: int | None
    config: TrainConfig
    micro_steps: int
    detail: OomDetail


def refused_by(
    known_ooms: Iterable[KnownOom], config: TrainConfig, micro_steps: int
) -> KnownOom | None:
    """The first known OOM that `config` needs at least the memory of, in every knob; None if there is none."""
    for known in known_ooms:
        if micro_steps >= min(known.micro_steps, 2) and needs_at_least(config, known.config):
            return known
    return None


def needs_at_least(config: TrainConfig, other: TrainConfig) -> bool:
    """Whether `config` surely needs as much memory as `other`. False where they cannot be compared."""
    return all(
        knob.surely_needs_at_least(getattr(config, name), getattr(other, name))
        for name, knob in KNOBS.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The memory of one configuration at full depth, measured or extrapolated."""

    config: TrainConfig
    measurement: Measurement

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be equal for temporary memory to be linear in the tokens."""
        return _compute_signature(self.config, self.measurement.micro_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The reserved memory of a configuration at full depth: between `low_gib` and `high_gib`, likely `gib`.

    `phase` is the likely place of the peak, `basis` the number of configurations that the estimate rests on. `high_gib`
    is no upper bound unless `bounded`: the basis may be steps of two micro batches, or lack the paged optimizer state.
    """

    low_gib: float
    gib: float
    high_gib: float
    limit_gib: float
    phase: Phase
    basis: int
    bounded: bool = True


class MemoryPredictor:
    """Predicts the peak memory of configurations from that of others, for one model on one device.

    The peak of each segment of a step is static memory (weights, adapters, gradients, optimizer state) plus temporary
    memory. Static memory is known term by term, since each term follows from the rank, the quantisation or the
    optimizer alone. Temporary memory is affine in the tokens of a micro batch among configurations with the same
    `_compute_signature`, and neither of its two coefficients is negative: measurements at one number of tokens bound it
    on both sides, and two or more give a line.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Known] = {}

    def learn(self, config: TrainConfig, measurement: Measurement) -> None:
        """Add a measurement of the whole model. An extrapolated one never replaces one that was measured."""
        key = (config.digest, measurement.micro_steps)
        if key not in self._known or not measurement.time_error:
            self._known[key] = Known(config=config, measurement=measurement)

    def predict(
        self, config: TrainConfig, micro_steps: int, available_gib: float
    ) -> MemoryEstimate | None:
        """The estimate for a configuration; None where no measurement allows one.

        `available_gib` is the memory that the run may use, CUDA context included, less the reserve.
        """
        similar = self._similar(config, micro_steps)
        statics = self._statics(config, micro_steps)
        if not similar or statics is None:
            return None
        names = set.intersection(*(set(_segments(known.measurement)) for known in similar))
        if not names:
            return None
        low = gib = high = 0.0
        largest = Phase.FORWARD.value
        for name in names:
            points = []
            for known in similar:
                static = static_gib(known.measurement, known.measurement.micro_steps)
                temporary = _segments(known.measurement)[name] - static
                points.append((known.config.tokens, max(temporary, -statics)))
            bounds = _at(points, config.tokens)
            if bounds[1] > gib:
                largest = name
            low, gib, high = max(low, bounds[0]), max(gib, bounds[1]), max(high, bounds[2])
        reserved = [
            known.measurement.peak_reserved_gib / known.measurement.peak_allocated_gib
            for known in similar
        ]
        same_state = [known for known in similar if known.config.optimizer == config.optimizer]
        paged = max(
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
        return MemoryEstimate(
            low_gib=(statics + low)
            * (min(reserved) if config.num_gpus == 1 else 1.0),  # free blocks of other streams
            gib=(statics + gib) * statistics.median(reserved),
            high_gib=(statics + high) * max(reserved),
            limit_gib=available_gib - min(contexts, default=0.0) - paged,
            phase=Phase(largest.partition("_")[0]),
            basis=len(similar),
            bounded=similar[0].signature == _compute_signature(config, micro_steps)
            and (bool(same_state) or not config.optimizer.startswith("paged_")),
        )

    def nearest(self, config: TrainConfig, micro_steps: int) -> Known | None:
        """Of the configurations with the same compute signature, the one with the most similar micro batch."""

        def distance(known: Known) -> float:
            return abs(math.log(known.config.tokens / config.tokens))

        return min(self._similar(config, micro_steps), key=distance, default=None)

    def _similar(self, config: TrainConfig, micro_steps: int) -> list[Known]:
        """The known configurations with the same compute signature.

        Without one, a single micro batch in a step has those with two as a lower bound. They differ by the gradients
        that exist from the start or appear during the backward pass: with adapters, little.
        """

        def with_steps(steps: int) -> list[Known]:
            signature = _compute_signature(config, steps)
            return [known for known in self._known.values() if known.signature == signature]

        same = with_steps(min(micro_steps, 2))
        if same or config.method != "lora":
            return same
        return with_steps(2)

    def _statics(self, config: TrainConfig, micro_steps: int) -> float | None:
        """Static memory of a configuration in GiB; None where a part of it is unknown."""
        bases = [known for known in self._known.values() if _base(known.config) == _base(config)]
        states = [known for known in bases if known.config.optimizer == config.optimizer]
        if not states:
            return None
        # Adapters, their gradients and their state are proportional to the rank.
        nearest = min(states, key=lambda known: abs(_rank(known.config) - _rank(config)))
        measured, scale = nearest.measurement, _rank(config) / _rank(nearest.config)
        return measured.model_gib + scale * (static_gib(measured, micro_steps) - measured.model_gib)


def static_gib(measurement: Measurement, micro_steps: int) -> float:
    """Weights, adapters and optimizer state, and the gradients if they wait for a further micro batch."""
    held = measurement.model_gib + measurement.adapters_gib + measurement.optimizer_gib
    return held + (measurement.gradients_gib if micro_steps > 1 else 0.0)


def _compute_signature(config: TrainConfig, micro_steps: int) -> tuple[object, ...]:
    """Everything that decides how many bytes a step needs for each token."""
    # Memory is linear in the length of a row only if neither attention scores nor a mask are stored for each pair of
    # tokens.
    length = 0 if config.attention != "eager" and not config.has_mask else config.seq_len
    return (
        *(getattr(config, name) for name in _compute_knobs()),
        config.has_mask,
        config.optimizer if config.method == "full" else None,
        min(micro_steps, 2),
        length,
        min(config.tokens, HEAD_CHUNK) if config.loss == "chunked" else 0,
    )


@cache
def _compute_knobs() -> tuple[str, ...]:
    """The knobs that decide how many bytes a token takes: all with an effect on memory but sizes and the optimizer."""
    return tuple(
        name
        for name in affecting("memory")
        if KNOBS[name].form != "integer" and not KNOBS[name].surely_leanest_first
    )


def _base(config: TrainConfig) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in affecting("weights"))


def _rank(config: TrainConfig) -> int:
    return config.lora_rank or 1


def _segments(measurement: Measurement) -> dict[str, float]:
    return measurement.segment_peak_gib or {
        phase.value: peak for phase, peak in measurement.phase_peak_gib.items()
    }


def _at(points: list[tuple[int, float]], tokens: int) -> tuple[float, float, float]:
    """(low, likely, high) of temporary memory at `tokens`, from (tokens, GiB) of other configurations.

    The line has no negative coefficient. Its error is the largest distance of a point from it, and outside the points a
    share of what it adds.
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
