"""Rates of the CPU of this machine: each that was asked for, in its unit, from calls that really
ran.
"""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.probe import device_rates as module
from autotune.probe.device_rates import ON_CPU, Sizes, measure_rates
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


def test_no_larger_product_is_tried_where_one_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TOO_LONG_S", 0.0)
    assert list(measure_rates(CpuMeter()).products["fp32"]) == [32]


def test_a_launch_takes_its_share_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    # a round takes 5 ms
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock) * 0.005)
    assert module._launch_us(CpuMeter()) == pytest.approx(5000 / (module.LAUNCHES // module.ROUNDS))


def test_the_time_of_a_call_is_that_of_the_median_round() -> None:
    """A call that counts what was issued: a first one, one to learn its length, and rounds of equal
    length.
    """
    calls, ahead = [], []

    class Clock(CpuMeter):
        def mark(self) -> float:
            return float(len(calls)) / 1000  # a call takes a millisecond

    seconds = module._seconds(Clock(), lambda: calls.append(1), lambda: ahead.append(1))
    assert seconds == pytest.approx(0.001)
    assert len(ahead) == module.ROUNDS and len(calls) == 2 + module.ROUNDS * 10


def timed(*seconds: float) -> Any:
    """In place of `_seconds`: makes each call once, which takes
    these seconds, one after another.
    """
    left = iter(seconds)

    def one(meter: Any, call: Callable[[], object], get_ahead: Callable[[], None]) -> float:
        call()
        get_ahead()
        return next(left)

    return one


def test_rates_are_what_was_done_over_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a MiB reads and writes it, in 1 ms; products of 2 n^3 operations take 1 ms and 2
    ms.
    """
    monkeypatch.setattr(module, "_seconds", timed(0.001, 0.001, 0.002))
    rates = measure_rates(CpuMeter())
    assert rates.copy_gb_s == pytest.approx(2 * 2**20 / 0.001 / 1e9)
    assert rates.products["fp32"] == pytest.approx(
        {32: 2 * 32**3 / 0.001 / 1e12, 256: 2 * 256**3 / 0.002 / 1e12}
    )


def test_a_product_that_takes_long_is_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_seconds", timed(module.TOO_LONG_S, 2 * module.TOO_LONG_S, 1.0))
    rates = module._products(CpuMeter(), torch.float32, (8, 16, 32), lambda: None)
    assert list(rates) == [8, 16]


def test_a_product_is_that_of_two_random_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[torch.Tensor] = []
    mm = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *factors, out: (multiplied.extend(factors), mm(*factors, out=out))
    )
    monkeypatch.setattr(module, "_seconds", timed(0.5))
    assert module._product_s(CpuMeter(), torch.bfloat16, 16, lambda: None) == 0.5
    left, right = multiplied
    assert left.shape == right.shape == (16, 16) and left.dtype == right.dtype == torch.bfloat16
    assert not torch.equal(left, right)


@pytest.mark.parametrize("there_s", [0.25, 0.125])
def test_the_rate_of_a_link_is_that_of_its_slower_direction(
    monkeypatch: pytest.MonkeyPatch, there_s: float
) -> None:
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


def test_on_a_gpu_no_product_is_larger_than_its_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four matrices of fp32 take 16 bytes for each pair of row and column."""
    gpu: Any = SimpleNamespace(torch_device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(module, "_product_s", lambda meter, dtype, side, get_ahead: 0.001)
    for free, sides in ((16 * 64 * 64, [32, 64]), (16 * 64 * 64 - 1, [32]), (0, [])):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2**40))
        assert list(module._products(gpu, torch.float32, (32, 64, 128), lambda: None)) == sides


class Card(CpuMeter):
    """A GPU: its tensors are where torch's meta device has them, without memory."""

    def __init__(self) -> None:
        self.torch_device = torch.device("meta")


@pytest.mark.parametrize(
    ("capability", "names"), [((8, 0), ["bf16", "fp16", "fp32"]), ((7, 5), ["fp16", "fp32"])]
)
@pytest.mark.parametrize(
    ("free", "copied"), [(3 * 2**29, 2**29), (3 * 2**29 - 1, 2**28), (3 * 2**26, 2**26)]
)
def test_a_gpu_by_hand(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    copied: int,
    capability: tuple[int, int],
    names: list[str],
) -> None:
    """A copy takes 4 ms, so that three of them keep it busy for 10 ms; it is as large as a third of
    the free memory.
    """
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(module, "_launch_us", lambda meter: 4.0)
    monkeypatch.setattr(module, "_link_gb_s", lambda meter, buffer: calls.append(buffer) or 24.0)

    def seconds(meter: Any, call: Callable[[], Any], get_ahead: Callable[[], None]) -> float:
        calls.append(call())
        return 0.004

    def products(
        meter: Any, dtype: torch.dtype, sides: tuple[int, ...], get_ahead: Callable[[], None]
    ) -> Any:
        copy, made = torch.Tensor.copy_, list[Any]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.Tensor,
                "copy_",
                lambda target, source: made.append(source) or copy(target, source),
            )
            get_ahead()
        assert len(made) == 3 and sides == (1024, 2048, 4096, 8192)
        return {1024: {torch.bfloat16: 3.0, torch.float16: 2.0, torch.float32: 1.0}[dtype]}

    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(module, "_products", products)
    rates = measure_rates(Card())
    assert list(rates.products) == names and rates.products["fp16"] == {1024: 2.0}
    assert rates.copy_gb_s == pytest.approx(2 * copied / 0.004 / 1e9)
    assert (rates.link_gb_s, rates.launch_us) == (24.0, 4.0)
    target, of_link = calls
    assert target is of_link and target.device.type == "meta"
    assert (target.dtype, target.shape) == (torch.uint8, (copied,))


def test_what_is_measured_on_each_kind_of_device() -> None:
    """By hand: copies are larger than any cache, and matrices up to the largest of a model."""
    assert (
        module.ON_GPU.sides == (1024, 2048, 4096, 8192)
        and module.ON_GPU.copied_bytes == 536_870_912
    )
    assert module.ON_GPU.dtypes == {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }
    assert ON_CPU.sides == (256, 512, 1024) and ON_CPU.copied_bytes == 67_108_864
    assert ON_CPU.dtypes == {"fp32": torch.float32}
    assert (module.ROUNDS, module.MOST_CALLS, module.LAUNCHES, module.AHEAD_S) == (
        5,
        400,
        2000,
        0.01,
    )
    assert (module.TOO_LONG_S, module.BF16_CAPABILITY) == (0.3, (8, 0))


def test_what_is_copied_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []

    def seconds(meter: Any, call: Callable[[], Any], get_ahead: Callable[[], None]) -> float:
        copied.append(call())
        get_ahead()
        return 1.0

    monkeypatch.setattr(module, "_seconds", seconds)

    def products(
        meter: Any, dtype: torch.dtype, sides: tuple[int, ...], get_ahead: Callable[[], None]
    ) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            # a CPU has done each call before the next is issued
            patch.setattr(torch.Tensor, "copy_", None)
            get_ahead()
        return {}

    monkeypatch.setattr(module, "_products", products)
    assert measure_rates(CpuMeter()).products == {}
    assert copied[0].dtype == torch.uint8 and set(copied[0].unique().tolist()) == set(range(256))


def test_operands_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "mm", lambda left, right, out: made.extend((left, right, out)))
    monkeypatch.setattr(module, "_seconds", timed(0.5))
    module._product_s(Card(), torch.float16, 4, lambda: None)
    assert [one.device.type for one in made] == ["meta"] * 3 and {one.dtype for one in made} == {
        torch.float16
    }


def test_what_is_launched_is_one_small_kernel_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round ends once the device has done its kernels, and so does what went before it."""
    added: list[Any] = []
    waits: list[int] = []

    class Waiting(Card):
        def synchronize(self) -> None:
            waits.append(len(added))

    monkeypatch.setattr(
        torch.Tensor,
        "add_",
        lambda tensor, value: added.append((tensor.device.type, tensor.numel())),
    )
    monkeypatch.setattr(module, "LAUNCHES", 17)
    clock = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock) * 0.003)
    assert module._launch_us(Waiting()) == pytest.approx(1000.0)  # three of them in 3 ms
    assert added == [("meta", 1)] * 15 and waits == [0, 3, 3, 6, 6, 9, 9, 12, 12, 15]


@pytest.mark.parametrize(("largest", "bytes_of_it"), [(2**30, 2**28), (2**20, 2**20)])
def test_a_link_is_measured_without_waiting_and_with_no_more_than_a_quarter_of_a_gib(
    monkeypatch: pytest.MonkeyPatch, largest: int, bytes_of_it: int
) -> None:
    copies: list[Any] = []
    empty_like = torch.empty_like

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        copies.append((target.nbytes, source.nbytes, non_blocking))

    monkeypatch.setattr(torch, "empty_like", lambda tensor, device, pin_memory: empty_like(tensor))
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(module, "_seconds", timed(0.25, 0.125))
    found = module._link_gb_s(Card(), torch.empty(largest, dtype=torch.uint8, device="meta"))
    assert found == bytes_of_it / 0.25 / 1e9 and copies == [(bytes_of_it, bytes_of_it, True)] * 2


def test_a_round_is_read_once_the_device_is_done() -> None:
    """Where no time can be told, it is not nothing."""
    done: list[str] = []

    class Waiting(CpuMeter):
        def synchronize(self) -> None:
            done.append("wait")

        def seconds(self, start: float, end: float) -> float:
            done.append("read")
            return 0.0

    assert module._round(Waiting(), lambda: done.append("call"), 2) == 1e-9
    assert done == ["call", "call", "wait", "read"]
