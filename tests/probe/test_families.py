"""Real probes of small models of 37 families on the CPU: adapters and full fine-tuning, which
learn.

Eight of them are always tried, all with `pytest -m families tests/probe/test_families.py`.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from autotune.core.probe_types import Outcome
from autotune.probe.supervisor import WorkerProber
from tests.helpers.probing import MODEL, request

pytestmark = pytest.mark.probe

HEADS = {"head_dim": 32}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
}
LATENT = {
    **{
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
    },
    **{
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    **{"first_k_dense_replace": 0, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
ALWAYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": HEADS | ALTERNATING,
    "qwen3_moe": HEADS | EXPERTS,
    "gpt2": {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 256},
    "deepseek_v3": LATENT,
    "gpt_oss": HEADS | EXPERTS | ALTERNATING,
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1},
    "falcon_h1": MAMBA | HEADS,
}
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": HEADS,
    "gemma": HEADS,
    "gemma2": HEADS | ALTERNATING,
    "phi": {},
    "phi3": {},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": HEADS,
    "gpt_neox": {},
    "smollm3": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmoe": EXPERTS,
    "granite": {},
    "granitemoe": EXPERTS,
    "glm4": HEADS,
    "cohere": {},
    "cohere2": HEADS | ALTERNATING,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {"n_head": 2, "n_layer": 2},
    "stablelm": {},
    "starcoder2": {},
    "nemotron": {},
    "exaone4": ALTERNATING,
    "ernie4_5": HEADS,
    "arcee": HEADS,
    "helium": HEADS,
    "seed_oss": HEADS,
    "apertus": {},
}
FAMILIES = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.families) for name in OTHERS)]


@pytest.fixture(scope="module")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProber]:
    """One warm worker, which serves every family."""
    with WorkerProber("cpu", tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains(prober: WorkerProber, family: str, method: str) -> None:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = MODEL | tokens | (ALWAYS | OTHERS)[family] | {"model_type": family}
    shape = prober.describe(model)
    assert shape is not None and shape.no_adapters is None
    asked = request(model=model, method=method, attention="sdpa" if shape.sdpa else "eager")
    result = prober.probe(asked, prober.logs / f"{family}-{method}.log")
    assert result.outcome is Outcome.OK, result.reason
    measured = result.measurement
    assert measured is not None and measured.peak_allocated_gib > measured.model_gib > 0
    assert (measured.trainable_params == measured.total_params) is (method == "full")
