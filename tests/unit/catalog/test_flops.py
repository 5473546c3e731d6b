"""Necessary FLOPs of a token, by hand for each kind of model."""

import pytest

from autotune.catalog import resolve_model
from tests.unit.catalog.test_models import LLAMA, write_config


def test_flops_of_mistral_by_hand():
    spec = resolve_model("mistral-7b")
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096  # q, o; k, v; mlp; norms
    multiplied = 32 * layer + 4096 + 32768 * 4096  # final norm, head; the embedding is looked up
    attention = 6 * 1024 * 32 * 128 * 32
    assert spec.flops_per_token("lora", 1024) == 4 * multiplied + attention == 29_260_529_664
    assert spec.flops_per_token("full", 1024) == 6 * multiplied + attention


def test_flops_of_tied_and_learned_position_embeddings():
    gpt2 = resolve_model("gpt2")
    assert gpt2.params is not None
    assert gpt2.flops_per_token("full", 512) == 6 * (gpt2.params - 1024 * 768) + 6 * 512 * 12 * 64 * 12


@pytest.mark.parametrize(("name", "active"), [("mixtral", 12_879_925_248), ("qwen3-30b-a3b", 3_353_032_704)])
def test_flops_of_mixtures_count_the_visited_experts(name, active):
    spec = resolve_model(name)
    multiplied = active - spec.vocab_size * spec.hidden_size  # `active` is the total that the authors call active
    heads = spec.config["num_attention_heads"] * 128
    assert spec.flops_per_token("lora", 100) == 4 * multiplied + 6 * 100 * heads * spec.num_layers


def test_flops_with_sliding_windows():
    window, free = resolve_model("mistral-7b-v0.1"), resolve_model("mistral-7b-v0.2")
    assert window.params == free.params
    assert window.flops_per_token("lora", 4096) == free.flops_per_token("lora", 4096)
    # Sum over positions i of min(i, w), over the length: 4096/2 for the first half of 8192, 4096 for the second.
    saved = (8192 / 2 - (4096 / 2 + 4096) / 2) * 12 * 32 * 128 * 32
    assert free.flops_per_token("lora", 8192) - window.flops_per_token("lora", 8192) == saved
    gemma = resolve_model("gemma-2-2b")  # half of its 26 layers
    at_8k, at_4k = (gemma.flops_per_token("lora", seq_len) for seq_len in (8192, 4096))
    assert at_8k - at_4k == 12 * 8 * 256 * (13 * (4096 - 2048) + 13 * (3072 - 2048))


def test_flops_of_an_unknown_family_are_not_guessed(tmp_path):
    spec = resolve_model(str(write_config(tmp_path, LLAMA)))
    assert spec.flops_per_token("lora", 128) is None
