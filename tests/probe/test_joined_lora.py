"""Adapters whose products are joined with the base's: PEFT's gradients, weights and files, in one
graph of a layer.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autotune.catalog import resolve_model
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.counting import dry_probe
from autotune.prediction.memory_formula import memory_breakdown
from autotune.prediction.step_time import counted_step_time, estimate_step_time
from autotune.probe.model_settings import model_settings
from autotune.probe.resident import attach, build_resident, clean
from autotune.trainer import joined_lora
from autotune.trainer.chunked_loss import chunked_loss
from autotune.trainer.joined_lora import JoinedLayers
from autotune.trainer.lean_trainer import compile_layers
from autotune.trainer.model_builder import (
    build,
    config_of,
    decoder_layers,
    require_input_gradients,
    set_checkpointing,
    trainable_model,
)
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.probe,
    # PEFT 0.21 asks it
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # What torch's compiler does to itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]
CPU = torch.device("cpu")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LENGTH, STEPS = 29, 2
# of sums in 32 bits in another order, where gradients of a tiny model nearly cancel out
ROUNDING = 3e-4
COMPILED: dict[str, Any] = {
    "compile": "per_layer",
    "padding": "max_length",
    "loss": "chunked",
    "checkpointing": "none",
}


def built(
    family: str, config: TrainConfig, *, joined: bool
) -> tuple[Any, nn.Module, JoinedLayers | None]:
    """A tiny model with adapters that change something, and biases where its family has them."""
    shape = TINY | TOKENS | {"model_type": family, "num_hidden_layers": 3, "hidden_size": 64}
    settings = model_settings(config, family)
    torch.manual_seed(0)
    base = build(config_of(shape), settings, CPU)
    set_checkpointing(base, settings)
    model = trainable_model(base, settings, CPU)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad or name.endswith("bias"):
                weight.normal_(0.0, 0.1)
    require_input_gradients(base)
    return base, model.train(), JoinedLayers(base, decoder_layers(base)) if joined else None


def gradients(
    family: str,
    config: TrainConfig,
    *,
    joined: bool,
    compiled: bool = False,
    with_code: bool = False,
    exact: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of micro batches with a step of the optimizer between, and the gradients that
    added up at the end.

    What is `exact` computes in 32 bits what others of the configuration round. The operations of a
    compiled graph call torch's own code, unless the graph is to have code of its own, which g++
    takes long to compile.
    """
    base, model, layers = built(family, config, joined=joined)
    if exact:
        model.float()
    if compiled:
        torch._dynamo.reset()
        counters.clear()
        compile_layers(decoder_layers(base), config.activation_budget)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    if layers is not None:
        layers.watch(optimizer)
    loss_of, losses = chunked_loss(base), []
    for number in range(STEPS + 1):
        tokens = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(number))
        rounds = config.precision == "bf16_mixed" and not exact
        with torch._inductor.config.patch(fallback_by_default=not with_code):
            with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
                outputs = model(input_ids=tokens)
            loss = loss_of(outputs, tokens)
            loss.backward()
        losses.append(float(loss.detach()))
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {
        name: weight.grad for name, weight in trained.items() if weight.grad is not None
    }


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a gradient."""
    assert found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype for name in expected
    )
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


CASES: list[tuple[str, dict[str, Any]]] = [
    *[
        (family, {"checkpointing": "none"})
        for family in ("llama", "qwen2", "qwen3", "phi3", "mistral")
    ],
    *[("llama", {"checkpointing": value}) for value in ("full", "every_2")],
    *[
        ("qwen2", {"lora_targets": targets, "checkpointing": "none"})
        for targets in ("q_v", "v_proj,up_proj")
    ],
    # three ranks are no single product
    ("llama", {"checkpointing": "none", "rslora": True, "lora_rank": 32}),
]


@pytest.mark.parametrize(("family", "knobs"), CASES, ids=str)
def test_gradients_are_those_of_peft(family: str, knobs: dict[str, Any]) -> None:
    config = TrainConfig(**{"precision": "fp32", "lora_rank": 4, "seq_len": LENGTH} | knobs)
    expected, of_peft = gradients(family, config, joined=False)
    losses, found = gradients(family, config, joined=True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert difference(found, of_peft) < ROUNDING


@pytest.mark.parametrize(
    ("family", "checkpointing", "with_code"),
    [
        ("llama", "full", False),
        ("qwen2", "selective_50", False),
        pytest.param("llama", "selective_50", True, marks=pytest.mark.families),
        pytest.param("qwen2", "none", True, marks=pytest.mark.families),
        pytest.param("qwen2", "full", True, marks=pytest.mark.families),
    ],
    ids=str,
)
def test_compiled_layers_are_one_graph_with_the_same_gradients(
    family: str, checkpointing: str, with_code: bool
) -> None:
    config = TrainConfig(precision="fp32", lora_rank=4, seq_len=LENGTH, checkpointing=checkpointing)
    expected, of_peft = gradients(family, config, joined=False)
    losses, found = gradients(family, config, joined=True, compiled=True, with_code=with_code)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert difference(found, of_peft) < ROUNDING


def test_compiled_code_has_the_same_gradients_and_is_found_on_disk(tmp_path: Path) -> None:
    config = TrainConfig(precision="fp32", lora_rank=4, seq_len=LENGTH, checkpointing="none")
    expected, of_peft = gradients("llama", config, joined=False)
    with torch.compiler.config.patch(cache_key_tag=str(tmp_path)):  # which nothing on disk has
        # the second time as in another process
        for counter in ("autograd_cache_saved", "autograd_cache_hit"):
            losses, found = gradients("llama", config, joined=True, compiled=True, with_code=True)
            assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
            assert counters["aot_autograd"][counter] == 1
            assert losses == pytest.approx(expected, rel=1e-5)
            assert difference(found, of_peft) < ROUNDING


@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16_pure"])
def test_in_16_bits_gradients_are_as_near_to_exact_ones_as_pefts(precision: str) -> None:
    config = TrainConfig(precision=precision, lora_rank=4, seq_len=LENGTH, checkpointing="none")
    losses, exact = gradients("llama", config, joined=False, exact=True)
    of_peft, of_joined = (
        gradients("llama", config, joined=joined, compiled=True) for joined in (False, True)
    )
    assert of_joined[0] == pytest.approx(losses, rel=0.005)

    def error(found: dict[str, torch.Tensor]) -> float:
        off = sum(float((found[name] - each).square().sum()) for name, each in exact.items())
        return off / sum(float(each.square().sum()) for each in exact.values())

    assert error(of_joined[1]) < 1.5 * error(of_peft[1])


def test_a_model_without_such_layers_is_refused() -> None:
    config = TrainConfig(precision="fp32", lora_rank=4, lora_targets="q_v", lora_dropout=0.1)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has no linear layers with adapters to join"
    ):
        built("llama", config, joined=True)


def test_weights_are_read_as_before_and_come_back_as_weights_of_their_own() -> None:
    config = TrainConfig(precision="fp32", lora_rank=4, checkpointing="none")
    base, plain, _ = built("qwen2", config, joined=False)
    expected = {name: weight.clone() for name, weight in plain.state_dict().items()}
    kinds = {name: type(module) for name, module in plain.named_modules()}
    joined = JoinedLayers(base, decoder_layers(base))
    with torch.no_grad():
        plain(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert all(torch.equal(weight, expected[name]) for name, weight in plain.state_dict().items())
    assert plain.state_dict().keys() == expected.keys() and joined.extra_bytes() > 0
    joined.undo()
    assert joined.tensors() == [] and not base.base_model._forward_pre_hooks
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, expected[name]) and weight.is_contiguous()
        assert weight.untyped_storage().nbytes() == weight.nbytes
    assert {name: type(module) for name, module in plain.named_modules()} == kinds
    assert not any({"joined", "place"} & vars(module).keys() for module in plain.modules())


def test_files_of_adapters_are_pefts(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = TrainConfig(precision="fp32", lora_rank=4, checkpointing="none")
    for name, joined in (("peft", False), ("joined", True)):
        built("llama", config, joined=joined)[1].save_pretrained(tmp_path / name)  # type: ignore[operator]
    files = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "joined")
    ]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    texts = [(tmp_path / name / "adapter_config.json").read_text() for name in ("peft", "joined")]
    assert texts[0] == texts[1]


def test_without_adapters_the_base_alone_computes() -> None:
    config = TrainConfig(precision="fp32", lora_rank=4, checkpointing="none")
    tokens = torch.randint(0, 128, (1, 8), generator=torch.Generator().manual_seed(0))
    found = []
    for joined in (False, True):
        model: Any = built("llama", config, joined=joined)[1]
        with model.disable_adapter(), torch.no_grad():
            found.append(model(input_ids=tokens).logits)
    assert torch.allclose(*found, atol=1e-6)


def test_copies_follow_what_torch_and_other_libraries_change() -> None:
    config = TrainConfig(precision="fp32", lora_rank=4, checkpointing="none")
    _, model, joined = built("llama", config, joined=True)
    assert joined is not None
    weight = next(weight for name, weight in model.named_parameters() if "q_proj.lora_A" in name)
    tokens, group = torch.ones(1, 4, dtype=torch.long), joined._groups[0]
    model(input_ids=tokens)
    assert torch.equal(group.a[:4], weight)
    with torch.no_grad():
        weight.add_(1.0)
    model(input_ids=tokens)
    assert torch.equal(group.a[:4], weight)
    weight.data.add_(1.0)  # which torch does not count
    model(input_ids=tokens)
    assert not torch.equal(group.a[:4], weight)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    joined.watch(optimizer)
    optimizer.step()
    model(input_ids=tokens)
    assert torch.equal(group.a[:4], weight)


def test_a_resident_model_is_as_it_was_after_a_probe() -> None:
    model = TINY | {"model_type": "llama", "num_hidden_layers": 3}
    config = TrainConfig(lora_rank=4, **COMPILED | {"lora_kernels": "joined"})
    resident = build_resident(
        ProbeRequest(config=config, model=model, device="cpu", memory_gib=1.0), CPU
    )
    expected = {name: weight.clone() for name, weight in resident.base.state_dict().items()}
    adapted = attach(resident, config, CPU, seed=0)
    kinds = [type(module) for module in adapted.modules()]
    resident.joined = JoinedLayers(resident.base, decoder_layers(resident.base))
    assert [type(module) for module in adapted.modules()] != kinds
    clean(resident)
    assert resident.joined is None and [type(module) for module in adapted.modules()] == kinds
    adapted.unload()  # type: ignore[operator]
    assert resident.base.state_dict().keys() == expected.keys()
    assert all(
        torch.equal(weight, expected[name]) for name, weight in resident.base.state_dict().items()
    )


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        ("mistral-7b", {}),
        ("mistral-7b", {"lora_rank": 64, "precision": "bf16_pure"}),
        ("mistral-7b", {"lora_targets": "q_v"}),
        ("qwen2.5-7b", {"checkpointing": "every_2"}),
    ],
    ids=str,
)
def test_a_count_adds_what_the_formula_adds(model: str, knobs: dict[str, Any]) -> None:
    """Wide matrices, copies of adapters, what is kept beside inputs, and cuBLAS's workspace of a
    second stream.
    """
    spec = resolve_model(model)
    # its large head hides less than a layer in the formula
    few = 20 if model == "qwen2.5-7b" else 4
    spec = replace(spec, config=spec.config | {"num_hidden_layers": few}, params=None)
    config = TrainConfig(**{"micro_batch_size": 4, "seq_len": 1024} | COMPILED | knobs)
    counted, by_formula = [], []
    for one in (config, replace(config, lora_kernels="joined")):
        count = dry_probe(ProbeRequest(config=one, model=spec.config, memory_gib=80.0))
        found, time = memory_breakdown(spec, one), counted_step_time(one, count)
        assert found is not None and time is not None
        assert count.peak_allocated_gib == pytest.approx(found.peak_gib, rel=0.005)
        counted.append((count.peak_allocated_gib, time.micro_s))
        estimate = estimate_step_time(spec, one)
        assert estimate is not None
        by_formula.append((found.peak_gib, estimate.micro_s))
    assert counted[1][0] - counted[0][0] == pytest.approx(
        by_formula[1][0] - by_formula[0][0], rel=0.02
    )
    assert counted[1][1] < counted[0][1] and by_formula[1][1] < by_formula[0][1]


def test_adapters_are_copied_before_the_micro_batch_that_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step copies them once, in its first micro batch; a count is of any micro batch."""
    spec = resolve_model("mistral-7b")
    knobs = COMPILED | {"micro_batch_size": 1, "seq_len": 256, "loss": "full"}
    config = TrainConfig(lora_kernels="joined", **knobs)
    request = ProbeRequest(config=config, model=spec.config, memory_gib=80.0, depth=1)
    counted = dry_probe(request)
    monkeypatch.setattr(JoinedLayers, "_refresh", lambda _: None)
    assert dry_probe(request) == counted


def test_what_is_computed_again_is_chosen_by_its_operations() -> None:
    """The partitioner knows nothing of operations that are not torch's own, unless a setting has it
    look at them.
    """
    spec = resolve_model("mistral-7b")
    found = {}
    for value in ("none", "selective_50"):
        config = TrainConfig(micro_batch_size=1, seq_len=1024, lora_kernels="joined", **COMPILED)
        config = replace(config, checkpointing=value)
        found[value] = dry_probe(
            ProbeRequest(config=config, model=spec.config, memory_gib=80.0, depth=2)
        )
    again = sum(found["selective_50"].flops.values()) / sum(found["none"].flops.values()) - 1
    assert 0 < again < 0.1


def test_operations_have_shapes_for_a_compiler_that_sees_no_values() -> None:
    padded, wide = torch.zeros(6, 8 + 64), torch.zeros(12 + 64, 8 + 64)
    a, b, hidden = torch.zeros(4, 8), torch.zeros(12, 4), torch.zeros(6, 4)
    ops: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
        (torch.ops.lora.joined_forward, (padded, hidden, wide, 0, 5)),
        (
            torch.ops.lora.joined_backward,
            (torch.zeros(6, 12 + 64), padded, hidden, wide, a, b, [5, 7]),
        ),
    )
    for op, arguments in ops:
        real = op(*arguments)
        meta = op(
            *(each.to("meta") if isinstance(each, torch.Tensor) else each for each in arguments)
        )
        real, meta = (each if isinstance(each, tuple) else (each,) for each in (real, meta))
        assert [(each.shape, each.stride()) for each in real] == [
            (each.shape, each.stride()) for each in meta
        ]


def test_gradients_of_many_columns_are_taken_for_each_member_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    sizes, rank = [5, 7], 2
    padded, gradient = torch.randn(6, 8 + 64), torch.randn(6, 12 + 64)
    padded[:, 8:], gradient[:, 12:] = 0.0, 0.0
    wide, a, hidden = torch.randn(12 + 64, 8 + 64), torch.randn(4, 8), torch.randn(6, 4)
    b = torch.block_diag(torch.randn(5, rank), torch.randn(7, rank))
    found = []
    for most in (64, 2):
        monkeypatch.setattr(joined_lora, "ONE_PRODUCT", most)
        found.append(
            torch.ops.lora.joined_backward(gradient.clone(), padded, hidden, wide, a, b, sizes)
        )
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
