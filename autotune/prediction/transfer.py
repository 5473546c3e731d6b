"""Converting a speed from one card to another: a projection with an interval, which measurements on the target narrow.

Memory is the same on every card, speed is not. What multiplies matrices goes with the 0.7th power of the dense peak and
the 0.3rd of the power that the card may draw: newer cards multiply faster than training can use, and cards with little
power cannot keep their clocks. What moves bytes goes with the bandwidth. The host's time to issue the work stays what
it is. The exponents were fitted on 574 published pairs (`benchmarks/projection.py`). On one pair of cards a method
deviates from this by about `BETWEEN`, the same for every configuration of the method, so one measurement on the target
helps; `WITHIN` is the scatter that remains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.catalog import DeviceSpec

PEAK, POWER_W, REACHED = 989.4, 700.0, 0.67  # of an H200, and the share of its dense peak that products reach
OF_PEAK, OF_POWER = 0.7, 0.3  # exponents
CEILING = 0.95  # no card is taken to multiply at more of its dense peak
USUAL_SHARE = 0.3  # of the time on an H200, in products, in the published pairs; for what no formula knows
BETWEEN, WITHIN = 0.14, 0.09  # standard deviations of the logarithm of a ratio
# The generations of cards in the published pairs. Of others only data sheets are known, which is twice as uncertain.
MEASURED_KINDS = frozenset({"volta", "ampere", "ada", "hopper", "blackwell"})
UNMEASURED = 2 * BETWEEN
EIGHTY_PERCENT = 1.2816  # standard deviations that hold 80 % of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTransfer:
    """How many times as fast the target multiplies and moves bytes as the source.

    `error` is the standard deviation of the logarithm of the device's speed. `basis` counts the measurements on the
    target that it rests on.
    """

    products: float
    bytes: float
    error: float
    basis: int = 0

    def ratio(self, share: float) -> float:
        """The speed of the target over that of the source, for work of which this share of its time is in products."""
        return 1 / (share / self.products + (1 - share) / self.bytes)


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
    """How a speed transfers from `source` to `target`; None where a rate of either card is unknown.

    `known` are speeds measured on the target with the same method, over those that were expected there. `precision` is
    that of the products: bf16, fp16 or fp8.
    """
    if source.name == target.name:
        return SpeedTransfer(products=1.0, bytes=1.0, error=0.0)
    of_source, of_target = products_tflops(source, precision), products_tflops(target, precision)
    bandwidth, target_bandwidth = source.bandwidth_gb_s, target.bandwidth_gb_s
    if not (of_source and of_target and bandwidth and target_bandwidth):
        return None
    between = BETWEEN if is_measured_kind(source) and is_measured_kind(target) else UNMEASURED
    variance, noise, count = between**2, WITHIN**2, len(known)
    shift = math.exp(sum(map(math.log, known)) * variance / (count * variance + noise))
    left = variance * noise / (count * variance + noise)
    return SpeedTransfer(
        products=shift * of_target / of_source,
        bytes=shift * target_bandwidth / bandwidth,
        error=math.sqrt(left + noise),
        basis=count,
    )


def products_tflops(device: DeviceSpec, precision: str = "bf16") -> float | None:
    """TFLOP/s that the products of a training step reach; None where the peak or the power is unknown."""
    peak, power_w = peak_tflops(device, precision), device.tdp_w
    if peak is None or power_w is None:
        return None
    reached = REACHED * PEAK * math.pow(peak / PEAK, OF_PEAK) * math.pow(power_w / POWER_W, OF_POWER)
    return min(reached, CEILING * peak)


def peak_tflops(device: DeviceSpec, precision: str = "bf16") -> float | None:
    """Dense peak in TFLOP/s. A card without bf16 units trains in fp16."""
    if precision == "fp8":
        return device.fp8_tflops
    return device.bf16_tflops or device.fp16_tflops
