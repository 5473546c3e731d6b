"""Computes LoRA on a mixture of experts by grouped matrix products (grouped GEMM).

In each forward pass, PEFT's wrappers add `s B A` to the weights of all experts, and the experts use
the sums. This module replaces the wrappers' computation. Each row is multiplied only by the
matrices W, A and B of its own expert (' means transposed):

    y = x W' + (x A') sB'

The rows are sorted by expert, so one grouped product multiplies the rows of all experts. The
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
# In 16 bits, the fused kernel needs rows that begin at multiples of 16 bytes. So LoRA ranks are
# padded to a multiple of this number.
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
    tokens, per_token = top_k_index.shape
    sorted_ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    place = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    numbers = torch.arange(experts.num_experts, device=order.device)
    ends = torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)

    def project(name: str, rows: torch.Tensor) -> torch.Tensor:
        outputs = _project(experts, name, adapters.get(name), rows, ends)
        if experts.has_bias:
            outputs = outputs + getattr(experts, f"{name}_bias")[sorted_ids]
        return outputs

    rows = _Sort.apply(hidden_states, order, place, per_token)
    if experts.has_gate:
        rows = experts._apply_gate(project("gate_up_proj", rows))
    else:
        rows = experts.act_fn(project("up_proj", rows))
    rows = project("down_proj", rows)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)

    # Each token's rows are adjacent again. So the sum needs no atomic additions, whose order would
    # change the result from run to run.
    outputs = _Unsort.apply(rows, order, place).view(tokens, per_token, rows.shape[-1])
    return (outputs * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _project(
    experts: Any, name: str, adapter: Any, rows: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return rows (S x in) times a projection of their experts, including its adapter."""
    if hasattr(experts, "multiply_packed"):  # its weights are in 4 bits (see packed_experts)
        outputs = experts.multiply_packed(rows, name, ends)
    else:
        weight = getattr(experts, name)
        weight = weight if experts.is_transposed else weight.transpose(1, 2)
        # Like transformers' own code, compute in the dtype of the weights.
        outputs = torch.ops.lora.grouped_product(rows.to(weight.dtype), weight, ends)
    if adapter is None:
        return outputs

    rows = rows.to(outputs.dtype)
    down, up = _matrices(adapter, outputs.dtype)
    hidden = torch.ops.lora.grouped_product(rows, down, ends)
    return outputs + torch.ops.lora.grouped_product(hidden, up, ends)


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


# torch's own gradient of an indexing operation adds rows with atomic operations. A permutation
# moves each row to one place, so the gradient here is the inverse permutation.


class _Sort(torch.autograd.Function):
    """Copies the states of T tokens (T x H) to the sorted token-expert pairs (T * k x H)."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, order: torch.Tensor, place: torch.Tensor, per_token: int
    ) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.per_token = per_token
        return states[order // per_token]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        pairs = gradients[0][place].view(-1, ctx.per_token, gradients[0].shape[-1])
        return pairs.sum(1), None, None, None


class _Unsort(torch.autograd.Function):
    """Returns the sorted rows in the original order of the token-expert pairs."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows[place]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradients[0][order], None, None


# Compiled code on disk refers to these operations by name. If a shape or a FLOP formula below
# changes, the name must change too.


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "lora::grouped_product", mutates_args=()
)
def _product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows (S x K) times the matrices (E x K x N) of their experts, as S x N.

    The rows of expert e end before row `ends[e]`, and the next expert's rows begin there.
    """
    way = _way(rows)
    if way == FUSED:
        return functional.grouped_mm(rows, weights, offs=ends)
    if way == TRITON:
        from .grouped_kernels import multiply

        return multiply(rows, weights, ends)
    outputs = rows.new_empty(rows.shape[0], weights.shape[2])
    for expert, own in enumerate(_spans(ends)):
        torch.mm(rows[own], weights[expert], out=outputs[own])
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

    torch's fused kernel is for bf16 and GPUs of compute capability 9.0 and 10.x. On other devices,
    torch's function would also multiply expert by expert, and would not accept all shapes.
    """
    if rows.device.type != "cuda" or rows.dtype.itemsize != 2:
        return EACH
    if forced := os.environ.get(PRODUCT_VARIABLE):
        if forced not in (FUSED, TRITON, EACH):
            raise ValueError(
                f"{PRODUCT_VARIABLE} must be {FUSED}, {TRITON} or {EACH}, not {forced!r}"
            )
        return forced
    capability = _capability(rows.device)
    if capability in (9, 10) and rows.dtype is torch.bfloat16 and hasattr(functional, "grouped_mm"):
        return FUSED
    return TRITON if capability >= 8 and find_spec("triton") else EACH


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
def _product_shape(rows: torch.Tensor, weights: torch.Tensor, ends: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@_weight_gradient.register_fake  # type: ignore[untyped-decorator]
def _weight_gradient_shape(
    rows: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    """Save the rows only if the weights are trained. The weights of the base are frozen."""
    rows, weights, ends = inputs
    of_rows, of_weights = ctx.needs_input_grad[:2]
    ctx.save_for_backward(rows if of_weights else None, weights if of_rows else None, ends)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weights, ends = ctx.saved_tensors
    gradient = gradient.contiguous()  # the fused kernel cannot read an expanded gradient
    of_rows = of_weights = None
    if weights is not None:
        of_rows = torch.ops.lora.grouped_product(gradient, weights.transpose(1, 2), ends)
    if rows is not None:
        of_weights = torch.ops.lora.grouped_weight_gradient(rows, gradient, ends)
    return of_rows, of_weights, None


_product.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.lora.grouped_product)  # type: ignore[untyped-decorator]
def _product_flops(rows: Any, weights: Any, ends: Any, **_: Any) -> int:
    """Return the FLOPs of a product (two for each multiply-add) from the arguments' shapes."""
    return int(2 * rows[0] * weights[1] * weights[2])


@register_flop_formula(torch.ops.lora.grouped_weight_gradient)  # type: ignore[untyped-decorator]
def _weight_gradient_flops(rows: Any, gradient: Any, ends: Any, **_: Any) -> int:
    return int(2 * rows[0] * rows[1] * gradient[1])
