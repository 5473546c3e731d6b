"""Rates of the CPU of this machine: each that was asked for, in its unit, from calls that really ran."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


def timed(*seconds: float) -> Any:
    """In place of `_seconds`: makes each call once, which takes these seconds, one after another."""
    left = iter(seconds)

    def one(meter: Any, call: Callable[[], object], get_ahead: Callable[[], None]) -> float:
        call()
        get_ahead()
        return next(left)

    return one


def test_rates_are_what_was_done_over_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a MiB reads and writes it, in 1 ms; products of 2 n^3 operations take 1 ms and 2 ms."""
    monkeypatch.setattr(module, "_seconds", timed(0.001, 0.001, 0.002))
    rates = measure_rates(CpuMeter())
    assert rates.copy_gb_s == pytest.approx(2 * 2**20 / 0.001 / 1e9)
    assert rates.products["fp32"] == pytest.approx({32: 2 * 32**3 / 0.001 / 1e12, 256: 2 * 256**3 / 0.002 / 1e12})


def test_a_product_that_takes_long_is_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_seconds", timed(module.TOO_LONG_S, 2 * module.TOO_LONG_S, 1.0))
    rates = module._products(CpuMeter(), torch.float32, (8, 16, 32), lambda: None)
    assert list(rates) == [8, 16]


def test_a_product_is_that_of_two_random_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[torch.Tensor] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *factors, out: (multiplied.extend(factors), mm(*factors, out=out)))
    monkeypatch.setattr(module, "_seconds", timed(0.5))
    assert module._product_s(CpuMeter(), torch.bfloat16, 16, lambda: None) == 0.5
    left, right = multiplied
    assert left.shape == right.shape == (16, 16) and left.dtype == right.dtype == torch.bfloat16
    assert not torch.equal(left, right)


@pytest.mark.parametrize("there_s", [0.25, 0.125])
def test_the_rate_of_a_link_is_that_of_its_slower_direction(monkeypatch: pytest.MonkeyPatch, there_s: float) -> None:
    pinned: list[dict[str, Any]] = []

    def empty_like(tensor: torch.Tensor, **wanted: Any) -> torch.Tensor:
        pinned.append(wanted)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(module.torch, "empty_like", empty_like)
    monkeypatch.setattr(module, "_seconds", timed(there_s, 0.375 - there_s))
    assert module._link_gb_s(CpuMeter(), torch.ones(2**20, dtype=torch.uint8)) == 2**20 / 0.25 / 1e9
    assert pinned == [{"device": "cpu", "pin_memory": True}]


@pytest.mark.parametrize(("call_s", "num_calls"), [(0.004, 3), (0.5, 1), (1e-6, 400), (0.0, 400)])
def test_a_round_lasts_long_enough_and_no_longer(call_s: float, num_calls: int) -> None:
    """Rounds of 10 ms. One call is made to warm up, and one to learn how long it takes."""
    calls: list[int] = []

    class Clock(CpuMeter):
        def mark(self) -> float:
            return len(calls) * call_s

    found = module._seconds(Clock(), lambda: calls.append(1), lambda: None)
    assert len(calls) == 2 + module.ROUNDS * num_calls
    assert found == pytest.approx(call_s or 1e-9 / num_calls)


def test_on_a_gpu_no_product_is_larger_than_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four matrices of fp32 take 16 bytes for each pair of row and column."""
    gpu: Any = SimpleNamespace(torch_device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(module, "_product_s", lambda meter, dtype, side, get_ahead: 0.001)
    for free, sides in ((16 * 64 * 64, [32, 64]), (16 * 64 * 64 - 1, [32]), (0, [])):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2**40))
        assert list(module._products(gpu, torch.float32, (32, 64, 128), lambda: None)) == sides
