# -*- coding: utf-8 -*-
"""Keeps the inputs of recomputed layers in host memory, and copies them while other layers compute.

A layer's input leaves the device while the next layer computes, and returns before the layer is
recomputed. Both copies run on a separate stream, from and to pinned memory that later steps reuse.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

# torch's allocator of pinned memory rounds up to powers of two. If a whole input were one
# allocation, rounding could waste up to half of the memory. Inputs are therefore stored in blocks
# of this number of bytes, a power of two.
BLOCK_BYTES = 64 * 2**20
# Inputs of up to this number of bytes are copied back one layer early, while the layer above is
# recomputed, so the device holds the inputs of two layers. Larger inputs are copied back when they
# are needed. For an 8B model with 32,000 tokens on an H100, copying an input takes only a fortieth
# of its layer's time, and less for longer rows.
PREFETCHED_BYTES = 2**28


class HostCheckpoints:
    """Stores the tensors of all layers for the backward pass, which reads them in reverse order."""

    def __init__(self) -> None:
        self.held_bytes = 0  # bytes of pinned memory in all blocks, used or free
        # The key is the size of a block in bytes.
        self._free_blocks: dict[int, list[torch.Tensor]] = {}
        self._stored: list[weakref.ref[_HostTensor]] = []
        self._stream: Any = None
        self._last: _HostTensor | None = None  # the last stored tensor, whose copy may still run

    @contextmanager
    def saving(self) -> Iterator[None]:
        """In this block, move each tensor that autograd saves for the backward pass to the host."""
        with saved_tensors_hooks(self._store, self._restore):
            yield

    def _store(self, tensor: torch.Tensor) -> "_HostTensor | torch.Tensor":
        # Versions of torch before 2.13 also save an empty tensor, which stays on the device.
        if not tensor.nbytes:
            return tensor.detach()

        stream = self._copy_stream(tensor.device)
        stored = _HostTensor(tensor, self._allocate(tensor), self._recycle)
        if stream is None:
            stored.copy_out(tensor)
        else:
            current = torch.cuda.current_stream(tensor.device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                stored.copy_out(tensor)
                stored.copy_event = stream.record_event()
            # The previous tensor's copy must end before its device memory is reused.
            if self._last is not None and self._last.device_tensor is not None:
                current.wait_event(self._last.copy_event)

        if self._last is not None:
            self._last.device_tensor = None
        stored.device_tensor = tensor.detach()
        self._last = stored
        self._stored = [one for one in self._stored if one() is not None]
        self._stored.append(weakref.ref(stored))
        return stored

    def _restore(self, stored: "_HostTensor | torch.Tensor") -> torch.Tensor:
        if isinstance(stored, torch.Tensor):
            return stored

        stream = self._copy_stream(stored.device)
        self._start_copy(stored, stream)
        tensor = stored.device_tensor
        assert tensor is not None
        if stream is not None and stored.copy_event is not None:
            torch.cuda.current_stream(stored.device).wait_event(stored.copy_event)
        stored.device_tensor = None
        stored.release()

        # Prefetch the input of the layer before this one.
        before = [
            one
            for each in self._stored
            if (one := each()) is not None and one.blocks is not None and one is not stored
        ]
        self._stored = [weakref.ref(one) for one in before]
        if before and before[-1].num_bytes <= PREFETCHED_BYTES:
            self._start_copy(before[-1], stream)
        return tensor

    def _start_copy(self, stored: "_HostTensor", stream: Any) -> None:
        """Start the copy of a tensor to the device, unless it is there already."""
        if stored.device_tensor is not None:
            return
        if stored.blocks is None:
            raise RuntimeError(
                "a layer's input was freed after its backward pass:"
                " a second backward pass is impossible"
            )

        stored.device_tensor = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
        if stream is None:
            stored.copy_in(stored.device_tensor)
            return
        # Wait, because the new tensor may reuse memory that the current stream still uses.
        stream.wait_stream(torch.cuda.current_stream(stored.device))
        with torch.cuda.stream(stream):
            stored.copy_in(stored.device_tensor)
            stored.copy_event = stream.record_event()

    def _copy_stream(self, device: torch.device) -> Any:
        """Return the CUDA stream that runs the copies, or None on a device without streams."""
        if device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _allocate(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return blocks for all bytes of a tensor. A tensor on the meta device needs no blocks.

        Block sizes are powers of two, so that inputs of many lengths share blocks.
        """
        if tensor.is_meta:
            return []

        size = min(1 << (tensor.nbytes - 1).bit_length(), BLOCK_BYTES)
        is_pinned = tensor.device.type == "cuda"
        free = self._free_blocks.setdefault(size, [])
        blocks = []
        for _ in range(-(-tensor.nbytes // size)):
            if free:
                blocks.append(free.pop())
            else:
                self.held_bytes += size
                blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned))
        return blocks

    def _recycle(self, blocks: list[torch.Tensor]) -> None:
        """Mark blocks as free.

        All copies run in order on one stream, so a block can be reused without a wait.
        """
        for block in blocks:
            self._free_blocks[block.nbytes].append(block)


class _HostTensor:
    """A tensor in blocks of host memory; restoring or deleting the tensor frees its blocks."""

    def __init__(self, tensor: torch.Tensor, blocks: list[torch.Tensor], recycle: Any) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.num_bytes = tensor.nbytes
        self.blocks: list[torch.Tensor] | None = blocks
        self.device_tensor: torch.Tensor | None = None
        self.copy_event: Any = None  # marks the end of the last copy
        self._recycle = weakref.finalize(self, recycle, blocks)

    def copy_out(self, tensor: torch.Tensor) -> None:
        """Copy the values to the host."""
        for part, block in self._parts(tensor.detach().contiguous()):
            block[: part.numel()].copy_(part, non_blocking=True)

    def copy_in(self, tensor: torch.Tensor) -> None:
        """Copy the values to the device."""
        for part, block in self._parts(tensor):
            part.copy_(block[: part.numel()], non_blocking=True)

    def _parts(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each part of a tensor (as bytes) with the host block that holds it."""
        if not self.blocks:
            return
        data = tensor.view(-1).view(torch.uint8)
        yield from zip(data.split(self.blocks[0].numel()), self.blocks, strict=True)

    def release(self) -> None:
        """Let other tensors use the blocks."""
        self.blocks = None
        self._recycle()
