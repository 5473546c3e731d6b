"""The host's processors and memory, and the write speed of its disk. Imports no torch."""

import functools
import os
import time
from pathlib import Path
from tempfile import TemporaryFile

from autotune.core.units import MIB, gib

# The files of cgroup version 2; in a container, they contain the container's limits.
CGROUP = Path("/sys/fs/cgroup")
CHUNK_BYTES = 8 * MIB
# The test of the disk writes WRITTEN_BYTES bytes, but stops after AT_MOST_S seconds.
WRITTEN_BYTES = 256 * MIB
AT_MOST_S = 3.0
CPUINFO = Path("/proc/cpuinfo")
# oneDNN, torch's library for matrix products on a CPU, needs one of these sets of processor
# features for fast bf16. Without such features, a bf16 product takes about 200 times as long as an
# fp32 product. On two cores of an AMD EPYC with AVX2, a product of 256 x 1024 by 1024 x 4096 took
# 6.8 s instead of 0.03 s.
BF16_FEATURES = ({"avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"})


def processor_name(path: Path = CPUINFO) -> str:
    """Return the name of the processor, such as 'AMD EPYC 9654'."""
    return _cpuinfo(path, "model name") or "CPU"


@functools.cache
def multiplies_bf16(path: Path = CPUINFO) -> bool:
    """Return whether bf16 matrix products are about as fast as fp32 products on this processor.

    The result depends on the features in /proc/cpuinfo, and is false if the file lists no features.
    """
    # /proc/cpuinfo calls the list "flags" on x86 and "features" on Arm.
    features = set((_cpuinfo(path, "flags") or _cpuinfo(path, "features")).split())
    return any(needed <= features for needed in BF16_FEATURES)


def num_cores(cgroup: Path = CGROUP) -> float:
    """Return the number of processors that this process may use, such as 1.5 under a CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota, _, period = _limit(cgroup / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def host_memory_gib(cgroup: Path = CGROUP) -> float:
    """Return the host memory in GiB that this process may use."""
    import psutil

    total = psutil.virtual_memory().total
    limit = _limit(cgroup / "memory.max")
    return gib(min(total, int(limit)) if limit.isdigit() else total)


def disk_mb_s(directory: Path) -> float | None:
    """Return the MB/s at which a file in `directory` reaches the disk, or None if writing fails.

    The file has no name, so the kernel removes it even if this process is killed. The written bytes
    are random, because some disks compress data.
    """
    chunk = os.urandom(CHUNK_BYTES)
    try:
        with TemporaryFile(dir=directory) as file:
            begin = time.perf_counter()
            written = 0
            while written < WRITTEN_BYTES and time.perf_counter() - begin < AT_MOST_S:
                file.write(chunk)
                file.flush()
                os.fdatasync(file.fileno())
                written += len(chunk)

            return written / 1e6 / (time.perf_counter() - begin)
    except OSError:
        return None


def _cpuinfo(path: Path, key: str) -> str:
    """Return the first value of a key, ignoring the key's case, or "" without file or key."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # only Linux has the file
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip().lower() == key), "")


def _limit(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
