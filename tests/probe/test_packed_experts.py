"""Experts in 4 bits: bitsandbytes' values, and the outputs and gradients of unpacked weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autotune.catalog import resolve_model
from autotune.core.probe_types import DryCount, MicroBatch, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.dry.counting import dry_probe
from autotune.export.formats import export_all
from autotune.prediction.memory_formula import NF4_STATISTICS
from autotune.probe.accounting import parameter_gib
from autotune.probe.model_settings import model_settings
from autotune.probe.resident import attach, build_resident, clean, family_of
from autotune.trainer import packed_experts
from autotune.trainer.grouped_lora import group_experts, restore_experts
from autotune.trainer.model_builder import (
    build,
    config_of,
    decoder_layers,
    load,
    require_input_gradients,
    set_checkpointing,
    set_lora_kernels,
    trainable_model,
)
from autotune.trainer.packed_experts import PROJECTIONS, is_packed, pack, unpack
from tests.probe.test_grouped_lora import CPU, FAMILIES, IN_GATE, SHAPE, assert_equal, results
from tests.probe.test_quantized_base import held_bytes
from tests.probe.test_train_script import _save_demo, forked
from tests.unit.export.test_script import demo, write

pytestmark = [
    pytest.mark.probe,
    # PEFT asks with a name from before transformers 5.23
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # PEFT's, of its own pattern
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    # What torch's compiler does to itself
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]
PACKED = TrainConfig(
    **{"precision": "fp32", "lora_rank": 4, "checkpointing": "none", "attention": "eager"},
    **{"quantization": "nf4", "quantize_experts": True, "double_quant": True},
)
ON_EXPERTS = replace(PACKED, lora_targets="attention_experts", lora_kernels="grouped")
TARGETS = {"attention": replace(PACKED, lora_targets="attention"), "experts": ON_EXPERTS}


def shape_of(family: str, **more: Any) -> dict[str, Any]:
    return SHAPE | FAMILIES[family] | {"model_type": family} | more


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_packed(module)]


def built(family: str, config: TrainConfig) -> tuple[Any, nn.Module]:
    """A tiny mixture with packed experts, whose adapters and biases change something."""
    settings = model_settings(config, family)
    torch.manual_seed(0)
    base = build(config_of(shape_of(family)), settings, CPU)
    set_checkpointing(base, settings)
    model = trainable_model(base, settings, CPU)
    set_lora_kernels(base, settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad or name.endswith("bias"):
                weight.normal_(0.0, 0.1)
    return base, model.train()


def unpack_model(model: nn.Module) -> None:
    """Give the experts weights of the same values in 16 or 32 bits, and PEFT's own wrappers."""
    for experts in experts_of(model):
        for name, weight in list(experts.named_parameters(recurse=False)):
            if name in PROJECTIONS:
                setattr(experts, name, nn.Parameter(unpack(weight), requires_grad=False))
        experts.__class__ = type(experts).__base__
    restore_experts(model)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("piece", [packed_experts.PIECE, 2**14])
def test_the_values_are_those_of_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch, double_quant: bool, piece: int
) -> None:
    """Also if the weight is cut into pieces, as weights of more than 2**31 elements are."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(6, 120, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole, state = quantize_4bit(weight, compress_statistics=double_quant, quant_type="nf4")
    expected = dequantize_4bit(whole, state)

    monkeypatch.setattr(packed_experts, "PIECE", piece)
    packed: Any = pack(weight, double_quant=double_quant)
    assert torch.equal(packed, whole) and packed.quant_state.nested is double_quant
    assert packed.quant_state.shape == weight.shape and not packed.requires_grad
    assert torch.equal(unpack(packed), expected) and expected.dtype is torch.bfloat16
    error = (expected - weight).float().abs().mean()

    # Rows of any length
    weight = weight.view(6, 96, 80)
    other = unpack(pack(weight, double_quant=double_quant))
    assert (other - weight).float().abs().mean() == pytest.approx(error)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in IN_GATE else pytest.mark.families)
        for family in FAMILIES
    ],
)
def test_outputs_and_gradients_are_those_of_unpacked_weights(family: str, targets: str) -> None:
    _, model = built(family, TARGETS[targets])
    assert experts_of(model)
    found = results(model)
    on_experts = [name for name in found[1] if ".experts." in name]
    assert bool(on_experts) is (targets == "experts")
    assert all(bool(found[1][name].any()) for name in on_experts)
    unpack_model(model)
    assert_equal(found, results(model))


def test_grouped_products_of_16_bits_are_the_same() -> None:
    """PEFT's own sums of weights and adapters would be rounded to 16 bits."""
    _, model = built("gpt_oss", replace(ON_EXPERTS, precision="bf16_mixed", checkpointing="full"))
    with torch.autocast("cpu", torch.bfloat16):
        found = results(model)
        unpack_model(model)
        group_experts(model)
        assert_equal(found, results(model), tolerance=0.001)


@pytest.mark.parametrize("targets", TARGETS)
def test_autograd_keeps_no_unpacked_weight(targets: str) -> None:
    _, model = built("qwen3_moe", TARGETS[targets])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda x: x):
        results(model)
    adapters = {(6, 24, 8), (6, 8, 32), (6, 32, 4), (6, 4, 48), (6, 24, 4), (6, 4, 32)}
    large = {tuple(one.shape) for one in kept if one.ndim == 3 and one.shape[0] == 6} - adapters
    assert not large
    weights = [one for experts in experts_of(model) for one in experts.parameters()]
    stored = {one.untyped_storage().data_ptr() for one in kept}
    assert all(weight.untyped_storage().data_ptr() in stored for weight in weights)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize(("swapped", "has_adapters"), [(True, True), (False, False)])
def test_the_operator_passes_the_checks_of_torch(
    double_quant: bool, swapped: bool, has_adapters: bool
) -> None:
    packed: Any = pack(torch.randn(3, 64, 32), double_quant=double_quant)
    size, width = (32, 64) if swapped else (64, 32)
    rows = torch.randn(6, size, requires_grad=True)
    adapters = (
        torch.randn(3, *shape, requires_grad=True) if has_adapters else None
        for shape in ((size, 2), (2, width))
    )
    ends = torch.tensor([1, 6, 6], dtype=torch.int32)
    scales = packed_experts._scales(packed.quant_state)
    arguments = (rows, packed.data, *scales, *adapters, ends, [3, 64, 32], swapped)
    torch.library.opcheck(torch.ops.lora.packed_adapted_product, arguments)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize(
    "checkpointing", [pytest.param("none", marks=pytest.mark.families), "full"]
)
def test_compiled_and_recomputed_layers_share_one_graph(targets: str, checkpointing: str) -> None:
    config = replace(TARGETS[targets], attention="sdpa", checkpointing=checkpointing)
    base, model = built("qwen3_moe", config)
    expected = results(model)
    require_input_gradients(base)
    torch._dynamo.reset()
    counters.clear()
    for layer in decoder_layers(base):
        layer.compile(dynamic=False, backend="aot_eager")
    assert_equal(results(model), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("family", IN_GATE)
def test_real_weights_are_packed_while_they_are_loaded(tmp_path: Path, family: str) -> None:
    settings = model_settings(replace(PACKED, precision="bf16_mixed"), family)
    in_16_bits = replace(settings, quantization="none", quantize_experts=False)
    plain = build(config_of(shape_of(family)), in_16_bits, CPU)
    plain.save_pretrained(tmp_path)
    model = load(str(tmp_path), settings, CPU)
    packed = experts_of(model)
    assert len(packed) == 2 and model.is_loaded_in_4bit
    originals = [one for one in plain.modules() if type(one) is type(packed[0]).__base__]
    for original, experts in zip(originals, packed, strict=True):
        for name, weight in original.named_parameters(recurse=False):
            found = getattr(experts, name)
            if name in PROJECTIONS:
                assert found.quant_state.dtype is torch.bfloat16
                expected = unpack(pack(weight.data, double_quant=True))
                assert torch.equal(unpack(found), expected)
            else:
                assert torch.equal(found, weight)


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_packed_base_holds_what_it_weighs(double_quant: bool) -> None:
    config = replace(PACKED, precision="bf16_mixed", double_quant=double_quant)
    model = shape_of("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    request = ProbeRequest(config=config, model=model, device="cpu", memory_gib=1.0)
    base = build_resident(request, CPU).base
    assert held_bytes(base) == pytest.approx(parameter_gib(base) * GIB, rel=0.01)
    weights = [unpack(weight) for experts in experts_of(base) for weight in experts.parameters()]
    assert len(weights) == 4
    for weight in weights:
        assert weight.float().std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("family", ["llama", "llama4_text"])
def test_models_without_experts_on_the_interface_are_refused(family: str) -> None:
    more = {"interleave_moe_layer_step": 1, "num_local_experts": 4, "intermediate_size_mlp": 64}
    config = config_of(SHAPE | more | {"model_type": family})
    with pytest.raises(ValueError, match="no experts that use transformers' interface"):
        build(config, model_settings(PACKED, family), CPU)


def test_a_probe_leaves_a_base_with_packed_experts_to_the_next() -> None:
    """Also if the adapters of the next probe are on other layers."""
    requests = [
        ProbeRequest(
            config=TARGETS[name], model=shape_of("qwen3_moe"), device="cpu", memory_gib=1.0
        )
        for name in ("experts", "attention", "experts")
    ]
    unpacked = replace(requests[0].config, quantize_experts=False)
    assert family_of(requests[0]) != family_of(replace(requests[0], config=unpacked))

    resident = build_resident(requests[0], CPU)
    losses = []
    for request in requests:
        model = attach(resident, request.config, CPU, seed=0).train()
        set_lora_kernels(resident.base, model_settings(request.config, "qwen3_moe"))
        losses.append(float(results(model)[0].sum()))
        clean(resident)
        assert len(experts_of(resident.base)) == 2
    # B is zero in new adapters
    assert losses[0] == losses[1] == losses[2]


def counted(config: TrainConfig, **shape: Any) -> DryCount:
    request = ProbeRequest(
        config=replace(config, micro_batch_size=1, seq_len=64, attention="sdpa"),
        model=shape_of("qwen3_moe", **shape),
        device="cuda",
        memory_gib=80.0,
    )
    batch = MicroBatch(rows=((64,),), length=64, share=1.0)
    return dry_probe(replace(request, micro_batches=(batch,)))


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_count_has_packed_weights_and_one_unpacked_projection(double_quant: bool) -> None:
    """The weights are those of the formula for linear layers in nf4."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 32}
    config = replace(ON_EXPERTS, precision="bf16_mixed", double_quant=double_quant)
    packed = counted(config, **sizes)
    whole = counted(replace(config, quantize_experts=False), **sizes)
    experts = 2 * 32 * 3 * 256 * 128
    saved = experts * (2 - 0.5 - NF4_STATISTICS[double_quant]) / GIB
    assert whole.model_gib - packed.model_gib == pytest.approx(saved, rel=0.01)
    assert packed.total_params == whole.total_params
    assert packed.trainable_params == whole.trainable_params

    # The largest projection is unpacked when the peak is reached.
    unpacked = 32 * 256 * 256 * 2 / GIB
    more = packed.peak_allocated_gib - (whole.peak_allocated_gib - saved)
    assert 0.5 * unpacked < more <= 1.02 * unpacked
    assert packed.flops["packed_adapted_product"] == whole.flops["adapted_product"]


def test_a_compiled_count_unpacks_too() -> None:
    config = replace(ON_EXPERTS, precision="bf16_mixed", compile="per_layer")
    once = counted(config)
    again = counted(replace(config, checkpointing="full"))
    product = "packed_adapted_product"
    assert again.flops[product] == 1.5 * once.flops[product] > 0
    assert once.model_gib == again.model_gib


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose train.py has trained adapters on packed experts, and then continued."""
    directory = tmp_path_factory.mktemp("exported")
    shape = shape_of("qwen3_moe")
    spec = replace(resolve_model("demo-3m"), config=shape, name="mixture")
    weights = _save_demo(directory / "weights", shape)
    config = replace(ON_EXPERTS, micro_batch_size=2, seq_len=32, optimizer="adamw_torch")
    made = replace(demo(config), model=replace(spec, weights=str(weights)))
    folder = write(export_all(made, ["train"]), directory / "out")
    (directory / "rows.jsonl").write_text('{"text": "a b c a b"}\n' * 8)

    arguments = ("--dataset", "rows.jsonl", "--output-dir", "trained")
    for more in (("--max-steps", "1"), ("--resume",)):
        done = forked(folder, *arguments, *more)
        assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["steps"] == 2
    return directory


def test_an_exported_run_saves_adapters_that_peft_merges_into_16_bits(exported: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = json.loads((exported / "out" / "train_config.json").read_text())["model_settings"]
    assert settings["quantize_experts"] is True
    base = AutoModelForCausalLM.from_pretrained(exported / "weights", dtype=torch.float32)
    tokens = torch.tensor([[2, 3, 4, 2, 3]])
    with torch.no_grad():
        first = base(input_ids=tokens).logits
        model = PeftModel.from_pretrained(base, exported / "trained")
        adapted = model(input_ids=tokens).logits
        merged = model.merge_and_unload()(input_ids=tokens).logits
    assert not torch.allclose(adapted, first, atol=1e-6)
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-6)
