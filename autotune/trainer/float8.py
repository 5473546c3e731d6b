"""Frozen linear layers whose weights are kept in 8-bit floats, and whose products are of 8-bit floats, both ways.

A weight is cast once. Inputs are cast in each forward pass, gradients in each backward pass, by their largest value.
"""

from typing import Any

import torch
from torch import nn

MULTIPLE = 16  # both sides of a matrix must be multiples of it
KEPT, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2  # of weights and inputs; gradients need a wider range
LEAST = 1e-12  # as the largest value: what is zero throughout stays zero


def multiply_in_fp8(model: Any, device: torch.device | None = None) -> None:
    """Have linear layers but the head keep their weights in 8-bit floats and multiply such. The model goes to `device`.

    Weights go there one by one, so that it never holds all of them in 16 bits. Those that have no memory get some, and
    no values. Call it before adapters are added: those stay as they are. Adapters are merged into a base loaded anew,
    since this one takes no changes.
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
    """A frozen linear layer: `kept` [out, in], in 8 bits, times `scale` (fp32, of no dimensions) is its weight.

    There is one copy, of half the size of 16 bits. Tensor cores take the second factor column by column, and the
    transpose of `kept` is laid out so. Its own columns, which the backward pass needs, are laid out anew for each
    product: that moves two bytes for each value. A second copy would take all of the memory that 8 bits save.
    """

    kept: nn.Parameter
    scale: torch.Tensor

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        """Take the place of `layer`. Without values of its own it gets some by `keep`."""
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype
        self.kept = nn.Parameter(torch.empty(layer.weight.shape, dtype=KEPT, device=device), requires_grad=False)
        self.register_buffer("scale", torch.ones((), dtype=torch.float32, device=device))
        bias = layer.bias
        if bias is not None:
            values = torch.empty_like(bias, device=device) if bias.is_meta else bias.detach().to(device)
            bias = nn.Parameter(values, requires_grad=False)
        self.register_parameter("bias", bias)
        if not layer.weight.is_meta:
            self.keep(layer.weight.detach().to(device))

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the dtype of the base, computed anew: PEFT asks for its dtype, and DoRA for its norms."""
        return (self.kept.float() * self.scale).to(self.dtype)

    def keep(self, weight: torch.Tensor) -> None:
        """Cast a weight [out, in] and keep it."""
        kept, scale = _in_8_bits(weight.float(), KEPT)
        self.kept.copy_(kept)
        self.scale.copy_(scale)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs [..., out] of inputs [..., in], in the dtype that autocast has, or that of the inputs."""
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        outputs: torch.Tensor = _Product.apply(inputs, self.kept, self.scale)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


class _Product(torch.autograd.Function):
    """Inputs times a frozen weight in 8 bits. Nothing but the weight is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, kept: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept, scale)
        return _multiply(inputs, KEPT, kept.t(), scale, fast=True)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        kept, scale = ctx.saved_tensors
        turned = kept.t().contiguous().t()  # [out, in] as before, but column by column
        return _multiply(gradients, GRADIENTS, turned, scale, fast=False), None, None


def _multiply(
    rows: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor, scale: torch.Tensor, *, fast: bool
) -> torch.Tensor:
    """Rows [..., k], cast to an 8-bit dtype, times a factor [k, n] of 8 bits and its scale.

    `fast` sums in fewer bits, as is usual for forward passes, where gradients would lose more.
    """
    cast, of_rows = _in_8_bits(rows.reshape(-1, rows.shape[-1]), dtype)
    # The first factor must be row by row, the second column by column.
    product = torch._scaled_mm(cast.contiguous(), factor, of_rows, scale, out_dtype=rows.dtype, use_fast_accum=fast)
    return product.reshape(*rows.shape[:-1], factor.shape[1])


def _in_8_bits(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in an 8-bit dtype, and the scale (fp32, of no dimensions) that makes them what they were.

    The largest becomes the largest of the dtype. One scale a tensor was 5 % faster than one a row on an H200.
    """
    least, most = values.aminmax()  # without a tensor of absolute values
    largest = torch.maximum(-least, most).float().clamp(min=LEAST)
    limit = torch.finfo(dtype).max
    # A GPU rounds a factor of no dimensions to the dtype of the values before it multiplies them.
    factor = (limit / largest).clamp(max=torch.finfo(values.dtype).max).to(values.dtype)
    return (values * factor).clamp(-limit, limit).to(dtype), 1 / factor.float()
