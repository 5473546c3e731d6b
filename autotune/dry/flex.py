"""Replaces FlexAttention on the meta device, because torch compiles its kernels only for a GPU.

The replacement computes nothing. It allocates and keeps the same tensors as the kernels of torch
2.13, which never store the attention scores. The kernels compute the scores in blocks, and skip the
blocks that a mask hides. So their work is counted from one number: the mean number of keys in the
visible blocks of a query. Each row counts as one example.

Shapes in docstrings: B rows, H query heads, T queries, V elements in a value vector.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput, BlockMask
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula
from transformers import AttentionMaskInterface
from transformers.integrations import flex_attention
from transformers.masking_utils import causal_mask_function, flex_attention_mask

FLEX_ATTENTION = "flex_attention"
BLOCK = 128  # a block has the scores of this number of queries and keys
SAMPLED = 64  # visible blocks are counted in a sample of at most this number of rows of blocks


@contextmanager
def replace_flex_attention() -> Iterator[None]:
    """Within this context, FlexAttention in transformers makes tensors and computes nothing."""
    kernel = flex_attention.compile_friendly_flex_attention
    flex_attention.compile_friendly_flex_attention = _attend
    AttentionMaskInterface.register(FLEX_ATTENTION, _make_mask)
    try:
        yield
    finally:
        flex_attention.compile_friendly_flex_attention = kernel
        AttentionMaskInterface.register(FLEX_ATTENTION, flex_attention_mask)


class CountedMask(BlockMask):
    """The memory of a block mask, and the mean number of keys per query in its visible blocks."""

    def __init__(self, rows: int, queries: int, keys: int, seen: int, device: Any) -> None:
        blocks = (rows, 1, -(-queries // BLOCK), -(-keys // BLOCK))
        # The indices of partly and of wholly visible blocks, by query and by key
        self.indices = [torch.empty(blocks, dtype=torch.int32, device=device) for _ in range(4)]
        self.seen = seen


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., torch.Tensor] = causal_mask_function,
    device: Any = "meta",
    **_: Any,
) -> CountedMask:
    """Stand in for transformers' `flex_attention_mask`, but do not mask padding."""
    seen = mean_keys(mask_function, q_length, kv_length)
    return CountedMask(batch_size, q_length, kv_length, seen, device)


def mean_keys(mask_function: Callable[..., torch.Tensor], queries: int, keys: int) -> int:
    """Return the mean number of keys in the visible blocks of a query.

    A block counts as visible if its first or its last query attends to a key of the block. This is
    correct for causal masks, sliding windows and chunks.
    """
    rows = -(-queries // BLOCK)
    step = -(-rows // SAMPLED)
    # Switch the counting modes off, because this work is not part of a training step.
    with _disable_current_modes():
        zero = torch.zeros((), dtype=torch.long, device="cpu")
        places = torch.arange(-(-keys // BLOCK) * BLOCK, device="cpu")
        visible = []
        for row in range(step // 2, rows, step):
            ends = torch.tensor([row * BLOCK, (row + 1) * BLOCK - 1], device="cpu")
            seen = mask_function(zero, zero, ends[:, None], places).any(0)
            visible.append(BLOCK * int(seen.view(-1, BLOCK).any(1).sum()))
    return min(round(sum(visible) / len(visible)), keys)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, **_: Any
) -> tuple[torch.Tensor, AuxOutput]:
    """Stand in for transformers' `compile_friendly_flex_attention`."""
    seen = key.shape[2] if block_mask is None else block_mask.seen
    output, sums = torch.ops.dry.flex_attention(query, key, value, seen)
    return output, AuxOutput(lse=sums)


# --- The kernels as operators of torch, so that compiled graphs contain them

torch.library.define(
    "dry::flex_attention", "(Tensor query, Tensor key, Tensor value, int seen) -> (Tensor, Tensor)"
)
torch.library.define(
    "dry::flex_attention_backward",
    "(Tensor gradient, Tensor of_sums, Tensor query, Tensor key, Tensor value, Tensor output,"
    " Tensor sums, int seen) -> (Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("dry::flex_attention")  # type: ignore[untyped-decorator]
def _shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B x H x T x V), in the memory format of the query, and the sums (B x H x T)."""
    rows, heads, length, _ = query.shape
    output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(rows, heads, length, dtype=torch.float32)


@torch.library.register_fake("dry::flex_attention_backward")  # type: ignore[untyped-decorator]
def _shapes_of_gradients(
    gradient: torch.Tensor,
    of_sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.seen = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(
    ctx: Any, gradient: torch.Tensor, of_sums: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    gradients = torch.ops.dry.flex_attention_backward(
        gradient, of_sums, *ctx.saved_tensors, ctx.seen
    )
    return *gradients, None


torch.library.register_autograd("dry::flex_attention", _differentiate, setup_context=_save)


def _flops(products: Callable[[int, int], int], query: Any, value: Any, seen: int) -> int:
    rows, heads, length, size = query
    return int(2 * rows * heads * length * seen * products(size, value[-1]))


@register_flop_formula(torch.ops.dry.flex_attention)  # type: ignore[untyped-decorator]
def _forward_flops(query: Any, key: Any, value: Any, seen: int, **_: Any) -> int:
    return _flops(lambda size, values: size + values, query, value, seen)


@register_flop_formula(torch.ops.dry.flex_attention_backward)  # type: ignore[untyped-decorator]
def _backward_flops(
    gradient: Any, of_sums: Any, query: Any, key: Any, value: Any, *rest: Any, **_: Any
) -> int:
    """Count two kernels, for the gradients of queries and keys; each recomputes the scores."""
    return _flops(lambda size, values: 4 * size + 3 * values, query, value, rest[-1])
