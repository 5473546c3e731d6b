"""Checks with a checksum that the device computes matrix products of integers correctly."""

from collections.abc import Callable

import torch

ROUNDS = 4
# The number of terms in each sum of a matrix product. Each term is -1, 0 or 1, so fp16 represents
# all sums exactly.
INNER = 256


class Miscalculated(RuntimeError):
    """A product is wrong, so measurements of this device cannot be trusted."""


def check_products(
    device: torch.device,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> None:
    """Multiply integer matrices that keep the whole device busy, and check A B v = A (B v).

    Raises Miscalculated.
    """
    # All cards are tested in fp16: cards below compute capability 8.0 have no bf16, and newer cards
    # compute fp16 and bf16 in the same units.
    size, dtype = (8192, torch.float16) if device.type == "cuda" else (512, torch.float32)
    generator = torch.Generator(device).manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator, device=device)

    for _ in range(ROUNDS):
        left, right, vector = integers(size, INNER), integers(INNER, size), integers(size, 1)
        product = multiply(left.to(dtype), right.to(dtype)).double()
        expected = left.double() @ (right.double() @ vector.double())
        wrong = int((product @ vector.double() != expected).sum())
        if wrong:
            raise Miscalculated(f"{wrong} of {size} rows of a matrix product are wrong")
