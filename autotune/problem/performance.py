"""The performance of the full run, computed from measurements of probes.

The score of a configuration is its useful tokens per second. Padding and truncated tokens are not
useful, because they are not trained on.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.core.probe_types import Measurement, Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.problem.workload import RunShape, Workload

# The step times of two probes of one configuration may differ by this fraction, even if the steps
# of each probe differ less from one another. On an H200, the two confirming probes differed by
# 0.1 %. The shorter probes of the search differed from the confirming probes by 0.4 to 1 %, because
# a GPU warms up.
AGAIN = 0.01
# Two configurations whose speeds differ by less than this fraction are treated as equally fast,
# because the intervals of their speeds overlap. Two H200s in one host measured the same two
# configurations at the same time. On one H200, the speed of one configuration was 1.2 % above the
# speed of the other; on the other H200, both speeds were the same.
TIE = 2 * AGAIN
# If the step times of one configuration's measurements differ from each other by more than this
# fraction, something disturbed a measurement. The configuration is then measured once more, the
# median of the step times is used, and the interval of the speed covers all measurements.
DISAGREEMENT = 0.05
# The relative spread that is assumed if only one time was measured: twice the spread of steps on an
# H200.
UNSEEN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """The performance of the full run with its global batch; all tokens are useful tokens.

    `spread` is the range of step times, relative to `step_time_s`: (-0.01, 0.02) is 1 % less to 2 %
    more. If the speed was converted from another card, `spread` includes the error of the
    conversion, and `own_spread` is the probes' spread without this error. `mfu` is None if the
    device's peak FLOP/s are unknown.
    """

    samples_per_second: float
    tokens_per_second: float
    step_time_s: float
    spread: tuple[float, float]
    mfu: float | None
    own_spread: tuple[float, float] | None = None

    @classmethod
    def from_step_time(
        cls,
        shape: RunShape,
        step_time_s: float,
        *,
        spread: tuple[float, float],
        mfu: float | None = None,
    ) -> "Performance":
        """Return the performance of a run of this shape with optimizer steps of `step_time_s`."""
        return cls(
            samples_per_second=shape.examples_per_step / step_time_s,
            tokens_per_second=shape.useful_tokens_per_step / step_time_s,
            step_time_s=step_time_s,
            spread=spread,
            mfu=mfu,
        )

    def widen_spread(self, low: float, high: float) -> "Performance":
        """Widen the spread by another range of step times, relative to `step_time_s`."""
        return replace(
            self, spread=(-math.hypot(self.spread[0], low), math.hypot(self.spread[1], high))
        )

    def cover(self, other: "Performance") -> "Performance":
        """Widen the spreads to include the step times of another measurement of the same run."""
        slower = other.step_time_s / self.step_time_s

        def include(own: tuple[float, float], others: tuple[float, float]) -> tuple[float, float]:
            low, high = (slower * (1 + end) - 1 for end in others)
            return min(own[0], low), max(own[1], high)

        own_spread = None
        if self.own_spread is not None and other.own_spread is not None:
            own_spread = include(self.own_spread, other.own_spread)
        return replace(self, spread=include(self.spread, other.spread), own_spread=own_spread)

    def times(self, other: "Performance") -> tuple[float, float]:
        """Return the interval of the ratio of this speed to another speed on the same device.

        The interval contains 1 if and only if the intervals of the two speeds overlap.
        """
        ratio = self.tokens_per_second / other.tokens_per_second
        (fastest, slowest), (low, high) = (one.own_spread or one.spread for one in (self, other))
        return ratio * (1 + low) / (1 + slowest), ratio * (1 + high) / (1 + fastest)


def step_time_s(
    measurement: Measurement, accumulation: int, new_length_share: float = 0.0
) -> float:
    """Return the seconds of an optimizer step, from the median times of its parts.

    The parts are `accumulation` micro batches, and the rest of the step after them. The share
    `new_length_share` of the micro batches have a new row length, and each of these takes longer,
    by the measured time `new_length_s`.
    """
    micro = statistics.median(measurement.micro_step_s) + new_length_share * (
        measurement.new_length_s or 0.0
    )
    rest = statistics.median(measurement.rest_s) if measurement.rest_s else 0.0
    return accumulation * micro + rest


def step_spread(
    measurements: Sequence[Measurement], accumulation: int, new_length_share: float = 0.0
) -> tuple[float, float]:
    """Return the range of the probes' step times, relative to the reported step time.

    If a probe timed a single step, the times of its micro batches are used instead. The range is at
    least AGAIN, the usual difference between two probes, and at least the error of an extrapolated
    time. If only one time was measured, the range is at least UNSEEN.
    """
    reported_s = statistics.median(
        step_time_s(measurement, accumulation, new_length_share) for measurement in measurements
    )

    samples = []
    for measurement in measurements:
        times = measurement.step_s if len(measurement.step_s) > 1 else measurement.micro_step_s
        scale = step_time_s(measurement, accumulation, new_length_share) / statistics.median(times)
        samples += [seconds * scale for seconds in times]

    error = max(
        *(measurement.time_error for measurement in measurements),
        UNSEEN if len(samples) == 1 else AGAIN,
    )
    return min(min(samples) / reported_s - 1.0, -error), max(max(samples) / reported_s - 1.0, error)


def performance(
    config: TrainConfig,
    measurements: Sequence[Measurement],
    workload: Workload,
    *,
    flops_per_token: float | None = None,
    peak_tflops: float | None = None,
) -> Performance:
    """Return the performance of a configuration, from the median of its measurements.

    Raises ValueError if the configuration's micro batch does not divide the global batch.
    """
    shape = workload.run_shape(config)
    new = workload.new_length_share(config)
    step = statistics.median(
        step_time_s(measurement, shape.accumulation, new) for measurement in measurements
    )

    mfu = None
    if flops_per_token and peak_tflops:
        mfu = (
            flops_per_token
            * shape.useful_tokens_per_step
            / step
            / (peak_tflops * 1e12 * shape.world_size)
        )

    return Performance.from_step_time(
        shape, step, spread=step_spread(measurements, shape.accumulation, new), mfu=mfu
    )


def tokens_per_s(result: ProbeResult, workload: Workload) -> float | None:
    """Return the full run's useful tokens per second, or None if the probe gives no speed."""
    if result.outcome not in (Outcome.OK, Outcome.SLOW) or result.measurement is None:
        return None
    return performance(result.config, [result.measurement], workload).tokens_per_second


def margins(result: ProbeResult) -> dict[str, float]:
    """Return a probe's margins by name; a configuration is feasible if no margin is above 0.

    `memory` is (needed memory - limit) / limit. `health` is 0 after a success or an out-of-memory
    error, and 1 after any other outcome.
    """
    if result.oom is not None:
        return {"memory": result.oom.margin, "health": 0.0}
    if result.outcome is Outcome.OOM:
        return {"memory": 1e-3, "health": 0.0}

    if result.measurement is not None:
        memory = result.measurement.peak_reserved_gib / result.measurement.limit_gib - 1.0
        return {
            "memory": memory,
            "health": 0.0 if result.outcome in (Outcome.OK, Outcome.SLOW) else 1.0,
        }
    return {"memory": 0.0, "health": 1.0}
