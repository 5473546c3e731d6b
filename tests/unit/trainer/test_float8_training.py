"""Trained linear layers in 8 bits: all three products against exact ones, with both kinds of
scales, and back to 16 bits.
"""

from typing import Any

import pytest
import torch
from torch import nn

from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.trainer import float8_training, model_builder
from autotune.trainer.float8_training import (
    ROWWISE,
    TENSORWISE,
    RowwiseLinear,
    TensorwiseLinear,
    train_in_16_bits,
    train_in_fp8,
)
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
CPU = torch.device("cpu")
FAN_IN, FAN_OUT = 64, 96
LLAMA = TINY | {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_key_value_heads": 2,
}
FULL: dict[str, Any] = {"method": "full", "checkpointing": "none", "compile": "per_layer"}


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().float() - expected.float()).norm() / expected.float().norm())


def results(layer: Any, inputs: torch.Tensor, gradients: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of input, weight and bias."""
    inputs = inputs.clone().requires_grad_(True)
    layer.zero_grad()
    outputs = layer(inputs)
    outputs.backward(gradients)
    return [outputs.detach(), inputs.grad, layer.weight.grad, layer.bias.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [32, 5], ids=["whole", "padded"])
@pytest.mark.parametrize("scales", [TENSORWISE, ROWWISE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_products_are_near_exact_ones(
    dtype: torch.dtype, scales: str, rows: int, compiled: bool
) -> None:
    """A factor of 3 bits has an error of about 2.6 %, and a gradient in e5m2 of about 5 %.

    Rows that do not fill a block of 16 are padded with zeros, which change no sum.
    """
    torch.manual_seed(0)
    layer = nn.Linear(FAN_IN, FAN_OUT, dtype=dtype)
    inputs = torch.randn(2, rows, FAN_IN, dtype=dtype)
    gradients = torch.randn(2, rows, FAN_OUT, dtype=dtype)
    exact = results(layer, inputs, gradients)
    train_in_fp8([nn.Sequential(layer)], scales)
    run: Any = layer
    if compiled:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    found = results(run, inputs, gradients)
    torch._dynamo.reset()
    assert [one.dtype for one in found] == [dtype] * 4
    assert [one.shape for one in found] == [one.shape for one in exact]
    errors = [off(one, other) for one, other in zip(found, exact, strict=True)]
    of_gradients = 0.05 if scales == ROWWISE else 0.08
    assert 0.02 < errors[0] < 0.05 and errors[3] < 0.01
    assert min(errors[1:3]) > 0.02 and max(errors[1:3]) < of_gradients


def test_a_large_value_makes_only_its_own_row_coarser() -> None:
    torch.manual_seed(0)
    inputs, gradients = torch.randn(32, FAN_IN), torch.randn(32, FAN_OUT)
    inputs[0] *= 1e6
    errors = {}
    for scales in (TENSORWISE, ROWWISE):
        layer = nn.Linear(FAN_IN, FAN_OUT)
        exact = results(layer, inputs, gradients)
        train_in_fp8([nn.Sequential(layer)], scales)
        errors[scales] = off(results(layer, inputs, gradients)[0][1:], exact[0][1:])
    assert errors[ROWWISE] < 0.05 < 0.5 < errors[TENSORWISE]


@pytest.mark.parametrize("scales", [TENSORWISE, ROWWISE])
def test_factors_are_stored_as_tensor_cores_read_them(
    scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first factor row by row, the second column by column; a CPU takes any layout."""
    strides = []

    def watch(rows: torch.Tensor, factor: torch.Tensor, *scales: Any, **named: Any) -> Any:
        strides.append((rows.stride(1), factor.stride(0)))
        for scale, shape in zip(scales, ((len(rows), 1), (1, factor.shape[1])), strict=True):
            assert scale.shape in ((), shape) and scale.dtype is torch.float32
        return multiply(rows, factor, *scales, **named)

    multiply = float8_training.multiply
    monkeypatch.setattr(float8_training, "multiply", watch)
    layer = nn.Linear(FAN_IN, FAN_OUT)
    train_in_fp8([nn.Sequential(layer)], scales)
    results(layer, torch.randn(FAN_IN, 32).t(), torch.randn(FAN_OUT, 32).t())
    assert strides == [(1, 1)] * 3


def test_zeros_stay_zeros() -> None:
    for scales in (TENSORWISE, ROWWISE):
        layer = nn.Linear(FAN_IN, FAN_OUT)
        train_in_fp8([nn.Sequential(layer)], scales)
        found = results(layer, torch.zeros(16, FAN_IN), torch.zeros(16, FAN_OUT))
        assert all(one.isfinite().all() for one in found)
        assert not any(one.any() for one in found[1:])


def built(**knobs: Any) -> Any:
    config = TrainConfig(**FULL | knobs)
    settings = model_settings(config, "llama")
    torch.manual_seed(0)
    base = model_builder.build(model_builder.config_of(LLAMA), settings, CPU)
    return model_builder.trainable_model(base, settings, CPU)


def kinds(model: nn.Module) -> dict[type, int]:
    found = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    return {kind: found.count(kind) for kind in set(found)}


def test_layers_multiply_in_8_bits_and_the_head_does_not() -> None:
    """Parameters keep their names, dtypes and values, so checkpoints are the same."""
    plain = built()
    for scales, kind in ((TENSORWISE, TensorwiseLinear), (ROWWISE, RowwiseLinear)):
        model = built(fp8_products=scales)
        assert kinds(model) == {kind: 7 * LLAMA["num_hidden_layers"], nn.Linear: 1}
        expected = plain.state_dict()
        assert {name: one.dtype for name, one in model.state_dict().items()} == dict.fromkeys(
            expected, torch.float32
        )
        assert all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())
        train_in_16_bits(model)
        assert kinds(model) == {nn.Linear: 7 * LLAMA["num_hidden_layers"] + 1}


def test_frozen_and_odd_layers_stay_as_they_are() -> None:
    layers = [nn.Linear(64, 64), nn.Linear(60, 64), nn.Linear(64, 64).requires_grad_(False)]
    train_in_fp8([nn.Sequential(*layers)], ROWWISE)
    assert [type(layer) for layer in layers] == [RowwiseLinear, nn.Linear, nn.Linear]


@pytest.mark.parametrize("scales", [TENSORWISE, ROWWISE])
def test_a_model_learns_as_in_16_bits(scales: str) -> None:
    """The losses of a small model under autocast, with fp32 weights."""

    def losses(**knobs: Any) -> list[float]:
        model = built(**knobs).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, 16, (4, 64), generator=generator)
        found = []
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=text, labels=text).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    plain, fp8 = losses(), losses(fp8_products=scales)
    assert fp8 != plain and plain[-1] < 0.8 * plain[0]
    assert fp8 == pytest.approx(plain, rel=0.03)
