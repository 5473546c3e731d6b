# -*- coding: utf-8 -*-
"""Computes a layer's norms, projections and MLP in tiles of tokens, which limits their memory.

Norms, projections and MLPs compute each token independently, so only their input is kept. The
backward pass recomputes one tile, computes its gradients, and frees the tile before it begins the
next tile. Other memory of a layer still grows with the length of the row: a few tensors of the
hidden size, the queries, keys and values, and the workspace of the attention kernel.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

# In tiles of 4,096 tokens, the matrix products of an 8B model are as fast as for a whole row, and
# the MLP needs half a GiB. Tiles are slower only with a 4-bit base, whose weights are unpacked
# again for each tile.
TILE_TOKENS = 4096


def tile_layers(model: nn.Module, layers: list[nn.Module]) -> None:
    """Make the token-wise modules of the decoder layers compute in tiles of tokens.

    The norms after the last layer compute in tiles too. Adapters must be present already. Raises
    ValueError for a layer without attention and MLP under the usual names. Raises ValueError for a
    layer with dropout too, because the recomputation of a tile would drop different values.
    """
    for layer in layers:
        if not is_plain(layer):
            raise ValueError(f"{type(layer).__name__} has no self_attn and mlp to compute in tiles")
        if any(isinstance(module, nn.Dropout) and module.p for module in layer.modules()):
            raise ValueError(
                "layers with dropout cannot be computed in tiles, because each tile is computed"
                " twice"
            )

    last = [
        norm
        for owner in model.modules()
        if _owns(owner, layers)
        for norm in owner.children()
        if _is_norm(norm)
    ]
    for module in itertools.chain(last, *map(_token_modules, layers)):
        module.forward = partial(_compute_tiles, module, module.forward)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer has attention and an MLP under the usual names."""
    mlp = getattr(layer, "mlp", None)
    linear = isinstance(mlp, nn.Module) and any(
        hasattr(mlp, name) for name in ("down_proj", "fc2", "dense_4h_to_h")
    )
    return linear and isinstance(getattr(layer, "self_attn", None), nn.Module)


def _owns(module: nn.Module, layers: list[nn.Module]) -> bool:
    """Return whether one of this module's children is the list of decoder layers."""
    return any(layer is layers[0] for child in module.children() for layer in child.children())


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _token_modules(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer's norms and MLP, and the projections of its attention with their adapters."""
    for part in (*layer.children(), *layer.self_attn.children()):
        is_linear = hasattr(part, "in_features") and hasattr(part, "out_features")
        if part is layer.mlp or is_linear or _is_norm(part):
            yield part


def _compute_tiles(
    module: nn.Module, compute: Callable[..., torch.Tensor], inputs: torch.Tensor
) -> torch.Tensor:
    if inputs.shape[1] <= TILE_TOKENS:
        return compute(inputs)
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    made: torch.Tensor = _Tiles.apply(compute, inputs, *trained)
    return made


class _Tiles(torch.autograd.Function):
    """Applies `compute` to inputs (rows x tokens x ...), tile by tile.

    The backward pass returns the gradients of the inputs and of the trained weights.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., torch.Tensor], inputs: torch.Tensor, *weights: nn.Parameter
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device)
        enabled = torch.is_autocast_enabled(device)
        ctx.compute = compute
        ctx.weights = weights
        ctx.autocast = partial(torch.autocast, device, dtype, enabled)

        made = None
        for begin in range(0, inputs.shape[1], TILE_TOKENS):
            tile = compute(inputs[:, begin : begin + TILE_TOKENS])
            if made is None:
                made = tile.new_empty((*inputs.shape[:2], *tile.shape[2:]))
            made[:, begin : begin + TILE_TOKENS] = tile
            del tile  # free the tile before the next one exists
        assert made is not None
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        (gradient,) = gradients
        needs_inputs = ctx.needs_input_grad[1]
        of_inputs = torch.empty_like(inputs) if needs_inputs else None
        of_weights = [torch.zeros_like(weight) for weight in ctx.weights]

        for begin in range(0, inputs.shape[1], TILE_TOKENS):
            part = slice(begin, begin + TILE_TOKENS)
            tile = inputs[:, part].detach().requires_grad_(needs_inputs)
            of_tile = _gradients(ctx, tile, gradient[:, part])
            if of_inputs is not None:
                of_inputs[:, part] = of_tile.pop(0)
            for total in of_weights:
                # Do not assign the tile's gradient to a variable, because the gradient would then
                # stay in memory during the next tile.
                total += of_tile.pop(0)
        return None, of_inputs, *of_weights


def _gradients(ctx: Any, tile: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the weights.

    If the tile requires a gradient, its gradient comes first.
    """
    with torch.enable_grad(), ctx.autocast():
        made = ctx.compute(tile)
    sources = [tile] if tile.requires_grad else []
    return list(torch.autograd.grad(made, [*sources, *ctx.weights], gradient))
