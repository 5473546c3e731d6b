# -*- coding: utf-8 -*-
"""Shards a model for DeepSpeed's third stage one parameter at a time.

DeepSpeed itself would shard a model that each GPU holds as a whole.
"""

import torch
from torch import nn

from .sharded_nf4 import fill


def partition(model: nn.Module, device: torch.device) -> None:
    """Replace each parameter by this rank's shard in bf16, DeepSpeed's dtype.

    The first rank's values count. A parameter without memory gets random values, and LoRA's matrix
    B and biases get zeros. All ranks must call this function together, in a process group that
    DeepSpeed knows.
    """
    from deepspeed.runtime.zero import Init

    shards: dict[int, nn.Parameter] = {}  # by the id of the parameter, which layers may share
    first: nn.Parameter | None = None
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, own_name = name.rpartition(".")
        layer = model.get_submodule(path)
        if id(parameter) in shards:
            setattr(layer, own_name, shards[id(parameter)])
            continue

        shard = nn.Parameter(_whole(name, parameter, device), requires_grad=parameter.requires_grad)
        if first is None:
            first = shard
            Init(module=nn.ParameterList([shard]))
        else:
            first.convert_to_zero_parameters(param_list=[shard])
        setattr(layer, own_name, shard)
        shards[id(parameter)] = shard


def _whole(name: str, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Return the values of a whole parameter on the device."""
    if not parameter.is_meta:
        return parameter.detach().to(device, torch.bfloat16)
    whole = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
    if ".lora_B." in name or name.endswith("bias"):
        return whole.zero_()
    fill(whole)
    return whole
