"""Adapters of experts as grouped products: PEFT's outputs, gradients and files."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autotune.catalog import resolve_model
from autotune.core.probe_types import MicroBatch, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.counting import dry_probe
from autotune.export.formats import export_all
from autotune.probe.model_settings import model_settings
from autotune.probe.model_shape import describe
from autotune.probe.resident import attach, build_resident, clean
from autotune.trainer import grouped_lora
from autotune.trainer.grouped_lora import group_experts, restore_experts
from autotune.trainer.model_builder import (
    build,
    config_of,
    decoder_layers,
    require_input_gradients,
    set_checkpointing,
    set_lora_kernels,
    trainable_model,
)
from autotune.trainer.settings import PRODUCT_VARIABLE, is_expert_parameter
from tests.helpers.factories import TINY
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
CPU = torch.device("cpu")
SHAPE = TINY | {"num_hidden_layers": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 2}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
NUMBERED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": NUMBERED,
    "gpt_oss": LOCAL,  # transposed, interleaved and clamped, with biases
    "mixtral": LOCAL,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": ROUTED | GROUPS | LATENT,
    "glm4_moe": ROUTED | GROUPS,
    "qwen2_moe": NUMBERED | {"shared_expert_intermediate_size": 32},
    "granitemoe": LOCAL,
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24},
    "minimax_m2": LOCAL,
    "nemotron_h": ROUTED  # no gate
    | {"layers_block_type": ["attention", "moe"], "moe_shared_expert_intermediate_size": 32},
}
IN_GATE = ("qwen3_moe", "gpt_oss")
EXPERTS = TrainConfig(
    **{"precision": "fp32", "lora_rank": 4, "lora_targets": "attention_experts"},
    **{"lora_kernels": "grouped", "checkpointing": "none", "attention": "eager"},
)


def built(family: str, config: TrainConfig) -> tuple[Any, nn.Module]:
    """A tiny mixture, whose adapters and biases change something."""
    settings = model_settings(config, family)
    torch.manual_seed(0)
    base = build(config_of(SHAPE | FAMILIES[family] | {"model_type": family}), settings, CPU)
    set_checkpointing(base, settings)
    model = trainable_model(base, settings, CPU)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad or name.endswith("bias") or "experts." in name:
                weight.normal_(0.0, 0.1)
    return base, model.train()


def results(model: nn.Module, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits and the gradients of a micro batch."""
    tokens = torch.randint(3, 128, (2, 13), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    outputs = model(input_ids=tokens, labels=tokens)
    outputs.loss.backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return outputs.logits.detach(), {
        name: weight.grad.clone() for name, weight in trained.items() if weight.grad is not None
    }


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        difference = float((found[1][name] - gradient).norm())
        assert difference <= tolerance * (float(gradient.norm()) + 1e-3), name


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in IN_GATE else pytest.mark.families)
        for family in FAMILIES
    ],
)
def test_outputs_and_gradients_are_those_of_pefts_wrapper(family: str) -> None:
    _, model = built(family, EXPERTS)
    expected = results(model)
    assert any(".experts." in name and bool(grad.any()) for name, grad in expected[1].items())
    group_experts(model)
    assert_equal(results(model), expected)
    restore_experts(model)
    assert torch.equal(results(model)[0], expected[0])


@pytest.mark.parametrize(
    "targets",
    ["all-linear", "experts.down_proj,q_proj", "mlp.experts.gate_up_proj,v_proj"],
)
def test_routers_and_single_projections_have_adapters_too(targets: str) -> None:
    _, model = built("qwen3_moe", replace(EXPERTS, lora_targets=targets))
    expected = results(model)
    assert any(".gate.lora_A" in name for name in expected[1]) is (targets == "all-linear")
    group_experts(model)
    assert_equal(results(model), expected)


def test_adapters_that_are_off_or_merged_are_computed_by_peft() -> None:
    _, model = built("gpt_oss", EXPERTS)
    group_experts(model)
    tuned: Any = model
    with torch.no_grad(), tuned.disable_adapter():
        without = model(input_ids=torch.arange(3, 9)[None]).logits
    with torch.no_grad():
        adapted = model(input_ids=torch.arange(3, 9)[None]).logits
        tuned.merge_adapter()
        merged = model(input_ids=torch.arange(3, 9)[None]).logits
    torch.testing.assert_close(merged, adapted)
    assert not torch.allclose(without, adapted, atol=1e-3)


@pytest.mark.parametrize("rank", [4, 8])
def test_ranks_are_padded_in_16_bits(rank: int) -> None:
    config = replace(EXPERTS, precision="bf16_mixed", lora_rank=rank)
    _, model = built("qwen3_moe", config)
    wrapper = next(grouped_lora._outermost(model))
    down, up = grouped_lora._matrices(wrapper, torch.bfloat16)
    assert down.shape == (6, 24, 8) and up.shape == (6, 8, 32)
    assert not down[..., rank:].any() and not up[:, rank:].any()

    with torch.autocast("cpu", torch.bfloat16):
        expected = results(model)
        group_experts(model)
        assert_equal(results(model), expected, tolerance=0.03)


@pytest.mark.parametrize(
    "checkpointing", [pytest.param("none", marks=pytest.mark.families), "full"]
)
def test_compiled_and_recomputed_layers_share_one_graph(checkpointing: str) -> None:
    base, model = built("qwen3_moe", replace(EXPERTS, attention="sdpa"))
    group_experts(model)
    expected = results(model)
    require_input_gradients(base)
    set_checkpointing(base, model_settings(replace(EXPERTS, checkpointing=checkpointing), ""))
    torch._dynamo.reset()
    counters.clear()
    for layer in decoder_layers(base):
        layer.compile(dynamic=False, backend="aot_eager")
    assert_equal(results(model), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_frozen_weights_keep_no_rows_and_get_no_gradient() -> None:
    weights = torch.randn(3, 4, 5)
    rows = torch.randn(7, 4, requires_grad=True)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda x: x):
        torch.ops.lora.adapted_product(rows, weights, None, None, ends)[0].sum().backward()
    assert {tuple(one.shape) for one in kept} == {(3, 4, 5), (3,)}
    expected = torch.cat([weights[0].sum(1).expand(2, -1), weights[2].sum(1).expand(5, -1)])
    torch.testing.assert_close(rows.grad, expected)


@pytest.mark.parametrize("has_adapters", [True, False])
@pytest.mark.parametrize("count", [0, 1])
def test_the_operators_pass_the_checks_of_torch(count: int, has_adapters: bool) -> None:
    """One expert has all rows, or some; the others have none."""
    rows = torch.randn(6, 4, requires_grad=True)
    weights = torch.randn(3, 4, 5, requires_grad=True)
    ends = torch.tensor([count, 6, 6], dtype=torch.int32)
    adapters = (
        torch.randn(3, *shape, requires_grad=True) if has_adapters else None
        for shape in ((4, 2), (2, 5))
    )
    torch.library.opcheck(torch.ops.lora.adapted_product, (rows, weights, *adapters, ends))
    gradient = torch.randn(6, 5)
    torch.library.opcheck(torch.ops.lora.grouped_weight_gradient, (rows.detach(), gradient, ends))


def test_experts_outside_the_interface_are_refused() -> None:
    config = {"model_type": "llama4_text", "interleave_moe_layer_step": 1, "num_local_experts": 4}
    config |= SHAPE | {"intermediate_size_mlp": 64}
    assert describe(config).experts == ()
    settings = model_settings(replace(EXPERTS, lora_targets="experts.down_proj,q_proj"), "")
    base = build(config_of(config), settings, CPU)
    trainable_model(base, settings, CPU)
    with pytest.raises(ValueError, match="Llama4TextExperts does not use transformers' experts"):
        set_lora_kernels(base, settings)

    plain = build(config_of(TINY | {"model_type": "llama", "num_hidden_layers": 1}), settings, CPU)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no adapters on experts"):
        group_experts(plain)


def test_a_model_is_described_with_its_experts() -> None:
    found = describe(SHAPE | FAMILIES["gpt_oss"] | {"model_type": "gpt_oss"})
    assert found.experts == ("mlp.experts.down_proj", "mlp.experts.gate_up_proj")
    assert all(map(is_expert_parameter, found.experts)) and not found.parametrized
    assert not is_expert_parameter("shared_experts.up_proj")


def test_a_probe_leaves_pefts_wrappers_behind() -> None:
    model = SHAPE | FAMILIES["qwen3_moe"] | {"model_type": "qwen3_moe"}
    request = ProbeRequest(config=EXPERTS, model=model, device="cpu", memory_gib=1.0)
    resident = build_resident(request, CPU)
    adapted = attach(resident, EXPERTS, CPU, seed=0)
    before = [type(module) for module in adapted.modules()]
    set_lora_kernels(resident.base, model_settings(EXPERTS, "qwen3_moe"))
    assert [type(module) for module in adapted.modules()] != before
    clean(resident)
    assert [type(module) for module in adapted.modules()] == before


def test_a_dry_count_has_the_work_of_the_products_but_no_copies_of_weights() -> None:
    model = SHAPE | FAMILIES["qwen3_moe"] | {"model_type": "qwen3_moe", "num_experts": 64}
    counts = {}
    for kernels in ("peft", "grouped"):
        config = replace(
            EXPERTS, precision="bf16_mixed", attention="sdpa", lora_kernels=kernels, seq_len=32
        )
        request = ProbeRequest(
            config=replace(config, micro_batch_size=1), model=model, device="cuda", memory_gib=80.0
        )
        batch = MicroBatch(rows=((32,),), length=32, share=1.0)
        counts[kernels] = dry_probe(replace(request, micro_batches=(batch,)))
    peft, grouped = counts["peft"], counts["grouped"]
    assert grouped.trainable_params == peft.trainable_params
    assert grouped.peak_allocated_gib < peft.peak_allocated_gib

    # Two tokens' worth of experts: base, A and B of both projections, forward and input gradients;
    # A and B have weight gradients as well.
    pairs, hidden, inner, rank = 2 * 32, 32, 24, 8
    base = hidden * 2 * inner + inner * hidden
    adapters = rank * (hidden + 2 * inner) + rank * (inner + hidden)
    layers = 2
    assert grouped.flops["adapted_product"] == layers * 2 * pairs * 2 * (base + adapters)
    assert grouped.flops["grouped_weight_gradient"] == layers * 2 * pairs * adapters


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose train.py has trained adapters on a mixture's experts, and then continued."""
    directory = tmp_path_factory.mktemp("exported")
    shape = SHAPE | FAMILIES["qwen3_moe"] | {"model_type": "qwen3_moe"}
    spec = replace(resolve_model("demo-3m"), config=shape, name="mixture")
    weights = _save_demo(directory / "weights", shape)
    config = replace(EXPERTS, micro_batch_size=2, seq_len=32, optimizer="adamw_torch")
    made = replace(demo(config), model=replace(spec, weights=str(weights)))
    folder = write(export_all(made, ["train"]), directory / "out")
    (directory / "rows.jsonl").write_text('{"text": "a b c a b"}\n' * 8)

    arguments = ("--dataset", "rows.jsonl", "--output-dir", "trained")
    for more in (("--max-steps", "1"), ("--resume",)):
        done = forked(folder, *arguments, *more)
        assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["steps"] == 2
    return directory


def test_an_exported_run_saves_adapters_that_peft_loads_and_merges(exported: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved = json.loads((exported / "trained" / "adapter_config.json").read_text())
    assert set(saved["target_parameters"]) >= {"experts.gate_up_proj", "experts.down_proj"}
    base = AutoModelForCausalLM.from_pretrained(exported / "weights", dtype=torch.float32)
    tokens = torch.tensor([[2, 3, 4, 2, 3]])
    with torch.no_grad():
        first = base(input_ids=tokens).logits
        model = PeftModel.from_pretrained(base, exported / "trained")
        adapted = model(input_ids=tokens).logits
        group_experts(model)
        grouped = model(input_ids=tokens).logits
        restore_experts(model)
        served = model.merge_and_unload()
        merged = served(input_ids=tokens).logits
    assert type(served).__name__ == "Qwen3MoeForCausalLM"
    assert not torch.allclose(adapted, first, atol=1e-6)
    torch.testing.assert_close(grouped, adapted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-6)


def test_a_misspelt_way_to_compute_grouped_products_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setenv(PRODUCT_VARIABLE, grouped_lora.TRITON)
    assert grouped_lora._way(on_gpu) == grouped_lora.TRITON
    monkeypatch.setenv(PRODUCT_VARIABLE, "tritn")
    with pytest.raises(ValueError, match="must be fused, triton or each, not 'tritn'"):
        grouped_lora._way(on_gpu)
    assert grouped_lora._way(torch.zeros(1)) == grouped_lora.EACH
