"""A dry probe counts what a step holds: to the byte what it holds on a CPU, and what an H200 was measured to hold."""

from typing import Any

import pytest
import torch

from autotune.catalog import resolve_model
from autotune.core.probe_types import DryCount, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.dry import META, CountedStep, dry_probe
from autotune.probe.meta_device import cuda_on_meta
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.probe,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT 0.21 asks it
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),  # of GPT-2's Conv1D
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
    ),  # experts, which are wrapped
]

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# A few families that differ in kind: dense, mixtures, hybrid, state-space, learned positions, Conv1D.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2},
    "gpt_neox": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "gpt_oss": EXPERTS | {"head_dim": 16},
}
NO_ADAPTERS = {"mamba2", "falcon_h1"}  # PEFT refuses adapters on every linear layer
EAGER = {"gpt_oss", "mamba2"}


MISTRAL_COMPILED = {
    "forward": 2.801533,
    "backward": 3.020221,
    "backward_layers": 2.581563,
    "backward_inputs": 1.459651,
    "optimizer": 1.394709,
}


def request(family: str, depth: int | None = None, **knobs: Any) -> ProbeRequest:
    model = TINY | TOKENS | FAMILIES[family] | {"model_type": family, "num_hidden_layers": 2}
    if family in EAGER:
        knobs = {"attention": "eager"} | knobs
    config = TrainConfig(**({"micro_batch_size": 2, "seq_len": 64} | knobs))
    return ProbeRequest(config=config, model=model, memory_gib=1.0, depth=depth)


def counted_on(device: str, wanted: ProbeRequest) -> DryCount:
    """The count without what kernels of CUDA allocate, on this device."""
    if device == "cpu":
        return CountedStep(wanted, torch.device("cpu"), lambda func, args: 0).count()
    with cuda_on_meta(packed=False):
        return CountedStep(wanted, META, lambda func, args: 0).count()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpointing": "none", "precision": "fp32"},
        {"checkpointing": "full", "precision": "bf16_pure"},
        {"method": "full", "checkpointing": "every_2", "precision": "fp32"},
    ],
    ids=["lora", "pure", "full"],
)
def test_the_count_is_that_of_the_same_step_on_a_cpu(family: str, knobs: dict[str, Any]) -> None:
    wanted = request(family, attention="eager", **knobs)
    dry, real = counted_on("meta", wanted), counted_on("cpu", wanted)
    # The gradients of norms on a CPU take temporary tensors that CUDA does not.
    allowed = 4096 / 2**30 if knobs["precision"] == "bf16_pure" else 0.0
    assert dry.segment_peak_gib == pytest.approx(real.segment_peak_gib, abs=allowed, rel=0)
    for name in ("model_gib", "adapters_gib", "gradients_gib", "optimizer_gib", "trainable_params", "flops"):
        assert getattr(dry, name) == getattr(real, name), name


# GiB that real probes of two layers held on an H200 (`benchmarks/data/depth_h200.jsonl`).
MEASURED: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    (
        "mistral-7b",
        {"micro_batch_size": 1, "seq_len": 512, "checkpointing": "none"},
        {"forward": 1.786798, "backward": 1.813772, "backward_layers": 1.665332, "optimizer": 1.414133},
    ),
    (
        "mistral-7b",
        {"method": "full", "micro_batch_size": 2, "seq_len": 1024, "precision": "bf16_pure"},
        {
            "forward": 6.032014,
            "backward": 6.156983,
            "backward_layers": 5.907236,
            "backward_inputs": 5.578355,
            "optimizer": 5.312728,
        },
    ),
    (
        "mistral-7b",
        {
            "method": "full",
            "micro_batch_size": 1,
            "precision": "bf16_pure",
            "checkpointing": "none",
            "optimizer": "adamw_8bit",
        },
        {
            "forward": 5.494083,
            "backward": 5.556575,
            "backward_layers": 5.294853,
            "backward_inputs": 5.024572,
            "optimizer": 4.766758,
        },
    ),
    (
        "llama-3.1-8b",
        {"micro_batch_size": 4, "lora_rank": 64, "checkpointing": "every_2"},
        {
            "forward": 8.858206,
            "backward": 9.795644,
            "backward_layers": 4.34641,
            "backward_inputs": 3.050961,
            "optimizer": 2.98846,
        },
    ),
    (
        "phi-3-mini",
        {"micro_batch_size": 2, "quantization": "nf4", "double_quant": True, "checkpointing": "none"},
        {"forward": 1.744131, "backward": 1.854604, "backward_layers": 1.237897, "optimizer": 0.561815},
    ),
    (
        "mixtral-8x7b",
        {"micro_batch_size": 4, "quantization": "nf4"},
        {
            "forward": 9.327747,
            "backward": 7.770351,
            "backward_layers": 11.281075,
            "backward_inputs": 6.242496,
            "optimizer": 6.179995,
        },
    ),
    (
        "gemma-2-9b",
        {"micro_batch_size": 1, "seq_len": 4096, "optimizer": "adamw_8bit", "attention": "eager"},
        {
            "forward": 14.460747,
            "backward": 16.381706,
            "backward_layers": 7.413887,
            "backward_inputs": 2.588678,
            "optimizer": 2.533989,
        },
    ),
]


@pytest.mark.parametrize(("model", "knobs", "measured"), MEASURED)
def test_the_count_is_what_an_h200_was_measured_to_hold(
    model: str, knobs: dict[str, Any], measured: dict[str, float]
) -> None:
    config = TrainConfig(**({"seq_len": 1024} | knobs))
    dry = dry_probe(ProbeRequest(config=config, model=resolve_model(model).config, memory_gib=100.0, depth=2))
    assert dry.segment_peak_gib == pytest.approx(measured, rel=1e-4)
    assert dry.peak_allocated_gib == pytest.approx(max(measured.values()), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpointing": "none"},
        {"quantization": "nf4", "loss": "chunked"},
        {"method": "full", "precision": "bf16_pure"},
        {"method": "full", "precision": "bf16_mixed"},
    ],
    ids=["lora", "qlora", "full", "mixed"],
)
def test_every_kind_of_model_is_counted(family: str, knobs: dict[str, Any]) -> None:
    wanted = request(family, **knobs)
    if family in NO_ADAPTERS and wanted.config.method == "lora":
        with pytest.raises(ValueError, match="incompatible with Mamba"):
            dry_probe(wanted)
        return
    dry = dry_probe(wanted)
    held = dry.model_gib + dry.adapters_gib + dry.optimizer_gib
    assert 0 < held < dry.peak_allocated_gib < held + 0.2
    assert sum(dry.flops.values()) > 0
    assert dry.moved_bytes["product"] > 0


def test_what_a_compiled_layer_keeps_is_what_an_h200_was_measured_to_hold() -> None:
    config = TrainConfig(
        micro_batch_size=4, seq_len=1024, precision="bf16_pure", checkpointing="full", compile="per_layer"
    )
    dry = dry_probe(ProbeRequest(config=config, model=resolve_model("mistral-7b").config, memory_gib=100.0, depth=2))
    gib = dry.segment_peak_gib
    # Inductor orders and reuses the temporary tensors of a layer's backward pass in its own way.
    assert gib.pop("backward_layers") == pytest.approx(MISTRAL_COMPILED.pop("backward_layers"), rel=0.02)
    assert gib == pytest.approx(MISTRAL_COMPILED, rel=1e-4)


def test_only_what_grows_with_depth_grows() -> None:
    one, two, whole = (dry_probe(request("llama", depth=depth)) for depth in (1, 2, None))
    assert one.peak_allocated_gib < two.peak_allocated_gib == whole.peak_allocated_gib


def test_a_single_micro_batch_has_no_gradients_in_its_forward_pass() -> None:
    wanted = request("llama", method="full", precision="bf16_pure")
    single = ProbeRequest(config=wanted.config, model=wanted.model, memory_gib=1.0, micro_steps=1)
    accumulated, alone = dry_probe(wanted), dry_probe(single)
    batch = 2 * 2 * 64 * 8 / 2**30  # token ids and labels of the other micro batch
    difference = accumulated.segment_peak_gib["forward"] - alone.segment_peak_gib["forward"]
    assert difference == pytest.approx(accumulated.gradients_gib + batch, rel=1e-6)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_what_cannot_be_counted_is_refused(quantization: str) -> None:
    with pytest.raises(ValueError, match="on a GPU alone"):
        dry_probe(request("llama", quantization=quantization))
