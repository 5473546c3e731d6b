"""Speeds carried from card to card: the prior, what a measurement there changes, and intervals that
mean something.
"""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
import yaml

from autotune.catalog import list_devices, resolve_device
from autotune.prediction.transfer import (
    BETWEEN,
    CEILING,
    COPIED,
    IN_TRAINING,
    MEASURED_KINDS,
    OF_MEMORY,
    OTHER_KERNELS,
    PROFILED,
    UNMEASURED,
    USUAL_SHARE,
    WITHIN,
    WITHOUT_POWER,
    host_transfer,
    interval,
    peak_tflops,
    products_tflops,
    speed_transfer,
)
from autotune.problem.speed_transfer import SpeedTransfer
from tests.helpers.factories import calibration

PAIRS = Path(__file__).parents[3] / "benchmarks" / "data" / "published_pairs.yaml"
H100, H200, A100, T4 = map(resolve_device, ("h100", "h200", "a100", "t4"))


def test_constants_by_hand() -> None:
    """Of the reference: 0.67 of its peak are reached, 0.72 alone, and a copy reaches 0.88 of its
    bandwidth.
    """
    assert (pytest.approx(0.930556, abs=1e-6), 0.88, 0.3) == (IN_TRAINING, COPIED, USUAL_SHARE)
    assert (BETWEEN, UNMEASURED, WITHIN, CEILING) == (0.14, 0.28, 0.09, 0.95)
    assert SpeedTransfer(products=2.0, bytes=4.0, error=0.1).basis == 0
    assert SpeedTransfer(products=2.0, bytes=4.0, error=0.1).ratio(0.5) == pytest.approx(8 / 3)


def test_the_same_card_is_as_fast_as_itself() -> None:
    same = speed_transfer(H100, H100, [0.5])
    assert same is not None and (same.products, same.bytes, same.error) == (1.0, 1.0, 0.0)


def test_there_and_back_is_nowhere() -> None:
    there, back = speed_transfer(A100, H100), speed_transfer(H100, A100)
    assert there is not None and back is not None
    assert there.products * back.products == pytest.approx(1) == there.bytes * back.bytes
    assert there.error == back.error == pytest.approx(math.hypot(BETWEEN, WITHIN))


def test_a_faster_card_is_faster_by_less_than_its_peak_says() -> None:
    carried = speed_transfer(A100, H100)
    assert carried is not None
    assert 1 < carried.products < (H100.bf16_tflops or 0) / (A100.bf16_tflops or 1)
    assert carried.bytes == pytest.approx((H100.bandwidth_gb_s or 0) / (A100.bandwidth_gb_s or 1))


def test_of_the_same_peak_only_what_moves_bytes_is_faster() -> None:
    """An H200 is an H100 with 1.43 times as fast memory: what moves bytes is 1.25 times as fast,
    all together 1.11.
    """
    carried = speed_transfer(H100, H200)
    assert (
        carried is not None and carried.products == 1.0 == carried.fp8 and carried.ratio(1.0) == 1.0
    )
    assert carried.ratio(0.0) == pytest.approx((4800 / 3350) ** 0.61) and carried.ratio(
        0.5
    ) == pytest.approx(1.109, abs=1e-3)


def test_a_profile_makes_a_projection_certain_between_cards_that_differ_in_their_memory() -> None:
    carried, corrected = speed_transfer(H100, H200), speed_transfer(H100, H200, [0.9])
    assert carried is not None and carried.profiled_error == PROFILED < carried.error
    assert corrected is not None and corrected.profiled_error == corrected.error > PROFILED
    # Of another chip nobody profiled anything.
    across = speed_transfer(A100, H100)
    assert across is not None and across.profiled_error == across.error
    pcie, made = replace(H100, name="slower", bandwidth_gb_s=2000.0), calibration("slower")
    found = speed_transfer(H200, pcie, [0.9], calibration=made)
    # measurements of others do not count
    assert found is not None and found.profiled_error == PROFILED


def test_a_host_is_projected_where_both_were_calibrated_with_a_gpu() -> None:
    here, there, cpu = (
        calibration(),
        calibration(layer_ms=10.0),
        calibration(compute_capability=None),
    )
    assert host_transfer(here, there) == pytest.approx(0.8)
    assert [
        host_transfer(*pair) for pair in ((here, None), (None, there), (here, cpu), (cpu, there))
    ] == [None] * 4


def test_measurements_there_tighten_the_interval_and_draw_the_ratio() -> None:
    prior = speed_transfer(A100, H100)
    assert prior is not None
    ratio, errors, ratios = prior.ratio(0.5) * 1.3, [prior.error], [prior.ratio(0.5)]
    for count in (1, 2, 8, 100):
        reported = speed_transfer(A100, H100, [1.3] * count)
        assert reported is not None and reported.basis == count
        errors.append(reported.error)
        ratios.append(reported.ratio(0.5))
    assert errors == sorted(errors, reverse=True) and errors[-1] == pytest.approx(WITHIN, rel=0.02)
    assert ratios == sorted(ratios) and ratios[-1] == pytest.approx(ratio, rel=0.01)


def test_a_card_without_bf16_is_counted_in_fp16() -> None:
    assert T4.bf16_tflops is None and speed_transfer(T4, A100) is not None


def test_fp8_is_unknown_where_there_is_none() -> None:
    assert speed_transfer(H100, A100, precision="fp8") is None


def test_every_gpu_of_the_catalogue_can_be_reached() -> None:
    for device in list_devices():
        found = speed_transfer(H100, device)
        assert (found is None) is (device.kind == "cpu" or device.bandwidth_gb_s is None)


def test_an_interval_holds_80_percent_and_is_as_far_up_as_down() -> None:
    low, high = interval(100.0, 0.2)
    assert low * high == pytest.approx(100.0**2)
    logarithms = NormalDist(math.log(100.0), 0.2)
    assert logarithms.cdf(math.log(high)) - logarithms.cdf(math.log(low)) == pytest.approx(
        0.8, abs=1e-4
    )


@pytest.mark.parametrize(
    ("rate", "times", "products", "bytes"),
    [
        ("bf16_tflops", 16, 2**2.8, 1.0),
        ("tdp_w", 1 / 16, 2**-1.2, 1.0),
        ("bandwidth_gb_s", 16, 1.0, 16.0**OF_MEMORY),
    ],
)
def test_a_rate_that_is_sixteen_times_another(
    rate: str, times: float, products: float, bytes: float
) -> None:
    """Products go with the 0.7th power of the peaks, and the 0.3rd of the power that a card may
    draw.
    """
    other = replace(A100, name="other", **{rate: times * getattr(A100, rate)})
    carried = speed_transfer(A100, other)
    assert carried is not None and (carried.products, carried.bytes) == pytest.approx(
        (products, bytes)
    )


def test_from_one_generation_to_the_next_bytes_go_with_the_bandwidth() -> None:
    other = replace(
        A100, name="other", arch="hopper", bandwidth_gb_s=16 * (A100.bandwidth_gb_s or 0)
    )
    carried = speed_transfer(A100, other)
    assert carried is not None and carried.bytes == pytest.approx(16.0)


def test_no_card_reaches_more_than_a_share_of_its_peak() -> None:
    """The exponents alone would have an RTX 3090 multiply faster than it can, and an L4 and an A10
    faster than their power allows.
    """
    expected = {"rtx-3090": CEILING, "a100-80gb-sxm": 0.8, "h200-sxm": 0.67}
    expected |= {"l4": 55 / 121, "a10": 64.5 / 125, "mi300x": 0.5}
    cards = [resolve_device(name) for name in expected]
    shares = {card.name: (products_tflops(card) or 0) / (card.bf16_tflops or 1) for card in cards}
    assert shares == pytest.approx(expected, abs=0.005)


def test_a_card_of_unknown_power_lies_in_the_middle_of_the_others_and_is_less_certain() -> None:
    shares = [
        (products_tflops(card) or 0) / peak
        for card in list_devices()
        if (peak := peak_tflops(card))
    ]
    assert min(shares) < WITHOUT_POWER < max(shares)
    assert statistics.median(shares) == pytest.approx(WITHOUT_POWER, rel=0.1)
    unknown = replace(A100, name="other", tdp_w=None)
    assert (
        products_tflops(unknown) == WITHOUT_POWER * 312
        and products_tflops(replace(unknown, bf16_tflops=None, fp16_tflops=None)) is None
    )
    known, without = (
        speed_transfer(H100, replace(A100, name="other")),
        speed_transfer(H100, unknown),
    )
    assert known is not None and without is not None
    assert without.error > 1.5 * known.error and without.bytes == known.bytes


def test_attention_has_a_rate_of_its_own() -> None:
    """Flash attention uses none of Hopper's own instructions, and a T4 has no flash attention.

    Its power limit lowers the clock for attention as for products: to 23.1 of 49.4 TFLOP/s.
    """
    a100, t4 = (speed_transfer(H100, card) for card in (A100, T4))
    assert a100 is not None and a100.attention == pytest.approx(
        0.7 * 312 / (0.35 * 989.4), rel=1e-3
    )
    assert t4 is not None and t4.attention == pytest.approx(
        0.7 / 2.7 * 65 * (23.1 / 49.4) / (0.35 * 989.4), rel=1e-2
    )
    assert t4.attention < t4.products


def test_fp8_has_a_peak_of_its_own() -> None:
    faster = replace(H100, name="faster", fp8_tflops=16 * (H100.fp8_tflops or 0))
    ratios = [
        carried.products
        for kind in ("bf16", "fp8")
        if (carried := speed_transfer(H100, faster, precision=kind))
    ]
    assert ratios == pytest.approx([1.0, 2**2.8])
    both, none = speed_transfer(H100, faster), speed_transfer(H100, A100)
    assert (
        both is not None
        and both.fp8 == pytest.approx(2**2.8)
        and none is not None
        and none.fp8 is None
    )


@pytest.mark.parametrize("known", [[1.3], [1.1, 1.5, 0.8]])
def test_measurements_there_are_weighed_as_by_integration(known: list[float]) -> None:
    """The pair of cards is off by b, each measurement by more: both normal. Sum over all b."""
    prior, carried = speed_transfer(A100, H100), speed_transfer(A100, H100, known)
    assert prior is not None and carried is not None
    places = [index / 1000 for index in range(-1000, 1001)]
    likelihoods = [
        NormalDist(0, BETWEEN).pdf(b)
        * math.prod(NormalDist(b, WITHIN).pdf(math.log(ratio)) for ratio in known)
        for b in places
    ]
    mean = sum(map(math.prod, zip(places, likelihoods, strict=True))) / sum(likelihoods)
    variance = sum(
        (b - mean) ** 2 * each for b, each in zip(places, likelihoods, strict=True)
    ) / sum(likelihoods)
    for shift in (carried.products / prior.products, carried.bytes / prior.bytes):
        assert math.log(shift) == pytest.approx(mean, rel=1e-6)
    assert carried.error == pytest.approx(math.hypot(math.sqrt(variance), WITHIN), rel=1e-6)


def test_a_kind_of_card_that_nobody_measured_is_uncertain_until_somebody_does() -> None:
    published = yaml.safe_load(PAIRS.read_text())
    devices = {
        resolve_device(row["device"]).arch for one in published["sets"] for row in one["rows"]
    }
    assert devices == MEASURED_KINDS
    for there in (T4, resolve_device("mi300x")):
        guess, known = speed_transfer(H100, there), speed_transfer(H100, there, [0.2])
        assert guess is not None and known is not None
        assert guess.error == pytest.approx(math.hypot(OTHER_KERNELS, WITHIN))
        assert known.error < guess.error / 2
