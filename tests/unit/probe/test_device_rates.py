"""Rates of the CPU of this machine: each that was asked for, in its unit, from calls that really ran."""

import itertools
import math

import pytest
import torch

from autotune.probe import device_rates as module
from autotune.probe.device_rates import Sizes, measure_rates
from autotune.probe.meters import CpuMeter

SMALL = Sizes(sides=(32, 256), dtypes={"fp32": torch.float32}, copied_bytes=2**20)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND_S", 0.01)
    monkeypatch.setattr(module, "ON_CPU", SMALL)


def test_a_cpu_has_every_rate_but_that_of_a_link() -> None:
    rates = measure_rates(CpuMeter())
    assert list(rates.products) == ["fp32"] and list(rates.products["fp32"]) == [32, 256]
    assert rates.link_gb_s is None
    # From the slowest host to the fastest there could be.
    assert all(1e-6 < rate < 1e3 for rate in rates.products["fp32"].values())
    assert 0.01 < rates.copy_gb_s < 1e5 and 0.01 < rates.launch_us < 1e5
    assert all(math.isfinite(rate) for rate in rates.products["fp32"].values())


def test_no_larger_product_is_tried_where_one_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOO_LONG_S", 0.0)
    assert list(measure_rates(CpuMeter()).products["fp32"]) == [32]


def test_a_launch_takes_its_share_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock) * 0.005)  # a round takes 5 ms
    assert module._launch_us(CpuMeter()) == pytest.approx(5000 / (module.LAUNCHES // module.ROUNDS))


def test_the_time_of_a_call_is_that_of_the_median_round() -> None:
    """A call that counts what was issued: a first one, one to learn its length, and rounds of equal length."""
    calls, ahead = [], []

    class Clock(CpuMeter):
        def mark(self) -> float:
            return float(len(calls)) / 1000  # a call takes a millisecond

    seconds = module._seconds(Clock(), lambda: calls.append(1), lambda: ahead.append(1))
    assert seconds == pytest.approx(0.001)
    assert len(ahead) == module.ROUNDS and len(calls) == 2 + module.ROUNDS * 10
