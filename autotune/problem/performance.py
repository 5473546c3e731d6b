"""From a measurement to a score, and from many candidates to one winner.

Score: useful tokens a second, so that neither padding nor cut-off tokens count. Learning knobs are floors, never traded
for speed unasked; above the floors the cheapest wins, unless a more capable one is within `slack` of it.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Measurement, Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.prediction.transfer import SpeedTransfer
from autotune.problem.run_shape import RunShape
from autotune.problem.search_space import SearchSpace
from autotune.problem.workload import Workload

# By how much a time differs from one probe to the next, however well the steps of each agree: on an H200 two
# confirmations by 0.1 %, the shorter probes of the search from them by 0.4 to 1 %, since a card grows warm.
AGAIN = 0.01
UNSEEN = 0.02  # relative spread of a time that was taken once: an assumption, about twice what H200 steps scatter by


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """Of the full run, global batch included. `tokens_per_second` counts useful tokens; `spread` is relative."""

    samples_per_second: float
    tokens_per_second: float
    step_time_s: float
    spread: tuple[float, float]
    mfu: float | None

    @classmethod
    def of_steps(
        cls, shape: RunShape, step_time_s: float, *, spread: tuple[float, float], mfu: float | None = None
    ) -> "Performance":
        """The performance of a run of this shape whose optimizer steps take `step_time_s` each."""
        return cls(
            samples_per_second=shape.examples_per_step / step_time_s,
            tokens_per_second=shape.useful_tokens_per_step / step_time_s,
            step_time_s=step_time_s,
            spread=spread,
            mfu=mfu,
        )

    def carried(self, to: SpeedTransfer) -> "Performance":
        """On another card. The spread of the steps and what is not known of the card add up; MFU is unknown."""
        (low, high), (slower, faster) = self.spread, to.interval
        return Performance(
            samples_per_second=self.samples_per_second * to.ratio,
            tokens_per_second=self.tokens_per_second * to.ratio,
            step_time_s=self.step_time_s / to.ratio,
            spread=(-math.hypot(low, to.ratio / faster - 1), math.hypot(high, to.ratio / slower - 1)),
            mfu=None,
        )


def step_time_s(measurement: Measurement, accumulation: int) -> float:
    """Seconds of one optimizer step of the full run: its micro batches and the rest of a step, each measured."""
    micro = statistics.median(measurement.micro_step_s)
    rest = statistics.median(measurement.rest_s) if measurement.rest_s else 0.0
    return accumulation * micro + rest


def step_spread(measurements: Iterable[Measurement], accumulation: int) -> tuple[float, float]:
    """Range of the timed steps of all these probes, relative to the step time that is reported for them.

    Where a probe timed one step alone, of its micro batches. At least what probes differ by; where they were
    extrapolated the error that this may have, and of a single time what is assumed.
    """
    measurements = list(measurements)
    reported = statistics.median(step_time_s(measurement, accumulation) for measurement in measurements)
    samples = []
    for measurement in measurements:
        times = measurement.step_s if len(measurement.step_s) > 1 else measurement.micro_step_s
        scale = step_time_s(measurement, accumulation) / statistics.median(times)
        samples += [one * scale for one in times]
    error = max(*(measurement.time_error for measurement in measurements), UNSEEN if len(samples) == 1 else AGAIN)
    return min(min(samples) / reported - 1.0, -error), max(max(samples) / reported - 1.0, error)


def performance(
    config: TrainConfig,
    measurements: list[Measurement],
    workload: Workload,
    *,
    flops_per_token: float | None = None,
    peak_tflops: float | None = None,
) -> Performance:
    """What the full run will do, from one or more measurements of the same configuration (their median counts)."""
    shape = workload.run_shape(config)
    step = statistics.median(step_time_s(measurement, shape.accumulation) for measurement in measurements)
    mfu = None
    if flops_per_token and peak_tflops:
        # Padding is arithmetic too: model FLOPs are counted over whole rows.
        mfu = flops_per_token * shape.tokens_per_step / step / (peak_tflops * 1e12 * shape.world_size)
    return Performance.of_steps(shape, step, spread=step_spread(measurements, shape.accumulation), mfu=mfu)


def score(result: ProbeResult, workload: Workload) -> float | None:
    """Useful tokens a second of the full run, extrapolated where it was pruned; None where there is no number."""
    if result.outcome not in (Outcome.OK, Outcome.SLOW) or result.measurement is None:
        return None
    return performance(result.config, [result.measurement], workload).tokens_per_second


def margins(result: ProbeResult) -> dict[str, float]:
    """Signed constraint margins: 0 or less is feasible. One for memory, one for a run that gave no number."""
    if result.oom is not None:
        return {"memory": result.oom.margin, "health": 0.0}
    if result.outcome is Outcome.OOM:
        return {"memory": 1e-3, "health": 0.0}
    if result.measurement is not None:
        memory = result.measurement.peak_reserved_gib / result.measurement.limit_gib - 1.0
        return {"memory": memory, "health": 0.0 if result.outcome in (Outcome.OK, Outcome.SLOW) else 1.0}
    return {"memory": 0.0, "health": 1.0}


def more_capable(space: SearchSpace, config: TrainConfig) -> list[TrainConfig]:
    """This one with every learning knob at its most capable, then each alone: within the slack one of them wins.

    Then the ranks between, for what they cost.
    """
    raised = {
        knob.name: max((replace(config, **{knob.name: value}).capability, value) for value in knob.choices())[1]
        for knob in space.knobs
        if KNOBS[knob.name].capability_priority is not None and len(knob.choices()) > 1
    }
    wanted = [raised, *({name: value} for name, value in raised.items())]
    if "lora_rank" in raised and config.lora_rank:
        ranks = space.knob("lora_rank").choices()  # type: ignore[union-attr]
        wanted += [{"lora_rank": rank} for rank in sorted(ranks) if rank > config.lora_rank]
    return list(dict.fromkeys(space.config(space.clip(replace(config, **changes))) for changes in wanted))


def leanest(space: SearchSpace) -> dict[str, Any]:
    """The choice of the space that needs the least memory, judged knob by knob."""
    chosen: dict[str, Any] = {}
    for knob in space.knobs:
        if knob.is_active(chosen):
            chosen[knob.name] = min(knob.choices(), key=KNOBS[knob.name].memory_rank)
    return chosen
