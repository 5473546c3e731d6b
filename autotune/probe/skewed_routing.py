"""Makes the routers of a mixture of experts (MoE) prefer some experts, to time an uneven load.

The load of an expert is the number of tokens that are routed to it. Routers with random weights
load all experts evenly, but trained routers do not. This module scales the rows of the routers'
weights: the logits of an expert with a larger row vary more, so they are more often among the
largest. The model's code stays the same, so torch does not compile it again.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

HOTTEST = 4.0  # the load of the hottest expert, as a multiple of the mean load
# The hottest expert gets at most this share of the tokens. Scaling up a router's row makes its
# logit one of the largest for at most half of the tokens, because the logit is negative for the
# other half.
LARGEST_SHARE = 0.4
SAMPLES = 4096  # the number of random tokens that estimate the load of scaled routers
STEEPEST = 2.0  # the largest exponent of the power law that gives the scales
BISECTIONS = 16


def hottest_load(num_experts: int, per_token: int) -> float:
    """Return the load of the hottest expert with skewed routing, as a multiple of the mean load.

    Each token is routed to `per_token` of the experts.
    """
    return min(HOTTEST, LARGEST_SHARE * num_experts / per_token)


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of transformers' mixtures: modules with `top_k` and a matrix `weight`.

    `weight` has a row for each expert, and `top_k` is the number of experts per token.
    """
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "top_k", None), int)
        and isinstance(getattr(module, "weight", None), nn.Parameter)
        and module.weight.ndim == 2
        and module.weight.is_floating_point()
    ]


@contextmanager
def skew_routing(model: nn.Module) -> Iterator[None]:
    """Within this context, the routers load their experts unevenly.

    The scale of an expert's row falls with a power of the expert's rank. Each router ranks its
    experts in a different order.
    """
    weights = [router.weight for router in routers(model)]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for index, router in enumerate(routers(model)):
            scales = _scales(len(router.weight), router.top_k)
            order = torch.randperm(len(scales), generator=torch.Generator().manual_seed(index))
            router.weight.mul_(scales[order].to(router.weight)[:, None])
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, values in zip(weights, before, strict=True):
                weight.copy_(values)


@functools.cache
def _scales(num_experts: int, per_token: int) -> torch.Tensor:
    """Return the scale of each expert's row, the hottest expert first, in a tensor on the CPU."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES, num_experts, generator=generator)
    falling = -torch.arange(1.0, num_experts + 1).log()
    wanted = hottest_load(num_experts, per_token) * per_token / num_experts

    flat, steep = 0.0, STEEPEST
    for _ in range(BISECTIONS):
        middle = (flat + steep) / 2
        chosen = (logits * (middle * falling).exp()).topk(per_token).indices
        share = float((chosen == 0).any(1).float().mean())
        flat, steep = (middle, steep) if share < wanted else (flat, middle)
    return (steep * falling).exp()
