"""Controls when malloc returns memory to the kernel, which clears pages before their reuse."""

import ctypes

# On a CPU, blocks below this size are kept from step to step. By default glibc keeps blocks below
# 32 MiB at most. The logits of a small model are larger, and clearing pages then took 30 % of the
# time.
KEPT_BYTES = 2**30
# glibc's own constants
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST = 2**31 - 1
LARGEST_THRESHOLD = 2**25  # older releases of glibc refuse a larger value


def set_release_threshold(threshold: int) -> None:
    """Map blocks of at least `threshold` bytes separately, and keep a free heap end of twice that.

    The kernel gets larger free ends back. A C library other than glibc stays unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(M_MMAP_THRESHOLD, threshold):
            threshold = min(threshold, LARGEST_THRESHOLD)
            mallopt(M_MMAP_THRESHOLD, threshold)
        mallopt(M_TRIM_THRESHOLD, min(2 * threshold, LARGEST))
