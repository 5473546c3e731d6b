"""What transformers has no single switch for: attention by cuDNN, checkpoints in the host's memory.

Attention by the lengths of packed examples, and of a vision tower's windows, is in `varlen`; products in fp8 are in
`float8`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from . import varlen
from .host_checkpoints import HostCheckpoints

CUDNN_ATTENTION = "sdpa_cudnn"
# The largest of these that divides a length chooses cuDNN's kernels for masked rows (tried on an H100).
ALIGNMENTS = (1, 2, 4, 8, 64, 128)


def register_attentions() -> None:
    """Make `attn_implementation="sdpa_cudnn"`, `"varlen"` and `"flash_windows"` known to transformers.

    cuDNN's needs a name of its own: Dynamo keeps compiled code by the model's config, and does not see a switch of
    torch's. For the others no mask is registered, so that transformers makes none.
    """
    AttentionInterface.register(CUDNN_ATTENTION, _attend)
    AttentionMaskInterface.register(CUDNN_ATTENTION, sdpa_mask)
    AttentionInterface.register(varlen.VARLEN, varlen.attend)
    AttentionInterface.register(varlen.WINDOWS, varlen.attend_windows)


def attend_windows_at_once(model: nn.Module) -> None:
    """Have a vision tower that attends within windows (Qwen2.5-VL's) compute all of a micro batch in one kernel."""
    for tower in model.modules():
        if hasattr(tower, "fullatt_block_indexes"):
            tower.config._attn_implementation = varlen.WINDOWS


def choose_attention(*, any_length: bool, flash: bool = True) -> None:
    """Leave cuDNN out of torch's own choice (sdpa) where rows may have any length.

    For each length that is new it makes a plan: on an H200 for a tenth of a second in a micro batch of half a second.
    Without `flash`, leave out what a card before compute capability 8.0 has not, on a newer one that stands in for it.
    """
    torch.backends.cuda.enable_cudnn_sdp(flash and not any_length)
    torch.backends.cuda.enable_flash_sdp(flash)


def load_attention(model: Any, device: torch.device) -> None:
    """Attend once to masked rows of each alignment: cuDNN builds the kernels for one when it first needs them.

    On an H100 that takes up to 4 s, which would fall into one of the steps. A model without heads has no attention.
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
        nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask).sum().backward()


def offload_checkpoints(layers: list[Any]) -> None:
    """Keep the inputs that these layers are recomputed from in the host's memory. Checkpointing must be on already."""
    kept = HostCheckpoints()
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_offloaded, kept, layer._gradient_checkpointing_func)


def _offloaded(kept: HostCheckpoints, checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with kept.saving():
        return checkpoint(*args, **kwargs)


def _attend(*args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa_attention_forward(*args, **kwargs)
