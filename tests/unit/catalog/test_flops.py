"""Necessary FLOPs of a token, by hand for each kind of model."""

import pytest

from autotune.catalog import resolve_model
from autotune.catalog.models import _windows, flops_per_token
from tests.unit.catalog.test_models import LLAMA, write_config


def test_flops_of_mistral_by_hand():
    spec = resolve_model("mistral-7b")
    # q, o; k, v; mlp; norms
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096
    multiplied = 32 * layer + 4096 + 32768 * 4096  # final norm, head; the embedding is looked up
    attention = 6 * 1024 * 32 * 128 * 32
    assert spec.flops_per_token("lora", 1024) == 4 * multiplied + attention == 29_260_529_664
    assert spec.flops_per_token("full", 1024) == 6 * multiplied + attention


def test_flops_of_tied_and_learned_position_embeddings():
    gpt2 = resolve_model("gpt2")
    assert gpt2.params is not None
    assert (
        gpt2.flops_per_token("full", 512) == 6 * (gpt2.params - 1024 * 768) + 6 * 512 * 12 * 64 * 12
    )


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral", 12_879_925_248), ("qwen3-30b-a3b", 3_353_032_704)]
)
def test_flops_of_mixtures_count_the_visited_experts(name, active):
    spec = resolve_model(name)
    # `active` is the total that the authors call active
    multiplied = active - spec.vocab_size * spec.hidden_size
    heads = spec.config["num_attention_heads"] * 128
    assert spec.flops_per_token("lora", 100) == 4 * multiplied + 6 * 100 * heads * spec.num_layers


def test_flops_with_sliding_windows():
    window, free = resolve_model("mistral-7b-v0.1"), resolve_model("mistral-7b-v0.2")
    assert window.params == free.params
    assert window.flops_per_token("lora", 4096) == free.flops_per_token("lora", 4096)
    # Sum over positions i of min(i, w), over the length: 4096/2 for the first half of 8192, 4096
    # for the second.
    saved = (8192 / 2 - (4096 / 2 + 4096) / 2) * 12 * 32 * 128 * 32
    assert free.flops_per_token("lora", 8192) - window.flops_per_token("lora", 8192) == saved
    gemma = resolve_model("gemma-2-2b")  # half of its 26 layers
    at_8k, at_4k = (gemma.flops_per_token("lora", seq_len) for seq_len in (8192, 4096))
    assert at_8k - at_4k == 12 * 8 * 256 * (13 * (4096 - 2048) + 13 * (3072 - 2048))


def test_flops_of_an_unknown_family_are_not_guessed(tmp_path):
    spec = resolve_model(str(write_config(tmp_path, LLAMA)))
    assert spec.flops_per_token("lora", 128) is None


def attention(config, seq_len=8192):
    """Of a model without any parameters: 12 FLOPs for each head dimension and token that is met."""
    return flops_per_token(QWEN | config, 64 * 100, "lora", seq_len) / (12 * 4 * 16)


QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
# the first quarter of the tokens have not yet a whole window
FREE, WINDOWED = 8192 / 2, 2048 / 2 / 4 + 2048 * 3 / 4


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        ({}, 0),
        ({"sliding_window": 2048}, 0),  # which Qwen does not use by default
        ({"sliding_window": 2048, "use_sliding_window": True, "max_window_layers": 7}, 3),
        (
            {
                "sliding_window": 2048,
                "use_sliding_window": True,
                "max_window_layers": 7,
                "model_type": "mistral",
            },
            10,
        ),
        ({"sliding_window": 2048, "model_type": "mistral", "use_sliding_window": False}, 0),
        (
            {
                "sliding_window": 2048,
                "model_type": "llama",
                "layer_types": ["sliding_attention"] * 3 + ["x"] * 7,
            },
            3,
        ),
    ],
    ids=str,
)
def test_flops_of_layers_with_windows(config, windowed):
    assert attention(config) == pytest.approx(windowed * WINDOWED + (10 - windowed) * FREE)


def test_flops_of_a_window_longer_than_the_sequence():
    assert attention({"sliding_window": 9000, "model_type": "mistral"}) == 10 * FREE
    assert attention({"model_type": "mistral"}, seq_len=100) == 10 * 50


@pytest.mark.parametrize(
    ("keys", "mixtures"),
    [
        ({}, 6),
        ({"decoder_sparse_step": 2}, 3),
        ({"mlp_only_layers": [0, 1]}, 4),
        ({"decoder_sparse_step": 4}, 1),
        # those are dense in any case
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 2, 4]}, 3),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 2),
    ],
    ids=str,
)
def test_flops_of_layers_with_experts(keys, mixtures):
    """Of eight experts a token visits two; the rest, three matrices each, are not multiplied."""
    experts = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    config = QWEN | experts | {"moe_intermediate_size": 32} | keys
    idle = mixtures * (8 - 2) * 3 * 64 * 32
    attended = 12 * 6 * 50 * 64
    assert flops_per_token(config, 10**7, "full", 100) == 6 * (10**7 - 6400 - idle) + attended


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 3}, [4096, None, 4096]),
        ({"model_type": "gemma2", "n_layer": 2, "sliding_window": 512}, [512, None]),
        ({"model_type": "mistral", "num_hidden_layers": 2}, [None, None]),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 64}, [64, 64]),
        (
            {
                "model_type": "qwen3",
                "num_hidden_layers": 30,
                "sliding_window": 64,
                "use_sliding_window": True,
            },
            [None] * 28 + [64] * 2,
        ),
    ],
    ids=str,
)
def test_the_windows_of_layers_where_a_config_leaves_out_what_is_usual(config, windows):
    assert _windows(config) == windows


def test_the_width_of_a_head_is_rounded_down_as_in_transformers():
    config = QWEN | {"hidden_size": 67, "num_hidden_layers": 1}
    assert flops_per_token(config, 100 * 67, "full", 10) == 12 * 5 * 4 * 16
    assert flops_per_token(config | {"head_dim": 20}, 100 * 67, "full", 10) == 12 * 5 * 4 * 20
