"""The catalogue: every name means one thing, near names do not mix, and a config somebody else wrote cannot hurt."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import (
    find_price,
    list_devices,
    list_models,
    list_prices,
    match_device,
    resolve_device,
    resolve_model,
)
from autotune.cli.commands import catalogs
from autotune.core.errors import UsageError

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


def write_config(directory: Path, config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def test_light_import():
    code = "import sys, autotune.catalog, autotune.cli.commands.catalogs as c; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "pandas", "pydantic", "yaml", "rich", "huggingface_hub"} & set(loaded)


# --- devices


def test_every_device_name_means_one_device():
    names = [name for device in list_devices() for name in (device.name, *device.aliases, *device.nvml_names)]
    assert len({name.lower().replace(" ", "-") for name in names}) == len(names)
    for device in list_devices():
        for name in (device.name, device.name.upper().replace("-", "_"), *device.aliases, *device.nvml_names):
            assert resolve_device(name) is device
        for name in device.nvml_names:
            assert match_device(name) is device
            assert match_device(name.upper(), device.memory_gib) is device


@pytest.mark.parametrize(
    ("alias", "name"),
    [("h100", "h100-sxm"), ("H200", "h200-sxm"), ("a100_80GB", "a100-80gb-sxm"), ("a100-40gb", "a100-40gb-sxm"),
     ("4090", "rtx-4090"), ("v100", "v100-sxm2-16gb"), (" NVIDIA H200 ", "h200-sxm"), ("cpu", "cpu")],
)  # fmt: skip
def test_aliases(alias, name):
    assert resolve_device(alias).name == name


def test_unknown_device_suggests_a_near_name():
    with pytest.raises(UsageError, match=r"unknown gpu 'a10x'; did you mean .*'a10'") as caught:
        resolve_device("a10x")
    assert caught.value.remedy == "autotune gpus lists them"
    with pytest.raises(UsageError, match=r"unknown gpu 'zzzzzz'$"):
        resolve_device("zzzzzz")


@pytest.mark.parametrize(
    ("nvml_name", "memory_gib", "name"),
    [
        ("NVIDIA A10", 22.5, "a10"),
        ("NVIDIA A10G", 22.5, "a10g"),
        ("NVIDIA A100-SXM4-40GB", None, "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb-sxm"),
        ("A100-SXM-80GB", None, "a100-80gb-sxm"),  # older drivers print no vendor
        ("GeForce RTX 3090", None, "rtx-3090"),
        ("NVIDIA A100-SXM4", 39.6, "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4", 79.2, "a100-80gb-sxm"),
        ("Tesla V100-SXM2", 31.7, "v100-sxm2-32gb"),
        ("AMD Instinct MI300X", 192.0, "mi300x"),
        ("NVIDIA A100-SXM4", None, None),  # two sizes
        ("NVIDIA A100", 80.0, None),  # form unknown
        ("NVIDIA A100-SXM4-64GB", 63.4, None),  # a custom part
        ("NVIDIA H100", None, None),
        ("NVIDIA H20", None, None),
        ("NVIDIA A10-24Q", 24.0, None),  # a vGPU
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, None),
        ("NVIDIA GeForce RTX 4090 D", 24.0, None),
        ("NVIDIA GeForce RTX 4080 SUPER", 16.0, None),
        ("cpu", None, None),
        ("", None, None),
    ],
)
def test_match_device(nvml_name, memory_gib, name):
    found = match_device(nvml_name, memory_gib)
    assert (found and found.name) == name


def test_device_facts():
    h200, t4, cpu = resolve_device("h200"), resolve_device("t4"), resolve_device("cpu")
    assert h200.memory_gib == pytest.approx(140.4, abs=0.01)
    assert "estimate" in (resolve_device("b200").memory_source or "")
    assert (h200.kind, cpu.kind) == ("cuda", "cpu")
    assert (h200.supports_bf16, t4.supports_bf16, cpu.supports_bf16) == (True, False, True)
    assert cpu.memory_gib is None and cpu.bf16_tflops is None
    for device in list_devices():
        if device.compute_capability:
            assert device.supports_bf16 == (float(device.compute_capability) >= 8.0)
        assert device.source and (device.as_of is None or isinstance(device.as_of, str))


# --- prices


def test_prices_are_of_one_gpu():
    aws = next(price for price in list_prices() if price.provider == "aws")
    assert (aws.count, aws.usd_per_hour) == (8, pytest.approx(32.77 / 8))
    lambda_v100 = next(price for price in list_prices() if price.provider == "lambda" and "v100" in price.device)
    assert lambda_v100.usd_per_hour == pytest.approx(0.79)


def test_every_price_is_of_a_catalogued_device():
    names = {device.name for device in list_devices()}
    assert {price.device for price in list_prices()} <= names
    assert all(price.usd_per_hour > 0 and price.source for price in list_prices())


def test_default_price():
    a100 = find_price("a100-80gb-sxm")
    assert a100 and a100.quotable and a100.provider == "verda"
    a10 = find_price("a10")  # only an old row: used, and its date kept
    assert a10 and (a10.quotable, a10.as_of) == (False, "2026-01")
    rtx = find_price("rtx-4090")
    assert rtx and rtx.usd_per_hour == 0.34
    assert find_price("cpu") is None


# --- models


def test_every_model_name_means_one_model():
    specs = list_models()
    names = [name.lower() for spec in specs for name in (spec.name, *spec.aliases)]
    assert len(specs) == 51 and len(set(names)) == len(names)
    for spec in specs:
        for name in (spec.name, spec.name.upper(), spec.short, *spec.aliases):
            assert resolve_model(name).name == spec.name
        assert spec.source and (spec.as_of is None or isinstance(spec.as_of, str))
        assert spec.params and spec.num_layers and spec.hidden_size and spec.vocab_size and spec.max_seq_len


def test_model_facts():
    gpt2 = resolve_model("gpt2")
    assert (gpt2.num_layers, gpt2.hidden_size, gpt2.vocab_size, gpt2.max_seq_len) == (12, 768, 50257, 1024)
    assert resolve_model("mistral-7b").name == "mistralai/Mistral-7B-v0.3"
    assert resolve_model("mistral-7b").short == "Mistral-7B-v0.3"


def test_configs_are_copies():
    spec = resolve_model("llama-3.1-8b")
    before = spec.digest
    spec.config["rope_parameters"]["changed"] = True
    assert spec.digest != before
    assert resolve_model("llama-3.1-8b").digest == before


@pytest.mark.parametrize("name", ["demo-3m", "gpt2", "smollm2-135m", "qwen3-0.6b"])
def test_params_equal_those_of_the_built_model(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    spec = resolve_model(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**spec.config))
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.params


def test_unknown_model_suggests_a_near_name():
    with pytest.raises(UsageError, match=r"did you mean 'mistral-7b'") as caught:
        resolve_model("mistrl-7b")
    assert caught.value.exit_code == 2
    for name in ("", "a/b/c", "./gpt2", "x" * 5000, "a\0b", "org/../up"):
        with pytest.raises(UsageError):
            resolve_model(name)


# --- FLOPs


def test_flops_of_mistral_by_hand():
    spec = resolve_model("mistral-7b")
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096  # q, o; k, v; mlp; norms
    multiplied = 32 * layer + 4096 + 32768 * 4096  # final norm, head; the embedding is looked up
    attention = 6 * 1024 * 32 * 128 * 32
    assert spec.flops_per_token("lora", 1024) == 4 * multiplied + attention == 29_260_529_664
    assert spec.flops_per_token("full", 1024) == 6 * multiplied + attention


def test_flops_of_tied_and_learned_position_embeddings():
    gpt2 = resolve_model("gpt2")
    assert gpt2.params is not None
    assert gpt2.flops_per_token("full", 512) == 6 * (gpt2.params - 1024 * 768) + 6 * 512 * 12 * 64 * 12


@pytest.mark.parametrize(("name", "active"), [("mixtral", 12_879_925_248), ("qwen3-30b-a3b", 3_353_032_704)])
def test_flops_of_mixtures_count_the_visited_experts(name, active):
    spec = resolve_model(name)
    multiplied = active - spec.vocab_size * spec.hidden_size  # `active` is the total that the authors call active
    heads = spec.config["num_attention_heads"] * 128
    assert spec.flops_per_token("lora", 100) == 4 * multiplied + 6 * 100 * heads * spec.num_layers


def test_flops_with_sliding_windows():
    window, free = resolve_model("mistral-7b-v0.1"), resolve_model("mistral-7b-v0.2")
    assert window.params == free.params
    assert window.flops_per_token("lora", 4096) == free.flops_per_token("lora", 4096)
    # Sum over positions i of min(i, w), over the length: 4096/2 for the first half of 8192, 4096 for the second.
    saved = (8192 / 2 - (4096 / 2 + 4096) / 2) * 12 * 32 * 128 * 32
    assert free.flops_per_token("lora", 8192) - window.flops_per_token("lora", 8192) == saved
    gemma = resolve_model("gemma-2-2b")  # half of its 26 layers
    at_8k, at_4k = (gemma.flops_per_token("lora", seq_len) for seq_len in (8192, 4096))
    assert at_8k - at_4k == 12 * 8 * 256 * (13 * (4096 - 2048) + 13 * (3072 - 2048))


def test_flops_of_an_unknown_family_are_not_guessed(tmp_path):
    spec = resolve_model(str(write_config(tmp_path, LLAMA)))
    assert spec.flops_per_token("lora", 128) is None


# --- configs that somebody else wrote


def test_local_directory(tmp_path):
    junk = {"_name_or_path": "/x", "architectures": ["X"], "torch_dtype": "float16", "transformers_version": "4"}
    kernels = {"attn_implementation": "somebody/kernels", "rope_parameters": {"rope_theta": 1.0, "_x": 1}}
    path = write_config(tmp_path / "it's a; model", LLAMA | junk | kernels)
    spec = resolve_model(str(path))
    assert spec.name == spec.short == "it's a; model"
    assert spec.config == LLAMA | {"rope_parameters": {"rope_theta": 1.0}}
    assert (spec.params, spec.weights, spec.max_seq_len) == (None, None, None)
    (path / "pytorch_model.bin").write_bytes(b"")
    assert resolve_model(str(path)).weights is None
    (path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(path)).weights == str(path)


def test_a_catalogue_name_goes_before_a_directory(tmp_path, monkeypatch):
    write_config(tmp_path / "gpt2", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gpt2").params
    assert resolve_model("./gpt2").params is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"auto_map": {"AutoConfig": "x.Y"}}, "remote code is never run"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "already quantised"),
        (LLAMA | {"is_encoder_decoder": True}, "encoder-decoder"),
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


def test_directory_without_a_readable_config(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="not valid JSON"):
        resolve_model(str(tmp_path))


@pytest.fixture
def hub(monkeypatch):
    """huggingface_hub with an empty cache, and with its network calls recorded instead of made."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url: None)
    return hub


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


def test_unreachable_hub(monkeypatch, hub):
    def fail(url):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "get_hf_file_metadata", fail)
    with pytest.raises(UsageError, match=r"could not be reached.*ConnectionError.*did you mean") as caught:
        resolve_model("Qwen/Qwen3-9B")
    assert "local directory" in (caught.value.remedy or "")


# --- the commands


def test_tables_are_whole_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    catalogs.gpus(json_=False)
    catalogs.models(json_=False)
    text = capsys.readouterr().out
    assert all(device.name in text for device in list_devices())
    assert all(spec.name in text and ", ".join(spec.aliases) in text for spec in list_models())
    assert re.search(r"\$0.60 \(oci, \d+ (months|years) old\)", text) and "$2.29 (verda, undated)" in text
    assert "…" not in text


def test_json(capsys):
    catalogs.gpus(json_=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cpu"]["memory_gib"] is None and rows["cpu"]["price"] is None
    assert rows["h100-sxm"]["price"]["usd_per_hour"] == 2.29
    catalogs.models(json_=True)
    models = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert models["openai-community/gpt2"]["num_layers"] == 12
