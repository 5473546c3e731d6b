"""When malloc returns memory to the kernel, which has to clear each page that it lends again."""

import ctypes

# Blocks below this are kept from step to step on a CPU. By itself glibc keeps those below 32 MiB at most: with a small
# model, whose logits are larger, pages then took 30 % of the time.
KEPT_BYTES = 2**30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of glibc's
LARGEST = 2**31 - 1
LARGEST_THRESHOLD = 2**25  # of older releases of glibc, which refuse more


def return_from(threshold: int) -> None:
    """Take blocks of so many bytes straight from the kernel, and return the free end of the heap beyond twice that.

    Nothing changes where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(M_MMAP_THRESHOLD, threshold):
            threshold = min(threshold, LARGEST_THRESHOLD)
            mallopt(M_MMAP_THRESHOLD, threshold)
        mallopt(M_TRIM_THRESHOLD, min(2 * threshold, LARGEST))
