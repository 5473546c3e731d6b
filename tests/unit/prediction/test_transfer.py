"""Speeds carried from card to card: the prior, what a measurement there changes, and intervals that mean something."""

import math

import pytest

from autotune.catalog import list_devices, resolve_device
from autotune.prediction.transfer import BETWEEN, EIGHTY_PERCENT, WITHIN, interval, log_ratio, speed_transfer

H100, A100, T4 = map(resolve_device, ("h100", "a100", "t4"))


def test_the_same_card_is_as_fast_as_itself() -> None:
    same = speed_transfer(H100, H100, [0.5])
    assert same is not None and same.interval == (1.0, 1.0)


def test_there_and_back_is_nowhere() -> None:
    there, back = speed_transfer(A100, H100), speed_transfer(H100, A100)
    assert there is not None and back is not None
    assert there.ratio * back.ratio == pytest.approx(1)
    assert there.error == back.error == pytest.approx(math.hypot(BETWEEN, WITHIN))


def test_a_faster_card_is_faster_by_less_than_its_peak_says() -> None:
    carried = speed_transfer(A100, H100)
    assert carried is not None
    assert 1 < carried.ratio < (H100.bf16_tflops or 0) / (A100.bf16_tflops or 1)


def test_measurements_there_tighten_the_interval_and_draw_the_ratio() -> None:
    prior = speed_transfer(A100, H100)
    assert prior is not None
    ratio, errors, ratios = prior.ratio * 1.3, [prior.error], [prior.ratio]
    for count in (1, 2, 8, 100):
        reported = speed_transfer(A100, H100, [ratio] * count)
        assert reported is not None and reported.basis == count
        errors.append(reported.error)
        ratios.append(reported.ratio)
    assert errors == sorted(errors, reverse=True) and errors[-1] == pytest.approx(WITHIN, rel=0.02)
    assert ratios == sorted(ratios) and ratios[-1] == pytest.approx(ratio, rel=0.01)


def test_a_card_without_bf16_is_counted_in_fp16() -> None:
    assert T4.bf16_tflops is None and log_ratio(T4, A100) is not None


def test_fp8_is_unknown_where_there_is_none() -> None:
    assert speed_transfer(H100, A100, precision="fp8") is None


def test_every_gpu_of_the_catalogue_can_be_reached() -> None:
    for device in list_devices():
        found = speed_transfer(H100, device)
        assert (found is None) is (device.kind == "cpu" or device.bandwidth_gb_s is None)


def test_an_interval_is_as_far_up_as_down() -> None:
    low, high = interval(100.0, 0.2)
    assert low * high == pytest.approx(100.0**2) and high == pytest.approx(100 * math.exp(0.2 * EIGHTY_PERCENT))
