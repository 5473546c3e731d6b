"""The names of the modules that get adapters."""

import pytest

from autotune.core.lora_targets import target_modules


@pytest.mark.parametrize(
    ("model_type", "targets", "modules"),
    [
        ("llama", "all-linear", None),
        ("llama", "attention", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("a type of tomorrow", "q_v", ["q_proj", "v_proj"]),
        ("gpt2", "attention", ["c_attn", "attn.c_proj"]),
        ("phi3", "q_v", ["qkv_proj"]),
        ("mamba2", "attention", []),
        ("gpt2", "q_proj,up_proj", ["q_proj", "up_proj"]),
    ],
)
def test_the_modules_of_a_choice(model_type: str, targets: str, modules: list[str] | None) -> None:
    assert target_modules(model_type, targets) == modules
