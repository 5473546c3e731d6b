"""Measures processor time: of this process and its descendants, and of all other processes.

This module reads Linux's /proc and imports no torch. On a virtual machine, processor time that the
hypervisor gives to other machines counts as used by other processes.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = (
    "user",
    "nice",
    "system",
    "idle",
    "iowait",
    "irq",
    "softirq",
    "steal",
)  # the columns of /proc/stat
IDLE = ("idle", "iowait")


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Processor time: `all_s` of all processes on usable cores, `own_s` of our process tree."""

    at_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> "CoreUse | None":
        """Read the counters, or return None on a system without them."""
        try:
            at_s = time.monotonic()
            return cls(at_s, at_s * num_usable_cores() - _idle_s(), _own_s())
        except (OSError, ValueError, LookupError):
            return None

    def mean_cores_since(self, before: "CoreUse") -> tuple[float, float] | None:
        """Return the mean numbers of cores that our process tree and others used since `before`.

        The result is None if no time has passed.
        """
        took_s = self.at_s - before.at_s
        if took_s <= 0:
            return None
        own_s = self.own_s - before.own_s
        others_s = self.all_s - before.all_s - own_s
        return own_s / took_s, max(others_s / took_s, 0.0)


def num_usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _idle_s() -> float:
    """Return the idle seconds of the cores that this process may use.

    Linux measures idle time exactly, but samples busy time 100 to 1,000 times per second. Raises
    ValueError if all counters are 0, as in some sandboxes.
    """
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    idle = 0
    counted = 0
    for line in (PROC / "stat").read_text(encoding="ascii").splitlines():
        name, *ticks = line.split()
        if name in usable:
            by_kind = dict(zip(TICKS, map(int, ticks), strict=False))
            idle += sum(by_kind[kind] for kind in IDLE)
            counted += sum(by_kind.values())

    if counted == 0:
        raise ValueError("the cores have no counters")
    return idle / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the processor seconds of this process and of its running and ended descendants."""
    total = 0
    for process in process_tree(os.getpid()):
        try:
            text = (PROC / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has just ended, and its time will be in its parent's counters
            continue
        # The name in parentheses may contain spaces. Fields 14 to 17 come after the name.
        fields = text.rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def process_tree(process: int) -> Iterator[int]:
    """Yield the ids of a process and its descendants."""
    yield process
    for children in (PROC / str(process) / "task").glob("*/children"):
        try:
            found = children.read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in found:
            yield from process_tree(int(child))
