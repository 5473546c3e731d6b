"""Formulas for the memory that a run may use on a device, and for NCCL's memory, in GiB."""

from autotune.core.parallelism import Parallelism

HEADROOM = 0.05  # the share of a device's memory that stays free, if the user gives no other
# The GiB that NCCL takes on each GPU, outside torch's allocator. NCCL_OF_4_GIB is for groups of up
# to 4 GPUs, measured with 2 ranks on H200s and 4 ranks on H100s. NCCL_GIB is for larger groups.
# Other projects report 0.7 GiB on four A100s and 1.06 GB on eight H100s.
NCCL_OF_4_GIB = 0.76
NCCL_GIB = 1.0
# torch's allocator of pinned memory rounds each block up to a power of two: to at most this many
# times its size.
PINNED = 2


def memory_limit_gib(cap_gib: float, reserve_fraction: float, *, taken_gib: float = 0.0) -> float:
    """Return the memory for tensors: `cap_gib` minus its reserved fraction and `taken_gib`.

    `taken_gib` is the memory that the CUDA context and managed memory take. The result may be
    negative.
    """
    return cap_gib * (1 - reserve_fraction) - taken_gib


def nccl_of(parallelism: Parallelism) -> float:
    """Return NCCL's memory on each GPU of a run with this parallelism.

    NCCL needs memory for each group of GPUs that exchange data. A GPU may belong to two groups: the
    GPUs that together hold a copy of the model, and the GPUs that hold the same shard of different
    copies.
    """
    return sum(
        nccl_gib(number) for number in (parallelism.num_shards, parallelism.copies) if number > 1
    )


def nccl_gib(num_gpus: int) -> float:
    """Return NCCL's memory on each GPU of a group of `num_gpus`."""
    return NCCL_OF_4_GIB if num_gpus <= 4 else NCCL_GIB
