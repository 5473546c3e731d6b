"""Finds slow parts of a machine. The table LIMITS holds each part's limit and its reason."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.catalog import DeviceSpec
from autotune.core.machine import host_memory_gib, num_cores
from autotune.core.units import fmt_count
from autotune.prediction.step_time import MEASURED_HOST, host_of
from autotune.prediction.transfer import COPIED, IN_TRAINING, products_tflops
from autotune.problem.calibration import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit for one part of a machine, such as its disk.

    The part is slow if `measured` returns a value below `least`. Both values are in `unit`.
    `measured` returns None if the value is unknown.
    """

    part: str
    measured: Callable[[Calibration | None, DeviceSpec], float | None]
    least: float
    unit: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPart:
    """A part of the machine whose measured value is below its limit."""

    limit: Limit
    value: float

    def __str__(self) -> str:
        limit = self.limit
        return f"{fmt_count(self.value)} {limit.unit}, below {fmt_count(limit.least)}: {limit.why}"


def _pace(calibration: Calibration | None, device: DeviceSpec) -> float | None:
    return (
        MEASURED_HOST.scale / host_of(calibration).scale
        if calibration and calibration.measures_gpu
        else None
    )


def _products(calibration: Calibration | None, device: DeviceSpec) -> float | None:
    expected = products_tflops(device)
    return (
        IN_TRAINING * calibration.products_tflops() / expected if calibration and expected else None
    )


def _copies(calibration: Calibration | None, device: DeviceSpec) -> float | None:
    expected = device.bandwidth_gb_s
    return calibration.rates.copy_gb_s / COPIED / expected if calibration and expected else None


LIMITS = (
    Limit(
        part="cores",
        measured=lambda calibration, device: num_cores(),
        least=4,
        unit="processors",
        why="the training loop, the data loader and the compiler need one processor each",
    ),
    Limit(
        part="host memory",
        measured=lambda calibration, device: host_memory_gib(),
        least=16,
        unit="GiB",
        why="a 7B model in bf16 has 14 GiB, which pass through host memory when the model is "
        "loaded or a checkpoint is written",
    ),
    Limit(
        part="disk",
        measured=lambda calibration, device: calibration.disk_mb_s if calibration else None,
        least=200,
        unit="MB/s",
        why="at a lower rate, a 7B model in bf16 takes over a minute to write, and training waits "
        "for each checkpoint",
    ),
    Limit(
        part="link to the GPU",
        measured=lambda calibration, device: calibration.rates.link_gb_s if calibration else None,
        least=10,
        unit="GB/s",
        why="offloaded checkpoints and paged optimizers use this link in every step; PCIe 3.0 with "
        "16 lanes reaches 12 GB/s",
    ),
    Limit(
        part="host",
        measured=_pace,
        least=0.7,
        unit="times the pace of the hosts that the formulas were measured on",
        why="small micro batches wait for the CPU; larger micro batches or compiled layers need "
        "fewer kernel launches",
    ),
    Limit(
        part="products",
        measured=_products,
        least=0.75,
        unit="of the rate expected from the GPU's data sheet",
        why="the GPU may be hot, limited in power, or shared (`nvidia-smi -q -d PERFORMANCE`)",
    ),
    Limit(
        part="memory of the GPU",
        measured=_copies,
        least=0.75,
        unit="of the bandwidth expected from the GPU's data sheet",
        why="another process may use the GPU, or its memory runs at a lower clock",
    ),
)


def slow_parts(calibration: Calibration | None, device: DeviceSpec) -> Iterator[SlowPart]:
    """Yield the slow parts of this machine.

    CPU cores and host memory are always checked. The other parts are checked only with a
    calibration, the measurement by `autotune calibrate`.
    """
    for limit in LIMITS:
        value = limit.measured(calibration, device)
        if value is not None and value < limit.least:
            yield SlowPart(limit=limit, value=value)
