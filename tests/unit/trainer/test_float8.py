"""Linear layers in 8 bits: products both ways against the same by hand, what they keep, and
adapters on top.
"""

from typing import Any

import pytest
import torch
from torch import nn

from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.trainer import float8, model_builder
from autotune.trainer.float8 import Float8Linear
from tests.helpers.factories import TINY

pytestmark = [
    # PEFT asks with a name from before transformers 5.23
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # Dynamo does it itself
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

CPU, META = torch.device("cpu"), torch.device("meta")
FAN_IN, FAN_OUT = 64, 96
# Every side of its matrices is a multiple of 16, and most matrices have two different ones.
LLAMA = TINY | {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_key_value_heads": 2,
}


def pair(dtype: torch.dtype, *, bias: bool = False) -> tuple[nn.Linear, Float8Linear]:
    """A frozen layer, and the same in 8 bits."""
    torch.manual_seed(0)
    plain = nn.Linear(FAN_IN, FAN_OUT, bias=bias, dtype=dtype).requires_grad_(False)
    return plain, Float8Linear(plain, CPU)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What 8 bits leave of values (fp32), with one scale."""
    scale = torch.finfo(dtype).max / values.abs().max()
    return (values * scale).to(dtype).float() / scale


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().float() - expected.float()).norm() / expected.float().norm())


def watched(strides: list[tuple[tuple[int, ...], ...]]) -> Any:
    """The product of 8-bit factors, which notes how they are laid out."""
    multiply = float8._multiply_on_cpu

    def product(
        first: torch.Tensor, second: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        strides.append((first.stride(), second.stride()))
        return multiply(first, second, *rest, **named)

    return product


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_products_are_those_of_rounded_factors(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: y = x W^T and dx = dy W.

    In 16 bits a factor is rounded twice, which decides near ties otherwise.
    """
    plain, layer = pair(dtype, bias=True)
    inputs, gradients = (
        torch.randn(2, 5, FAN_IN, dtype=dtype),
        torch.randn(2, 5, FAN_OUT, dtype=dtype),
    )
    inputs.requires_grad_(True)
    strides: list[tuple[tuple[int, ...], ...]] = []
    if not compiled:  # a CPU takes factors of any layout, CUDA does not
        monkeypatch.setattr(float8, "_multiply_on_cpu", watched(strides))
    run: Any = (
        torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
        if compiled
        else layer
    )
    outputs = run(inputs)
    outputs.backward(gradients)
    weight = rounded(plain.weight.float(), torch.float8_e4m3fn)
    by_hand = (
        rounded(inputs.detach().float(), torch.float8_e4m3fn) @ weight.t() + plain.bias.float()
    )
    assert (
        outputs.dtype == dtype and outputs.shape == (2, 5, FAN_OUT) and off(outputs, by_hand) < 0.03
    )
    by_hand = rounded(gradients.float(), torch.float8_e5m2) @ weight
    assert (
        inputs.grad is not None and inputs.grad.dtype == dtype and off(inputs.grad, by_hand) < 0.03
    )
    assert compiled or strides == [((FAN_IN, 1), (1, FAN_IN)), ((FAN_OUT, 1), (1, FAN_OUT))]
    torch._dynamo.reset()


def test_columns_are_laid_out_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs and gradients that are the transposes of
    others: CUDA takes no such first factor.
    """
    _, layer = pair(torch.float32)
    strides: list[tuple[tuple[int, ...], ...]] = []
    monkeypatch.setattr(float8, "_multiply_on_cpu", watched(strides))
    inputs = torch.randn(FAN_IN, 32).t().requires_grad_(True)
    layer(inputs).backward(torch.randn(FAN_OUT, 32).t())
    assert [first for first, _ in strides] == [(FAN_IN, 1), (FAN_OUT, 1)]


def test_a_weight_is_kept_in_8_bits_and_nothing_else_for_the_backward_pass() -> None:
    plain, layer = pair(torch.bfloat16, bias=True)
    assert {name: weight.dtype for name, weight in layer.named_parameters()} == {
        "weight_fp8": torch.float8_e4m3fn,
        "bias": torch.bfloat16,
    }
    assert layer.weight_fp8.shape == plain.weight.shape and not any(
        one.requires_grad for one in layer.parameters()
    )
    assert layer.weight.dtype == torch.bfloat16 and 0.01 < off(layer.weight, plain.weight) < 0.05
    assert off(layer.weight, rounded(plain.weight.float(), torch.float8_e4m3fn)) < 0.003
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.append(one) or one, lambda one: one
    ):
        layer(torch.randn(4, FAN_IN, dtype=torch.bfloat16, requires_grad=True))
    assert [one.data_ptr() for one in kept] == [layer.weight_fp8.data_ptr(), layer.scale.data_ptr()]


def test_autocast_decides_the_dtype_of_outputs() -> None:
    _, layer = pair(torch.float32)
    inputs = torch.randn(4, FAN_IN)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
    assert layer(inputs).dtype == torch.float32


def test_what_is_zero_stays_zero_and_the_largest_is_not_lost() -> None:
    _, layer = pair(torch.bfloat16)
    assert not layer(torch.zeros(4, FAN_IN, dtype=torch.bfloat16)).any()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for values in torch.tensor([[-3.0, 1.0], [2.9, -1.0], [1e4, 0.0]], dtype=torch.bfloat16):
            cast, scale = float8.cast(values, dtype)
            largest = float((cast.float() * scale).abs().max())
            assert scale.dtype == torch.float32
            # a factor is rounded to bf16
            assert largest == pytest.approx(float(values.abs().max()), rel=2**-8)


def test_a_layer_without_values_takes_memory_and_gets_them_later() -> None:
    with META:
        plain = nn.Linear(FAN_IN, FAN_OUT)
    layer, nowhere = Float8Linear(plain, CPU), Float8Linear(plain, META)
    assert not any(one.is_meta for one in (layer.weight_fp8, layer.scale, layer.bias))
    assert all(one.is_meta for one in (nowhere.weight_fp8, nowhere.scale, nowhere.bias))
    layer.store(torch.full((FAN_OUT, FAN_IN), 0.25))
    assert torch.equal(layer.weight, torch.full((FAN_OUT, FAN_IN), 0.25))


def gradients(**knobs: Any) -> torch.Tensor:
    """Those of adapters on a small model, whose values do not depend on how the base is kept."""
    config = TrainConfig(
        **({"precision": "bf16_pure", "lora_rank": 4, "checkpointing": "none"} | knobs)
    )
    settings = model_settings(config, "llama")
    torch.manual_seed(0)
    base = model_builder.build(model_builder.config_of(LLAMA), settings, CPU)
    model_builder.set_checkpointing(base, settings)
    model = model_builder.trainable_model(base, settings, CPU).train()
    trained = [one for one in model.parameters() if one.requires_grad]
    assert {one.dtype for one in trained} == {
        torch.bfloat16 if config.precision == "bf16_pure" else torch.float32
    }
    torch.manual_seed(1)
    for one in trained:
        nn.init.normal_(one, std=0.1)
    if config.compile == "per_layer":
        model_builder.require_input_gradients(base)
        for layer in model_builder.decoder_layers(model):
            layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    tokens = torch.randint(0, 128, (2, 32))
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16_mixed"):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch._dynamo.reset()
    return torch.cat([one.grad.flatten().float() for one in trained])


@pytest.mark.parametrize("precision", ["bf16_pure", "bf16_mixed"])
def test_adapters_get_the_gradients_of_16_bits_up_to_rounding(precision: str) -> None:
    """Recomputed and compiled layers give the same.

    A weight that is turned the wrong way gives a difference of 1.
    """
    in_16_bits = gradients(precision=precision)
    in_8_bits = gradients(precision=precision, quantization="fp8")
    assert 0.01 < off(in_8_bits, in_16_bits) < 0.25
    for knobs, allowed in ({"checkpointing": "full"}, 1e-6), ({"compile": "per_layer"}, 0.1):
        assert (
            off(gradients(precision=precision, quantization="fp8", **knobs), in_8_bits) < allowed
        ), knobs


def test_ddp_sends_no_weights_in_8_bits() -> None:
    settings = model_settings(
        TrainConfig(precision="bf16_pure", quantization="fp8", lora_rank=4), "llama"
    )
    base = model_builder.build(model_builder.config_of(LLAMA), settings, CPU)
    model: Any = model_builder.trainable_model(base, settings, CPU)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    sent = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in model._ddp_params_and_buffers_to_ignore
    }
    assert len(tensors) - len(sent) == 2 * 7 * LLAMA["num_hidden_layers"]
    assert not any(
        tensor.dtype is torch.float8_e4m3fn or name.endswith(".scale")
        for name, tensor in sent.items()
    )


def test_dora_has_the_norms_of_the_weight() -> None:
    settings = model_settings(
        TrainConfig(precision="bf16_pure", quantization="fp8", dora=True, lora_rank=4), "llama"
    )
    base = model_builder.build(model_builder.config_of(LLAMA), settings, CPU)
    model: Any = model_builder.trainable_model(base, settings, CPU)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    magnitude = layer.lora_magnitude_vector["default"].weight
    assert off(magnitude, layer.base_layer.weight.norm(dim=1)) < 0.01
    assert model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()
