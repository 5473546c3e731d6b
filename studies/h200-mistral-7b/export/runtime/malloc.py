# -*- coding: utf-8 -*-
"""Controls when malloc returns memory to the kernel, which clears pages before their reuse."""

import ctypes

# If a CPU trains, we let malloc keep freed blocks below this size, so that the next step can use
# them again. Without this setting, glibc returns blocks of 32 MiB and more to the kernel. The
# logits of a small model are larger, and clearing their pages took 30 % of a step.
KEPT_BYTES = 2**30
# The numbers of two options of mallopt, from glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST = 2**31 - 1
# The largest M_MMAP_THRESHOLD in bytes that older releases of glibc accept.
LARGEST_THRESHOLD = 2**25


def set_release_threshold(threshold: int) -> None:
    """Let malloc keep freed blocks of less than `threshold` bytes for later allocations.

    Larger blocks return to the kernel. Free memory at the end of the heap returns too, if it is
    more than twice the threshold. With a C library other than glibc, this function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(M_MMAP_THRESHOLD, threshold):
            threshold = min(threshold, LARGEST_THRESHOLD)
            mallopt(M_MMAP_THRESHOLD, threshold)
        mallopt(M_TRIM_THRESHOLD, min(2 * threshold, LARGEST))
