"""What a probe needs of the device it runs on: a cap, peaks, a clock, a baseline to return to. CUDA and CPU.

On CUDA memory is counted by torch's caching allocator, whose reserved memory is what must fit. On a CPU it is the
process's resident anonymous memory (VmHWM, which Linux lets us reset), under RLIMIT_DATA as a real cap.
"""

import ctypes
import gc
import os
import resource
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from autotune.core.memory_budget import memory_limit_gib
from autotune.core.nvml import Nvml
from autotune.core.probe_types import PROBE_VERSION, Fingerprint
from autotune.core.units import GIB, gib

PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "liger-kernel", "trl")


class Meter(Protocol):
    """One device, as the probe sees it. Memory in GiB, times in seconds."""

    name: str
    torch_device: torch.device
    peaks_are_free: bool  # reading phase peaks does not disturb the times
    aside_gib: float  # held by models that wait for a later probe: not counted, and not capped

    def settle(self) -> None: ...
    def rebase(self, resident_gib: float) -> None: ...
    def cap(self, memory_gib: float, headroom: float, managed_gib: float) -> float: ...
    def uncap(self) -> None: ...
    def mark(self) -> Any: ...
    def seconds(self, start: Any, end: Any) -> float: ...
    def passed(self, mark: Any) -> bool: ...
    def synchronize(self) -> None: ...
    def allocated_gib(self) -> float: ...
    def reserved_gib(self) -> float: ...
    def reset_peak(self) -> None: ...
    def peak_gib(self) -> tuple[float, float]: ...
    def context_gib(self) -> float: ...
    def alloc_retries(self) -> int: ...
    def release(self) -> None: ...
    def returned_to(self, baseline_gib: float) -> bool: ...
    def memory_gib(self) -> float: ...
    def fingerprint(self) -> Fingerprint: ...


class CudaMeter:
    """An NVIDIA GPU. Times come from device events, peaks from the caching allocator, context from NVML."""

    peaks_are_free = True
    aside_gib = 0.0

    def __init__(self) -> None:
        torch.cuda.init()
        self.torch_device = torch.device("cuda", 0)
        self._properties = torch.cuda.get_device_properties(0)
        self.name = self._properties.name
        self._nvml = Nvml.open(self._properties.uuid)
        torch.ones(256, 256, device=self.torch_device).matmul(torch.ones(256, 256, device=self.torch_device))
        self.synchronize()

    def settle(self) -> None:
        """Nothing to do: what torch has allocated is known exactly."""

    def rebase(self, resident_gib: float) -> None:
        """Nothing to do: NVML tells the context at any time."""

    def cap(self, memory_gib: float, headroom: float, managed_gib: float) -> float:
        total = gib(self._properties.total_memory)
        taken = self.context_gib() + managed_gib
        limit = memory_limit_gib(memory_gib, headroom, taken_gib=taken)
        # A few layers may be judged against a larger card than this one.
        room = max(memory_limit_gib(total, headroom, taken_gib=taken), min(limit, total))
        torch.cuda.set_per_process_memory_fraction(min(max(limit, 0.01) + self.aside_gib, room) / total)
        return limit

    def uncap(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come past this mark; the host does not wait for it."""
        return bool(mark.query())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def allocated_gib(self) -> float:
        return gib(torch.cuda.memory_allocated()) - self.aside_gib

    def reserved_gib(self) -> float:
        return gib(torch.cuda.memory_reserved()) - self.aside_gib

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> tuple[float, float]:
        """(allocated, reserved) since the last reset."""
        stats = torch.cuda.memory_stats_as_nested_dict()  # a fifth of the time of the flat one
        allocated, reserved = (stats[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes"))
        return gib(allocated) - self.aside_gib, gib(reserved) - self.aside_gib

    def context_gib(self) -> float:
        """What this process holds on the card beyond torch's reserve: CUDA context, kernels, libraries."""
        used = self._nvml.used_by_process_gib(os.getpid()) if self._nvml else None
        return 0.6 if used is None else max(used - gib(torch.cuda.memory_reserved()), 0.0)

    def alloc_retries(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_alloc_retries", 0))

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()  # where checkpoints were offloaded to
        torch.cuda.reset_accumulated_memory_stats()
        self.reset_peak()

    def returned_to(self, baseline_gib: float) -> bool:
        return abs(self.allocated_gib() - baseline_gib) < 2 / 1024

    def memory_gib(self) -> float:
        return gib(self._properties.total_memory)

    def fingerprint(self) -> Fingerprint:
        major, minor = torch.cuda.get_device_capability(0)
        return _fingerprint(
            device=self.name,
            compute_capability=f"{major}.{minor}",
            device_memory_gib=round(self.memory_gib(), 2),
            driver=self._nvml.driver if self._nvml else None,
            cuda=torch.version.cuda,
            allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            threads=None,
        )


class CpuMeter:
    """The host's processors. `context` is what Python and its libraries hold before a model is built.

    Peaks repeat to 1 % only with the malloc settings that the launcher gives the process: large blocks straight from
    the kernel and back to it.
    """

    peaks_are_free = False
    aside_gib = 0.0

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = _cpu_name()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.settle()

    def settle(self) -> None:
        """The libraries are loaded: what grows from here on without a model to account for it is a leak."""
        self._first_data = self._status("VmData")
        self.rebase(0.0)

    def rebase(self, resident_gib: float) -> None:
        """Count as context what the process holds now beyond the resident model: libraries are loaded on first use."""
        resident = int(resident_gib * GIB)
        self._context = self._status("RssAnon") - resident
        self._data = self._status("VmData") - resident

    def cap(self, memory_gib: float, headroom: float, managed_gib: float) -> float:
        limit = memory_limit_gib(memory_gib, headroom, taken_gib=self.context_gib() + managed_gib)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        # VmData counts address space that libraries reserve and never touch: what it was at the start is not capped.
        resource.setrlimit(resource.RLIMIT_DATA, (int(max(limit, 0.01) * GIB) + self._data, hard))
        return limit

    def uncap(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def passed(self, mark: float) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def allocated_gib(self) -> float:
        return gib(max(self._status("RssAnon") - self._context, 0))

    def reserved_gib(self) -> float:
        return gib(max(self._status("VmData") - self._data, 0))

    def reset_peak(self) -> None:
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def peak_gib(self) -> tuple[float, float]:
        """The same number twice: a CPU has no allocator reserve that outlives a tensor."""
        file_backed = self._status("RssFile") + self._status("RssShmem")
        peak = gib(max(self._status("VmHWM") - file_backed - self._context, 0))
        return peak, peak

    def context_gib(self) -> float:
        return max(gib(self._context) - self.aside_gib, 0.0)

    def alloc_retries(self) -> int:
        return 0

    def release(self) -> None:
        gc.collect()
        self._libc.malloc_trim(0)

    def returned_to(self, baseline_gib: float) -> bool:
        # Python's own arenas wander by a few MiB. What is lost for good adds up in VmData, which the cap counts.
        kept = gib(self._status("VmData") - self._first_data) - self.aside_gib - baseline_gib
        return self.allocated_gib() - baseline_gib < 24 / 1024 and kept < 192 / 1024

    def memory_gib(self) -> float:
        import psutil

        return gib(psutil.virtual_memory().total)

    def fingerprint(self) -> Fingerprint:
        return _fingerprint(
            device=self.name,
            compute_capability=None,
            device_memory_gib=round(self.memory_gib(), 1),
            driver=None,
            cuda=None,
            allocator="malloc",
            threads=torch.get_num_threads(),
        )

    def _status(self, key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {key}")


def open_meter(device: str) -> Meter:
    """`cuda` or `cpu`."""
    return CudaMeter() if device == "cuda" else CpuMeter()


def _fingerprint(**fields: Any) -> Fingerprint:
    import platform
    from importlib import metadata

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Fingerprint(python=platform.python_version(), packages=packages, probe=PROBE_VERSION, **fields)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "CPU"
