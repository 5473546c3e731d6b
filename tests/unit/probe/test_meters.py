"""What a GPU's meter says of the context, with a driver and a torch that the test makes up; what a host has lost."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from autotune.core.units import GIB
from autotune.probe.meters import CpuMeter, CudaMeter
from autotune.probe.worker_process import child_environment


class Driver:
    """NVML on a card: `by_process` is what it shows for this process, `used` what is in use on the whole card."""

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


def test_in_a_container_the_context_is_what_the_card_holds_more_than_before(limits: list[float]) -> None:
    """The driver does not know the process there; 5 GiB are of others."""
    assert meter(Driver(None, 7.75), 5.0).context_gib() == pytest.approx(0.75)
    assert meter(Driver(None, 6.0), 5.0).context_gib() == 0.0  # a neighbour has returned some


def test_an_unknown_context_is_none(limits: list[float]) -> None:
    assert meter(None).context_gib() is None
    assert meter(Driver(None, None), 5.0).context_gib() is None
    assert meter(Driver(None, 7.0), None).context_gib() is None


def test_the_limit_leaves_room_for_the_context(limits: list[float]) -> None:
    assert meter(Driver(2.5, 20.0)).cap(20.0, 0.1, managed_gib=1.0) == pytest.approx(18.0 - 0.5 - 1.0)
    # Unknown, it is at most what the card holds besides torch's memory.
    assert meter(None).cap(20.0, 0.1, managed_gib=0.0) == pytest.approx(18.0 - 8.0)
    assert limits == pytest.approx([16.5 / 24, 10 / 24])
    meter(None).uncap()
    assert limits[-1] == 1.0


def test_a_fingerprint_names_the_versions_of_what_measured() -> None:
    packages = CpuMeter().fingerprint().packages
    assert packages["torch"] == torch.__version__ and {"transformers", "peft", "accelerate"} < packages.keys()


def test_address_space_of_a_host_is_not_lost_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries reserve more than they touch; what probes leave behind adds up."""
    status = {"VmData": 4 * GIB, "RssAnon": GIB}
    meter = CpuMeter()
    monkeypatch.setattr(meter, "_status", status.__getitem__)
    meter.settle()
    status["VmData"] += 2 * GIB
    assert meter.returned_to(0.0)
    for _ in range(3):
        assert meter.returned_to(0.0)
        status["RssAnon"] += GIB // 5
        meter.rebase(0.0)
    assert not meter.returned_to(0.0)


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
    blocks([30_000]).clear()
    assert meter._status("RssAnon") - before > 28_000 * 1024
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
    environment = child_environment(os.environ, "cpu")
    done = subprocess.run([sys.executable, "-c", PEAKS], env=environment, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_a_gpu_has_its_memory_back_but_for_what_libraries_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some library keeps 2 MiB from its first use of a large matrix on; a tensor that is left is more."""
    for kept_mib, returned in ((2, True), (-7, True), (9, False), (-9, False)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda kept=kept_mib: GIB + kept * 2**20)
        assert meter(None).returned_to(1.0) is returned
