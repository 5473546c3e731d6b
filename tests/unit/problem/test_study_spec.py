"""A study spec from options and files: options come first, and an impossible value is an error with its line."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from autotune.core.errors import UsageError
from autotune.core.serialization import from_data, to_data
from autotune.problem.search_space import SearchSpace
from autotune.problem.study_spec import OPTIONS, NamedConfig, Published, StudySpec, make_spec

FIELDS = {field.name for field in fields(StudySpec)}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return path


def failure(path: Path | None, flags: dict) -> str:
    with pytest.raises(UsageError) as caught:
        make_spec(path, flags)
    assert caught.value.remedy
    return str(caught.value) if path is None else str(caught.value).replace(str(path), "FILE")


def test_flags_alone():
    spec = make_spec(None, {"model": "demo-3m", "epochs": 2, "price": None, "pins": None})
    assert spec == StudySpec(model="demo-3m", epochs=2)
    assert (spec.gpu, spec.budget, spec.global_batch, spec.min_rank, spec.pins) == ("auto", "15m", None, None, {})


def test_flags_go_before_the_file(tmp_path):
    path = write(tmp_path, "model: demo-3m\nepochs: 3\nseed: 7\npins: {seq_len: 64, compile: none}\n")
    assert make_spec(path, {}) == StudySpec(model="demo-3m", epochs=3, seed=7, pins={"seq_len": 64, "compile": "none"})
    spec = make_spec(path, {"epochs": 1, "model": "other", "seed": None, "pins": {"seq_len": 128}})
    assert (spec.model, spec.epochs, spec.seed) == ("other", 1, 7)
    assert spec.pins == {"seq_len": 128, "compile": "none"}


def test_one_way_to_give_the_size(tmp_path):
    path = write(tmp_path, "model: demo-3m\nexamples: 5\n")
    assert make_spec(path, {"tokens": 100}) == StudySpec(model="demo-3m", tokens=100)
    assert make_spec(path, {"examples": 6}).examples == 6
    assert failure(path, {"tokens": 1, "examples": 1}) == "give examples or tokens, not both"
    assert failure(None, {"model": "m", "tokens": 1, "examples": 1}) == "give examples or tokens, not both"


def test_one_way_to_give_the_lengths(tmp_path):
    path = write(tmp_path, "model: demo-3m\nmean_tokens: 300\np99_tokens: 2000\n")
    assert make_spec(path, {"dataset": "d.jsonl"}) == StudySpec(model="demo-3m", dataset="d.jsonl")
    assert make_spec(path, {"tokens_per_example": 6}) == StudySpec(model="demo-3m", tokens_per_example=6)
    assert make_spec(path, {}).mean_tokens == 300
    assert failure(None, {"model": "m", "mean_tokens": 3.0}) == "give mean_tokens and p99_tokens together"
    both = failure(None, {"model": "m", "lengths": "l.txt", "dataset": "d.jsonl"})
    assert both == "the lengths of the examples are given in more than one way: lengths, dataset"


def test_no_model():
    assert failure(None, {}) == "which model?"
    assert failure(None, {"gpu": "h200", "model": None}) == "which model?"


COUNTS = (
    "examples",
    "epochs",
    "tokens_per_example",
    "tokens",
    "global_batch",
    "global_batch_tokens",
    "trials",
    "patience",
    "min_rank",
)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in COUNTS for value in (0, -1, 10**16)]
    + [("memory_gib", value) for value in (0.0, -1.0, math.nan, math.inf)]
    + [("price", value) for value in (-0.01, math.nan, math.inf)]
    + [("headroom", value) for value in (-0.01, 0.9, math.nan)]
    + [(name, value) for name in ("slack", "max_truncated") for value in (-0.01, 1.01, math.nan)]
    + [("seed", value) for value in (-1, 2**31)]
    + [("study", value) for value in ("a\nb", "a\0", "\x1b[31m", "\udcff")],
)
def test_an_impossible_value_is_a_usage_error(name, value):
    assert failure(None, {"model": "m", name: value}) == f"{name} cannot be {value!r}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("headroom", 0.0), ("price", 0.0), ("slack", 1.0), ("max_truncated", 1.0), ("seed", 0), ("study", "a'; echo ä")],
)
def test_extreme_values_that_are_possible(name, value):
    assert getattr(make_spec(None, {"model": "m", name: value}), name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nepoch: 3\n", "FILE:2: epoch: Unexpected keyword argument"),
        ("model: m\n\nepochs: three\n",
         "FILE:3: epochs: Input should be a valid integer, unable to parse string as an integer"),
        ("model: m\nepochs: 1.5\n", "FILE:2: epochs: Input should be a valid integer, got a number with a fractional "
         "part"),
        ("model: m\nepochs: -1\n", "FILE:2: the file: epochs cannot be -1"),
        ("model: m\nseed: 1\nprice: .nan\n", "FILE:3: the file: price cannot be nan"),
        ('model: m\nstudy: "a\\e[31m"\n', "FILE:2: the file: study cannot be 'a\\x1b[31m'"),
        ("model: m\nexamples: 1\ntokens: 1\n", "FILE:1: the file: give examples or tokens, not both"),
        ("model: m\nglobal_batch: 8\nglobal_batch_tokens: 9\n",
         "FILE:1: the file: give global_batch or global_batch_tokens, not both"),
        ("model: 3\n", "FILE:1: model: Input should be a valid string"),
        ("model: null\n", "FILE:1: model: Input should be a valid string"),
        ("gpu: h200\n", "FILE:1: model: Field required"),
        ("model: m\npins: [a]\n", "FILE:2: pins: Input should be a valid dictionary"),
        ("model: m\npins: &p {a: *p}\n", "FILE: not valid YAML: more than 10,000 values, with its aliases written out"),
        ("model: m\nmodel: n\n", "FILE:2: not valid YAML: 'model' stands twice"),
        ("model: m\nbudget: 900\n", "FILE:2: budget: Input should be a valid string"),
        ("", "FILE:1: the file: Input should be a dictionary or an instance of StudySpec"),
        ("- model", "FILE:1: the file: Input should be a dictionary or an instance of StudySpec"),
    ],
)  # fmt: skip
def test_a_typo_in_a_file_is_named_with_its_line(tmp_path, text, message):
    assert failure(write(tmp_path, text), {}) == message


def test_a_file_that_is_not_there(tmp_path):
    assert failure(tmp_path / "no.yaml", {}) == "cannot read FILE: No such file or directory"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", "3"),
        ("epochs", 1.5),
        ("epochs", None),
        ("epochs", True),
        ("examples", "many"),
        ("headroom", "5%"),
        ("verify", 1),
        ("model", None),
        ("study", 7),
        ("space", ["lora_rank"]),
        ("pins", ["lora_rank"]),
        ("trainer", "accelerate"),
    ],
)
def test_python_gets_the_same_errors_as_the_command_line(name, value):
    with pytest.raises(UsageError, match=f"{name}.* cannot be {re.escape(repr(value))}") as caught:
        StudySpec(**{"model": "m", name: value})
    assert caught.value.remedy and caught.value.exit_code == 2


def test_contradictions_are_errors_for_python_too():
    with pytest.raises(UsageError, match="give examples or tokens, not both"):
        StudySpec(model="m", examples=1, tokens=1)
    with pytest.raises(UsageError, match="configs need different names"):
        StudySpec(model="m", configs=(NamedConfig(name="a"), NamedConfig(name="a")))
    assert NamedConfig(name="a").accumulation == 1
    with pytest.raises(UsageError, match="accumulation cannot be 0"):
        NamedConfig(name="a", accumulation=0)
    with pytest.raises(UsageError, match="peak_gib cannot be -1"):
        Published(peak_gib=-1.0)


def test_an_int_is_a_float():
    assert StudySpec(model="m", price=2, headroom=0).price == 2


def test_a_search_space_is_stored_by_value():
    space = SearchSpace.of("mine", micro_batch_size=[1, 2], lora_rank=range(8, 17), quantization="none")
    spec = StudySpec(model="m", space=space)
    assert from_data(StudySpec, json.loads(json.dumps(to_data(spec)))) == spec
    assert spec.space_name == "mine" and StudySpec(model="m", space="lora").space_name == "lora"


def test_a_file_names_its_search_space(tmp_path):
    path = write(tmp_path, "model: m\nspace: {name: mine, knobs: [{name: lora_rank, values: [1]}]}\n")
    assert failure(path, {}) == "FILE: space: Input should be a valid string"


FIELDS = {item.name for item in fields(StudySpec)}


def test_every_option_has_a_help_sentence():
    assert FIELDS - set(OPTIONS) == {"pins", "configs"}
    for option in OPTIONS.values():
        assert len(option.help) > 5 and option.help.endswith(".")
    assert (OPTIONS["epochs"].shown_default, OPTIONS["study"].shown_default) == ("1", None)
    assert (OPTIONS["seed"].shown_default, OPTIONS["verify"].shown_default) == ("0", None)
    assert OPTIONS["tokenizer"].metavar == "DIR"


def test_every_field_is_a_flag():
    import inspect

    from autotune.cli.commands.run import run

    flags = set(inspect.signature(run).parameters)
    assert FIELDS - flags == {"pins", "configs"}  # --set, --seq-len and --rank
    assert flags - FIELDS == {"spec", "set_", "seq_len", "rank", "json_", "events", "quiet"}
