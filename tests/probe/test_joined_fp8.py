"""Joined adapters on a base in 8-bit floats: PEFT's gradients on the same base, one graph of a
layer, and the memory of the transposed weights.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from autotune.catalog import resolve_model
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.counting import dry_probe
from autotune.prediction.memory_formula import memory_breakdown
from autotune.prediction.step_time import estimate_step_time
from autotune.trainer.float8 import GRADIENT_DTYPE, VALUE_DTYPE, cast
from autotune.trainer.joined_fp8 import _Products
from autotune.trainer.joined_lora import JoinedLayers
from autotune.trainer.model_builder import decoder_layers
from tests.probe import test_joined_lora as in_16_bits

pytestmark = in_16_bits.pytestmark
FP8 = {"precision": "bf16_pure", "quantization": "fp8", "lora_rank": 4, "seq_len": 32}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative error of all gradients together."""
    off = sum(float((found[name] - each).square().sum()) for name, each in expected.items())
    return float((off / sum(float(each.square().sum()) for each in expected.values())) ** 0.5)


@pytest.mark.parametrize(
    "knobs", [{}, {"precision": "bf16_mixed"}, {"lora_targets": "q_v"}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_gradients_are_as_near_to_exact_ones_as_pefts(family: str, knobs: dict[str, Any]) -> None:
    config = TrainConfig(**FP8 | {"checkpointing": "none"} | knobs)
    plain = replace(config, quantization="none")
    losses, exact = in_16_bits.gradients(family, plain, joined=False)
    of_peft, of_joined = (
        in_16_bits.gradients(family, config, joined=joined) for joined in (False, True)
    )
    assert of_joined[0] == pytest.approx(losses, rel=0.02)
    assert of_joined[0] == pytest.approx(of_peft[0], rel=0.01)
    assert 0.01 < error(of_joined[1], exact) < 1.3 * error(of_peft[1], exact)


@pytest.mark.parametrize(
    ("checkpointing", "precision"),
    [("none", "bf16_mixed"), ("full", "bf16_pure"), ("selective_50", "bf16_mixed")],
)
def test_compiled_layers_are_one_graph_and_round_no_more(
    checkpointing: str, precision: str
) -> None:
    """The compiler adds the low-rank terms in 32 bits, which rounds differently."""
    knobs = {"checkpointing": checkpointing, "precision": precision, "compile": "per_layer"}
    config = TrainConfig(**FP8 | knobs)
    expected, eager = in_16_bits.gradients("llama", config, joined=True)
    plain = replace(config, quantization="none")
    _, exact = in_16_bits.gradients("llama", plain, joined=False, exact=True)
    losses, found = in_16_bits.gradients("llama", config, joined=True, compiled=True)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert losses == pytest.approx(expected, rel=0.01)
    assert error(found, exact) < 1.2 * error(eager, exact)


def test_products_are_those_of_rounded_factors() -> None:
    """By hand: y = x W' + h sB', dx = dy W + dh A, dA = dh' x, dB = s dy' h, each member with a
    scale of its own.
    """
    torch.manual_seed(0)
    sizes, rank, s = [32, 16], 4, 0.25
    weights = [torch.randn(size, 48).to(VALUE_DTYPE) for size in sizes]
    scales = [torch.tensor(0.5), torch.tensor(2.0)]
    down = [torch.randn(rank, 48, requires_grad=True) for _ in sizes]
    up = [torch.randn(size, rank, requires_grad=True) for size in sizes]
    a, b = torch.cat(down).detach(), torch.cat(up).detach() * s
    x = torch.randn(16, 48, requires_grad=True)
    across = torch.cat([one.view(torch.uint8) for one in weights]).t().contiguous()
    outputs = _Products.apply(
        x, across.view(VALUE_DTYPE), a, b, sizes, s, *weights, *scales, *down, *up
    )
    gradients = [torch.randn(16, size) for size in sizes]
    torch.autograd.backward(outputs, gradients)

    x8, x_scale = cast(x.detach(), VALUE_DTYPE)
    factor = torch.finfo(GRADIENT_DTYPE).max / max(
        float(dy.abs().max() * scale) for dy, scale in zip(gradients, scales, strict=True)
    )
    of_rows = torch.zeros(16, 48)
    for number, (dy, weight, scale) in enumerate(zip(gradients, weights, scales, strict=True)):
        h = x.detach() @ down[number].detach().t()
        narrow = h @ b.split(sizes)[number].t()
        y = x8.float() @ weight.float().t() * (x_scale * scale) + narrow
        assert torch.allclose(outputs[number].detach(), y, atol=1e-4)
        dy8 = (dy * (factor * scale)).to(GRADIENT_DTYPE).float()
        dh = dy @ b.split(sizes)[number]
        of_rows += dy8 @ weight.float() / factor + dh @ down[number].detach()
        assert down[number].grad is not None and up[number].grad is not None
        assert torch.allclose(down[number].grad, dh.t() @ x.detach(), atol=1e-4)
        assert torch.allclose(up[number].grad, s * dy.t() @ h, atol=1e-4)
    assert x.grad is not None and torch.allclose(x.grad, of_rows, atol=1e-3)


def test_the_base_stays_as_it_is() -> None:
    config = TrainConfig(**FP8 | {"checkpointing": "none"})
    base, model, _ = in_16_bits.built("llama", config, joined=False)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    joined = JoinedLayers(base, decoder_layers(base))
    assert [type(module) for module in model.modules()] != kinds
    weights = [weight for name, weight in model.named_parameters() if name.endswith("weight_fp8")]
    copies = sum(one.nbytes for one in joined.tensors() if one.dtype is VALUE_DTYPE)
    assert copies == sum(weight.nbytes for weight in weights)
    assert joined.extra_bytes() == sum(one.nbytes for one in joined.tensors())
    joined.undo()
    assert [type(module) for module in model.modules()] == kinds
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.float(), expected[name].float()), name


@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16_pure"])
def test_a_count_adds_what_the_formula_adds(precision: str) -> None:
    spec = resolve_model("mistral-7b")
    spec = replace(spec, config=spec.config | {"num_hidden_layers": 4}, params=None)
    knobs = in_16_bits.COMPILED | {"precision": precision, "quantization": "fp8"}
    config = TrainConfig(**knobs | {"micro_batch_size": 2, "seq_len": 4096})
    found = {}
    for kernels in ("peft", "joined"):
        one = replace(config, lora_kernels=kernels)
        count = dry_probe(ProbeRequest(config=one, model=spec.config, memory_gib=80.0))
        formula, time = memory_breakdown(spec, one), estimate_step_time(spec, one)
        assert formula is not None and time is not None
        assert count.peak_allocated_gib == pytest.approx(formula.peak_gib, rel=0.05)
        assert count.model_gib == pytest.approx(formula.weights, rel=0.001)
        found[kernels] = (count.peak_allocated_gib, formula.peak_gib, time)
    (before, by_formula, peft), (after, formula_after, joined) = found.values()
    assert after - before == pytest.approx(formula_after - by_formula, rel=0.02)
    assert joined.micro_s < peft.micro_s and joined.device_error > peft.device_error
