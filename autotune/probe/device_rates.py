"""Measures a device's speed in matrix products, copies, host transfers and kernel launches.

This module runs in the worker's process, and measures one rate at a time. The multiplied numbers
are random, because a card at its power limit multiplies equal numbers faster. Times come from
device events on a GPU and from the clock on a CPU. On a CPU, matrices and copies are smaller, and
there is no link to the host.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autotune.core.probe_types import DeviceRates
from autotune.core.units import GIB, MIB
from autotune.probe.meters import Meter

ROUNDS = 5  # the result is the median of this number of rounds
ROUND_S = 0.1  # seconds of a round; if one call takes longer, the round is a single call
# Before each round, a GPU gets this number of seconds of other work, so that the host can issue the
# round's calls in the meantime.
AHEAD_S = 0.01
MOST_CALLS = 400  # the most calls in a round, because a GPU's queue holds about a thousand calls
TOO_LONG_S = 0.3  # seconds; after a product that takes longer, larger matrices are skipped
LAUNCHES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The operations to measure on one kind of device.

    `sides` lists the numbers of rows of the square matrices to multiply, and `dtypes` their types.
    `copied_bytes` is the size of a copy.
    """

    sides: tuple[int, ...]
    dtypes: dict[str, torch.dtype]
    copied_bytes: int


ON_CPU = Sizes(sides=(256, 512, 1024), dtypes={"fp32": torch.float32}, copied_bytes=64 * MIB)
# The copied buffers are larger than the caches of any GPU, so that the speed of a copy is the speed
# of the memory.
ON_GPU = Sizes(
    sides=(1024, 2048, 4096, 8192),
    dtypes={"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
    copied_bytes=512 * MIB,
)
BF16_CAPABILITY = (8, 0)  # older cards only emulate bf16


def measure_rates(meter: Meter) -> DeviceRates:
    """Measure this process's device.

    The measurement takes about 5 s on a fast GPU, and 1 s on a CPU.
    """
    device = meter.torch_device
    on_gpu = device.type != "cpu"
    sizes = ON_GPU if on_gpu else ON_CPU
    size = sizes.copied_bytes
    while on_gpu and 3 * size > torch.cuda.mem_get_info()[0]:
        size //= 2

    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _seconds(meter, lambda: target.copy_(source), lambda: None)
    # Before a measurement, a GPU gets some copies into its queue, so that it does not wait for the
    # host. A CPU finishes each call before the next call begins, so it needs no such copies.
    num_copies = math.ceil(AHEAD_S / copy_s) if on_gpu else 0

    def get_ahead() -> None:
        for _ in range(num_copies):
            target.copy_(source)

    products: dict[str, dict[int, float]] = {}
    for name, dtype in sizes.dtypes.items():
        if name == "bf16" and on_gpu and torch.cuda.get_device_capability() < BF16_CAPABILITY:
            continue
        if rates := _products(meter, dtype, sizes.sides, get_ahead):
            products[name] = rates
    return DeviceRates(
        products=products,
        copy_gb_s=2 * size / copy_s / 1e9,
        link_gb_s=_link_gb_s(meter, target) if on_gpu else None,
        launch_us=_launch_us(meter),
    )


def _products(
    meter: Meter, dtype: torch.dtype, sides: tuple[int, ...], get_ahead: Callable[[], None]
) -> dict[int, float]:
    """The TFLOP/s of products of two square matrices, by the number of their rows.

    Larger sides are skipped if memory is too small, or after a product that takes TOO_LONG_S.
    """
    rates = {}
    for side in sides:
        # The product needs memory for four fp32 matrices at most: two factors, the result, and a
        # factor before its conversion.
        if meter.torch_device.type != "cpu" and 4 * side * side * 4 > torch.cuda.mem_get_info()[0]:
            break
        seconds = _product_s(meter, dtype, side, get_ahead)
        rates[side] = 2 * side**3 / seconds / 1e12
        if seconds > TOO_LONG_S:
            break
    return rates


def _product_s(meter: Meter, dtype: torch.dtype, side: int, get_ahead: Callable[[], None]) -> float:
    left, right = (torch.randn(side, side, device=meter.torch_device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return _seconds(meter, lambda: torch.mm(left, right, out=product), get_ahead)


def _link_gb_s(meter: Meter, buffer: torch.Tensor) -> float:
    """GB/s between pinned host memory and the device, in the slower direction."""
    buffer = buffer[: GIB // 4]
    pinned = torch.empty_like(buffer, device="cpu", pin_memory=True)
    there = _seconds(meter, lambda: buffer.copy_(pinned, non_blocking=True), lambda: None)
    back = _seconds(meter, lambda: pinned.copy_(buffer, non_blocking=True), lambda: None)
    return float(buffer.nbytes / max(there, back) / 1e9)


def _launch_us(meter: Meter) -> float:
    """The host's microseconds to issue one small kernel."""
    value = torch.zeros(1, device=meter.torch_device)
    taken = []
    for _ in range(ROUNDS):
        meter.synchronize()
        begin = time.perf_counter()
        for _ in range(LAUNCHES // ROUNDS):
            value.add_(1)
        taken.append(time.perf_counter() - begin)
        meter.synchronize()
    return statistics.median(taken) / (LAUNCHES // ROUNDS) * 1e6


def _seconds(meter: Meter, call: Callable[[], object], get_ahead: Callable[[], None]) -> float:
    """The device's seconds for one call after warm-up: the median over rounds of many calls.

    `get_ahead` keeps the device busy while the host issues the calls of a round, so that the device
    never waits for a launch.
    """
    _round(meter, call, 1)  # loads kernels
    one_s = _round(meter, call, 1)
    num_calls = max(1, min(MOST_CALLS, math.ceil(ROUND_S / one_s)))

    rounds = []
    for _ in range(ROUNDS):
        get_ahead()
        rounds.append(_round(meter, call, num_calls) / num_calls)
    return statistics.median(rounds)


def _round(meter: Meter, call: Callable[[], object], num_calls: int) -> float:
    begin = meter.mark()
    for _ in range(num_calls):
        call()
    end = meter.mark()
    meter.synchronize()
    return max(meter.seconds(begin, end), 1e-9)
