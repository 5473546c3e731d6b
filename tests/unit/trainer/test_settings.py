"""What the exported script reads and sets before torch is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.train_config import TrainConfig
from autotune.export import script
from autotune.probe.model_settings import model_settings
from autotune.trainer import settings
from tests.unit.export.test_script import recipe


@pytest.mark.parametrize(
    ("before", "use_cpu", "visible"),
    [
        ({}, False, "0"),
        ({"CUDA_VISIBLE_DEVICES": "5, 1"}, False, "5"),
        ({"CUDA_VISIBLE_DEVICES": "5"}, True, ""),
    ],
)
def test_torch_sees_one_gpu_or_none(
    before: dict[str, str], use_cpu: bool, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(before)
    monkeypatch.setattr(settings.os, "environ", environment)
    settings.prepare_environment(replace(script.settings(recipe(TrainConfig())), use_cpu=use_cpu))
    assert environment == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible,
    }


def test_an_allocator_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    monkeypatch.setattr(settings.os, "environ", environment)
    fixed = script.settings(recipe(TrainConfig(allocator="fixed")))
    settings.prepare_environment(fixed)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    environment.clear()
    settings.prepare_environment(fixed)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_each_process_of_several_sees_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_RANK says which one is its own."""
    pair = script.settings(recipe(TrainConfig(num_gpus=2)))
    for use_cpu, visible in ((False, "5,1"), (True, "")):
        environment = {"CUDA_VISIBLE_DEVICES": "5,1"}
        monkeypatch.setattr(settings.os, "environ", environment)
        settings.prepare_environment(replace(pair, use_cpu=use_cpu))
        assert environment["CUDA_VISIBLE_DEVICES"] == visible


def test_the_arguments_of_the_libraries() -> None:
    plain = model_settings(TrainConfig(lora_rank=8, quantization="nf4", double_quant=True), "llama")
    assert plain.lora_arguments() == {
        "r": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
        "modules_to_save": None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    assert plain.bitsandbytes_arguments() == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    assert model_settings(TrainConfig(quantization="int8"), "llama").bitsandbytes_arguments() == {
        "load_in_8bit": True
    }
    full = model_settings(TrainConfig(method="full"), "llama")
    assert full.lora_arguments() is None and full.bitsandbytes_arguments() is None


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = script.settings(recipe(TrainConfig(quantization="nf4", dora=True)))
    made = replace(
        made, lengths=[7, 12, 300], padded_lengths=[], about=["[\n  1,\n  2\n]", "[ 1, 2 ]"]
    )
    (tmp_path / "train_config.json").write_text(made.to_json())
    assert settings.RunSettings.read(tmp_path / "train_config.json") == made
    # for readers
    assert made.to_json().startswith('{\n  "about": [\n') and made.to_json().endswith("}\n")
    assert '"lengths": [7, 12, 300]' in made.to_json()
