"""Gives a model on the meta device one GPU's part of the experts of a mixture (expert parallelism).

Before its experts, each layer sends the hidden states of its tokens to the GPUs that hold the
chosen experts (dispatch). Afterwards, it gets the results back (combine). Both exchanges only
allocate their buffers here, because nothing is sent on the meta device. The router is whole on each
GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from autotune.core.probe_types import ExpertShard
from autotune.trainer.grouped_lora import uses_interface


def divide_experts(model: nn.Module, shard: ExpertShard) -> None:
    """Leave one GPU's part of the experts in the model, and add the exchange of tokens.

    Raises ValueError if the experts do not use transformers' interface for experts, or if the GPUs
    cannot share them out equally.
    """
    mixtures = [module for module in model.modules() if uses_interface(module)]
    if not mixtures:
        raise ValueError(f"{type(model).__name__} has no experts in transformers' interface")

    for module in mixtures:
        experts: Any = module
        whole = experts.num_experts
        if whole % shard.num_gpus:
            raise ValueError(f"{shard.num_gpus} GPUs cannot share out {whole} experts equally")
        experts.num_experts = whole // shard.num_gpus
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.shape[0] == whole:
                part = parameter.data[: experts.num_experts].clone()
                setattr(module, name, nn.Parameter(part, parameter.requires_grad))
        experts.forward = _exchanging(experts.forward, shard, experts.num_experts)


def expert_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of all experts and of their adapters."""
    return {
        id(parameter)
        for module in model.modules()
        if uses_interface(module.get_base_layer() if isinstance(module, LoraLayer) else module)
        for parameter in module.parameters()
    }


def _exchanging(
    compute: Callable[..., torch.Tensor], shard: ExpertShard, num_experts: int
) -> Callable[..., torch.Tensor]:
    """Return the forward pass of experts with the dispatch and the combination of their tokens.

    `compute` is the forward pass of the `num_experts` experts that this GPU holds.
    """

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        per_token = chosen.shape[-1]
        num_sent = chosen.numel()
        num_received = num_sent
        if shard.fullest:
            num_tokens = shard.num_gpus * num_sent // per_token
            num_received = num_tokens * min(per_token, num_experts)

        # Rows are sent in the order of their experts.
        order = chosen.flatten().argsort()
        sent = hidden.flatten(0, -2)[order // per_token]
        received = _Exchange.apply(sent, num_received)
        of_rows = chosen.new_zeros(num_received, 1)
        computed = compute(received, of_rows, received.new_ones(num_received, 1))

        returned = _Exchange.apply(computed, num_sent)
        weighted = returned[order.argsort()] * weights.flatten()[:, None]
        summed = weighted.unflatten(0, (-1, per_token)).sum(1)
        return summed.to(hidden.dtype).view(hidden.shape)

    return forward


class _Exchange(torch.autograd.Function):
    """Rows that GPUs send to each other: the result has as many rows as this GPU receives."""

    @staticmethod
    def forward(context: Any, sent: torch.Tensor, num_received: int) -> torch.Tensor:
        context.num_sent = len(sent)
        return sent.new_empty(num_received, sent.shape[1])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.new_empty(context.num_sent, gradient.shape[1]), None
