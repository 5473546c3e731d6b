# -*- coding: utf-8 -*-
"""Stores experts in nf4, for mixtures of experts that use transformers' interface for experts.

bitsandbytes replaces only linear layers, so the experts' three-dimensional weights would stay in 16
bits. In this module, each weight becomes bitsandbytes' packed parameter (`Params4bit`). An
operation unpacks the weights of one projection, multiplies by them, and frees them. The backward
pass unpacks them again, so autograd keeps only packed weights. The packed values equal the values
that bitsandbytes itself would compute.
"""

import copy
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from .grouped_lora import (
    adapted_flops,
    adapter_gradients,
    compute_experts,
    swapped_adapters,
    uses_interface,
)

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
BLOCK = 64  # the number of weights that share a scale
NESTED_BLOCK = 256  # the number of scales that share a scale, if scales are quantised too
# bitsandbytes' kernels index elements with 31 bits, so larger weights are split into pieces.
PIECE = 2**30


def pack(weight: torch.Tensor, *, double_quant: bool) -> nn.Parameter:
    """Return a weight in nf4, with its scales in the attribute `quant_state`."""
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    pieces = [quantize_4bit(piece, quant_type="nf4") for piece in weight.reshape(-1).split(PIECE)]
    packed = torch.cat([piece for piece, _ in pieces])
    scales = torch.cat([state.absmax for _, state in pieces])

    nested: dict[str, Any] = {}
    if double_quant:
        offset = scales.mean()
        scales, state = quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
        nested = {"offset": offset, "state2": state}

    state = QuantState(
        scales,
        shape=weight.shape,
        code=pieces[0][1].code,
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=weight.dtype,
        **nested,
    )
    return _parameter(packed, state)


def _parameter(packed: torch.Tensor, state: Any) -> nn.Parameter:
    from bitsandbytes.nn import Params4bit

    parameter: nn.Parameter = Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        quant_type="nf4",
        compress_statistics=state.nested,
        bnb_quantized=True,
    )
    return parameter


def unpack(parameter: Any) -> torch.Tensor:
    """Dequantise a packed weight to its original shape and dtype."""
    state = parameter.quant_state
    return _unpack(parameter, *_scales(state), state.shape, state.dtype)


def is_packed(experts: nn.Module) -> bool:
    """Return whether a module holds experts in nf4."""
    return hasattr(experts, "multiply_packed")


def is_expert_weight(module: nn.Module, name: str) -> bool:
    """Return whether this parameter of a module holds a projection of experts."""
    return name in PROJECTIONS and uses_interface(module)


def pack_random_experts(
    model: nn.Module, dtype: torch.dtype, device: torch.device, *, double_quant: bool
) -> None:
    """Replace the experts' weights, which have no memory, with packed random values.

    Only the first weight of each shape is quantised. The others are copies of it, because copying
    is faster.
    """
    made: dict[tuple[int, ...], Any] = {}
    for module, name in list(_weights(model)):
        shape = tuple(getattr(module, name).shape)
        if (first := made.get(shape)) is not None:
            copied = _parameter(first.data.clone(), copy.deepcopy(first.quant_state))
            setattr(module, name, copied)
            continue
        weight = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)
        made[shape] = pack(weight, double_quant=double_quant)
        setattr(module, name, made[shape])
    compute_packed(model)


@contextmanager
def pack_while_loading(*, double_quant: bool) -> Iterator[None]:
    """In this block, transformers also packs experts when it loads a model in 4 bits.

    transformers quantises each weight as soon as it has been read, so the device never holds all
    experts in 16 bits.
    """
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    original = AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]

    class Operation(Bnb4bitQuantize):
        """Quantises a weight after it was read; experts stored one by one are merged by then."""

        def convert(
            self, input_dict: dict[str, Any], *arguments: Any, model: Any = None, **more: Any
        ) -> dict[str, Any]:
            ((path, value),) = input_dict.items()
            module, _, name = path.rpartition(".")
            experts = model.get_submodule(module)
            if not is_expert_weight(experts, name):
                return dict(super().convert(input_dict, *arguments, model=model, **more))
            experts._is_hf_initialized = True
            weight = value[0] if isinstance(value, list) else value
            return {path: pack(weight, double_quant=double_quant)}

    class Quantizer(original):  # type: ignore[misc, valid-type]
        """transformers' quantiser for bitsandbytes, extended to quantise experts too."""

        def param_needs_quantization(self, model: Any, param_name: str, **more: Any) -> bool:
            module, _, name = param_name.rpartition(".")
            is_linear: bool = super().param_needs_quantization(model, param_name, **more)
            return is_linear or is_expert_weight(model.get_submodule(module), name)

        def get_quantize_ops(self) -> Bnb4bitQuantize:
            return Operation(self)

    AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = Quantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = original


def compute_packed(model: nn.Module) -> None:
    """Let modules of experts compute with their packed weights.

    Raises ValueError if the model has no such experts.
    """
    modules = list(dict.fromkeys(module for module, _ in _weights(model)))
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts that use transformers' interface for experts,"
            " so quantize_experts cannot be set"
        )
    for module in modules:
        kind: Any = type(module)
        module.__class__ = _packed_class(kind)


@contextmanager
def unpacked_shapes(model: nn.Module) -> Iterator[None]:
    """In this block, packed weights are replaced by parameters of their unpacked shape and dtype.

    PEFT derives the shapes of adapters from these parameters. All elements of these parameters
    share one value, so the parameters take no memory.
    """
    packed = [
        (module, name, getattr(module, name))
        for module, name in _weights(model)
        if is_packed(module)
    ]
    for module, name, weight in packed:
        state = weight.quant_state
        value = torch.empty((), dtype=state.dtype, device=weight.device)
        setattr(module, name, nn.Parameter(value.expand(state.shape), requires_grad=False))
    try:
        yield
    finally:
        for module, name, weight in packed:
            setattr(module, name, weight)


def _weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the module and the name of each projection of experts."""
    for module in model.modules():
        for name, _ in module.named_parameters(recurse=False):
            if is_expert_weight(module, name):
                yield module, name


@functools.cache
def _packed_class(kind: Any) -> Any:
    """Return the subclass of a class of experts that computes with packed weights.

    Each class of experts has one such subclass, so that compiled code of one layer serves all
    layers.
    """

    class Packed(kind):
        """Experts whose weights are in nf4."""

        def forward(
            self, hidden_states: torch.Tensor, top_k_index: Any, top_k_weights: Any
        ) -> torch.Tensor:
            return compute_experts(self, hidden_states, top_k_index, top_k_weights)

        def multiply_packed(
            self,
            rows: torch.Tensor,
            name: str,
            down: torch.Tensor | None,
            up: torch.Tensor | None,
            ends: torch.Tensor,
        ) -> torch.Tensor:
            """Multiply rows (S x in) by a projection of their own experts, with its adapters."""
            weight = getattr(self, name)
            state = weight.quant_state
            shape, swapped = list(state.shape), not self.is_transposed
            product: torch.Tensor = torch.ops.lora.packed_adapted_product(
                rows, weight, *_scales(state), down, up, ends, shape, swapped
            )[0]
            return product

    return Packed


def _scales(state: Any) -> tuple[Any, Any, Any, Any]:
    """Return the scales, and their offset, scales and code if the scales are quantised."""
    if state.state2 is None:
        return state.absmax, None, None, None
    return state.absmax, state.offset, state.state2.absmax, state.state2.code


def _unpack(
    packed: torch.Tensor,
    scales: torch.Tensor,
    offset: torch.Tensor | None,
    nested: torch.Tensor | None,
    code: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    bnb = torch.ops.bitsandbytes
    if offset is not None:
        scales = bnb.dequantize_blockwise(scales, nested, code, NESTED_BLOCK, torch.float32)
        scales += offset

    # Pass the weight as one row, because bitsandbytes' kernel for CPUs (version 0.50) gives wrong
    # results for rows whose length is not a multiple of BLOCK.
    size = math.prod(shape)
    if size <= PIECE:
        whole: torch.Tensor = bnb.dequantize_4bit(packed, scales, BLOCK, "nf4", (size,), dtype)
        return whole.view(shape)

    weight = torch.empty(size, dtype=dtype, device=packed.device)
    parts = zip(packed.view(-1).split(PIECE // 2), scales.split(PIECE // BLOCK), strict=True)
    for piece, (part, own) in zip(weight.split(PIECE), parts, strict=True):
        piece.copy_(bnb.dequantize_4bit(part, own, BLOCK, "nf4", piece.shape, dtype).view(-1))
    return weight.view(shape)


# Unpacking and multiplying are one operation. If unpacking were a separate operation, compiled code
# would unpack once for the forward and the backward pass, and keep the result. Compiled code on
# disk refers to the operation by name. If the output's shape or the FLOP formula changes, the name
# must change too.


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "lora::packed_adapted_product", mutates_args=()
)
def _packed_product(
    rows: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    offset: torch.Tensor | None,
    nested: torch.Tensor | None,
    code: torch.Tensor | None,
    down: torch.Tensor | None,
    up: torch.Tensor | None,
    ends: torch.Tensor,
    shape: Sequence[int],
    swapped: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (S x K) times the packed matrices of their experts, as `adapted_product` does.

    `shape` is the shape of the weights: E x K x N, or E x N x K if `swapped`.
    """
    weights = _unpack(packed, scales, offset, nested, code, shape, rows.dtype)
    matrices = weights.transpose(1, 2) if swapped else weights
    outputs, hidden = torch.ops.lora.adapted_product(rows, matrices, down, up, ends)
    return outputs, hidden


@_packed_product.register_fake  # type: ignore[untyped-decorator]
def _packed_product_shapes(
    rows: torch.Tensor,
    packed: Any,
    scales: Any,
    offset: Any,
    nested: Any,
    code: Any,
    down: torch.Tensor | None,
    up: Any,
    ends: Any,
    shape: Sequence[int],
    swapped: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, width = rows.shape[0], shape[1] if swapped else shape[2]
    return rows.new_empty(count, width), rows.new_empty(count, 0 if down is None else down.shape[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows, *packed, down, up, ends, ctx.shape, ctx.swapped = inputs
    hidden = output[1]
    ctx.mark_non_differentiable(hidden)
    of_down, of_up = ctx.needs_input_grad[6:8]
    ctx.save_for_backward(
        rows if of_down else None, hidden if of_up else None, down, up, ends, *packed
    )


def _gradients(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    rows, hidden, down, up, ends, *packed = ctx.saved_tensors
    gradient = gradient.contiguous()  # the fused kernel cannot read an expanded gradient
    of_rows, between = torch.ops.lora.packed_adapted_product(
        gradient, *packed, *swapped_adapters(down, up), ends, ctx.shape, not ctx.swapped
    )
    of_adapters = adapter_gradients(rows, hidden, gradient, between, ends)
    return of_rows, *[None] * len(packed), *of_adapters, *[None] * 3


_packed_product.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.lora.packed_adapted_product)  # type: ignore[untyped-decorator]
def _packed_product_flops(rows: Any, *arguments: Any, **_: Any) -> int:
    """Return the FLOPs of a product (two for each multiply-add) from the arguments' shapes."""
    down, shape, swapped = arguments[5], *arguments[8:10]
    experts, size, width = shape
    return adapted_flops(rows, (experts, width, size) if swapped else shape, down)
