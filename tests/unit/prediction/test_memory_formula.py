"""The formula of memory, held against whole models measured on an H200 and against the autograd
graph itself.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import list_models, resolve_model
from autotune.catalog.model_sizes import FAMILIES, Sizes
from autotune.core.objective import Objective
from autotune.core.probe_types import DryCount, Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.prediction.estimate import Evaluation
from autotune.prediction.memory_formula import (
    CONTEXT_GIB,
    ERROR,
    EVALUATES,
    NF4_STATISTICS,
    SEGMENTS_ERROR,
    WORKSPACE,
    counted_breakdown,
    in_fixed_segments,
    joined_bytes,
    kept_bytes,
    kept_factors,
    live_logits,
    memory_breakdown,
    moving_bytes,
    rows_of,
    step_moments,
    unsupported,
)
from autotune.trainer.settings import chunk_tokens
from tests.unit.prediction.test_sharded_memory import truncated

ROOT = Path(__file__).parents[3]
SMALL = {"micro_batch_size": 2, "seq_len": 1024, "checkpointing": "none"}
COMPILED = {"compile": "per_layer", "precision": "bf16_pure"}


def estimate(model: str = "mistral-7b", micro_steps: int = 2, **knobs: Any) -> Any:
    found = memory_breakdown(resolve_model(model), TrainConfig(**knobs), micro_steps)
    assert found is not None
    return found


# (model, knobs, GiB allocated at the peak), as `benchmarks/depth_extrapolation.py` and `levers.py`
# measured them.
MEASURED: list[tuple[str, dict[str, Any], float]] = [
    ("mistral-7b", {"micro_batch_size": 1, "seq_len": 512, "checkpointing": "none"}, 17.7718),
    ("mistral-7b", SMALL | COMPILED, 23.18),
    ("mistral-7b", {"micro_batch_size": 4, "seq_len": 2048, "loss": "chunked"}, 18.820),
    ("mistral-7b", {"micro_batch_size": 4, "seq_len": 2048, "kernels": "liger"}, 19.252),
    (
        "mistral-7b",
        SMALL | {"method": "full", "precision": "bf16_pure", "checkpointing": "full"},
        55.378,
    ),
    ("llama-3.1-8b", SMALL, 31.931),
    ("llama-3.1-8b", {"micro_batch_size": 1, "seq_len": 4096, "optimizer": "adamw_8bit"}, 22.348),
    (
        "llama-3.1-8b",
        {"micro_batch_size": 4, "seq_len": 1024, "lora_rank": 64, "checkpointing": "every_2"},
        37.424,
    ),
    ("gemma-2-9b", SMALL | {"attention": "eager"}, 54.818),
    ("phi-3-mini", SMALL | COMPILED, 14.891),
]


@pytest.mark.parametrize(("model", "knobs", "gib"), MEASURED, ids=str)
def test_peaks_that_were_measured(model: str, knobs: dict[str, Any], gib: float) -> None:
    assert estimate(model, **knobs).peak_gib == pytest.approx(gib, rel=0.006)


def test_the_context_is_the_largest_that_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "depth_extrapolation.json").read_text())[
        "rows"
    ]
    assert (
        pytest.approx(
            max(max(row["context_gib"]) for row in rows if "context_gib" in row), abs=0.005
        )
        == CONTEXT_GIB
    )


def test_the_terms_are_those_of_the_whole_model() -> None:
    found = estimate(**SMALL)
    assert found.weights == pytest.approx(13.5005, abs=1e-4)
    assert found.adapters == found.gradients == pytest.approx(0.15625)
    assert found.optimizer == pytest.approx(0.3125)
    assert sum(found.terms().values()) == pytest.approx(found.peak_reserved_gib)
    assert found.phase is Phase.BACKWARD
    assert ERROR == 0.04 and found.reserved < 0.1 * found.peak_gib


def test_constants_by_hand() -> None:
    """A scale of 4 bytes for 64 weights; quantised again, it is a byte, with 4 bytes for 256 of
    them.
    """
    assert {False: 0.0625, True: pytest.approx(0.015869140625)} == NF4_STATISTICS
    assert pytest.approx(67_318_579, rel=1e-6) == WORKSPACE


def test_terms_of_nothing_are_left_out() -> None:
    full, adapters = estimate(method="full").terms(), estimate(**SMALL).terms()
    assert (
        "adapters" not in full
        and "adapters" in adapters
        and all((*full.values(), *adapters.values()))
    )


def test_a_4_bit_base_holds_its_statistics_once() -> None:
    sizes = Sizes.of(resolve_model("mistral-7b"))
    assert sizes is not None
    for double in (False, True):
        base = estimate(quantization="nf4", double_quant=double).weights
        rest = 2 * (sizes.params - sizes.linear_params)
        assert base * GIB == pytest.approx(
            sizes.linear_params * (0.5 + NF4_STATISTICS[double]) + rest
        )
    # as `record_peak` counted it
    assert estimate(quantization="nf4").weights == pytest.approx(4.1568, abs=2e-4)


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


def test_segments_that_cannot_grow_hold_more_than_is_used() -> None:
    """What four layers held on an H100 without expandable
    segments is never more than is estimated.
    """
    lines = (ROOT / "benchmarks" / "data" / "allocator_h100.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        config = TrainConfig(
            **({"seq_len": 1024, "loss": "full", "allocator": "fixed"} | row["knobs"])
        )
        model, (_, measured_gib) = truncated(row["model"], 4), row["fixed_gib"]
        found, growing = (
            memory_breakdown(model, each)
            for each in (config, replace(config, allocator="expandable"))
        )
        assert found is not None and growing is not None
        most = 1.16 if config.method == "full" else 1.07
        assert measured_gib <= found.peak_reserved_gib * 1.005 <= most * measured_gib, row
        assert found.peak_gib == growing.peak_gib and found.reserved > growing.reserved
    assert len(lines) == 9


def test_no_gradients_wait_in_a_step_of_one_micro_batch() -> None:
    full = {"method": "full", "precision": "bf16_pure", "micro_batch_size": 1, "seq_len": 8192}
    assert estimate(micro_steps=1, **full).peak_gib < estimate(micro_steps=2, **full).peak_gib - 0.5


def test_every_model_of_a_known_family_has_its_parameters() -> None:
    """What the sizes add up to is what was published, norms and biases aside."""
    known = [
        model for model in list_models() if model.config["model_type"] in kept_factors("eager")
    ]
    assert len(known) >= 40
    for model in known:
        sizes = Sizes.of(model)
        assert sizes is not None and model.params is not None
        counted = sizes.linear_params + sizes.embedding * (1 if sizes.tied else 2)
        assert counted == pytest.approx(model.params, rel=0.003), model.name


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt2", "pythia-410m"])
def test_a_family_that_nobody_looked_at_is_unknown(name: str) -> None:
    assert (
        Sizes.of(resolve_model(name)) is None
        and memory_breakdown(resolve_model(name), TrainConfig()) is None
    )


def test_an_adamw_that_is_not_fused_needs_room_for_a_root() -> None:
    full = {"method": "full", "precision": "bf16_pure", "micro_batch_size": 1, "seq_len": 512}
    apart = estimate(optimizer="adamw_torch", **full)
    assert apart.phase is Phase.OPTIMIZER
    assert apart.peak_gib == pytest.approx(estimate(**full).peak_gib + apart.weights, abs=0.5)


@pytest.mark.parametrize(
    ("model", "repeated"), [("mistral-7b", 2 * (4096 - 1024) * 2), ("phi-3-mini", 0)]
)
def test_packed_rows_keep_a_mask(model: str, repeated: int) -> None:
    """Of a bf16 for each pair of tokens; and keys and values in bf16 for each query head, where
    these are fewer.
    """
    rows = {"micro_batch_size": 1, "seq_len": 8192, "checkpointing": "none"}
    more = estimate(model, packing=True, **rows).peak_gib - estimate(model, **rows).peak_gib
    assert more * GIB == pytest.approx(32 * 8192 * (2 * 8192 + repeated))


UNKNOWN = [
    {"quantization": "int8"},
    {"dora": True},
    {"checkpointing": "offload"},
    {"precision": "fp32"},
    {"tiling": "tokens"},
    {"checkpointing": "selective_50"},
]


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
    assert found is not None and found.peak_gib == pytest.approx(
        estimate(**SMALL).peak_gib, rel=0.001
    )


# Mistral-7B by hand: 32 layers of 4,096, 14,336 inside, 32 heads of 128, keys and values of 8,
# 32,768 tokens.
MISTRAL = Sizes.of(resolve_model("mistral-7b"))
EMBEDDING, LAYER = 32_768 * 4096, 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
ADAPTERS = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))  # of rank 16
TOKENS = 2 * 1024


def test_the_sizes_of_a_model_by_hand() -> None:
    assert MISTRAL is not None
    assert (MISTRAL.layers, MISTRAL.hidden, MISTRAL.intermediate, MISTRAL.vocab) == (
        32,
        4096,
        14336,
        32_768,
    )
    assert (MISTRAL.heads, MISTRAL.key_heads, MISTRAL.head_dim) == (32, 8, 128)
    assert (MISTRAL.queries, MISTRAL.keys, MISTRAL.embedding) == (4096, 1024, EMBEDDING)
    assert (MISTRAL.tied, MISTRAL.capped) == (False, False)
    assert (
        MISTRAL.linear_params == 32 * LAYER
        and MISTRAL.adapter_params(TrainConfig()) == ADAPTERS == 41_943_040
    )
    phi = replace(MISTRAL, family="phi3")
    assert tuple(phi.matrices.values()) == (
        (4096, 6144),
        (4096, 4096),
        (4096, 2 * 14336),
        (14336, 4096),
    )
    assert phi.linear_params == MISTRAL.linear_params and phi.adapter_params(
        TrainConfig()
    ) < MISTRAL.adapter_params(TrainConfig())


def test_what_a_config_leaves_out_has_its_default() -> None:
    model = resolve_model("mistral-7b")
    config = {
        key: value
        for key, value in model.config.items()
        if key not in ("num_key_value_heads", "head_dim")
    }
    plain = Sizes.of(replace(model, config=config, params=None))
    assert plain is not None and (plain.key_heads, plain.head_dim, plain.keys) == (32, 128, 4096)
    assert plain.params == plain.linear_params + 2 * EMBEDDING
    odd = Sizes.of(replace(model, config=config | {"hidden_size": 4127}, params=None))
    # rounded down, as in transformers
    assert odd is not None and odd.head_dim == 128 and odd.queries == 4096
    tied = Sizes.of(replace(model, config=config | {"tie_word_embeddings": True}, params=None))
    assert tied is not None and tied.tied and tied.params == plain.params - EMBEDDING
    silent = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    gemma = {
        name: Sizes.of(replace(model, config=silent | {"model_type": name}))
        for name in ("gemma", "gemma2")
    }
    assert {name: (one.tied, one.capped) for name, one in gemma.items() if one} == {
        "gemma": (True, False),
        "gemma2": (True, True),
    }
    uncapped = config | {
        "model_type": "gemma2",
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    }
    other = Sizes.of(replace(model, config=uncapped))
    assert other is not None and (other.tied, other.capped) == (False, False)


def in_bytes(found: Any) -> tuple[float, float, float]:
    """Gradients, activations and logits at the peak."""
    return found.gradients * GIB, found.activations * GIB, found.logits * GIB


@pytest.mark.parametrize(("micro_steps", "waiting"), [(1, 0), (2, 4 * ADAPTERS)])
@pytest.mark.parametrize(("checkpointing", "recomputed"), [("none", 0), ("every_2", 16)])
def test_the_peak_in_the_head_by_hand(
    checkpointing: str, recomputed: int, micro_steps: int, waiting: int
) -> None:
    """What the layers keep, the norm in fp32 without the bf16 copy of its input, casts, and twelve
    bytes a logit.
    """
    knobs = SMALL | {"checkpointing": checkpointing}
    found, keep = (
        estimate(micro_steps=micro_steps, **knobs),
        kept_bytes(MISTRAL, TrainConfig(**knobs)),
    )
    kept = TOKENS * ((32 - recomputed) * keep + recomputed * 2 * 4096)
    activations = kept + TOKENS * 4096 * (6 - 2) + 2 * ADAPTERS * (32 - recomputed) / 32
    logits = TOKENS * 32_768
    assert in_bytes(found) == pytest.approx((waiting, activations, 12 * logits))
    assert found.reserved * GIB == pytest.approx(
        2.4 * logits + 0.01 * (activations + 12 * logits) + 42 * 2**20
    )
    assert found.phase is Phase.BACKWARD and found.workspace * GIB == pytest.approx(WORKSPACE)


@pytest.mark.parametrize(
    ("checkpointing", "recomputed"), [("full", 32), ("every_3", 11), ("none", 0)]
)
@pytest.mark.parametrize(("compile", "reserved"), [("none", 0.010), ("per_layer", 0.034)])
def test_the_peak_in_a_layer_by_hand(
    compile: str, reserved: float, checkpointing: str, recomputed: int
) -> None:
    """With the loss in chunks: the inputs of layers that are recomputed, and one of these as a
    whole; casts of all adapters whose layers are not.
    """
    shared = {"micro_batch_size": 8, "seq_len": 1024, "loss": "chunked", "compile": compile}
    found = estimate(**shared, checkpointing=checkpointing)
    config = TrainConfig(**shared, checkpointing=checkpointing)
    keep = kept_bytes(MISTRAL, config)
    layer = (keep if recomputed else 0) + moving_bytes(MISTRAL, config)
    activations = 8 * 1024 * (recomputed * 2 * 4096 + (32 - recomputed) * keep + layer)
    activations += 2 * ADAPTERS * (32 - recomputed) / 32
    assert in_bytes(found) == pytest.approx((4 * ADAPTERS, activations, 0), rel=1e-9)
    logits = 1024 * 32_768  # those of a chunk
    assert found.reserved * GIB == pytest.approx(2.4 * logits + reserved * activations + 42 * 2**20)


SHORT = {
    "method": "full",
    "micro_batch_size": 1,
    "seq_len": 128,
    "checkpointing": "full",
    "loss": "full",
}


@pytest.mark.parametrize(
    ("precision", "size", "micro_steps"),
    [("bf16_pure", 2, 1), ("bf16_pure", 2, 2), ("bf16_mixed", 4, 1)],
)
def test_the_peak_of_full_fine_tuning_by_hand(precision: str, size: int, micro_steps: int) -> None:
    """All gradients, and that of the embedding once more; twice as many bytes of optimizer state as
    of weights.
    """
    params = resolve_model("mistral-7b").params
    assert params is not None
    found = estimate(micro_steps=micro_steps, precision=precision, **SHORT)
    assert in_bytes(found) == pytest.approx((size * params, size * EMBEDDING, 0))
    assert (found.weights * GIB, found.adapters, found.optimizer * GIB) == pytest.approx(
        (size * params, 0, 2 * size * params)
    )
    rooted = estimate(precision=precision, optimizer="adamw_torch", **SHORT)
    assert rooted.phase is Phase.OPTIMIZER and in_bytes(rooted) == pytest.approx(
        (size * params, size * params, 0)
    )


def test_autocast_keeps_the_casts_of_all_weights_beside_the_gradients_that_wait() -> None:
    """In the forward pass, with ten bytes a logit and the norm in fp32; layers and norm have inputs
    in fp32.
    """
    params = resolve_model("mistral-7b").params
    assert params is not None
    found = estimate(precision="bf16_mixed", **SHORT)
    activations = 128 * 4096 * (32 * 4 + 20) + 2 * params
    assert in_bytes(found) == pytest.approx((4 * params, activations, 10 * 128 * 32_768))
    assert found.phase is Phase.FORWARD


@pytest.mark.parametrize(
    ("precision", "seq_len", "of_embedding", "of_logits"),
    [
        # The sum of the head's gradients, and those of a chunk; under autocast also its cast, and
        # these in 16 bits.
        ("bf16_pure", 128, 2 + 2, 2),
        ("bf16_pure", 1024, 2 + 2, 2),
        ("bf16_pure", 2048, 2, 12),
        ("bf16_mixed", 1024, 4 + 2 + 2 + 4, 0),
    ],
)
def test_a_head_that_is_trained_in_chunks_by_hand(
    precision: str, seq_len: int, of_embedding: int, of_logits: int
) -> None:
    """After the layers, where only casts are left that the backward pass needs, and none of the
    embeddings.
    """
    params = resolve_model("mistral-7b").params
    assert params is not None
    knobs = SHORT | {
        "seq_len": seq_len,
        "checkpointing": "none",
        "loss": "chunked",
        "precision": precision,
    }
    size, casts = (2, 0) if precision == "bf16_pure" else (4, 2 * (params - 2 * EMBEDDING))
    keep = kept_bytes(MISTRAL, TrainConfig(**knobs))
    activations = seq_len * (32 * keep + 4096 * ((6 if size == 2 else 20) - 2)) + casts
    logits = chunk_tokens(seq_len) * 32_768
    in_head = of_embedding * EMBEDDING + of_logits * logits + 4 * seq_len * 4096
    assert in_bytes(estimate(**knobs)) == pytest.approx((size * params, activations, in_head))


def test_casts_end_with_the_layers_where_the_head_is_in_chunks() -> None:
    """With all layers recomputed: the casts of their weights are
    the peak, and no logits exist yet.
    """
    params = resolve_model("mistral-7b").params
    assert params is not None
    found = estimate(precision="bf16_mixed", **(SHORT | {"loss": "chunked"}))
    activations = 128 * 4096 * (32 * 4 + 20) + 2 * (params - 2 * EMBEDDING)
    assert (
        in_bytes(found) == pytest.approx((4 * params, activations, 0))
        and found.phase is Phase.FORWARD
    )


@pytest.mark.parametrize(
    ("precision", "loss", "micro_steps", "copies"),
    [
        ("bf16_pure", "full", 1, 2),
        ("bf16_pure", "full", 2, 3),
        ("bf16_pure", "chunked", 1, 1),
        ("bf16_mixed", "full", 1, 1),
        ("bf16_mixed", "chunked", 1, 1),
    ],
)
def test_a_tied_head_leaves_its_gradient_until_that_of_the_embedding_is_made(
    precision: str, loss: str, micro_steps: int, copies: int
) -> None:
    """As dry probes count it: the embedding's own gradient, the head's part, and their sum, beside
    all gradients.
    """
    model = resolve_model("llama-3.2-1b")
    sizes, size = Sizes.of(model), 2 if precision == "bf16_pure" else 4
    assert sizes is not None and sizes.tied and model.params is not None
    config = TrainConfig(**(SHORT | {"precision": precision, "seq_len": 16, "loss": loss}))
    found = memory_breakdown(model, config, micro_steps)
    assert found is not None and found.phase is Phase.BACKWARD
    assert in_bytes(found) == pytest.approx(
        (size * model.params, copies * size * sizes.embedding, 0)
    )


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("adamw_8bit", 2), ("paged_adamw_8bit", 2), ("lion_8bit", 1), ("adafactor", 0)],
)
def test_the_state_of_an_optimizer_by_hand(optimizer: str, moments: int) -> None:
    """A byte for each parameter and moment, and an fp32 maximum for each block of 256; 4 bytes in
    the embedding.
    """
    params = resolve_model("mistral-7b").params
    assert params is not None
    adapters = estimate(optimizer=optimizer, **SMALL).optimizer * GIB
    assert adapters == pytest.approx(moments * ADAPTERS * (1 + 4 / 256))
    whole = estimate(optimizer=optimizer, precision="bf16_pure", **SHORT).optimizer * GIB
    assert whole == pytest.approx(moments * ((params - EMBEDDING) * (1 + 4 / 256) + EMBEDDING * 4))


def test_what_no_formula_covers_is_named() -> None:
    model = resolve_model("mistral-7b")
    named = [unsupported(model, TrainConfig(**knobs)) for knobs in UNKNOWN]
    assert named == [
        "int8 bases",
        "DoRA",
        "offloaded checkpoints",
        "fp32 precision",
        "tiles of tokens",
        "selective recomputation",
    ]
    assert unsupported(resolve_model("gpt2"), TrainConfig()) == "gpt2 models"
    assert unsupported(model, TrainConfig()) is None


# The widths of Mistral-7B: hidden, inside, queries, keys. Two norms keep 4 bytes each, adapters of
# rank 16 on seven matrices 2 bytes a value, and attention without scores 4 bytes a head.
WIDTHS = (4096, 14336, 4096, 1024)
NORMS, OF_ADAPTERS, OF_HEADS = 4 * 2, 2 * 16 * 7, 4 * 32


def summed(*factors: int) -> int:
    return sum(map(math.prod, zip(factors, WIDTHS, strict=True)))


VARLEN = {"packing": True, "packed_attention": "varlen"}


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [
        ({}, summed(18, 8, 6, 4) + OF_HEADS + OF_ADAPTERS),
        ({"lora_rank": 64}, summed(18, 8, 6, 4) + OF_HEADS + 4 * OF_ADAPTERS),
        ({"precision": "bf16_pure"}, summed(12, 8, 4, 4) + OF_HEADS + OF_ADAPTERS),
        ({"quantization": "nf4"}, summed(12, 8, 4, 4) + OF_HEADS + OF_ADAPTERS),
        ({"method": "full"}, summed(26, 8, 4, 4) + OF_HEADS),
        ({"method": "full", "precision": "bf16_pure"}, summed(16, 8, 4, 4) + OF_HEADS),
        ({"compile": "per_layer"}, summed(10, 6, 4, 4) + OF_HEADS + OF_ADAPTERS),
        # What compiled layers keep in pure bf16, and what autocast adds to eager ones: 18 - 12, and
        # 6 - 4.
        ({"kernels": "liger"}, summed(8 + 6, 6, 4 + 2, 4) + OF_HEADS + OF_ADAPTERS),
        (
            {"kernels": "liger", "precision": "bf16_pure"},
            summed(8, 6, 4, 4) + OF_HEADS + OF_ADAPTERS,
        ),
        # Eager attention keeps 6 bytes for each head and pair of tokens, compiled 4.
        ({"attention": "eager"}, summed(18, 8, 8, 0) + 6 * 32 * 1000 + OF_ADAPTERS),
        (
            {"attention": "eager", "compile": "per_layer"},
            summed(10, 6, 8, 0) + 4 * 32 * 1000 + OF_ADAPTERS,
        ),
        # A mask in bf16, and keys and values in bf16 for each query head.
        (
            {"packing": True},
            summed(18, 8, 6, 4) + OF_HEADS + OF_ADAPTERS + 2 * 1000 + 4 * (4096 - 1024),
        ),
        (
            {"packing": True, "attention": "flash_attention_2"},
            summed(18, 8, 6, 4) + OF_HEADS + OF_ADAPTERS,
        ),
        (VARLEN, summed(18, 8, 6, 4) + OF_HEADS + OF_ADAPTERS),
    ],
    ids=str,
)
def test_what_a_layer_keeps_by_hand(knobs: dict[str, Any], kept: int) -> None:
    assert kept_bytes(MISTRAL, TrainConfig(seq_len=1000, **knobs)) == kept + NORMS


@pytest.mark.parametrize(
    ("family", "knobs", "kept"),
    [
        # Qwen3 normalises queries and keys of each head; Gemma 2 has four norms; Phi 3 has four
        # matrices.
        ("qwen3", {}, summed(18, 8, 10, 8) + OF_HEADS + NORMS + 4 * (32 + 8) + OF_ADAPTERS),
        (
            "qwen3",
            {"attention": "eager"},
            summed(18, 8, 12, 4) + 6 * 32_000 + NORMS + 4 * (32 + 8) + OF_ADAPTERS,
        ),
        (
            "qwen3",
            {"attention": "eager", "method": "full"},
            summed(26, 8, 14, 6) + 6 * 32_000 + NORMS + 4 * (32 + 8),
        ),
        ("gemma2", {}, summed(26, 8, 8, 0) + OF_HEADS + 2 * NORMS + OF_ADAPTERS),
        (
            "gemma2",
            {"attention": "eager"},
            summed(26, 8, 8, 0) + 8 * 32_000 + 2 * NORMS + OF_ADAPTERS,
        ),
        ("phi3", {}, summed(10, 8, 10, 6) + OF_HEADS + NORMS + 2 * 16 * 4),
        ("phi3", {"attention": "eager"}, summed(10, 8, 10, 0) + 6 * 32_000 + NORMS + 2 * 16 * 4),
        (
            "phi3",
            {"packing": True},
            summed(10, 8, 10, 6) + OF_HEADS + NORMS + 2 * 16 * 4 + 2 * 1000,
        ),
        # Its values are no longer a part of one product with queries and keys.
        ("phi3", VARLEN, summed(10, 8, 10 - 2, 6 - 2) + OF_HEADS + NORMS + 2 * 16 * 4),
    ],
    ids=str,
)
def test_what_a_layer_of_another_family_keeps_by_hand(
    family: str, knobs: dict[str, Any], kept: int
) -> None:
    assert MISTRAL is not None
    assert kept_bytes(replace(MISTRAL, family=family), TrainConfig(seq_len=1000, **knobs)) == kept


def test_temporary_tensors_by_hand() -> None:
    assert MISTRAL is not None
    of = {
        name: moving_bytes(MISTRAL, TrainConfig(**knobs))
        for name, knobs in {
            "mixed": {},
            "pure": {"precision": "bf16_pure"},
            "nf4": {"quantization": "nf4"},
            "compiled": {"compile": "per_layer"},
        }.items()
    }
    pure = 4 * 14336 + 3 * 4096
    assert of == {
        "mixed": pure + 4 * 14336,
        "pure": pure,
        "nf4": pure,
        "compiled": 8 * 14336 + 6 * 4096,
    }


def of(objective: Objective, model: str = "mistral-7b", **knobs: Any) -> Any:
    found = memory_breakdown(resolve_model(model), TrainConfig(**knobs), objective=objective)
    assert found is not None
    return found


def test_a_pair_has_two_rows() -> None:
    pairs, answers = of(Objective.DPO, micro_batch_size=4), of(Objective.KTO, micro_batch_size=8)
    assert pairs == answers
    scores, labels = (
        of(Objective.REWARD, micro_batch_size=4),
        of(Objective.CLASSIFICATION, micro_batch_size=8),
    )
    assert scores == labels


def test_the_untrained_model_is_a_copy_where_all_is_trained() -> None:
    full, lora = {"method": "full"}, {"method": "lora"}
    assert of(Objective.DPO, **full).weights == 2 * of(Objective.SFT, **full).weights
    assert of(Objective.KTO, **lora).weights == of(Objective.SFT, **lora).weights


def test_a_head_over_labels_leaves_out_that_over_the_vocabulary() -> None:
    """Of Mistral its own, 2 bytes each; Gemma's is the embedding, which stays."""
    saved = of(Objective.SFT).weights - of(Objective.REWARD).weights
    assert saved == pytest.approx(2 * 32768 * 4096 / GIB)
    assert of(Objective.SFT, "gemma-2b").weights == of(Objective.REWARD, "gemma-2b").weights
    assert of(Objective.CLASSIFICATION, checkpointing="full").logits == 0


def test_trl_makes_one_tile_of_logits_at_a_time() -> None:
    """Of 4,096 tokens and 32,768 words in 16 bits; copies of hidden states, and gradients in 32
    bits and in 16.
    """
    knobs = {"seq_len": 4096, "lora_targets": "q_v", "checkpointing": "full"}
    tile, hidden = 2 * 4096 * 32768, 4096 * 4096
    for rows, knob in ((2, {"micro_batch_size": 1}), (4, {"micro_batch_size": 2})):
        model, config = resolve_model("mistral-7b"), TrainConfig(**knobs | knob)
        sizes = Sizes.of(model)
        assert sizes is not None
        doubled = rows_of(config, Objective.DPO)
        assert (doubled.micro_batch_size, doubled.loss) == (rows, "chunked")
        logits = live_logits(doubled, sizes.vocab, Objective.DPO)
        assert logits == 4096 * 32768
        moments = step_moments(
            sizes, doubled, 1, 4, 2, logits, accumulates=True, objective=Objective.DPO
        )
        assert moments["forward"][2] == tile + 2 * rows * hidden
        assert moments["head"][2] == tile + (2 + 6) * rows * hidden


def test_gradients_of_a_trained_head_are_in_32_bits() -> None:
    """And then cast, if it is in 16 bits; a head in 32 bits is cast tile by tile."""
    model, head = resolve_model("mistral-7b"), 32768 * 4096
    for precision, cast, base_bytes in (("bf16_pure", 6, 2), ("bf16_mixed", 4, 4)):
        config = TrainConfig(
            method="full", precision=precision, micro_batch_size=1, seq_len=64, loss="chunked"
        )
        sizes, hidden = Sizes.of(model), 64 * 4096
        assert sizes is not None
        moments = step_moments(
            sizes, config, 1, 4, base_bytes, 64 * 32768, accumulates=True, objective=Objective.KTO
        )
        casts = 2 * (32768 + 64) * 4096 if base_bytes == 4 else 0
        assert moments["forward"][2] == 2 * 64 * 32768 + base_bytes * hidden + casts
        assert moments["head"][2] - moments["forward"][2] == cast * (head + hidden)


def test_adapters_on_a_quantised_base_are_in_16_bits_under_trl() -> None:
    kinds = (Objective.SFT, Objective.DPO, Objective.CLASSIFICATION)
    sft, dpo, labels = (of(one, quantization="nf4").adapters for one in kinds)
    assert dpo == sft / 2 and labels == sft
    assert of(Objective.DPO).adapters == of(Objective.SFT).adapters


def test_each_family_of_the_catalog_has_its_factors() -> None:
    assert set(kept_factors("eager")) == set(kept_factors("compiled")) == FAMILIES


def test_an_evaluation_by_hand() -> None:
    """Its head makes all logits in 16 bits, in 32 and their softmax; a layer has its MLP beside
    hidden states.
    """
    tokens, logits = 4 * 1024, 4 * 1024 * 32768
    whole = estimate(micro_steps=EVALUATES, micro_batch_size=4, precision="bf16_pure")
    assert whole.phase is Phase.EVALUATE and whole.gradients == 0
    assert whole.logits * GIB == pytest.approx(10 * logits)
    assert whole.activations * GIB == pytest.approx(2 * 4096 * tokens)

    chunked = estimate(
        micro_steps=EVALUATES, micro_batch_size=4, precision="bf16_pure", loss="chunked"
    )
    assert chunked.logits == 0
    assert chunked.activations * GIB == pytest.approx(tokens * (8 * 14336 + 8 * 4096))
    full = estimate(
        micro_steps=EVALUATES,
        micro_batch_size=4,
        precision="bf16_pure",
        loss="chunked",
        method="full",
    )
    assert full.activations * GIB == pytest.approx(tokens * (6 * 14336 + 8 * 4096))


@pytest.mark.parametrize(
    "model", ["mistral-7b", "qwen3-0.6b", "llama-3.2-1b", "phi-3-mini", "gemma-2-2b"]
)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_an_evaluation_of_the_micro_batch_needs_less_than_a_step(
    model: str, method: str, loss: str, checkpointing: str
) -> None:
    """So neither `plan` nor `run` counts it, unless CUDA graphs keep a step's memory."""
    if model == "gemma-2-2b":
        loss = "full"
    for precision in ("bf16_mixed", "bf16_pure"):
        for size in (1, 16):
            for compile in ("none", "per_layer"):
                knobs = {
                    "method": method,
                    "loss": loss,
                    "checkpointing": checkpointing,
                    "precision": precision,
                }
                knobs |= {"micro_batch_size": size, "compile": compile, "padding": "bucket"}
                if method == "full":
                    knobs["lora_rank"] = None
                step, evaluated = (estimate(model, steps, **knobs) for steps in (1, EVALUATES))
                assert evaluated.peak_reserved_gib <= step.peak_reserved_gib


@pytest.mark.parametrize(
    ("rows", "loss", "kept_tokens", "graphs", "less"),
    [
        (None, "full", 0, "none", True),
        (4, "full", 0, "none", True),
        (5, "full", 0, "none", False),
        (None, "chunked", 0, "none", False),
        (None, "full", 1, "none", False),
        (None, "full", 0, "micro_batch", False),
    ],
)
def test_only_a_batch_like_a_micro_batch_surely_needs_less(
    rows: int | None, loss: str, kept_tokens: int, graphs: str, less: bool
) -> None:
    config = TrainConfig(
        micro_batch_size=4, padding="bucket", checkpointing="none", cuda_graphs=graphs
    )
    evaluation = Evaluation(rows=rows, loss=loss, kept_tokens=kept_tokens)
    assert evaluation.needs_less(config) is less
    assert Evaluation(rows=None, loss="full").needs_less(replace(config, micro_batch_size=1)) is (
        graphs == "none"
    )


def test_joined_adapters_are_stored_twice_more_with_space_to_the_next_multiple() -> None:
    """In mistral-7b, q, k and v share an input, and so do gate and up."""
    config = TrainConfig(lora_rank=16, lora_kernels="joined", compile="per_layer")
    shapes = [(4096, 6144, 48), (4096, 4096, 16), (4096, 28672, 32), (14336, 4096, 16)]
    weights = sum(
        rank * (inner + outer) + 64 * (inner + outer) + 64**2 for inner, outer, rank in shapes
    )
    assert joined_bytes(MISTRAL, config) == 2 * 32 * weights
    assert joined_bytes(MISTRAL, replace(config, lora_kernels="peft")) == 0


def test_cuda_graphs_keep_the_memory_of_a_step_in_an_evaluation() -> None:
    knobs = {
        "padding": "bucket",
        "cuda_graphs": "micro_batch",
        "checkpointing": "none",
        "micro_batch_size": 2,
    }
    step, evaluated = (estimate(micro_steps=steps, **knobs) for steps in (1, EVALUATES))
    alone = estimate(micro_steps=EVALUATES, **knobs | {"cuda_graphs": "none"})
    assert evaluated.gradients == step.gradients
    assert evaluated.activations == pytest.approx(step.activations + alone.activations)


def test_counted_segments_replace_the_unused_memory_of_the_formula() -> None:
    count = DryCount(
        model_gib=6.0,
        adapters_gib=1.0,
        gradients_gib=1.0,
        optimizer_gib=2.0,
        segment_peak_gib={"backward_layers": 20.0},
        peak_allocated_gib=20.0,
        trainable_params=10,
        total_params=100,
    )
    config = TrainConfig(allocator="fixed")
    memory = counted_breakdown(resolve_model("gpt2"), config, count)
    assert in_fixed_segments(memory, count) == memory
    known = in_fixed_segments(memory, replace(count, reserved_gib=26.0, occupied_gib=23.0))
    assert known.peak_gib == pytest.approx(20.0)
    assert known.peak_reserved_gib == pytest.approx(26.0)
    assert known.needed_gib == pytest.approx(23.0)
    assert known.error == SEGMENTS_ERROR
    rough = in_fixed_segments(
        replace(memory, own_error=0.09), replace(count, reserved_gib=26.0, occupied_gib=23.0)
    )
    assert rough.error == 0.09
