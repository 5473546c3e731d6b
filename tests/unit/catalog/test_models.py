"""Models by catalogue name, directory or Hub id; a config that somebody else wrote cannot hurt."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import ModelSpec, list_models, resolve_model
from autotune.catalog.models import reach_hub
from autotune.core.errors import UsageError
from autotune.core.files import load_data

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def write_config(directory: Path, config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    return directory


def test_every_model_name_means_one_model():
    specs = list_models()
    names = [name.lower() for spec in specs for name in (spec.name, *spec.aliases)]
    assert len(specs) == 225 and len(set(names)) == len(names)
    for spec in specs:
        for name in (spec.name, spec.name.upper(), spec.short, *spec.aliases):
            assert resolve_model(name).digest == spec.digest
            assert resolve_model(name).name == (
                name if "/" in name and name in spec.aliases else spec.name
            )
        assert spec.source and (spec.as_of is None or isinstance(spec.as_of, str))
        assert spec.params and spec.num_layers and spec.hidden_size and spec.vocab_size
        assert spec.max_seq_len or spec.config["model_type"].startswith("mamba")  # has no positions


def test_model_facts():
    gpt2 = resolve_model("gpt2")
    assert (gpt2.num_layers, gpt2.hidden_size, gpt2.vocab_size, gpt2.max_seq_len) == (
        12,
        768,
        50257,
        1024,
    )
    assert resolve_model("mistral-7b").name == "mistralai/Mistral-7B-v0.3"
    assert resolve_model("mistral-7b").short == "Mistral-7B-v0.3"


def test_configs_are_copies():
    spec = resolve_model("llama-3.1-8b")
    before = spec.digest
    spec.config["rope_parameters"]["changed"] = True
    assert spec.digest != before
    assert resolve_model("llama-3.1-8b").digest == before


@pytest.fixture
def catalogue(monkeypatch):
    """The program that counts the parameters of each row."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("catalogue")


def test_each_row_was_built_with_its_shape_and_has_the_parameters_that_were_counted():
    """A row that is new or changed is counted with python benchmarks/catalogue.py."""
    counted = {
        row["model"]: row
        for row in json.loads((BENCHMARKS / "results" / "catalogue.json").read_text())["rows"]
    }
    assert set(counted) == {spec.name for spec in list_models()}
    for spec in list_models():
        row = counted[spec.name]
        assert (row["digest"], row["params"]) == (spec.digest, spec.params), spec.name
        assert row["sdpa"] is not spec.lacks("sdpa"), spec.name


def test_each_row_names_the_config_that_was_read(catalogue):
    assert [spec.name for spec in list_models() if catalogue.is_recalled(spec.source)] == []
    read = (
        "org/repo path/config.json",
        "transformers 5.23.0, default of glm",
        "https://host/page",
        "a/b c; d/e f.py",
    )
    assert not any(map(catalogue.is_recalled, read))
    assert all(
        map(
            catalogue.is_recalled,
            (None, "", "published config, recalled", "a/b c.py; recalled", "litgpt"),
        )
    )


def test_unknown_model_suggests_a_near_name():
    with pytest.raises(UsageError, match=r"did you mean 'mistral-7b'") as caught:
        resolve_model("mistrl-7b")
    assert caught.value.exit_code == 2
    for name in ("", "a/b/c", "./gpt2", "x" * 5000, "a\0b", "org/../up"):
        with pytest.raises(UsageError):
            resolve_model(name)


def test_local_directory(tmp_path):
    junk = {
        "_name_or_path": "/x",
        "architectures": ["X"],
        "torch_dtype": "float16",
        "transformers_version": "4",
    }
    kernels = {
        "attn_implementation": "somebody/kernels",
        "rope_parameters": {"rope_theta": 1.0, "_x": 1},
    }
    path = write_config(tmp_path / "it's a; model", LLAMA | junk | kernels)
    spec = resolve_model(str(path))
    assert spec.name == spec.short == "it's a; model"
    assert spec.config == LLAMA | {"rope_parameters": {"rope_theta": 1.0}}
    # the default of transformers
    assert (spec.params, spec.weights, spec.max_seq_len) == (None, None, 2048)
    (path / "pytorch_model.bin").write_bytes(b"")
    assert resolve_model(str(path)).weights is None
    (path / "model.safetensors").write_bytes(b"")
    assert (resolve_model(str(path)).weights, resolve_model(str(path)).tokenizer) == (
        str(path),
        None,
    )
    (path / "tokenizer.json").write_bytes(b"")
    assert resolve_model(str(path)).tokenizer == str(path)


def test_the_name_without_its_organisation():
    names = {"org/model": "model", "model": "model", "a/b/model": "model"}
    assert {name: ModelSpec(name=name, config=LLAMA).short for name in names} == names


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_the_smallest_size_that_is_believed(key):
    made = ModelSpec(name="small", config=LLAMA | {key: 1})
    assert {
        "num_hidden_layers": made.num_layers,
        "hidden_size": made.hidden_size,
        "vocab_size": made.vocab_size,
    }[key] == 1
    with pytest.raises(UsageError, match=f"no positive integer {key}"):
        ModelSpec(name="small", config=LLAMA | {key: 0})


def test_sizes_go_by_the_names_of_other_families_too():
    made = ModelSpec(
        name="old",
        config={
            "model_type": "mpt",
            "n_layers": 3,
            "d_model": 8,
            "vocab_size": 9,
            "max_seq_len": 5,
        },
    )
    assert (made.num_layers, made.hidden_size, made.vocab_size, made.max_seq_len) == (3, 8, 9, 5)
    first = ModelSpec(name="both", config=LLAMA | {"n_layer": 7, "seq_length": 6})
    assert (first.num_layers, first.max_seq_len) == (2, 6)


def test_the_largest_size_that_is_believed(tmp_path):
    assert (
        resolve_model(str(write_config(tmp_path / "a", LLAMA | {"vocab_size": 2**31}))).vocab_size
        == 2**31
    )
    with pytest.raises(UsageError, match="no positive integer vocab_size"):
        resolve_model(str(write_config(tmp_path / "b", LLAMA | {"vocab_size": 2**31 + 1})))


def test_a_catalogue_name_goes_before_a_directory(tmp_path, monkeypatch):
    write_config(tmp_path / "gpt2", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gpt2").params
    assert resolve_model("./gpt2").params is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"auto_map": {"AutoConfig": "x.Y"}}, "remote code is never run"),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            "whose head no probe trains",
        ),
        (
            LLAMA | {"architectures": ["Qwen2ForTokenClassification"]},
            "describes a Qwen2ForTokenClassification",
        ),
        (
            LLAMA | {"architectures": ["InternLM2ForRewardModel"]},
            "probes train only causal language models",
        ),
        (
            LLAMA | {"quantization_config": {"bits": 4, "quant_method": "gptq"}},
            "already quantised by the method 'gptq', which probes do not support",
        ),
        (LLAMA | {"quantization_config": 4}, "quantised by the method None"),
        (
            LLAMA
            | {
                "quantization_config": {
                    "quant_method": "bitsandbytes",
                    "llm_int8_skip_modules": 5,
                }
            },
            "quantised to fp4",
        ),
        (LLAMA | {"text_config": {"quantization_config": {"quant_method": "awq"}}}, "'awq'"),
        (LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised to fp4"),
        (
            LLAMA
            | {
                "quantization_config": {
                    "quant_method": "bitsandbytes",
                    "load_in_4bit": True,
                    "llm_int8_skip_modules": ["lm_head", "model.layers.7.mlp"],
                }
            },
            r"quantised except for single layers \(model.layers.7.mlp\)",
        ),
        (LLAMA | {"is_encoder_decoder": True}, "encoder-decoder"),
        (
            LLAMA | {"model_type": "bert"},
            "describes a bert model, whose tokens attend to later ones$",
        ),
        (
            LLAMA | {"model_type": "modernbert", "is_decoder": False},
            "whose tokens attend to later ones$",
        ),
        ({key: LLAMA[key] for key in LLAMA if key != "model_type"}, "no model_type"),
        (LLAMA | {"model_type": ["llama"]}, "no model_type"),
        (LLAMA | {"num_hidden_layers": "32"}, "no positive integer num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": 10**400}, "no positive integer num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": -1}, "no positive integer num_hidden_layers"),
        (LLAMA | {"hidden_size": True}, "no positive integer hidden_size"),
        ([LLAMA], "not a JSON object"),
        ("{broken", "not valid JSON"),
        ("[" * 200_000, "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_hostile_config(tmp_path, config, message):
    with pytest.raises(UsageError, match=message) as caught:
        resolve_model(str(write_config(tmp_path, config)))
    assert caught.value.remedy


def test_infinity_is_read_in_both_spellings(tmp_path):
    """transformers 5 writes it as valid JSON, older versions as Python does."""
    tagged = LLAMA | {
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "low": {"__float__": "-Infinity"},
    }
    bare = json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")], "low": float("-inf")})
    assert "Infinity]" in bare
    configs = [
        resolve_model(str(write_config(tmp_path / name, text))).config
        for name, text in {"tagged": tagged, "bare": bare}.items()
    ]
    assert configs == [tagged, tagged]
    json.dumps(configs, allow_nan=False)


def test_a_published_config_of_a_model_that_takes_images(tmp_path):
    """Gemma 3 leaves out transformers' own defaults; Qwen2.5-VL has the sizes of the text beside
    the rest.
    """
    row = resolve_model("gemma-3-4b")
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
    }
    path = write_config(tmp_path / "gemma", row.config | {"text_config": text})
    (path / "preprocessor_config.json").write_text('{"size": {"height": 896, "width": 896}}')
    found = resolve_model(str(path))
    assert (found.num_layers, found.hidden_size, found.vocab_size, found.max_seq_len) == (
        34,
        2560,
        262208,
        131072,
    )
    assert found.sees_images and found.processor == {"size": {"height": 896, "width": 896}}
    (path / "preprocessor_config.json").unlink()
    (path / "processor_config.json").write_text('{"image_processor": {"do_pan_and_scan": false}}')
    assert resolve_model(str(path)).processor == {"do_pan_and_scan": False}
    nested = resolve_model("qwen2.5-vl-3b").config
    flat = {key: nested[key] for key in nested if key != "text_config"} | nested["text_config"]
    flat["model_type"] = "qwen2_5_vl"
    assert resolve_model(str(write_config(tmp_path / "qwen", flat))).num_layers == 36
    assert not resolve_model("demo-3m").sees_images


def test_bidirectional_families_are_those_of_transformers():
    """Encoder-decoder families are refused by another rule: their decoders are causal."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    masked = set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) - {"bart", "mbart", "mvp"}
    not_causal = load_data("autotune.catalog", "data/models")["not_causal"]
    assert masked | {"bert-generation", "cpmant", "xlnet"} == set(not_causal)


def test_a_bert_that_is_a_decoder_is_causal(tmp_path):
    assert (
        resolve_model(
            str(write_config(tmp_path, LLAMA | {"model_type": "bert", "is_decoder": True}))
        ).num_layers
        == 2
    )


def test_directory_without_a_readable_config(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="not valid JSON"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_pipe_in_a_model_is_refused_and_not_waited_for(tmp_path, name):
    write_config(tmp_path, LLAMA)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match="not a regular file"):
        resolve_model(str(tmp_path))


def test_adapters_beside_a_model_are_refused(tmp_path):
    write_config(tmp_path, LLAMA)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="adapters beside the model"):
        resolve_model(str(tmp_path))


@pytest.fixture
def hub(monkeypatch):
    """huggingface_hub with an empty cache, and with its network calls recorded instead of made."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url: None)
    return hub


def test_a_download_draws_no_bar(tmp_path, monkeypatch, hub):
    silent = []
    bars = importlib.import_module("huggingface_hub.utils.tqdm")
    monkeypatch.setattr(bars, "disable_progress_bars", lambda: silent.append(True))
    path = write_config(tmp_path, LLAMA) / "config.json"
    monkeypatch.setattr(hub, "hf_hub_download", lambda **kwargs: silent and str(path))
    assert resolve_model("somebody/model").config == LLAMA


def test_hub_id_fetches_the_config_alone(tmp_path, monkeypatch, hub):
    asked = []
    path = write_config(tmp_path, LLAMA) / "config.json"
    monkeypatch.setattr(hub, "hf_hub_download", lambda **kwargs: asked.append(kwargs) or str(path))
    spec = resolve_model("somebody/model")
    assert (spec.name, spec.weights, spec.config) == ("somebody/model", None, LLAMA)
    assert asked == [{"repo_id": "somebody/model", "filename": "config.json"}]
    write_config(tmp_path, LLAMA | {"auto_map": {}})
    with pytest.raises(UsageError, match="somebody/model asks for code of its own"):
        resolve_model("somebody/model")


def test_a_hub_that_lacks_a_file_is_reached_and_a_cached_file_needs_no_hub(monkeypatch, hub):
    asked = []

    def lacks(url):
        asked.append(url)
        raise hub.errors.EntryNotFoundError("404")

    monkeypatch.setattr(hub, "get_hf_file_metadata", lacks)
    reach_hub("somebody/model", "one.json", "two.json")
    assert [url.rpartition("/")[2] for url in asked] == ["one.json"]

    cached = {"two.json": "/cache/two.json"}
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: cached.get(file))
    reach_hub("somebody/model", "one.json", "two.json")
    assert len(asked) == 1


def test_unreachable_hub(monkeypatch, hub):
    def fail(url):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "get_hf_file_metadata", fail)
    with pytest.raises(
        UsageError, match=r"could not be reached.*ConnectionError.*did you mean"
    ) as caught:
        resolve_model("Qwen/Qwen3-9B")
    assert "local directory" in (caught.value.remedy or "")


def test_a_config_is_named_by_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="is a file") as refused:
        resolve_model(str(tmp_path / "config.json"))
    assert refused.value.remedy == f"pass its directory: {tmp_path}"
