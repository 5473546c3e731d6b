"""Quantised checkpoints are loaded so that they can be trained.

fp8 and mxfp4 weights become 16-bit weights; those of bitsandbytes stay quantised.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BitsAndBytesConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from autotune.catalog import resolve_model
from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.trainer.model_builder import config_of, load
from autotune.trainer.settings import ModelSettings, quantization_of

pytestmark = pytest.mark.probe

CPU = torch.device("cpu")
BLOCK = 128  # rows and columns of the weights that share a scale
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def settings(quantization: str = "none", attention: str = "sdpa") -> ModelSettings:
    config = TrainConfig(
        lora_rank=4, precision="bf16_mixed", quantization=quantization, attention=attention
    )
    return model_settings(config, "llama")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=2 * BLOCK,
        intermediate_size=2 * BLOCK,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def stored(
    source: Path, folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]
) -> str:
    """Write a checkpoint with these tensors and the other config of `source`."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return str(folder)


def test_blocks_of_fp8_become_16_bits(plain: Path, tmp_path: Path) -> None:
    exact = load_file(plain / "model.safetensors")
    tensors = {}
    for name, weight in exact.items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            scales = blocks.abs().amax((1, 3)) / 448
            codes = blocks / scales[:, None, :, None]
            tensors[name] = codes.flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            tensors[name.replace("weight", "weight_scale_inv")] = scales
    checkpoint = stored(plain, tmp_path / "fp8", tensors, FP8)

    model = resolve_model(checkpoint)
    assert model.stored_as == "fp8" and "quantization_config" not in model.config
    for config in (None, config_of(model.config)):  # of the checkpoint, and as a probe has it
        loaded = load(checkpoint, settings(), CPU, config)
        weight = loaded.get_parameter(QUERY)
        assert weight.dtype == torch.bfloat16 and not loaded.is_quantized
        assert (weight - exact[QUERY]).abs().max() < 0.04 * exact[QUERY].abs().max()

    # A wrapper may have the format in the config of its text model.
    assert quantization_of({"text_config": {"quantization_config": FP8}}) == FP8
    assert quantization_of({"quantization_config": FP8, "text_config": {}}) == FP8

    with pytest.raises(ValueError, match="is stored in fp8, which bitsandbytes cannot quantise"):
        load(checkpoint, settings("nf4"), CPU)


def test_experts_of_mxfp4_become_16_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"],
    )
    source = tmp_path / "plain"
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            shape = experts, outputs, inputs // 32
            # The lower half of each byte is the first of its two codes: here 6 and -0.5.
            tensors[f"{name}_blocks"] = torch.full((*shape, 16), 0x97, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(shape, 125, dtype=torch.uint8)  # 2 ** -2
        else:
            tensors[name] = weight
    checkpoint = stored(source, tmp_path / "mxfp4", tensors, {"quant_method": "mxfp4"})

    assert resolve_model(checkpoint).stored_as == "mxfp4"
    loaded = load(checkpoint, settings(attention="eager"), CPU)
    weight = loaded.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert weight.dtype == torch.bfloat16 and weight.shape == (2, 64, 64)
    assert weight[0, :4, 0].tolist() == [1.5, -0.125, 1.5, -0.125]


def test_4_bits_of_bitsandbytes_stay(plain: Path, tmp_path: Path) -> None:
    quantized = LlamaForCausalLM.from_pretrained(
        plain, quantization_config=BitsAndBytesConfig(**NF4, bnb_4bit_use_double_quant=True)
    )
    quantized.save_pretrained(tmp_path)
    model = resolve_model(str(tmp_path))
    assert model.stored_as == "nf4-double"

    packed = quantized.get_parameter(QUERY)
    for config in (None, config_of(model.config)):
        loaded = load(str(tmp_path), settings("nf4"), CPU, config)
        assert torch.equal(loaded.get_parameter(QUERY), packed) and packed.dtype == torch.uint8
