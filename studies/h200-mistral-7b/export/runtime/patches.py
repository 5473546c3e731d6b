# -*- coding: utf-8 -*-
"""Adds features that transformers lacks: cuDNN's attention, and checkpoints in host memory.

Other modules add attention within segments (`varlen`) and matrix products in fp8 (`float8`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate, sdpa_mask

from . import varlen
from .host_checkpoints import HostCheckpoints
from .settings import BLIND_TO_POSITIONS

CUDNN_ATTENTION = "sdpa_cudnn"
FLEX_ATTENTION = "flex_attention"
# With a mask, cuDNN selects its attention kernel by the alignment of the rows' length: the largest
# of these numbers that divides the length (tested on an H100).
ALIGNMENTS = (1, 2, 4, 8, 64, 128)


def register_attentions() -> None:
    """Register three attention implementations: "sdpa_cudnn", "varlen" and "flash_windows".

    transformers' "flex_attention" is replaced by a version that works under autocast.

    cuDNN's attention needs its own name in the model's config. Dynamo selects compiled code by this
    config, and does not see torch's global switches. "varlen" and "flash_windows" have no
    registered mask function, so transformers makes no mask for them.
    """
    AttentionInterface.register(CUDNN_ATTENTION, _attend)
    AttentionMaskInterface.register(CUDNN_ATTENTION, sdpa_mask)
    AttentionInterface.register(FLEX_ATTENTION, _attend_flexibly)
    AttentionInterface.register(varlen.VARLEN, varlen.attend)
    AttentionInterface.register(varlen.WINDOWS, varlen.attend_windows)


def separate_examples(model: Any) -> None:
    """Give the model masks that separate packed examples, if its own masks do not."""
    if model.config.model_type in BLIND_TO_POSITIONS:
        model.base_model.register_forward_pre_hook(_add_masks, with_kwargs=True)


def _add_masks(decoder: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions = given.get("position_ids")
    if positions is None or given.get("attention_mask") is not None:
        return args, given
    dtype = decoder.get_input_embeddings().weight.dtype
    # The masks depend only on the dtype, the device and the first two dimensions of the inputs.
    inputs = torch.empty(*positions.shape, 0, dtype=dtype, device=positions.device)
    masks = create_masks_for_generate(
        config=decoder.config,
        inputs_embeds=inputs,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    return args, given | {"attention_mask": masks}


def attend_windows_at_once(model: nn.Module) -> None:
    """Make vision towers like Qwen2.5-VL's compute all windows of a micro batch in one kernel."""
    for tower in model.modules():
        if hasattr(tower, "fullatt_block_indexes"):
            tower.config._attn_implementation = varlen.WINDOWS


def choose_attention(*, cudnn: bool, flash: bool = True) -> None:
    """Allow or exclude kernels in torch's own choice of attention (sdpa).

    cuDNN makes an execution plan for each new row length, so it should be excluded if rows may have
    any length. On an H200, making a plan took 0.1 s of a micro batch of 0.5 s. If `flash` is false,
    cuDNN and flash attention are both excluded, so that the card behaves like an older card with a
    compute capability below 8.0.
    """
    torch.backends.cuda.enable_cudnn_sdp(flash and cudnn)
    torch.backends.cuda.enable_flash_sdp(flash)


def load_attention(model: Any, device: torch.device) -> None:
    """Make cuDNN build its kernels for attention with a mask, before the first step.

    This function computes attention for one row length of each alignment (the largest of the
    ALIGNMENTS that divides the length). cuDNN builds a kernel when the kernel is first used. On an
    H100, the build takes up to 4 s, and would otherwise slow one of the steps. A model without
    attention heads is skipped.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not heads:
        return

    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    for length in (ALIGNMENTS[-1] + alignment for alignment in ALIGNMENTS):
        rows = torch.zeros(2, 2, length, size, dtype=dtype, device=device, requires_grad=True)
        mask = torch.ones(2, 1, length, length, dtype=torch.bool, device=device).tril()
        attended = nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask)
        attended.sum().backward()


def offload_checkpoints(layers: list[Any]) -> None:
    """Keep the inputs of recomputed layers in host memory. Checkpointing must be on already."""
    checkpoints = HostCheckpoints()
    for layer in layers:
        layer._gradient_checkpointing_func = partial(
            _checkpoint_on_host, checkpoints, layer._gradient_checkpointing_func
        )


def _checkpoint_on_host(
    checkpoints: HostCheckpoints, checkpoint: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with checkpoints.saving():
        return checkpoint(*args, **kwargs)


def _attend_flexibly(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute FlexAttention, which needs queries, keys and values of one dtype.

    Under autocast, rotary embeddings may convert queries and keys to 32 bits, but not values.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return flex_attention_forward(module, query, key, value, *args, **kwargs)


def _attend(*args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa_attention_forward(*args, **kwargs)
