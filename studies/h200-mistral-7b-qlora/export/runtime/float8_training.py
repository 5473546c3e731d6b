# -*- coding: utf-8 -*-
"""Trained linear layers whose three matrix products multiply 8-bit floats.

The weights stay parameters in 32 or 16 bits. Each pass casts the factors of its products anew:

    Forward:            y  = x W'
    Gradient of input:  dx = dy W
    Gradient of weight: dW = dy' x       (' means transposed)

`tensorwise` has one scale for each tensor. `rowwise` has one scale for each row of the first factor
and for each column of the second factor, rounded down to a power of two. A value far above all
others then makes only its own row coarser, but each tensor is cast twice, because its rows in one
product are its columns in another. Gradients are cast to e5m2 with tensorwise scales, and to e4m3
with rowwise scales, which need less range.

An uncompiled layer would read and write each factor several times for its casts, so the layers must
be compiled.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .float8 import (
    GRADIENT_DTYPE,
    LEAST,
    MULTIPLE,
    VALUE_DTYPE,
    cast,
    multiply,
)

TENSORWISE = "tensorwise"
ROWWISE = "rowwise"


def train_in_fp8(layers: list[nn.Module], scales: str) -> None:
    """Let the linear layers inside these decoder layers multiply 8-bit floats.

    `scales` is TENSORWISE or ROWWISE. Layers with a side that is not a multiple of 16 stay as they
    are. `train_in_16_bits` undoes the change.
    """
    kind = {TENSORWISE: TensorwiseLinear, ROWWISE: RowwiseLinear}[scales]
    for layer in layers:
        for module in layer.modules():
            fits = type(module) is nn.Linear and module.weight.requires_grad
            if fits and not any(side % MULTIPLE for side in module.weight.shape):
                # Only the class changes, so parameters, checkpoints and sharding stay the same.
                module.__class__ = kind


def train_in_16_bits(model: nn.Module) -> None:
    """Let all layers of `train_in_fp8` multiply as before."""
    for module in model.modules():
        if isinstance(module, TensorwiseLinear | RowwiseLinear):
            module.__class__ = nn.Linear


class TensorwiseLinear(nn.Linear):
    """A trained linear layer whose products have one scale for each factor."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out] for inputs [..., in]. Autocast may change the inputs' dtype."""
        return _multiply(self, inputs, _TensorwiseProducts)


class RowwiseLinear(nn.Linear):
    """A trained linear layer whose products have one scale for each row of a factor."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out] for inputs [..., in]. Autocast may change the inputs' dtype."""
        return _multiply(self, inputs, _RowwiseProducts)


def _multiply(layer: nn.Linear, inputs: torch.Tensor, products: Any) -> torch.Tensor:
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        inputs = inputs.to(torch.get_autocast_dtype(kind))

    rows = inputs.reshape(-1, inputs.shape[-1])
    missing = -rows.shape[0] % MULTIPLE
    if missing:  # the gradient of the weight sums over the rows, and sums have whole blocks
        rows = functional.pad(rows, (0, 0, 0, missing))
    outputs: torch.Tensor = products.apply(rows, layer.weight)
    if missing:
        outputs = outputs[:-missing]
    outputs = outputs.reshape(*inputs.shape[:-1], outputs.shape[-1])
    return outputs if layer.bias is None else outputs + layer.bias.to(outputs.dtype)


class _TensorwiseProducts(torch.autograd.Function):
    """Multiplies inputs [M, K] by a weight [N, K], with one scale for each factor.

    Both layouts of a factor hold the same 8-bit values, so only the values are saved.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        values, scale = cast(inputs, VALUE_DTYPE)
        weights, of_weight = cast(weight, VALUE_DTYPE)
        ctx.save_for_backward(values, scale, weights, of_weight)
        ctx.dtype = weight.dtype
        return multiply(
            values.contiguous(), weights.t(), scale, of_weight, dtype=inputs.dtype, fast=True
        )

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale, weights, of_weight = ctx.saved_tensors
        dtype = gradients.dtype
        cast_gradients, of_gradients = cast(gradients, GRADIENT_DTYPE)
        of_inputs = multiply(
            cast_gradients.contiguous(),
            _by_column(weights),
            of_gradients,
            of_weight,
            dtype=dtype,
            fast=False,
        )
        of_weights = multiply(
            cast_gradients.t().contiguous(),
            _by_column(values),
            of_gradients,
            scale,
            dtype=dtype,
            fast=False,
        )
        return of_inputs, of_weights.to(ctx.dtype)


class _RowwiseProducts(torch.autograd.Function):
    """Multiplies inputs [M, K] by a weight [N, K], with one scale for each row of a factor."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        values, scale = _cast_rows(inputs, 1)
        weights, of_weight = _cast_rows(weight, 1)
        return multiply(
            values.contiguous(), weights.t(), scale, of_weight.t(), dtype=inputs.dtype, fast=True
        )

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        dtype = gradients.dtype

        rows, of_rows = _cast_rows(gradients, 1)
        weights, of_weight = _cast_rows(weight, 0)
        of_inputs = multiply(
            rows.contiguous(), _by_column(weights), of_rows, of_weight, dtype=dtype, fast=False
        )

        columns, of_columns = _cast_rows(gradients, 0)
        values, scale = _cast_rows(inputs, 0)
        of_weights = multiply(
            columns.t().contiguous(),
            _by_column(values),
            of_columns.t(),
            scale,
            dtype=dtype,
            fast=False,
        )
        return of_inputs, of_weights.to(weight.dtype)


def _by_column(values: torch.Tensor) -> torch.Tensor:
    """Return the same matrix, stored column by column."""
    return values.t().contiguous().t()


def _cast_rows(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in 8 bits, and the scales (fp32) that restore it.

    Each row has its own scale if `dim` is 1, and each column if `dim` is 0. Scales are powers of
    two, so that they add no rounding of their own.
    """
    least, most = values.aminmax(dim=dim, keepdim=True)
    largest = torch.maximum(-least, most).float().clamp(min=LEAST)
    limit = torch.finfo(VALUE_DTYPE).max
    factor = torch.exp2(torch.floor(torch.log2(limit / largest)))
    return (values.float() * factor).clamp(-limit, limit).to(VALUE_DTYPE), 1 / factor
