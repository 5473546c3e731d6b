"""What tensors weigh: parameters with their quantisation statistics, optimizer state on the device and off it."""

import math
from typing import Any

import torch
from torch import nn

from autotune.core.units import gib


def tensor_gib(tensor: torch.Tensor) -> float:
    return gib(tensor.numel() * tensor.element_size())


def parameter_gib(model: nn.Module) -> float:
    """Resident weights and buffers, quantisation statistics included."""
    total = sum(map(tensor_gib, model.parameters())) + sum(map(tensor_gib, model.buffers()))
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            for name in ("absmax", "code", "offset"):
                tensor = getattr(part, name, None)
                total += tensor_gib(tensor) if isinstance(tensor, torch.Tensor) else 0.0
        for name in ("SCB",):
            tensor = getattr(parameter, name, None)
            total += tensor_gib(tensor) if isinstance(tensor, torch.Tensor) else 0.0
    return total


def optimizer_gib(trainer: Any) -> tuple[float, float]:
    """Optimizer state: (on the device, in managed memory)."""
    optimizer = getattr(trainer, "optimizer", None)
    on_device = paged = 0.0
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                if getattr(value, "is_paged", False):
                    paged += tensor_gib(value)
                else:
                    on_device += tensor_gib(value)
    return on_device, paged


def logical_params(model: nn.Module) -> int:
    """Parameters as counted before 4-bit packing, which stores two in a byte."""
    total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        total += math.prod(state.shape) if state is not None else parameter.numel()
    return total
