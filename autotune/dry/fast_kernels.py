"""Stand-ins for the kernels of flash-linear-attention (`fla`), which run only on a GPU.

A stand-in computes nothing. On the meta device, it makes, keeps and frees the same tensors as
version 0.6.0 of the package, in the same order, and reports the work of the package's kernels.

The kernels compute the delta rules in chunks of 64 tokens. For each chunk and each value head, they
store a state: a matrix with a row for each element of a key and a column for each element of a
value.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autotune.dry.storage_counter import StorageCounter, num_bytes

CHUNK = 64  # tokens
# Each chunk has a CHUNK x CHUNK matrix with an element for each pair of tokens. The blocks of
# DIAGONAL x DIAGONAL elements on its diagonal are stored in 32 bits.
DIAGONAL = 16
# A backward kernel divides the elements of a key into blocks, and computes one partial gradient for
# each block. In the gated delta rule, the blocks for the gradient of the gates have at most WIDEST
# elements (on Ampere and Hopper). In Kimi's delta attention, the blocks for the gradient of beta
# have at most WIDEST_KIMI elements.
WIDEST = 128
WIDEST_KIMI = 32


def install(packages: Iterable[str]) -> None:
    """Make `import` find the stand-ins of these packages. Call this before importing transformers.

    If a module of these packages has no stand-in, its import fails. transformers then computes the
    layers that need this module with operations of torch.
    """
    for package in packages:
        for name, functions in _MODULES[package].items():
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            for function in functions:
                setattr(module, function.__name__, function)
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)


# --- the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stand in for `fla.ops.gated_delta_rule.chunk_gated_delta_rule`."""
    _require_new_rows(initial_state, cu_seqlens)
    made: tuple[torch.Tensor, torch.Tensor | None] = _GatedDeltaRule.apply(
        q, k, v, g, beta, use_qk_l2norm_in_kernel, output_final_state
    )
    return made


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        normalized: bool,
        returns_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The package holds the contiguous copies of its arguments until it returns.
        held = [tensor.contiguous() for tensor in (q, k, v, g, beta)]
        q, k, v, g, beta = held
        q_scales = k_scales = None
        if normalized:
            q, q_scales = _normalize(q)
            k, k_scales = _normalize(k)

        gates = _sum_gates(g)
        factors = _new(k, *v.shape[:3], CHUNK)
        _count(_products(v, CHUNK, k.shape[-1]), k, gates, beta, factors)
        w, u = _represent(k, v, gates, beta, factors)
        states, values = _run_states(k, w, u, gates)
        out = torch.empty_like(values)
        flops = _products(v, k.shape[-1], v.shape[-1]) + _products(v, CHUNK, _width(k, v))
        _count(flops, q, k, values, states, gates, out)

        ctx.save_for_backward(q, q_scales, k, k_scales, v, gates, beta, factors)
        ctx.autocast = _read_autocast()
        ctx.gate_dtype = g.dtype
        return out.to(q.dtype), _last_state(states) if returns_state else None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()
        q, q_scales, k, k_scales, v, gates, beta, factors = ctx.saved_tensors
        with _autocast(ctx.autocast):
            dq, dk, dv, dg, dbeta = _gated_gradients(q, k, v, gates, beta, factors, gradient)
            if q_scales is not None:
                dq = _normalize_backward(q, q_scales, dq)
                dk = _normalize_backward(k, k_scales, dk)
        return (
            dq.to(q.dtype),
            dk.to(k.dtype),
            dv,
            dg.to(ctx.gate_dtype),
            dbeta,
            None,
            None,
        )


def _gated_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    beta: torch.Tensor,
    factors: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k, v, the gates and beta. The forward pass is partly recomputed."""
    size, width = k.shape[-1], _width(k, v)
    w, u = _represent(k, v, gates, beta, factors)
    states, values = _run_states(k, w, u, gates)
    du = torch.empty_like(gradient)
    _count(_products(v, CHUNK, width), q, k, gates, gradient, du)
    dstates, du = _run_states_backward(q, k, w, gates, gradient, du)

    dq, dk = (_new(tensor, *v.shape[:3], size) for tensor in (q, k))
    dgates = gates.new_empty(-(-size // WIDEST), *gates.shape, dtype=torch.float32)
    dw = torch.empty_like(w)
    flops = 3 * _products(v, size, v.shape[-1]) + _products(v, CHUNK, 2 * size + width)
    _count(flops, q, k, values, w, gates, states, gradient, dstates, du, dq, dk, dw, dgates)
    dq = _add_heads(dq, q)
    dk = _add_heads(dk, k)
    dgates = dgates.sum(0)

    dk_rest = _new(k, *v.shape[:3], size)
    dv = torch.empty_like(v)
    dgates_rest, dbeta = torch.empty_like(gates), torch.empty_like(beta)
    flops = _products(v, CHUNK, 5 * size + 2 * v.shape[-1] + 2 * CHUNK)
    _count(flops, k, v, beta, gates, factors, dw, du, dk_rest, dv, dbeta, dgates_rest)
    dk_rest = _add_heads(dk_rest, k)
    del du
    dk.add_(dk_rest)
    dgates.add_(dgates_rest)
    return dq, dk, dv, _sum_gates(dgates), dbeta


# --- Kimi's delta attention, which has a separate gate for each element of a key


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stand in for `fla.ops.kda.chunk_kda`."""
    _require_new_rows(initial_state, cu_seqlens)
    made: tuple[torch.Tensor, torch.Tensor | None] = _KimiDelta.apply(
        q, k, v, g, beta, use_qk_l2norm_in_kernel, output_final_state
    )
    return made


class _KimiDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        normalized: bool,
        returns_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The package holds the contiguous copies of its arguments until it returns.
        held = [tensor.contiguous() for tensor in (q, k, v, g, beta)]
        q, k, v, g, beta = held
        q_scales = k_scales = None
        if normalized:
            q, q_scales = _normalize(q)
            k, k_scales = _normalize(k)

        gates = _sum_gates(g)
        scores, factors = _solve_kimi(q, k, v, gates, beta)
        w, u = _represent(k, v, gates, beta, factors)
        gated_keys = torch.empty_like(w)
        states, values = _run_states(gated_keys, w, u, gates)
        out = torch.empty_like(v)
        flops = _products(v, k.shape[-1] + CHUNK, v.shape[-1])
        _count(flops, q, values, states, gates, scores, out)

        ctx.save_for_backward(q, q_scales, k, k_scales, v, gates, g, beta, scores, factors)
        ctx.autocast = _read_autocast()
        return out.to(q.dtype), _last_state(states) if returns_state else None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()
        q, q_scales, k, k_scales, v, gates, g, beta, scores, factors = ctx.saved_tensors
        with _autocast(ctx.autocast):
            dq, dk, dv, dg, dbeta = _kimi_gradients(q, k, v, gates, beta, scores, factors, gradient)
            if q_scales is not None:
                dq = _normalize_backward(q, q_scales, dq)
                dk = _normalize_backward(k, k_scales, dk)
        return (
            dq.to(q.dtype),
            dk.to(k.dtype),
            dv,
            dg.to(g.dtype),
            dbeta.to(beta.dtype),
            None,
            None,
        )


def _solve_kimi(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores, factors = (_new(k, *v.shape[:3], CHUNK) for _ in range(2))
    diagonal = _new(k, *v.shape[:3], DIAGONAL, dtype=torch.float32)
    _count(2 * _products(v, DIAGONAL, k.shape[-1]), q, k, gates, beta, scores, diagonal)
    flops = 2 * _products(v, CHUNK - DIAGONAL, k.shape[-1])
    _count(flops, q, k, gates, beta, scores, diagonal, factors)
    return scores, factors


def _kimi_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    beta: torch.Tensor,
    scores: torch.Tensor,
    factors: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k, v, the gates and beta. The forward pass is partly recomputed."""
    size = k.shape[-1]
    w, u = _represent(k, v, gates, beta, factors)
    gated_queries, gated_keys = torch.empty_like(w), torch.empty_like(w)
    states, values = _run_states(gated_keys, w, u, gates)
    dscores = torch.empty_like(scores, dtype=torch.float32)
    du = torch.empty_like(gradient)
    _count(2 * _products(v, CHUNK, v.shape[-1]), values, scores, gradient, dscores, du)
    dstates, du = _run_states_backward(gated_queries, gated_keys, w, gates, gradient, du)

    dq, dk, dg = (torch.empty_like(gates) for _ in range(3))
    dv = torch.empty_like(v)
    dbeta = torch.empty_like(beta, dtype=torch.float32)
    dfactors = torch.empty_like(factors, dtype=torch.float32)
    flops = 3 * _products(v, size, v.shape[-1])
    flops += 2 * _products(v, CHUNK, _width(k, v) + CHUNK)
    read = (q, k, v, values, gates, beta, factors, states, gradient, dstates, du)
    _count(flops, *read, dq, dk, dv, dg, dbeta, dfactors)
    del du, read

    dq_sum, dk_sum = torch.empty_like(dq), torch.empty_like(dk)
    parts = _new(beta, -(-size // WIDEST_KIMI), *beta.shape, dtype=torch.float32)
    dg_sum = torch.empty_like(dg)
    flops = 4 * _products(v, CHUNK, size)
    _count(flops, q, k, gates, beta, dscores, dfactors, dq, dk, dg, dq_sum, dk_sum, parts, dg_sum)
    dbeta = parts.sum(0).add_(dbeta)
    del dq, dk, dg, parts
    dq_sum = _add_heads(dq_sum, q)
    dk_sum = _add_heads(dk_sum, k)
    return dq_sum, dk_sum, dv, _sum_gates(dg_sum), dbeta


# --- kernels of both delta rules


def _normalize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with normalized heads, and the 32-bit scale of each head."""
    made, scales = torch.empty_like(tensor), _new(tensor, *tensor.shape[:-1], dtype=torch.float32)
    _count(0, tensor, made, scales)
    return made, scales


def _normalize_backward(
    made: torch.Tensor, scales: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    inner = torch.empty_like(made)
    _count(0, made, scales, gradient, inner)
    return inner


def _sum_gates(gates: torch.Tensor) -> torch.Tensor:
    """The sums of gates within chunks, in 32 bits."""
    sums = torch.empty_like(gates, dtype=torch.float32)
    _count(0, gates, sums)
    return sums


def _represent(
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    beta: torch.Tensor,
    factors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of the WY representation."""
    w, u = _new(k, *v.shape[:3], k.shape[-1]), torch.empty_like(v)
    _count(_products(v, CHUNK, _width(k, v)), k, v, gates, beta, factors, w, u)
    return w, u


def _run_states(
    k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before each chunk, and the values that each token adds to the state."""
    states = _new(k, *_shape_of_states(w, u))
    values = torch.empty_like(u)
    _count(2 * _products(u, w.shape[-1], u.shape[-1]), k, w, u, gates, states, values)
    return states, values


def _run_states_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    gates: torch.Tensor,
    gradient: torch.Tensor,
    du: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dstates = _new(q, *_shape_of_states(w, du))
    du_sum = torch.empty_like(du)
    flops = 3 * _products(du, w.shape[-1], du.shape[-1])
    _count(flops, q, k, w, gates, gradient, du, dstates, du_sum)
    return dstates, du_sum


def _shape_of_states(w: torch.Tensor, u: torch.Tensor) -> tuple[int, ...]:
    rows, length, heads, size = w.shape
    return rows, -(-length // CHUNK), heads, size, u.shape[-1]


def _last_state(states: torch.Tensor) -> torch.Tensor:
    return _new(states, *states.shape[:1], *states.shape[2:], dtype=torch.float32)


def _add_heads(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Sum the gradients of the value heads that share a head of `tensor`."""
    rows, length, heads, size = tensor.shape
    if gradient.shape[2] == heads:
        return gradient
    return gradient.view(rows, length, heads, -1, size).sum(3)


def _new(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype or like.dtype)


def _width(k: torch.Tensor, v: torch.Tensor) -> int:
    width: int = k.shape[-1] + v.shape[-1]
    return width


def _products(values: torch.Tensor, *sizes: int) -> int:
    """The FLOPs of a matrix product with these sizes for every token and every value head."""
    flops: int = 2 * math.prod(values.shape[:3]) * math.prod(sizes)
    return flops


def _count(flops: int, *tensors: torch.Tensor) -> None:
    """Report the work of a kernel that reads or writes each of these tensors once."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, StorageCounter):
            mode.add_kernel("delta_rule", flops, num_bytes(tensors))


def _read_autocast() -> torch.dtype | None:
    """The dtype of CUDA's autocast, or None if autocast is off."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


@contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Run the backward pass under the autocast of the forward pass, as the package does."""
    if dtype is None:
        yield
    else:
        with torch.autocast("meta", dtype=dtype):
            yield


def _require_new_rows(*unknown: torch.Tensor | None) -> None:
    if any(tensor is not None for tensor in unknown):
        raise ValueError(
            "the memory of linear attention with packed or continued sequences is unknown"
        )


def fused_recurrent_gated_delta_rule(**_: Any) -> None:
    """Stand in for the kernel that decodes single tokens, which training never calls."""
    raise ValueError("a dry probe does not generate text")


def fused_recurrent_kda(**_: Any) -> None:
    """Stand in for the kernel that decodes single tokens, which training never calls."""
    raise ValueError("a dry probe does not generate text")


# For each package: its modules, parents first, with their stand-ins.
_MODULES: dict[str, dict[str, tuple[Callable[..., Any], ...]]] = {
    "fla": {
        "fla": (),
        "fla.ops": (),
        "fla.ops.gated_delta_rule": (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
        "fla.ops.kda": (chunk_kda, fused_recurrent_kda),
    }
}
