"""The levers of dense models, and the auxiliary loss, with grouped adapters on a small mixture."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.core.probe_types import MicroBatch, ProbeRequest
from autotune.dry.counting import dry_probe
from autotune.probe.harness import random_rows
from autotune.probe.model_settings import model_settings
from autotune.probe.model_shape import describe
from autotune.trainer.chunked_loss import chunked_loss
from autotune.trainer.float8 import Float8Linear
from autotune.trainer.grouped_lora import group_experts, uses_interface
from autotune.trainer.lean_trainer import compile_layers
from autotune.trainer.model_builder import (
    build,
    config_of,
    decoder_layers,
    require_input_gradients,
    set_checkpointing,
    trainable_model,
)
from autotune.trainer.varlen import join_rows
from tests.probe.test_grouped_lora import CPU, EXPERTS, FAMILIES, SHAPE, assert_equal, built
from tests.probe.test_grouped_lora import pytestmark as pytestmark

FAMILY = "qwen3_moe"
MIXTURE: dict[str, Any] = SHAPE | FAMILIES[FAMILY] | {"model_type": FAMILY}
TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def learned(model: Any, **batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a micro batch and the gradients of the trained parameters."""
    model.zero_grad()
    loss = model(**{"input_ids": TOKENS, "labels": TOKENS} | batch).loss
    loss.backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return loss.detach(), {
        name: weight.grad.clone() for name, weight in trained.items() if weight.grad is not None
    }


def with_losses(coefficient: float, *, output: bool) -> Any:
    """A small mixture with grouped adapters on the routers too, and an auxiliary loss or none."""
    config = replace(EXPERTS, lora_targets="all-linear")
    settings = model_settings(config, FAMILY)
    torch.manual_seed(0)
    shape = MIXTURE | {"router_aux_loss_coef": coefficient, "output_router_logits": output}
    base = build(config_of(shape), settings, CPU)
    model = trainable_model(base, settings, CPU)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad or "experts." in name:
                weight.normal_(0.0, 0.1)
    group_experts(model)
    return base, model.train()


def test_the_auxiliary_loss_follows_the_models_config() -> None:
    (_, without), (_, zero), (_, some) = (
        with_losses(0.5, output=False),
        with_losses(0.0, output=True),
        with_losses(0.5, output=True),
    )
    plain, expected = learned(without)
    assert_equal(learned(zero), (plain, expected))
    loss, gradients = learned(some)
    # The auxiliary loss of an even load is the number of experts per token.
    assert float(loss - plain) == pytest.approx(0.5 * 2, rel=0.2)
    of_routers = [name for name in gradients if ".gate.lora_B" in name]
    assert of_routers
    assert all(not torch.allclose(gradients[name], expected[name]) for name in of_routers)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_layers_have_the_auxiliary_loss_too(checkpointing: str) -> None:
    base, model = with_losses(0.5, output=True)
    expected = learned(model)
    require_input_gradients(base)
    config = replace(EXPERTS, checkpointing=checkpointing)
    set_checkpointing(base, model_settings(config, FAMILY))
    torch._dynamo.reset()
    for layer in decoder_layers(base):
        layer.compile(dynamic=False, backend="aot_eager")
    assert_equal(learned(model), expected)


def test_the_auxiliary_loss_is_counted_and_excludes_the_chunked_loss() -> None:
    """The chunks would leave it out."""
    shape = MIXTURE | {"output_router_logits": True}
    assert describe(MIXTURE).plain_head and not describe(shape).plain_head
    base, _ = with_losses(0.5, output=True)
    with pytest.raises(ValueError, match="cannot be computed in chunks"):
        chunked_loss(base)

    config = replace(EXPERTS, precision="bf16_mixed", attention="sdpa", micro_batch_size=1)
    requests = [
        ProbeRequest(config=config, model=one | {"num_experts": 64}, memory_gib=1.0)
        for one in (MIXTURE, shape)
    ]
    without, counted = map(dry_probe, requests)
    assert counted.operations > without.operations
    # Each layer's softmax of the logits, and its gradient
    size = 2 * config.tokens * 64 * 2 / 2**30
    assert counted.peak_allocated_gib > without.peak_allocated_gib + size


def test_selective_recomputation_keeps_the_routing() -> None:
    """A recomputed layer must send each token to the same experts as before."""
    base, model = built(FAMILY, replace(EXPERTS, attention="sdpa"))
    group_experts(model)
    expected = learned(model)
    require_input_gradients(base)
    torch._dynamo.reset()
    # The operations call torch's own code: g++ would take long to compile that of two graphs.
    with torch._inductor.config.patch(fallback_by_default=True):
        for budget in (0.5, 0.0):
            compile_layers(decoder_layers(base), budget)
            assert_equal(learned(model), expected)


def test_recomputed_layers_choose_the_same_experts() -> None:
    base, model = built(FAMILY, EXPERTS)
    group_experts(model)
    set_checkpointing(base, model_settings(replace(EXPERTS, checkpointing="full"), FAMILY))
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if uses_interface(module) or hasattr(module, "parameter_name"):
            continue
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda router, args, made: chosen.append(made[2]))
    learned(model)
    first, second = chosen[:2], chosen[2:][::-1]
    assert len(chosen) == 4 and all(map(torch.equal, first, second))


def test_packed_rows_and_the_chunked_loss() -> None:
    kind = MicroBatch(rows=((20, 13), (9, 30)), length=48, share=1.0)
    batch = join_rows(random_rows(kind, 128, torch.Generator().manual_seed(0), packing=True))
    batch.pop("segments")
    base, model = built(FAMILY, replace(EXPERTS, attention="sdpa"))
    expected = learned(model, **batch)
    group_experts(model)
    assert_equal(learned(model, **batch), expected)

    labels = batch.pop("labels")
    loss_of = chunked_loss(base)
    model.zero_grad()
    loss = loss_of(model(**batch), labels)
    loss.backward()
    gradients = {
        name: weight.grad
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.grad is not None
    }
    assert_equal((loss.detach(), gradients), expected)


def test_an_fp8_base() -> None:
    """Rounding to 8 bits makes a small difference of two computations larger."""
    config = replace(EXPERTS, precision="bf16_mixed", quantization="fp8", attention="sdpa")
    _, model = built(FAMILY, config)
    assert any(isinstance(module, Float8Linear) for module in model.modules())
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = learned(model)
        group_experts(model)
        found_loss, found = learned(model)
    torch.testing.assert_close(found_loss, loss, rtol=0.01, atol=0.0)
    one, other = (
        torch.cat([gradients[name].flatten() for name in expected])
        for gradients in (found, expected)
    )
    assert float((one - other).norm() / other.norm()) < 0.1
