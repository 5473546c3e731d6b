"""The formula for long rows agrees with what dry probes counted."""

import statistics
from dataclasses import replace
from pathlib import Path

from autotune.catalog import resolve_device, resolve_model
from autotune.planning.longest import Longest
from autotune.prediction import long_rows
from autotune.prediction.long_rows import NEEDED, long_row_breakdown
from autotune.prediction.memory_formula import MemoryBreakdown

ROOT = Path(__file__).parents[3]
# Model, method, tokens, and the peak of allocated memory in GiB that a dry probe counted, with
# torch 2.13.0 and transformers 5.23.0
COUNTED = [
    ("llama-3.1-8b", "lora", 16_384, 17.7602),
    ("llama-3.1-8b", "lora", 32_768, 18.9577),
    ("llama-3.1-8b", "lora", 55_296, 20.7421),
    ("llama-3.1-8b", "lora", 65_536, 21.6871),
    ("llama-3.1-8b", "lora", 131_072, 27.735),
    ("llama-3.1-8b", "qlora", 65_536, 12.0407),
    ("llama-3.1-8b", "qlora", 131_072, 18.0885),
    ("llama-3.1-8b", "qlora", 158_720, 20.64),
    ("llama-3.2-1b", "full", 16_384, 14.5393),
    ("llama-3.2-1b", "full", 65_536, 17.4756),
    ("llama-3.2-1b", "full", 131_072, 21.3906),
    ("llama-3.2-1b", "lora", 8_192, 4.0933),
    ("llama-3.2-1b", "lora", 16_384, 4.2206),
    ("llama-3.2-1b", "lora", 32_768, 4.4752),
    ("llama-3.2-3b", "full", 65_536, 38.7282),
    ("llama-3.2-3b", "full", 131_072, 44.6725),
    ("mistral-7b", "qlora", 8_192, 5.824),
    ("mistral-7b", "qlora", 65_536, 10.5837),
    ("mistral-7b", "qlora", 131_072, 16.6315),
    ("phi-3.5-mini", "lora", 65_536, 13.2163),
    ("phi-3.5-mini", "lora", 131_072, 18.8814),
    ("qwen2.5-0.5b", "full", 65_536, 7.5678),
    ("qwen2.5-0.5b", "full", 131_072, 9.1121),
    ("qwen2.5-1.5b", "full", 65_536, 19.2395),
    ("qwen2.5-1.5b", "full", 131_072, 22.1809),
    ("qwen2.5-7b", "lora", 65_536, 19.9516),
    ("qwen2.5-7b", "lora", 131_072, 25.06),
    ("qwen2.5-7b", "qlora", 8_192, 7.6571),
    ("qwen2.5-7b", "qlora", 16_384, 7.8801),
    ("qwen3-0.6b", "full", 65_536, 10.3683),
    ("qwen3-0.6b", "full", 131_072, 13.8732),
    ("qwen3-0.6b", "lora", 65_536, 4.7366),
    ("qwen3-0.6b", "lora", 131_072, 8.1516),
    ("qwen3-4b", "lora", 16_384, 9.9939),
    ("qwen3-4b", "lora", 131_072, 20.2638),
    ("qwen3-8b", "lora", 65_536, 22.6368),
    ("qwen3-8b", "lora", 131_072, 29.3097),
]


def by_formula(model: str, method: str, tokens: int) -> MemoryBreakdown | None:
    query = Longest(model=resolve_model(model), device=resolve_device("h100"), limit_gib=70.0)
    return long_row_breakdown(query.model, query.config(method, tokens))


def test_the_formula_agrees_with_the_counts() -> None:
    errors = {}
    for model, method, tokens, counted in COUNTED:
        found = by_formula(model, method, tokens)
        assert found is not None
        errors[model, method, tokens] = abs(found.peak_gib / counted - 1)
    assert max(errors.values()) < 0.027 and statistics.median(errors.values()) < 0.0006
    others = [error for (model, *_), error in errors.items() if model != "qwen2.5-0.5b"]
    assert max(others) < 0.013


def test_other_families_and_knobs_have_no_formula() -> None:
    assert by_formula("gemma-2-9b", "lora", 65_536) is None
    assert by_formula("phi-3.5-mini", "full", 65_536) is None
    query = Longest(model=resolve_model("llama-3.1-8b"), device=resolve_device("h100"), limit_gib=1)
    config = query.config("lora", 65_536)
    assert {name: getattr(config, name) for name in NEEDED} == NEEDED
    assert long_row_breakdown(query.model, replace(config, tiling="none")) is None
    assert long_row_breakdown(query.model, replace(config, attention="sdpa_cudnn")) is None


def test_tiles_have_the_size_of_the_trainer() -> None:
    tiles = (ROOT / "autotune" / "trainer" / "tiles.py").read_text(encoding="utf-8")
    assert f"\nTILE_TOKENS = {long_rows.TILE_TOKENS}\n" in tiles
