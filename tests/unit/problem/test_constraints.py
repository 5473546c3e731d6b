"""Floors are never given up unasked, and packing is searched only where it is possible."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import UsageError
from autotune.core.knobs import KNOBS
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig
from autotune.problem.constraints import (
    Floors,
    Narrowing,
    apply_floors,
    narrow_padding,
    narrow_to_device,
    narrow_to_packages,
    refusal,
)
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import Knob, SearchSpace
from autotune.problem.setup import Setup, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.workload import Workload

WORKLOAD = Workload(examples=1000, lengths=Lengths.constant(1024), global_batch=32)


def space(**knobs) -> SearchSpace:
    return SearchSpace(name="test", knobs=tuple(Knob(name=name, values=values) for name, values in knobs.items()))


def floored(searched: SearchSpace, workload: Workload = WORKLOAD, **floors) -> Narrowing:
    narrowing = Narrowing(space=searched, reserve=searched)
    apply_floors(narrowing, workload, Floors(**floors))
    return narrowing


def narrowed(searched: SearchSpace, workload: Workload = WORKLOAD, **floors) -> dict[str, tuple]:
    return {knob.name: knob.choices() for knob in floored(searched, workload, **floors).space.knobs}


def test_the_default_floors():
    narrowing = floored(SearchSpace.load("default"))
    assert {knob.name: knob.choices() for knob in narrowing.space.knobs if knob.kind == "learning"} == {
        "method": ("lora",),
        "quantization": ("none",),
        "double_quant": (True, False),
        "seq_len": (1024,),
        "lora_rank": (16, 32, 64),
        "precision": ("bf16_mixed", "fp16_mixed"),
        "optimizer": ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"),
    }
    assert [str(removal) for removal in narrowing.removals] == [
        "seq_len 512: would cut off more than 1% of the tokens (--max-truncated)",
        "seq_len 2048, 4096: no example is longer than 1024 tokens: the rest of a row would be padding",
        "lora_rank 8: below the rank floor of 16 (--min-rank)",
        "quantization fp8, int8, nf4: a quantised base learns differently: used only where nothing else fits "
        "(--allow-quantized)",
        "precision bf16_pure: no fp32 master weights: used only where it is asked for (--allow-pure-bf16)",
    ]


def test_a_floor_below_a_percent_is_named_as_it_is():
    lengths = Lengths.of([512] * 999 + [4096], "counted")
    narrowing = floored(SearchSpace.of(seq_len=[512, 1024, 4096]), Workload(lengths=lengths), max_truncated=0.0065)
    assert str(narrowing.removals[0]) == "seq_len 512: would cut off more than 0.65% of the tokens (--max-truncated)"


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
        ({"lora_rank": (8, 64)}, {"min_rank": 65}, "--min-rank 65: the largest rank of the space is 64"),
        ({"lora_rank": (8,)}, {"min_rank": 16}, "the largest rank of the space is 8"),  # pinned, and asked for more
        ({"seq_len": (512,)}, {}, None),
        (
            {"seq_len": (512,)},
            {"max_truncated": 0.1},
            "the longest rows, 512, cut off 50.00% of the tokens",
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
    assert narrowed(lengths, Workload(lengths=Lengths.constant(1000)))["seq_len"] == tuple(range(990, 1001))


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
        ({"optimizer": ("adafactor", "adamw_torch")}, {"allow_any_optimizer": True}, ("adafactor", "adamw_torch")),
        ({"precision": ("bf16_pure", "bf16_mixed")}, {}, ("bf16_mixed",)),
        ({"precision": ("bf16_pure", "bf16_mixed")}, {"allow_pure_bf16": True}, ("bf16_pure", "bf16_mixed")),
        ({"precision": ("bf16_pure",)}, {}, ("bf16_pure",)),
        ({"precision": ("bf16_pure", "bf16_mixed"), "method": ("full",)}, {}, ("bf16_mixed",)),
        ({"precision": ("bf16_pure", "fp32"), "method": ("full",)}, {"allow_pure_bf16": True}, ("bf16_pure", "fp32")),
        ({"precision": ("bf16_pure",), "method": ("full",)}, {}, ("bf16_pure",)),
        ({"micro_batch_size": (1, 2)}, {}, (1, 2)),
    ],
)
def test_floors(knobs, floors, kept):
    assert next(iter(narrowed(space(**knobs), **floors).values())) == kept


@pytest.mark.parametrize(("shipped", "opened"), [("lora", False), ("qlora", False), ("full", True)])
def test_only_full_fine_tuning_has_pure_bf16_in_reserve(shipped: str, opened: bool) -> None:
    """With LoRA it would save a few hundred MiB, and would be searched whenever a quantised base is."""
    setup = set_up(StudySpec(model="mistral-7b", space=shipped), resolve_device("h200"))
    assert setup.task.space.choices("precision") == ("bf16_mixed",)
    assert ("bf16_pure" in setup.reserve.choices("precision")) is opened
    assert setup.reserved == ("precision bf16_pure; optimizer adafactor or lion_8bit" if opened else "")


# --- packing

SKEWED = Lengths.of([100] * 60 + [300] * 25 + [700] * 10 + [2000] * 5, "counted")


def prepared(lengths: str | None = None, model: str = "mistral-7b", **asked: Any) -> Setup:
    return set_up(StudySpec(model=model, lengths=lengths, space="lora", **asked), resolve_device("h200"))


def removed(setup: Setup) -> list[str]:
    return [str(one) for one in setup.removals if one.knob == "packing" or "packed" in one.reason]


@pytest.fixture
def skewed(tmp_path: Path) -> str:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(str(tokens) for tokens, number in SKEWED.counts for _ in range(number)))
    return str(file)


def test_packing_is_searched_with_micro_batches_that_keep_the_global_batch(skewed: str) -> None:
    setup = prepared(skewed)
    knob = setup.task.space.knob("packing")
    assert knob is not None and knob.choices() == (False, True)
    # A row of 2,048 tokens holds 6 of these examples: 32 of them are 5 rows.
    assert knob.when is not None and knob.when["micro_batch_size"] == [1, 2, 4]
    reason = "a step would be over 25% off the global batch of 32 (--global-batch)"
    assert removed(setup) == [f"packing True: not with micro_batch_size 8, 16, 32: {reason}"]
    for chosen in setup.task.space.enumerate():
        config = setup.task.space.config(chosen)
        assert setup.task.workload.run_shape(config).examples_per_step == pytest.approx(32, rel=0.25)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "how long the examples are was not given (--dataset, --lengths)"),
        ({"tokens_per_example": 4096}, "no row has room for a second example"),
        ({"tokens_per_example": 16, "global_batch": 1, "pins": {"seq_len": 4096}}, "a row holds 250.0 examples"),
        (
            {"mean_tokens": 200, "p99_tokens": 900, "pins": {"attention": "flash_attention_2"}},
            "sdpa and eager attention alone",
        ),
    ],
)
def test_packing_is_left_out_for_a_reason(asked: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    setup = prepared(**asked)
    assert setup.task.space.knob("packing").choices() == (False,)  # type: ignore[union-attr]
    assert len(removed(setup)) == 1 and removed(setup)[0].endswith(reason)


def test_a_row_length_that_does_not_go_with_the_global_batch_is_left_out_by_itself() -> None:
    setup = prepared(mean_tokens=200, p99_tokens=900)  # 4,096 tokens hold 20 of them: 32 are no whole rows
    packed = {one.seq_len for one in map(setup.task.space.config, setup.task.space.enumerate()) if one.packing}
    assert packed == {2048}
    assert any("not with seq_len 4096" in line for line in removed(setup))


def test_packing_may_be_asked_for(skewed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    setup = set_up(
        StudySpec(model="mistral-7b", lengths=skewed, space="default", pins={"packing": True}), resolve_device("h200")
    )
    choices = [setup.task.space.config(chosen) for chosen in setup.task.space.enumerate()]
    assert {config.micro_batch_size for config in choices} == {1, 2, 4}
    assert {config.attention for config in choices} == {"sdpa"}  # with flash_attention_2 neighbours may be seen
    with pytest.raises(
        UsageError, match="packing was asked for, but a step would be over 25% off the global batch of 2"
    ):
        prepared(skewed, pins={"packing": True}, global_batch=2)


@pytest.mark.parametrize(
    ("knobs", "shape", "named"),
    [
        ({}, {}, None),
        ({"loss": "chunked"}, {"plain_head": True}, None),
        ({"loss": "chunked"}, {}, "changes its logits after its head"),
        ({"kernels": "liger"}, {"liger": True}, None),
        ({"kernels": "liger"}, {}, "Liger has no kernels"),
        ({"compile": "per_layer"}, {"parametrized": True}, "does not compile"),
        ({"compile": "per_layer", "method": "full"}, {"parametrized": True}, None),
        ({"attention": "sdpa"}, {"sdpa": False}, "sdpa"),
    ],
    ids=str,
)
def test_what_the_layers_of_a_model_cannot_do_is_refused_of_one_configuration(
    knobs: dict[str, Any], shape: dict[str, Any], named: str | None
) -> None:
    shape_of = ModelShape(num_layers=2, prefix=0, period=1, **shape)
    reason = refusal(TrainConfig(**knobs), "transformers", shape_of, resolve_device("h200"))
    assert reason is None if named is None else named in (reason or "")


@pytest.mark.parametrize(
    ("card", "knobs", "named"),
    [
        ("t4", {}, "t4 has no bf16"),
        ("t4", {"precision": "fp16_mixed"}, None),
        ("v100-16gb", {"precision": "fp16_mixed", "attention": "flash_attention_2"}, "too old"),
        ("a100", {"quantization": "fp8"}, "does not multiply 8-bit floats"),
        ("cpu", {"kernels": "liger"}, "needs a GPU"),
    ],
)
def test_what_a_card_cannot_do_is_refused_of_one_configuration(
    card: str, knobs: dict[str, Any], named: str | None
) -> None:
    shape = ModelShape(num_layers=2, prefix=0, period=1, liger=True)
    reason = refusal(TrainConfig(**knobs), "transformers", shape, resolve_device(card))
    assert reason is None if named is None else named in (reason or "")


NOT_ON_A_CPU = {
    "precision": {"fp16_mixed"},
    "quantization": {"fp8"},
    "optimizer": {"lion_8bit"},
    "attention": {"flash_attention_2", "flex_attention", "sdpa_cudnn"},
    "kernels": {"liger"},
    "checkpointing": {"offload"},
}
NOT_ON_A_T4 = {  # of compute capability 7.5
    "precision": {"bf16_mixed", "bf16_pure"},
    "quantization": {"fp8"},
    "attention": {"flash_attention_2", "sdpa_cudnn"},
}


@pytest.mark.parametrize(
    ("device", "lost"),
    [
        ("cpu", NOT_ON_A_CPU),
        ("t4", NOT_ON_A_T4),
        ("a100", {"precision": {"fp16_mixed"}, "quantization": {"fp8"}}),
        ("h200", {"precision": {"fp16_mixed"}}),
    ],
)
def test_what_a_device_cannot_do(device: str, lost: dict[str, set[str]]) -> None:
    assert lost_by(lambda narrowing: narrow_to_device(narrowing, resolve_device(device))) == lost


@pytest.mark.parametrize(
    ("package", "lost"),
    [
        ("flash_attn", {"attention": {"flash_attention_2"}}),
        (
            "bitsandbytes",
            {"quantization": {"int8", "nf4"}, "optimizer": {"adamw_8bit", "paged_adamw_8bit", "lion_8bit"}},
        ),
        ("liger_kernel", {"kernels": {"liger"}}),
        ("torchao", {"quantization": {"fp8"}}),
        ("no such package", {}),
    ],
)
def test_what_needs_a_package(package: str, lost: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
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


def test_what_is_padded_to_the_longest_is_compiled_only_where_it_is_packed():
    searched = space(padding=("longest",), packing=(True, False), compile=("none", "per_layer"))
    narrowing = Narrowing(space=searched, reserve=searched)
    narrow_padding(narrowing)
    assert [str(removal) for removal in narrowing.removals] == [
        "compile per_layer: without packing: rows padded to the longest of each micro batch have too many lengths to "
        "compile for"
    ]
    compiled = [chosen["packing"] for chosen in narrowing.space.enumerate() if chosen.get("compile") == "per_layer"]
    assert compiled and all(compiled)
