# -*- coding: utf-8 -*-
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

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

# Each entry has a part of a decoder layer, and the part's linear layers with the same input, in the
# order of their calls.
GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("qkv_proj",)),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("gate_up_proj",)),
    ("mlp", ("down_proj",)),
)
# The number of columns that are added to a matrix is a multiple of MULTIPLE, because fast kernels
# need aligned rows.
MULTIPLE = 64
# If the LoRA ranks of a group's adapters add up to at most this number, one low-rank product for
# the whole group takes no longer than separate products for its members.
ONE_PRODUCT = 64
ADAPTER = "default"  # the name that PEFT gives to a model's only adapter
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


class JoinedLayers:
    """A model's joined layers: each layer adds its LoRA terms inside the base's large product.

    PEFT's modules and parameters stay in the model. Until `undo` is called, the base's weights are
    views into the wide matrices. A and sB are copied into these matrices in the base's dtype.
    Before a forward pass, A and sB are copied again if A or B has changed. torch notices a change
    only if one of its own operations made it, so call `watch` for an optimizer of another library.
    """

    def __init__(self, base: Any, layers: list[nn.Module]) -> None:
        """Join the suitable linear layers in `layers`, the decoder layers of the base.

        Raises ValueError if no layer is suitable.
        """
        self._groups: list[_Group] = []
        self._hooks: list[Any] = []
        try:
            for layer in layers:
                for part, members, others in _find_groups(layer):
                    self._groups.append(_Group(part, members, others))
        except torch.OutOfMemoryError:
            self.undo()
            raise
        if not self._groups:
            raise ValueError(f"{type(base).__name__} has no linear layers with adapters to join")

        self._down = [weight for group in self._groups for weight in group.down]
        self._trained = [*self._down, *(weight for group in self._groups for weight in group.up)]
        self._changes = -1
        self._hooks.append(base.base_model.register_forward_pre_hook(lambda *_: self.follow()))

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """After each step of this optimizer, let the next forward pass copy A and sB again."""
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._forget()))

    def tensors(self) -> list[torch.Tensor]:
        """Return each group's wide matrix, and its separate copies of A and sB."""
        return [tensor for group in self._groups for tensor in (group.wide, group.a, group.b)]

    def extra_bytes(self) -> int:
        """Return the bytes that the joined tensors take in addition to the weights of the base."""
        weights = (module.base_layer.weight for group in self._groups for module in group.members)
        return int(
            sum(tensor.nbytes for tensor in self.tensors())
            - sum(weight.nbytes for weight in weights)
        )

    def undo(self) -> None:
        """Restore the separate base weights, and let PEFT's modules compute as before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        while self._groups:
            self._groups.pop().undo()

    def follow(self) -> None:
        """Copy A and sB again if A or B has changed."""
        changes = sum(weight._version for weight in self._trained)
        if changes != self._changes:
            self._refresh()
            self._changes = changes

    def _forget(self) -> None:
        self._changes = -1

    def _refresh(self) -> None:
        copies = [copy for group in self._groups for copy in group.a.split(group.rank)]
        with torch.no_grad():
            torch._foreach_copy_(copies, self._down)
            for group in self._groups:
                group.refresh()


class _Group:
    """PEFT linear layers that share an input of K values and have N outputs in total.

    `wide` (N + P x K + P) is [[W, sB], [A, 0]]. R is the sum of the adapters' ranks, and P is R
    rounded up to a multiple of MULTIPLE. `a` (R x K) is A, and `b` (N x R) is sB with a block for
    each member. `a` and `b` are contiguous copies for the low-rank products.
    """

    def __init__(self, part: nn.Module, members: list[Any], others: list[Any]) -> None:
        """Copy the weights into the wide matrix. Only one group's weights exist twice at a time.

        `part` is the module that calls all members. `part` also calls `others`, linear layers with
        the same input and without adapters.
        """
        self.members = members
        self.kind = type(members[0])
        self.down = [module.lora_A[ADAPTER].weight for module in members]
        self.up = [module.lora_B[ADAPTER].weight for module in members]
        self.biases = [module.base_layer.bias for module in members]
        self.rank = len(self.down[0])
        self.scale = float(members[0].scaling[ADAPTER])
        self.sizes = [module.out_features for module in members]

        # The matrices
        weights = [module.base_layer.weight for module in members]
        fan_in = members[0].in_features
        fan_out = sum(self.sizes)
        rank = self.rank * len(members)
        pad = _padding(rank)
        self.wide = weights[0].new_zeros(fan_out + pad, fan_in + pad)
        self.a = weights[0].new_zeros(rank, fan_in)
        self.b = weights[0].new_zeros(fan_out, rank)
        for weight, rows in zip(weights, _spans(self.sizes), strict=True):
            view = self.wide[rows, :fan_in]
            view.copy_(weight)
            weight.data = view

        # The modules
        self._replaced: list[tuple[nn.Module, type]] = []
        if len(members) == 1:
            self._replace(members[0], _lone_class)
            return
        self._replace(part, _part_class)
        for place, module in (*enumerate(members), *((None, module) for module in others)):
            self._replace(module, _member_class)
            module.place = place

    def _replace(self, module: nn.Module, make: Callable[[type], type]) -> None:
        self._replaced.append((module, type(module)))
        module.__class__ = make(type(module))
        module.__dict__["joined"] = self

    def refresh(self) -> None:
        """Copy sB and A into the wide matrix, and sB into `b`."""
        fan_out, rank = self.b.shape
        fan_in = self.a.shape[1]
        columns = _spans([self.rank] * len(self.sizes))
        scaled = torch._foreach_mul(self.up, self.scale)
        for up, rows, own in zip(scaled, _spans(self.sizes), columns, strict=True):
            self.b[rows, own] = up
        self.wide[:fan_out, fan_in : fan_in + rank] = self.b
        self.wide[fan_out : fan_out + rank, :fan_in] = self.a

    def undo(self) -> None:
        """Restore the members' separate weights and their own computation."""
        for module in self.members:
            module.base_layer.weight.data = module.base_layer.weight.data.clone(
                memory_format=torch.contiguous_format
            )
        for replaced, kind in self._replaced:
            replaced.__class__ = kind
            replaced.__dict__.pop("joined")
            replaced.__dict__.pop("place", None)


def _find_groups(layer: nn.Module) -> Iterator[tuple[nn.Module, list[Any], list[Any]]]:
    """Yield each group of a decoder layer: `part`, `members` and `others` (see `_Group`)."""
    for name, names in GROUPS:
        part: Any = getattr(layer, name, None)
        found = [module for name in names if (module := getattr(part, name, None)) is not None]
        members = [module for module in found if _is_plain(module)]
        kinds = {
            (len(one.lora_A[ADAPTER].weight), one.scaling[ADAPTER], one.in_features)
            for one in members
        }
        if len(kinds) == 1:
            yield part, members, [module for module in found if module not in members]
        else:
            yield from ((part, [module], []) for module in members)


def _is_plain(module: Any) -> bool:
    """Return whether this is a linear layer with one plain LoRA adapter.

    A plain adapter has no bias, no dropout and no variant such as DoRA, and its base is frozen and
    not quantised.
    """
    from peft.tuners.lora import Linear

    if type(module) is not Linear or type(module.base_layer) is not nn.Linear:
        return False
    is_only = (
        list(module.lora_A) == [ADAPTER]
        and not module.lora_variant
        and module.lora_B[ADAPTER].bias is None
    )
    has_no_dropout = isinstance(module.lora_dropout[ADAPTER], nn.Identity)
    weight = module.base_layer.weight
    return is_only and has_no_dropout and not weight.requires_grad and weight.is_floating_point()


def _padding(rank: int) -> int:
    """Return P, the rank R rounded up to a multiple of MULTIPLE."""
    return -(-rank // MULTIPLE) * MULTIPLE


def _spans(sizes: list[int]) -> list[slice]:
    """Return consecutive slices that have these sizes."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class _GroupInput:
    """Replaces a group's input tensor, and holds that tensor and the outputs of the members."""

    def __init__(self, inputs: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        # Attention and MLPs read only this attribute of their input.
        self.shape = inputs.shape
        self.inputs = inputs
        self.outputs = outputs


# Each kind of module has one subclass, so that compiled code of one layer serves all layers. If
# each module got its own `forward`, each module would be compiled again.


@functools.cache
def _part_class(kind: Any) -> Any:
    class Part(kind):
        """Attention or an MLP that computes the group `joined` before its own forward pass."""

        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            group_input = _GroupInput(hidden_states, _compute(self.joined, hidden_states))
            return super().forward(group_input, *args, **kwargs)

    return Part


@functools.cache
def _member_class(kind: Any) -> Any:
    class Member(kind):
        """A linear layer with a group's input.

        `place` is the layer's index in the group, or None if the layer has no adapter.
        """

        def forward(self, inputs: "_GroupInput | torch.Tensor") -> Any:
            if isinstance(inputs, _GroupInput):
                if self.place is not None:
                    return inputs.outputs[self.place]
                inputs = inputs.inputs
            return super().forward(inputs)

    return Member


@functools.cache
def _lone_class(kind: Any) -> Any:
    class Lone(kind):
        """The only member of a group: a linear layer with an adapter."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return _compute(self.joined, inputs)[0]

    return Lone


def _compute(group: _Group, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs (... x size) of each member for inputs (... x K)."""
    if group.members[0].disable_adapters or group.members[0].merged:
        return [group.kind.forward(module, inputs) for module in group.members]

    rows = inputs.reshape(-1, inputs.shape[-1])
    made = _Products.apply(
        rows, group.wide, group.a, group.b, group.sizes, group.scale, *group.down, *group.up
    )
    shaped = [one.reshape(*inputs.shape[:-1], one.shape[-1]) for one in made]
    return [
        one if bias is None else one + bias for one, bias in zip(shaped, group.biases, strict=True)
    ]


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
        ends = [(rows.start, rows.stop) for rows in _spans(sizes)]
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
        of_down = [one.to(dtype) for one in of_a.split(a.shape[0] // len(ctx.sizes))]
        of_up = [one.to(dtype) * ctx.scale for one in of_b.split(ctx.sizes)]
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
    columns = _spans([rank // len(sizes)] * len(sizes))
    if rank <= ONE_PRODUCT:
        torch.mm(own, b, out=of_hidden)
    else:
        for rows, part in zip(_spans(sizes), columns, strict=True):
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
        for rows, part in zip(_spans(sizes), columns, strict=True):
            if at_once:
                of_b[rows].copy_(blocks[rows, part])
            else:
                torch.mm(own[:, rows].t(), hidden[:, part], out=of_b[rows])

    # The low-rank products run on a side stream during the large product. Memory is freed or
    # overwritten only after both streams have finished.
    with _run_beside(gradient.device, run_narrow):
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


@contextmanager
def _run_beside(device: torch.device, run_narrow: Callable[[], None]) -> Iterator[None]:
    """Run the low-rank products on a side stream during the block; on a CPU, after the block."""
    if device.type != "cuda":
        yield
        run_narrow()
        return

    main = torch.cuda.current_stream(device)
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    side = _side_streams[device]
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            run_narrow()
        yield
    finally:  # also after a failure, because the side stream must not write to freed memory
        main.wait_stream(side)


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
