"""What a warm worker keeps of a model between two probes, and
in which state the next one finds it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.probe import resident as module
from autotune.probe.resident import (
    ResidentModel,
    attach,
    build_resident,
    clean,
    family_of,
    module_names,
)
from tests.helpers.factories import TINY

# PEFT asks with a name from before transformers 5.23
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CPU = torch.device("cpu")
MODEL = TINY | {"model_type": "llama", "num_hidden_layers": 3}
REQUEST = ProbeRequest(config=TrainConfig(lora_rank=4), model=MODEL, device="cpu", memory_gib=1.0)


@pytest.fixture
def resident() -> ResidentModel:
    return build_resident(REQUEST, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": MODEL | {"vocab_size": 64}},
        {"weights": "folder"},
        {"trainer": "trl"},
        {"config": TrainConfig(lora_rank=4, attention="eager")},
        {"config": TrainConfig(lora_rank=4, quantization="nf4")},
        {"config": TrainConfig(lora_rank=4, precision="fp32")},
    ],
    ids=str,
)
def test_what_changes_the_base_makes_another_family(changes: dict[str, Any]) -> None:
    assert family_of(replace(REQUEST, **changes)) != family_of(REQUEST)


def test_what_changes_adapters_or_steps_does_not() -> None:
    others = TrainConfig(lora_rank=8, micro_batch_size=2, seq_len=64)
    for changes in ({"config": others}, {"depth": 2}, {"seed": 3}, {"memory_gib": 2.0}):
        assert family_of(replace(REQUEST, **changes)) == family_of(REQUEST)  # type: ignore[arg-type]
    backwards = dict(reversed(MODEL.items()))
    assert family_of(replace(REQUEST, model=backwards)) == family_of(REQUEST)
    nf4 = TrainConfig(quantization="nf4")
    double = [replace(REQUEST, config=replace(nf4, double_quant=given)) for given in (False, True)]
    assert family_of(double[0]) != family_of(double[1])


def test_a_base_has_the_layers_that_were_asked_for_and_the_same_weights_each_time(
    resident: ResidentModel,
) -> None:
    torch.rand(3)  # whatever the process did before
    again = build_resident(REQUEST, CPU)
    weights, others = resident.base.state_dict(), again.base.state_dict()
    assert weights.keys() == others.keys() and all(
        torch.equal(weights[name], others[name]) for name in weights
    )
    few = build_resident(replace(REQUEST, depth=2), CPU)
    assert (few.base.config.num_hidden_layers, resident.base.config.num_hidden_layers) == (2, 3)
    assert few.family == resident.family == family_of(REQUEST)
    assert MODEL["num_hidden_layers"] == 3
    other = build_resident(replace(REQUEST, seed=1), CPU).base.state_dict()
    assert any(not torch.equal(weights[name], other[name]) for name in weights)
    tensors = [*resident.base.parameters(), *resident.base.buffers()]
    assert (
        resident.model_gib
        == sum(tensor.numel() * tensor.element_size() for tensor in tensors) / GIB
    )


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if value.requires_grad
    }


def test_adapters_are_reused_with_new_values_where_they_fit(resident: ResidentModel) -> None:
    assert resident.adapters_gib() == 0.0 and resident.cached_gib() == 0.0
    resident.base_gib = 0.5
    config = REQUEST.config
    first = attach(resident, config, CPU, seed=3)
    fresh = adapters(first)
    assert any("lora_A" in name for name in fresh) and all("lora" in name for name in fresh)
    size_gib = sum(value.numel() * value.element_size() for value in fresh.values()) / GIB
    assert resident.adapters_gib() == size_gib and resident.cached_gib() == 0.5 + size_gib
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)  # it was trained
    again = attach(resident, replace(config, micro_batch_size=2), CPU, seed=3)
    assert again is first
    values = adapters(again)
    assert values.keys() == fresh.keys() and all(
        torch.equal(values[name], fresh[name]) for name in fresh
    )
    other = adapters(attach(resident, config, CPU, seed=4))
    assert any(not torch.equal(other[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize(
    "knobs",
    [{"lora_rank": 8}, {"rslora": True}, {"dora": True}, {"precision": "bf16_pure"}],
    ids=str,
)
def test_other_adapters_are_made_anew_and_the_old_ones_are_gone(
    resident: ResidentModel, knobs: dict[str, Any]
) -> None:
    first = attach(resident, REQUEST.config, CPU, seed=0)
    names = {name for name, _ in resident.base.named_modules()}
    config = replace(REQUEST.config, **knobs)
    second = attach(resident, config, CPU, seed=0)
    assert second is not first and resident.peft_model is second
    if "dora" not in knobs:
        # no adapter stands on another
        assert {name for name, _ in resident.base.named_modules()} == names
    # DoRA's magnitudes come from the weights: they are never reused.
    assert (attach(resident, config, CPU, seed=0) is second) is ("dora" not in knobs)


def test_full_fine_tuning_trains_the_base_itself(resident: ResidentModel) -> None:
    config = TrainConfig(method="full")
    model = attach(resident, config, CPU, seed=0)
    assert resident.peft_model is None and all(
        parameter.requires_grad for parameter in model.parameters()
    )


def test_what_a_trainer_leaves_behind_is_undone(resident: ResidentModel) -> None:
    model: Any = attach(resident, REQUEST.config, CPU, seed=0)
    base: Any = resident.base
    names = dict(module_names(base))
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    base.get_input_embeddings().register_forward_hook(lambda module, inputs, outputs: None)
    norm = base.model.norm
    for name in ("forward", "extra_repr", "_get_name"):
        setattr(norm, name, lambda *_: None)
    for one in (base, model):
        one.forward = one._original_forward = lambda *_: None
        one._is_accelerate_prepared = True
    base.model.layers[1]._compiled_call_impl = lambda *_: None
    trained = next(parameter for parameter in base.parameters() if parameter.requires_grad)
    trained.grad = torch.ones_like(trained)
    base.train()
    clean(resident)
    assert not base.is_gradient_checkpointing and not base.get_input_embeddings()._forward_hooks
    assert not base._require_grads_hooks
    assert not {"forward", "extra_repr", "_get_name"} & vars(norm).keys()
    for one in (base, model):
        assert not {"forward", "_original_forward", "_is_accelerate_prepared"} & vars(one).keys()
    assert all(layer._compiled_call_impl is None for layer in base.model.layers)
    assert trained.grad is None and not any(module.training for module in base.modules())
    assert dict(module_names(base)) == names and names["LlamaForCausalLM"] is type(base)
    with torch.no_grad():
        assert base(torch.ones(1, 4, dtype=torch.long)).logits.shape == (1, 4, MODEL["vocab_size"])


def test_a_base_without_adapters_is_cleaned_too(resident: ResidentModel) -> None:
    resident.base.train()
    clean(resident)
    assert not resident.base.training and resident.peft_model is None


def test_real_weights_are_loaded_for_a_whole_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    build, load = (
        module.build,
        lambda source, settings, device, config: made.append((source, config)),
    )
    monkeypatch.setattr(
        module, "load", lambda *asked: load(*asked) or build(asked[3], asked[1], asked[2])
    )  # type: ignore[func-returns-value]
    for wanted in ({}, {"depth": 2}, {"weights": "folder", "depth": 2}):
        build_resident(replace(REQUEST, **wanted), CPU)  # type: ignore[arg-type]
    assert not made
    whole = build_resident(replace(REQUEST, weights="folder"), CPU)
    ((source, config),) = made
    assert source == "folder" and config.num_hidden_layers == 3 and whole.family[1] == "folder"


def test_names_of_any_kind_make_a_family() -> None:
    """A config may have numbers for keys beside text."""
    odd = replace(REQUEST, model={"a": 1, 3: 2, "2": 4})  # type: ignore[dict-item]
    assert family_of(odd) == family_of(replace(odd, model={"2": 4, 3: 2, "a": 1}))  # type: ignore[dict-item]


def test_adapters_in_pure_bf16_are_not_those_of_another_precision(resident: ResidentModel) -> None:
    pure = replace(REQUEST.config, precision="bf16_pure")
    first = attach(resident, pure, CPU, seed=0)
    assert attach(resident, pure, CPU, seed=0) is first
    assert {value.dtype for value in adapters(first).values()} == {torch.bfloat16}
    second = attach(resident, REQUEST.config, CPU, seed=0)
    assert {value.dtype for value in adapters(second).values()} == {torch.float32}
