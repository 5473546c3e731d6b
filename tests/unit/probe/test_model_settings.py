"""What a configuration means to the builder of a model."""

from typing import Any

import pytest

from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.trainer.settings import ModelSettings


@pytest.mark.parametrize(
    ("knobs", "changes"),
    [
        ({}, {}),
        ({"precision": "bf16_pure"}, {"adapters_in_fp32": False}),
        ({"precision": "fp16_mixed"}, {"base_dtype": "float16"}),
        ({"precision": "fp32"}, {"base_dtype": "float32"}),
        ({"checkpointing": "none"}, {"checkpoint_every": None}),
        ({"checkpointing": "every_3"}, {"checkpoint_every": 3}),
        ({"checkpointing": "offload"}, {"offload": True}),
        ({"attention": "eager"}, {"attention": "eager"}),
        (
            {"quantization": "nf4", "double_quant": True},
            {"quantization": "nf4", "double_quant": True},
        ),
        ({"lora_dropout": 0.1}, {"lora_dropout": 0.1}),
        ({"dora": True}, {"dora": True}),
        ({"rslora": True, "lora_rank": 4}, {"rslora": True, "lora_rank": 4, "lora_alpha": 8}),
        ({"lora_targets": "q_v"}, {"lora_targets": ["q_proj", "v_proj"]}),
        ({"lora_targets": "k_proj,up_proj"}, {"lora_targets": ["k_proj", "up_proj"]}),
        ({"modules_to_save": "head"}, {"modules_to_save": ["lm_head"]}),
        (
            {"quantization": "nf4", "kbit_preparation": True},
            {"quantization": "nf4", "kbit_preparation": True},
        ),
        ({"method": "full"}, {"base_dtype": "float32", "lora_rank": None, "lora_alpha": None}),
    ],
    ids=str,
)
def test_each_knob_reaches_the_builder(knobs: dict[str, Any], changes: dict[str, Any]) -> None:
    plain: dict[str, Any] = {
        "base_dtype": "bfloat16",
        "attention": "sdpa",
        "quantization": "none",
        "double_quant": False,
        "kbit_preparation": False,
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_targets": None,
        "modules_to_save": None,
        "dora": False,
        "rslora": False,
        "lora_dropout": 0.0,
        "adapters_in_fp32": True,
        "checkpoint_every": 1,
        "offload": False,
    }
    assert model_settings(TrainConfig(**knobs), "llama") == ModelSettings(**plain | changes)
