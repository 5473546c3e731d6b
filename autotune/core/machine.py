"""What the host has: processors, memory, and how fast its disk takes a file. No torch, and nothing is left behind."""

import functools
import os
import time
from pathlib import Path
from tempfile import TemporaryFile

from autotune.core.units import MIB, gib

CGROUP = Path("/sys/fs/cgroup")  # version 2; within a container, the limits of the container
CHUNK_BYTES = 8 * MIB
WRITTEN_BYTES, AT_MOST_S = (
    256 * MIB,
    3.0,
)  # so much is written, and less to a disk that takes longer
CPUINFO = Path("/proc/cpuinfo")
# Any of these sets is enough for oneDNN, which torch multiplies bf16 with. Without them a product takes some 200 times
# as long as in fp32 (measured: 6.8 s for 256 x 1024 by 1024 x 4096 on two cores of an AMD EPYC with AVX2; 0.03 s).
BF16_FEATURES = ({"avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"})


def processor_name(path: Path = CPUINFO) -> str:
    """What the processor is called: 'AMD EPYC 9654'."""
    return _cpuinfo(path, "model name") or "CPU"


@functools.cache
def multiplies_bf16(path: Path = CPUINFO) -> bool:
    """Whether the processor multiplies bf16 about as fast as fp32, by the features it names; False if it names none."""
    features = set(
        (_cpuinfo(path, "flags") or _cpuinfo(path, "features")).split()
    )  # of x86, of Arm
    return any(needed <= features for needed in BF16_FEATURES)


def num_cores(cgroup: Path = CGROUP) -> float:
    """The processors that this process may use: 0.5 where a container has half of one."""
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = _limit(cgroup / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def host_memory_gib(cgroup: Path = CGROUP) -> float:
    """The memory that this process may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _limit(cgroup / "memory.max")
    return gib(min(total, int(limit)) if limit.isdigit() else total)


def disk_mb_s(directory: Path) -> float | None:
    """MB/s at which a file of `directory` is written and reaches the disk; None where none can be written.

    The file has no name, so that the kernel removes it whatever becomes of this process. Its bytes are random: some
    disks compress.
    """
    chunk = os.urandom(CHUNK_BYTES)
    try:
        with TemporaryFile(dir=directory) as file:
            begin, written = time.perf_counter(), 0
            while written < WRITTEN_BYTES and time.perf_counter() - begin < AT_MOST_S:
                file.write(chunk)
                file.flush()
                os.fdatasync(file.fileno())
                written += len(chunk)
            return written / 1e6 / (time.perf_counter() - begin)
    except OSError:
        return None


def _cpuinfo(path: Path, key: str) -> str:
    """The first value of a key, which is written in any case; empty where there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip().lower() == key), "")


def _limit(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
