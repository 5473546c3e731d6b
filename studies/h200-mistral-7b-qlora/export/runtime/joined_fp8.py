# -*- coding: utf-8 -*-
"""Computes adapters beside the products of a base in 8-bit floats, in compiled PEFT layers.

The linear layers of a group share their input x (M x K), so x is cast to 8 bits once for all of
them. In the backward pass, the gradients of all outputs are cast together, and one 8-bit product
gives the gradient of x. The low-rank terms stay in 16 bits:

    Forward:    y_i = x8 W_i8' + h s B_i'      with h = x A', one product for all A of the group.
    Backward:   dx  = [dy_1 | dy_2 ..]8 [W_1 ; W_2 ..]8 + dh A      with dh_i = dy_i s B_i.

The compiler adds the low-rank terms inside the kernels that read y and dx. Each weight has a scale
of its own. In the backward product, the sum runs over the outputs of all members, so each gradient
is multiplied by the scale of its weight before the cast.

The tensor cores read the second factor of an 8-bit product column by column. For the backward
product, this is the transpose of a weight, so the group holds `across`: the transposes of its
weights, side by side. They take as much memory as the 8-bit base itself. Without adapters that are
joined, each backward product copies its weight instead (`float8`).
"""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .float8 import GRADIENT_DTYPE, VALUE_DTYPE, cast, largest_of, multiply, scale_to
from .joined_group import Group, run_beside, spans


class Float8Group(Group):
    """A group with a base in 8-bit floats.

    `across` (K x N) is W', the transposes of the members' 8-bit weights side by side. `b` (N x r)
    is sB of all members, one below the other.
    """

    def _store(self) -> None:
        layers = [module.base_layer for module in self.members]
        fan_in = self.members[0].in_features
        fan_out = sum(self.sizes)
        self.weights = [layer.weight_fp8 for layer in layers]
        self.scales = [layer.scale for layer in layers]
        self.across = self.weights[0].new_empty(fan_in, fan_out)
        for weight, columns in zip(self.weights, spans(self.sizes), strict=True):
            self.across[:, columns].copy_(weight.t())

        device = self.weights[0].device
        rank = self.rank * len(self.members)
        self.a = torch.zeros(rank, fan_in, dtype=layers[0].dtype, device=device)
        self.b = torch.zeros(fan_out, self.rank, dtype=layers[0].dtype, device=device)

    def tensors(self) -> list[torch.Tensor]:
        """Return the transposed weights, and the copies of A and sB."""
        return [self.across, self.a, self.b]

    def extra_bytes(self) -> int:
        """Return the bytes of all tensors, because the weights of the base stay as they are."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def refresh(self) -> None:
        """Copy sB, after A was copied into `a`."""
        scaled = torch._foreach_mul(self.up, self.scale)
        torch._foreach_copy_(list(self.b.split(self.sizes)), scaled)

    def multiply(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs (M x size) of each member, without bias, for inputs (M x K)."""
        made: tuple[torch.Tensor, ...] = _Products.apply(
            rows,
            self.across,
            self.a,
            self.b,
            self.sizes,
            self.scale,
            *self.weights,
            *self.scales,
            *self.down,
            *self.up,
        )
        return made


class _Products(torch.autograd.Function):
    """Returns the outputs (M x size) of each member for inputs (M x K).

    `of_members` holds the 8-bit weight of each member, then each member's scale, A and B. The
    backward pass also returns the gradients of A and B.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        across: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        sizes: list[int],
        scale: float,
        *of_members: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        number = len(sizes)
        weights = of_members[:number]
        scales = of_members[number : 2 * number]
        rows = inputs.to(a.dtype)
        values, of_rows = cast(rows, VALUE_DTYPE)
        hidden = torch.mm(rows, a.t())

        outputs = []
        for weight, own, up, narrow in zip(
            weights, scales, b.split(sizes), hidden.chunk(number, 1), strict=True
        ):
            product = multiply(values, weight.t(), of_rows, own, dtype=a.dtype, fast=True)
            outputs.append(product + torch.mm(narrow, up.t()))

        ctx.save_for_backward(rows, hidden, across, a, b, *scales)
        ctx.sizes = sizes
        ctx.scale = scale
        ctx.dtypes = (inputs.dtype, of_members[-1].dtype)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, hidden, across, a, b, *scales = ctx.saved_tensors
        sizes = ctx.sizes
        number = len(sizes)

        # One scale for all members: the largest value of any gradient, times its weight's scale,
        # becomes the largest 8-bit float.
        parts = [largest_of(one) * own for one, own in zip(gradients, scales, strict=True)]
        factor, restore = scale_to(torch.stack(parts).amax(), GRADIENT_DTYPE)
        limit = torch.finfo(GRADIENT_DTYPE).max
        # Autocast, which compiled code sees here, joins no 8-bit floats, but it joins bytes.
        values = torch.cat(
            [
                (one.float() * (factor * own))
                .clamp(-limit, limit)
                .to(GRADIENT_DTYPE)
                .view(torch.uint8)
                for one, own in zip(gradients, scales, strict=True)
            ],
            1,
        )
        of_rows, of_narrow, of_a, of_b = torch.ops.lora.joined_backward_in_fp8(
            values, restore, list(gradients), rows, hidden, across, a, b
        )

        of_inputs_dtype, dtype = ctx.dtypes
        of_down = [one.to(dtype) for one in of_a.chunk(number)]
        of_up = [one.to(dtype) * ctx.scale for one in of_b.split(sizes)]
        unchanged = [None] * (5 + 2 * number)
        return (of_rows + of_narrow).to(of_inputs_dtype), *unchanged, *of_down, *of_up


# Compiled code on disk refers to this operation by name. If a shape or the FLOP formula below
# changes, the name must change too.


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "lora::joined_backward_in_fp8", mutates_args=()
)
def _gradients(
    values: torch.Tensor,
    restore: torch.Tensor,
    gradients: list[torch.Tensor],
    rows: torch.Tensor,
    hidden: torch.Tensor,
    across: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both parts of the gradient of x (M x K), and the gradients of A and B without s.

    `values` (M x N) holds the bytes of the gradients of all outputs in 8-bit floats, and the scalar
    `restore` is their scale. `gradients` are the same in 16 bits, one tensor for each member.
    """
    number = len(gradients)
    sizes = [one.shape[1] for one in gradients]
    of_hidden = torch.empty_like(hidden)
    of_narrow = torch.empty_like(rows)
    of_a = torch.empty_like(a)
    of_b = torch.empty_like(b)

    def run_narrow() -> None:
        columns = zip(of_hidden.chunk(number, 1), hidden.chunk(number, 1), strict=True)
        ups = zip(b.split(sizes), of_b.split(sizes), strict=True)
        for one, (of_own, own), (up, of_up) in zip(gradients, columns, ups, strict=True):
            torch.mm(one, up, out=of_own)
            torch.mm(one.t(), own, out=of_up)
        torch.mm(of_hidden.t(), rows, out=of_a)
        torch.mm(of_hidden, a, out=of_narrow)

    # The low-rank products run on a side stream during the large product. Their results are
    # allocated on the main stream, so that each stream can reuse the memory.
    with run_beside(values.device, run_narrow):
        one = torch.ones_like(restore)
        of_rows = multiply(
            values.view(GRADIENT_DTYPE), across.t(), restore, one, dtype=rows.dtype, fast=False
        )
    return of_rows, of_narrow, of_a, of_b


@_gradients.register_fake  # type: ignore[untyped-decorator]
def _gradients_shape(
    values: torch.Tensor,
    restore: torch.Tensor,
    gradients: list[torch.Tensor],
    rows: torch.Tensor,
    hidden: torch.Tensor,
    across: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(rows),
        torch.empty_like(rows),
        torch.empty_like(a),
        torch.empty_like(b),
    )


@register_flop_formula(  # type: ignore[untyped-decorator]
    torch.ops.lora.joined_backward_in_fp8
)
def _backward_flops(
    values: Any,
    restore: Any,
    gradients: Any,
    rows: Any,
    hidden: Any,
    across: Any,
    a: Any,
    b: Any,
    **_: Any,
) -> int:
    """Return the FLOPs of all products (two for each multiply-add) from the arguments' shapes."""
    narrow = 2 * b[0] * b[1] + 2 * a[0] * a[1]
    return int(2 * values[0] * (across[0] * across[1] + narrow))
