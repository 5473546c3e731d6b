"""Does the device still calculate? Products whose every entry is known to be exact, held against a checksum."""

from collections.abc import Callable

import torch

ROUNDS = 4
INNER = 256  # of entries -1, 0 and 1: each sum is a whole number that bf16 holds exactly


class Miscalculated(RuntimeError):
    """A product came out wrong: nothing that this device says can be believed."""


def check_products(
    device: torch.device, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
) -> None:
    """Multiply matrices, large enough for every unit of the device, and check A B v = A (B v) for whole numbers.

    Raises Miscalculated.
    """
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    drawn = torch.Generator(device).manual_seed(0)

    def whole_numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=drawn, device=device)

    for _ in range(ROUNDS):
        left, right, vector = whole_numbers(size, INNER), whole_numbers(INNER, size), whole_numbers(size, 1)
        product = multiply(left.to(dtype), right.to(dtype)).double()
        expected = left.double() @ (right.double() @ vector.double())
        wrong = int((product @ vector.double() != expected).sum())
        if wrong:
            raise Miscalculated(f"{wrong} of {size} rows of a product of matrices came out wrong")
