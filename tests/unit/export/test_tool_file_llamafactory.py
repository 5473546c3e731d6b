"""llamafactory.yaml: keys that LLaMA-Factory has, every knob or its name in the head, and hostile
names.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.core.files import load_data
from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.export import keys, tool_file
from autotune.planning.foreign_config import adapt_to_model, read_file
from autotune.study.summary import Recipe
from tests.unit.export.test_tool_file_axolotl import (
    CONFIGS,
    HOSTILE,
    KEYS,
    each_config,
    named,
    recipe,
)


def exported(made: Recipe) -> tuple[str, dict[str, Any]]:
    files = tool_file.export(made, "llamafactory")
    assert list(files) == ["llamafactory.yaml", "dataset_info.json"]
    return files["llamafactory.yaml"], yaml.safe_load(files["llamafactory.yaml"])


@each_config
def test_every_key_and_value_is_known_to_llamafactory(config: TrainConfig) -> None:
    _, data = exported(recipe(config))
    known = {name: set(names.split()) for name, names in KEYS["llamafactory"].items()}
    about = load_data("autotune.export", "tools")["llamafactory"]
    expected = f"llamafactory=={about['version']} transformers=={about['transformers']}."
    assert KEYS["llamafactory"]["source"].startswith(expected)
    assert set(data) <= known["keys"]
    assert data["optim"] in known["optimizers"]
    assert data["flash_attn"] in known["attentions"]


@each_config
def test_what_is_exported_comes_back_but_for_what_the_head_names(
    config: TrainConfig, tmp_path: Path
) -> None:
    made = recipe(config)
    text, data = exported(made)
    (tmp_path / "llamafactory.yaml").write_text(text, encoding="utf-8")
    run = adapt_to_model(read_file(tmp_path / "llamafactory.yaml"), made.model)
    # `foreign` takes Liger's kernels and loss together; here they are said one by one.
    parts = data.get("liger_kernel_config", {"rope": False, "fused_linear_cross_entropy": False})
    kernels, loss = parts["rope"], parts["fused_linear_cross_entropy"]
    read = replace(
        run.config, kernels="liger" if kernels else "torch", loss="chunked" if loss else "full"
    )
    changed = {knob for knob in KNOBS if getattr(read, knob) != getattr(config, knob)}
    changed -= {"allocator"}  # the command's environment says it
    assert changed <= named(keys.inexpressible_knobs("llamafactory", made))
    assert all(
        f"# not expressed: {item}\n" in text
        for item in keys.inexpressible_knobs("llamafactory", made)
    )
    assert (run.format, run.model, run.dataset) == (
        "llamafactory",
        "mistralai/Mistral-7B-v0.3",
        "your_dataset",
    )
    assert run.accumulation * run.config.micro_batch_size == 32
    assert run.epochs == made.workload.epochs


@each_config
def test_what_llamafactory_would_choose_by_itself_is_chosen(config: TrainConfig) -> None:
    text, data = exported(recipe(config))
    assert [data["bf16"], data["fp16"], data["pure_bf16"]].count(True) == (
        config.precision != "fp32"
    )
    assert data["disable_gradient_checkpointing"] is (config.checkpointing == "none")
    assert data["use_unsloth_gc"] is config.offloads and data["use_reentrant_gc"] is False
    assert data["packing"] is data["neat_packing"] is config.packing
    assert data.get("lora_alpha") == config.lora_alpha
    assert data.get("double_quantization", False) is config.double_quant
    assert data["dataloader_num_workers"] == config.loader_workers
    assert not data["tf32"] and not data["upcast_layernorm"]
    # it asserts so
    assert not (config.packing and data["flash_attn"] == "fa2" and config.micro_batch_size > 1)
    assert data.get("use_liger_kernel", False) is (
        config.kernels == "liger" or config.loss == "chunked"
    )
    assert data.get("liger_kernel_config", {}).get("cross_entropy", False) is False
    assert isinstance(data["warmup_steps"], int) and isinstance(data["learning_rate"], float)
    assert ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true " in text) is (
        config.compile == "per_layer"
    )


def test_the_head_tells_what_to_expect_and_how_to_run() -> None:
    made = recipe(TrainConfig(packing=True, quantization="nf4"))
    head = exported(made)[0].partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"Fingerprint {made.fingerprint.digest}" in head and "Full run: 10,000 examples" in head
    one_gpu = (
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    assert f"#   {one_gpu} llamafactory-cli train llamafactory.yaml\n" in head
    assert "transformers 5.6 or older; the study used 5.17.0" in head
    assert "dtype of its checkpoint; it was measured with bfloat16" in head
    assert "not expressed" not in head
    assert "SFTTrainer" in exported(recipe(TrainConfig(), trainer="trl"))[0]
    assert "Before transformers 5.2, write group_by_length" not in head
    assert (
        "Before transformers 5.2, write group_by_length"
        in exported(recipe(TrainConfig(group_by_length=True)))[0]
    )


def test_the_dataset_is_a_stub_that_llamafactory_reads() -> None:
    stub = json.loads(tool_file.export(recipe(TrainConfig()), "llamafactory")["dataset_info.json"])
    data = exported(recipe(TrainConfig()))[1]
    assert (list(stub), data["dataset_dir"]) == ([data["dataset"]], ".")
    known = set(KEYS["llamafactory"]["dataset_keys"].split())
    entry = stub[data["dataset"]]
    assert set(entry) | set(entry["columns"]) | set(entry["tags"]) <= known


def test_the_whole_of_one() -> None:
    text, data = exported(
        recipe(TrainConfig(quantization="nf4", double_quant=True, loss="chunked"))
    )
    layers = dict.fromkeys(
        ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy"), False
    )
    assert data == {
        "model_name_or_path": "mistralai/Mistral-7B-v0.3",
        "flash_attn": "sdpa",
        "quantization_method": "bnb",
        "quantization_bit": 4,
        "quantization_type": "nf4",
        "double_quantization": True,
        "dataset_dir": ".",
        "dataset": "your_dataset",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "use_dora": False,
        "use_rslora": False,
        "cutoff_len": 1024,
        "packing": False,
        "neat_packing": False,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "dataloader_drop_last": True,
        "dataloader_num_workers": 0,
        "bf16": True,
        "fp16": False,
        "pure_bf16": False,
        "upcast_layernorm": False,
        "upcast_lmhead_output": False,
        "disable_gradient_checkpointing": False,
        "use_reentrant_gc": False,
        "use_unsloth_gc": False,
        "use_liger_kernel": True,
        "liger_kernel_config": layers | {"fused_linear_cross_entropy": True},
        "optim": "adamw_torch_fused",
        "torch_compile": False,
        "tf32": False,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 9,
        "num_train_epochs": 1,
        "max_grad_norm": 1.0,
        "logging_steps": 10,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 313,
        "save_total_limit": 2,
        "output_dir": "out",
    }
    assert "was not tuned" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_names(name: str) -> None:
    model = replace(resolve_model("demo-3m"), name=name)
    _, data = exported(recipe(TrainConfig(), model=model, study=name, trainer=name))
    assert data["model_name_or_path"] == name
    assert set(data) == set(exported(recipe(TrainConfig()))[1])


def test_configurations_hold_every_value_of_every_knob() -> None:
    for knob, spec in KNOBS.items():
        # see test_several_gpus
        if knob in ("num_gpus", "sharding", "copies", "sync_each_batch", "offload"):
            continue
        missing = set(spec.choices) - {getattr(config, knob) for config in CONFIGS}
        if knob == "loader_workers":
            missing.discard(4)
        assert not missing, knob
