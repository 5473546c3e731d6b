"""The formula of memory, held against whole models measured on an H200 and against the autograd graph itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import list_models, resolve_model
from autotune.core.probe_types import Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.prediction.memory_formula import CONTEXT_GIB, ERROR, NF4_STATISTICS, Sizes, kept_factors, memory_breakdown

ROOT = Path(__file__).parents[3]
SMALL = {"micro_batch_size": 2, "seq_len": 1024, "checkpointing": "none"}
COMPILED = {"compile": "per_layer", "precision": "bf16_pure"}


def estimate(model: str = "mistral-7b", micro_steps: int = 2, **knobs: Any) -> Any:
    found = memory_breakdown(resolve_model(model), TrainConfig(**knobs), micro_steps)
    assert found is not None
    return found


# (model, knobs, GiB allocated at the peak), as `benchmarks/depth_extrapolation.py` and `levers.py` measured them.
MEASURED: list[tuple[str, dict[str, Any], float]] = [
    ("mistral-7b", {"micro_batch_size": 1, "seq_len": 512, "checkpointing": "none"}, 17.7718),
    ("mistral-7b", SMALL | COMPILED, 23.18),
    ("mistral-7b", {"micro_batch_size": 4, "seq_len": 2048, "loss": "chunked"}, 18.820),
    ("mistral-7b", {"micro_batch_size": 4, "seq_len": 2048, "kernels": "liger"}, 19.252),
    ("mistral-7b", SMALL | {"method": "full", "precision": "bf16_pure", "checkpointing": "full"}, 55.378),
    ("llama-3.1-8b", SMALL, 31.931),
    ("llama-3.1-8b", {"micro_batch_size": 1, "seq_len": 4096, "optimizer": "adamw_8bit"}, 22.348),
    ("llama-3.1-8b", {"micro_batch_size": 4, "seq_len": 1024, "lora_rank": 64, "checkpointing": "every_2"}, 37.424),
    ("gemma-2-9b", SMALL | {"attention": "eager"}, 54.818),
    ("phi-3-mini", SMALL | COMPILED, 14.891),
]


@pytest.mark.parametrize(("model", "knobs", "gib"), MEASURED, ids=str)
def test_peaks_that_were_measured(model: str, knobs: dict[str, Any], gib: float) -> None:
    assert estimate(model, **knobs).peak_gib == pytest.approx(gib, rel=0.006)


def test_the_context_is_the_largest_that_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "depth_extrapolation.json").read_text())["rows"]
    assert pytest.approx(max(max(row["context_gib"]) for row in rows if "context_gib" in row), abs=0.005) == CONTEXT_GIB


def test_the_terms_are_those_of_the_whole_model() -> None:
    found = estimate(**SMALL)
    assert found.weights == pytest.approx(13.5005, abs=1e-4)
    assert found.adapters == found.gradients == pytest.approx(0.15625)
    assert found.optimizer == pytest.approx(0.3125)
    assert sum(found.terms().values()) == pytest.approx(found.peak_reserved_gib)
    assert found.phase is Phase.BACKWARD
    assert 0 < ERROR < 0.1 and found.reserved < 0.1 * found.peak_gib


def test_a_4_bit_base_holds_its_statistics_once() -> None:
    sizes = Sizes.of(resolve_model("mistral-7b"))
    assert sizes is not None
    for double in (False, True):
        base = estimate(quantization="nf4", double_quant=double).weights
        rest = 2 * (sizes.params - sizes.linear_params)
        assert base * GIB == pytest.approx(sizes.linear_params * (0.5 + NF4_STATISTICS[double]) + rest)
    assert estimate(quantization="nf4").weights == pytest.approx(4.1568, abs=2e-4)  # as `weigh` counted it


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"checkpointing": "none"}, {"checkpointing": "every_2"}),
        ({"checkpointing": "every_2"}, {"checkpointing": "full"}),
        ({"loss": "full"}, {"loss": "chunked"}),
        ({"lora_rank": 64}, {"lora_rank": 8}),
        ({"precision": "bf16_mixed"}, {"precision": "bf16_pure"}),
        ({"optimizer": "adamw_torch_fused"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": "adamw_8bit"}, {"optimizer": "lion_8bit"}),
        ({"quantization": "none"}, {"quantization": "nf4"}),
        ({"method": "full"}, {"method": "lora"}),
        ({"attention": "eager"}, {"attention": "sdpa"}),
        ({"seq_len": 4096}, {"seq_len": 512}),
    ],
    ids=str,
)
def test_what_needs_more(more: dict[str, Any], less: dict[str, Any]) -> None:
    for model in ("mistral-7b", "qwen3-8b", "phi-3-mini"):
        shared = {"micro_batch_size": 4, "seq_len": 2048, "checkpointing": "none"}
        assert estimate(model, **shared | more).peak_gib > estimate(model, **shared | less).peak_gib


def test_no_gradients_wait_in_a_step_of_one_micro_batch() -> None:
    full = {"method": "full", "precision": "bf16_pure", "micro_batch_size": 1, "seq_len": 8192}
    assert estimate(micro_steps=1, **full).peak_gib < estimate(micro_steps=2, **full).peak_gib - 0.5


def test_every_model_of_a_known_family_has_its_parameters() -> None:
    """What the sizes add up to is what was published, norms and biases aside."""
    known = [model for model in list_models() if model.config["model_type"] in kept_factors("eager")]
    assert len(known) >= 40
    for model in known:
        sizes = Sizes.of(model)
        assert sizes is not None and model.params is not None
        counted = sizes.linear_params + sizes.embedding * (1 if sizes.tied else 2)
        assert counted == pytest.approx(model.params, rel=0.003), model.name


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt2", "pythia-410m"])
def test_a_family_that_nobody_looked_at_is_unknown(name: str) -> None:
    assert Sizes.of(resolve_model(name)) is None and memory_breakdown(resolve_model(name), TrainConfig()) is None


def test_an_adamw_that_is_not_fused_needs_room_for_a_root() -> None:
    full = {"method": "full", "precision": "bf16_pure", "micro_batch_size": 1, "seq_len": 512}
    apart = estimate(optimizer="adamw_torch", **full)
    assert apart.phase is Phase.OPTIMIZER
    assert apart.peak_gib == pytest.approx(estimate(**full).peak_gib + apart.weights, abs=0.5)


@pytest.mark.parametrize(("model", "repeated"), [("mistral-7b", 2 * (4096 - 1024) * 2), ("phi-3-mini", 0)])
def test_packed_rows_keep_a_mask(model: str, repeated: int) -> None:
    """Of a bf16 for each pair of tokens; and keys and values in bf16 for each query head, where these are fewer."""
    rows = {"micro_batch_size": 1, "seq_len": 8192, "checkpointing": "none"}
    more = estimate(model, packing=True, **rows).peak_gib - estimate(model, **rows).peak_gib
    assert more * GIB == pytest.approx(32 * 8192 * (2 * 8192 + repeated))


UNKNOWN = [{"quantization": "int8"}, {"dora": True}, {"checkpointing": "offload"}, {"precision": "fp32"}]


@pytest.mark.parametrize("knobs", UNKNOWN, ids=str)
def test_a_way_that_nobody_looked_at_is_unknown(knobs: dict[str, Any]) -> None:
    assert memory_breakdown(resolve_model("mistral-7b"), TrainConfig(**knobs)) is None


@pytest.mark.parametrize("value", [{}, "32", 0, -1, True, 10**400, None], ids=repr)
@pytest.mark.parametrize("key", ["intermediate_size", "num_attention_heads"])
def test_a_config_without_its_sizes_has_no_formula(key: str, value: Any) -> None:
    model = resolve_model("mistral-7b")
    assert Sizes.of(replace(model, config=model.config | {key: value}, params=None)) is None


def test_a_model_that_is_not_catalogued_is_counted() -> None:
    model = replace(resolve_model("mistral-7b"), params=None)
    found = memory_breakdown(model, TrainConfig(**SMALL))
    assert found is not None and found.peak_gib == pytest.approx(estimate(**SMALL).peak_gib, rel=0.001)
