# -*- coding: utf-8 -*-
"""Attention within the segments of a row.

This attention needs no mask, and computes no scores between segments.

A segment is one of the packed examples in a row. In Qwen2.5-VL's vision tower, a segment is a
window of an image, and a row holds the windows of all images of a micro batch.

The kernel comes from `torch.nn.attention.varlen`. Code compiled with torch's own operator is valid
only for one length of the longest example, and for one number of examples (the shape of `ends`). In
this module, both numbers are values in a tensor on the host. So a micro batch with other examples
needs no new compilation, and the host never waits for the device.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

VARLEN = "varlen"
# transformers passes the ends of a vision tower's windows only to attentions with "flash" in their
# names.
WINDOWS = "flash_windows"
Tensors = tuple[torch.Tensor, ...]


class Segments:
    """The ends of the examples in a micro batch whose rows are concatenated.

    A row's padding counts as a separate example. `ends` (int32) begins with 0 and the end of each
    example. All further entries repeat the last end, until `ends` has one entry more than the rows
    have tokens. So the shape of `ends` does not depend on the number of examples. `counts` (2
    values, on the host) has the number of examples and the number of tokens in the longest example.
    """

    def __init__(self, ends: torch.Tensor, counts: torch.Tensor) -> None:
        self.ends = ends
        self.counts = counts

    def to(self, *args: Any, **kwargs: Any) -> "Segments":
        """Return the segments with `ends` on a device. accelerate calls this method."""
        return Segments(self.ends.to(*args, **kwargs), self.counts)

    def pin_memory(self) -> "Segments":
        """Return the segments with `ends` in pinned memory. torch's loader calls this method."""
        return Segments(self.ends.pin_memory(), self.counts)


def add_segments(batch: dict[str, Any]) -> dict[str, Any]:
    """Add the segments of packed rows to a batch; the model passes them to its attention."""
    positions = batch["position_ids"].flatten()
    starts = (positions == 0).nonzero().flatten()
    ends = torch.full((len(positions) + 1,), len(positions), dtype=torch.int32)
    ends[: len(starts)] = starts
    longest = int(ends[: len(starts) + 1].diff().max())
    return batch | {"segments": Segments(ends, torch.tensor([len(starts), longest]))}


def join_rows(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Stack the tensors of packed rows into a micro batch."""
    return add_segments({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with transformers' interface; return rows x length x heads x size.

    Queries, keys and values are rows x heads x length x size; keys and values may have fewer heads.
    Raises ValueError for rows without segments, and for options that change the causal softmax, for
    example a soft cap.
    """
    if segments is None or attention_mask is not None:
        raise ValueError(
            "varlen attention is for packed sequences: give the model a batch from add_segments"
        )

    more = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if dropout or more:
        raise ValueError(
            f"varlen attention does not support {more[0] if more else 'dropout'}:"
            " choose another attention"
        )

    window = -1 if sliding_window is None else sliding_window - 1
    return _attend_segments(query, key, value, segments, scaling, window, causal=True), None


def attend_windows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each window; return 1 x length x heads x size.

    Queries, keys and values are 1 x heads x length x size. `cu_seq_lens_q` (windows + 1, int32)
    holds 0 and the ends of the windows. One kernel computes all windows. Without this function,
    transformers would compute the windows one after another, and in each layer wait until the
    device has sent the windows' lengths. If FlashAttention does not support the inputs, this
    function also computes the windows one after another.
    """
    if _supports_flash(query):
        counts = torch.tensor([len(cu_seq_lens_q) - 1, max_length_q])
        segments = Segments(cu_seq_lens_q, counts)
        return _attend_segments(query, key, value, segments, scaling, -1, causal=False), None

    lengths = cu_seq_lens_q.diff().tolist()
    windows = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    attended = [
        sdpa_attention_forward(module, *window, None, scaling=scaling, is_causal=False)[0]
        for window in windows
    ]
    return torch.cat(attended, 1), None


def _supports_flash(query: torch.Tensor) -> bool:
    device = query.device
    if device.type != "cuda" or not torch.backends.cuda.flash_sdp_enabled():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    return dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(
        device
    ) >= (8, 0)


def _attend_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    window: int,
    *,
    causal: bool,
) -> torch.Tensor:
    rows, heads, length, size = query.shape
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)

    # Each tensor gets the shape [tokens, heads, size of a head].
    flat = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (query, key, value))
    scale = size**-0.5 if scaling is None else scaling
    attended, _ = _attend(*flat, segments.ends, segments.counts, scale, window, causal)
    return attended.view(rows, length, heads, size)


# --- The kernel and its gradients. The two functions are operators of torch, so compiled code does
# not depend on the segments, which change with each micro batch.


def _attend_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    window: int,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention within each segment, and the log-sum-exp of its scores (heads x tokens).

    Inputs and outputs are tokens x heads x size. A token attends to `window` tokens before it, or
    to all earlier tokens if `window` is -1. Without `causal`, a token also attends to the tokens
    after it.
    """
    number, longest = counts.tolist()
    ends = ends[: number + 1]
    attended, sums, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, ends, ends, longest, longest, 0.0, causal, False),
        scale=scale,
        window_size_left=window,
        window_size_right=0 if causal else -1,
    )
    return attended, sums


def _differentiate_on_gpu(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    sums: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    window: int,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    number, longest = counts.tolist()
    ends = ends[: number + 1]
    # The state of a random number generator, which only dropout would read. There is no dropout.
    state = query.new_empty(2, dtype=torch.uint64)
    unused = query.new_empty(0)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        *(
            gradient,
            query,
            key,
            value,
            attended,
            sums,
            ends,
            ends,
            longest,
            longest,
            0.0,
            causal,
            state,
            unused,
        ),
        scale=scale,
        window_size_left=window,
        window_size_right=0 if causal else -1,
    )
    return of_query, of_key, of_value


def _shapes(query: torch.Tensor, *_: Any) -> Tensors:
    return torch.empty_like(query), query.new_empty(
        query.shape[1], query.shape[0], dtype=torch.float32
    )


def _shapes_of_gradients(gradient: torch.Tensor, *differentiated: Any) -> Tensors:
    query, key, value, *_ = differentiated
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


# --- The same functions on a CPU, because torch has no such kernel for CPUs. Tests on a CPU use
# them to verify the calls for a GPU.


def _attend_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *segments: Any
) -> Tensors:
    attended, sums = _shapes(query)
    for part, scores in _scores(query, key, *segments):
        sums[:, part] = scores.logsumexp(-1)
        attended[part] = torch.einsum(
            "hqk,khd->qhd", scores.softmax(-1), _repeat_heads(value[part], query)
        )
    return attended, sums


def _differentiate_on_cpu(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    sums: torch.Tensor,
    *segments: Any,
) -> Tensors:
    made = _shapes_of_gradients(gradient, query, key, value)
    _, _, scale, _, _ = segments

    for part, scores in _scores(query, key, *segments):
        outer = gradient[part].float()
        weights = (scores - sums[:, part, None]).exp()
        of_weights = torch.einsum("qhd,khd->hqk", outer, _repeat_heads(value[part], query))
        # The gradient of the scores before the softmax.
        of_scores = scale * weights * (of_weights - (outer * attended[part]).sum(-1).T[..., None])
        made[0][part] = torch.einsum("hqk,khd->qhd", of_scores, _repeat_heads(key[part], query))
        of_keys = torch.einsum("hqk,qhd->khd", of_scores, query[part].float())
        of_values = torch.einsum("hqk,qhd->khd", weights, outer)
        for gradients, of_each_head in zip(made[1:], (of_keys, of_values), strict=True):
            gradients[part] = of_each_head.unflatten(1, (key.shape[1], -1)).sum(2)
    return made


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    window: int,
    causal: bool,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the slice of tokens of each segment, and its scores (heads x tokens x tokens)."""
    for begin, end in pairwise(ends[: int(counts[0]) + 1].tolist()):
        part = slice(begin, end)
        places = torch.arange(end - begin)
        before = places[:, None] - places
        hidden = (before < 0) & causal | (before > (window if window >= 0 else end))
        products = torch.einsum(
            "qhd,khd->hqk", query[part].float(), _repeat_heads(key[part], query)
        )
        yield part, (scale * products).masked_fill_(hidden, -torch.inf)


def _repeat_heads(keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values in 32 bits, repeated for each query head."""
    return keys.float().repeat_interleave(query.shape[1] // keys.shape[1], 1)


# --- The operators


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    query, key, value, ends, counts, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, ends, counts)


def _backward(
    ctx: Any, gradient: torch.Tensor, of_sums: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    return (
        *_differentiate(gradient, *ctx.saved_tensors, *ctx.options),
        None,
        None,
        None,
        None,
        None,
    )


_attend = torch.library.custom_op(
    "packed_rows::attend", _attend_on_gpu, mutates_args=(), device_types="cuda"
)
_attend.register_kernel("cpu", _attend_on_cpu)
_attend.register_fake(_shapes)
_attend.register_autograd(_backward, setup_context=_save_context)
_differentiate = torch.library.custom_op(
    "packed_rows::differentiate", _differentiate_on_gpu, mutates_args=(), device_types="cuda"
)
_differentiate.register_kernel("cpu", _differentiate_on_cpu)
_differentiate.register_fake(_shapes_of_gradients)
