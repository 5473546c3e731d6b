"""Depth truncation: from real probes of a few layers to what the whole model needs and takes.

The memory of each segment of a step and the time of each part of it are affine in the number of layers, as long as
whole periods of the layer pattern are left out. Each is extended on its own, then the maximum and the sum are taken: as
depth grows the peak may move, from the logits to the optimizer step, and one line through the totals would miss that.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.probe_types import Measurement, ModelShape, Phase

# Relative error of an extrapolated step time that is allowed even where the timed steps agree perfectly, about two
# standard deviations. From 2 and 8 layers to 32 on an H200 (`benchmarks/depth_extrapolation.py`): 1 to 4 % where the
# device was the bottleneck; where the host was, 2 to 5 % on a quiet one and a tenth of the cases over 15 % on one that
# others kept busy. From 2 and 4 of 16 small layers on a CPU up to 16 %.
DEVICE_BOUND, HOST_BOUND, ON_CPU = 0.02, 0.15, 0.15
# Once so many whole models were compared, their spread counts in place of these, but not as less than the last.
ENOUGH_RATIOS, SEEN = 8, 0.01
MIN_APART = 4  # layers between the two depths, where there are so many
# The host is the bottleneck where a micro batch takes it nearly as long as the micro batch lasts, the shortest of each.
HOST_SHARE = 0.8
FREE_SHARE = 0.5  # below it a host that stumbles is not noticed; the error that is allowed grows between the two


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """A whole model's measurement, foretold. Its `time_error` is about two standard deviations.

    `noise` is the part of it that the timed steps themselves show, `rest_noise` that of what follows the micro batches,
    `unseen` what is allowed beside them.
    """

    measurement: Measurement
    host_bound: bool
    shortest: bool = False  # whether it is drawn through the shortest steps, and not their mean
    unseen: float = DEVICE_BOUND
    noise: float = 0.0
    rest_noise: float = 0.0

    @property
    def time_error(self) -> float:
        return self.measurement.time_error

    def corrected(self, ratios: Sequence[float]) -> "Extrapolation":
        """With its times multiplied by what whole models took of what was foretold for them.

        Where there are enough of these ratios, their spread tells the error better than what is allowed unseen.
        """
        one, ratio, error = self.measurement, statistics.median(ratios), self.time_error
        if len(ratios) >= ENOUGH_RATIOS:
            error = min(error, math.hypot(max(2 * statistics.stdev(ratios), SEEN), self.noise))
        return replace(
            self,
            measurement=replace(
                one,
                step_s=tuple(step * ratio for step in one.step_s),
                micro_step_s=tuple(micro * ratio for micro in one.micro_step_s),
                phase_s={phase: seconds * ratio for phase, seconds in one.phase_s.items()},
                time_error=error,
            ),
        )

    def beside(self, whole: Measurement) -> "Extrapolation":
        """With the micro batches of a whole model that differs in its optimizer alone: only the rest is foretold."""
        one, micro = self.measurement, statistics.median(whole.micro_step_s)
        rest = statistics.median(one.rest_s) if one.rest_s else 0.0
        step = one.micro_steps * micro + rest
        before = statistics.median(one.step_s)
        noise = 2 * one.micro_steps * _error(whole.micro_step_s)
        again = self.unseen / 2  # from one probe of the same to the next
        error = math.hypot(again, noise / step, self.unseen * rest / step, self.rest_noise * before / step)
        scale = step / before
        return replace(
            self,
            measurement=replace(
                one,
                step_s=tuple(each * scale for each in one.step_s),
                micro_step_s=(micro,),
                time_error=error,
            ),
        )


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def depths(shape: ModelShape, checkpoint_every: int | None) -> tuple[int, int] | None:
    """The two depths to probe: whole periods are left out of each. None where that would save too little.

    Memory would be exact from any two; time wants them apart, since the slope's noise is multiplied by the layers that
    were left out.
    """
    if shape.period is None:
        return None
    period = math.lcm(shape.period, checkpoint_every or 1)
    rest = (shape.num_layers - shape.prefix) % period
    # Every kind of layer must be there, since the largest sets the peak.
    possible = range(shape.prefix + period + rest, shape.num_layers // 2 + 1, period)
    shallow = next((depth for depth in possible if depth >= 2), None)
    if shallow is None:
        return None
    wider = [depth for depth in possible if depth > shallow and 4 * depth >= shape.num_layers]
    if not wider:
        return None
    return shallow, next((depth for depth in wider if depth >= shallow + MIN_APART), wider[-1])


def extrapolate(probes: Sequence[tuple[int, Measurement]], num_layers: int) -> Extrapolation:
    """What the whole model would measure, from probes of one configuration at two depths, the smaller first.

    Raises ValueError unless there are two different depths.
    """
    (shallow, low), (wide, high) = probes
    if shallow >= wide:
        raise ValueError(f"two depths are needed, the smaller first, not {shallow} and {wide}")
    reach = (num_layers - shallow) / (wide - shallow)

    def line(at_low: float, at_high: float) -> float:
        return at_low + (at_high - at_low) * reach

    def lines(at_low: dict[Any, float], at_high: dict[Any, float]) -> dict[Any, float]:
        return {key: line(at_low[key], at_high[key]) for key in at_high if key in at_low}

    segments = lines(low.segment_peak_gib, high.segment_peak_gib)
    phases = lines(low.phase_peak_gib, high.phase_peak_gib)
    backward = [peak for name, peak in segments.items() if name.startswith(Phase.BACKWARD)]
    if backward:
        phases[Phase.BACKWARD] = max(backward)
    excess = max(_excess(low), _excess(high))
    peak = max([*segments.values(), *phases.values()]) + excess
    beyond = line(low.peak_reserved_gib - low.peak_allocated_gib, high.peak_reserved_gib - high.peak_allocated_gib)
    managed = line(low.managed_gib, high.managed_gib)

    host: float | None = None
    if low.host_micro_s is not None and high.host_micro_s is not None:
        # Issuing waits for the device once its queue is full, which two layers are too few for: the line may be too
        # steep, but a layer takes the host no longer than that.
        host = min(line(low.host_micro_s, high.host_micro_s), low.host_micro_s * num_layers / shallow)
    whole = line(min(low.micro_step_s), min(high.micro_step_s))
    share = 0.0 if host is None else host / whole if whole > 0 else 1.0
    # A card at its power limit swings within a second, and the whole model will see the mean. A host stumbles at any
    # depth alike, which the line would multiply: it is drawn through the steps that nothing disturbed.
    middle = min if share > FREE_SHARE else statistics.fmean
    micro, error = _time(low.micro_step_s, high.micro_step_s, reach, middle)
    # The rest is what is left of a step beside its micro batches: what disturbs between these makes it look short.
    typical = statistics.median if middle is min else middle
    rest, rest_error = _time(low.rest_s, high.rest_s, reach, typical) if high.rest_s else (0.0, 0.0)
    if host is not None:
        # A few layers hide behind the head's arithmetic what the host needs for them; on all layers it shows.
        micro = max(micro, host)
    step = high.micro_steps * micro + rest
    waits = min(max((share - FREE_SHARE) / (HOST_SHARE - FREE_SHARE), 0.0), 1.0)
    unseen = ON_CPU if host is None else DEVICE_BOUND + (HOST_BOUND - DEVICE_BOUND) * waits
    noise = 2 * math.hypot(high.micro_steps * error, rest_error) / step
    scale = step / statistics.median(high.step_s)
    return Extrapolation(
        measurement=replace(
            high,
            step_s=tuple(one * scale for one in high.step_s),
            micro_step_s=(micro,),
            rest_s=(rest,) if high.rest_s else (),
            phase_s=lines(low.phase_s, high.phase_s),
            phase_peak_gib=phases,
            segment_peak_gib=segments,
            host_micro_s=host,
            model_gib=line(low.model_gib, high.model_gib),
            adapters_gib=line(low.adapters_gib, high.adapters_gib),
            gradients_gib=line(low.gradients_gib, high.gradients_gib),
            optimizer_gib=line(low.optimizer_gib, high.optimizer_gib),
            peak_allocated_gib=peak,
            peak_reserved_gib=peak + max(beyond, 0.0),
            limit_gib=min(low.limit_gib + low.managed_gib, high.limit_gib + high.managed_gib) - managed,
            context_gib=_larger(low.context_gib, high.context_gib),
            managed_gib=managed,
            trainable_params=round(line(low.trainable_params, high.trainable_params)),
            total_params=round(line(low.total_params, high.total_params)),
            telemetry=None,
            time_error=math.hypot(unseen, noise),
        ),
        host_bound=share >= HOST_SHARE,
        shortest=middle is min,
        unseen=unseen,
        noise=noise,
        rest_noise=2 * rest_error / step,
    )


def _excess(measurement: Measurement) -> float:
    """What the timed steps held beyond the warm-up step that was looked at in segments (a CPU's fragmentation)."""
    parts = [*measurement.segment_peak_gib.values(), *measurement.phase_peak_gib.values()]
    return max(measurement.peak_allocated_gib - max(parts), 0.0)


def _time(
    low: Sequence[float], high: Sequence[float], reach: float, middle: Callable[[Sequence[float]], float]
) -> tuple[float, float]:
    """(seconds at full depth, standard error): the middles extended, each one's error multiplied by its weight."""
    value = middle(low) * (1 - reach) + middle(high) * reach
    # A whole model takes at least what a part of it does, whatever disturbed the shallow probe.
    return max(value, middle(high)), math.hypot((1 - reach) * _error(low), reach * _error(high))


def _error(times: Sequence[float]) -> float:
    """Standard error of a mean of few; a single time is taken to be 1 % uncertain."""
    if len(times) < 2:
        return 0.01 * times[0]
    return statistics.stdev(times) / math.sqrt(len(times))
