"""Reads the NVIDIA GPUs of this machine through NVML, without torch.

This module reads the memory in use, the processes that hold this memory, clock rates, power and
throttling. It never changes a setting of a card. A value that the driver does not report is None.
"""

import os
import statistics
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from autotune.core.probe_types import Telemetry
from autotune.core.units import gib

T = TypeVar("T")

# Bits of nvmlDeviceGetCurrentClocksEventReasons, the reasons for a low clock rate. A power cap is
# normal on small cards; the other reasons are faults.
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slow-down",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "hardware power brake",
}


SAMPLING_S = 1.0  # the longest time between two of the driver's samples of a process


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a card."""

    pid: int
    name: str | None
    used_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """The values that NVML reports for one card."""

    index: int
    uuid: str
    name: str
    memory_gib: float
    used_gib: float
    compute_capability: str | None
    driver: str | None
    processes: tuple[GpuProcess, ...]


class Nvml:
    """A connection to one card, which `open` makes."""

    def __init__(self, handle: Any, driver: str | None) -> None:
        self._handle = handle
        self.driver = driver

    @classmethod
    def open(cls, card: int | str | None = None) -> "Nvml | None":
        """Open the card with this index or UUID, by default the first visible one.

        The UUID may lack its 'GPU-' prefix. Returns None if there is no driver or no such card.
        """
        if not has_driver():
            return None
        import pynvml

        try:
            pynvml.nvmlInit()
            if card is None:
                card = first_visible()
            if isinstance(card, int):
                handle = pynvml.nvmlDeviceGetHandleByIndex(card)
            else:
                uuid = str(card)
                handle = pynvml.nvmlDeviceGetHandleByUUID(
                    uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
                )
            return cls(handle, _query_or_none(pynvml.nvmlSystemGetDriverVersion))
        except (pynvml.NVMLError, OSError):
            return None

    def info(self, index: int = 0) -> GpuInfo:
        """Return the card's name, memory and processes. The result contains `index` unchanged."""
        import pynvml

        total_gib, used_gib = self._memory_gib()
        capability = _query_or_none(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(self._handle))
        return GpuInfo(
            index=index,
            uuid=pynvml.nvmlDeviceGetUUID(self._handle),
            name=pynvml.nvmlDeviceGetName(self._handle),
            memory_gib=total_gib,
            used_gib=used_gib,
            compute_capability=None if capability is None else "{}.{}".format(*capability),
            driver=self.driver,
            processes=tuple(self._processes()),
        )

    def _memory_gib(self) -> tuple[float, float]:
        """Return the card's memory, and how much of it is in use.

        A GPU that shares one memory with its host (GB10) has no memory of its own to report. For
        such a GPU, both numbers are the host's.
        """
        import pynvml

        # In version 2 of this call, the used memory excludes the memory that the driver reserves.
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
        except pynvml.NVMLError_NotSupported:
            import psutil

            host = psutil.virtual_memory()
            return gib(host.total), gib(host.total - host.available)
        return gib(memory.total), gib(memory.used)

    def used_gib(self) -> float | None:
        """Return the memory in use on the card, by any process."""
        return _query_or_none(lambda: self.info().used_gib)

    def used_by_process_gib(self, pid: int) -> float | None:
        """Return the GiB of the card that one process uses, or None if the driver hides it.

        Inside a container that has its own process ids, the driver hides this memory.
        """
        return next((process.used_gib for process in self._processes() if process.pid == pid), None)

    def uncorrected_errors(self) -> int | None:
        """Return the number of uncorrected memory errors since the driver was loaded.

        Memory without error correction (ECC) gives None.
        """
        import pynvml

        kinds = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        return _query_or_none(lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(self._handle, *kinds)))

    def sample(self) -> Telemetry:
        """Read all sensors. The energy is the total since the driver was loaded."""
        import pynvml

        handle = self._handle
        rates = _query_or_none(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        power = _query_or_none(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
        energy = _query_or_none(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        bits = _query_or_none(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)) or 0

        return Telemetry(
            utilization=None if rates is None else rates.gpu / 100,
            power_w=None if power is None else power / 1000,
            energy_j=None if energy is None else energy / 1000,
            temperature_c=_query_or_none(
                lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            ),
            sm_clock_mhz=_query_or_none(
                lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            ),
            throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit),
        )

    def use_by_others(self, since_s: float, own: Collection[int]) -> float | None:
        """Return the mean share of the card's time that processes other than `own` used.

        The mean begins one sampling interval before `since_s`, which is in seconds since 1970. The
        processes in `own` are known to use the card. If the driver lists none of these processes,
        it hides processes or lists them under other ids, so the result is None.
        """
        import pynvml

        since_us = int((since_s - SAMPLING_S) * 1e6)
        samples = _query_or_none(
            lambda: pynvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        )
        shares: dict[int, list[float]] = {}
        for sample in samples or []:
            if sample.smUtil <= 100:  # above 100, the driver has not set the entry
                shares.setdefault(sample.pid, []).append(sample.smUtil / 100)

        # While another process keeps the card busy, a short step of this process may have no
        # sample.
        known = shares.keys() | {process.pid for process in self._processes()}
        if not shares or not known & set(own):
            return None
        return sum(statistics.fmean(shares[pid]) for pid in shares.keys() - set(own))

    def _processes(self) -> list[GpuProcess]:
        import psutil
        import pynvml

        found = []
        running = (
            _query_or_none(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)) or []
        )
        for process in running:
            name = None
            with suppress(psutil.Error):
                name = psutil.Process(process.pid).name()
            used = process.usedGpuMemory
            used_gib = None if used is None else gib(used)
            found.append(GpuProcess(pid=process.pid, name=name, used_gib=used_gib))
        return found


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed.

    Without the driver, pynvml is useless, and its import would take 0.1 s.
    """
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def list_gpus() -> list[GpuInfo]:
    """Return every NVIDIA card of this machine; the list is empty without a driver."""
    if not has_driver():
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except (pynvml.NVMLError, OSError):
        return []
    cards = [(index, Nvml.open(index)) for index in range(count)]
    return [card.info(index) for index, card in cards if card is not None]


def visible() -> list[int | str]:
    """Return the cards that CUDA would use, in CUDA's order, by index or UUID."""
    named = _named_cards()
    if named is None:
        return [card.index for card in list_gpus()]
    return [card for card in named if card not in ("", "-1")]


def first_visible() -> int | str:
    """Return the card that CUDA would call device 0, by index or UUID.

    If CUDA_VISIBLE_DEVICES is not set, the result is card 0. The values "" and "-1" of this
    variable hide all cards. These two values are returned unchanged, and `Nvml.open` finds no card
    for them.
    """
    named = _named_cards()
    return 0 if named is None else named[0]


def _named_cards() -> list[int | str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES, or None if it is not set.

    The list has at least one entry; an empty variable gives one empty entry.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    names = [name.strip() for name in named.split(",")]
    return [int(name) if name.isdecimal() else name for name in names]


def _query_or_none(read: Callable[[], T]) -> T | None:
    """Return the value, or None if the driver does not report it."""
    import pynvml

    try:
        return read()
    except (pynvml.NVMLError, AttributeError):
        return None
