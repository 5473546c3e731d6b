# -*- coding: utf-8 -*-
"""Computes cross-entropy without holding the logits of all tokens at once.

The head, the loss and their gradients are computed for one chunk of tokens at a time. Positions
without a target (padding, prompts) do not reach the head. A chunk's gradients are computed together
with its loss, so that the backward pass recomputes nothing. With a frozen head, only the gradients
of the hidden states are kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from .graphs import is_capturing
from .settings import chunk_tokens

IGNORED = -100


class _Outputs(tuple[torch.Tensor, ...]):
    """Replaces the output of a model's layers, and holds only the hidden states.

    Other outputs are None.
    """

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def has_plain_head(model: Any) -> bool:
    """Return whether the model returns the head's output unchanged as its logits.

    Some models cap, scale or shift the logits, or add another loss. The check does not run the
    model's layers.
    """
    head = model.get_output_embeddings()
    layers = model.base_model
    weight = next(head.parameters(), None) if isinstance(head, nn.Module) else None
    if weight is None or layers is model or getattr(model.config, "output_router_logits", False):
        return False

    # The placeholder tensors need the right number of dimensions and the model's device, but may
    # have any size.
    hidden = weight.new_zeros(1, 1, 1)
    tokens = hidden[..., 0].long()
    logits = hidden.clone()
    layers.forward = lambda *_, **__: _Outputs((hidden,))
    head.forward = lambda _: logits
    try:
        return bool(model.forward(input_ids=tokens).logits is logits)
    finally:
        del layers.forward, head.forward


def chunked_loss(model: Any, *, in_head: bool = False) -> Callable[..., torch.Tensor]:
    """Return a Trainer's `compute_loss_func` for this causal language model.

    After this call, the loss function runs the head, and the model's forward pass no longer does.
    With `in_head`, the head itself returns the loss, because its weights are gathered only while it
    runs; the returned function then has an attribute `expect`, which LeanTrainer calls with the
    labels and the number of items before the model runs. Raises ValueError if the model changes its
    logits after the head.
    """
    if not has_plain_head(model):
        name = type(model).__name__
        raise ValueError(
            f"{name} changes its logits after its head, so the loss cannot be computed in chunks"
        )

    head = model.get_output_embeddings()
    compute_logits = partial(type(head).forward, head)
    if in_head:
        return _loss_in_head(head, compute_logits)

    pending: list[tuple[torch.Tensor, torch.autocast]] = []

    def store_input(hidden: torch.Tensor) -> torch.Tensor:
        """Replace the head's `forward`: store the input and the autocast state, compute nothing.

        The loss needs the autocast state, because the autocast context ends before the loss is
        computed.
        """
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device)
        autocast = torch.autocast(device, dtype, torch.is_autocast_enabled(device))
        pending.clear()
        pending.append((hidden, autocast))
        return hidden[..., :1]

    def loss(
        outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        hidden, autocast = pending.pop()
        with autocast:
            return _mean_loss(head, compute_logits, hidden, labels, num_items_in_batch)

    head.forward = store_input
    return loss


def _loss_in_head(
    head: nn.Module, compute_logits: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return a `compute_loss_func` that reads the loss from the output of the head."""
    expected: list[tuple[torch.Tensor, torch.Tensor | int | None]] = []

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        """Replace the head's `forward`: return the loss as one logit."""
        labels, num_items = expected.pop()
        return _mean_loss(head, compute_logits, hidden, labels, num_items).reshape(1, 1, 1)

    def loss(
        outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        of_head: torch.Tensor = outputs.logits
        return of_head.reshape(())

    def expect(labels: torch.Tensor, num_items: torch.Tensor | int | None) -> None:
        expected[:] = [(labels, num_items)]

    loss.expect = expect  # type: ignore[attr-defined]
    head.forward = compute
    return loss


def _mean_loss(
    head: nn.Module,
    compute_logits: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    num_items: torch.Tensor | int | None,
) -> torch.Tensor:
    """Return the sum of all losses, divided by the number of items or of targets."""
    targets = pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
    has_grad = torch.is_grad_enabled()
    trained = [weight for weight in head.parameters() if weight.requires_grad and has_grad]
    total: torch.Tensor = _ChunkedCrossEntropy.apply(
        compute_logits, hidden.flatten(0, -2), targets, *trained
    )
    return total / ((targets != IGNORED).sum() if num_items is None else num_items)


def _target_positions(targets: torch.Tensor) -> torch.Tensor:
    """Return the positions that have a target: a token to predict.

    While a CUDA graph is captured, return all positions, because the host cannot read the number of
    positions with a target.
    """
    if is_capturing():
        return torch.arange(len(targets), device=targets.device)
    return (targets != IGNORED).nonzero().squeeze(1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sums the losses of N tokens from their hidden states (N x hidden size) and targets (N).

    The forward pass computes the gradients, and the backward pass scales them.
    """

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
        gradients = []
        if needs_gradients:
            gradients = [torch.zeros_like(tensor) for tensor in (hidden, *weights)]

        for positions in _target_positions(targets).split(chunk_tokens(len(targets))):
            with torch.set_grad_enabled(needs_gradients):
                chunk = hidden[positions].detach().requires_grad_(needs_gradients)
                # Do not assign the logits to a variable, so that they are freed before the next
                # chunk's logits are allocated.
                loss = cross_entropy(
                    compute_logits(chunk).float(), targets[positions], reduction="sum"
                )

            if needs_gradients:
                of_hidden, *of_weights = torch.autograd.grad(loss, [chunk, *weights])
                gradients[0][positions] = of_hidden
                for gradient in gradients[1:]:
                    # Do not assign the chunk's gradient to a variable, because the gradient would
                    # then stay in memory during the next chunk.
                    gradient += of_weights.pop(0)
            total += loss.detach()

        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, *of_weights = (gradient.mul_(scales[0]) for gradient in ctx.saved_tensors)
        return None, of_hidden, None, *of_weights
