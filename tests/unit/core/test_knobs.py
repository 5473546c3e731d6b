"""The registry is complete and consistent, and checks values."""

import math
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

import pytest

from autotune.core.knobs import (
    KNOBS,
    KnobSpec,
    _tuples,
    check_value,
    checkpoint_every,
    knobs_affecting,
)
from autotune.core.train_config import TrainConfig


def names(form: str) -> list[str]:
    return [name for name, knob in KNOBS.items() if knob.form == form]


def test_every_knob_is_a_field_with_its_default():
    assert list(KNOBS) == [field.name for field in fields(TrainConfig)]
    assert all(knob.name == name for name, knob in KNOBS.items())
    assert {field.name: field.default for field in fields(TrainConfig)} == {
        name: knob.default for name, knob in KNOBS.items()
    }
    for name, knob in KNOBS.items():
        if name != "sharding":  # which has no value on one GPU
            check_value(name, knob.default)
        assert knob.label and knob.description.endswith(".") and knob.distance_weight > 0


def test_orders_hold_every_choice_once():
    for name, knob in KNOBS.items():
        for order in (
            knob.fastest_first,
            knob.leanest_first,
            tuple(chain(*knob.least_capable_first)),
        ):
            assert not order or sorted(order, key=str) == sorted(knob.choices, key=str), name
        assert set(chain(*knob.surely_leanest_first)) <= set(knob.choices), name
        assert set(knob.phrases) <= set(knob.choices), name
        assert knob.form != "choice" or not knob.affects & {"memory"} or knob.leanest_first, name


def test_a_knob_stands_after_those_that_decide_whether_it_is_active():
    order = list(KNOBS)
    for name, knob in KNOBS.items():
        for other in (*knob.active_when, *knob.never_with):
            assert order.index(other) < order.index(name)


def test_learning_knobs_are_those_that_change_what_is_learned():
    assert {name for name, knob in KNOBS.items() if knob.kind == "learning"} == {
        *(
            "method",
            "seq_len",
            "lora_rank",
            "lora_targets",
            "optimizer",
            "precision",
            "quantization",
            "double_quant",
        ),
        *(
            "dora",
            "lora_dropout",
            "rslora",
            "group_by_length",
            "modules_to_save",
            "kbit_preparation",
        ),
        "optimizer_in_backward",
        "quantize_experts",
        "fp8_products",
    }


def test_effects_select_knobs():
    of_base = ("precision", "quantization", "double_quant", "kbit_preparation")
    of_rank = ("num_gpus", "quantize_experts", "sharding", "copies", "offload", "lora_kernels")
    assert knobs_affecting("weights") == (
        "method",
        "lora_targets",
        "modules_to_save",
        *of_base,
        "dora",
        *of_rank,
    )
    assert set(knobs_affecting("rest_of_step")) - set(knobs_affecting("micro_time")) == {
        "optimizer"
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "checkpointing",
            [
                "none",
                "selective_80",
                "selective_50",
                "selective_30",
                "every_4",
                "every_2",
                "full",
                "offload",
            ],
        ),
        ("attention", ["flash_attention_2", "sdpa_cudnn", "sdpa", "flex_attention", "eager"]),
        ("packing", [True, False]),
    ],
)
def test_values_by_speed(name, values):
    for shuffled in (values[1:] + values[:1], values[::-1]):
        assert sorted(shuffled, key=KNOBS[name].speed_rank) == values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "checkpointing",
            ["offload", "full", "selective_30", "every_2", "every_4", "selective_80", "none"],
        ),
        ("double_quant", [True, False]),
        ("packing", [False, True]),
        ("lora_rank", [4, 8, 16]),
    ],
)
def test_values_by_memory(name, values):
    for shuffled in (values[1:] + values[:1], values[::-1]):
        assert sorted(shuffled, key=KNOBS[name].memory_rank) == values


def test_values_by_capability():
    precision, rank = KNOBS["precision"].capability_rank, KNOBS["lora_rank"].capability_rank
    assert (
        precision("bf16_pure")
        < precision("fp16_mixed")
        < precision("bf16_mixed")
        == precision("fp32")
    )
    assert (rank(None), rank(1), rank(16)) == (0, 1, 16)
    assert precision("bf16_pure") == 0 and precision("fp32") == 2
    assert KNOBS["rslora"].capability_rank(True) == KNOBS["rslora"].capability_rank(False)


@pytest.mark.parametrize(
    ("name", "value", "other", "expected"),
    [
        ("optimizer", "adamw_torch", "adamw_8bit", True),
        ("optimizer", "adamw_torch", "adamw_torch_fused", True),
        ("optimizer", "adamw_torch_fused", "adamw_torch", True),
        ("optimizer", "adamw_8bit", "adafactor", False),
        ("optimizer", "adamw_8bit", "adamw_torch", False),
        ("optimizer", "adafactor", "adamw_8bit", False),
        ("optimizer", "adafactor", "adafactor", True),
        ("seq_len", 16, 8, True),
        ("seq_len", 8, 16, False),
        ("lora_rank", 8, None, True),
        ("lora_rank", 1, None, True),
        ("lora_rank", None, 1, False),
        ("checkpointing", "every_2", "full", True),
        ("checkpointing", "full", "offload", True),
        ("checkpointing", "none", "offload", True),
        ("checkpointing", "offload", "offload", True),
        ("checkpointing", "full", "every_2", False),
        ("checkpointing", "every_2", "none", False),
        ("checkpointing", "offload", "full", False),
        ("checkpointing", "none", "selective_80", True),
        ("checkpointing", "selective_80", "selective_50", True),
        ("checkpointing", "selective_50", "full", True),
        ("checkpointing", "selective_50", "selective_80", False),
        ("checkpointing", "selective_80", "every_2", False),
        ("checkpointing", "every_2", "selective_30", False),
        ("attention", "eager", "sdpa", False),
        ("loader_workers", 0, 8, True),
        ("rslora", False, True, True),
    ],
)
def test_sure_comparison_of_memory(name, value, other, expected):
    assert KNOBS[name].surely_needs_at_least(value, other) is expected


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("none", None),
        ("selective_50", None),
        ("full", 1),
        ("every_2", 2),
        ("every_10", 10),
        ("every_9999", 9999),
    ],
)
def test_checkpoint_every(text, every):
    assert checkpoint_every(text) == every


CHECKPOINTINGS = "none, full, offload, selective_80, selective_50, selective_30 or every_K"


@pytest.mark.parametrize(
    "text",
    ["every_1", "every_0", "every_02", "every_-2", "every_2\n", "every_2.5", "every_", "every_1٣",
     "Full", "", None, 3,
     True, math.nan, ["full"], {"a": 1}, "every_" + "9" * 5000],
)  # fmt: skip
def test_what_is_no_checkpointing(text):
    with pytest.raises(
        ValueError, match=f"checkpointing is {CHECKPOINTINGS} with K of 2 or more, not"
    ):
        checkpoint_every(text)
    with pytest.raises(ValueError, match=f"checkpointing is {CHECKPOINTINGS}"):
        TrainConfig(checkpointing=text)


@pytest.mark.parametrize("knob", names("integer"))
@pytest.mark.parametrize(
    "value", [0, -1, 2**24 + 1, 10**400, 1.0, math.nan, math.inf, True, "8", [8], b"8"]
)
def test_what_is_no_size(knob, value):
    with pytest.raises(ValueError, match=f"^{knob} is a positive integer, not "):
        TrainConfig(**{knob: value})


def test_the_ends_of_a_size():
    assert TrainConfig(seq_len=1).seq_len == 1
    assert TrainConfig(seq_len=2**24).seq_len == 16_777_216


@pytest.mark.parametrize("knob", names("choice"))
@pytest.mark.parametrize("value", ["bogus", "", "NONE ", None, 9, True, math.nan, ["none"], {}])
def test_what_is_no_choice(knob, value):
    with pytest.raises(ValueError, match=f"{knob} is one of {KNOBS[knob].choices[0]}, "):
        check_value(knob, value)
    of_one: dict[str, dict[str, str]] = {
        "tiling": {},
        "cuda_graphs": {"checkpointing": "none", "padding": "bucket"},
    }
    of_one["fp8_products"] = {"method": "full", "compile": "per_layer", "padding": "bucket"}
    of_one["lora_kernels"] = {"compile": "per_layer", "padding": "bucket"}
    shared = of_one.get(knob, {"num_gpus": 2, "sharding": "fsdp2"})
    with pytest.raises(ValueError, match=f"{knob} is one of "):
        TrainConfig(**(shared | {"packing": knob == "packed_attention"} | {knob: value}))


@pytest.mark.parametrize("knob", names("boolean"))
@pytest.mark.parametrize("value", [1, 0, "true", None, []])
def test_what_is_no_bool(knob, value):
    of_shards = {"num_gpus": 2, "sharding": "fsdp2"}
    enabled = {
        "optimizer_in_backward": {"method": "full"},
        "sync_each_batch": of_shards,
        "offload": of_shards,
    }
    with pytest.raises(ValueError, match=f"{knob} is true or false, not"):
        TrainConfig(**(enabled.get(knob, {"quantization": "nf4"}) | {knob: value}))


def test_an_unknown_knob():
    with pytest.raises(ValueError, match="there is no setting 'learning_rate'"):
        check_value("learning_rate", 1e-4)


def test_every_knob_and_value_is_documented():
    rows = {
        line.split("`")[1]: line
        for line in (Path(__file__).parents[3] / "docs" / "knobs.md").read_text().splitlines()
        if line.startswith("| `")
    }
    assert set(rows) == set(KNOBS)
    for name, knob in KNOBS.items():
        _, _, values, kind, *_ = (cell.strip() for cell in rows[name].split("|"))
        assert kind == knob.kind, name
        for value in knob.choices:
            assert f"`{str(value).lower() if isinstance(value, bool) else value}`" in values, name


def test_what_a_row_leaves_out():
    plain = KnobSpec(
        name="some_new_knob",
        description="Does it.",
        affects=frozenset({"memory"}),
        choices=("b", "a"),
    )
    assert (plain.label, plain.form, plain.default, plain.kind) == (
        "some new knob",
        "choice",
        "b",
        "system",
    )
    assert (plain.distance_weight, plain.tag, plain.tag_order, plain.separates_results) == (
        0.5,
        None,
        100,
        False,
    )
    assert (plain.inactive_value, plain.listed_when_inactive, plain.capability_priority) == (
        "b",
        False,
        None,
    )
    assert plain.is_active({}) and plain.possible("a", {}) == "a"
    assert plain.speed_rank("a") == plain.speed_rank("b") and plain.memory_rank("a") == "a"
    given = replace(plain, label="Own words", default="a", inactive="c")
    assert (given.label, given.default, given.inactive_value) == ("Own words", "a", "c")
    switch = KnobSpec(
        name="switch", description="Does it.", affects=frozenset({"learning"}), form="boolean"
    )
    assert (switch.choices, switch.default, switch.kind, switch.inactive_value) == (
        (False, True),
        False,
        "learning",
        False,
    )
    assert replace(switch, required="it is needed").inactive_value is None


def test_a_knob_has_an_effect_where_all_others_allow_it():
    knob = KnobSpec(
        name="knob",
        description="Does it.",
        affects=frozenset(),
        choices=("first", "second", "third"),
        active_when={"one": 1, "two": 2},
        never_with={"three": 3, "four": 4},
        impossible_with={"first": {"five": 5, "six": 6}, "second": {"six": 6}},
    )
    fine = {"one": 1, "two": 2, "three": 0, "four": 0, "five": 0, "six": 0}
    assert knob.is_active(fine)
    for change in ({"one": 0}, {"two": 0}, {"three": 3}, {"four": 4}):
        assert not knob.is_active(fine | change)
    possible = [knob.possible("first", fine | change) for change in ({}, {"five": 5}, {"six": 6})]
    assert (
        possible == ["first", "second", "third"]
        and knob.possible("second", fine | {"five": 5}) == "second"
    )


def test_lists_of_a_file_become_tuples_at_every_depth():
    assert _tuples([["a", [1]], "bc", {"d": [2]}]) == (("a", (1,)), "bc", {"d": [2]})
    assert _tuples("bc") == "bc"


@pytest.mark.parametrize("names", ["q_proj", "k_proj,q_proj", "attn.c_proj", "dense,fc1"])
def test_modules_are_named(names: str) -> None:
    knob = KNOBS["lora_targets"]
    knob.check(names.replace(",", ", "))
    assert knob.possible(" , ".join(reversed(names.split(","))), {}) == names
    # Nothing is known of them: they stand with the smallest choice.
    assert (knob.speed_rank(names), knob.memory_rank(names), knob.capability_rank(names)) == (
        0,
        0,
        0,
    )
    assert not knob.surely_needs_at_least("all-linear", names) and knob.surely_needs_at_least(
        names, names
    )


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "all_linear",
            "all",
            "atention",
            "q_proj,",
            "q_proj.",
            "q_v,attention",
            "x,all_linear",
            "q_proj;v_proj",
        ),
        *(".*", "", 3, True),
    ],
)
def test_what_is_no_name_of_a_module(wrong: object) -> None:
    with pytest.raises(
        ValueError,
        match="lora_targets is one of all-linear, attention, q_v, attention_experts or names of",
    ):
        KNOBS["lora_targets"].check(wrong)


def test_the_choices_of_targets_are_in_order() -> None:
    knob = KNOBS["lora_targets"]
    for rank in (knob.speed_rank, knob.memory_rank, knob.capability_rank):
        ranks = [rank(value) for value in ("q_v", "attention", "attention_experts", "all-linear")]
        assert ranks[:2] == [0, 1] and sorted(ranks) == ranks
