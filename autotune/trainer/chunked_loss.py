"""Cross-entropy without the logits of all tokens: head, loss and their gradients, one chunk of tokens at a time.

Positions that nothing is predicted at (padding, prompts) do not reach the head.
Each chunk's gradients are computed at once, so that nothing is computed twice. With a frozen head only the gradients of
the hidden states are kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from .graphs import is_capturing

CHUNK_TOKENS = 1024  # with a vocabulary of 128,000 about 1.2 GiB of logits, their fp32 copy and its gradient
IGNORED = -100


class _Outputs(tuple[torch.Tensor, ...]):
    """Stands in for what any model's layers return: the hidden states, and nothing else."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def has_plain_head(model: Any) -> bool:
    """Whether the model's logits are exactly what its head returns: not capped, scaled or shifted, nothing added.

    The model's layers are not run.
    """
    head = model.get_output_embeddings()
    layers = model.base_model
    weight = next(head.parameters(), None) if isinstance(head, nn.Module) else None
    if weight is None or layers is model or getattr(model.config, "output_router_logits", False):
        return False
    # What stands in for them needs their dimensions, on the model's device, and no size.
    hidden = weight.new_zeros(1, 1, 1)
    tokens, logits = hidden[..., 0].long(), hidden.clone()
    layers.forward = lambda *_, **__: _Outputs((hidden,))
    head.forward = lambda _: logits
    try:
        return bool(model.forward(input_ids=tokens).logits is logits)
    finally:
        del layers.forward, head.forward


def chunked_loss(model: Any) -> Callable[..., torch.Tensor]:
    """The `compute_loss_func` of a Trainer for this causal language model. From now on the loss runs the head.

    Raises ValueError where the model changes its logits after the head.
    """
    if not has_plain_head(model):
        raise ValueError(f"{type(model).__name__} changes its logits after its head, which cannot be done in chunks")
    head = model.get_output_embeddings()
    compute_logits = partial(type(head).forward, head)
    waiting: list[tuple[torch.Tensor, torch.autocast]] = []

    def keep_input(hidden: torch.Tensor) -> torch.Tensor:
        """Replaces the head's forward. Keeps its input and the autocast state, which ends with the model's call."""
        device = hidden.device.type
        autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        waiting.clear()
        waiting.append((hidden, autocast))
        return hidden[..., :1]

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> torch.Tensor:
        hidden, autocast = waiting.pop()
        targets = pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
        trained = [weight for weight in head.parameters() if weight.requires_grad and torch.is_grad_enabled()]
        with autocast:
            total: torch.Tensor = _Chunks.apply(compute_logits, hidden.flatten(0, -2), targets, *trained)
        if num_items_in_batch is None:
            return total / (targets != IGNORED).sum()
        return total / num_items_in_batch

    head.forward = keep_input
    return loss


def _predicting(targets: torch.Tensor) -> torch.Tensor:
    """The places of the tokens that are predicted; those of all in a CUDA graph, since the host would read how many."""
    if is_capturing():
        return torch.arange(len(targets), device=targets.device)
    return (targets != IGNORED).nonzero().squeeze(1)


class _Chunks(torch.autograd.Function):
    """The sum of the losses of hidden states (N x hidden size) against targets (N); backward scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        compute_logits: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *weights: nn.Parameter,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        needs_gradients = any(ctx.needs_input_grad)
        gradients = [torch.zeros_like(tensor) for tensor in (hidden, *weights)] if needs_gradients else []
        predicting = _predicting(targets)
        for chunk_of in predicting.split(CHUNK_TOKENS):
            with torch.set_grad_enabled(needs_gradients):
                chunk = hidden[chunk_of].detach().requires_grad_(needs_gradients)
                # Not by a name of their own: logits must be freed before the next chunk's.
                loss = cross_entropy(compute_logits(chunk).float(), targets[chunk_of], reduction="sum")
            if needs_gradients:
                of_hidden, *of_weights = torch.autograd.grad(loss, [chunk, *weights])
                gradients[0][chunk_of] = of_hidden
                for gradient in gradients[1:]:
                    gradient += of_weights.pop(0)  # no name keeps it: the next chunk's would be a third copy
            total += loss.detach()
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, *of_weights = (gradient.mul_(scales[0]) for gradient in ctx.saved_tensors)
        return None, of_hidden, None, *of_weights
