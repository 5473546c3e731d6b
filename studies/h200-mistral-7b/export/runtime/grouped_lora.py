# -*- coding: utf-8 -*-
"""Computes LoRA on a mixture of experts by grouped matrix products (grouped GEMM).

In each forward pass, PEFT's wrappers add `s B A` to the weights of all experts, and the experts use
the sums. This module replaces the wrappers' computation. Each row is multiplied only by the
matrices W, A and B of its own expert (' means transposed):

    y = x W' + (x A') sB'

The rows are sorted by expert, so one grouped product multiplies the rows of all experts. The
kernel adds the adapters' part to a sum before it writes the sum, so outputs are written once. The
weights of the base are only read, and the computation can be compiled. PEFT's modules and
parameters stay in the model.

The experts must use transformers' interface for experts (`transformers.integrations.moe`). Some
families have their own code instead: Llama 4 multiplies all tokens by all experts, DBRX keeps all
experts in one matrix, LongCat-Flash has experts without weights, and JetMoE and Step-3 loop over
their experts.
"""

import functools
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from .settings import PRODUCT_VARIABLE

ADAPTER = "default"  # the name that PEFT gives to a model's only adapter
# The attributes of a module that uses transformers' interface for experts
INTERFACE = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
# The ways to compute a grouped product: a kernel of torch, the kernels in `grouped_kernels`, or one
# matrix product for each expert. The environment variable PRODUCT_VARIABLE forces one on a GPU.
FUSED, TRITON, EACH = "fused", "triton", "each"
# Kernels load 16 bytes at a time, and the fused kernel accepts nothing else. So in 16 bits, LoRA
# ranks are padded to a multiple of this number.
MULTIPLE = 8


def group_experts(model: nn.Module) -> None:
    """Compute the adapters of experts by grouped products until `restore_experts` is called.

    Raises ValueError if the model has no adapters on experts, or if its experts do not use
    transformers' interface.
    """
    experts = adapted_experts(model)
    if not experts:
        raise ValueError(f"{type(model).__name__} has no adapters on experts to group")
    for one in experts:
        if not uses_interface(one):
            raise ValueError(f"{type(one).__name__} does not use transformers' experts interface")

    grouped, summed = _classes()
    for wrapper in _outermost(model):
        wrapper.__class__ = grouped if wrapper.num_experts > 1 else summed


def restore_experts(model: nn.Module) -> None:
    """Let PEFT compute the adapters of experts again, except for experts in 4 bits.

    PEFT cannot add `s B A` to packed weights.
    """
    for module in model.modules():
        replaced = getattr(type(module), "replaced", None)
        if replaced and not hasattr(module.get_base_layer(), "multiply_packed"):
            module.__class__ = replaced


def adapted_experts(model: nn.Module) -> list[Any]:
    """Return the modules of experts that have adapters."""
    return [one.get_base_layer() for one in _outermost(model) if one.num_experts > 1]


def uses_interface(module: nn.Module) -> bool:
    """Return whether a module computes experts by transformers' interface."""
    return all(hasattr(module, name) for name in INTERFACE)


def _outermost(model: nn.Module) -> Iterator[Any]:
    """Yield the outermost of PEFT's nested wrappers, each of which adapts one parameter."""
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(wrapper.base_layer) for wrapper in wrappers}
    yield from (wrapper for wrapper in wrappers if id(wrapper) not in inner)


# Each kind of module has one subclass, so that compiled code of one layer serves all layers. PEFT
# is imported late, because it imports bitsandbytes and torch's compiler.


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Return the class for wrappers of experts, and the class for wrappers of routers."""
    from peft.tuners.lora.layer import ParamWrapper

    class Grouped(ParamWrapper):
        """Experts whose adapters are computed by grouped products."""

        replaced = ParamWrapper

        def forward(
            self, hidden_states: torch.Tensor, top_k_index: Any, top_k_weights: Any
        ) -> torch.Tensor:
            if self.disable_adapters or self.merged:
                return super().forward(hidden_states, top_k_index, top_k_weights)
            return compute_experts(self, hidden_states, top_k_index, top_k_weights)

    class Summed(ParamWrapper):
        """A small module: `s B A` is added to its weight, without torch's parametrization."""

        replaced = ParamWrapper

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.disable_adapters or self.merged:
                return super().forward(*args, **kwargs)
            weight = self.get_param() + self.get_delta_weight(ADAPTER)
            changed = {self.parameter_name: weight}
            return functional_call(self.base_layer, changed, args, kwargs)

    return Grouped, Summed


def compute_experts(
    wrapper: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sums (T x H) of the experts' outputs for T tokens.

    `wrapper` is a module of experts, or PEFT's wrapper around it. `hidden_states` (T x H) are the
    inputs. `top_k_index` (T x k) has the experts of each token, and `weights` (T x k) has the
    weights of their outputs.
    """
    adapters = {}
    while hasattr(wrapper, "lora_A"):
        adapters[wrapper.parameter_name] = wrapper
        wrapper = wrapper.base_layer
    experts = wrapper

    # The pairs of a token and an expert, sorted by expert
    sorted_ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    place = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    place = place.view_as(top_k_index)
    numbers = torch.arange(experts.num_experts, device=order.device)
    ends = torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)

    def project(name: str, rows: torch.Tensor) -> torch.Tensor:
        outputs = _project(experts, name, adapters.get(name), rows, ends)
        if experts.has_bias:
            outputs = outputs + getattr(experts, f"{name}_bias")[sorted_ids]
        return outputs

    rows = _Sort.apply(hidden_states, order, place)
    if experts.has_gate:
        rows = experts._apply_gate(project("gate_up_proj", rows))
    else:
        rows = experts.act_fn(project("up_proj", rows))
    rows = project("down_proj", rows)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)

    return _Combine.apply(rows, weights, order, place).to(hidden_states.dtype)


def _project(
    experts: Any, name: str, adapter: Any, rows: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return rows (S x in) times a projection of their experts, including its adapter."""
    weight = getattr(experts, name)
    is_packed = hasattr(experts, "multiply_packed")  # the weights are in 4 bits: `packed_experts`
    # Like transformers' own code, compute in the dtype of the weights.
    dtype = weight.quant_state.dtype if is_packed else weight.dtype
    rows = rows.to(dtype)
    down, up = (None, None) if adapter is None else _matrices(adapter, dtype)
    if is_packed:
        packed: torch.Tensor = experts.multiply_packed(rows, name, down, up, ends)
        return packed
    weight = weight if experts.is_transposed else weight.transpose(1, 2)
    outputs: torch.Tensor = torch.ops.lora.adapted_product(rows, weight, down, up, ends)[0]
    return outputs


def _matrices(adapter: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A' (E x in x r) and sB' (E x r x out) of E experts, in this dtype.

    PEFT stores A as (E * r, in), ordered by expert and then by rank. PEFT stores B as (out, r * E),
    ordered by rank and then by expert.
    """
    count, rank = adapter.num_experts, adapter.r[ADAPTER]
    down = adapter.lora_A[ADAPTER].weight.view(count, rank, -1)
    up = adapter.lora_B[ADAPTER].weight.view(-1, rank, count).permute(2, 1, 0)
    down, up = down.to(dtype), (up * adapter.scaling[ADAPTER]).to(dtype)

    missing = -rank % MULTIPLE
    if missing and dtype.itemsize == 2:
        down, up = (functional.pad(one, (0, 0, 0, missing)) for one in (down, up))
    return down.transpose(1, 2), up.contiguous()


# torch's own gradient of an indexing operation adds rows with atomic operations, whose order would
# change the result from run to run. A sort moves each row to one place, so its gradient only
# gathers rows.


class _Sort(torch.autograd.Function):
    """Copies the states of T tokens (T x H) to the sorted token-expert pairs (T * k x H)."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, order: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(place)
        return states[order // place.shape[1]]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _add_up(gradients[0], place), None, None


class _Combine(torch.autograd.Function):
    """Returns each token's weighted sum (T x H) of its k sorted rows (T * k x H).

    The gradient of the weights (T x k) is computed from the sorted rows, so no gathered rows are
    kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        place: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, order, place)
        return _add_up(rows, place, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, order, place = ctx.saved_tensors
        spread = gradients[0][order // place.shape[1]]
        of_weights = (spread * rows).sum(-1)[place]
        of_rows = spread * weights.reshape(-1)[order].unsqueeze(-1)
        return of_rows.to(rows.dtype), of_weights.to(weights.dtype), None, None


def _add_up(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each token's sum (T x H) of the k rows at its places (T x k), times their weights.

    The sum is a chain of additions in fp32. Inductor compiles the chain to one kernel, which is
    several times as fast as Inductor's kernel for a sum over gathered rows.
    """
    total = None
    for number in range(place.shape[1]):
        term = rows[place[:, number]].float()
        if weights is not None:
            term = term * weights[:, number].unsqueeze(1)
        total = term if total is None else total + term
    assert total is not None  # each token has an expert
    return total.to(rows.dtype)


# Compiled code on disk refers to these operations by name. If a shape or a FLOP formula below
# changes, the name must change too.


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "lora::adapted_product", mutates_args=()
)
def _product(
    rows: torch.Tensor,
    weights: torch.Tensor,
    down: torch.Tensor | None,
    up: torch.Tensor | None,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (S x K) times the matrices (E x K x N) of their experts, as S x N.

    With adapters `down` (E x K x r) and `up` (E x r x N), the outputs include the adapters' part,
    rows * down * up. The second result is rows * down (S x r), or S x 0 without adapters. The rows
    of expert e end before row `ends[e]`, and the next expert's rows begin there.
    """
    if down is None:
        return _multiply(rows, weights, ends), rows.new_empty(rows.shape[0], 0)
    hidden = _multiply(rows, down, ends)
    return _multiply(rows, weights, ends, hidden, up), hidden


def _multiply(
    rows: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    hidden: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows * weights, plus hidden * up (see `_product`)."""
    way = _way(rows)
    if way == TRITON:
        from .grouped_kernels import multiply

        return multiply(rows, weights, ends, hidden, up)

    if way == FUSED:
        outputs = functional.grouped_mm(rows, weights, offs=ends)
        if hidden is not None:
            outputs += functional.grouped_mm(hidden, up, offs=ends)
        return outputs

    outputs = rows.new_empty(rows.shape[0], weights.shape[2])
    for expert, own in enumerate(_spans(ends)):
        torch.mm(rows[own], weights[expert], out=outputs[own])
        if hidden is not None and up is not None:
            outputs[own].addmm_(hidden[own], up[expert])
    return outputs


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "lora::grouped_weight_gradient", mutates_args=()
)
def _weight_gradient(
    rows: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return the gradients (E x K x N) of the experts' matrices.

    `rows` (S x K) are the inputs, and `gradient` (S x N) is the gradient of the outputs.
    """
    way = _way(rows)
    if way == FUSED:
        return functional.grouped_mm(rows.t(), gradient, offs=ends)
    if way == TRITON:
        from .grouped_kernels import weight_gradient

        return weight_gradient(rows, gradient, ends)
    result = rows.new_empty(len(ends), rows.shape[1], gradient.shape[1])
    for expert, own in enumerate(_spans(ends)):
        torch.mm(rows[own].t(), gradient[own], out=result[expert])
    return result


def _way(rows: torch.Tensor) -> str:
    """Return how to compute grouped products of these rows: FUSED, TRITON or EACH.

    torch's fused kernel is for bf16 and GPUs of compute capability 9.0 and 10.x, and is computed
    only if the user forces it. It writes the adapters' part of the outputs to memory of its own.
    """
    if rows.device.type != "cuda" or rows.dtype.itemsize != 2:
        return EACH
    if forced := os.environ.get(PRODUCT_VARIABLE):
        if forced not in (FUSED, TRITON, EACH):
            raise ValueError(
                f"{PRODUCT_VARIABLE} must be {FUSED}, {TRITON} or {EACH}, not {forced!r}"
            )
        return forced
    return TRITON if _capability(rows.device) >= 8 and find_spec("triton") else EACH


@functools.cache
def _capability(device: torch.device) -> int:
    """Return the major compute capability of a GPU.

    The result is cached, because torch's query takes 16 us, and each layer asks many times.
    """
    major: int = torch.cuda.get_device_capability(device)[0]
    return major


def _spans(ends: torch.Tensor) -> Iterator[slice]:
    """Yield the rows of each expert; on a GPU, the host waits once for `ends`."""
    begin = 0
    for end in ends.tolist():
        yield slice(begin, end)
        begin = end


@_product.register_fake  # type: ignore[untyped-decorator]
def _product_shapes(
    rows: torch.Tensor, weights: torch.Tensor, down: torch.Tensor | None, up: Any, ends: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = 0 if down is None else down.shape[2]
    count = rows.shape[0]
    return rows.new_empty(count, weights.shape[2]), rows.new_empty(count, rank)


@_weight_gradient.register_fake  # type: ignore[untyped-decorator]
def _weight_gradient_shape(
    rows: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows, weights, down, up, ends = inputs
    hidden = output[1]
    ctx.mark_non_differentiable(hidden)
    # Without trained matrices, the rows are not kept. The weights of the base are frozen.
    _, of_weights, of_down, of_up, _ = ctx.needs_input_grad[:5]
    ctx.save_for_backward(
        rows if of_weights or of_down else None,
        weights,
        down,
        up,
        hidden if of_up else None,
        ends,
    )


def _gradients(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    rows, weights, down, up, hidden, ends = ctx.saved_tensors
    gradient = gradient.contiguous()  # the fused kernel cannot read an expanded gradient
    # The gradient of the rows is a product of the same form: the adapters change places.
    of_rows, between = torch.ops.lora.adapted_product(
        gradient, weights.transpose(1, 2), *swapped_adapters(down, up), ends
    )
    of_weights = None
    if ctx.needs_input_grad[1]:
        of_weights = torch.ops.lora.grouped_weight_gradient(rows, gradient, ends)
    of_adapters = adapter_gradients(rows, hidden, gradient, between, ends)
    return of_rows, of_weights, *of_adapters, None


def swapped_adapters(
    down: torch.Tensor | None, up: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the adapters of the product that computes the gradient of the rows, if any."""
    if down is None or up is None:
        return None, None
    return up.transpose(1, 2), down.transpose(1, 2)


def adapter_gradients(
    rows: torch.Tensor | None,
    hidden: torch.Tensor | None,
    gradient: torch.Tensor,
    between: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of `down` (E x K x r) and `up` (E x r x N), or None for a frozen matrix.

    `down` multiplied `rows` (S x K), and `up` multiplied `hidden` (S x r). `between` (S x r) and
    `gradient` (S x N) are the gradients of these two products. `rows` or `hidden` is None if its
    matrix is frozen.
    """
    weight_gradient = torch.ops.lora.grouped_weight_gradient
    has_adapters = between.shape[1] > 0
    of_down = None if rows is None or not has_adapters else weight_gradient(rows, between, ends)
    of_up = None if hidden is None else weight_gradient(hidden, gradient, ends)
    return of_down, of_up


_product.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.lora.adapted_product)  # type: ignore[untyped-decorator]
def _product_flops(rows: Any, weights: Any, down: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product (two for each multiply-add) from the arguments' shapes."""
    return adapted_flops(rows, weights, down)


def adapted_flops(rows: Any, weights: Any, down: Any) -> int:
    """Return the FLOPs of a product of experts and, if `down` is not None, of its adapters.

    The arguments are shapes: S x K, E x K x N and E x K x r.
    """
    rank = 0 if down is None else down[2]
    return int(2 * rows[0] * (weights[1] * weights[2] + rank * (weights[1] + weights[2])))


@register_flop_formula(torch.ops.lora.grouped_weight_gradient)  # type: ignore[untyped-decorator]
def _weight_gradient_flops(rows: Any, gradient: Any, ends: Any, **_: Any) -> int:
    return int(2 * rows[0] * rows[1] * gradient[1])
