"""Converting a speed from one card to another: a projection with an interval, which measurements on the target narrow.

Memory is the same on every card, speed is not. Its ratio between two cards goes with the quarter power of the ratio of
their dense peaks times the three-quarter power of that of their bandwidths, by 574 published pairs
(`benchmarks/projection.py`): newer cards multiply faster than training can use. On one pair of cards a method deviates
from this by about `BETWEEN`, the same for every configuration of the method, so one measurement on the target helps;
`WITHIN` is the scatter that remains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.catalog import DeviceSpec

OF_FLOPS, OF_BANDWIDTH = 0.25, 0.75
BETWEEN, WITHIN = 0.14, 0.09  # standard deviations of the logarithm of a ratio
# The generations of cards in the published pairs. Of others only data sheets are known, which is twice as uncertain.
MEASURED_KINDS = frozenset({"volta", "ampere", "ada", "hopper", "blackwell"})
UNMEASURED = 2 * BETWEEN
EIGHTY_PERCENT = 1.2816  # standard deviations that hold 80 % of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTransfer:
    """The speed of the target divided by that of the source, with the standard deviation of its logarithm.

    `basis` counts the measurements on the target that the ratio rests on.
    """

    ratio: float
    error: float
    basis: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """(low, high) of the ratio: 80 % of the cases are between them."""
        return interval(self.ratio, self.error)


def is_measured_kind(device: DeviceSpec) -> bool:
    """Whether speeds of cards of this generation were published, to compare with those of others."""
    return device.arch in MEASURED_KINDS


def interval(value: float, error: float) -> tuple[float, float]:
    """(low, high) around a value whose logarithm has the standard deviation `error`: 80 % of the cases."""
    spread = math.exp(EIGHTY_PERCENT * error)
    return value / spread, value * spread


def speed_transfer(
    source: DeviceSpec, target: DeviceSpec, known: Sequence[float] = (), *, precision: str = "bf16"
) -> SpeedTransfer | None:
    """The ratio of speeds from `source` to `target`; None where a rate of either card is unknown.

    `known` are ratios, target over source, measured with the same method. `precision` is that of the products: bf16,
    fp16 or fp8.
    """
    if source.name == target.name:
        return SpeedTransfer(ratio=1.0, error=0.0)
    prior = log_ratio(source, target, precision)
    if prior is None:
        return None
    between = BETWEEN if is_measured_kind(source) and is_measured_kind(target) else UNMEASURED
    variance, noise, count = between**2, WITHIN**2, len(known)
    shift = sum(math.log(ratio) - prior for ratio in known) * variance / (count * variance + noise)
    left = variance * noise / (count * variance + noise)
    return SpeedTransfer(ratio=math.exp(prior + shift), error=math.sqrt(left + noise), basis=count)


def log_ratio(source: DeviceSpec, target: DeviceSpec, precision: str = "bf16") -> float | None:
    """The logarithm of the ratio of speeds, from data sheets alone; None where a rate is unknown."""
    rates = (_rate(source, precision), _rate(target, precision), source.bandwidth_gb_s, target.bandwidth_gb_s)
    if not all(rates):
        return None
    of_source, of_target, bandwidth, target_bandwidth = (rate or math.nan for rate in rates)
    return OF_FLOPS * math.log(of_target / of_source) + OF_BANDWIDTH * math.log(target_bandwidth / bandwidth)


def _rate(device: DeviceSpec, precision: str) -> float | None:
    """Dense peak in TFLOP/s. A card without bf16 units trains in fp16."""
    if precision == "fp8":
        return device.fp8_tflops
    return device.bf16_tflops or device.fp16_tflops
