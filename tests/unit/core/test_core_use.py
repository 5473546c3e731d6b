"""The processor time that others use: read from a made-up /proc, and from the real one beside a
busy process.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.core import core_use
from autotune.core.core_use import CoreUse

SECOND = os.sysconf("SC_CLK_TCK")  # in ticks


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cores 0 and 1 of three, this process, and a child with a child of its own."""
    monkeypatch.setattr(core_use, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    tree = {os.getpid(): "11", 11: "12", 12: ""}
    for process, children in tree.items():
        task = tmp_path / str(process) / "task" / str(process)
        task.mkdir(parents=True)
        (task / "children").write_text(children)
    return tmp_path


def write(proc: Path, *, busy_s: int, idle_s: float, own_s: tuple[int, int, int]) -> None:
    """Write the counters. Busy time is sampled, so only idle time and the clock are exact."""
    idle = round(idle_s * SECOND)
    core = f"{busy_s * SECOND} 0 0 {idle} {idle} 0 0 {SECOND}"
    (proc / "stat").write_text(
        f"cpu 9 9 9 9\ncpu0 {core}\ncpu1 {core}\ncpu2 {9 * busy_s * SECOND} 0 0 0\nintr 5\n"
    )
    for process, seconds in zip((os.getpid(), 11, 12), own_s, strict=True):
        fields = [0] * 11 + [seconds * SECOND, 0, 0, 0, 99]
        (proc / str(process) / "stat").write_text(
            f"{process} (a (b) 7) S {' '.join(map(str, fields[1:]))}\n"
        )


def test_others_use_what_the_usable_cores_did_beside_our_processes(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    write(proc, busy_s=10, idle_s=5, own_s=(1, 1, 1))
    before = CoreUse.now()
    write(proc, busy_s=12, idle_s=5.5, own_s=(2, 2, 3))
    after = CoreUse.now()
    assert before is not None and after is not None
    # Each core was idle, or waited for a disk, for one of the 4 s.
    assert after.mean_cores_since(before) == (4 / 4, (2 * 3 - 4) / 4)
    assert before.mean_cores_since(before) is None


def test_a_process_that_has_just_ended_is_left_out(proc: Path) -> None:
    write(proc, busy_s=10, idle_s=5, own_s=(1, 2, 4))
    (proc / "11" / "stat").unlink()
    use = CoreUse.now()
    assert use is not None and use.own_s == 5


def test_without_proc_the_use_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_use, "PROC", tmp_path)
    assert CoreUse.now() is None


def test_in_a_sandbox_without_counters_the_use_is_unknown(proc: Path) -> None:
    write(proc, busy_s=0, idle_s=0, own_s=(1, 2, 4))
    (proc / "stat").write_text("cpu 0 0 0 0\ncpu0 0 0 0 0 0\ncpu1 0 0 0 0 0\n")
    assert CoreUse.now() is None


@pytest.mark.real_processes
def test_a_busy_process_of_somebody_else_counts_and_our_own_does_not() -> None:
    busy = [sys.executable, "-c", "while True: pass"]
    orphan = f"{busy[0]} -c '{busy[2]}' > /dev/null & echo $!"
    other = psutil.Process(int(subprocess.check_output(["sh", "-c", orphan])))
    with subprocess.Popen(busy) as child:
        try:
            before, other_before = CoreUse.now(), other.cpu_times()
            own_before = psutil.Process(child.pid).cpu_times()
            time.sleep(0.5)
            own_after, other_after = psutil.Process(child.pid).cpu_times(), other.cpu_times()
            after = CoreUse.now()
        finally:
            child.kill()
            other.kill()
    assert before is not None and after is not None
    found = after.mean_cores_since(before)
    assert found is not None
    ticks_s = 5 / SECOND  # the counters are rounded
    assert found[1] * (after.at_s - before.at_s) >= other_after.user - other_before.user - ticks_s
    assert after.own_s - before.own_s >= own_after.user - own_before.user - ticks_s
