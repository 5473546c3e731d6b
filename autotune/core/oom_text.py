"""Finds the words and the sizes of an out-of-memory error in a text, such as torch's message."""

import re

# Words of torch, CUDA and C++ for memory that ran out. Torch raises them as a plain RuntimeError.
RUNTIME_ERRORS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_UNITS_PER_GIB = {"bytes": 2**30, "kib": 2**20, "mib": 2**10, "gib": 1}


def requested_gib(message: str) -> float | None:
    """The GiB of the failed allocation, read from torch's message, or None if it has no size."""
    return size_gib(rf"tried to allocate {SIZE}", message)


def size_gib(pattern: str, text: str) -> float | None:
    """The GiB of the first size that `pattern`, which contains SIZE, finds in the text, or None."""
    match = re.search(pattern, text, re.IGNORECASE)
    return None if match is None else float(match[1]) / _UNITS_PER_GIB[match[2].lower()]
