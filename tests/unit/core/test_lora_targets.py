"""The names of the modules that get adapters."""

import pytest

from autotune.core.lora_targets import saved_modules, target_modules


@pytest.mark.parametrize(
    ("model_type", "targets", "modules"),
    [
        ("llama", "all-linear", None),
        ("llama", "attention", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("a type of tomorrow", "q_v", ["q_proj", "v_proj"]),
        ("gpt2", "attention", ["c_attn", "attn.c_proj"]),
        ("phi3", "q_v", ["qkv_proj"]),
        ("mamba2", "attention", []),
        ("mamba2", "all-linear", ["in_proj"]),
        ("nemotron_h", "q_v", ["q_proj", "v_proj"]),
        ("gpt2", "q_proj,up_proj", ["q_proj", "up_proj"]),
    ],
)
def test_the_modules_of_a_choice(model_type: str, targets: str, modules: list[str] | None) -> None:
    assert target_modules(model_type, targets) == modules


@pytest.mark.parametrize(
    ("model_type", "saved", "modules"),
    [
        ("llama", "none", None),
        ("llama", "embedding", ["embed_tokens"]),
        ("gpt2", "head", ["lm_head"]),
        ("gpt_neox", "embedding_and_head", ["embed_in", "lm_head"]),
    ],
)
def test_the_modules_that_are_trained_whole(
    model_type: str, saved: str, modules: list[str] | None
) -> None:
    assert saved_modules(model_type, saved) == modules
