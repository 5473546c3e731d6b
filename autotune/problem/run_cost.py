"""What the full run takes: hours, USD and kWh, from a step time. Without a price no USD, without a power no kWh."""

from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, Price
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import MemoryBreakdown
from autotune.problem.performance import Performance
from autotune.problem.workload import RunShape, Workload

FITS, TIGHT, OOM = "fits", "tight", "out of memory"
TABLE_EXAMPLES = (10_000, 50_000, 100_000)  # the sizes for which a report has the cost of the same run


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProjection:
    """What the full run will take, without start-up (`startup_s`, if known), checkpoint saves and evaluation.

    Intervals are (low, high) from the spread of the measured steps. `spot_usd` leaves out what interruptions cost.
    """

    examples: int
    epochs: float
    num_steps: int
    full_run_hours: float
    interval_hours: tuple[float, float]
    usd_per_hour: float | None
    full_run_usd: float | None
    interval_usd: tuple[float, float] | None
    spot_usd: float | None
    cost_per_1000_samples_usd: float | None
    kwh: float | None
    evidence: Evidence = Evidence.MEASURED
    startup_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEstimate:
    """One configuration on one device: whether it fits, how fast it trains, and what the full run costs.

    `state` is FITS, TIGHT, OOM, or what the device lacks. `need_gib` is reserved at the peak, of the `limit_gib` that
    tensors may take; `memory` is what it consists of, None where it was measured. `tokens_per_s` are useful tokens of
    one device, and 80 % of cases lie in `interval`. Unknown speeds and costs are None. `num_observations` counts the
    measurements by others on this device that the speed rests on.
    """

    device: DeviceSpec
    config: TrainConfig
    state: str
    need_gib: float
    limit_gib: float
    price: Price | None = None
    memory: MemoryBreakdown | None = None
    tokens_per_s: float | None = None
    interval: tuple[float, float] | None = None
    samples_per_s: float | None = None
    cost: CostProjection | None = None
    num_observations: int = 0

    @property
    def margin(self) -> float:
        """Signed: need / limit - 1."""
        return self.need_gib / self.limit_gib - 1


def run_cost(
    shape: RunShape,
    performance: Performance,
    price: Price | None,
    power_w: float | None = None,
    *,
    num_steps: int | None = None,
) -> CostProjection:
    """The cost of a run of this shape, or of its first `num_steps`. All arguments are of all its devices together."""
    num_steps = shape.num_steps if num_steps is None else num_steps
    hours = num_steps * performance.step_time_s / 3600
    low, high = performance.spread
    interval = (hours * (1 + low), hours * (1 + high))
    usd_per_hour = price.usd_per_hour if price else None
    spot = price.spot_usd_per_hour if price else None
    hours_per_sample = 1 / performance.samples_per_second / 3600
    return CostProjection(
        examples=shape.examples,
        epochs=shape.epochs,
        num_steps=num_steps,
        full_run_hours=hours,
        interval_hours=interval,
        usd_per_hour=usd_per_hour,
        full_run_usd=None if usd_per_hour is None else hours * usd_per_hour,
        interval_usd=None if usd_per_hour is None else (interval[0] * usd_per_hour, interval[1] * usd_per_hour),
        spot_usd=None if spot is None else hours * spot,
        cost_per_1000_samples_usd=None if usd_per_hour is None else 1000 * hours_per_sample * usd_per_hour,
        kwh=None if power_w is None else power_w * hours / 1000,
    )


def project(
    workload: Workload,
    config: TrainConfig,
    performance: Performance,
    price: Price | None,
    power_w: float | None = None,
    *,
    examples: int | None = None,
) -> CostProjection:
    """The cost of `workload`, or of so many examples like its own, with `config` at the measured performance."""
    examples = examples or workload.examples
    shape = replace(workload.run_shape(config), examples=examples - workload.held_out(examples))
    return replace(run_cost(shape, performance, price, power_w), examples=examples)
