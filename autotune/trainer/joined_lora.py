"""Adds LoRA's low-rank terms inside the frozen base's large products, in compiled PEFT layers.

PEFT computes `y = x W' + s (x A') B'` (' means transposed) in three products, and then reads and
writes all of y again for the sum. PEFT's backward pass does the same with the gradient of x. In
this module, both sums happen inside the large product, whose inner dimension is slightly longer.

    Forward:    y  = [x | h] [W | sB]'      with h  = x A'.
    Backward:   dx = [dy | dh] [W ; A]      with dh = dy sB.

`[x | h]` and `[dy | dh]` are one tensor each. The kernels that compute x and dy write directly into
these tensors, and the low-rank products write h and dh into the columns beside them. One wide
matrix holds W, sB and A of a group: the linear layers with the same input, for example the
projections to queries, keys and values.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from .float8 import Float8Linear
from .joined_fp8 import Float8Group
from .joined_group import Group, find_groups, run_beside, spans

# The number of columns that are added to a matrix is a multiple of MULTIPLE, because fast kernels
# need aligned rows.
MULTIPLE = 64
# If the LoRA ranks of a group's adapters add up to at most this number, one low-rank product for
# the whole group takes no longer than separate products for its members.
ONE_PRODUCT = 64


class JoinedLayers:
    """A model's joined layers: each layer adds its LoRA terms inside the base's large product.

    PEFT's modules and parameters stay in the model. Until `undo` is called, a 16-bit base's weights
    are views into the wide matrices. A and sB are copied into these matrices in the base's dtype.
    Before a forward pass, A and sB are copied again if A or B has changed. torch notices a change
    only if one of its own operations made it, so call `watch` for an optimizer of another library.
    """

    def __init__(self, base: Any, layers: list[nn.Module]) -> None:
        """Join the suitable linear layers in `layers`, the decoder layers of the base.

        Raises ValueError if no layer is suitable.
        """
        self._groups: list[Group] = []
        self._hooks: list[Any] = []
        try:
            for layer in layers:
                for part, members, others in find_groups(layer):
                    in_fp8 = isinstance(members[0].base_layer, Float8Linear)
                    make = Float8Group if in_fp8 else _WideGroup
                    self._groups.append(make(part, members, others))
        except torch.OutOfMemoryError:
            self.undo()
            raise
        if not self._groups:
            raise ValueError(f"{type(base).__name__} has no linear layers with adapters to join")

        self._down = [weight for group in self._groups for weight in group.down]
        self._up = [weight for group in self._groups for weight in group.up]
        self._changes = -1
        self._hooks.append(base.base_model.register_forward_pre_hook(lambda *_: self.follow()))

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """After each step of this optimizer, let the next forward pass copy A and sB again."""
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._forget()))

    def tensors(self) -> list[torch.Tensor]:
        """Return each group's matrices of the base, and its copies of A and sB."""
        return [tensor for group in self._groups for tensor in group.tensors()]

    def extra_bytes(self) -> int:
        """Return the bytes that the joined tensors take in addition to the weights of the base."""
        return sum(group.extra_bytes() for group in self._groups)

    def undo(self) -> None:
        """Restore the separate base weights, and let PEFT's modules compute as before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        while self._groups:
            self._groups.pop().undo()

    def follow(self) -> None:
        """Copy A and sB again if A or B has changed."""
        changes = sum(weight._version for weight in (*self._down, *self._up))
        if changes != self._changes:
            self._refresh()
            self._changes = changes

    def _forget(self) -> None:
        self._changes = -1

    def _refresh(self) -> None:
        copies = [copy for group in self._groups for copy in group.a.split(group.rank)]
        scaled_copies = [copy for group in self._groups for copy in group.places()]
        scales = [group.scale for group in self._groups for _ in group.up]
        with torch.no_grad():
            torch._foreach_copy_(copies, self._down)
            torch._foreach_copy_(scaled_copies, torch._foreach_mul(self._up, scales))
            for group in self._groups:
                group.refresh()


class _WideGroup(Group):
    """A group with a base in 16 bits.

    `wide` (N + P x K + P) is [[W, sB], [A, 0]]. R is the sum of the adapters' ranks, and P is R
    rounded up to a multiple of MULTIPLE. `a` (R x K) is A, and `b` (N x R) is sB with a block for
    each member. `a` and `b` are contiguous copies for the low-rank products.
    """

    def _store(self) -> None:
        """Copy the weights into the wide matrix. Only one group's weights exist twice at a time."""
        weights = [module.base_layer.weight for module in self.members]
        fan_in = self.members[0].in_features
        fan_out = sum(self.sizes)
        rank = self.rank * len(self.members)
        pad = _padding(rank)
        self.wide = weights[0].new_zeros(fan_out + pad, fan_in + pad)
        self.a = weights[0].new_zeros(rank, fan_in)
        self.b = weights[0].new_zeros(fan_out, rank)
        for weight, rows in zip(weights, spans(self.sizes), strict=True):
            view = self.wide[rows, :fan_in]
            view.copy_(weight)
            weight.data = view

    def tensors(self) -> list[torch.Tensor]:
        """Return the wide matrix, and the copies of A and sB."""
        return [self.wide, self.a, self.b]

    def extra_bytes(self) -> int:
        """Return the bytes that the wide matrix and the copies add to the weights of the base."""
        weights = sum(module.base_layer.weight.nbytes for module in self.members)
        return int(sum(tensor.nbytes for tensor in self.tensors()) - weights)

    def places(self) -> list[torch.Tensor]:
        """Return the block of `b` that holds sB of each member."""
        columns = spans([self.rank] * len(self.sizes))
        return [self.b[rows, own] for rows, own in zip(spans(self.sizes), columns, strict=True)]

    def refresh(self) -> None:
        """Copy sB and A into the wide matrix."""
        fan_out, rank = self.b.shape
        fan_in = self.a.shape[1]
        self.wide[:fan_out, fan_in : fan_in + rank] = self.b
        self.wide[fan_out : fan_out + rank, :fan_in] = self.a

    def multiply(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs (M x size) of each member, without bias, for inputs (M x K)."""
        made: tuple[torch.Tensor, ...] = _Products.apply(
            rows, self.wide, self.a, self.b, self.sizes, self.scale, *self.down, *self.up
        )
        return made

    def undo(self) -> None:
        """Restore the members' separate weights and their own computation."""
        for module in self.members:
            module.base_layer.weight.data = module.base_layer.weight.data.clone(
                memory_format=torch.contiguous_format
            )
        super().undo()


def _padding(rank: int) -> int:
    """Return P, the rank R rounded up to a multiple of MULTIPLE."""
    return -(-rank // MULTIPLE) * MULTIPLE


class _Products(torch.autograd.Function):
    """Returns the outputs (M x size) of each member for inputs (M x K).

    `trained` holds A of each member, then B of each member. The backward pass also returns the
    gradients of A and B.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        wide: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        sizes: list[int],
        scale: float,
        *trained: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        padded = functional.pad(inputs.to(wide.dtype), (0, wide.shape[1] - a.shape[1]))
        hidden = torch.mm(padded[:, : a.shape[1]], a.t())
        ends = [(rows.start, rows.stop) for rows in spans(sizes)]
        outputs = [
            torch.ops.lora.joined_forward(padded, hidden, wide, begin, end) for begin, end in ends
        ]
        ctx.save_for_backward(padded, hidden, wide, a, b)
        ctx.sizes = sizes
        ctx.scale = scale
        ctx.dtypes = (inputs.dtype, trained[0].dtype)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        padded, hidden, wide, a, b = ctx.saved_tensors
        pad = padded.new_zeros(padded.shape[0], wide.shape[0] - b.shape[0])
        # Compiled code computes each gradient directly in its columns of this tensor.
        gradient = torch.cat([*gradients, pad], 1)
        of_inputs, of_a, of_b = torch.ops.lora.joined_backward(
            gradient, padded, hidden, wide, a, b, ctx.sizes
        )

        of_inputs_dtype, dtype = ctx.dtypes
        of_down = of_a.to(dtype).split(a.shape[0] // len(ctx.sizes))
        of_up = (of_b.to(dtype) * ctx.scale).split(ctx.sizes)
        return of_inputs.to(of_inputs_dtype), None, None, None, None, None, *of_down, *of_up


# Compiled code on disk refers to these operations by name. If a shape or a FLOP formula below
# changes, the name must change too.
#
# Both operations write h or dh into columns of their first argument that are not read elsewhere.
# The write is not declared as a mutation, because the compiler would then copy the argument. A
# recomputation writes the same values again, so it does no harm.


@torch.library.custom_op("lora::joined_forward", mutates_args=())  # type: ignore[untyped-decorator]
def _products(
    padded: torch.Tensor, hidden: torch.Tensor, wide: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Return the outputs (M x size) of one member from [x | 0] (M x K + P) and h (M x R).

    `begin` and `end` are the member's rows of `wide`. Each member has a separate operation for two
    reasons. First, one tensor of all outputs would stay in memory as long as any part of it is
    saved, and attention saves the output of `v_proj` for the backward pass. Second, if one
    operation had several outputs, the compiler would assume that recomputing one of them is free.
    """
    fan_in = padded.shape[1] - _padding(hidden.shape[1])
    padded[:, fan_in : fan_in + hidden.shape[1]].copy_(hidden)
    return torch.mm(padded, wide[begin:end].t())


@_products.register_fake  # type: ignore[untyped-decorator]
def _products_shape(
    padded: torch.Tensor, hidden: torch.Tensor, wide: Any, begin: int, end: int
) -> torch.Tensor:
    return padded.new_empty(padded.shape[0], end - begin)


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "lora::joined_backward", mutates_args=()
)
def _gradients(
    gradient: torch.Tensor,
    padded: torch.Tensor,
    hidden: torch.Tensor,
    wide: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of inputs (M x K), A (R x K), and B without its scale s (N x r).

    `gradient` is [dy | 0] (M x N + P), and r is the rank of one adapter.
    """
    fan_out, rank = b.shape
    fan_in = a.shape[1]
    own = gradient[:, :fan_out]
    of_hidden = gradient[:, fan_out : fan_out + rank]
    columns = spans([rank // len(sizes)] * len(sizes))
    if rank <= ONE_PRODUCT:
        torch.mm(own, b, out=of_hidden)
    else:
        for rows, part in zip(spans(sizes), columns, strict=True):
            torch.mm(own[:, rows], b[rows, part], out=of_hidden[:, part])

    of_a = torch.empty_like(a)
    of_b = b.new_empty(fan_out, rank // len(sizes))
    at_once = rank <= ONE_PRODUCT and len(sizes) > 1
    # `blocks` is allocated on the main stream. If `blocks` were allocated on the side stream, only
    # that stream could reuse the memory.
    blocks = torch.empty_like(b) if at_once else of_b

    def run_narrow() -> None:
        torch.mm(of_hidden.t(), padded[:, :fan_in], out=of_a)
        if at_once:
            torch.mm(own.t(), hidden, out=blocks)
        for rows, part in zip(spans(sizes), columns, strict=True):
            if at_once:
                of_b[rows].copy_(blocks[rows, part])
            else:
                torch.mm(own[:, rows].t(), hidden[:, part], out=of_b[rows])

    # The low-rank products run on a side stream during the large product. Memory is freed or
    # overwritten only after both streams have finished.
    with run_beside(gradient.device, run_narrow):
        of_inputs = torch.mm(gradient, wide[:, :fan_in])
    return of_inputs, of_a, of_b


@_gradients.register_fake  # type: ignore[untyped-decorator]
def _gradients_shape(
    gradient: torch.Tensor,
    padded: torch.Tensor,
    hidden: torch.Tensor,
    wide: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rank = b.shape[1] // len(sizes)
    return (
        padded.new_empty(padded.shape[0], a.shape[1]),
        torch.empty_like(a),
        b.new_empty(b.shape[0], rank),
    )


@register_flop_formula(torch.ops.lora.joined_forward)  # type: ignore[untyped-decorator]
def _forward_flops(padded: Any, hidden: Any, wide: Any, begin: int, end: int, **_: Any) -> int:
    """Return the FLOPs of a product (two for each multiply-add) from the arguments' shapes."""
    return int(2 * padded[0] * padded[1] * (end - begin))


@register_flop_formula(torch.ops.lora.joined_backward)  # type: ignore[untyped-decorator]
def _backward_flops(
    gradient: Any, padded: Any, hidden: Any, wide: Any, a: Any, b: Any, sizes: Any, **_: Any
) -> int:
    blocks = b[1] if b[1] <= ONE_PRODUCT else b[1] // len(sizes)
    return int(2 * padded[0] * (gradient[1] * a[1] + a[0] * a[1] + 2 * b[0] * blocks))
