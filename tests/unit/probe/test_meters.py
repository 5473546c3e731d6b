"""What a GPU's meter says of the context, with a driver and a torch that the test makes up; what a
host has lost.
"""

import ctypes
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.core.child_environment import child_environment
from autotune.core.probe_types import PROBE_VERSION
from autotune.core.units import GIB
from autotune.probe import meters
from autotune.probe.meters import CpuMeter, CudaMeter
from autotune.trainer import malloc
from autotune.trainer.settings import ALLOCATOR_VARIABLE


class Driver:
    """NVML on a card: `by_process` is what it shows for this process, `used` what is in use on the
    whole card.
    """

    def __init__(self, by_process: float | None, used: float | None) -> None:
        self.by_process = by_process
        self.used = used

    def used_by_process_gib(self, pid: int) -> float | None:
        return self.by_process

    def used_gib(self) -> float | None:
        return self.used


class Properties:
    total_memory = 24 * GIB


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """torch holds 2 of 24 GiB, 14 GiB are free. Collects the fractions that it is capped to."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (14 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    return fractions


def meter(driver: Driver | None, used_before: float | None = None) -> CudaMeter:
    made: Any = object.__new__(CudaMeter)
    made._nvml = driver
    made._used_before_gib = used_before
    made._properties = Properties()
    return made


def test_the_context_is_what_the_driver_shows_for_the_process(limits: list[float]) -> None:
    assert meter(Driver(2.5, 20.0), 10.0).context_gib() == pytest.approx(0.5)


def test_in_a_container_the_context_is_what_the_card_holds_more_than_before(
    limits: list[float],
) -> None:
    """The driver does not know the process there; 5 GiB are of others."""
    assert meter(Driver(None, 7.75), 5.0).context_gib() == pytest.approx(0.75)
    assert meter(Driver(None, 6.0), 5.0).context_gib() == 0.0  # a neighbour has returned some


def test_an_unknown_context_is_none(limits: list[float]) -> None:
    assert meter(None).context_gib() is None
    assert meter(Driver(None, None), 5.0).context_gib() is None
    assert meter(Driver(None, 7.0), None).context_gib() is None


def test_the_limit_leaves_room_for_the_context(
    limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert meter(Driver(2.5, 20.0)).cap(20.0, 0.1, managed_gib=1.0) == pytest.approx(
        18.0 - 0.5 - 1.0
    )
    # Unknown, it is at most what the card holds besides torch's memory.
    assert meter(None).cap(20.0, 0.1, managed_gib=0.0) == pytest.approx(18.0 - 8.0)
    assert limits == pytest.approx([16.5 / 24, 10 / 24])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (23 * GIB, 24 * GIB))
    # all of it is torch's
    assert meter(None).cap(20.0, 0.1, managed_gib=0.0) == pytest.approx(18.0)
    meter(None).uncap()
    assert limits[-1] == 1.0


def test_a_fingerprint_names_the_versions_of_what_measured() -> None:
    packages = CpuMeter().fingerprint().packages
    assert (
        packages["torch"] == torch.__version__
        and {"transformers", "peft", "accelerate"} < packages.keys()
    )


def test_address_space_of_a_host_is_not_lost_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries reserve more than they touch; what probes leave behind adds up."""
    status = {"VmData": 4 * GIB, "RssAnon": GIB}
    meter = CpuMeter()
    monkeypatch.setattr(meter, "_status", status.__getitem__)
    meter.settle()
    status["VmData"] += 2 * GIB
    assert meter.has_returned(0.0)
    for _ in range(3):
        assert meter.has_returned(0.0)
        status["RssAnon"] += GIB // 6
        meter.rebase(0.0)
    assert meter.has_returned(0.0)
    status["RssAnon"] = GIB + GIB // 2
    meter.rebase(0.0)
    assert not meter.has_returned(0.0)


PEAKS = """
import torch
from autotune.core.units import gib
from autotune.probe.meters import CpuMeter

def blocks(sizes_kib):
    return [torch.ones(size * 256) for size in sizes_kib]

meter = CpuMeter()
meter.cap(4.0, 0.1, managed_gib=0.0)
held = blocks([40_000])
for _ in range(3):
    meter.keep_freed()
    before = meter._status("RssAnon")
    blocks([60_000]).clear()
    assert meter._status("RssAnon") - before > 58_000 * 1024
    scattered = blocks([100, 3_000, 700, 9_000, 300] * 20)
    del scattered[1::2]
    scattered.clear()
    meter.return_freed(gib(40_000 * 1024))
    began = meter.allocated_gib()
    assert abs(began * 1024 - 39.06) < 0.1, began * 1024
    used = blocks([200, 5_000, 800, 1_500, 30_000])
    used.clear()
    _, peak = meter.peak_gib()
    assert abs((peak - began) * 1024 - 37_500 / 1024) < 0.3, (peak - began) * 1024
    assert abs(meter.allocated_gib() - began) * 1024 < 0.1
    try:
        torch.ones(2**30)
    except RuntimeError:
        continue
    raise AssertionError("nothing is capped any more")
"""


def test_peaks_of_a_host_are_exact_again_after_freed_memory_was_kept() -> None:
    """On one processor: each keeps back up to 31 pages of each count, which the kernel's peak then
    lacks.
    """
    environment = child_environment(os.environ, "cpu")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # of this thread, and so of the process that it starts
    try:
        command = [sys.executable, "-c", PEAKS]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    finally:
        os.sched_setaffinity(0, allowed)
    assert not done.returncode, done.stderr


def test_a_gpu_has_its_memory_back_but_for_what_libraries_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some library keeps 2 MiB from its first use of a large matrix on; a tensor that is left is
    more.
    """
    for kept_mib, returned in ((2, True), (-7, True), (8, False), (-8, False), (9, False)):
        monkeypatch.setattr(
            torch.cuda, "memory_allocated", lambda kept=kept_mib: GIB + kept * 2**20
        )
        assert meter(None).has_returned(1.0) is returned


def test_memory_of_models_that_wait_is_neither_counted_nor_capped(
    limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = {
        "allocated_bytes": {"all": {"peak": 5 * GIB}},
        "reserved_bytes": {"all": {"peak": 6 * GIB}},
    }
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda: stats | {"num_alloc_retries": 3}
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * GIB)
    made = meter(Driver(2.5, 20.0))
    assert (made.allocated_gib(), made.reserved_gib(), made.peak_gib()) == (3.0, 2.0, (5.0, 6.0))
    made.aside_gib = 1.25
    assert (made.allocated_gib(), made.reserved_gib(), made.peak_gib()) == (
        1.75,
        0.75,
        (3.75, 4.75),
    )
    assert made.alloc_retries() == 3
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", dict)
    assert made.alloc_retries() == 0
    assert made.cap(12.0, 0.25, managed_gib=0.0) == 9.0 - 0.5
    assert limits == [(8.5 + 1.25) / 24]


def test_a_cap_leaves_room_on_this_card_unless_a_few_layers_stand_for_a_larger_one(
    limits: list[float],
) -> None:
    made = meter(Driver(2.5, 20.0))
    made.aside_gib = 4.0
    made.cap(24.0, 0.25, managed_gib=0.0)  # what waits does not fit beside it
    assert made.cap(80.0, 0.25, managed_gib=0.0) == 59.5
    assert made.cap(0.25, 0.0, managed_gib=0.0) <= 0.01  # the context alone is more
    assert limits == pytest.approx([17.5 / 24, 1.0, 4.01 / 24])


def test_a_gpu_is_given_back_what_is_cached_and_its_statistics_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    for name in (
        "empty_cache",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
        "synchronize",
    ):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", lambda: done.append("host"), raising=False
    )
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False
    )
    monkeypatch.setattr(meters.gc, "collect", lambda: collected.append(len(done)))
    collected: list[int] = []
    made = meter(None)
    made.release()
    assert collected == [0]  # before anything is given back
    given_back = [
        "workspaces",
        "empty_cache",
        "host",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
    ]
    assert done == given_back
    made.reset_peak()
    made.synchronize()
    assert done[5:] == ["reset_peak_memory_stats", "synchronize"]
    made.release(collect=False)
    assert collected == [0] and done[7:] == given_back


def test_the_time_of_a_gpu_is_that_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            self.recorded = False

        def record(self) -> None:
            self.recorded = True

        def elapsed_time(self, end: Any) -> float:
            return 250.0  # milliseconds

        def query(self) -> bool:
            return self.recorded

    monkeypatch.setattr(torch.cuda, "Event", Event)
    made = meter(None)
    assert made.seconds(made.mark(), made.mark()) == 0.25
    assert made.has_passed(made.mark()) and not made.has_passed(Event(enable_timing=True))  # type: ignore[arg-type]


def test_the_circumstances_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", {0: (8, 6), 1: (9, 0)}.__getitem__)
    monkeypatch.setenv(ALLOCATOR_VARIABLE, "expandable_segments:True")
    made: Any = meter(None)
    made._properties = SimpleNamespace(name="NVIDIA A10", total_memory=22.4849 * GIB)
    found = made.fingerprint()
    assert (found.device, found.compute_capability, found.device_memory_gib) == (
        "NVIDIA A10",
        "8.6",
        22.48,
    )
    assert (found.driver, found.cuda, found.allocator) == (
        None,
        torch.version.cuda,
        "expandable_segments:True",
    )
    made._nvml = SimpleNamespace(driver="580.1")
    assert made.fingerprint().driver == "580.1"
    monkeypatch.delenv(ALLOCATOR_VARIABLE)
    assert made.fingerprint().allocator == ""


def test_the_circumstances_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CpuMeter()
    monkeypatch.setattr(made, "memory_gib", lambda: 15.617)
    found = made.fingerprint()
    assert (found.device_memory_gib, found.allocator, found.threads) == (
        15.6,
        "malloc",
        torch.get_num_threads(),
    )
    assert found.python == platform.python_version() and found.probe == PROBE_VERSION
    assert "autotune" not in found.packages


def test_what_a_host_holds_is_what_it_gained_since_the_last_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a peak, what files and shared memory hold is none of the process's own; nothing is less
    than nothing.
    """
    status = {
        "RssAnon": 2 * GIB,
        "VmData": 4 * GIB,
        "VmHWM": 9 * GIB,
        "RssFile": GIB,
        "RssShmem": GIB // 2,
    }
    made = CpuMeter()
    monkeypatch.setattr(made, "_status", status.__getitem__)
    made.rebase(0.5)
    assert (made.allocated_gib(), made.reserved_gib()) == (0.5, 0.5)
    assert made.peak_gib() == (6.0, 6.0)
    status |= {"RssAnon": GIB, "VmData": 3 * GIB, "VmHWM": GIB}
    assert (made.allocated_gib(), made.reserved_gib(), made.peak_gib()) == (0.0, 0.0, (0.0, 0.0))


def test_a_host_has_its_memory_back_but_for_what_python_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = {"RssAnon": GIB, "VmData": GIB}
    made = CpuMeter()
    monkeypatch.setattr(made, "_status", status.__getitem__)
    made.settle()
    status["RssAnon"] += GIB // 4 + 20 * 2**20
    assert made.has_returned(0.25) and not made.has_returned(0.245)
    status["RssAnon"] += 4 * 2**20  # 24 MiB in all
    assert not made.has_returned(0.25)
    status["RssAnon"] -= 4 * 2**20
    made.rebase(0.25)
    status["RssAnon"] += GIB // 2
    assert made.has_returned(0.75)
    made.rebase(0.25)
    assert not made.has_returned(0.25)  # over half a GiB is lost
    made.aside_gib = 0.25
    assert made.has_returned(0.25)  # or held by a model that waits


def test_a_limit_of_a_host_is_on_top_of_what_it_has_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = {"RssAnon": GIB, "VmData": 3 * GIB}
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(meters.resource, "getrlimit", lambda which: (7, 2**50))
    monkeypatch.setattr(meters.resource, "setrlimit", lambda which, pair: limits.append(pair))
    made = CpuMeter()
    monkeypatch.setattr(made, "_status", status.__getitem__)
    made.settle()
    assert made.cap(8.0, 0.25, managed_gib=0.5) == 6.0 - 1.0 - 0.5
    made.cap(1.0, 0.5, managed_gib=0.0)
    made.uncap()
    assert limits == [(int(7.5 * GIB), 2**50), (int(0.01 * GIB) + 3 * GIB, 2**50), (2**50, 2**50)]
    # What the process gains between probes changes no limit; the next probe gets as much above it.
    status |= {"RssAnon": 2 * GIB, "VmData": 5 * GIB}
    made.rebase(0.0)
    assert (made.context_gib(), made.cap(8.0, 0.25, managed_gib=0.5)) == (1.0, 4.5)
    assert limits[-1] == (int(9.5 * GIB), 2**50)


def test_a_card_is_looked_at_before_the_process_has_a_context_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then a product is made on it, whose libraries count as context."""
    done: list[Any] = []
    driver = SimpleNamespace(used_gib=lambda: done.append("used") or 3.5)  # type: ignore[func-returns-value]
    monkeypatch.setattr(meters.Nvml, "open", lambda: driver)
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: f"of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    ones = torch.ones

    def made(*shape: int, device: torch.device) -> torch.Tensor:
        done.append((shape, device))
        return ones(*shape)

    monkeypatch.setattr(torch, "ones", made)
    found: Any = CudaMeter()
    card = torch.device("cuda", 0)
    assert done == ["used", "init", ((256, 256), card), ((256, 256), card), "wait"]
    assert (found._used_before_gib, found.torch_device, found._properties) == (3.5, card, "of 0")
    monkeypatch.setattr(meters.Nvml, "open", lambda: None)
    assert CudaMeter()._used_before_gib is None


def test_there_is_a_meter_for_each_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "CudaMeter", lambda: "card")
    monkeypatch.setattr(meters, "CpuMeter", lambda: "host")
    assert [meters.open_meter(kind) for kind in ("cuda", "cpu")] == ["card", "host"]
    assert CudaMeter.peaks_are_free and not CpuMeter.peaks_are_free


def test_what_a_host_says_of_a_process_is_in_kilobytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = CpuMeter()
    assert made.context_gib() > 0.0 and made.allocated_gib() < 0.25 and made.has_returned(0.0)
    (tmp_path / "status").write_text(
        "Name:\tx\nVmHWM:\t  300 kB\nVmHWMx:\t1 kB\nRssAnon:\t 20 kB\n"
    )
    monkeypatch.setattr(meters, "Path", lambda path: tmp_path / Path(path).name)
    assert (made._status("VmHWM"), made._status("RssAnon")) == (307_200, 20_480)
    monkeypatch.setattr(meters.psutil, "virtual_memory", lambda: SimpleNamespace(total=3 * GIB))
    assert made.memory_gib() == 3.0


def test_the_time_of_a_host_is_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CpuMeter()
    monkeypatch.setattr(meters.time, "perf_counter", lambda: 7.5)
    made.synchronize()
    assert (
        made.mark() == 7.5
        and made.has_passed(made.mark())
        and made.seconds(7.5, 9.0) == 1.5
        and made.alloc_retries() == 0
    )


class Heap:
    """glibc's malloc with a free block of each of these sizes;
    other blocks come from the kernel.
    """

    def __init__(self, *free: int) -> None:
        self.blocks = [*free]
        self.largest = 2**40  # what the process may have
        self.said: list[Any] = []
        # by the address of a block: the word before it, and a little of it
        self.memory: dict[int, Any] = {}

    def set_release_threshold(self, threshold: int) -> None:
        self.said.append(threshold)

    def malloc_trim(self, left: int) -> None:
        self.said.append(("trim", left))

    def malloc(self, size: int) -> int | None:
        assert isinstance(size, int)
        if size > self.largest:
            return None
        is_free = size in self.blocks
        if is_free:
            self.blocks.remove(size)
        words = (ctypes.c_size_t * 2)(1 if is_free else 2)
        address = ctypes.addressof(words) + ctypes.sizeof(ctypes.c_size_t)
        self.memory[address] = words
        return address

    def free(self, address: int) -> None:
        self.memory.pop(address)


RETURNED, KEPT = [2**16], [2**30]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Heap, list[Any]]:
    """A host's meter with five blocks that are free; its limits; 3 GiB of 4 GiB of address space
    are reserved.
    """
    made: Any = CpuMeter()
    limits: list[Any] = [5 * GIB]
    monkeypatch.setattr(meters.resource, "getrlimit", lambda which: (limits[-1], 2**50))
    monkeypatch.setattr(meters.resource, "setrlimit", lambda which, pair: limits.append(pair[0]))
    monkeypatch.setattr(made, "_status", {"RssAnon": 2 * GIB, "VmData": 4 * GIB}.__getitem__)
    made._libc = heap = Heap(2**25, 2**20, 2**20, 2**16, 2**15)
    monkeypatch.setattr(meters, "set_release_threshold", heap.set_release_threshold)
    made._before, made._data = GIB, 3 * GIB
    return made, heap, limits


def test_freed_memory_is_kept_without_a_cap_and_then_returned_under_it(
    host: tuple[Any, Heap, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, heap, limits = host
    peaks: list[bool] = []
    monkeypatch.setattr(made, "reset_peak", lambda: peaks.append(True))
    made.return_freed(0.5)  # it was not kept
    assert heap.said == [] and limits == [5 * GIB] and not peaks
    made.keep_freed()
    assert heap.said == KEPT and limits == [5 * GIB, 2**50]
    made.return_freed(0.5)
    assert heap.said == [*KEPT, *RETURNED, ("trim", 0)]
    # Free blocks are held, so that no tensor comes to lie in them; one from the kernel is not.
    assert len(made._held) == len(heap.memory) == 4 and set(made._held) == set(heap.memory)
    assert heap.blocks == [2**15]  # no tensor that small comes from the kernel
    assert (made._before, made._data) == (1.5 * GIB, 3.5 * GIB) and peaks == [True]
    assert limits[2:] == [5.5 * GIB]  # as much more as is reserved since
    made.return_freed(0.5)
    assert len(limits) == 3
    made.keep_freed()
    assert not heap.memory and not made._held


def test_free_blocks_are_held_where_a_larger_one_is_refused(
    host: tuple[Any, Heap, list[Any]],
) -> None:
    made, heap, _ = host
    heap.largest = 2**26
    made.keep_freed()
    made.return_freed(0.5)
    assert len(made._held) == 4 and heap.blocks == [2**15]


@pytest.mark.parametrize(
    ("largest", "said"),
    [
        (2**40, [(-3, 2**30), (-1, 2**31 - 1), (-3, 2**16), (-1, 2**17)]),
        # An older glibc refuses. What was set before must not stay, which the second setting would
        # fix.
        (2**25, [(-3, 2**30), (-3, 2**25), (-1, 2**26), (-3, 2**16), (-1, 2**17)]),
    ],
)
def test_malloc_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, largest: int, said: list[tuple[int, int]]
) -> None:
    told: list[tuple[int, int]] = []

    def mallopt(name: int, value: int) -> int:
        told.append((name, value))
        return int(name != -3 or value <= largest)

    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    malloc.set_release_threshold(malloc.KEPT_BYTES)
    malloc.set_release_threshold(2**16)
    assert told == said
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: SimpleNamespace())  # musl, macOS
    malloc.set_release_threshold(2**16)
    assert told == said


def test_what_was_not_capped_is_not_capped_afterwards(host: tuple[Any, Heap, list[Any]]) -> None:
    made, _, limits = host
    limits[-1] = resource.RLIM_INFINITY
    made.keep_freed()
    made.return_freed(0.0)
    assert limits[-1] == resource.RLIM_INFINITY


def test_after_a_failure_freed_memory_is_returned_again(
    host: tuple[Any, Heap, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, heap, _ = host
    collected: list[bool] = []
    monkeypatch.setattr(meters.gc, "collect", lambda: collected.append(True))
    made.release()
    assert heap.said == [("trim", 0)] and collected == [True]
    made.keep_freed()
    heap.said.clear()
    made.release()
    assert heap.said == [*RETURNED, ("trim", 0), ("trim", 0)] and len(made._held) == 4
    made.release()
    assert heap.said[3:] == [("trim", 0)] and len(made._held) == 4


def test_the_kernel_is_told_where_a_new_peak_begins(
    host: tuple[Any, Heap, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, heap, _ = host
    monkeypatch.setattr(meters, "Path", lambda path: tmp_path / Path(path).name)
    made.reset_peak()
    assert heap.said == [("trim", 0)] and (tmp_path / "clear_refs").read_text() == "5"
