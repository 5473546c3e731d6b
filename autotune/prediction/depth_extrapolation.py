"""Predict the memory and time of a model with all its layers from probes of fewer layers.

The whole model is the model with all its layers; a truncated model has fewer. A step is divided
into segments, such as the forward pass of the head, and the peak memory of each segment is
measured. The peak of a segment and the time of each part of a step, such as a micro batch, are
affine in the number of layers. The removed layers must be whole periods of the layer pattern. For
each segment and each part, a straight line through the values of two truncated models gives the
value of the whole model. The peak of the whole model is the largest of the extrapolated peaks of
its segments. The step time of the whole model is the sum of the extrapolated times of its parts. In
a truncated model, the peak may occur while the logits exist, but in the whole model, it may occur
in the optimizer step. A line through the peaks of complete steps would miss this change. A
DepthPredictor corrects the extrapolated times with the times of those whole models that the study
measured.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from autotune.core.knobs import KNOBS, knobs_affecting
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import (
    HOST_SHARE,
    DryCount,
    Evidence,
    KernelTimes,
    Measurement,
    ModelShape,
    Phase,
    ProbeResult,
)
from autotune.core.train_config import TrainConfig

# The next three numbers are relative errors (about two standard deviations) that are assumed for
# extrapolated step times. The errors are assumed even if all timed steps took the same time
# (`benchmarks/depth_extrapolation.py`). DEVICE_BOUND is for GPU-bound steps. On an H200, step times
# that were extrapolated from a probe of 2 layers and a probe of 8 to 32 layers had errors of 1 to
# 4 %.
DEVICE_BOUND = 0.02
# HOST_BOUND is for CPU-bound steps. On an idle host, their extrapolated times had errors of 2 to
# 5 %. If other programs used the host, a tenth of the errors exceeded 15 %.
HOST_BOUND = 0.15
# UNKNOWN_HOST is for training on a CPU. Step times that were extrapolated from a probe of 2 small
# layers and a probe of 4 to 16 small layers had errors of up to 16 %. The same error is assumed for
# image models on a GPU, because their host time is unknown.
UNKNOWN_HOST = 0.15
# If at least ENOUGH_RATIOS predictions were compared with measured whole models, and the spread of
# the predictions' errors is below the assumed error, then the spread replaces the assumed error. A
# spread below SEEN is replaced by SEEN.
ENOUGH_RATIOS = 8
SEEN = 0.01
LEAST_SHARDED = 4  # fewer layers do not show the memory that each layer adds to a sharded model
MIN_APART = 4  # the deeper probe has at least this many more layers, if the model has enough
# The deeper probe has at least WIDE_SHARE of the model's layers. If the model has more than 48
# layers, fewer are enough: WIDE_ENOUGH layers or LEAST_SHARE of the layers, whichever is more. Each
# layer of such a model takes long, so its time has little noise. A 70B model has 80 layers, and
# probes with a quarter of them would take most of a search's time.
WIDE_SHARE = 1 / 4
WIDE_ENOUGH = 12
LEAST_SHARE = 1 / 8
# If the host needs at most this share of a micro batch's time to issue the work, a delay on the
# host does not lengthen the step, and the assumed error is DEVICE_BOUND. The error grows with the
# host's share, and is HOST_BOUND if the share is HOST_SHARE or more.
FREE_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """The predicted measurement of a whole model.

    Errors are relative to the step time, and about two standard deviations. If `shortest` is true,
    the micro batch time was extrapolated from the shortest micro batch of each truncated model,
    otherwise from the average micro batch. `noise` is the error that follows from the differences
    between the timed steps. `rest_noise` is the part of `noise` that comes from the time after the
    micro batches. `unseen` is the assumed error of the extrapolation, which the timed steps do not
    show; it is added to `noise`. `disturbed` describes how other work on the machine changed the
    times of a truncated model, or is None.
    """

    measurement: Measurement
    shortest: bool = False
    unseen: float = DEVICE_BOUND
    noise: float = 0.0
    rest_noise: float = 0.0
    disturbed: str | None = None

    @property
    def time_error(self) -> float:
        """The error of the step time from all sources."""
        return self.measurement.time_error

    def scale_times(self, ratios: Sequence[float]) -> "Extrapolation":
        """Multiply the times by the median of `ratios`.

        Each ratio is a whole model's measured time divided by its predicted time. With at least
        ENOUGH_RATIOS ratios, the spread of the ratios replaces the assumed error if the spread is
        smaller.
        """
        predicted = self.measurement
        ratio = statistics.median(ratios)
        error = self.time_error
        if len(ratios) >= ENOUGH_RATIOS:
            error = min(error, math.hypot(max(2 * statistics.stdev(ratios), SEEN), self.noise))

        return replace(
            self,
            measurement=replace(
                predicted,
                step_s=tuple(step * ratio for step in predicted.step_s),
                micro_step_s=tuple(micro * ratio for micro in predicted.micro_step_s),
                phase_s={phase: seconds * ratio for phase, seconds in predicted.phase_s.items()},
                time_error=error,
            ),
        )

    def with_micro_batches_of(self, whole: Measurement) -> "Extrapolation":
        """Use the micro batch time of `whole`, a measured whole model with another optimizer."""
        predicted = self.measurement
        micro = statistics.median(whole.micro_step_s)
        rest = statistics.median(predicted.rest_s) if predicted.rest_s else 0.0
        step = predicted.micro_steps * micro + rest
        predicted_step = statistics.median(predicted.step_s)

        noise = 2 * predicted.micro_steps * _error(whole.micro_step_s)
        # The assumed relative difference between the times of two probes of the same configuration
        repeat_error = self.unseen / 2
        error = math.hypot(
            repeat_error,
            noise / step,
            self.unseen * rest / step,
            self.rest_noise * predicted_step / step,
        )

        return replace(
            self,
            measurement=replace(
                predicted,
                step_s=tuple(seconds * step / predicted_step for seconds in predicted.step_s),
                micro_step_s=(micro,),
                time_error=error,
            ),
        )


def depths(
    shape: ModelShape, checkpoint_every: int | None, *, sharded: bool = False
) -> tuple[int, int] | None:
    """Return the two numbers of layers to probe, or None if there are no two suitable numbers.

    The removed layers are whole periods of the layer pattern. Any two numbers of layers are enough
    to extrapolate the memory, unless the model is `sharded`. A sharded model holds the gathered
    layers before and after the current layer, so a probe of a sharded model needs at least four
    layers. To extrapolate times, the two numbers must be far apart, because the slope's error is
    multiplied by the number of removed layers. If the model has a vision tower, the deeper probe
    gets the largest possible number of layers. The tower is never truncated, and its time varies
    with the host.
    """
    possible = _possible_depths(shape, checkpoint_every)
    shallow = next(
        (depth for depth in possible if depth >= (LEAST_SHARDED if sharded else 2)), None
    )
    if shallow is None:
        return None

    least = min(WIDE_SHARE * shape.num_layers, max(WIDE_ENOUGH, LEAST_SHARE * shape.num_layers))
    if shape.sees_images:
        least = possible[-1]
    wider = [depth for depth in possible if depth > shallow and depth >= least]
    if not wider:
        return None
    return shallow, next((depth for depth in wider if depth >= shallow + MIN_APART), wider[-1])


def depths_of(shape: ModelShape, config: TrainConfig) -> tuple[int, int] | None:
    """Return the two numbers of layers to probe for this configuration."""
    return depths(shape, config.checkpoint_every, sharded=Parallelism.of(config).shards)


def least_depth(shape: ModelShape, checkpoint_every: int | None) -> int | None:
    """Return the smallest number of layers with every kind of layer, or None without a pattern."""
    return None if shape.period is None else _whole_period(shape, shape.period, checkpoint_every)[0]


def counted_depths(shape: ModelShape, checkpoint_every: int | None) -> tuple[int, int] | None:
    """Return the two smallest numbers of layers from which a dry probe can be extrapolated.

    The smallest numbers suffice, because a dry probe computes its results, so they have no noise.
    Returns None if there are no two such numbers.
    """
    large_enough = [depth for depth in _possible_depths(shape, checkpoint_every) if depth >= 2]
    return (large_enough[0], large_enough[1]) if len(large_enough) > 1 else None


def _possible_depths(shape: ModelShape, checkpoint_every: int | None) -> range:
    """Return the numbers of layers, up to half of all, that remain if whole periods are removed."""
    if shape.period is None:
        return range(0)
    # Every kind of layer must be present, because the largest kind determines the memory peak.
    least, period = _whole_period(shape, shape.period, checkpoint_every)
    return range(least, shape.num_layers // 2 + 1, period)


def _whole_period(shape: ModelShape, period: int, checkpoint_every: int | None) -> tuple[int, int]:
    """Return the fewest layers after whole periods are removed, and the layers per period."""
    period = math.lcm(period, checkpoint_every or 1)
    rest = (shape.num_layers - shape.prefix) % period
    return shape.prefix + period + rest, period


def extrapolate(
    probes: Sequence[tuple[int, Measurement]], num_layers: int, single_layers: int = 0
) -> Extrapolation:
    """Predict a whole model's measurement from probes of two truncated models.

    The probes have the same configuration, but different numbers of layers. `single_layers` is the
    number of layers that do not repeat (`ModelShape.single_layers`). Raises ValueError unless the
    probe with fewer layers comes first.
    """
    (shallow, low), (wide, high) = probes
    if shallow >= wide:
        raise ValueError(
            f"two numbers of layers are needed, the smaller first, not {shallow} and {wide}"
        )
    factor = (num_layers - shallow) / (wide - shallow)
    depth_ratio = (num_layers - single_layers) / (shallow - single_layers)
    host: float | None = None
    if low.host_micro_s is not None and high.host_micro_s is not None:
        # Once the device's queue is full, the host waits before it issues more work, and the wait
        # is measured as host time. Two layers do not fill the queue, but the deeper probe may fill
        # it. So the line through the host times of both probes may be too steep. The host time of
        # an added layer is therefore assumed to be at most the host time of a layer in the shallow
        # probe.
        host = min(
            _line(low.host_micro_s, high.host_micro_s, factor),
            low.host_micro_s * depth_ratio,
        )

    extrapolation = _times(low, high, factor, depth_ratio, host)
    return replace(
        extrapolation, measurement=_with_memory(extrapolation.measurement, low, high, factor)
    )


def count_at_depth(
    low: tuple[int, DryCount], high: tuple[int, DryCount], num_layers: int
) -> DryCount:
    """Return a dry probe's result for `num_layers` layers, from the results of two dry probes.

    All numbers in a DryCount are affine in the number of layers. The memory of each segment is
    extrapolated separately.
    """
    shallow, less = low
    wide, more = high
    factor = (num_layers - shallow) / (wide - shallow)

    def line(name: str) -> float:
        return _line(getattr(less, name), getattr(more, name), factor)

    def whole_numbers(name: str) -> dict[str, int]:
        return {
            key: round(value)
            for key, value in _lines(getattr(less, name), getattr(more, name), factor).items()
        }

    segments = _lines(less.segment_peak_gib, more.segment_peak_gib, factor)
    return DryCount(
        model_gib=line("model_gib"),
        adapters_gib=line("adapters_gib"),
        gradients_gib=line("gradients_gib"),
        optimizer_gib=line("optimizer_gib"),
        segment_peak_gib=segments,
        peak_allocated_gib=max(segments.values()),
        trainable_params=round(line("trainable_params")),
        total_params=round(line("total_params")),
        flops=whole_numbers("flops"),
        moved_bytes=whole_numbers("moved_bytes"),
        operations=round(line("operations")),
        expert_gradients_gib=line("expert_gradients_gib"),
    )


def _times(
    low: Measurement, high: Measurement, factor: float, depth_ratio: float, host: float | None
) -> Extrapolation:
    """Return the deeper probe's measurement with the extrapolated times of the whole model.

    The memory in the result is still the memory of the deeper probe. `factor` is defined in
    `_line`. The whole model has `depth_ratio` times as many repeating layers as the shallower
    probe. `host` is the predicted time that the host needs to issue a micro batch, or None if
    unknown.
    """
    shortest = min(low.micro_step_s)
    whole = min(_line(shortest, min(high.micro_step_s), factor), depth_ratio * shortest)
    share = 0.0
    if host is not None:
        share = host / whole if whole > 0 else 1.0

    takes_shortest = share > FREE_SHARE
    middle = _middle(low, takes_shortest)
    micro, error = _time(low.micro_step_s, high.micro_step_s, factor, depth_ratio, middle)
    # The rest of a step is the time of the step outside its micro batches, without the mean pause
    # between two micro batches. A delay in a pause lengthens the mean pause, so the rest seems too
    # short. The shortest rest is therefore unreliable, and the median is used.
    typical = middle
    if takes_shortest:
        typical = statistics.median
    rest, rest_error = 0.0, 0.0
    if high.rest_s:
        rest, rest_error = _time(low.rest_s, high.rest_s, factor, depth_ratio, typical)
    if host is not None:
        # In a truncated model, the host can issue all layers while the device still computes the
        # head, so the host's time does not lengthen the micro batch. In the whole model, the head's
        # time is too short for that, and a micro batch takes at least as long as the host needs.
        micro = _raise_to_host_pace(host, low, high, factor, micro)

    step = high.micro_steps * micro + rest
    host_weight = min(max((share - FREE_SHARE) / (HOST_SHARE - FREE_SHARE), 0.0), 1.0)
    unseen = (
        UNKNOWN_HOST if host is None else DEVICE_BOUND + (HOST_BOUND - DEVICE_BOUND) * host_weight
    )
    noise = 2 * math.hypot(high.micro_steps * error, rest_error) / step
    scale = step / statistics.median(high.step_s)

    return Extrapolation(
        measurement=replace(
            high,
            step_s=tuple(seconds * scale for seconds in high.step_s),
            micro_step_s=(micro,),
            rest_s=(rest,) if high.rest_s else (),
            phase_s=_lines(low.phase_s, high.phase_s, factor),
            kind_s=(),
            host_micro_s=host,
            host_share=None if host is None else share,
            kernels=_kernels(low.kernels, high.kernels, factor, host),
            new_length_s=low.new_length_s if high.new_length_s is None else high.new_length_s,
            time_error=math.hypot(unseen, noise),
        ),
        shortest=takes_shortest,
        unseen=unseen,
        noise=noise,
        rest_noise=2 * rest_error / step,
    )


def _middle(low: Measurement, takes_shortest: bool) -> Callable[[Sequence[float]], float]:
    """Return the function that averages the times of one model: `min`, `median` or `fmean`."""
    # A delay on the host does not depend on the number of layers, but the extrapolation would
    # multiply the delay. The shortest micro batches have no delay.
    if takes_shortest:
        return min
    # If a card is at its power limit, its speed varies within a second. A step of the whole model
    # takes longer than these variations, so it runs at the mean speed, and the mean is used.
    return statistics.median if low.host_waits else statistics.fmean


def _kernels(
    low: KernelTimes | None, high: KernelTimes | None, factor: float, host: float | None
) -> KernelTimes | None:
    """Return the kernel times of the whole model, or None if a probe was not profiled.

    A micro batch takes at least the device's busy time, and at least the host's time.
    """
    if low is None or high is None:
        return None

    def line(name: str) -> float:
        at_low = float(getattr(low, name))
        at_high = float(getattr(high, name))
        return max(_line(at_low, at_high, factor), at_high)

    busy_s = line("busy_s")
    return KernelTimes(
        products_s=line("products_s"),
        fp8_s=line("fp8_s"),
        attention_s=line("attention_s"),
        bytes_s=line("bytes_s"),
        busy_s=busy_s,
        micro_s=max(line("micro_s"), busy_s, host or 0.0),
        num_kernels=round(line("num_kernels")),
    )


def _raise_to_host_pace(
    host: float, low: Measurement, high: Measurement, factor: float, micro: float
) -> float:
    """Return `micro`, the mean, raised so that each kind of micro batch takes at least `host`."""
    if len(low.kind_s) != len(high.kind_s) or not high.kind_s:
        return max(micro, host)
    pairs = zip(low.kind_s, high.kind_s, strict=True)
    return micro + sum(
        share * max(host - _line(at_low, at_high, factor), 0.0)
        for (_, at_low), (share, at_high) in pairs
    )


def _with_memory(
    timed: Measurement, low: Measurement, high: Measurement, factor: float
) -> Measurement:
    """Return `timed` with the memory and the parameters of the whole model."""

    def line(name: str) -> float:
        return _line(getattr(low, name), getattr(high, name), factor)

    segments = _lines(low.segment_peak_gib, high.segment_peak_gib, factor)
    phases = _lines(low.phase_peak_gib, high.phase_peak_gib, factor)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        parts = [peak for name, peak in segments.items() if name.startswith(phase)]
        if parts:
            phases[phase] = max(parts)
    peak = max([*segments.values(), *phases.values()]) + max(_excess(low), _excess(high))

    extra_reserved = _line(
        low.peak_reserved_gib - low.peak_allocated_gib,
        high.peak_reserved_gib - high.peak_allocated_gib,
        factor,
    )
    managed_gib = line("managed_gib")
    contexts = [probe.context_gib for probe in (low, high) if probe.context_gib is not None]

    return replace(
        timed,
        phase_peak_gib=phases,
        segment_peak_gib=segments,
        model_gib=line("model_gib"),
        adapters_gib=line("adapters_gib"),
        gradients_gib=line("gradients_gib"),
        optimizer_gib=line("optimizer_gib"),
        peak_allocated_gib=peak,
        peak_reserved_gib=peak + max(extra_reserved, 0.0),
        limit_gib=min(low.limit_gib + low.managed_gib, high.limit_gib + high.managed_gib)
        - managed_gib,
        context_gib=max(contexts) if len(contexts) == 2 else None,
        managed_gib=managed_gib,
        in_host_gib=line("in_host_gib"),
        trainable_params=round(line("trainable_params")),
        total_params=round(line("total_params")),
        telemetry=None,
    )


def _line(at_low: float, at_high: float, factor: float) -> float:
    """Return the value for the whole model, on the line through the values of two truncated models.

    `factor` is the number of layers that the shallower model lacks, divided by the difference
    between the two models' numbers of layers.
    """
    return at_low + (at_high - at_low) * factor


def _lines(at_low: dict[Any, float], at_high: dict[Any, float], factor: float) -> dict[Any, float]:
    return {key: _line(at_low[key], at_high[key], factor) for key in at_high if key in at_low}


def _excess(measurement: Measurement) -> float:
    """Return the excess of the timed steps' peak over the warm-up step's peak, in GiB.

    The peaks of segments were measured in the warm-up step. On a CPU, fragmentation causes the
    excess.
    """
    parts = [*measurement.segment_peak_gib.values(), *measurement.phase_peak_gib.values()]
    return max(measurement.peak_allocated_gib - max(parts), 0.0)


def _time(
    low: Sequence[float],
    high: Sequence[float],
    factor: float,
    depth_ratio: float,
    middle: Callable[[Sequence[float]], float],
) -> tuple[float, float]:
    """Return the whole model's seconds and their standard error, by a line through two averages.

    `middle` computes the average time of each truncated model. The whole model's time is a weighted
    sum of the two averages, and its error is computed from the errors of the two averages with the
    same weights. The whole model has `depth_ratio` times as many repeating layers as the shallower
    probe.
    """
    value = middle(low) * (1 - factor) + middle(high) * factor
    # The parts of the model that do not repeat cannot take negative time. But if the host slows
    # down between the two probes, the line may be so steep that it would give these parts a
    # negative time.
    value = min(value, middle(low) * depth_ratio)
    # A whole model takes at least as long as the deeper probe, even if a disturbed shallow probe
    # makes the line too flat.
    value = max(value, middle(high))
    return value, math.hypot((1 - factor) * _error(low), factor * _error(high))


def _error(times: Sequence[float]) -> float:
    """Return the standard error of the mean of a few times; a single time has an error of 1 %."""
    if len(times) < 2:
        return 0.01 * times[0]
    return statistics.stdev(times) / math.sqrt(len(times))


class _Truncated(NamedTuple):
    """The measurement of a truncated model, and how other work on the machine changed its times."""

    measurement: Measurement
    disturbed: str | None


class DepthPredictor:
    """Collects probes of one model and predicts the measurement with all layers.

    `shape` says how many layers the model has, and after how many layers their pattern repeats. If
    `shape` is None, every prediction is None.
    """

    def __init__(self, shape: ModelShape | None) -> None:
        self._shape = shape
        # The measurements of truncated models: the outer key is the configuration and the number of
        # micro batches in a step, and the inner key is the number of layers
        self._truncated: dict[tuple[TrainConfig, int], dict[int, _Truncated]] = {}
        # The measured time of a micro batch divided by its extrapolated time, for each
        # `_compute_signature` and configuration
        self._ratios: dict[tuple[Any, ...], dict[TrainConfig, float]] = {}
        # Measurements of whole models, for each `_micro_batch_signature`
        self._whole: dict[tuple[Any, ...], Measurement] = {}

    def learn(self, result: ProbeResult, measurement: Measurement) -> None:
        """Add the measurement of a successful probe, of a truncated or a whole model."""
        config = result.config
        micro_steps = measurement.micro_steps
        if result.depth is not None:
            known = self._truncated.setdefault((config, micro_steps), {})
            if result.disturbed is None or result.depth not in known:
                known[result.depth] = _Truncated(measurement, result.disturbed)
        elif result.evidence is Evidence.MEASURED:
            self._whole[_micro_batch_signature(config, micro_steps)] = measurement
            predicted = self.predict_from_probes(config, micro_steps)
            if predicted is not None and predicted.disturbed is None:
                # The median time is used, as in the score of a configuration, so that one slow step
                # of a whole model does not make all other configurations look slow.
                measured_s = statistics.median(measurement.micro_step_s)
                ratio = measured_s / predicted.measurement.micro_step_s[0]
                self._ratios.setdefault(_compute_signature(config, predicted), {})[config] = ratio

    def predict_from_probes(self, config: TrainConfig, micro_steps: int) -> Extrapolation | None:
        """Return the whole model's prediction from the probes of two truncated models, or None."""
        truncated = sorted(self._truncated.get((config, micro_steps), {}).items())
        if self._shape is None or len(truncated) != 2:
            return None
        probes = [(depth, probed.measurement) for depth, probed in truncated]
        disturbed = next((probed.disturbed for _, probed in truncated if probed.disturbed), None)
        shape = self._shape
        extrapolation = extrapolate(probes, shape.num_layers, shape.single_layers)
        return replace(extrapolation, disturbed=disturbed)

    def predict(self, config: TrainConfig, micro_steps: int) -> Extrapolation | None:
        """Return the extrapolation, corrected by measured whole models.

        Measured whole models with the same compute signature correct the extrapolated times. If a
        measured whole model has the same micro batches, its micro batch time replaces the
        extrapolated time.
        """
        predicted = self.predict_from_probes(config, micro_steps)
        if predicted is None:
            return None

        ratios = self._ratios.get(_compute_signature(config, predicted))
        if ratios:
            predicted = predicted.scale_times(list(ratios.values()))
        whole = self._whole.get(_micro_batch_signature(config, micro_steps))
        if whole is not None and whole.rest_s:
            return predicted.with_micro_batches_of(whole)
        return predicted


def _compute_signature(config: TrainConfig, predicted: Extrapolation) -> tuple[Any, ...]:
    """Return a key that is the same for configurations with the same error of extrapolated times.

    The ratio of the true time to the extrapolated time is assumed to be the same for all
    configurations with the same key.
    """
    values = [getattr(config, name) for name in knobs_affecting("depth_error")]
    return (*values, predicted.measurement.host_bound, predicted.shortest)


def _micro_batch_signature(config: TrainConfig, micro_steps: int) -> tuple[Any, ...]:
    """Return a key that is the same for configurations whose micro batches take the same time.

    The key leaves out knobs that act only after the micro batches, such as the optimizer.
    """
    only_after = set(knobs_affecting("rest_of_step")) - set(knobs_affecting("micro_time"))
    return micro_steps, replace(config, **{name: KNOBS[name].default for name in only_after})
