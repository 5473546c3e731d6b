"""The one formula of how much memory of a device a run may use, and what NCCL takes of it. All sizes are GiB."""

from autotune.core.parallelism import Parallelism

# What NCCL takes beside torch's allocator: measured with 2 ranks on an H200 and 4 on H100s. Others saw 0.7 GiB on
# four A100s and 1.06 GB on eight H100s.
NCCL_OF_4_GIB, NCCL_GIB = 0.76, 1.0


def memory_limit_gib(cap_gib: float, reserve_fraction: float, *, taken_gib: float = 0.0) -> float:
    """What tensors may take: the cap, less the reserve, less `taken_gib` (CUDA context, managed memory).

    The limit is negative where what is taken exceeds the cap.
    """
    return cap_gib * (1 - reserve_fraction) - taken_gib


def nccl_of(parallelism: Parallelism) -> float:
    """What NCCL takes on each GPU: for those that share out a copy, and for those with the same shard."""
    return sum(
        nccl_gib(number) for number in (parallelism.num_shards, parallelism.copies) if number > 1
    )


def nccl_gib(num_gpus: int) -> float:
    """What NCCL takes on each of so many GPUs that form a group."""
    return NCCL_OF_4_GIB if num_gpus <= 4 else NCCL_GIB
