"""A study spec from options and files: options come first, and an impossible value is an error with
its line.
"""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from autotune.core.errors import UsageError
from autotune.core.serialization import from_data, to_data
from autotune.problem.constraints import MAX_TRUNCATED, MIN_RANK
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import DEFAULT_EXAMPLES, DEFAULT_GLOBAL_BATCH, DEFAULT_TOKENS
from autotune.problem.study_spec import (
    OPTIONS,
    RARE,
    NamedConfig,
    Published,
    StudySpec,
    make_spec,
)

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
    assert (spec.gpu, spec.budget, spec.global_batch, spec.min_rank, spec.pins) == (
        "auto",
        "15m",
        None,
        None,
        {},
    )


def test_flags_go_before_the_file(tmp_path):
    path = write(
        tmp_path, "model: demo-3m\nepochs: 3\nseed: 7\npins: {seq_len: 64, compile: none}\n"
    )
    assert make_spec(path, {}) == StudySpec(
        model="demo-3m", epochs=3, seed=7, pins={"seq_len": 64, "compile": "none"}
    )
    spec = make_spec(path, {"epochs": 1, "model": "other", "seed": None, "pins": {"seq_len": 128}})
    assert (spec.model, spec.epochs, spec.seed) == ("other", 1, 7)
    assert spec.pins == {"seq_len": 128, "compile": "none"}


def test_one_way_to_give_the_size(tmp_path):
    path = write(tmp_path, "model: demo-3m\nexamples: 5\n")
    assert make_spec(path, {"tokens": 100}) == StudySpec(model="demo-3m", tokens=100)
    assert make_spec(path, {"examples": 6}).examples == 6
    assert failure(path, {"tokens": 1, "examples": 1}) == "give examples or tokens, not both"
    assert (
        failure(None, {"model": "m", "tokens": 1, "examples": 1})
        == "give examples or tokens, not both"
    )


def test_one_way_to_give_the_lengths(tmp_path):
    path = write(tmp_path, "model: demo-3m\nmean_tokens: 300\np99_tokens: 2000\n")
    assert make_spec(path, {"dataset": "d.jsonl"}) == StudySpec(model="demo-3m", dataset="d.jsonl")
    assert make_spec(path, {"tokens_per_example": 6}) == StudySpec(
        model="demo-3m", tokens_per_example=6
    )
    assert make_spec(path, {}).mean_tokens == 300
    assert (
        failure(None, {"model": "m", "mean_tokens": 3.0})
        == "give mean_tokens and p99_tokens together"
    )
    both = failure(None, {"model": "m", "lengths": "l.txt", "dataset": "d.jsonl"})
    assert both == "the lengths of the examples are given in more than one way: lengths, dataset"


def test_no_model():
    assert failure(None, {}) == "no model is given"
    assert failure(None, {"gpu": "h200", "model": None}) == "no model is given"


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
    + [("seed", value) for value in (-1, 2**31)],
)
def test_an_impossible_value_is_a_usage_error(name, value):
    said = failure(None, {"model": "m", name: value})
    assert said.startswith(f"{name} cannot be {value!r}: it is a ")


@pytest.mark.parametrize("value", ["a\nb", "a\0", "\x1b[31m", "\udcff"])
def test_the_name_of_a_study_is_printable(value):
    assert failure(None, {"model": "m", "study": value}) == f"study cannot be {value!r}"


@pytest.mark.parametrize(
    ("name", "value", "possible"),
    [
        ("epochs", 0, "a whole number, 1 to 10**15"),
        ("num_generations", 1, "a whole number, 2 to 10**15"),
        ("seed", "many", "a whole number, 0 to 2,147,483,647"),
        ("price", -1, "a number, 0 or more"),
        ("memory_gib", 0, "a number, more than 0"),
        ("headroom", 0.9, "a number, 0 to below 0.9"),
        ("eval_share", 0.7, "a number, 0 to 0.5"),
        ("interruptions_per_day", 5000, "a number, 0 to 1,440"),
        ("fresh", "yes", "true or false"),
    ],
)
def test_an_impossible_value_is_answered_with_the_possible_ones(name, value, possible):
    assert (
        failure(None, {"model": "m", name: value})
        == f"{name} cannot be {value!r}: it is {possible}"
    )


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("compile_ahead", "auto, always or never"),
        ("trainer", "transformers or trl"),
        ("objective", "sft, dpo, kto, reward, classification or grpo"),
        ("loss_on", "completion, assistant or all"),
        ("vision", "frozen or trained"),
        ("report_to", "none, "),
    ],
)
def test_of_a_few_words_a_wrong_one_is_answered_with_all(name, choices):
    assert failure(None, {"model": "m", name: "sometimes"}).startswith(
        f"{name} cannot be 'sometimes': it is {choices}"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("headroom", 0.0),
        ("price", 0.0),
        ("slack", 1.0),
        ("max_truncated", 1.0),
        ("seed", 0),
        ("study", "a'; echo ä"),
    ],
)
def test_extreme_values_that_are_possible(name, value):
    assert getattr(make_spec(None, {"model": "m", name: value}), name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nepoch: 3\n", "FILE:2: epoch: there is no such key; did you mean 'epochs'?"),
        ("model: m\n\nepochs: three\n",
         "FILE:3: epochs: Input should be a valid integer, unable to parse string as an integer"),
        ("model: m\nepochs: 1.5\n", "FILE:2: epochs: Input should be a valid integer, got a number"
         " with a fractional "
         "part"),
        ("model: m\nepochs: -1\n",
         "FILE:2: the file: epochs cannot be -1: it is a whole number, 1 to 10**15"),
        ("model: m\nseed: 1\nprice: .nan\n",
         "FILE:3: the file: price cannot be nan: it is a number, 0 or more"),
        ('model: m\nstudy: "a\\e[31m"\n', "FILE:2: the file: study cannot be 'a\\x1b[31m'"),
        ("model: m\nexamples: 1\ntokens: 1\n",
         "FILE:1: the file: give examples or tokens, not both"),
        ("model: m\nglobal_batch: 8\nglobal_batch_tokens: 9\n",
         "FILE:1: the file: give global_batch or global_batch_tokens, not both"),
        ("model: 3\n", "FILE:1: model: Input should be a valid string"),
        ("model: null\n", "FILE:1: model: Input should be a valid string"),
        ("gpu: h200\n", "FILE:1: model: Field required"),
        ("model: m\npins: [a]\n", "FILE:2: pins: Input should be a valid dictionary"),
        ("model: m\npins: &p {a: *p}\n", "FILE: not valid YAML: more than 10,000 values after"
         " its aliases are expanded"),
        ("model: m\nmodel: n\n", "FILE:2: not valid YAML: 'model' occurs twice"),
        ("model: m\nbudget: 900\n", "FILE:2: budget: Input should be a valid string"),
        ("model: m\nconfigs: []\n",
         "FILE:2: the file: configs is empty: name the configurations to probe, or leave the key"
         " out to search"),
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
    space = SearchSpace.of(
        "mine", micro_batch_size=[1, 2], lora_rank=range(8, 17), quantization="none"
    )
    spec = StudySpec(model="m", space=space)
    assert from_data(StudySpec, json.loads(json.dumps(to_data(spec)))) == spec
    assert spec.space_name == "mine" and StudySpec(model="m", space="lora").space_name == "lora"


def test_a_file_names_its_search_space(tmp_path):
    path = write(
        tmp_path, "model: m\nspace: {name: mine, knobs: [{name: lora_rank, values: [1]}]}\n"
    )
    assert failure(path, {}) == "FILE: space: Input should be a valid string"


FIELDS = {item.name for item in fields(StudySpec)}


def test_every_option_has_a_help_sentence():
    assert FIELDS - set(OPTIONS) == {"pins", "configs", "source"}
    for option in OPTIONS.values():
        assert len(option.help) > 5 and option.help.endswith(".")
    assert (OPTIONS["epochs"].shown_default, OPTIONS["study"].shown_default) == ("1", None)
    assert (OPTIONS["seed"].shown_default, OPTIONS["verify"].shown_default) == ("0", None)
    assert OPTIONS["tokenizer"].metavar == "DIR"


def test_every_field_is_a_flag_or_rare():
    import inspect

    from autotune.cli.commands.run import run

    flags = set(inspect.signature(run).parameters)
    # --set, --seq-len and --rank give the pins, and --set the rare fields.
    assert FIELDS - flags == {"pins", "configs", "source", *RARE}
    assert flags - FIELDS == {"spec", "set_", "seq_len", "rank", "json_", "events", "quiet"}


@pytest.mark.parametrize(
    "name", ["tokens_per_s", "samples_per_s", "s_per_step", "peak_gib", "peak_gb"]
)
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_what_others_published_is_positive(name, value):
    with pytest.raises(UsageError, match=f"{name} cannot be"):
        Published(**{name: value})
    assert getattr(Published(**{name: 0.5}), name) == 0.5


def test_what_others_published_either_ran_or_ran_out_of_memory():
    assert [Published(outcome=outcome).outcome for outcome in ("ok", "oom")] == ["ok", "oom"]
    with pytest.raises(UsageError, match="outcome is ok or oom, not 'crash'"):
        Published(outcome="crash")


def test_a_named_configuration_has_a_name_and_a_number_of_micro_batches():
    assert NamedConfig(name="a", accumulation=10**15).accumulation == 10**15
    for accumulation in (0, 10**15 + 1):
        with pytest.raises(UsageError, match=f"accumulation cannot be {accumulation}"):
            NamedConfig(name="a", accumulation=accumulation)
    with pytest.raises(UsageError, match="name cannot be"):
        NamedConfig(name="a\nb")
    two = StudySpec(model="m", configs=(NamedConfig(name="a"), NamedConfig(name="b")))
    assert len(two.configs) == 2


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        *((name, 1, 10**15) for name in COUNTS),
        ("eval_share", 0.0, 0.5),
        ("slack", 0.0, 1.0),
        ("max_truncated", 0.0, 1.0),
        ("seed", 0, 2**31 - 1),
        ("memory_gib", 1e-9, 1e9),
        ("price", 0.0, 1e9),
        ("headroom", 0.0, 0.899),
        ("workers", 1, 10**15),
        ("save_steps", 1, 10**15),
    ],
)
def test_the_least_and_the_most_of_each_number(name, least, most):
    for value in (least, most):
        assert getattr(make_spec(None, {"model": "m", name: value}), name) == value


@pytest.mark.parametrize("value", [-0.01, 0.501, math.nan])
def test_half_of_the_examples_may_be_held_out(value):
    said = f"eval_share cannot be {value!r}: it is a number, 0 to 0.5"
    assert failure(None, {"model": "m", "eval_share": value}) == said


def test_the_help_shows_the_default_that_holds():
    """What is None in a spec becomes a number elsewhere: each as the help says."""
    shown = {name: option.shown_default for name, option in OPTIONS.items() if option.shown_default}
    assert {name: shown[name] for name in ("examples", "tokens_per_example", "global_batch")} == {
        "examples": str(DEFAULT_EXAMPLES),
        "tokens_per_example": str(DEFAULT_TOKENS),
        "global_batch": str(DEFAULT_GLOBAL_BATCH),
    }
    assert (
        (shown["min_rank"], shown["max_truncated"])
        == (str(MIN_RANK), str(MAX_TRUNCATED))
        == ("16", "0.01")
    )
    assert (DEFAULT_EXAMPLES, DEFAULT_TOKENS, DEFAULT_GLOBAL_BATCH) == (10_000, 1024, 32)
    for item in fields(StudySpec):
        if item.name in shown and item.default is not None:
            assert shown[item.name] == str(item.default)
    hidden = {
        "space",
        "tokens",
        "mean_tokens",
        "lengths",
        "memory_gib",
        "verify",
        "quality",
        "study",
        "storage",
        "ray",
    }
    assert not hidden & set(shown) and shown["save_steps"] == "about half an hour"


def test_the_defaults_of_a_study():
    spec = StudySpec(model="m")
    assert spec.trainer is None
    assert (spec.trained_by, spec.epochs, spec.eval_share, spec.report_to, spec.budget) == (
        "transformers",
        1,
        0.0,
        "none",
        "15m",
    )
    assert (spec.patience, spec.headroom, spec.slack, spec.workers, spec.seed) == (
        40,
        0.05,
        0.05,
        1,
        0,
    )
    flags = (
        "allow_quantized",
        "allow_pure_bf16",
        "allow_any_optimizer",
        "shallow_only",
        "fresh",
        "quality",
        "verify",
    )
    assert not any(getattr(spec, name) for name in flags)
    options = StudySpec(
        model="m", eval_share=0.1, eval_steps=5, save_steps=6, report_to="wandb"
    ).run_options
    assert (options.eval_steps, options.save_steps, options.report_to) == (5, 6, "wandb")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"p99_tokens": 9.0}, "give mean_tokens and p99_tokens together"),
        ({"tokenizer": "t"}, "a tokenizer counts the tokens of a dataset: give dataset too"),
        ({"eval_steps": 5}, "eval_steps needs examples that are held out: give eval_share too"),
        ({"split": "train"}, "a split is a part of a dataset: give dataset too"),
        (
            {"tokens_per_example": 5, "mean_tokens": 3.0, "p99_tokens": 9.0},
            "in more than one way: tokens_per_example",
        ),
    ],
)
def test_fields_that_contradict_one_another(fields, message):
    with pytest.raises(UsageError, match=message):
        StudySpec(model="m", **fields)


def test_an_option_takes_the_place_of_all_that_says_the_same(tmp_path):
    dataset = write(tmp_path, "model: m\ndataset: d.jsonl\nsplit: train\ntokenizer: t\n")
    assert make_spec(dataset, {"lengths": "l.txt"}) == StudySpec(model="m", lengths="l.txt")
    batch = write(tmp_path, "model: m\nglobal_batch: 8\n")
    assert make_spec(batch, {"global_batch_tokens": 99}) == StudySpec(
        model="m", global_batch_tokens=99
    )
    assert make_spec(batch, {"seed": 3}) == StudySpec(model="m", global_batch=8, seed=3)
