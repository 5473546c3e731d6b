"""Cross-entropy that never holds the logits of all tokens: head, loss and their gradients, a chunk of tokens at a time.

The gradients are taken at once, so that nothing is computed twice; with a frozen head only the hidden states' are kept.
This file goes with the exported script.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

CHUNK_TOKENS = 1024  # with a vocabulary of 128,000 about 1.2 GiB of logits, their fp32 copy and its gradient
IGNORED = -100


class _Outputs(tuple[torch.Tensor, ...]):
    """What a model's layers return, of whatever kind the model expects: hidden states, and nothing else."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def has_plain_head(model: Any) -> bool:
    """Whether the loss is that of what the head returns: not capped, scaled or shifted, and nothing added.

    The model's layers are left out.
    """
    head, layers = model.get_output_embeddings(), model.base_model
    weight = next(head.parameters(), None) if isinstance(head, nn.Module) else None
    if weight is None or layers is model or getattr(model.config, "output_router_logits", False):
        return False
    tokens = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
    hidden = torch.empty(1, 1, weight.shape[-1], device=weight.device)
    told = torch.empty(1, 1, weight.shape[0], device=weight.device)
    layers.forward = lambda *_, **__: _Outputs((hidden,))
    head.forward = lambda _: told
    try:
        return bool(model.forward(input_ids=tokens).logits is told)
    finally:
        del layers.forward, head.forward


def chunked_loss(model: Any) -> Callable[..., torch.Tensor]:
    """The `compute_loss_func` for a Trainer of this causal language model, whose head waits for it from here on.

    Raises ValueError where the model does more to its logits than its head.
    """
    if not has_plain_head(model):
        raise ValueError(f"{type(model).__name__} changes its logits after its head, which cannot be done in chunks")
    head = model.get_output_embeddings()
    logits = partial(type(head).forward, head)
    waiting: list[tuple[torch.Tensor, torch.autocast]] = []

    def wait(hidden: torch.Tensor) -> torch.Tensor:
        """In place of the head: keeps its input, and whether autocast is in force, which ends with the model's call."""
        device = hidden.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        waiting[:] = [(hidden, torch.autocast(device, dtype, enabled))]
        return hidden[..., :1]

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> torch.Tensor:
        hidden, precision = waiting.pop()
        targets = pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
        trained = [weight for weight in head.parameters() if weight.requires_grad and torch.is_grad_enabled()]
        with precision:
            total: torch.Tensor = _Chunks.apply(logits, hidden.flatten(0, -2), targets, *trained)
        return total / ((targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    head.forward = wait
    return loss


class _Chunks(torch.autograd.Function):
    """Sum of the losses of tokens (N x hidden size) against targets (N); gradients wait until backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *weights: nn.Parameter,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        wanted = any(ctx.needs_input_grad)
        grads = [torch.zeros_like(one) for one in (hidden, *weights)] if wanted else []
        for start in range(0, len(hidden), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            with torch.set_grad_enabled(wanted):
                chunk = hidden[rows].detach().requires_grad_(wanted)
                loss = cross_entropy(logits(chunk).float(), targets[rows], reduction="sum", ignore_index=IGNORED)
            if wanted:
                of_hidden, *of_weights = torch.autograd.grad(loss, [chunk, *weights])
                grads[0][rows] = of_hidden
                for held, more in zip(grads[1:], of_weights, strict=True):
                    held += more
            total += loss.detach()
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, *of_weights = (grad.mul_(scales[0]) for grad in ctx.saved_tensors)
        return None, of_hidden, None, *of_weights
