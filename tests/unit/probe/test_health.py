"""What a device is asked to multiply before it is believed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.probe import health
from autotune.probe.health import Miscalculated, check_products

CPU = torch.device("cpu")
Factors = tuple[torch.Tensor, torch.Tensor]


def multiplied(
    broken: Callable[[torch.Tensor], torch.Tensor] = lambda product: product,
) -> list[Factors]:
    """The factors of every product that was asked for."""
    factors: list[Factors] = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        factors.append((left, right))
        return broken(left @ right)

    check_products(CPU, multiply)
    return factors


def test_four_different_pairs_of_matrices_of_small_integers_are_multiplied_each_time_the_same() -> (
    None
):
    first, again = multiplied(), multiplied()
    assert len(first) == 4
    for left, right in first:
        assert (left.shape, right.shape) == ((512, 256), (256, 512))
        assert left.dtype == right.dtype == torch.float32
        assert left.unique().tolist() == right.unique().tolist() == [-1, 0, 1]
        assert not torch.equal(left, right.T)
    assert (
        len({float(left.flatten() @ torch.arange(left.numel()).float()) for left, _ in first}) == 4
    )
    assert all(map(torch.equal, first[3], again[3]))


def test_each_wrong_row_is_counted() -> None:
    def broken(product: torch.Tensor) -> torch.Tensor:
        product[3:5] += 1  # in every column, by so much in all as the vector sums to
        return product

    with pytest.raises(Miscalculated, match=r"^2 of 512 rows of a matrix product are wrong$"):
        multiplied(broken)


def test_a_gpu_multiplies_large_matrices_in_the_type_that_every_one_has_units_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    real, made = torch.randint, torch.Generator().manual_seed(0)
    gpu: Any = type("Device", (), {"type": "cuda"})()

    def randint(
        low: int, high: int, shape: Any, *, generator: torch.Generator, device: Any
    ) -> torch.Tensor:
        asked.append((low, high, device))
        assert generator is made
        return real(low, high, shape)

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        assert left.dtype == right.dtype == torch.float16
        assert (left.shape, right.shape) == ((8192, 256), (256, 8192))
        raise InterruptedError

    monkeypatch.setattr(health.torch, "Generator", {gpu: made}.__getitem__)
    monkeypatch.setattr(health.torch, "randint", randint)
    with pytest.raises(InterruptedError):
        check_products(gpu, multiply)
    assert asked == [(-1, 2, gpu)] * 3
