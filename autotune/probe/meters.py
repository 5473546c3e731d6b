"""Limits and measures the memory of a probe's device (CUDA or CPU), and times the device's work.

On CUDA, torch's caching allocator counts memory, and the memory that it reserves must stay below
the limit. On a CPU, the memory is the process's resident anonymous memory. Linux reports the peak
of resident memory as VmHWM, which can be reset. RLIMIT_DATA limits the process's memory.
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

MAX_LOST_GIB = 0.5  # GiB of host memory; a worker is replaced if its probes have kept more in total
# Memory counts as returned if it differs from the baseline by less than this. Some GPU libraries
# keep 2 MiB after their first use of a large matrix.
WORKSPACE_GIB = 8 / 1024
# While memory peaks are read on a CPU, freed blocks of at least this size return to the kernel.
RETURNED_BYTES = 2**16
# malloc writes a header before each block. This bit of the header is set if the kernel mapped the
# block separately (mmap).
IS_MAPPED = 2
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
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
)


class CudaMeter:
    """Limits and measures an NVIDIA GPU for a probe; memory is in GiB, and times are in seconds.

    Times come from device events, peaks from the caching allocator. `peaks_are_free` is True if
    reading a memory peak does not slow the timed steps. `aside_gib` is the memory of cached models
    that this probe does not use. Measured peaks and the memory limit leave this memory out.
    `others_gib` is the memory of other processes, which compile for later probes; it does not count
    as this process's context.
    """

    peaks_are_free = True
    aside_gib = 0.0
    others_gib = 0.0

    def __init__(self) -> None:
        self._nvml = Nvml.open()
        # The card's used memory, read before the process has a CUDA context. In a container with
        # its own process ids, the driver does not show the memory of one process. The size of the
        # context is then computed: the growth of the card's used memory since this reading, minus
        # torch's memory.
        self._used_before_gib = self._nvml.used_gib() if self._nvml else None

        torch.cuda.init()
        self.torch_device = torch.device("cuda", 0)
        self._properties = torch.cuda.get_device_properties(0)
        ones = torch.ones(256, 256, device=self.torch_device)
        ones.matmul(torch.ones(256, 256, device=self.torch_device))
        self.synchronize()

    def settle(self) -> None:
        """Make the present memory the baseline: after each probe, the memory must return to it.

        On CUDA, this method does nothing, because torch counts memory exactly.
        """

    def rebase(self, resident_gib: float) -> None:
        """Exclude the process's present memory, except the resident model's, from later peaks.

        On CUDA, this method does nothing, because torch counts only tensors.
        """

    def keep_freed(self) -> None:
        """Keep freed memory from now on, so that steps take the same time as in the full run.

        On CUDA, this method does nothing, because torch always keeps freed memory.
        """

    def return_freed(self, resident_gib: float) -> None:
        """Return freed memory to the kernel again, so that peaks can be read; do nothing on CUDA.

        `resident_gib` is the memory of the tensors that exist now.
        """

    def cap(self, memory_gib: float, headroom: float, managed_gib: float) -> float:
        """Make allocations beyond a memory limit fail, and return this limit in GiB.

        The limit is `memory_gib` * (1 - `headroom`), minus the context and `managed_gib`.
        """
        total = self.memory_gib()
        taken = self.context_gib()
        # If the driver does not tell the context's memory, assume that all memory outside torch is
        # the context's.
        if taken is None:
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            outside = gib(total_bytes - free_bytes - torch.cuda.memory_reserved())
            taken = max(outside - self.others_gib, 0.0)
        taken += managed_gib
        limit = memory_limit_gib(memory_gib, headroom, taken_gib=taken)

        # A probe of a few layers may get the memory limit of a larger card, which is above this
        # card's own limit.
        room = max(memory_limit_gib(total, headroom, taken_gib=taken), min(limit, total))
        share = min(max(limit, 0.01) + self.aside_gib, room) / total
        torch.cuda.set_per_process_memory_fraction(share)
        return limit

    def uncap(self) -> None:
        """Remove the cap."""
        torch.cuda.set_per_process_memory_fraction(1.0)

    def mark(self) -> torch.cuda.Event:
        """A mark in the device's queue, after all work that has been issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two marks that the device has passed."""
        return float(start.elapsed_time(end)) / 1000

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed this mark, without waiting."""
        return bool(mark.query())

    def synchronize(self) -> None:
        """Wait until the device has finished all work issued so far."""
        torch.cuda.synchronize()

    def allocated_gib(self) -> float:
        """The memory of all tensors."""
        return gib(torch.cuda.memory_allocated()) - self.aside_gib

    def reserved_gib(self) -> float:
        """The memory that the allocator holds, used or cached."""
        return gib(torch.cuda.memory_reserved()) - self.aside_gib

    def reset_peak(self) -> None:
        """Start to measure a new peak."""
        torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> tuple[float, float]:
        """The peaks of allocated and reserved memory since the last reset."""
        # torch returns nested statistics in a fifth of the time of flat statistics.
        stats = torch.cuda.memory_stats_as_nested_dict()
        allocated = stats["allocated_bytes"]["all"]["peak"]
        reserved = stats["reserved_bytes"]["all"]["peak"]
        return gib(allocated) - self.aside_gib, gib(reserved) - self.aside_gib

    def context_gib(self) -> float | None:
        """The process's memory outside tensors (context, kernels, libraries); None if unknown."""
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
        """The number of allocations that torch retried after freeing its cache, since `release`."""
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_alloc_retries", 0))

    def hold_memory(self, allocator: str) -> None:
        """Set up the allocator for future allocations as the knob `allocator` says."""
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings(ALLOCATORS[allocator])

    def release(self, *, collect: bool = True) -> None:
        """Return all unused memory and reset the statistics.

        With `collect`, first collect garbage.
        """
        if collect:
            gc.collect()
        # This call also frees the workspaces of streams that are not used again.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        # Offloaded checkpoints leave host memory in torch's cache. Only newer versions of torch can
        # empty this cache.
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()
        torch.cuda.reset_accumulated_memory_stats()
        self.reset_peak()

    def has_returned(self, baseline_gib: float) -> bool:
        """Whether memory has returned to the baseline, apart from small random differences."""
        return abs(self.allocated_gib() - baseline_gib) < WORKSPACE_GIB

    def memory_gib(self) -> float:
        """The device's total memory."""
        return gib(self._properties.total_memory)

    def fingerprint(self) -> Fingerprint:
        """The hardware and software of a measurement on this device."""
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
    """The host's processors, with the methods of CudaMeter.

    The context is the memory of the loaded libraries. The process's memory grows from probe to
    probe. This growth does not count as context, because a full run trains only one configuration.
    If the growth lowered the limit, the trials of a study would have different limits. Peaks
    exclude the growth too (`rebase`).

    Repeated peaks agree within 1 % only if malloc takes large blocks directly from the kernel and
    returns them at once. The parent configures malloc to do so. In the full run, malloc keeps freed
    blocks, and steps can be twice as fast. So malloc also keeps freed blocks while steps are timed.
    A processor reports a process's new pages to Linux's total in batches of 32 pages, or of twice
    the number of processors if that is more. A peak omits pages that no processor has reported yet:
    at most 0.7 MiB with two processors, and about 0.4 GiB with 128.
    """

    peaks_are_free = False
    aside_gib = 0.0
    others_gib = 0.0

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.malloc.argtypes = [ctypes.c_size_t]
        self._libc.free.restype = None
        self._libc.free.argtypes = [ctypes.c_void_p]
        # Addresses of blocks that are allocated only so that tensors cannot use them.
        self._held: list[int] = []
        # The limit that `return_freed` will restore; None while malloc returns freed blocks.
        self._capped_at: int | None = None
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
        # VmData also counts address space that libraries reserve and never use, so the system's
        # limit is VmData's value at the last `rebase` plus the cap.
        resource.setrlimit(resource.RLIMIT_DATA, (int(max(limit, 0.01) * GIB) + self._data, hard))
        return limit

    def uncap(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def hold_memory(self, allocator: str) -> None:
        """Do nothing, because a CPU has no choice of allocators."""

    def keep_freed(self) -> None:
        """Let malloc keep freed blocks, as in the exported run.

        The memory is not capped until `return_freed` is called.
        """
        while self._held:
            self._libc.free(self._held.pop())
        set_release_threshold(KEPT_BYTES)
        self._capped_at, _ = resource.getrlimit(resource.RLIMIT_DATA)
        self.uncap()

    def return_freed(self, resident_gib: float) -> None:
        """Return large freed blocks to the kernel again, and exclude kept blocks from peaks."""
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
        """Return the pages of free blocks, and allocate these blocks without touching them.

        Otherwise malloc would place new tensors in these blocks, and the pages of such a tensor
        would not return to the kernel when the tensor is freed.
        """
        set_release_threshold(RETURNED_BYTES)
        self._libc.malloc_trim(0)

        size = KEPT_BYTES
        while size >= RETURNED_BYTES:
            block = self._libc.malloc(size)
            # If malloc failed, the size exceeds the memory limit of the process.
            if block is None:
                size //= 2
                continue
            header = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t))
            if header.value & IS_MAPPED:
                # The kernel made a new block, so malloc has no free block of this size.
                self._libc.free(block)
                size //= 2
            else:
                self._held.append(block)

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def has_passed(self, mark: float) -> bool:
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
        """Return the peak of the process's memory, as the allocated and as the reserved peak.

        Both peaks are equal, because an allocator for a CPU caches no freed memory.
        """
        file_backed = self._status("RssFile") + self._status("RssShmem")
        peak = gib(max(self._status("VmHWM") - file_backed - self._before, 0))
        return peak, peak

    def context_gib(self) -> float:
        return gib(self._first)

    def alloc_retries(self) -> int:
        return 0

    def release(self, *, collect: bool = True) -> None:
        # `_capped_at` is still set if the last probe failed in its timed steps, before
        # `return_freed`.
        if self._capped_at is not None:
            self._capped_at = None
            self._hold_free_blocks()
        if collect:
            gc.collect()
        self._libc.malloc_trim(0)

    def has_returned(self, baseline_gib: float) -> bool:
        # Python's own arenas vary by a few MiB. At their first use, libraries keep some memory,
        # less than 0.2 GiB in total. Any further growth is memory that probes did not return.
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


Meter = CudaMeter | CpuMeter  # the meter of the device that this process probes


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
