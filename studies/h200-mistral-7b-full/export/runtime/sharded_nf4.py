# -*- coding: utf-8 -*-
"""Lets FSDP2 shard linear layers whose weights bitsandbytes stores in nf4.

FSDP2 would lose the scales of a `Params4bit`, which are attributes of the weight. In this module, a
layer has one parameter, which holds the packed weights and their scales. The bytes of this
parameter are viewed as bf16, the dtype to which FSDP2 casts parameters when it gathers them. So no
version of torch casts them, and gathering copies every bit.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .packed_experts import BLOCK, NESTED_BLOCK

# Each part of the bytes begins at a multiple of this number, so that it can be viewed in 32 bits.
ALIGNMENT = 16
RANDOM_SCALE = 0.04  # the scale of random 4-bit weights, which then have a deviation of about 0.02
TILE = 2**20  # the number of random values that are repeated in a large shard


class Layout:
    """The sizes in bytes of the parts of a layer: packed weights, scales, and scales of scales.

    With `double_quant`, a scale has 8 bits, and the last part ends with the offset of all scales.
    """

    def __init__(self, num_weights: int, *, double_quant: bool) -> None:
        blocks = math.ceil(num_weights / BLOCK)
        nested = math.ceil(blocks / NESTED_BLOCK)
        self.packed = math.ceil(num_weights / 2)
        self.scales = blocks if double_quant else 4 * blocks
        self.nested = 4 * (nested + 1) if double_quant else 0
        sizes = (self.packed, self.scales, self.nested)
        self.ends = [0]
        for size in sizes:
            self.ends.append(self.ends[-1] + math.ceil(size / ALIGNMENT) * ALIGNMENT)

    @property
    def size(self) -> int:
        """The number of bytes of all parts."""
        return self.ends[-1]

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the three parts of the bytes of a layer."""
        sizes = (self.packed, self.scales, self.nested)
        starts = self.ends[:-1]
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def shard_4_bit_layers(model: nn.Module, device: torch.device) -> None:
    """Replace the weight of each 4-bit layer by one parameter that FSDP2 can shard.

    `device` is the device that computes. Call this function after the adapters were added, because
    PEFT reads the type of the weights. A weight without memory stays without memory.
    """
    codes = _codes(device)
    for module in list(_layers_in_4_bits(model)):
        weight: Any = module.weight
        shape = (module.out_features, module.in_features)
        double_quant = bool(weight.compress_statistics)
        layout = Layout(math.prod(shape), double_quant=double_quant)
        whole = torch.empty(layout.size, dtype=torch.uint8, device=weight.device)
        if not weight.is_meta:
            _write(whole, layout, weight)

        kind: Any = type(module)
        module.weight = nn.Parameter(whole.view(torch.bfloat16), requires_grad=False)
        module.quant_state = None  # bitsandbytes would keep the scales of the whole layer
        module.__class__ = _sharded_class(kind)
        module.layout, module.whole_shape = layout, shape
        module.double_quant = double_quant
        module.codes = codes


def is_sharded_4_bit(module: nn.Module) -> bool:
    """Return whether a module is a 4-bit layer that FSDP2 can shard."""
    return hasattr(module, "unpacked_state")


def unpacked_difference(model: nn.Module) -> int:
    """Return how many more weights the sharded 4-bit layers have than their parameters elements."""
    layers = (module for module in model.modules() if is_sharded_4_bit(module))
    return sum(math.prod(layer.whole_shape) - layer.layout.size // 2 for layer in layers)


def fill_shard(layer: Any, shard: torch.Tensor, start: int) -> None:
    """Fill a rank's shard of a layer with random weights.

    `start` is the index of the shard's first element in the whole parameter.
    """
    layout: Layout = layer.layout
    whole = _bytes(shard)
    begin, end = 2 * start, 2 * start + whole.numel()
    fill(whole[: max(layout.ends[1] - begin, 0)], 256)

    # All scales are equal. A scale in 8 bits is the index of the largest value of the code, 1.
    tail = torch.zeros(layout.size - layout.ends[1], dtype=torch.uint8)
    scales = tail[: layout.scales]
    if layer.double_quant:
        scales.fill_(255)
        nested = tail[layout.ends[2] - layout.ends[1] :][: layout.nested].view(torch.float32)
        nested.fill_(RANDOM_SCALE)
        nested[-1] = 0.0  # the offset
    else:
        scales.view(torch.float32).fill_(RANDOM_SCALE)
    first = max(begin, layout.ends[1])
    if first < min(end, layout.size):
        last = min(end, layout.size)
        whole[first - begin : last - begin].copy_(
            tail[first - layout.ends[1] : last - layout.ends[1]]
        )


def fill(tensor: torch.Tensor, below: int | None = None) -> None:
    """Fill a tensor with random integers below a number or, without it, as new weights.

    On a CPU, random values are slow, so a large tensor repeats the same values.
    """
    tile = tensor.view(-1)[:TILE] if tensor.device.type == "cpu" else tensor
    if below is None:
        tile.normal_(0.0, 0.02)
    else:
        tile.random_(0, below)
    rest = tensor.view(-1)[tile.numel() :]
    for part in rest.split(tile.numel() or 1):
        part.copy_(tile.view(-1)[: part.numel()])


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's part of a parameter, and the index of its first element in the whole.

    The parameter is sharded along its first dimension.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    number, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    rows = math.ceil(tensor.shape[0] / size)
    return tensor.to_local(), number * rows * math.prod(tensor.shape[1:])


def _layers_in_4_bits(model: nn.Module) -> Iterator[Any]:
    """Yield the layers of bitsandbytes that hold 4-bit weights."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit) and not is_sharded_4_bit(module):
            yield module


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _write(whole: torch.Tensor, layout: Layout, weight: Any) -> None:
    """Copy a quantised weight and its scales into the bytes of a layer."""
    state = weight.quant_state
    packed, scales, nested = layout.parts(whole)
    packed.copy_(_bytes(weight.data.reshape(-1)))
    scales.copy_(_bytes(state.absmax.reshape(-1).contiguous()))
    if state.nested:
        offset = state.offset.reshape(1).float()
        nested.copy_(_bytes(torch.cat([state.state2.absmax.reshape(-1), offset])))


def _codes(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values that 4-bit weights and 8-bit scales stand for."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    return get_4bit_type("nf4", device=device), create_dynamic_map().to(device)


@functools.cache
def _sharded_class(kind: Any) -> Any:
    """Return the subclass of a class of 4-bit layers whose weight FSDP2 can shard."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    class Sharded(kind):
        """A 4-bit layer with its packed weights and their scales in one parameter."""

        def unpacked_state(self) -> tuple[torch.Tensor, Any]:
            """Return views of the gathered parameter: the packed weights and their scales."""
            packed, scales, nested = self.layout.parts(_bytes(self.weight))
            code, of_scales = self.codes
            further: dict[str, Any] = {}
            if self.double_quant:
                numbers = nested.view(torch.float32)
                further["offset"] = numbers[-1]
                further["state2"] = QuantState(
                    numbers[:-1], code=of_scales, blocksize=NESTED_BLOCK, dtype=torch.float32
                )
            else:
                scales = scales.view(torch.float32)
            state = QuantState(
                scales,
                shape=torch.Size(self.whole_shape),
                code=code,
                blocksize=BLOCK,
                quant_type="nf4",
                dtype=self.compute_dtype,
                **further,
            )
            return packed, state

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed, state = self.unpacked_state()
            rows = x.to(self.compute_dtype)
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            product: torch.Tensor = bnb.matmul_4bit(rows, packed, bias=bias, quant_state=state)
            return product.to(x.dtype)

    return Sharded
