"""Computes the memory that torch's CUDA allocator reserves for the tensors of a training step.

The allocator takes segments from the driver, and divides them into blocks. By default, a segment
cannot grow. A tensor then gets the smallest free block that is large enough, or a new segment, so
the order of all requests decides how much memory stays unused. This module repeats the requests
of a dry probe by the allocator's rules (c10/cuda/CUDACachingAllocator.cpp).
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.core.units import MIB

# A request for memory: the tensor's key and its bytes, or 0 bytes if the memory becomes free
Request = tuple[int, int]

ROUND = 512  # bytes: the size of a block is a multiple
SMALL = MIB  # bytes: the largest request that is served from small segments
SMALL_SEGMENT = 2 * MIB
MEDIUM = 10 * MIB  # bytes: smaller requests share segments of MEDIUM_SEGMENT
MEDIUM_SEGMENT = 20 * MIB
SEGMENT_ROUND = 2 * MIB  # bytes: the size of a larger segment is a multiple
STEPS = 3  # the number of repeated steps; the layout of the segments then repeats too
WORKSPACE_KEY = -1


@dataclass(slots=True, kw_only=True)
class _Block:
    """A part of a segment; `before` and `after` are the addresses of its neighbours in it."""

    size: int
    segment: int
    is_small: bool
    is_free: bool = True
    before: int | None = None
    after: int | None = None


class FixedSegments:
    """The segments of an allocator whose segments cannot grow.

    `reserved` has the bytes of all segments. `peak_occupied` is the peak of the bytes of segments
    that hold a tensor: the allocator returns the others to the driver before it is out of memory.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self.peak_occupied = 0
        self._occupied = 0
        self._blocks: dict[int, _Block] = {}  # by address
        self._used: dict[int, int] = {}  # the number of blocks in use, by the segment's address
        self._sizes: dict[int, int] = {}  # bytes, by the segment's address
        self._addresses: dict[int, int] = {}  # by the tensor's key
        # the free blocks, by size and then by address, of large and of small segments
        self._free: tuple[list[tuple[int, int]], ...] = ([], [])

    def repeat(self, requests: Iterable[Request]) -> None:
        """Serve the requests in their order."""
        for key, size in requests:
            self.free(key)
            if size:
                self._allocate(key, size)

    def holds(self, key: int) -> bool:
        """Return whether a tensor has memory."""
        return key in self._addresses

    def free(self, key: int) -> None:
        """Free the memory of a tensor, if it has any, and join the block with free neighbours."""
        if key not in self._addresses:
            return
        address = self._addresses.pop(key)
        block = self._blocks[address]
        block.is_free = True
        self._count_use(block.segment, -1)

        if block.after is not None and self._blocks[block.after].is_free:
            self._join(address, block.after)
        if block.before is not None and self._blocks[block.before].is_free:
            address, before = block.before, address
            self._join(address, before, is_listed=False)
        else:
            self._list(address)

    def _allocate(self, key: int, size: int) -> None:
        size = -(-size // ROUND) * ROUND
        is_small = size <= SMALL
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size, 0))
        address = free.pop(place)[1] if place < len(free) else self._add_segment(size)
        block = self._blocks[address]
        block.is_free = False

        rest = block.size - size
        if rest >= ROUND if is_small else rest > SMALL:
            self._split(address, size)
        self._addresses[key] = address
        self._count_use(block.segment, 1)

    def _add_segment(self, size: int) -> int:
        """Return the address of a new segment, which is one block."""
        total = -(-size // SEGMENT_ROUND) * SEGMENT_ROUND
        if size < MEDIUM:
            total = SMALL_SEGMENT if size <= SMALL else MEDIUM_SEGMENT
        address = self.reserved
        self.reserved += total
        self._blocks[address] = _Block(size=total, segment=address, is_small=size <= SMALL)
        self._sizes[address], self._used[address] = total, 0
        return address

    def _split(self, address: int, size: int) -> None:
        """Shorten a block to `size` bytes; the rest becomes a free block."""
        block = self._blocks[address]
        rest = address + size
        self._blocks[rest] = _Block(
            size=block.size - size,
            segment=block.segment,
            is_small=block.is_small,
            before=address,
            after=block.after,
        )
        if block.after is not None:
            self._blocks[block.after].before = rest
        block.size, block.after = size, rest
        self._list(rest)

    def _join(self, address: int, after: int, *, is_listed: bool = True) -> None:
        """Add the block `after` to its neighbour; one of the two is listed as free."""
        block, removed = self._blocks[address], self._blocks.pop(after)
        listed, size = (after, removed.size) if is_listed else (address, block.size)
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, (size, listed))]

        block.size += removed.size
        block.after = removed.after
        if removed.after is not None:
            self._blocks[removed.after].before = address
        if not is_listed:
            self._list(address)

    def _list(self, address: int) -> None:
        block = self._blocks[address]
        bisect.insort(self._free[block.is_small], (block.size, address))

    def _count_use(self, segment: int, change: int) -> None:
        was_used = self._used[segment] > 0
        self._used[segment] += change
        is_used = self._used[segment] > 0
        self._occupied += self._sizes[segment] * (is_used - was_used)
        self.peak_occupied = max(self.peak_occupied, self._occupied)


def reserve(
    model: Sequence[Request], state: Sequence[Request], step: Sequence[Request], workspace: int
) -> FixedSegments:
    """Return the segments after a few steps.

    `model` has the requests of the weights, `state` the requests of gradients and of the
    optimizer's state, and `step` the requests of all other tensors. The optimizer makes its state
    at the end of the first step, so the state fills blocks that activations have left.
    `workspace` are the bytes of cuBLAS.
    """
    segments = FixedSegments()
    segments.repeat([(WORKSPACE_KEY, workspace), *model])
    segments.repeat(step)
    segments.repeat(state)
    made = {key for key, size in step if size}
    freed = {key for key, size in step if not size} - made
    # A step frees the gradients, and the next step makes them anew.
    gradients = [(key, size) for key, size in state if size and key in freed]
    for _ in range(STEPS):
        segments.repeat(request for request in gradients if not segments.holds(request[0]))
        segments.repeat(step)
    return segments
