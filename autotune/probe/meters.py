"""What a probe needs of its device: a cap, peaks, a clock, a baseline to return to. CUDA and CPU.

On CUDA memory is counted by torch's caching allocator, whose reserved memory is what must fit. On a CPU it is the
process's resident anonymous memory (VmHWM, which Linux lets us reset), under RLIMIT_DATA as a real cap.
"""

import ctypes
import gc
import os
import platform
import resource
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from autotune.core.machine import processor_name
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.nvml import Nvml
from autotune.core.probe_types import PROBE_VERSION, Fingerprint
from autotune.core.units import GIB, gib
from autotune.trainer.malloc import KEPT_BYTES, set_release_threshold
from autotune.trainer.settings import ALLOCATOR_VARIABLE, ALLOCATORS

MAX_LOST_GIB = 0.5  # of the host, over all probes of a process
WORKSPACE_GIB = (
    8 / 1024
)  # of libraries on a GPU: some keep 2 MiB from their first use of a large matrix on
RETURNED_BYTES = 2**16  # on a CPU blocks of this size go back to the kernel while peaks are read
IS_MAPPED = 2  # in the word before a block: it came straight from the kernel
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "torchao",
    "liger-kernel",
    "trl",
    "deepspeed",
)


class CudaMeter:
    """An NVIDIA GPU, as the probe sees it. Memory is in GiB, times are in seconds.

    Times are those of device events, peaks those of the caching allocator. `peaks_are_free` is whether reading a peak
    leaves the times undisturbed. `aside_gib` is the memory of models that wait for a later probe: it is neither counted
    nor capped. `others_gib` is what processes hold that compile ahead, which is no part of this one's context.
    """

    peaks_are_free = True
    aside_gib = 0.0
    others_gib = 0.0

    def __init__(self) -> None:
        self._nvml = Nvml.open()
        # Before this process has a CUDA context. Where the driver does not show memory by process (containers with
        # process numbers of their own), the context is what the card holds more since then, torch's memory aside.
        self._used_before_gib = self._nvml.used_gib() if self._nvml else None
        torch.cuda.init()
        self.torch_device = torch.device("cuda", 0)
        self._properties = torch.cuda.get_device_properties(0)
        torch.ones(256, 256, device=self.torch_device).matmul(
            torch.ones(256, 256, device=self.torch_device)
        )
        self.synchronize()

    def settle(self) -> None:
        """All libraries are loaded: memory that a later probe does not return is lost. Torch knows it exactly."""

    def rebase(self, resident_gib: float) -> None:
        """Leave what the process holds now, the resident model excepted, out of peaks: torch counts tensors alone."""

    def keep_freed(self) -> None:
        """From now on only times matter: let freed memory be kept, as in the full run. Torch always does."""

    def return_freed(self, resident_gib: float) -> None:
        """From now on peaks matter again; `resident_gib` is what tensors hold now."""

    def cap(self, memory_gib: float, headroom: float, managed_gib: float) -> float:
        """Let allocations fail beyond a limit, and return it.

        The limit is `memory_gib` without the fraction `headroom`, the context, and managed memory.
        """
        total = self.memory_gib()
        taken = self.context_gib()
        if taken is None:  # at most all that torch does not hold
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            taken = max(
                gib(total_bytes - free_bytes - torch.cuda.memory_reserved()) - self.others_gib, 0.0
            )
        taken += managed_gib
        limit = memory_limit_gib(memory_gib, headroom, taken_gib=taken)
        # A few layers may be probed for a larger card than this one.
        room = max(memory_limit_gib(total, headroom, taken_gib=taken), min(limit, total))
        torch.cuda.set_per_process_memory_fraction(
            min(max(limit, 0.01) + self.aside_gib, room) / total
        )
        return limit

    def uncap(self) -> None:
        """Remove the cap."""
        torch.cuda.set_per_process_memory_fraction(1.0)

    def mark(self) -> torch.cuda.Event:
        """A point in the device's time, after all work issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two marks that the device has passed."""
        return float(start.elapsed_time(end)) / 1000

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed this mark. Does not wait."""
        return bool(mark.query())

    def synchronize(self) -> None:
        """Wait until the device has done all work issued so far."""
        torch.cuda.synchronize()

    def allocated_gib(self) -> float:
        """Memory of all tensors."""
        return gib(torch.cuda.memory_allocated()) - self.aside_gib

    def reserved_gib(self) -> float:
        """Memory that the allocator holds, used or cached."""
        return gib(torch.cuda.memory_reserved()) - self.aside_gib

    def reset_peak(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> tuple[float, float]:
        """The peaks of allocated and of reserved memory since the last reset."""
        stats = torch.cuda.memory_stats_as_nested_dict()  # a fifth of the time of the flat one
        allocated, reserved = (
            stats[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes")
        )
        return gib(allocated) - self.aside_gib, gib(reserved) - self.aside_gib

    def context_gib(self) -> float | None:
        """What the process holds besides tensors: CUDA context, kernels, libraries. None where it is unknown."""
        if self._nvml is None:
            return None
        reserved = gib(torch.cuda.memory_reserved())
        used = self._nvml.used_by_process_gib(os.getpid())
        if used is None:
            now = self._nvml.used_gib()
            if now is None or self._used_before_gib is None:
                return None
            used = now - self._used_before_gib - self.others_gib
        return max(used - reserved, 0.0)

    def alloc_retries(self) -> int:
        """How often the allocator returned cached memory and tried again, since the last `release`."""
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_alloc_retries", 0))

    def hold_memory(self, allocator: str) -> None:
        """Have memory that is taken from now on lie in segments of this kind, of the knob `allocator`."""
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings(ALLOCATORS[allocator])

    def release(self, *, collect: bool = True) -> None:
        """Return all memory that is not in use, and reset the statistics. Garbage in cycles stays unless `collect`."""
        if collect:
            gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # of other streams too, for which nobody will ask again
        torch.cuda.empty_cache()
        getattr(
            torch.accelerator, "empty_host_cache", lambda: None
        )()  # where checkpoints were offloaded to
        torch.cuda.reset_accumulated_memory_stats()
        self.reset_peak()

    def returned_to(self, baseline_gib: float) -> bool:
        """Whether no more memory than this is in use, apart from what a process gains and loses by chance."""
        return abs(self.allocated_gib() - baseline_gib) < WORKSPACE_GIB

    def memory_gib(self) -> float:
        """The device's total memory."""
        return gib(self._properties.total_memory)

    def fingerprint(self) -> Fingerprint:
        """The circumstances that a measurement on this device holds for."""
        major, minor = torch.cuda.get_device_capability(0)
        return _fingerprint(
            device=self._properties.name,
            compute_capability=f"{major}.{minor}",
            device_memory_gib=round(self.memory_gib(), 2),
            driver=self._nvml.driver if self._nvml else None,
            cuda=torch.version.cuda,
            allocator=os.environ.get(ALLOCATOR_VARIABLE, ""),
        )


class CpuMeter:
    """The host's processors, with the methods of CudaMeter. The context is what libraries hold once they are loaded.

    What the process gains later, from probe to probe, is no context: a run of one configuration does not have it, and a
    limit that shrank by it would differ between the trials of a study. Peaks leave it out too (`rebase`).

    Peaks repeat to 1 % only if large blocks come straight from the kernel and go straight back, as the parent sets
    malloc for the process. The full run keeps them, and can be twice as fast: while steps are timed, so does this.
    Linux adds a process's pages up in batches (the larger of 32 and twice the number of processors), and a peak leaves
    out what each processor has not yet handed on: at most 0.7 MiB with two processors, some 0.4 GiB with 128.
    """

    peaks_are_free = False
    aside_gib = 0.0
    others_gib = 0.0

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype, self._libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._libc.free.restype, self._libc.free.argtypes = None, [ctypes.c_void_p]
        self._held: list[
            int
        ] = []  # blocks of malloc's that are allocated only to keep tensors out of them
        self._capped_at: int | None = (
            None  # the limit that holds again when freed memory is returned again
        )
        self.settle()

    def settle(self) -> None:
        self._first = self._status("RssAnon")
        self.rebase(0.0)

    def rebase(self, resident_gib: float) -> None:
        resident = int(resident_gib * GIB)
        self._before = self._status("RssAnon") - resident
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

    def hold_memory(self, allocator: str) -> None:
        """The host's memory has no such choice."""

    def keep_freed(self) -> None:
        """Let malloc keep freed blocks, as the exported run does. Nothing is capped meanwhile."""
        while self._held:
            self._libc.free(self._held.pop())
        set_release_threshold(KEPT_BYTES)
        self._capped_at, _ = resource.getrlimit(resource.RLIMIT_DATA)
        self.uncap()

    def return_freed(self, resident_gib: float) -> None:
        """Let large blocks go straight back to the kernel again. What malloc has kept is no part of peaks."""
        if self._capped_at is None:
            return
        self._hold_free_blocks()
        data, capped_at = self._data, self._capped_at
        self.rebase(resident_gib)
        self._capped_at = None
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = capped_at if capped_at == resource.RLIM_INFINITY else capped_at + self._data - data
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        self.reset_peak()

    def _hold_free_blocks(self) -> None:
        """Return the pages of all free blocks, and allocate these, untouched: a tensor there would not be returned."""
        set_release_threshold(RETURNED_BYTES)
        self._libc.malloc_trim(0)
        size = KEPT_BYTES
        while size >= RETURNED_BYTES:
            block = self._libc.malloc(size)
            if block is None:  # more than the process may have
                size //= 2
                continue
            if (
                ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
                & IS_MAPPED
            ):
                self._libc.free(block)  # no free block is as large
                size //= 2
            else:
                self._held.append(block)

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def passed(self, mark: float) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def allocated_gib(self) -> float:
        return gib(max(self._status("RssAnon") - self._before, 0))

    def reserved_gib(self) -> float:
        return gib(max(self._status("VmData") - self._data, 0))

    def reset_peak(self) -> None:
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def peak_gib(self) -> tuple[float, float]:
        """The same number twice: a CPU has no allocator reserve that outlives a tensor."""
        file_backed = self._status("RssFile") + self._status("RssShmem")
        peak = gib(max(self._status("VmHWM") - file_backed - self._before, 0))
        return peak, peak

    def context_gib(self) -> float:
        return gib(self._first)

    def alloc_retries(self) -> int:
        return 0

    def release(self, *, collect: bool = True) -> None:
        if self._capped_at is not None:  # a probe failed while it was timed
            self._capped_at = None
            self._hold_free_blocks()
        if collect:
            gc.collect()
        self._libc.malloc_trim(0)

    def returned_to(self, baseline_gib: float) -> bool:
        # Python's own arenas wander by a few MiB. What libraries load and reserve as they are first used stops growing
        # below 0.2 GiB; what is lost for good adds up.
        lost = gib(self._status("RssAnon") - self._first) - self.aside_gib - baseline_gib
        return self.allocated_gib() - baseline_gib < 24 / 1024 and lost < MAX_LOST_GIB

    def memory_gib(self) -> float:
        return gib(psutil.virtual_memory().total)

    def fingerprint(self) -> Fingerprint:
        return _fingerprint(
            device=processor_name(),
            device_memory_gib=round(self.memory_gib(), 1),
            allocator="malloc",
            threads=torch.get_num_threads(),
        )

    def _status(self, key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


Meter = CudaMeter | CpuMeter  # one device, as the probe sees it


def open_meter(device: str) -> Meter:
    """The meter of "cuda" or "cpu"."""
    return CudaMeter() if device == "cuda" else CpuMeter()


def _fingerprint(**fields: Any) -> Fingerprint:
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return Fingerprint(
        python=platform.python_version(), packages=packages, probe=PROBE_VERSION, **fields
    )
