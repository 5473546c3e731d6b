"""Floors are never given up unasked, and packing is searched only where it is possible."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import ModelSpec, resolve_device, resolve_model
from autotune.core.errors import UsageError
from autotune.core.knobs import KNOBS
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig
from autotune.problem.constraints import (
    Floors,
    Narrowing,
    apply_floors,
    attentions_without_sdpa,
    narrow_checkpointing,
    narrow_packing,
    narrow_padding,
    narrow_to_device,
    narrow_to_layers,
    narrow_to_model,
    narrow_to_packages,
    narrow_to_trl,
    refusal,
)
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import Knob, SearchSpace
from autotune.problem.setup import Setup, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.workload import Workload

WORKLOAD = Workload(examples=1000, lengths=Lengths.constant(1024), global_batch=32)
MISTRAL = resolve_model("mistral-7b")

LONG_TAILED = Workload(lengths=Lengths.of([100, 200, 4000], "counted"))


def space(**knobs) -> SearchSpace:
    return SearchSpace(
        name="test", knobs=tuple(Knob(name=name, values=values) for name, values in knobs.items())
    )


def floored(searched: SearchSpace, workload: Workload = WORKLOAD, **floors) -> Narrowing:
    narrowing = Narrowing(space=searched, reserve=searched)
    apply_floors(narrowing, workload, Floors(**floors))
    return narrowing


def narrowed(searched: SearchSpace, workload: Workload = WORKLOAD, **floors) -> dict[str, tuple]:
    return {knob.name: knob.choices() for knob in floored(searched, workload, **floors).space.knobs}


def test_the_default_floors():
    narrowing = floored(SearchSpace.load("default"))
    assert {
        knob.name: knob.choices() for knob in narrowing.space.knobs if knob.kind == "learning"
    } == {
        "method": ("lora",),
        "quantization": ("none",),
        "double_quant": (True, False),
        "quantize_experts": (False, True),
        "seq_len": (1024,),
        "lora_rank": (16, 32, 64),
        "precision": ("bf16_mixed", "fp16_mixed"),
        "optimizer": ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"),
    }
    assert [str(removal) for removal in narrowing.removals] == [
        "seq_len 512: would truncate more than 1% of the tokens (--max-truncated)",
        "seq_len 2048, 4096: no example is longer than 1024 tokens, so longer sequences would"
        " end in padding",
        "lora_rank 8: below the smallest rank of 16 (--min-rank)",
        "quantization fp8, int8, nf4: a quantised base learns differently: used only if no other"
        " value fits "
        "(--allow-quantized)",
        "precision bf16_pure: no fp32 master weights: used only on request (--allow-pure-bf16)",
    ]


def test_a_floor_below_a_percent_is_named_as_it_is():
    lengths = Lengths.of([512] * 999 + [4096], "counted")
    narrowing = floored(
        SearchSpace.of(seq_len=[512, 1024, 4096]), Workload(lengths=lengths), max_truncated=0.0065
    )
    assert (
        str(narrowing.removals[0])
        == "seq_len 512: would truncate more than 0.65% of the tokens (--max-truncated)"
    )


@pytest.mark.parametrize(
    ("length", "max_truncated", "kept"),
    [
        (1024, 0.0, (1024,)),
        (1024, 0.5, (512, 1024)),  # what is allowed to be cut may be
        (1034, 0.01, (1024, 2048)),  # 0.97 % cut off
        (1035, 0.01, (2048,)),  # 1.06 %
        (300, 0.01, (512,)),
        (8192, None, (4096,)),  # longer than everything: as little as can be
        (8192, 0.8, (2048, 4096)),
        (4097, None, (4096,)),
    ],
)
def test_the_floor_of_length(length, max_truncated, kept):
    lengths = space(seq_len=(512, 1024, 2048, 4096))
    workload = Workload(lengths=Lengths.constant(length))
    assert narrowed(lengths, workload, max_truncated=max_truncated)["seq_len"] == kept


@pytest.mark.parametrize(
    ("knobs", "floors", "message"),
    [
        (
            {"lora_rank": (8, 64)},
            {"min_rank": 65},
            "--min-rank 65: the largest rank of the space is 64",
        ),
        # pinned, and asked for more
        ({"lora_rank": (8,)}, {"min_rank": 16}, "the largest rank of the space is 8"),
        ({"seq_len": (512,)}, {}, None),
        (
            {"seq_len": (512,)},
            {"max_truncated": 0.1},
            "even sequences of 512 tokens truncate 50.00% of the tokens",
        ),
        ({"method": ("full",)}, {"min_rank": 65}, None),  # a warning
    ],
)
def test_a_floor_that_the_space_cannot_hold_is_refused(knobs, floors, message):
    searched = space(**{"seq_len": (1024,)} | knobs)
    if message is None:
        assert floored(searched, **floors).space == searched
        return
    with pytest.raises(UsageError, match=message) as caught:
        floored(searched, **floors)
    assert caught.value.remedy


def test_a_floor_of_length_on_a_range():
    lengths = SearchSpace(name="range", knobs=(Knob(name="seq_len", low=64, high=4096),))
    assert narrowed(lengths, Workload(lengths=Lengths.constant(1000)))["seq_len"] == tuple(
        range(990, 1001)
    )


@pytest.mark.parametrize(
    ("knobs", "floors", "kept"),
    [
        ({"lora_rank": (4,)}, {}, (4,)),  # a pin is the user's choice
        ({"lora_rank": (4, 8)}, {}, (4, 8)),  # nothing would be left
        ({"lora_rank": (4, 8, 64)}, {"min_rank": 8}, (8, 64)),
        ({"quantization": ("nf4",)}, {}, ("nf4",)),
        ({"quantization": ("nf4", "int8")}, {}, ("nf4", "int8")),
        ({"quantization": ("nf4", "none")}, {"allow_quantized": True}, ("nf4", "none")),
        ({"seq_len": (64,)}, {}, (64,)),
        ({"optimizer": ("adafactor", "adamw_torch", "lion_8bit")}, {}, ("adamw_torch",)),
        (
            {"optimizer": ("adafactor", "adamw_torch")},
            {"allow_any_optimizer": True},
            ("adafactor", "adamw_torch"),
        ),
        ({"precision": ("bf16_pure", "bf16_mixed")}, {}, ("bf16_mixed",)),
        (
            {"precision": ("bf16_pure", "bf16_mixed")},
            {"allow_pure_bf16": True},
            ("bf16_pure", "bf16_mixed"),
        ),
        ({"precision": ("bf16_pure",)}, {}, ("bf16_pure",)),
        ({"precision": ("bf16_pure", "bf16_mixed"), "method": ("full",)}, {}, ("bf16_mixed",)),
        (
            {"precision": ("bf16_pure", "fp32"), "method": ("full",)},
            {"allow_pure_bf16": True},
            ("bf16_pure", "fp32"),
        ),
        ({"precision": ("bf16_pure",), "method": ("full",)}, {}, ("bf16_pure",)),
        ({"micro_batch_size": (1, 2)}, {}, (1, 2)),
    ],
)
def test_floors(knobs, floors, kept):
    assert next(iter(narrowed(space(**knobs), **floors).values())) == kept


@pytest.mark.parametrize(("shipped", "opened"), [("lora", False), ("qlora", False), ("full", True)])
def test_only_full_fine_tuning_has_pure_bf16_in_reserve(shipped: str, opened: bool) -> None:
    """With LoRA it would save a few hundred MiB, and would be searched whenever a quantised base
    is.
    """
    setup = set_up(StudySpec(model="mistral-7b", space=shipped), resolve_device("h200"))
    assert setup.task.space.choices("precision") == ("bf16_mixed",)
    assert ("bf16_pure" in setup.reserve.choices("precision")) is opened
    assert setup.reserved == (
        "precision bf16_pure; optimizer adafactor or lion_8bit" if opened else ""
    )


# --- packing

SKEWED = Lengths.of([100] * 60 + [300] * 25 + [700] * 10 + [2000] * 5, "counted")


def prepared(lengths: str | None = None, model: str = "mistral-7b", **asked: Any) -> Setup:
    return set_up(
        StudySpec(model=model, lengths=lengths, space="lora", **asked), resolve_device("h200")
    )


def removed(setup: Setup) -> list[str]:
    return [str(one) for one in setup.removals if one.knob == "packing" or "packed" in one.reason]


@pytest.fixture
def skewed(tmp_path: Path) -> str:
    file = tmp_path / "lengths.txt"
    file.write_text(
        "\n".join(str(tokens) for tokens, number in SKEWED.counts for _ in range(number))
    )
    return str(file)


def test_packing_is_searched_with_micro_batches_that_keep_the_global_batch(skewed: str) -> None:
    setup = prepared(skewed)
    knob = setup.task.space.knob("packing")
    assert knob is not None and knob.choices() == (False, True)
    # A row of 2,048 tokens holds 6 of these examples: 32 of them are 5 rows.
    assert knob.when is not None and knob.when["micro_batch_size"] == [1, 2, 4]
    reason = (
        "a step's number of examples would differ by over 25% from the global batch of 32"
        " (--global-batch)"
    )
    assert removed(setup) == [f"packing True: not with micro_batch_size 8, 16, 32: {reason}"]
    for chosen in setup.task.space.enumerate():
        config = setup.task.space.config(chosen)
        assert setup.task.workload.run_shape(config).examples_per_step == pytest.approx(
            32, rel=0.25
        )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "the lengths of the examples were not given (--dataset, --lengths)"),
        ({"tokens_per_example": 4096}, "no sequence has room for a second example"),
        (
            {"tokens_per_example": 16, "global_batch": 1, "pins": {"seq_len": 4096}},
            "a sequence holds 250.0 examples",
        ),
        (
            {"mean_tokens": 200, "p99_tokens": 900, "pins": {"attention": "flash_attention_2"}},
            "packing is untested with flash_attention_2",
        ),
    ],
)
def test_packing_is_left_out_for_a_reason(
    asked: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    setup = prepared(**asked)
    assert setup.task.space.knob("packing").choices() == (False,)  # type: ignore[union-attr]
    assert len(removed(setup)) == 1 and removed(setup)[0].endswith(reason)


def test_a_row_length_that_does_not_go_with_the_global_batch_is_left_out_by_itself() -> None:
    # 4,096 tokens hold 20 of them: 32 are no whole rows
    setup = prepared(mean_tokens=200, p99_tokens=900)
    packed = {
        one.seq_len
        for one in map(setup.task.space.config, setup.task.space.enumerate())
        if one.packing
    }
    assert packed == {2048}
    assert any("not with seq_len 4096" in line for line in removed(setup))


def test_packing_may_be_asked_for(skewed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    setup = set_up(
        StudySpec(model="mistral-7b", lengths=skewed, space="default", pins={"packing": True}),
        resolve_device("h200"),
    )
    choices = [setup.task.space.config(chosen) for chosen in setup.task.space.enumerate()]
    assert {config.micro_batch_size for config in choices} == {1, 2, 4}
    # with flash_attention_2 neighbours may be seen
    assert {config.attention for config in choices} == {"sdpa"}
    with pytest.raises(
        UsageError,
        match="packing was asked for, but a step's number of examples would differ by over 25%",
    ):
        prepared(skewed, pins={"packing": True}, global_batch=2)


EXPERTS = {"experts": ("mlp.experts.down_proj", "mlp.experts.gate_up_proj"), "parametrized": True}


@pytest.mark.parametrize(
    ("knobs", "shape", "named"),
    [
        ({}, {}, None),
        ({"loss": "chunked"}, {"plain_head": True}, None),
        ({"loss": "chunked"}, {}, "changes its logits after its head"),
        ({"kernels": "liger"}, {"liger": True}, None),
        ({"kernels": "liger"}, {}, "Liger has no kernels"),
        ({"compile": "per_layer"}, {"parametrized": True}, "does not compile"),
        ({"compile": "per_layer", "lora_targets": "attention_experts"}, EXPERTS, "not compile"),
        ({"compile": "per_layer", "lora_kernels": "grouped"}, EXPERTS, None),
        ({"lora_kernels": "grouped"}, {"parametrized": True}, "transformers' interface"),
        ({"lora_kernels": "grouped"}, {}, "no adapters on experts"),
        ({"compile": "per_layer", "method": "full"}, {"parametrized": True}, None),
        ({"attention": "sdpa"}, {"sdpa": False}, "sdpa"),
    ],
    ids=str,
)
def test_what_the_layers_of_a_model_cannot_do_is_refused_of_one_configuration(
    knobs: dict[str, Any], shape: dict[str, Any], named: str | None
) -> None:
    shape_of = ModelShape(num_layers=2, prefix=0, period=1, **shape)
    reason = refusal(
        TrainConfig(**knobs), MISTRAL, "transformers", shape_of, resolve_device("h200")
    )
    assert reason is None if named is None else named in (reason or "")


@pytest.mark.parametrize(
    ("card", "knobs", "named"),
    [
        ("t4", {}, "t4 has no bf16"),
        ("t4", {"precision": "fp16_mixed"}, None),
        ("v100-16gb", {"precision": "fp16_mixed", "attention": "flash_attention_2"}, "too old"),
        ("a100", {"quantization": "fp8"}, "does not multiply 8-bit floats"),
        ("cpu", {"precision": "fp32", "kernels": "liger"}, "needs a GPU"),
    ],
)
def test_what_a_card_cannot_do_is_refused_of_one_configuration(
    card: str, knobs: dict[str, Any], named: str | None
) -> None:
    shape = ModelShape(num_layers=2, prefix=0, period=1, liger=True)
    reason = refusal(TrainConfig(**knobs), MISTRAL, "transformers", shape, resolve_device(card))
    assert reason is None if named is None else named in (reason or "")


NOT_ON_A_CPU = {
    "precision": {"fp16_mixed"},
    "quantization": {"fp8"},
    "fp8_products": {"tensorwise", "rowwise"},
    "optimizer": {"lion_8bit"},
    "attention": {"flash_attention_2", "flex_attention", "sdpa_cudnn"},
    "packed_attention": {"varlen"},
    "cuda_graphs": {"micro_batch"},
    "kernels": {"liger"},
    "checkpointing": {"offload"},
    "sharding": {"fsdp2", "fsdp2_keep", "zero1", "zero2", "zero3"},
}
FP8 = ("quantization", "fp8_products")
NOT_ON_A_T4 = {  # of compute capability 7.5
    "precision": {"bf16_mixed", "bf16_pure"},
    "quantization": {"fp8"},
    "fp8_products": {"tensorwise", "rowwise"},
    "attention": {"flash_attention_2", "sdpa_cudnn"},
    "packed_attention": {"varlen"},
}


@pytest.mark.parametrize(
    ("device", "lost"),
    [
        ("cpu", NOT_ON_A_CPU),
        ("t4", NOT_ON_A_T4),
        ("a100", {"precision": {"fp16_mixed"}} | {knob: NOT_ON_A_T4[knob] for knob in FP8}),
        ("h200", {"precision": {"fp16_mixed"}}),
    ],
)
def test_what_a_device_cannot_do(
    monkeypatch: pytest.MonkeyPatch, device: str, lost: dict[str, set[str]]
) -> None:
    monkeypatch.setattr("autotune.catalog.devices.multiplies_bf16", lambda: True)
    assert lost_by(lambda narrowing: narrow_to_device(narrowing, resolve_device(device))) == lost


SLOW_BF16 = "this processor multiplies bf16 far slower than fp32 (it lacks AVX-512)"
NO_FP16 = "fp16 does not train on a CPU"


@pytest.mark.parametrize(
    ("precisions", "left", "removals"),
    [
        (("fp32", "bf16_mixed"), ("fp32",), [f"precision bf16_mixed: {SLOW_BF16}"]),
        (
            ("bf16_mixed", "bf16_pure", "fp16_mixed"),
            ("fp32",),
            [
                f"precision bf16_mixed, bf16_pure: {SLOW_BF16}; fp32 takes its place",
                f"precision fp16_mixed: {NO_FP16}",
            ],
        ),
        (("fp16_mixed", "fp32"), ("fp32",), [f"precision fp16_mixed: {NO_FP16}"]),
    ],
)
def test_a_processor_without_fast_bf16_trains_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
    precisions: tuple[str, ...],
    left: tuple[str, ...],
    removals: list[str],
) -> None:
    monkeypatch.setattr("autotune.catalog.devices.multiplies_bf16", lambda: False)
    narrowing = unnarrowed(precision=precisions)
    narrow_to_device(narrowing, resolve_device("cpu"))
    assert both(narrowing, "precision") == left
    assert [str(removal) for removal in narrowing.removals] == removals


@pytest.mark.parametrize(
    ("device", "usual"), [("cpu", "fp32"), ("t4", "fp16_mixed"), ("a100", "bf16_mixed")]
)
def test_a_space_that_names_no_precision_has_the_usual_one_of_the_device(
    device: str, usual: str
) -> None:
    narrowing = unnarrowed(micro_batch_size=(1, 2))
    narrow_to_device(narrowing, resolve_device(device))
    assert both(narrowing, "precision") == (usual,)


@pytest.mark.parametrize(
    ("precision", "reason"), [("bf16_mixed", SLOW_BF16), ("fp16_mixed", NO_FP16)]
)
def test_a_precision_that_was_asked_for_is_refused_and_not_replaced(
    monkeypatch: pytest.MonkeyPatch, precision: str, reason: str
) -> None:
    monkeypatch.setattr("autotune.catalog.devices.multiplies_bf16", lambda: False)
    with pytest.raises(UsageError, match=f"{precision}: {re.escape(reason)}$"):
        narrow_to_device(unnarrowed(precision=(precision,)), resolve_device("cpu"))


def test_fp16_trains_on_no_cpu_even_where_a_space_has_no_bf16() -> None:
    narrowing = unnarrowed(precision=("fp16_mixed", "fp32"))
    narrow_to_device(narrowing, resolve_device("cpu"))
    assert both(narrowing, "precision") == ("fp32",)
    on_gpu = unnarrowed(precision=("fp16_mixed", "fp32"))
    narrow_to_device(on_gpu, resolve_device("h200"))
    assert both(on_gpu, "precision") == ("fp16_mixed", "fp32")


@pytest.mark.parametrize(
    ("package", "lost"),
    [
        ("flash_attn", {"attention": {"flash_attention_2"}}),
        (
            "bitsandbytes",
            {
                "quantization": {"int8", "nf4"},
                "optimizer": {"adamw_8bit", "paged_adamw_8bit", "lion_8bit"},
            },
        ),
        ("liger_kernel", {"kernels": {"liger"}}),
        ("no such package", {}),
    ],
)
def test_what_needs_a_package(
    package: str, lost: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    assert lost_by(narrow_to_packages) == lost


def lost_by(narrow: Callable[[Narrowing], None]) -> dict[str, set[Any]]:
    """The values, by knob, that a space of all values of all choices loses."""
    every = space(
        **{name: knob.choices for name, knob in KNOBS.items() if knob.form == "choice"},
        checkpointing=("none", "offload"),
    )
    narrowing = Narrowing(space=every, reserve=every)
    narrow(narrowing)
    left = {knob.name: set(knob.choices()) for knob in narrowing.space.knobs}
    removed = {removal.knob for removal in narrowing.removals}
    lost = {knob.name: set(knob.choices()) - left[knob.name] for knob in every.knobs}
    assert removed == {name for name, values in lost.items() if values}
    return {name: values for name, values in lost.items() if values}


NO_CAP = "varlen attention computes a causal softmax without a cap on the scores"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({}, None),
        # which caps its scores
        ({"model_type": "gemma2"}, f"varlen attention is untested on gemma2: {NO_CAP}"),
        # which has attention sinks
        ({"model_type": "gpt_oss"}, f"varlen attention is untested on gpt_oss: {NO_CAP}"),
        ({"model_type": "mamba"}, f"varlen attention is untested on mamba: {NO_CAP}"),
        (
            {"attention_dropout": 0.1},
            "varlen attention has no dropout, but the model's attention has",
        ),
        ({"head_dim": 256}, None),
        (
            {"head_dim": 264},
            "varlen attention needs heads of at most 256 values, in multiples of 8;"
            " the model's heads have 264",
        ),
        (
            {"head_dim": None, "hidden_size": 640},
            "varlen attention needs heads of at most 256 values, in multiples of 8;"
            " the model's heads have 20",
        ),
    ],
    ids=str,
)
def test_examples_attend_by_themselves_where_attention_is_a_causal_softmax(
    shape: dict[str, Any], reason: str | None
) -> None:
    narrowing = unnarrowed(packed_attention=("mask", "varlen"))
    mistral = resolve_model("mistral-7b")
    narrow_to_model(narrowing, replace(mistral, config=mistral.config | shape), WORKLOAD)
    assert both(narrowing, "packed_attention") == (("mask",) if reason else ("mask", "varlen"))
    reasons = [one.reason for one in narrowing.removals if one.knob == "packed_attention"]
    assert reasons == ([reason] if reason else [])


def test_what_is_padded_to_the_longest_is_compiled_only_where_it_is_packed():
    searched = space(padding=("longest",), packing=(True, False), compile=("none", "per_layer"))
    narrowing = Narrowing(space=searched, reserve=searched)
    narrow_padding(narrowing, LONG_TAILED)
    assert [str(removal) for removal in narrowing.removals] == [
        "compile per_layer: without packing: sequences padded to the longest of each micro batch "
        "have too many lengths to compile for"
    ]
    compiled = [
        chosen["packing"]
        for chosen in narrowing.space.enumerate()
        if chosen.get("compile") == "per_layer"
    ]
    assert compiled and all(compiled)


def unnarrowed(**knobs: tuple[Any, ...]) -> Narrowing:
    return Narrowing(space=space(**knobs), reserve=space(**knobs))


def both(narrowing: Narrowing, name: str) -> tuple[Any, ...]:
    """The choices that are left of a knob, in the space and, as they must be, in its reserve."""
    assert narrowing.reserve.choices(name) == narrowing.space.choices(name)
    return narrowing.space.choices(name)


def when(narrowing: Narrowing, name: str) -> dict[str, Any] | None:
    """The condition of a knob, in the space and, as it must be, in its reserve."""
    knob, reserved = narrowing.space.knob(name), narrowing.reserve.knob(name)
    assert knob is not None and reserved is not None and knob.when == reserved.when
    return knob.when


@pytest.mark.parametrize("fixed", [16, 8])
def test_a_fixed_knob_keeps_its_reserve(fixed: int) -> None:
    """A preference is for knobs with a choice, whether it allows the fixed value or not."""
    narrowing = Narrowing(space=space(lora_rank=(fixed,)), reserve=space(lora_rank=(8, 16)))
    narrowing.prefer("lora_rank", lambda rank: rank >= 16, "a floor", reserve=True)
    assert narrowing.space.choices("lora_rank") == (fixed,)
    assert narrowing.reserve.choices("lora_rank") == (8, 16)
    assert narrowing.removals == []


# --- the model


@pytest.mark.parametrize(("assumed", "left"), [(True, (1, 3, 8, 12, 24)), (False, (1, 3, 8))])
def test_a_micro_batch_divides_the_global_batch_and_has_no_more_rows_than_there_are_known_examples(
    assumed: bool, left: tuple[int, ...]
) -> None:
    narrowing = unnarrowed(micro_batch_size=(1, 3, 5, 8, 12, 16, 24))
    workload = replace(
        WORKLOAD, examples=16, eval_share=0.5, examples_assumed=assumed, global_batch=24
    )
    narrow_to_model(narrowing, resolve_model("mistral-7b"), workload)
    assert both(narrowing, "micro_batch_size") == left
    reasons = ["micro_batch_size 5, 16: does not divide the global batch of 24 (--global-batch)"]
    reasons += ["micro_batch_size 12, 24: more sequences than examples (8)"] * (not assumed)
    assert [str(removal) for removal in narrowing.removals] == reasons


def test_rows_are_as_long_as_the_context_at_most() -> None:
    model = resolve_model("mistral-7b")
    context = model.max_seq_len
    assert context is not None
    narrowing = unnarrowed(seq_len=(512, context, context + 1))
    narrow_to_model(narrowing, model, WORKLOAD)
    assert both(narrowing, "seq_len") == (512, context)
    assert [removal.reason for removal in narrowing.removals] == [
        f"longer than the model's context of {context}"
    ]


@pytest.mark.parametrize(
    ("stored_as", "left"),
    [
        ("fp8", {"method": ("full", "lora"), "quantization": ("none", "fp8")}),
        ("mxfp4", {"method": ("full", "lora"), "quantization": ("none", "fp8")}),
        ("int8", {"method": ("lora",), "quantization": ("int8",), "double_quant": (True, False)}),
        ("nf4", {"method": ("lora",), "quantization": ("nf4",), "double_quant": (False,)}),
        ("nf4-double", {"method": ("lora",), "quantization": ("nf4",), "double_quant": (True,)}),
    ],
)
def test_a_quantised_checkpoint_keeps_its_format_or_is_trained_in_16_bits(
    stored_as: str, left: dict[str, tuple[Any, ...]]
) -> None:
    model = replace(MISTRAL, stored_as=stored_as)
    searched = space(
        method=("full", "lora"),
        quantization=("none", "fp8", "int8", "nf4"),
        double_quant=(True, False),
        seq_len=(64,),
    )
    narrowing = Narrowing(space=searched, reserve=searched)
    narrow_to_model(narrowing, model, WORKLOAD)
    assert {name: narrowing.space.choices(name) for name in left} == left


def test_a_space_without_the_format_of_the_checkpoint_gets_it_or_is_refused() -> None:
    model = replace(MISTRAL, stored_as="nf4")
    adapters = space(method=("lora",), seq_len=(64,))
    narrowing = Narrowing(space=adapters, reserve=adapters)
    narrow_to_model(narrowing, model, WORKLOAD)
    assert narrowing.space.choices("quantization") == ("nf4",)

    full = space(method=("full",), seq_len=(64,))
    with pytest.raises(UsageError, match=r"method is left .*full: the checkpoint is stored in nf4"):
        narrow_to_model(Narrowing(space=full, reserve=full), model, WORKLOAD)


def test_layers_whose_checkpoints_are_offloaded_do_not_compile() -> None:
    model, compiled = resolve_model("mistral-7b"), ("none", "per_layer")
    some = unnarrowed(checkpointing=("none", "offload", "full"), compile=compiled)
    narrow_to_model(some, model, WORKLOAD)
    assert (
        when(some, "compile") == {"checkpointing": ["none", "full"]}
        and both(some, "compile") == compiled
    )
    every = unnarrowed(checkpointing=("offload",), compile=compiled)
    narrow_to_model(every, model, WORKLOAD)
    assert when(every, "compile") is None and both(every, "compile") == ("none",)
    nothing = unnarrowed(checkpointing=("none", "full"), compile=compiled)
    narrow_to_model(nothing, model, WORKLOAD)
    assert when(nothing, "compile") is None and both(nothing, "compile") == compiled


@pytest.mark.parametrize(
    ("model", "pins", "reason"),
    [
        ("gpt2", {}, "CUDA graphs are untested on gpt2"),
        (
            "mistral-7b",
            {"checkpointing": "full", "padding": "bucket"},
            "works only with activation checkpointing none",
        ),
        ("mistral-7b", {"padding": "longest"}, "works only with padding bucket or max_length"),
    ],
)
def test_cuda_graphs_are_refused_for_a_reason(
    model: str, pins: dict[str, Any], reason: str
) -> None:
    searched = space(**{name: (value,) for name, value in pins.items()})
    searched = searched.pin("cuda_graphs", "micro_batch").offer(
        "cuda_graphs", ("none", "micro_batch")
    )
    narrowing = Narrowing(space=searched, reserve=searched)
    narrow_to_model(narrowing, resolve_model(model), WORKLOAD)
    assert both(narrowing, "cuda_graphs") == ("none",)
    assert any(removal.reason.startswith(reason) for removal in narrowing.removals)


@pytest.mark.parametrize(
    ("model", "pins", "reason"),
    [
        ("gpt2", {}, "joined adapters are untested on gpt2"),
        ("mistral-7b", {"compile": "none"}, "works only with compilation per_layer"),
        ("mistral-7b", {"quantization": "nf4"}, "works only with quantisation none"),
    ],
)
def test_joined_adapters_are_refused_for_a_reason(
    model: str, pins: dict[str, Any], reason: str
) -> None:
    searched = space(compile=("none", "per_layer"), padding=("bucket",))
    for name, value in pins.items():
        searched = searched.pin(name, value)
    searched = searched.offer("lora_kernels", ("peft", "joined"))
    narrowing = Narrowing(space=searched, reserve=searched)
    narrow_to_model(narrowing, resolve_model(model), WORKLOAD)
    assert both(narrowing, "lora_kernels") == ("peft",)
    assert any(removal.reason.startswith(reason) for removal in narrowing.removals)


@pytest.mark.parametrize(
    ("device", "left"), [("h100", "micro_batch"), ("mi300x", "none"), ("cpu", "none")]
)
def test_cuda_graphs_need_a_gpu_of_nvidias(device: str, left: str) -> None:
    searched = space().offer("cuda_graphs", ("none", "micro_batch"))
    narrowing = Narrowing(space=searched, reserve=searched)
    narrow_to_device(narrowing, resolve_device(device))
    assert both(narrowing, "cuda_graphs")[-1] == left


@pytest.mark.parametrize(("device", "left"), [("h100", 2), ("dgx-spark", 1), ("cpu", 1)])
def test_offloading_needs_another_memory(device: str, left: int) -> None:
    """A DGX Spark and a CPU have only the host's."""
    searched = space().offer("checkpointing", ("full", "offload")).offer("offload", (False, True))
    narrowing = Narrowing(space=searched, reserve=searched)
    narrow_to_device(narrowing, resolve_device(device))
    assert both(narrowing, "checkpointing") == ("full", "offload")[:left]
    assert both(narrowing, "offload") == (False, True)[:left]
    said = {removal.reason for removal in narrowing.removals if removal.knob in ("offload",)}
    assert said == ({"there is no other memory to offload to"} if left == 1 else set())


def test_selective_recomputation_needs_compiled_layers() -> None:
    every, compiled = ("none", "selective_50", "full"), ("none", "per_layer")
    some = unnarrowed(checkpointing=every, compile=compiled)
    narrow_checkpointing(some)
    assert both(some, "checkpointing") == every and not some.removals
    for lacking in (
        unnarrowed(checkpointing=every),
        unnarrowed(checkpointing=every, compile=("none",)),
    ):
        narrow_checkpointing(lacking)
        assert both(lacking, "checkpointing") == ("none", "full")
        assert [removal.reason for removal in lacking.removals] == [
            "it needs compiled layers, because the compiler chooses the recomputed tensors"
        ]
    conditional = unnarrowed(checkpointing=every, compile=compiled, packing=(True, False))
    conditional.only_with("compile", "packing", (True,))
    narrow_checkpointing(conditional)
    assert both(conditional, "checkpointing") == ("none", "full")
    with pytest.raises(UsageError, match="no value of checkpointing is left"):
        narrow_checkpointing(unnarrowed(checkpointing=("selective_50",), compile=("none",)))


NO_SDPA = "transformers has no SDPA attention for this model"


@pytest.mark.parametrize(
    ("attentions", "left", "reasons"),
    [
        (("sdpa",), ("eager",), [f"attention sdpa: {NO_SDPA}; eager is used instead"]),
        (
            ("sdpa", "sdpa_cudnn"),
            ("eager",),
            [
                f"attention sdpa_cudnn: {NO_SDPA}",
                f"attention sdpa: {NO_SDPA}; eager is used instead",
            ],
        ),
        (("sdpa", "flex_attention"), ("flex_attention",), [f"attention sdpa: {NO_SDPA}"]),
    ],
)
def test_without_sdpa_eager_attention_is_left_where_there_is_no_other(
    attentions: tuple[str, ...], left: tuple[str, ...], reasons: list[str]
) -> None:
    of_layers = unnarrowed(attention=attentions)
    shape = ModelShape(num_layers=2, prefix=0, period=1, sdpa=False)
    narrow_to_layers(of_layers, MISTRAL, "transformers", shape)
    assert both(of_layers, "attention") == left
    assert [str(removal) for removal in of_layers.removals] == reasons


def test_attention_sinks_need_other_kernels_than_flash_attention_2() -> None:
    """GPT-OSS has neither: eager attention is left, and asking for FlashAttention 2 is an error."""
    model = resolve_model("openai/gpt-oss-20b")
    narrowing = unnarrowed(attention=("sdpa", "flash_attention_2"))
    narrow_to_model(narrowing, model, WORKLOAD)
    assert both(narrowing, "attention") == ("eager",)
    assert [str(removal) for removal in narrowing.removals] == [
        "attention flash_attention_2: transformers has no FlashAttention 2 for this model",
        f"attention sdpa: {NO_SDPA}; eager is used instead",
    ]
    with pytest.raises(UsageError, match="FlashAttention 2"):
        narrow_to_model(unnarrowed(attention=("flash_attention_2",)), model, WORKLOAD)


@pytest.mark.parametrize(
    ("device", "changes", "found"),
    [
        ("h100", {}, ("eager", "flex_attention")),
        ("rtx-4090", {}, ("eager", "flex_attention")),
        ("t4", {}, ("eager",)),  # too old for the kernels
        ("cpu", {}, ("eager",)),
        ("h100", {"attention_dropout": 0.1}, ("eager",)),
        ("h100", {"model_type": "bloom"}, ("eager",)),  # transformers has no FlexAttention for it
        ("h100", {"model_type": "gemma2"}, ("eager", "flex_attention")),
    ],
)
def test_flex_attention_takes_the_place_of_sdpa_where_it_runs(
    device: str, changes: dict[str, Any], found: tuple[str, ...]
) -> None:
    gpt_oss = resolve_model("openai/gpt-oss-20b")
    model = replace(gpt_oss, config=gpt_oss.config | changes)
    others = attentions_without_sdpa(model, resolve_device(device), has_flex=True)
    assert others == found
    assert attentions_without_sdpa(model, resolve_device(device), has_flex=False) == ("eager",)

    narrowing = unnarrowed(attention=("sdpa", "flash_attention_2"))
    if not model.lacks("flash_attention_2"):
        narrowing.remove("attention", {"flash_attention_2"}, "not installed")
    narrow_to_model(narrowing, model, WORKLOAD, others)
    assert both(narrowing, "attention") == found
    verb = "are" if len(found) > 1 else "is"
    reason = f"attention sdpa: {NO_SDPA}; {' and '.join(found)} {verb} used instead"
    assert reason in map(str, narrowing.removals)


def test_flex_attention_is_refused_for_a_reason() -> None:
    gpt_oss = resolve_model("openai/gpt-oss-20b")
    dropping = replace(gpt_oss, config=gpt_oss.config | {"attention_dropout": 0.1})
    with pytest.raises(UsageError, match="FlexAttention supports no dropout"):
        narrow_to_model(unnarrowed(attention=("flex_attention",)), dropping, WORKLOAD)
    bloom = replace(gpt_oss, config=gpt_oss.config | {"model_type": "bloom"})
    with pytest.raises(UsageError, match="transformers has no FlexAttention for this model"):
        narrow_to_model(unnarrowed(attention=("flex_attention",)), bloom, WORKLOAD)


@pytest.mark.parametrize("model_type", ["bloom", "got_ocr2"])
def test_any_type_without_sdpa_gets_eager_attention(model_type: str) -> None:
    """transformers says which types lack it; a wrapper may lack it although its text has it."""
    text = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    config = text | {"model_type": model_type, "text_config": text}
    narrowing = unnarrowed(attention=("sdpa",))
    narrow_to_model(narrowing, ModelSpec(name="small", config=config), WORKLOAD)
    assert both(narrowing, "attention") == ("eager",)


# --- the layers


def layered(
    shape: dict[str, Any] | None,
    trainer: str = "transformers",
    model: ModelSpec = MISTRAL,
    **knobs: tuple[Any, ...],
) -> Narrowing:
    narrowing = unnarrowed(**knobs)
    known = (
        None
        if shape is None
        else ModelShape(**{"num_layers": 2, "prefix": 0, "period": 1, **shape})
    )
    narrow_to_layers(narrowing, model, trainer, known)
    return narrowing


def test_what_is_not_known_of_the_layers_is_not_searched() -> None:
    narrowing = layered(None, loss=("full", "chunked"), kernels=("torch", "liger"))
    assert (both(narrowing, "loss"), both(narrowing, "kernels")) == (("full",), ("torch",))
    assert [str(removal) for removal in narrowing.removals] == [
        "loss chunked: whether the model changes its logits after its head is not known",
        "kernels liger: Liger has no kernels for this model",
    ]
    trl = layered(None, "trl", loss=("full", "chunked"))
    assert both(trl, "loss") == ("full", "chunked")  # its chunked loss is its own


def test_layers_without_adapters_are_trained_as_a_whole_or_not_at_all() -> None:
    refused = {"no_adapters": "a reason"}
    assert both(layered(refused, method=("lora", "full")), "method") == ("full",)
    assert both(layered(refused, method=("full",)), "method") == ("full",)
    for knobs in ({}, {"method": ("lora",)}):  # adapters are the default
        with pytest.raises(
            UsageError, match="PEFT refuses adapters on the model's layers: a reason"
        ):
            layered(refused, **knobs)
    assert both(layered({"no_adapters": ""}, method=("lora", "full")), "method") == ("lora", "full")


def test_other_layers_may_have_adapters_where_peft_refuses_some() -> None:
    refused = {"no_adapters": "a reason"}
    some = layered(refused, lora_targets=("all-linear", "q_v"), method=("lora", "full"))
    assert (both(some, "lora_targets"), both(some, "method")) == (("q_v",), ("lora", "full"))
    assert (
        "lora_targets all-linear: PEFT refuses adapters on some of the model's layers: a reason"
        in map(str, some.removals)
    )
    assert both(layered(refused, lora_targets=("attention",)), "lora_targets") == ("attention",)
    with pytest.raises(UsageError, match="a reason; --set lora_targets=attention may be possible"):
        layered(refused | {"linear_layers": ("self_attn.q_proj",)})


def test_adapters_are_on_layers_that_the_model_has() -> None:
    layers = ("self_attn.q_proj", "self_attn.o_proj", "mlp.q_proj", "mlp.up_proj", "dense")
    asked = (
        "all-linear",
        "q_v",
        "attn.q_proj",
        "q_proj,up_proj",
        "self_attn.o_proj",
        "q_proj,dense",
        "k_proj",
    )
    narrowing = layered({"linear_layers": layers}, lora_targets=(*asked, "proj,up_proj"))
    left = ("all-linear", "q_proj,up_proj", "self_attn.o_proj", "q_proj,dense")
    assert both(narrowing, "lora_targets") == left
    reason = "the model's linear layers have only these names: q_proj, o_proj, up_proj, dense"
    assert f"lora_targets q_v, attn.q_proj, k_proj, proj,up_proj: {reason}" in map(
        str, narrowing.removals
    )
    # nothing is known
    assert both(layered({}, lora_targets=("k_proj",)), "lora_targets") == ("k_proj",)
    # Of a type whose names are known, a few are enough: models of one type have different ones.
    latent = ModelSpec(name="v2", config=MISTRAL.config | {"model_type": "deepseek_v2"})
    few = {"linear_layers": ("self_attn.q_proj", "self_attn.kv_b_proj", "self_attn.o_proj")}
    assert both(layered(few, model=latent, lora_targets=("q_v", "attention")), "lora_targets") == (
        "q_v",
        "attention",
    )
    assert both(layered(few, lora_targets=("q_v", "all-linear")), "lora_targets") == ("all-linear",)
    with pytest.raises(UsageError, match="only these names: q_proj"):
        layered({"linear_layers": layers}, lora_targets=("v_proj",))


@pytest.mark.parametrize("projection", ["gate_up_proj", "up_proj"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "dbrx"])
def test_adapters_on_experts_need_attention_and_one_parameter_of_experts(
    projection: str, model_type: str
) -> None:
    """Whether or not the module names of the model type are known (DBRX's are)."""
    model = ModelSpec(name="mixture", config=MISTRAL.config | {"model_type": model_type})
    names = {"qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj")}.get(model_type, ("Wqkv",))
    attention = {"linear_layers": tuple(f"attn.{name}" for name in names)}
    experts = {"experts": (f"mlp.experts.{projection}", "mlp.experts.down_proj")}
    asked = ("attention", "attention_experts")

    def left(shape: dict[str, Any]) -> tuple[Any, ...]:
        return both(layered(shape, model=model, lora_targets=asked), "lora_targets")

    assert left(attention | experts) == asked
    assert left(attention) == ("attention",)
    with pytest.raises(UsageError, match="only these names: norm"):
        left({"linear_layers": ("norm",)} | experts)


def test_a_model_without_attention_has_no_adapters_on_it() -> None:
    narrowing = unnarrowed(lora_targets=("all-linear", "attention", "q_v", "in_proj"))
    narrow_to_model(narrowing, resolve_model("mistralai/Mamba-Codestral-7B-v0.1"), WORKLOAD)
    assert both(narrowing, "lora_targets") == ("all-linear", "in_proj")
    assert "lora_targets attention, q_v: the model has no attention" in map(str, narrowing.removals)


def test_adapters_on_attention_compile_beside_fused_experts() -> None:
    compiled = ("none", "per_layer")
    for targets, left in (
        (("attention", "q_v"), compiled),
        (("all-linear", "q_v"), ("none",)),
        (("w_1",), compiled),
    ):
        narrowing = layered({"parametrized": True}, compile=compiled, lora_targets=targets)
        assert both(narrowing, "compile") == left


def test_adapters_on_fused_experts_are_compiled_nowhere() -> None:
    compiled = ("none", "per_layer")
    shape = {"parametrized": True}
    assert both(layered(shape, method=("lora", "full"), compile=compiled), "compile") == ("none",)
    assert both(layered(shape, compile=compiled), "compile") == ("none",)
    assert both(layered(shape, method=("full",), compile=compiled), "compile") == compiled
    assert both(layered({}, compile=compiled), "compile") == compiled


KERNELS = ("peft", "joined", "grouped")


@pytest.mark.parametrize(
    ("shape", "targets", "left"),
    [
        (EXPERTS, ("all-linear",), KERNELS),
        (EXPERTS, ("attention_experts", "attention"), KERNELS),
        (EXPERTS, ("experts.down_proj,q_proj",), KERNELS),
        (EXPERTS | {"parametrized": False}, ("all-linear",), ("peft", "joined")),
        (EXPERTS, ("attention",), ("peft", "joined")),
        (EXPERTS, ("all-linear", "q_proj,v_proj"), ("peft", "joined")),
        ({"parametrized": True}, ("all-linear",), ("peft", "joined")),
        ({}, ("all-linear",), ("peft", "joined")),
    ],
)
def test_grouped_products_are_for_adapters_on_experts(
    shape: dict[str, Any], targets: tuple[str, ...], left: tuple[str, ...]
) -> None:
    narrowing = layered(shape, lora_kernels=KERNELS, lora_targets=targets)
    assert both(narrowing, "lora_kernels") == left
    news = [str(removal) for removal in narrowing.removals if removal.knob == "lora_kernels"]
    assert news == (
        ["lora_kernels grouped: the model's experts do not use transformers' interface for experts"]
        if shape == {"parametrized": True}
        else []
    )


@pytest.mark.parametrize(
    ("shape", "targets", "left"),
    [
        (EXPERTS, "all-linear", (False, True)),
        (EXPERTS, "attention", (False, True)),
        (EXPERTS, "attention_experts", (False, True)),
        ({"parametrized": True}, "all-linear", (False,)),
        ({}, "all-linear", (False,)),
    ],
)
def test_experts_in_4_bits_need_transformers_interface(
    shape: dict[str, Any], targets: str, left: tuple[bool, ...]
) -> None:
    narrowing = layered(shape, quantize_experts=(False, True), lora_targets=(targets,))
    assert both(narrowing, "quantize_experts") == left
    news = [str(one) for one in narrowing.removals if one.knob == "quantize_experts"]
    assert len(news) == (left == (False,)) and all("transformers' interface" in one for one in news)


@pytest.mark.parametrize(("model", "left"), [("mixtral-8x7b", (False, True)), ("mistral-7b", None)])
def test_only_mixtures_have_the_knobs_of_experts(model: str, left: tuple[bool, ...] | None) -> None:
    """Studies of other models are continued with the same space as before."""
    space = SearchSpace.load("qlora")
    narrowing = Narrowing(space=space, reserve=space)
    narrow_to_model(narrowing, resolve_model(model), WORKLOAD)
    for one in (narrowing.space, narrowing.reserve):
        assert (knob := one.knob("quantize_experts")) is None or knob.choices() == left
        assert (one.knob("quantize_experts") is None) is (one.knob("lora_kernels") is None)
        assert (knob is None) is (left is None)
    assert not any("experts" in str(removal) for removal in narrowing.removals)

    pinned = space.pin("quantize_experts", True)
    narrowing = Narrowing(space=pinned, reserve=pinned)
    if left is None:
        with pytest.raises(UsageError, match="the model has no experts"):
            narrow_to_model(narrowing, resolve_model(model), WORKLOAD)
    else:
        narrow_to_model(narrowing, resolve_model(model), WORKLOAD)


def test_adapters_on_experts_compile_only_as_grouped_products() -> None:
    compiled = ("none", "per_layer")
    narrowing = layered(EXPERTS, compile=compiled, lora_kernels=("peft", "grouped"))
    chosen = {
        (choice.get("compile"), choice["lora_kernels"]) for choice in narrowing.space.enumerate()
    }
    assert chosen == {(None, "peft"), ("none", "grouped"), ("per_layer", "grouped")}

    alone = layered(EXPERTS, compile=compiled, lora_kernels=("grouped",))
    assert {choice["compile"] for choice in alone.space.enumerate()} == set(compiled)
    several = layered(EXPERTS, compile=compiled, lora_kernels=("grouped",), num_gpus=(1, 2))
    assert {
        choice.get("compile") for choice in several.space.enumerate() if choice["num_gpus"] == 2
    } == set(compiled)


# --- TRL


def of_trl(**knobs: tuple[Any, ...]) -> Narrowing:
    narrowing = unnarrowed(**knobs)
    narrow_to_trl(narrowing, installed=False)
    return narrowing


def test_trl_has_one_loss_and_neither_packing_nor_fp8() -> None:
    narrowing = of_trl(
        loss=("full", "chunked"),
        packing=(False, True),
        quantization=("none", "fp8"),
        attention=("sdpa", "sdpa_cudnn"),
    )
    left = {
        name: both(narrowing, name) for name in ("loss", "packing", "quantization", "attention")
    }
    assert left == {
        "loss": ("chunked",),
        "packing": (False,),
        "quantization": ("none",),
        "attention": ("sdpa",),
    }
    assert [str(removal).partition(":")[0] for removal in narrowing.removals] == [
        "loss full",
        "packing True",
        "quantization fp8",
        "attention sdpa_cudnn",
    ]
    assert both(of_trl(), "loss") == ("chunked",)
    with pytest.raises(UsageError, match="TRL supports only its own chunked loss"):
        of_trl(loss=("full",))


@pytest.mark.parametrize(
    ("knobs", "left"),
    [
        ({}, ("bf16_mixed",)),
        ({"quantization": ("nf4", "none")}, ("bf16_mixed",)),
        ({"quantization": ("nf4",)}, ("bf16_mixed", "bf16_pure")),
        ({"method": ("full",)}, ("bf16_mixed", "bf16_pure")),
        ({"method": ("full", "lora")}, ("bf16_mixed",)),
    ],
)
def test_trl_keeps_adapters_on_an_unquantised_base_in_fp32(
    knobs: dict[str, tuple[str, ...]], left: tuple[str, ...]
) -> None:
    assert both(of_trl(precision=("bf16_mixed", "bf16_pure"), **knobs), "precision") == left


COMPILED = {"compile": ("none", "per_layer")}


@pytest.mark.parametrize(
    ("knobs", "left", "condition"),
    [
        (COMPILED, ("max_length",), {"compile": ["per_layer"]}),
        (
            COMPILED | {"padding": ("longest", "bucket")},
            ("max_length",),
            {"compile": ["per_layer"]},
        ),
        (
            COMPILED | {"padding": ("longest", "max_length")},
            ("max_length",),
            {"compile": ["per_layer"]},
        ),
        (COMPILED | {"padding": ("longest",)}, ("longest",), None),  # as it was asked for
        (COMPILED | {"padding": ("max_length", "bucket")}, ("max_length",), None),
        ({"padding": ("longest", "bucket")}, ("longest",), None),  # nothing is compiled
    ],
)
def test_trl_pads_to_one_length_in_order_to_compile(
    knobs: dict[str, tuple[str, ...]], left: tuple[str, ...], condition: dict[str, Any] | None
) -> None:
    narrowing = of_trl(**knobs)
    assert both(narrowing, "padding") == left and when(narrowing, "padding") == condition


def test_trl_pads_nothing_where_nothing_is_compiled() -> None:
    assert of_trl().space.knob("padding") is None
    with pytest.raises(
        UsageError,
        match="TRL pads to the longest sequence of a micro batch, or all sequences to one length",
    ):
        of_trl(padding=("bucket",))


# --- padding


@pytest.mark.parametrize(
    ("knobs", "left"),
    [
        ({"padding": ("longest",)}, ("none",)),
        ({"padding": ("longest",), "packing": (False,)}, ("none",)),
        ({"padding": ("longest", "masked")}, ("none",)),
        ({"padding": ("longest", "bucket")}, ("none", "per_layer")),
        ({"padding": ("longest", "bucket", "masked")}, ("none", "per_layer")),
        ({"padding": ("bucket",)}, ("none", "per_layer")),
        ({}, ("none", "per_layer")),
    ],
)
def test_rows_that_can_only_be_padded_to_the_longest_are_not_compiled(
    knobs: dict[str, tuple[Any, ...]], left: tuple[str, ...]
) -> None:
    narrowing = unnarrowed(**COMPILED, **knobs)
    narrow_padding(narrowing, LONG_TAILED)
    assert both(narrowing, "compile") == left and when(narrowing, "compile") is None
    uncompiled = unnarrowed(padding=("longest",), packing=(True, False), compile=("none",))
    narrow_padding(uncompiled, LONG_TAILED)
    assert not uncompiled.removals and when(uncompiled, "compile") is None


def test_examples_of_one_length_need_no_mask() -> None:
    alike = Workload(lengths=Lengths.constant(512, "given"))
    for workload, left in (
        (alike, ("longest", "bucket")),
        (LONG_TAILED, ("longest", "bucket", "masked")),
    ):
        narrowing = unnarrowed(padding=("longest", "bucket", "masked"))
        narrow_padding(narrowing, workload)
        assert both(narrowing, "padding") == left and not narrowing.removals
    asked_for = unnarrowed(padding=("masked",))
    narrow_padding(asked_for, alike)
    assert both(asked_for, "padding") == ("masked",)


# --- floors and the reserve


def test_the_reserve_keeps_what_only_the_floors_forbid() -> None:
    searched = space(
        seq_len=(512, 1024),
        lora_rank=(8, 16),
        quantization=("none", "fp8", "nf4"),
        optimizer=("adamw_torch", "adafactor"),
        precision=("bf16_mixed", "bf16_pure"),
    )
    reserve = floored(searched).reserve
    assert {knob.name: knob.choices() for knob in reserve.knobs} == {
        "seq_len": (1024,),
        "lora_rank": (16,),
        "quantization": ("none", "fp8", "nf4"),
        "optimizer": ("adamw_torch", "adafactor"),
        "precision": ("bf16_mixed",),
    }
    allowed = floored(searched, allow_quantized=True)
    assert both(allowed, "quantization") == ("none", "fp8", "nf4")


def test_a_floor_may_be_all_that_the_space_has() -> None:
    assert narrowed(space(lora_rank=(8, 64), seq_len=(1024,)), min_rank=64)["lora_rank"] == (64,)
    assert narrowed(space(seq_len=(512,)), max_truncated=0.5)["seq_len"] == (512,)
    workload = replace(WORKLOAD, lengths=Lengths.constant(768))  # a third is cut off
    with pytest.raises(UsageError) as caught:
        floored(space(seq_len=(512,)), workload, max_truncated=0.1)
    assert caught.value.remedy.startswith("give 0.334 or more, or ")


# --- packing at its limits


def packed(workload: Workload, model_type: str = "mistral", **knobs: tuple[Any, ...]) -> Narrowing:
    narrowing = unnarrowed(**{"packing": (False, True), **knobs})
    narrowing.remove_untested("model_type", model_type)  # as narrow_to_model does
    narrow_packing(narrowing, workload)
    return narrowing


def test_a_step_of_packed_rows_is_a_quarter_off_the_global_batch_at_most() -> None:
    """Rows hold 3, 5 or 6 examples of 512 tokens: three are a quarter less than four, five a
    quarter more.
    """
    workload = Workload(examples=900, lengths=Lengths.constant(512), global_batch=4)
    narrowing = packed(workload, seq_len=(1536, 2560, 3072), micro_batch_size=(1,))
    assert both(narrowing, "packing") == (False, True)
    assert when(narrowing, "packing") == {"seq_len": [1536, 2560]}
    reason = (
        "a step's number of examples would differ by over 25% from the global batch of 4"
        " (--global-batch)"
    )
    assert [str(one) for one in narrowing.removals] == [
        f"packing True: not with seq_len 3072: {reason}"
    ]


def test_a_step_of_packed_rows_may_be_too_small() -> None:
    """Rows hold 7 or 10 examples of 512 tokens: one row of 7 is three tenths less than ten, two are
    more.
    """
    workload = Workload(examples=700, lengths=Lengths.constant(512), global_batch=10)
    assert when(packed(workload, seq_len=(3584, 5120), micro_batch_size=(1,)), "packing") == {
        "seq_len": [5120]
    }


def test_a_step_of_packed_rows_has_no_more_examples_than_there_are() -> None:
    """Rows hold two of four examples: three rows a step would hold six, which is near five."""
    workload = Workload(examples=4, lengths=Lengths.constant(512), global_batch=5)
    assert when(packed(workload, seq_len=(1024,), micro_batch_size=(1, 3)), "packing") == {
        "micro_batch_size": [1]
    }


@pytest.mark.parametrize(("full_rows", "left"), [(19, (False, True)), (20, (False,))])
def test_packing_is_worth_a_trial_from_a_twentieth_of_an_example_on(
    full_rows: int, left: tuple[bool, ...]
) -> None:
    """Two examples share the last row: 21 in 20 rows, or 22 in 21."""
    lengths = Lengths.of([1000] * full_rows + [500] * 2, "counted")
    workload = Workload(examples=full_rows + 2, lengths=lengths, global_batch=full_rows + 2)
    assert both(packed(workload, seq_len=(1000,), micro_batch_size=(1,)), "packing") == left


@pytest.mark.parametrize(("number", "left"), [(16, (False, True)), (17, (False,))])
def test_packing_is_searched_with_sixteen_lengths_at_most(
    number: int, left: tuple[bool, ...]
) -> None:
    workload = Workload(examples=900, lengths=Lengths.constant(100), global_batch=32)
    narrowing = packed(workload, seq_len=tuple(range(800, 800 + number)), micro_batch_size=(1,))
    assert both(narrowing, "packing") == left


def test_packing_that_is_asked_for_removes_what_it_does_not_go_with() -> None:
    attentions, lengths = ("sdpa", "flash_attention_2", "eager"), Lengths.constant(512, "assumed")
    workload = Workload(examples=900, lengths=lengths, global_batch=32)
    narrowing = packed(
        workload, packing=(True,), attention=attentions, seq_len=(1024,), micro_batch_size=(1,)
    )
    assert both(narrowing, "attention") == ("sdpa", "eager") and when(narrowing, "packing") is None
    # lengths that are assumed are no reason
    assert both(packed(workload, seq_len=(1024,)), "packing") == (False,)
    given = replace(workload, lengths=Lengths.constant(512))
    searched = packed(given, attention=attentions, seq_len=(1024,), micro_batch_size=(1,))
    assert both(searched, "attention") == attentions
    assert when(searched, "packing") == {"attention": ["sdpa", "eager"]}
    with pytest.raises(UsageError, match="packing is untested on bloom"):
        packed(given, "bloom", packing=(True,))
    assert both(packed(given, "bloom"), "packing") == (False,)
    assert not packed(given, "bloom", packing=(False,)).removals


@pytest.mark.parametrize(
    ("model_type", "left"),
    [
        *(
            (name, (False, True))
            for name in ("gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral")
        ),
        *((name, (False, True)) for name in ("gpt_oss", "phi3", "qwen2", "qwen3", "qwen3_moe")),
        *((name, (False,)) for name in ("falcon", "qwen3_next", "qwen3_5")),
    ],
)
def test_packing_is_searched_for_models_that_were_seen_to_keep_examples_apart(
    model_type: str, left: tuple[bool, ...]
) -> None:
    """They are those of tests/probe/test_packing.py; two examples of 512 tokens fit into a row of
    1,024.
    """
    workload = Workload(examples=900, lengths=Lengths.constant(512), global_batch=32)
    assert (
        both(packed(workload, model_type, seq_len=(1024,), micro_batch_size=(1,)), "packing")
        == left
    )


@pytest.mark.parametrize(
    ("knob", "value", "reason"),
    [
        ("lora_dropout", 0.1, "with lora_dropout 0.1: it needs lora_dropout 0.0"),
        ("compile", "per_layer", "with compile per_layer: it needs compile none"),
        ("quantization", "int8", "with quantization int8: it needs quantization none or nf4"),
        ("checkpointing", "none", "with checkpointing none: it needs checkpointing other than"),
    ],
)
def test_tiles_are_refused_beside_what_they_would_change(
    knob: str, value: object, reason: str
) -> None:
    """Otherwise the study would compute whole layers, and nobody would say so."""
    spec = StudySpec(
        model="mistral-7b", pins={"tiling": "tokens", knob: value}, allow_quantized=True
    )
    with pytest.raises(UsageError, match=reason):
        set_up(spec, resolve_device("h200"))
    made = set_up(StudySpec(model="mistral-7b", pins={"tiling": "tokens"}), resolve_device("h200"))
    assert made.task.space.choices("tiling") == ("tokens",)
