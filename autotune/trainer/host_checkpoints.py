"""The inputs of recomputed layers in the host's memory, copied while layers compute.

A layer's input leaves the device while the next layer computes, and comes back before the layer is computed again. Both
copies run on a stream of their own, from and to pinned memory, which later steps use again.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

# torch's allocator of pinned memory rounds up to powers of two: these blocks waste nothing, whole inputs up to half.
BLOCK_BYTES = 64 * 2**20
# Smaller inputs come back while the layer behind computes, which takes a second one on the device. The copy of an input
# takes about a fortieth of its layer's time, for an 8B with 32,000 tokens on an H100, and less of longer rows.
PREFETCHED_BYTES = 2**28


class HostCheckpoints:
    """Keeps tensors that the backward pass needs in reverse order. One for all layers of a model."""

    def __init__(self) -> None:
        self.held_bytes = 0  # pinned memory, in use or free
        self._free: dict[int, list[torch.Tensor]] = {}
        self._kept: list[weakref.ref[_Kept]] = []
        self._stream: Any = None
        self._leaving: _Kept | None = None  # its copy may not have ended

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What is kept for the backward pass inside goes to the host."""
        with saved_tensors_hooks(self._keep, self._bring):
            yield

    def _keep(self, tensor: torch.Tensor) -> "_Kept | torch.Tensor":
        if not tensor.nbytes:  # torch before 2.13 keeps an empty one beside the inputs
            return tensor.detach()
        stream = self._copies_of(tensor.device)
        kept = _Kept(tensor, self._take(tensor), self._give)
        if stream is None:
            kept.copy_out(tensor)
        else:
            current = torch.cuda.current_stream(tensor.device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                kept.copy_out(tensor)
                kept.copied = stream.record_event()
            if self._leaving is not None and self._leaving.on_device is not None:
                current.wait_event(self._leaving.copied)  # before its memory is used again
        if self._leaving is not None:
            self._leaving.on_device = None
        kept.on_device, self._leaving = tensor.detach(), kept
        self._kept = [one for one in self._kept if one() is not None]
        self._kept.append(weakref.ref(kept))
        return kept

    def _bring(self, kept: "_Kept | torch.Tensor") -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        stream = self._copies_of(kept.device)
        self._start(kept, stream)
        tensor = kept.on_device
        assert tensor is not None
        if stream is not None and kept.copied is not None:
            torch.cuda.current_stream(kept.device).wait_event(kept.copied)
        kept.on_device = None
        kept.release()
        before = [
            one for each in self._kept if (one := each()) is not None and one.blocks is not None and one is not kept
        ]
        self._kept = [weakref.ref(one) for one in before]
        if before and before[-1].num_bytes <= PREFETCHED_BYTES:
            self._start(before[-1], stream)
        return tensor

    def _start(self, kept: "_Kept", stream: Any) -> None:
        """Begin to bring a tensor back, unless it is on the device."""
        if kept.on_device is not None:
            return
        if kept.blocks is None:
            raise RuntimeError("the input of a layer was freed after its first backward pass: there is no second one")
        kept.on_device = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        if stream is None:
            kept.copy_in(kept.on_device)
            return
        stream.wait_stream(torch.cuda.current_stream(kept.device))  # which may still use this memory
        with torch.cuda.stream(stream):
            kept.copy_in(kept.on_device)
            kept.copied = stream.record_event()

    def _copies_of(self, device: torch.device) -> Any:
        """The stream of the copies; None where there are no streams."""
        if device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _take(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Blocks for all bytes of a tensor. One without values, on the meta device, needs none.

        Their sizes are powers of two, so that inputs of many lengths share them.
        """
        if tensor.is_meta:
            return []
        size = min(1 << (tensor.nbytes - 1).bit_length(), BLOCK_BYTES)
        free, pinned = self._free.setdefault(size, []), tensor.device.type == "cuda"
        blocks = []
        for _ in range(-(-tensor.nbytes // size)):
            if not free:
                self.held_bytes += size
            blocks.append(free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        return blocks

    def _give(self, blocks: list[torch.Tensor]) -> None:
        """Blocks that are free again. A later copy into them waits for those before it, on the same stream."""
        for block in blocks:
            self._free[block.nbytes].append(block)


class _Kept:
    """A tensor in blocks of the host's memory, which are given back when it is brought back, or forgotten."""

    def __init__(self, tensor: torch.Tensor, blocks: list[torch.Tensor], give: Any) -> None:
        self.shape, self.dtype, self.device, self.num_bytes = tensor.shape, tensor.dtype, tensor.device, tensor.nbytes
        self.blocks: list[torch.Tensor] | None = blocks
        self.on_device: torch.Tensor | None = None
        self.copied: Any = None  # an event, once the last copy was issued
        self._give = weakref.finalize(self, give, blocks)

    def copy_out(self, tensor: torch.Tensor) -> None:
        """Copy the values to the host."""
        for part, block in self._parts(tensor.detach().contiguous()):
            block[: part.numel()].copy_(part, non_blocking=True)

    def copy_in(self, tensor: torch.Tensor) -> None:
        """Copy the values back."""
        for part, block in self._parts(tensor):
            part.copy_(block[: part.numel()], non_blocking=True)

    def _parts(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of a tensor, as bytes, with its block."""
        if not self.blocks:
            return
        data = tensor.view(-1).view(torch.uint8)
        yield from zip(data.split(self.blocks[0].numel()), self.blocks, strict=True)

    def release(self) -> None:
        """Give the blocks back."""
        self.blocks = None
        self._give()
