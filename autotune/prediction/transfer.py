"""Converting a speed from one card to another: a projection with an interval, which measurements on the target narrow.

Memory is the same on every card, speed is not. What multiplies matrices goes with the 0.7th power of the dense peak and
the 0.3rd of the power that the card may draw: newer cards multiply faster than training can use, and cards with little
power cannot keep their clocks. What moves bytes goes with the bandwidth; between cards that differ in their memory
alone it goes with a lower power of that. The host's time to issue the work stays what it is, unless both hosts were
calibrated. The exponents were fitted on 574 published pairs (`benchmarks/transfer.py pairs`), that of memory alone on
one model on an H100 and an H200 (`benchmarks/transfer.py compare`). On one pair of cards a method deviates from this by
about `BETWEEN`, the same for every configuration of the method, so one measurement on the target helps; `WITHIN` is the
scatter that remains. What a calibration measured of a card replaces its data sheet.
"""

import math
from collections.abc import Sequence

from autotune.catalog import DeviceSpec
from autotune.core.units import EIGHTY_PERCENT
from autotune.problem.calibration import Calibration
from autotune.problem.speed_transfer import SpeedTransfer

REFERENCE = "h200-sxm"  # the card that the formulas were fitted on
PEAK, POWER_W, REACHED = (
    989.4,
    700.0,
    0.67,
)  # its own, and the share of its dense peak that products reach
OF_PEAK, OF_POWER = 0.7, 0.3  # exponents
# The power of the bandwidth by which what moves bytes is faster where two cards have the same chip. Such kernels also
# wait for the chip, which is then no faster: on an H200 they were 1.24 times as fast as on an H100, with 1.43 times the
# bandwidth. The 103 published pairs of one chip are 8 % off with it, 11 % without. From one generation to the next the
# chip grows with its memory: there such a power would make the published pairs 17 % off instead of 15 %.
OF_MEMORY = 0.61
WITHOUT_POWER = 0.75  # the share for a card of unknown power: the middle of 0.58 to 0.95, as the catalogue's cards have
CEILING = 0.95  # no card is taken to multiply at more of its dense peak
USUAL_SHARE = (
    0.3  # of the time on an H200, in products, in the published pairs; for what no formula knows
)
BETWEEN, WITHIN = 0.14, 0.09  # standard deviations of the logarithm of a ratio
# The generations of cards in the published pairs. Of others only data sheets are known, which is twice as uncertain.
MEASURED_KINDS = frozenset({"volta", "ampere", "ada", "hopper", "blackwell"})
UNMEASURED = 2 * BETWEEN
# The same of both together for two cards with the same chip, where a profile tells what the device does: 2.7 % between
# an H100 and an H200, for one model and micro batches in which the host has less than a fifth of the pace.
PROFILED = 0.03
# What products reach in training, of what they reach alone; what a copy reaches of the bandwidth of a data sheet, in
# which the formula of step time counts. Both are assumed: 0.72 of an H200's peak, in the middle of what cards keep
# under their power cap, and 0.88 of its bandwidth. An H100 and an H200 that were calibrated since reach 0.67 and 0.66
# of the peak with the largest products, 0.89 and 0.88 of the bandwidth. The training in a calibration corrects what is
# wrong with both together.
IN_TRAINING, COPIED = REACHED / 0.72, 0.88


def same_chip(one: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether two cards have the same peaks and are of one generation, so that they differ in their memory or power."""
    return (one.arch, one.bf16_tflops, one.fp16_tflops) == (
        other.arch,
        other.bf16_tflops,
        other.fp16_tflops,
    )


def is_measured_kind(device: DeviceSpec) -> bool:
    """Whether speeds of cards of this generation were published, to compare with those of others.

    They say little of a card whose power is unknown.
    """
    return device.arch in MEASURED_KINDS and device.tdp_w is not None


def interval(value: float, error: float) -> tuple[float, float]:
    """(low, high) around a value whose logarithm has the standard deviation `error`: 80 % of the cases."""
    spread = math.exp(EIGHTY_PERCENT * error)
    return value / spread, value * spread


def calibrates(calibration: Calibration | None, device: DeviceSpec) -> bool:
    """Whether a calibration replaces the data sheet of a card.

    Not that of the reference: the formulas were fitted on that card, which says more than one training. And not that of
    a CPU, for which there is no formula.
    """
    return (
        calibration is not None
        and calibration.device == device.name != REFERENCE
        and device.kind != "cpu"
    )


def calibrated_parts(calibration: Calibration | None, device: DeviceSpec) -> str | None:
    """'card and host calibrated on this machine, 2026-11-22': what of an estimate for the card was; None if nothing."""
    if calibration is None:
        return None
    return f"{'card and host' if calibrates(calibration, device) else 'host'} {calibration.label}"


def speed_transfer(
    source: DeviceSpec,
    target: DeviceSpec,
    known: Sequence[float] = (),
    *,
    precision: str = "bf16",
    calibration: Calibration | None = None,
    side: float | None = None,
    alike: bool = False,
) -> SpeedTransfer | None:
    """How a speed transfers from `source` to `target`; None where a rate of either card is unknown.

    `known` are speeds measured on the target with the same method, over those that were expected there. They do not
    count where the target is calibrated: its calibration has a training, which counts as one if it was `alike`.
    `precision` is that of the products (bf16, fp16 or fp8), `side` their size as in `Calibration.products_tflops`.
    """
    if source.name == target.name:
        return SpeedTransfer(products=1.0, bytes=1.0, error=0.0, fp8=1.0, profiled_error=0.0)
    of_source = card_rates(source, precision, calibration, side)
    of_target = card_rates(target, precision, calibration, side)
    if of_source is None or of_target is None:
        return None
    calibrated = calibrates(calibration, target)
    measured = is_measured_kind(source) and (calibrated or is_measured_kind(target))
    between = BETWEEN if measured else UNMEASURED
    variance, noise = between**2, WITHIN**2
    shift, count = 1.0, len(known)
    if calibration is not None and calibrated:  # its rates hold what its training showed
        count = int(alike and calibration.reference is not None)
    else:
        shift = math.exp(sum(map(math.log, known)) * variance / (count * variance + noise))
    left = variance * noise / (count * variance + noise)
    error, alike_chips = math.sqrt(left + noise), same_chip(source, target)
    fp8_of_source, fp8_of_target = (
        card_rates(card, "fp8", calibration, side) for card in (source, target)
    )
    return SpeedTransfer(
        products=shift * of_target[0] / of_source[0],
        bytes=shift * math.pow(of_target[1] / of_source[1], OF_MEMORY if alike_chips else 1.0),
        error=error,
        fp8=shift * fp8_of_target[0] / fp8_of_source[0]
        if fp8_of_source and fp8_of_target
        else None,
        profiled_error=PROFILED if alike_chips and (calibrated or not known) else error,
        basis=0 if calibrated else count,
    )


def host_transfer(source: Calibration | None, target: Calibration | None) -> float | None:
    """How many times as fast the host of `target` issues work as that of `source`; None unless both had a GPU."""
    if source is None or target is None or not (source.on_gpu and target.on_gpu):
        return None
    return source.layer_ms / target.layer_ms


def card_rates(
    device: DeviceSpec, precision: str, calibration: Calibration | None, side: float | None = None
) -> tuple[float, float] | None:
    """TFLOP/s of products and GB/s of a card in training, calibrated or else by its data sheet; None where unknown."""
    by_data_sheet = products_tflops(device, precision)
    if calibration is None or not calibrates(calibration, device):
        bandwidth = device.bandwidth_gb_s
        return (by_data_sheet, bandwidth) if by_data_sheet and bandwidth else None
    products = IN_TRAINING * calibration.products_tflops(side)
    if precision == "fp8":  # which is not calibrated: it is as much faster as the data sheet has it
        plain = products_tflops(device)
        if not by_data_sheet or not plain:
            return None
        products *= by_data_sheet / plain
    # The calibration's training weighs as one measurement of others does.
    shift = (calibration.reference or 1.0) ** (BETWEEN**2 / (BETWEEN**2 + WITHIN**2))
    return shift * products, shift * calibration.rates.copy_gb_s / COPIED


def products_tflops(device: DeviceSpec, precision: str = "bf16") -> float | None:
    """TFLOP/s that the products of a training step reach; None where the peak is unknown."""
    peak, power_w = peak_tflops(device, precision), device.tdp_w
    if peak is None or power_w is None:
        return peak and WITHOUT_POWER * peak
    reached = (
        REACHED * PEAK * math.pow(peak / PEAK, OF_PEAK) * math.pow(power_w / POWER_W, OF_POWER)
    )
    return min(reached, CEILING * peak)


def peak_tflops(device: DeviceSpec, precision: str = "bf16") -> float | None:
    """Dense peak in TFLOP/s. A card without bf16 units trains in fp16."""
    if precision == "fp8":
        return device.fp8_tflops
    return device.bf16_tflops or device.fp16_tflops
