# -*- coding: utf-8 -*-
"""Frozen linear layers with weights in 8-bit floats.

The matrix products of the forward and the backward pass multiply 8-bit floats.

A weight is cast to 8 bits once. Inputs are cast in each forward pass, and gradients in each
backward pass. A cast scales a tensor so that its largest value becomes the largest 8-bit float.
"""

from typing import Any

import torch
from torch import nn

MULTIPLE = 16  # an fp8 product needs a weight whose two dimensions are multiples of this number
VALUE_DTYPE = torch.float8_e4m3fn  # the dtype of weights and inputs
GRADIENT_DTYPE = torch.float8_e5m2  # the dtype of gradients, which need a wider range
LEAST = 1e-12  # the least divisor in a cast, so that a tensor of zeros is not divided by zero


def multiply_in_fp8(model: Any, device: torch.device | None = None) -> None:
    """Store the weights of all linear layers but the head as 8-bit floats, and multiply in 8 bits.

    The model moves to `device`. Weights move one by one, so that the device never holds all weights
    in 16 bits. Weights on the meta device get memory, but no values. Call this before adapters are
    added, so that adapters stay unchanged. Adapters cannot be merged into this 8-bit base. To merge
    them, load the base again in 16 bits.
    """
    device = model.device if device is None else device
    head = model.get_output_embeddings()

    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        fits = not any(side % MULTIPLE for side in layer.weight.shape)
        if type(layer) is nn.Linear and layer is not head and fits:
            model.set_submodule(name, Float8Linear(layer, device))
        elif layer.weight.is_meta:
            layer.to_empty(device=device)
    model.to(device)


class Float8Linear(nn.Linear):
    """A frozen linear layer whose weight is `weight_fp8` [out, in] times `scale` (fp32, a scalar).

    The layer stores one copy of the weight, half as large as in 16 bits. In an 8-bit product,
    tensor cores read the second factor column by column. The transpose of `weight_fp8` has this
    layout. The backward pass needs `weight_fp8` itself column by column, so each backward product
    copies the weight, which moves two bytes for each value. Storing a second copy instead would
    take all the memory that 8 bits save.
    """

    weight_fp8: nn.Parameter
    scale: torch.Tensor

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        """Replace `layer`. If its weight is on the meta device, call `store` afterwards."""
        # The constructor of nn.Linear is not called, because it would allocate a weight.
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.dtype = layer.weight.dtype
        self.weight_fp8 = nn.Parameter(
            torch.empty(layer.weight.shape, dtype=VALUE_DTYPE, device=device), requires_grad=False
        )
        self.register_buffer("scale", torch.ones((), dtype=torch.float32, device=device))

        bias = layer.bias
        if bias is not None and bias.is_meta:
            bias = torch.empty_like(bias, device=device)
        elif bias is not None:
            bias = bias.detach().to(device)
        if bias is not None:
            bias = nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)
        if not layer.weight.is_meta:
            self.store(layer.weight.detach().to(device))

    @property
    def weight(self) -> torch.Tensor:
        """Compute the weight in the dtype of the base.

        PEFT reads the weight's dtype, and DoRA reads its norms.
        """
        return (self.weight_fp8.float() * self.scale).to(self.dtype)

    def store(self, weight: torch.Tensor) -> None:
        """Cast a weight [out, in] and store it."""
        values, scale = cast(weight.float(), VALUE_DTYPE)
        self.weight_fp8.copy_(values)
        self.scale.copy_(scale)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out] for inputs [..., in]. Autocast may change the inputs' dtype."""
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        outputs: torch.Tensor = _Product.apply(inputs, self.weight_fp8, self.scale)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


class _Product(torch.autograd.Function):
    """Multiplies inputs by a frozen 8-bit weight, and saves only the weight for `backward`."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return _multiply(inputs, VALUE_DTYPE, weight.t(), scale, fast=True)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        # The shape is still [out, in], but the memory is in column order.
        by_column = weight.t().contiguous().t()
        return _multiply(gradients, GRADIENT_DTYPE, by_column, scale, fast=False), None, None


def _multiply(
    rows: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor, scale: torch.Tensor, *, fast: bool
) -> torch.Tensor:
    """Cast rows [..., k] to an 8-bit dtype, and multiply them by an 8-bit factor [k, n].

    `scale` is the scale of the 8-bit factor.
    """
    values, row_scale = cast(rows.reshape(-1, rows.shape[-1]), dtype)
    product = multiply(values.contiguous(), factor, row_scale, scale, dtype=rows.dtype, fast=fast)
    return product.reshape(*rows.shape[:-1], factor.shape[1])


def multiply(
    rows: torch.Tensor,
    factor: torch.Tensor,
    row_scale: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """Multiply two 8-bit factors [m, k] and [k, n], and return the product [m, n] in `dtype`.

    The first factor must be stored row by row, the second column by column. A scale restores its
    factor's values: either both scales are scalars, or the first is [m, 1] and the second [1, n].
    `fast` accumulates in fewer bits, as is usual in forward passes. Gradients would lose too much
    precision with `fast`.
    """
    product = _multiply_on_cpu if rows.device.type == "cpu" else torch._scaled_mm
    return product(rows, factor, row_scale, scale, out_dtype=dtype, use_fast_accum=fast)


def _multiply_on_cpu(
    rows: torch.Tensor,
    factor: torch.Tensor,
    row_scale: torch.Tensor,
    scale: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Multiply 8-bit factors in fp32: torch's own product takes minutes on some CPUs."""
    product = rows.float() @ factor.float() * (row_scale * scale)
    # A cast that changes nothing returns an alias. For an alias, compiled autograd functions of
    # torch 2.11 get zeros instead of gradients.
    return product if out_dtype is product.dtype else product.to(out_dtype)


def cast(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in an 8-bit dtype, and the scale (fp32, a scalar) that restores them.

    The tensor's largest absolute value becomes the largest value of the dtype. On an H200, one
    scale for each tensor was 5 % faster than one scale for each row.
    """
    factor, _ = scale_to(largest_of(values), dtype)
    # A GPU rounds a scalar factor to the dtype of the values before it multiplies them.
    factor = factor.clamp(max=torch.finfo(values.dtype).max).to(values.dtype)
    limit = torch.finfo(dtype).max
    return (values * factor).clamp(-limit, limit).to(dtype), 1 / factor.float()


def scale_to(largest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factor (fp32) that makes `largest` the dtype's largest value, and its inverse."""
    factor = torch.finfo(dtype).max / largest.float().clamp(min=LEAST)
    return factor, 1 / factor


def largest_of(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value, a scalar.

    The largest value of each row is computed first. A compiler computes it inside the kernel that
    makes the rows, so the values need not be read again. abs() would allocate another tensor.
    """
    least, most = values.aminmax(dim=-1)
    return torch.maximum(-least, most).amax()
