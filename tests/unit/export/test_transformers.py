"""The JSON files load by the libraries' own parsers, every knob is in them or named, and the notes'
code runs.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.catalog import resolve_device
from autotune.core.train_config import TrainConfig
from autotune.export import header
from autotune.export import transformers as exporter
from autotune.trainer import rows
from autotune.trainer.settings import ALLOCATORS
from tests.probe.test_train_script import _save_demo
from tests.unit.export.test_script import HOSTILE, SAVED, TARGETS, demo, each_config, recipe, write

# the names before transformers 5.23, that 5.3 needs
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# Gone or new somewhere between transformers 5.3 and 5.23: a file with one of them loads in some
# versions only.
NOT_EVERYWHERE = {
    "warmup_ratio",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "group_by_length",
}


def data(files: dict[str, str], name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(files[name])
    return values


def code_of(notes: str) -> str:
    return re.search(r"^```python\n(.*?)^```$", notes, re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]


@each_config
@pytest.mark.parametrize("transformers", ["5.17.0", "5.23.0"])
def test_every_knob_is_said_or_named(config: TrainConfig, transformers: str) -> None:
    made = recipe(config, transformers=transformers)
    files = exporter.export(made)
    said = data(files, "training_args.json")
    adapter = data(files, "adapter_config.json") if config.method == "lora" else {}
    stored = config.quantization in ("nf4", "int8")
    assert ("adapter_config.json" in files) is (config.method == "lora")
    assert ("quantization_config.json" in files) is stored
    quantization = data(files, "quantization_config.json") if stored else {}
    every, kwargs = config.checkpoint_every, said.get("gradient_checkpointing_kwargs", {})
    code = code_of(files["transformers_notes.md"])
    holds = {
        "method": True,
        "micro_batch_size": said["per_device_train_batch_size"] == config.micro_batch_size,
        "lora_rank": (adapter.get("r"), adapter.get("lora_alpha"))
        == (config.lora_rank, config.lora_alpha),
        "lora_targets": adapter.get("target_modules", "all-linear")
        == ("all-linear" if config.lora_targets == "all-linear" else TARGETS[config.lora_targets]),
        "modules_to_save": adapter.get("modules_to_save") == SAVED[config.modules_to_save],
        "optimizer": said["optim"] == config.optimizer,
        "optimizer_in_backward": not config.optimizer_in_backward,
        "precision": said["bf16"] is (config.precision == "bf16_mixed")
        and said["fp16"] is (config.precision == "fp16_mixed")
        and f'dtype="{config.base_dtype}"' in code,
        "quantization": (
            quantization.get("load_in_4bit", False),
            quantization.get("load_in_8bit", False),
        )
        == (config.quantization == "nf4", config.quantization == "int8")
        and config.quantization != "fp8",
        "kbit_preparation": ("prepare_model_for_kbit_training(model" in code)
        is config.kbit_preparation,
        "double_quant": quantization.get("bnb_4bit_use_double_quant", False) is config.double_quant,
        "checkpointing": said["gradient_checkpointing"] is (every is not None)
        and (every in (None, 1) or kwargs.get("every_n_layers") == every)
        and not config.offloads,
        "compile": config.compile == "none" and said["torch_compile"] is False,
        "loss": config.loss == "full",
        "kernels": said.get("use_liger_kernel", False) is (config.kernels == "liger"),
        "packing": not config.packing,
        "packed_attention": config.packed_attention == "mask",
        "group_by_length": said.get("train_sampling_strategy", "random")
        == ("group_by_length" if config.group_by_length else "random"),
        "dora": adapter.get("use_dora", False) is config.dora,
        "lora_dropout": adapter.get("lora_dropout", 0.0) == config.lora_dropout,
        "rslora": adapter.get("use_rslora", False) is config.rslora,
        "loader_workers": said["dataloader_num_workers"] == config.loader_workers,
        "allocator": ALLOCATORS[config.allocator] in files["transformers_notes.md"],
        "num_gpus": config.num_gpus == 1,
    }
    gaps = files["transformers_notes.md"].partition("Settings that the files cannot hold:\n\n")[2]
    named = {item.split()[1].rstrip(":") for item in gaps.splitlines()}
    assert set(config.as_dict()) <= {knob for knob, is_held in holds.items() if is_held} | named
    assert ("autocast_adapter_dtype=False" in code) is (
        config.method == "lora" and config.precision == "bf16_pure"
    )
    assert isinstance(said["warmup_steps"], int)
    assert not NOT_EVERYWHERE & set(said)
    assert f"Fingerprint {made.fingerprint.digest}" in files["transformers_notes.md"]
    compile(code, "notes", "exec")


@each_config
def test_the_libraries_load_the_files(config: TrainConfig, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftConfig
    from transformers import BitsAndBytesConfig, HfArgumentParser, TrainingArguments

    made = recipe(config)
    files = exporter.export(made)
    # A machine without GPU refuses bf16 and fp16: they are all that is overridden.
    said = data(files, "training_args.json")
    files["training_args.json"] = json.dumps(said | {"use_cpu": True, "bf16": False, "fp16": False})
    write(files, tmp_path)
    parser = HfArgumentParser(TrainingArguments)
    (arguments,) = parser.parse_json_file(
        str(tmp_path / "training_args.json"), allow_extra_keys=False
    )
    assert arguments.get_warmup_steps(1000) == header.warmup_steps(made)
    assert arguments.gradient_checkpointing is (config.checkpointing != "none")
    assert arguments.gradient_accumulation_steps == made.accumulation
    assert str(arguments.optim.value) == config.optimizer
    assert arguments.tf32 in (None, False)
    if config.method == "lora":
        for kind in (LoraConfig, PeftConfig):
            adapter = kind.from_pretrained(str(tmp_path))
            assert isinstance(adapter, LoraConfig)
            targets, names = adapter.target_modules, TARGETS[config.lora_targets]
            assert adapter.r == config.lora_rank and targets == (
                "all-linear" if "all-linear" in names else set(names)
            )
            assert (adapter.use_dora, adapter.use_rslora) == (config.dora, config.rslora)
            assert adapter.base_model_name_or_path == header.model_source(made)
            assert adapter.inference_mode is False
    if "quantization_config.json" in files:
        quantization = BitsAndBytesConfig.from_dict(data(files, "quantization_config.json"))
        assert str(quantization.bnb_4bit_compute_dtype) == f"torch.{config.base_dtype}"
        assert quantization.bnb_4bit_use_double_quant is config.double_quant
        assert (
            quantization.quantization_method()
            == {"nf4": "nf4", "int8": "llm_int8"}[config.quantization]
        )


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (TrainConfig(), "- padding: pad rows to the longest of their micro batch"),
        (
            TrainConfig(padding="bucket"),
            "- padding bucket: pad rows to the next of padded_lengths in train_config.json",
        ),
        (
            TrainConfig(padding="max_length"),
            "- padding max_length: pad rows to the next of padded_lengths in",
        ),
        (TrainConfig(packing=True), None),
    ],
    ids=str,
)
def test_how_rows_are_padded_is_for_the_collator(config: TrainConfig, line: str | None) -> None:
    files = exporter.export(recipe(config))
    notes = files["transformers_notes.md"]
    assert "- padding" not in notes if line is None else f"\n{line}" in notes
    assert "pad_to_multiple_of" not in data(files, "training_args.json")  # only TRL's


def test_the_notes_hold_out_what_train_py_does() -> None:
    made = recipe(TrainConfig(seq_len=64))
    notes = exporter.export(replace(made, workload=replace(made.workload, eval_share=0.05)))[
        "transformers_notes.md"
    ]
    said = re.search(r"runtime\.rows\.hold_out\(examples, (.*), (.*)\)", notes)
    assert said is not None
    _, held_out = rows.hold_out([torch.arange(99)] * 40, float(said[1]), int(said[2]))
    assert [len(example) for example in held_out] == [64, 64]


def test_another_trainer_has_another_speed() -> None:
    notes = exporter.export(recipe(TrainConfig(), trainer="trl"))["transformers_notes.md"]
    assert "the speed was measured with the probed trainer" in notes.lower()
    assert "name your model" in exporter.export(demo(TrainConfig()))["transformers_notes.md"]


@pytest.mark.probe
def test_the_code_of_the_notes_trains(tmp_path: Path) -> None:
    config = TrainConfig(
        micro_batch_size=2, seq_len=16, precision="fp32", optimizer="adamw_torch", dora=True
    )
    made = replace(demo(config), device=resolve_device("cpu"))
    weights = _save_demo(tmp_path / HOSTILE.replace("/", "").replace("\0", ""))
    files = exporter.export(replace(made, model=replace(made.model, weights=str(weights))))
    files["training_args.json"] = json.dumps(data(files, "training_args.json") | {"max_steps": 1})
    script = code_of(files["transformers_notes.md"]) + (
        "\nfrom transformers import Trainer\n"
        "rows = [{'input_ids': [1] * 16, 'labels': [1] * 16}] * 8\n"
        "assert Trainer(model, arguments, train_dataset=rows).train().global_step == 1\n"
    )
    write(files | {"script.py": script}, tmp_path)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
