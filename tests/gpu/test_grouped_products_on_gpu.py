"""Grouped products of experts on a GPU: each way to compute them gives the same values."""

import pytest
import torch

from autotune.core.nvml import list_gpus
from autotune.trainer.grouped_lora import EACH, FUSED, TRITON
from autotune.trainer.settings import PRODUCT_VARIABLE

pytestmark = pytest.mark.skipif(not list_gpus(), reason="needs an NVIDIA GPU")
# Experts' numbers of rows, and the sizes of their matrices; some experts have no rows
SHAPES = [([300, 0, 5, 207], 64, 48), ([0, 0, 8, 1], 256, 16), ([64] * 32, 16, 200)]


@pytest.mark.parametrize("way", [FUSED, TRITON, EACH])
@pytest.mark.parametrize(("counts", "size", "width"), SHAPES, ids=["uneven", "few", "even"])
def test_products_and_gradients_are_those_of_single_products(
    monkeypatch: pytest.MonkeyPatch, way: str, counts: list[int], size: int, width: int
) -> None:
    if way == FUSED and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch has no fused kernel for this GPU")
    monkeypatch.setenv(PRODUCT_VARIABLE, way)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    rows = random(sum(counts), size).requires_grad_()
    weights = random(len(counts), width, size).requires_grad_()
    adapters = [random(len(counts), *shape).requires_grad_() for shape in ((size, 8), (8, width))]
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    product = torch.ops.lora.adapted_product
    outputs, _ = product(rows, weights.transpose(1, 2), *adapters, ends)
    gradient = random(*outputs.shape)
    outputs.backward(gradient)

    inputs = (rows, weights, *adapters)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    parts = zip(exact[0].split(counts), *exact[1:], strict=True)
    exact_outputs = torch.cat([part @ weight.T + part @ a @ b for part, weight, a, b in parts])
    exact_outputs.backward(gradient.double())
    pairs = [(one.grad, other.grad) for one, other in zip(inputs, exact, strict=True)]
    for found, expected in [(outputs, exact_outputs), *pairs]:
        assert found is not None and expected is not None
        assert (
            float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())
            < 5e-3
        )
