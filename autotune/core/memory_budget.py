"""MemoryBudget: how much memory of a device a run may use. The one formula of the limit is here. All sizes are GiB."""

from dataclasses import dataclass


def memory_limit_gib(cap_gib: float, reserve_fraction: float, *, taken_gib: float = 0.0) -> float:
    """What tensors may take: the cap, less the reserve, less `taken_gib` (CUDA context, managed memory).

    The limit is negative where what is taken exceeds the cap.
    """
    return cap_gib * (1 - reserve_fraction) - taken_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory of one device and what a run may use of it.

    `total_gib` is all of the device, `available_gib` what other processes leave of it, `cap_gib` what the run may use
    for everything, CUDA context included. The cap exceeds what is available only where a few layers are probed for a
    larger device. `reserve_fraction` is the share of the cap that must stay free.
    """

    total_gib: float
    available_gib: float
    cap_gib: float
    reserve_fraction: float

    def limit_gib(self, *, taken_gib: float = 0.0) -> float:
        """What tensors may take, as `memory_limit_gib`."""
        return memory_limit_gib(self.cap_gib, self.reserve_fraction, taken_gib=taken_gib)
