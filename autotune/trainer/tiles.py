"""Norms, projections and the MLP of a layer over tiles of tokens: what they keep exists for one tile at a time.

Each of them computes every token by itself, so that only its input is kept. The backward pass computes one tile again,
takes its gradients, and frees it before the next. What is left of a layer that grows with the row are a few tensors of
the hidden size, queries, keys and values, and what the attention kernel needs.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

# With 4,096 tokens the products of an 8B are as fast as over the whole row, but for the weights that a 4-bit base
# unpacks for each tile, and its MLP keeps half a GiB.
TILE_TOKENS = 4096


def tile_layers(model: nn.Module, layers: list[nn.Module]) -> None:
    """Have what works token by token in a model's decoder layers, and in the norms after them, do so over tiles.

    Adapters must be there already. Raises ValueError where a layer has no attention and MLP with the usual names, or
    where something of it is dropped at random, since a tile that is computed again would drop other values.
    """
    for layer in layers:
        if not is_plain(layer):
            raise ValueError(f"{type(layer).__name__} has no self_attn and mlp that could be computed in tiles")
        if any(isinstance(module, nn.Dropout) and module.p for module in layer.modules()):
            raise ValueError("layers with dropout cannot be computed in tiles of tokens, which are computed twice")
    last = [norm for owner in model.modules() if _owns(owner, layers) for norm in owner.children() if _is_norm(norm)]
    for module in itertools.chain(last, *map(_by_token, layers)):
        module.forward = partial(_in_tiles, module, module.forward)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer has attention and an MLP with the usual names."""
    mlp = getattr(layer, "mlp", None)
    linear = isinstance(mlp, nn.Module) and any(hasattr(mlp, name) for name in ("down_proj", "fc2", "dense_4h_to_h"))
    return linear and isinstance(getattr(layer, "self_attn", None), nn.Module)


def _owns(module: nn.Module, layers: list[nn.Module]) -> bool:
    """Whether the layers are in a list of this module."""
    return any(layer is layers[0] for child in module.children() for layer in child.children())


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _by_token(layer: nn.Module) -> Iterator[nn.Module]:
    """The norms and the MLP of a layer, and the projections of its attention with their adapters."""
    for part in (*layer.children(), *layer.self_attn.children()):
        is_linear = hasattr(part, "in_features") and hasattr(part, "out_features")
        if part is layer.mlp or is_linear or _is_norm(part):
            yield part


def _in_tiles(module: nn.Module, compute: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    if inputs.shape[1] <= TILE_TOKENS:
        return compute(inputs)
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    made: torch.Tensor = _Tiles.apply(compute, inputs, *trained)
    return made


class _Tiles(torch.autograd.Function):
    """What `compute` makes of inputs (rows x tokens x ...), with the gradients of the inputs and of trained weights."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., torch.Tensor], inputs: torch.Tensor, *weights: nn.Parameter
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        device = inputs.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.compute, ctx.weights, ctx.autocast = compute, weights, partial(torch.autocast, device, dtype, enabled)
        made = None
        for begin in range(0, inputs.shape[1], TILE_TOKENS):
            of_tile = compute(inputs[:, begin : begin + TILE_TOKENS])
            if made is None:
                made = of_tile.new_empty((*inputs.shape[:2], *of_tile.shape[2:]))
            made[:, begin : begin + TILE_TOKENS] = of_tile
            del of_tile  # it must be freed before the next one is made
        assert made is not None
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, (gradient,) = ctx.saved_tensors[0], gradients
        wanted = ctx.needs_input_grad[1]
        of_inputs = torch.empty_like(inputs) if wanted else None
        of_weights = [torch.zeros_like(weight) for weight in ctx.weights]
        for begin in range(0, inputs.shape[1], TILE_TOKENS):
            tile = slice(begin, begin + TILE_TOKENS)
            found = _gradients(ctx, inputs[:, tile].detach().requires_grad_(wanted), gradient[:, tile])
            if of_inputs is not None:
                of_inputs[:, tile] = found.pop(0)
            for total in of_weights:
                total += found.pop(0)  # no name keeps it: the next tile's would be a third copy
        return None, of_inputs, *of_weights


def _gradients(ctx: Any, tile: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a tile of the inputs, if it needs them, and of the weights."""
    with torch.enable_grad(), ctx.autocast():
        made = ctx.compute(tile)
    sources = [tile] if tile.requires_grad else []
    return list(torch.autograd.grad(made, [*sources, *ctx.weights], gradient))
