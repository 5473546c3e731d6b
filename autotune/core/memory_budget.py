"""The one formula of how much memory of a device a run may use. All sizes are GiB."""


def memory_limit_gib(cap_gib: float, reserve_fraction: float, *, taken_gib: float = 0.0) -> float:
    """What tensors may take: the cap, less the reserve, less `taken_gib` (CUDA context, managed memory).

    The limit is negative where what is taken exceeds the cap.
    """
    return cap_gib * (1 - reserve_fraction) - taken_gib
