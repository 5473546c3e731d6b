"""Checks that the device still calculates correctly: products of matrices with exact entries, by a checksum."""

from collections.abc import Callable

import torch

ROUNDS = 4
INNER = 256  # entries of -1, 0 and 1 a sum: each sum is an integer that fp16 represents exactly


class Miscalculated(RuntimeError):
    """A product is wrong: no measurement of this device can be trusted."""


def check_products(
    device: torch.device,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> None:
    """Multiply matrices of integers, large enough for every unit of the device, and check that A B v = A (B v).

    Raises Miscalculated.
    """
    # Cards before compute capability 8.0 multiply in fp16 alone; newer ones use the same units for bf16.
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
            raise Miscalculated(f"{wrong} of {size} rows of a product of matrices are wrong")
