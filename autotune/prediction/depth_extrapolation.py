"""Depth truncation: from probes of a few layers to the memory and the time of the whole model.

The memory of each segment of a step and the time of each part of it are affine in the number of layers, as long as
whole periods of the layer pattern are left out. Each is extrapolated alone, and then the maximum and the sum are taken:
with depth the peak may move, from the logits to the optimizer step, and one line through the totals would miss that.
A DepthPredictor corrects the times by the whole models that a study measured.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.knobs import KNOBS, affecting
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

# Relative error of an extrapolated step time that is assumed even where the timed steps agree perfectly, about two
# standard deviations. From 2 and 8 layers to 32 on an H200 (`benchmarks/depth_extrapolation.py`): 1 to 4 % where the
# device was the bottleneck. Where the host was, 2 to 5 % on an idle host, and more than 15 % in a tenth of the cases on
# a host that other programs used. From 2 and 4 of 16 small layers on a CPU up to 16 %; the same is
# assumed with images, where the host's own time is not known.
DEVICE_BOUND, HOST_BOUND, UNKNOWN_HOST = 0.02, 0.15, 0.15
# With this many whole models for comparison, their spread replaces the assumed error, but it counts at least as SEEN.
ENOUGH_RATIOS, SEEN = 8, 0.01
LEAST_SHARDED = 4  # layers of a model in shards that are like those of a deeper one
MIN_APART = 4  # layers between the two depths, where the model has so many
# The wider depth has a quarter of the layers. Of models with more than 48 it has less: their layers take long, which
# leaves little noise for the line to multiply, and probes of 20 of the 80 layers of a 70B would take most of a search.
WIDE_SHARE, WIDE_ENOUGH, LEAST_SHARE = 1 / 4, 12, 1 / 8
FREE_SHARE = 0.5  # below this share a disturbed host goes unnoticed; the assumed error grows up to HOST_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """The predicted measurement of a whole model. Errors are relative, about two standard deviations.

    `shortest` says that the line goes through the shortest steps instead of their means. `noise` is the error that the
    timed steps show, `rest_noise` that of the time after the micro batches, `unseen` what is assumed in addition.
    """

    measurement: Measurement
    shortest: bool = False
    unseen: float = DEVICE_BOUND
    noise: float = 0.0
    rest_noise: float = 0.0

    @property
    def time_error(self) -> float:
        """The error of the step time, from all sources together."""
        return self.measurement.time_error

    def corrected(self, ratios: Sequence[float]) -> "Extrapolation":
        """The same with its times multiplied by the median of `ratios`: measured over predicted time of whole models.

        The spread of enough ratios replaces the assumed error where it is smaller.
        """
        predicted, ratio, error = self.measurement, statistics.median(ratios), self.time_error
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
        """The same with the measured micro batches of a whole model that differs only in the optimizer."""
        predicted, micro = self.measurement, statistics.median(whole.micro_step_s)
        rest = statistics.median(predicted.rest_s) if predicted.rest_s else 0.0
        step = predicted.micro_steps * micro + rest
        before = statistics.median(predicted.step_s)
        noise = 2 * predicted.micro_steps * _error(whole.micro_step_s)
        repeated = self.unseen / 2  # how much two probes of the same configuration differ
        error = math.hypot(
            repeated, noise / step, self.unseen * rest / step, self.rest_noise * before / step
        )
        return replace(
            self,
            measurement=replace(
                predicted,
                step_s=tuple(seconds * step / before for seconds in predicted.step_s),
                micro_step_s=(micro,),
                time_error=error,
            ),
        )


def depths(
    shape: ModelShape, checkpoint_every: int | None, *, sharded: bool = False
) -> tuple[int, int] | None:
    """The two numbers of layers to probe, which leave out whole periods; None where that would save too little.

    Any two depths give the memory, except of a model in shards (`sharded`): there the layers before and after one are
    gathered beside it, so that fewer than four are not like more. Times need two that are far apart, since the error of
    the slope is multiplied by the number of layers that are left out. A vision tower is never truncated, and its time
    swings with the host: the wider model then has as many layers as may be.
    """
    possible = _possible(shape, checkpoint_every)
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
    """The two numbers of layers to probe of this configuration."""
    return depths(shape, config.checkpoint_every, sharded=Parallelism.of(config).shards)


def least_depth(shape: ModelShape, checkpoint_every: int | None) -> int | None:
    """The smallest number of layers with one of each kind; None where nothing repeats."""
    return None if shape.period is None else _whole_period(shape, shape.period, checkpoint_every)[0]


def counted_depths(shape: ModelShape, checkpoint_every: int | None) -> tuple[int, int] | None:
    """The two smallest depths, for a line through counts, which have no noise; None where there are not two."""
    fitting = [depth for depth in _possible(shape, checkpoint_every) if depth >= 2]
    return (fitting[0], fitting[1]) if len(fitting) > 1 else None


def _possible(shape: ModelShape, checkpoint_every: int | None) -> range:
    """The numbers of layers, up to half of all, that leave out whole periods."""
    if shape.period is None:
        return range(0)
    # Every kind of layer must be present, since the largest sets the peak.
    least, period = _whole_period(shape, shape.period, checkpoint_every)
    return range(least, shape.num_layers // 2 + 1, period)


def _whole_period(shape: ModelShape, period: int, checkpoint_every: int | None) -> tuple[int, int]:
    """The smallest depth that leaves out whole periods, each of which is so many layers."""
    period = math.lcm(period, checkpoint_every or 1)
    rest = (shape.num_layers - shape.prefix) % period
    return shape.prefix + period + rest, period


def extrapolate(probes: Sequence[tuple[int, Measurement]], num_layers: int) -> Extrapolation:
    """Predict the measurement of the whole model from probes of one configuration at two depths, the smaller first.

    Raises ValueError unless they are two different ones in that order.
    """
    (shallow, low), (wide, high) = probes
    if shallow >= wide:
        raise ValueError(f"two depths are needed, the smaller first, not {shallow} and {wide}")
    reach = (num_layers - shallow) / (wide - shallow)
    host: float | None = None
    if low.host_micro_s is not None and high.host_micro_s is not None:
        # Issuing waits for the device once its queue is full, and two layers do not fill it: the line may be too steep.
        # A further layer takes the host no longer than one of those.
        host = min(
            _line(low.host_micro_s, high.host_micro_s, reach),
            low.host_micro_s * num_layers / shallow,
        )
    timed = _times(low, high, reach, host)
    return replace(timed, measurement=_with_memory(timed.measurement, low, high, reach))


def count_at_depth(
    low: tuple[int, DryCount], high: tuple[int, DryCount], num_layers: int
) -> DryCount:
    """The count of a model with `num_layers`, from those at two depths: each segment is a line in depth."""
    (shallow, less), (wide, more) = low, high
    reach = (num_layers - shallow) / (wide - shallow)

    def line(name: str) -> float:
        return _line(getattr(less, name), getattr(more, name), reach)

    def whole_numbers(name: str) -> dict[str, int]:
        return {
            key: round(value)
            for key, value in _lines(getattr(less, name), getattr(more, name), reach).items()
        }

    segments = _lines(less.segment_peak_gib, more.segment_peak_gib, reach)
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
    )


def _times(low: Measurement, high: Measurement, reach: float, host: float | None) -> Extrapolation:
    """The extrapolation with the times of the whole model and the memory of the wider probe.

    `host` is the predicted time in which the host issues a micro batch, None where that is not known.
    """
    whole = _line(min(low.micro_step_s), min(high.micro_step_s), reach)
    share = 0.0 if host is None else host / whole if whole > 0 else 1.0
    # A card at its power limit swings within a second, and the whole model will see the mean. A disturbance of the host
    # takes the same time at any depth, and the line would multiply it: it goes through the undisturbed steps.
    middle = (
        min if share > FREE_SHARE else statistics.median if low.host_waits else statistics.fmean
    )
    micro, error = _time(low.micro_step_s, high.micro_step_s, reach, middle)
    # The rest is the step minus its micro batches: a disturbance between these makes the rest look short.
    typical = statistics.median if middle is min else middle
    rest, rest_error = _time(low.rest_s, high.rest_s, reach, typical) if high.rest_s else (0.0, 0.0)
    if host is not None:
        # In a few layers the work of the head hides the time of the host; with all layers it shows.
        micro = _at_pace(host, low, high, reach, micro)
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
            phase_s=_lines(low.phase_s, high.phase_s, reach),
            kind_s=(),
            host_micro_s=host,
            host_share=None if host is None else share,
            kernels=_kernels(low.kernels, high.kernels, reach, host),
            new_length_s=low.new_length_s if high.new_length_s is None else high.new_length_s,
            time_error=math.hypot(unseen, noise),
        ),
        shortest=middle is min,
        unseen=unseen,
        noise=noise,
        rest_noise=2 * rest_error / step,
    )


def _kernels(
    low: KernelTimes | None, high: KernelTimes | None, reach: float, host: float | None
) -> KernelTimes | None:
    """The kernels of the whole model; None unless both probes were profiled.

    A micro batch is no shorter than the time in which they keep the device busy, or than what the host needs.
    """
    if low is None or high is None:
        return None

    def line(name: str) -> float:
        before, after = float(getattr(low, name)), float(getattr(high, name))
        return max(_line(before, after, reach), after)

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


def _at_pace(host: float, low: Measurement, high: Measurement, reach: float, micro: float) -> float:
    """Seconds of a micro batch of the whole model, where the host needs `host` for a micro batch of any kind."""
    if len(low.kind_s) != len(high.kind_s) or not high.kind_s:
        return max(micro, host)
    pairs = zip(low.kind_s, high.kind_s, strict=True)
    return micro + sum(
        share * max(host - _line(before, after, reach), 0.0)
        for (_, before), (share, after) in pairs
    )


def _with_memory(
    timed: Measurement, low: Measurement, high: Measurement, reach: float
) -> Measurement:
    """`timed` with the memory and the parameters of the whole model."""

    def line(name: str) -> float:
        return _line(getattr(low, name), getattr(high, name), reach)

    segments = _lines(low.segment_peak_gib, high.segment_peak_gib, reach)
    phases = _lines(low.phase_peak_gib, high.phase_peak_gib, reach)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        parts = [peak for name, peak in segments.items() if name.startswith(phase)]
        if parts:
            phases[phase] = max(parts)
    peak = max([*segments.values(), *phases.values()]) + max(_excess(low), _excess(high))
    beyond = _line(
        low.peak_reserved_gib - low.peak_allocated_gib,
        high.peak_reserved_gib - high.peak_allocated_gib,
        reach,
    )
    managed = line("managed_gib")
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
        peak_reserved_gib=peak + max(beyond, 0.0),
        limit_gib=min(low.limit_gib + low.managed_gib, high.limit_gib + high.managed_gib) - managed,
        context_gib=max(contexts) if len(contexts) == 2 else None,
        managed_gib=managed,
        in_host_gib=line("in_host_gib"),
        trainable_params=round(line("trainable_params")),
        total_params=round(line("total_params")),
        telemetry=None,
    )


def _line(at_low: float, at_high: float, reach: float) -> float:
    """The value at full depth of the line through both; `reach` is how many of their distances it is from the first."""
    return at_low + (at_high - at_low) * reach


def _lines(at_low: dict[Any, float], at_high: dict[Any, float], reach: float) -> dict[Any, float]:
    return {key: _line(at_low[key], at_high[key], reach) for key in at_high if key in at_low}


def _excess(measurement: Measurement) -> float:
    """GiB that the timed steps held beyond the warm-up step, which gave the segments (fragmentation on a CPU)."""
    parts = [*measurement.segment_peak_gib.values(), *measurement.phase_peak_gib.values()]
    return max(measurement.peak_allocated_gib - max(parts), 0.0)


def _time(
    low: Sequence[float],
    high: Sequence[float],
    reach: float,
    middle: Callable[[Sequence[float]], float],
) -> tuple[float, float]:
    """(seconds at full depth, standard error): the line through both middles, and their errors times their weights."""
    value = middle(low) * (1 - reach) + middle(high) * reach
    # A whole model takes at least as long as a part of it, whatever disturbed the shallow probe.
    return max(value, middle(high)), math.hypot((1 - reach) * _error(low), reach * _error(high))


def _error(times: Sequence[float]) -> float:
    """Standard error of the mean of a few times; a single time is taken to be 1 % uncertain."""
    if len(times) < 2:
        return 0.01 * times[0]
    return statistics.stdev(times) / math.sqrt(len(times))


class DepthPredictor:
    """Collects the measurements of one model, whose layers repeat as `shape` says, and predicts its whole depth."""

    def __init__(self, shape: ModelShape | None) -> None:
        self._shape = shape
        # By configuration and micro steps, then by the number of layers.
        self._truncated: dict[tuple[TrainConfig, int], dict[int, Measurement]] = {}
        # Measured over extrapolated time of a micro batch, by the kind of compute, then by configuration.
        self._ratios: dict[tuple[Any, ...], dict[TrainConfig, float]] = {}
        self._whole: dict[
            tuple[Any, ...], Measurement
        ] = {}  # whole models, by what determines a micro batch

    def learn(self, result: ProbeResult, measurement: Measurement) -> None:
        """Take over the measurement of a successful probe, truncated or whole."""
        config, micro_steps = result.config, measurement.micro_steps
        if result.depth is not None:
            self._truncated.setdefault((config, micro_steps), {})[result.depth] = measurement
        elif result.evidence is Evidence.MEASURED:
            self._whole[_micro_batch_signature(config, micro_steps)] = measurement
            predicted = self.extrapolated(config, micro_steps)
            if predicted is not None:
                # The median, which scores count: one hiccup of a whole model must not make all others look slow.
                ratio = (
                    statistics.median(measurement.micro_step_s)
                    / predicted.measurement.micro_step_s[0]
                )
                self._ratios.setdefault(_compute_signature(config, predicted), {})[config] = ratio

    def extrapolated(self, config: TrainConfig, micro_steps: int) -> Extrapolation | None:
        """The whole model from two truncated probes of this configuration; None if there are not two."""
        truncated = sorted(self._truncated.get((config, micro_steps), {}).items())
        if self._shape is None or len(truncated) != 2:
            return None
        return extrapolate(truncated, self._shape.num_layers)

    def predict(self, config: TrainConfig, micro_steps: int) -> Extrapolation | None:
        """The same, its time corrected by whole models: with the same micro batches, or of the same kind of compute."""
        predicted = self.extrapolated(config, micro_steps)
        if predicted is None:
            return None
        ratios = self._ratios.get(_compute_signature(config, predicted))
        if ratios:
            predicted = predicted.corrected(list(ratios.values()))
        whole = self._whole.get(_micro_batch_signature(config, micro_steps))
        return (
            predicted.with_micro_batches_of(whole)
            if whole is not None and whole.rest_s
            else predicted
        )


def _compute_signature(config: TrainConfig, predicted: Extrapolation) -> tuple[Any, ...]:
    """What steps have in common whose extrapolated time is off by the same ratio."""
    values = [getattr(config, name) for name in affecting("depth_error")]
    return (*values, predicted.measurement.host_bound, predicted.shortest)


def _micro_batch_signature(config: TrainConfig, micro_steps: int) -> tuple[Any, ...]:
    """What determines a micro batch: the optimizer, which runs after it, does not."""
    only_after = set(affecting("rest_of_step")) - set(affecting("micro_time"))
    return micro_steps, replace(config, **{name: KNOBS[name].default for name in only_after})
