"""What transformers has no one switch for: products in 8-bit floats, attention by cuDNN, checkpoints in host memory.

This file goes with the exported script.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

CUDNN_ATTENTION = "sdpa_cudnn"
FP8_RECIPE = "tensorwise"  # one scale for each factor, from its largest value: on an H200 5 % over one for each row
FP8_MULTIPLE = 16  # that both sides of a matrix must be of


def multiply_in_fp8(model: Any) -> None:
    """Linear layers but the head multiply 8-bit floats from here on, forward and backward; their weights stay.

    To be called before adapters are put on them, which stay as they are too. Emulated where there is no GPU.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    head = model.get_output_embeddings()

    def suits(layer: nn.Module, name: str) -> bool:
        return layer is not head and not any(side % FP8_MULTIPLE for side in layer.weight.shape)

    config = replace(Float8LinearConfig.from_recipe_name(FP8_RECIPE), emulate=not torch.cuda.is_available())
    convert_to_float8_training(model, config=config, module_filter_fn=suits)


def register_cudnn_attention() -> None:
    """Has transformers know `attn_implementation="sdpa_cudnn"`.

    A name of its own, since what Dynamo compiled for a model is kept by its config, and not by a switch of torch's.
    """
    AttentionInterface.register(CUDNN_ATTENTION, _attend)
    AttentionMaskInterface.register(CUDNN_ATTENTION, sdpa_mask)


def offload_checkpoints(layer: Any) -> None:
    """What this layer is recomputed from waits in the host's memory. Its checkpointing has just been switched on."""
    layer._gradient_checkpointing_func = partial(_offloaded, layer._gradient_checkpointing_func)


def _offloaded(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(*args, **kwargs)


def _attend(*args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa_attention_forward(*args, **kwargs)
