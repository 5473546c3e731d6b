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

MAX_LOST_GIB = 0.5  # GiB; a CPU worker whose probes leak more than this in total is replaced
# A probe counts as having freed its memory if the memory in use differs from the baseline by less
# than this. Some GPU libraries keep 2 MiB after they first use a large matrix.
WORKSPACE_GIB = 8 / 1024
# While memory peaks are measured on a CPU, malloc returns freed blocks of at least this size to the
# kernel.
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
    "vllm",
    "deepspeed",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
)


class CudaMeter:
    """Limits a probe's memory on an NVIDIA GPU, and measures memory (GiB) and times (seconds).

    Times come from CUDA events, and memory peaks from torch's caching allocator. `peaks_are_free`
    is True if reading a memory peak does not slow the timed steps. `aside_gib` is the memory of
    cached models that this probe does not use. Measured peaks and the memory limit exclude this
    memory. `others_gib` is the device memory of other processes, which compile code for later
    probes. It does not count as part of this process's CUDA context.
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
        """Make the memory in use now the baseline; after each probe, memory must return to it.

        On CUDA, this method does nothing, because torch counts memory exactly.
        """

    def rebase(self, resident_gib: float) -> None:
        """Exclude the memory in use now, except `resident_gib` of live tensors, from later peaks.

        On CUDA, this method does nothing, because torch counts only tensors.
        """

    def keep_freed(self) -> None:
        """Let the allocator keep freed memory from now on, so that steps have their normal speed.

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
        # If the driver does not report the size of the context, assume that it is all device memory
        # outside torch's allocator, except the known memory of other processes.
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
        """A mark (a CUDA event) in the device's queue, after all work issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two marks that the device has passed."""
        return float(start.elapsed_time(end)) / 1000

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed this mark; the call does not wait."""
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

    def used_gib(self) -> float:
        """The memory in use on the whole device, also by other processes and contexts."""
        free, total = torch.cuda.mem_get_info()
        return gib(total - free)

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

    def return_unused(self) -> None:
        """Return the memory that the allocator holds without need, in the middle of a run."""
        torch.cuda.empty_cache()

    def alloc_retries(self) -> int:
        """The number of allocations since `release` that torch retried after freeing its cache."""
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_alloc_retries", 0))

    def hold_memory(self, allocator: str) -> None:
        """Configure torch's allocator as a configuration's setting `allocator` says."""
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings(ALLOCATORS[allocator])

    def release(self, *, collect: bool = True) -> None:
        """Return all unused memory and reset the statistics.

        With `collect`, first collect garbage.
        """
        if collect:
            gc.collect()
        # This call also frees cuBLAS's workspaces for streams that are not used again.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        # Offloaded activation checkpoints leave pinned host memory in torch's cache. Only newer
        # versions of torch can empty this cache.
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
    """Limits and measures a probe on the host's processors, with the methods of CudaMeter.

    The context is the memory of the loaded libraries. The process's memory grows from probe to
    probe. This growth does not count as context, because a full run trains only one configuration.
    If the growth lowered the limit, the trials of a study would have different limits. Peaks
    exclude the growth too (`rebase`).

    The peaks of repeated probes agree within 1 % only if malloc takes large blocks directly from
    the kernel and returns them at once. The parent process configures malloc to do so. In the full
    run, malloc keeps freed blocks, and steps can be twice as fast. So malloc also keeps freed
    blocks while steps are timed. Each processor adds a process's new pages to Linux's counter in
    batches. A batch has 32 pages, or twice the number of processors if that is more. A measured
    peak omits the pages that are not counted yet: at most 0.7 MiB with two processors, and about
    0.4 GiB with 128.
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
        # Addresses of free blocks that are allocated only so that malloc cannot place tensors in
        # them.
        self._held: list[int] = []
        # The limit (RLIMIT_DATA) that `return_freed` will restore, or None while malloc returns
        # freed blocks to the kernel.
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
        # VmData also counts address space that libraries reserve and never use. So RLIMIT_DATA is
        # the cap plus `_data`, which is VmData at the last `rebase` without the live tensors.
        resource.setrlimit(resource.RLIMIT_DATA, (int(max(limit, 0.01) * GIB) + self._data, hard))
        return limit

    def uncap(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def hold_memory(self, allocator: str) -> None:
        """Do nothing, because on a CPU the allocator is always malloc."""

    def keep_freed(self) -> None:
        """Let malloc keep freed blocks, as it does in a run of the exported script.

        The memory is not capped until `return_freed` is called.
        """
        while self._held:
            self._libc.free(self._held.pop())
        set_release_threshold(KEPT_BYTES)
        self._capped_at, _ = resource.getrlimit(resource.RLIMIT_DATA)
        self.uncap()

    def return_freed(self, resident_gib: float) -> None:
        """Make malloc return large freed blocks, and exclude the kept blocks from later peaks."""
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
        """Return the pages of malloc's free blocks to the kernel, and reserve the empty blocks.

        Otherwise malloc would place new tensors in these blocks, and would not return the pages of
        such a tensor to the kernel when the tensor is freed.
        """
        set_release_threshold(RETURNED_BYTES)
        self._libc.malloc_trim(0)

        size = KEPT_BYTES
        while size >= RETURNED_BYTES:
            block = self._libc.malloc(size)
            # malloc fails if the size exceeds the memory limit of the process.
            if block is None:
                size //= 2
                continue
            header = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t))
            if header.value & IS_MAPPED:
                # The kernel mapped a new block, so malloc has no free block of this size.
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

    def used_gib(self) -> float:
        return gib(self._status("RssAnon"))

    def reset_peak(self) -> None:
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def peak_gib(self) -> tuple[float, float]:
        """Return the process's memory peak twice: as the allocated peak and as the reserved peak.

        The two peaks are equal, because malloc caches no freed memory while peaks are measured.
        """
        file_backed = self._status("RssFile") + self._status("RssShmem")
        peak = gib(max(self._status("VmHWM") - file_backed - self._before, 0))
        return peak, peak

    def context_gib(self) -> float:
        return gib(self._first)

    def return_unused(self) -> None:
        self._libc.malloc_trim(0)

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
    """Return the meter for the device "cuda" or "cpu"."""
    return CudaMeter() if device == "cuda" else CpuMeter()


def _fingerprint(**fields: Any) -> Fingerprint:
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return Fingerprint(
        python=platform.python_version(), packages=packages, probe=PROBE_VERSION, **fields
    )
