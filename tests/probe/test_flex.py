"""FlexAttention: packed examples, autocast, and what a dry probe counts."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.integrations import flex_attention as integration
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    sliding_window_causal_mask_function,
)

from autotune.core.probe_types import DryCount, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.counting import dry_probe
from autotune.dry.flex import mean_keys
from autotune.probe.model_settings import model_settings
from autotune.probe.model_shape import describe
from autotune.trainer.model_builder import build, config_of
from autotune.trainer.patches import FLEX_ATTENTION, register_attentions
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.probe,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    # Dynamo reads it
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]
HEADS, KEY_HEADS, SIZE, LAYERS = 4, 2, 16, 4
SINKS: dict[str, Any] = TINY | {
    "model_type": "gpt_oss",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": SIZE,
    "sliding_window": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def counted(seq_len: int = 1024, model: dict[str, Any] = SINKS, **knobs: Any) -> DryCount:
    values = {"micro_batch_size": 1, "attention": FLEX_ATTENTION, "checkpointing": "none"} | knobs
    config = TrainConfig(seq_len=seq_len, lora_targets="attention", **values)
    return dry_probe(ProbeRequest(config=config, model=model, memory_gib=1.0))


@pytest.mark.parametrize("length", [128, 1000, 4096])
@pytest.mark.parametrize(
    "mask",
    [
        causal_mask_function,
        sliding_window_causal_mask_function(128),
        sliding_window_causal_mask_function(700),
        and_masks(causal_mask_function, chunked_overlay(512, torch.zeros(1, dtype=torch.long))),
    ],
    ids=["causal", "window", "wide window", "chunks"],
)
def test_the_keys_of_a_query_are_those_of_torchs_block_mask(mask: Any, length: int) -> None:
    blocks = create_block_mask(mask, 1, None, length, length, device="cpu")
    partly = blocks.kv_num_blocks.sum()
    wholly = 0 if blocks.full_kv_num_blocks is None else blocks.full_kv_num_blocks.sum()
    rows = -(-length // 128)
    expected = min(128 * float(partly + wholly) / rows, length)
    assert mean_keys(mask, length, length) == pytest.approx(expected, abs=1)


def test_long_rows_are_sampled() -> None:
    assert mean_keys(causal_mask_function, 131_072, 131_072) == pytest.approx(65_600, rel=0.02)
    window = sliding_window_causal_mask_function(128)
    assert mean_keys(window, 131_072, 131_072) == 256


def test_a_block_is_visible_if_only_its_first_or_its_last_query_sees_a_key_of_it() -> None:
    """Of 8 x 8 blocks, 36 are on or below the diagonal, and 36 on or above it."""

    def far_before(row: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query - 127

    def far_after(row: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key >= query + 127

    assert mean_keys(far_before, 1024, 1024) == mean_keys(far_after, 1024, 1024) == 36 * 128 // 8


@pytest.mark.parametrize("compiled", ["none", "per_layer"])
def test_no_scores_are_counted(compiled: str) -> None:
    """Twice the tokens need twice the memory above the weights, and eager attention needs more."""
    short, long = (counted(length, compile=compiled) for length in (2048, 4096))
    weights = short.model_gib + short.adapters_gib + short.optimizer_gib + short.gradients_gib
    workspace = 64 / 1024
    of_short = short.peak_allocated_gib - weights - workspace
    of_long = long.peak_allocated_gib - weights - workspace
    assert of_long / of_short == pytest.approx(2.0, rel=0.03)

    eager = counted(4096, attention="eager", compile=compiled)
    # Each layer keeps at least the probabilities of all heads in 16 bits.
    scores = LAYERS * HEADS * 4096**2 * 2 / 2**30
    assert eager.peak_allocated_gib > long.peak_allocated_gib + scores


COUNTED: list[dict[str, Any]] = [
    {},
    {"packing": True},
    {"checkpointing": "full"},
    {"precision": "bf16_pure"},
    {"method": "full"},
]
MASKED = {"padding": "masked", "micro_batch_size": 2}  # such rows are not compiled


@pytest.mark.parametrize(
    ("knobs", "compiled"),
    [
        *((knobs, compiled) for knobs in COUNTED for compiled in ("none", "per_layer")),
        (MASKED, "none"),
    ],
    ids=str,
)
def test_products_are_counted_in_visible_blocks(knobs: dict[str, Any], compiled: str) -> None:
    count = counted(compile=compiled, **knobs)
    keys = LAYERS // 2 * (240 + 576)  # half of the layers see windows of 128 tokens
    products = 2 * knobs.get("micro_batch_size", 1) * HEADS * 1024 * keys * SIZE
    passes = 2 if knobs.get("checkpointing") == "full" else 1
    assert count.flops["flex_attention"] == passes * 2 * products
    assert count.flops["flex_attention_backward"] == 7 * products
    assert count.attention_flops == (2 * passes + 7) * products
    assert not any("bmm" in name for name in count.flops)


def test_a_layer_keeps_what_it_keeps_with_flash_attention() -> None:
    """Both kernels keep queries, keys, values, outputs, and a 32-bit sum for each query."""
    model = SINKS | {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "layer_types": None}

    def kept(attention: str) -> float:
        peaks = [
            counted(
                model=model | {"num_hidden_layers": depth},
                precision="bf16_pure",
                attention=attention,
            ).segment_peak_gib["forward"]
            for depth in (2, 4)
        ]
        return (peaks[1] - peaks[0]) / 2

    assert kept(FLEX_ATTENTION) == pytest.approx(kept("sdpa"), rel=0.01)


# --- on a CPU, where torch has no kernel for gradients and transformers refuses sinks


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute FlexAttention without kernels, and block masks without the compiler."""
    register_attentions()

    def attend(query: Any, key: Any, value: Any, training: bool = False, **kwargs: Any) -> Any:
        return flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", attend)
    monkeypatch.setattr(
        "transformers.masking_utils.create_block_mask",
        lambda **kwargs: create_block_mask(**kwargs | {"_compile": False}),
    )


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_outputs_are_those_of_eager_attention(family: str) -> None:
    """Gemma 2 caps its scores, and both have windows. A window is shorter than the rows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {key: value for key, value in SINKS.items() if key != "model_type"}
    config = AutoConfig.for_model(family, **shape | {"sliding_window": 8}, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = torch.randint(3, 128, (2, 40))
    mask = torch.ones_like(tokens)
    mask[1, 30:] = 0
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=mask).logits
        model.set_attn_implementation(FLEX_ATTENTION)
        found = model(input_ids=tokens, attention_mask=mask).logits
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rounded[mask == 1].float(), expected[mask == 1], atol=0.1, rtol=0.1)


def test_describe_says_who_has_flex_attention() -> None:
    shapes = {
        family: describe(SINKS | {"model_type": family}) for family in ("gpt_oss", "llama", "bloom")
    }
    assert {family: (one.sdpa, one.flex) for family, one in shapes.items()} == {
        "gpt_oss": (False, True),
        "llama": (True, True),
        "bloom": (False, False),
    }


@pytest.mark.usefixtures("uncompiled")
def test_the_masks_of_gpt_oss_separate_packed_examples() -> None:
    """The masks of all layers; on a CPU, transformers refuses the attention sinks themselves."""
    config = TrainConfig(precision="fp32", attention="eager")
    model = build(config_of(SINKS), model_settings(config, "gpt_oss"), torch.device("cpu"))
    model.set_attn_implementation(FLEX_ATTENTION)
    seen: list[Any] = []

    def watch(layer: Any, args: Any, given: dict[str, Any]) -> None:
        seen.append(given["attention_mask"])

    for layer in model.model.layers:
        layer.register_forward_pre_hook(watch, with_kwargs=True)
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    positions = torch.tensor([[*range(200), *range(56)]])
    model(input_ids=torch.ones_like(positions), position_ids=positions)

    assert len(seen) == LAYERS
    first, query = torch.tensor(0), torch.tensor(210)
    for mask in seen:
        visible = [
            key for key in range(256) if mask.mask_mod(first, first, query, torch.tensor(key))
        ]
        assert visible == list(range(200, 211))
