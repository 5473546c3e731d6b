"""Convert a speed from one card to another; measurements on the target reduce the error.

A configuration needs the same memory on every card, but its speed differs. The speed of matrix
products is proportional to the 0.7th power of the card's peak TFLOP/s (without sparsity) and to the
0.3rd power of its power limit. The exponent of the peak is below 1, because training uses a smaller
part of a faster card's peak. The power limit matters, because a card with a low limit cannot keep
its clock rate. The speed of moving bytes is proportional to the memory bandwidth. For two cards
that differ only in their memory, the exponent of the bandwidth is OF_MEMORY instead of 1. The
host's time to issue work is assumed to be the same for both cards, unless both hosts were
calibrated.

The exponents 0.7 and 0.3 were fitted to 574 published pairs: the same training on two cards
(`benchmarks/transfer.py pairs`). OF_MEMORY was fitted to measurements of one model on an H100 and
an H200 (`benchmarks/transfer.py compare`). For a pair of cards and a training method, the ratio of
the two speeds deviates from the fit by about `BETWEEN`. All configurations of the method share this
deviation, so one measurement on the target card reveals most of the deviation. `WITHIN` is the
standard deviation between configurations of one method. If a card is calibrated, the measured rates
replace its data sheet.
"""

import math
from collections.abc import Sequence

from autotune.catalog import DeviceSpec
from autotune.core.units import EIGHTY_PERCENT
from autotune.problem.calibration import Calibration
from autotune.problem.speed_transfer import SpeedTransfer

REFERENCE = "h200-sxm"  # the formulas were fitted on this card
PEAK = 989.4  # the reference card's bf16 TFLOP/s without sparsity
POWER_W = 700.0
REACHED = 0.67  # the fraction of PEAK that matrix products reach in training
# The exponents of the peak and of the power limit in the speed of matrix products
OF_PEAK = 0.7
OF_POWER = 0.3
# Between two cards with the same chip, the speed of kernels that move bytes is proportional to the
# memory bandwidth to the power of OF_MEMORY. These kernels also wait for the chip, which is equally
# fast on both cards. An H200 has 1.43 times the bandwidth of an H100, but these kernels were only
# 1.24 times as fast. Others published pairs of measurements: the same work on two cards. For the
# 103 pairs of cards with the same chip, the predicted ratio of the speeds is 8 % off with
# OF_MEMORY, and 11 % off with an exponent of 1. For two cards with different chips, the exponent is
# 1: the predicted ratio is 15 % off, and would be 17 % off with OF_MEMORY.
OF_MEMORY = 0.61
# A card with an unknown power limit is assumed to reach this fraction of its peak. By the formula,
# the cards in the catalogue reach 0.36 to 0.95, with a median of 0.82. Cards of data centres reach
# 0.5 to 0.8, so 0.75 may be wrong by a third in either direction.
WITHOUT_POWER = 0.75
CEILING = 0.95  # the largest fraction of its peak that any card is assumed to reach
# The same for cards of other makers than NVIDIA, whose libraries leave more of the peak unused: the
# largest matrix products alone reach 0.5 to 0.65 on an MI300X.
CEILING_OTHERS = 0.5
# The TFLOP/s that products reach for each watt of the power limit, by generation. Under its
# limit a card with a high peak and little power lowers its clock. A T4 (70 W) sustains about 23 of
# 65 TFLOP/s, a V100 (300 W) about 100 of 125. A GA102 needs more energy for a product than an A100,
# so an A10 (150 W) reaches about half of its 125 TFLOP/s. Ada's 0.76 is an L40S, whose published
# speeds the formula holds.
PER_WATT = {"volta": 0.33, "turing": 0.33, "ampere": 0.43, "ada": 0.76}
MOST_GDDR_GB_S = 1200.0  # a card of this generation with a higher bandwidth is an A100
# The share of the peak FLOP/s that flash attention reaches on most cards, and on Hopper and the
# Blackwell of data centres. FLOPs that the causal mask skips do not count. FlashAttention-2 reaches
# 0.7 on an A100 (its authors say). FlashAttention-2 does not use Hopper's new matrix instructions,
# so it reaches less on Hopper (FlashAttention-3's paper). Cards before compute capability 8.0 have
# no such kernel, and use memory-efficient attention, which takes 2.7 times as long
# (`step_time.MASKED`). No measurement is known for other makers, whose kernels are assumed to be as
# slow.
FLASH_SHARE, FLASH_SHARE_HOPPER = 0.7, 0.35
WITHOUT_FLASH_SHARE = FLASH_SHARE / 2.7
# The share of an H200's time that matrix products take in the published pairs. The share is used
# for configurations without a formula.
USUAL_SHARE = 0.3
# For a pair of cards, each configuration has a ratio of the two speeds. The next two numbers are
# standard deviations of the logarithm of this ratio. BETWEEN is the deviation between pairs of
# cards, with the same method. WITHIN is the deviation between configurations, with the same method
# and the same pair of cards.
BETWEEN = 0.14
WITHIN = 0.09
# The generations of the cards in the published pairs. The speed of a card of another generation
# comes from its data sheet only, so its standard deviation is UNMEASURED, which is twice BETWEEN.
MEASURED_KINDS = frozenset({"volta", "ampere", "ada", "hopper", "blackwell"})
UNMEASURED = 2 * BETWEEN
# The same for cards that run other kernels: cards of other makers than NVIDIA, and cards before
# compute capability 8.0, which have no flash attention
OTHER_KERNELS = 0.4
# The standard deviation of the speed ratio of two cards with the same chip, if a profile divides
# the device's time into its parts. Between an H100 and an H200, the deviation was 2.7 % for one
# model, whose micro batches needed the host for less than 20 % of their time.
PROFILED = 0.03
# These factors convert the rates that a calibration measured to the rates of the step time formula.
# IN_TRAINING is the speed of matrix products in training, divided by their speed if they run alone.
# COPIED is the share of the data sheet's bandwidth that a copy reaches. Both factors were computed
# for an H200. They assume that products that run alone reach 0.72 of the peak, and copies 0.88 of
# the bandwidth. The value 0.72 is the middle of the range that cards reach under their power
# limit. Later, calibrations of an H100 and an H200 measured 0.67 and 0.66 of the peak with
# the largest products, and 0.89 and 0.88 of the bandwidth. The training in a calibration corrects
# the combined error of both factors.
IN_TRAINING = REACHED / 0.72
COPIED = 0.88


def same_chip(one: DeviceSpec, other: DeviceSpec) -> bool:
    """Return whether two cards have the same peaks and generation.

    Two cards with the same chip differ only in their memory or power.
    """
    return (one.arch, one.bf16_tflops, one.fp16_tflops) == (
        other.arch,
        other.bf16_tflops,
        other.fp16_tflops,
    )


def is_measured_kind(device: DeviceSpec) -> bool:
    """Return whether cards of this card's generation are among the published pairs.

    The result is false if the card's power limit is unknown.
    """
    return device.arch in MEASURED_KINDS and device.tdp_w is not None


def _between(device: DeviceSpec) -> float:
    """Return the standard deviation of a speed ratio between this card and a measured one."""
    if is_measured_kind(device):
        return BETWEEN
    return OTHER_KERNELS if _lacks_flash(device) else UNMEASURED


def _lacks_flash(device: DeviceSpec) -> bool:
    """Return whether no flash attention is known for the card."""
    return device.vendor == "amd" or 0.0 < float(device.compute_capability or 0) < 8.0


def interval(value: float, error: float) -> tuple[float, float]:
    """Return the interval (low, high) around a value that contains the true value in 80 % of cases.

    `error` is the standard deviation of the value's logarithm.
    """
    spread = math.exp(EIGHTY_PERCENT * error)
    return value / spread, value * spread


def replaces_data_sheet(calibration: Calibration | None, device: DeviceSpec) -> bool:
    """Return whether a calibration replaces the data sheet of a card.

    A calibration never replaces the data sheet of the reference card, because the formulas were
    fitted on that card with many trainings. For a CPU, there is no formula that could use a
    calibration.
    """
    return (
        calibration is not None
        and calibration.device == device.name != REFERENCE
        and device.kind != "cpu"
    )


def calibrated_parts(calibration: Calibration | None, device: DeviceSpec) -> str | None:
    """Describe the calibrated parts of an estimate for the card, or return None without any.

    Example: 'GPU and host calibrated on this machine, 2026-11-22'.
    """
    if calibration is None:
        return None
    parts = "GPU and host" if replaces_data_sheet(calibration, device) else "host"
    return f"{parts} {calibration.label}"


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
    """Return the conversion of a speed between two cards, or None if a rate is unknown.

    Args:
        source: the card with the known speed.
        target: the card whose speed is wanted.
        known: measured speeds on the target with the same method, each divided by the expected
            speed. These ratios are ignored if the target is calibrated, because the calibration
            includes a training.
        precision: the precision of the products: bf16, fp16 or fp8.
        calibration: a calibration of either card.
        side: the side of the square matrices that the products multiply, for
            `Calibration.products_tflops`.
        alike: whether the calibration's training used the method that the speed is for. If so, this
            training is used like one more measurement.
    """
    if source.name == target.name:
        return SpeedTransfer(products=1.0, bytes=1.0, error=0.0, fp8=1.0, profiled_error=0.0)
    of_source = card_rates(source, precision, calibration, side)
    of_target = card_rates(target, precision, calibration, side)
    if of_source is None or of_target is None:
        return None

    calibrated = replaces_data_sheet(calibration, target)
    between = max(_between(source), BETWEEN if calibrated else _between(target))
    variance = between**2
    noise = WITHIN**2
    shift = 1.0
    count = len(known)
    # `autotune calibrate` also times a short training run. The rates of a calibrated card already
    # include the result of this run, so they need no further correction.
    if calibration is not None and calibrated:
        count = int(alike and calibration.reference is not None)
    else:
        shift = math.exp(sum(map(math.log, known)) * variance / (count * variance + noise))
    remaining = variance * noise / (count * variance + noise)
    error = math.sqrt(remaining + noise)
    alike_chips = same_chip(source, target)

    fp8_of_source, fp8_of_target = (
        card_rates(card, "fp8", calibration, side) for card in (source, target)
    )
    fp8 = None
    if fp8_of_source and fp8_of_target:
        fp8 = shift * fp8_of_target[0] / fp8_of_source[0]
    flash_of_source, flash_of_target = flash_tflops(source), flash_tflops(target)
    attention = None
    if flash_of_source and flash_of_target:
        attention = shift * flash_of_target / flash_of_source
    return SpeedTransfer(
        products=shift * of_target[0] / of_source[0],
        attention=attention,
        bytes=shift * math.pow(of_target[1] / of_source[1], OF_MEMORY if alike_chips else 1.0),
        error=error,
        fp8=fp8,
        profiled_error=PROFILED if alike_chips and (calibrated or not known) else error,
        basis=0 if calibrated else count,
    )


def host_transfer(source: Calibration | None, target: Calibration | None) -> float | None:
    """Return the target host's speed divided by the source's, or None unless both are calibrated.

    A calibration of a CPU is ignored.
    """
    if source is None or target is None or not (source.measures_gpu and target.measures_gpu):
        return None
    return source.layer_ms / target.layer_ms


def card_rates(
    device: DeviceSpec, precision: str, calibration: Calibration | None, side: float | None = None
) -> tuple[float, float] | None:
    """Return a card's TFLOP/s of matrix products and its GB/s in training, or None if unknown.

    The rates come from a calibration or from the data sheet.
    """
    by_data_sheet = products_tflops(device, precision)
    if calibration is None or not replaces_data_sheet(calibration, device):
        bandwidth = device.bandwidth_gb_s
        return (by_data_sheet, bandwidth) if by_data_sheet and bandwidth else None

    products = IN_TRAINING * calibration.products_tflops(side)
    # A calibration does not measure fp8, so the ratio of fp8 to bf16 comes from the data sheet.
    if precision == "fp8":
        plain = products_tflops(device)
        if not by_data_sheet or not plain:
            return None
        products *= by_data_sheet / plain

    # The short training of the calibration corrects the rates as much as a measurement by another
    # user would.
    shift = (calibration.reference or 1.0) ** (BETWEEN**2 / (BETWEEN**2 + WITHIN**2))
    return shift * products, shift * calibration.rates.copy_gb_s / COPIED


def products_tflops(device: DeviceSpec, precision: str = "bf16") -> float | None:
    """Return the TFLOP/s of a training step's matrix products, or None if the peak is unknown."""
    peak = peak_tflops(device, precision)
    power_w = device.tdp_w
    if peak is None or power_w is None:
        return peak and WITHOUT_POWER * peak
    return min(_at_full_clock(device, peak, power_w), _sustained_tflops(device))


def _at_full_clock(device: DeviceSpec, peak: float, power_w: float) -> float:
    """Return the TFLOP/s of products if the power limit does not lower the clock."""
    reached_tflops = (
        REACHED * PEAK * math.pow(peak / PEAK, OF_PEAK) * math.pow(power_w / POWER_W, OF_POWER)
    )
    return min(reached_tflops, (CEILING_OTHERS if device.vendor == "amd" else CEILING) * peak)


def _sustained_tflops(device: DeviceSpec) -> float:
    """Return the TFLOP/s of products that the power limit allows, or infinity if unknown."""
    is_ga100 = device.compute_capability == "8.0" or (device.bandwidth_gb_s or 0) > MOST_GDDR_GB_S
    if device.tdp_w is None or (device.arch == "ampere" and is_ga100):
        return math.inf
    return PER_WATT.get(device.arch, math.inf) * device.tdp_w


def flash_tflops(device: DeviceSpec) -> float | None:
    """Return the TFLOP/s of flash attention, or None if the peak is unknown.

    A clock that the power limit lowers slows attention like products.
    """
    peak, products = peak_tflops(device), products_tflops(device)
    if peak is None or products is None:
        return None
    clock = products / _at_full_clock(device, peak, device.tdp_w) if device.tdp_w else 1.0
    capability = float(device.compute_capability or 0)
    share = FLASH_SHARE_HOPPER if 9.0 <= capability < 12.0 else FLASH_SHARE
    if _lacks_flash(device):
        share = WITHOUT_FLASH_SHARE
    return min(share * peak * clock, products)


def peak_tflops(device: DeviceSpec, precision: str = "bf16") -> float | None:
    """Return the peak in TFLOP/s without sparsity; for a card without bf16 units, the fp16 peak."""
    if precision == "fp8":
        return device.fp8_tflops
    return device.bf16_tflops or device.fp16_tflops
