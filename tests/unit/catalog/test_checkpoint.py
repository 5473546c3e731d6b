"""The sizes of weights come from the headers of files that the safetensors library wrote."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from autotune.catalog import resolve_model
from autotune.catalog.checkpoint import INDEX
from autotune.catalog.model_sizes import Sizes
from autotune.problem.setup import notes_of_checkpoint

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
NF4 = {
    "quantization_config": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
}


def weights(layers=2, vocab=100, head=True):
    tensors = {"model.embed_tokens.weight": np.zeros((vocab, 64), np.float16)}
    if head:
        tensors["lm_head.weight"] = np.zeros((vocab, 64), np.float16)
    for layer in range(layers):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = np.zeros((128, 64), np.float16)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = np.zeros(64, np.float32)
    return tensors


def folder_of(path, tensors, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, path / "model.safetensors")
    return path


def test_parameters_and_bytes_by_dtype(tmp_path):
    model = resolve_model(str(folder_of(tmp_path, weights())))
    values = 2 * 100 * 64 + 2 * 128 * 64
    assert model.params == values + 2 * 64
    assert model.checkpoint is not None
    assert model.checkpoint.stored == (("F16", 2 * values), ("F32", 2 * 64 * 4))
    sizes = Sizes.of(model)
    assert sizes is not None and sizes.params == model.params
    assert notes_of_checkpoint(model) == []


def test_a_head_that_shares_the_embedding_is_counted_once(tmp_path):
    tied = folder_of(tmp_path / "tied", weights(head=True), tie_word_embeddings=True)
    alone = folder_of(tmp_path / "alone", weights(head=False), tie_word_embeddings=True)
    assert resolve_model(str(tied)).params == resolve_model(str(alone)).params


def test_the_files_of_an_index(tmp_path):
    """Files outside the index, such as an earlier copy of the weights, do not count."""
    tensors = weights()
    whole = resolve_model(str(folder_of(tmp_path, tensors)))
    names = list(tensors)
    shards = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    sharded = resolve_model(str(tmp_path))
    assert sharded.checkpoint == whole.checkpoint

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    (note,) = notes_of_checkpoint(resolve_model(str(tmp_path)))
    assert note == (
        "the sizes of the weights come from config.json: model.safetensors.index.json names 2 "
        "files, and model-00002-of-00002.safetensors is missing"
    )


def test_packed_weights_of_bitsandbytes(tmp_path):
    """A byte holds two parameters, and the scales are no parameters."""
    tensors = weights()
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = np.zeros((128 * 64 // 2, 1), np.uint8)
        tensors[f"{name}.absmax"] = np.zeros(128, np.float32)
        tensors[f"{name}.quant_map"] = np.zeros(16, np.float32)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = np.zeros(80, np.uint8)
    packed = resolve_model(str(folder_of(tmp_path / "nf4", tensors, **NF4)))
    plain = resolve_model(str(folder_of(tmp_path / "plain", weights())))
    assert (packed.stored_as, packed.params) == ("nf4", plain.params)
    (note,) = notes_of_checkpoint(packed)
    assert note.startswith("the checkpoint is stored in nf4 (0.00 GiB of F16, 0.00 GiB of U8, ")
    assert note.endswith("and stays in this format: only adapters are trained")


def test_packed_experts_in_mxfp4(tmp_path):
    blocks = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": np.zeros((4, 8, 16), np.uint8),
        "model.layers.0.mlp.experts.gate_up_proj_scales": np.zeros((4, 8), np.uint8),
    }
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    with_experts = resolve_model(str(folder_of(tmp_path / "a", weights() | blocks, **quantised)))
    without = resolve_model(str(folder_of(tmp_path / "b", weights(), **quantised)))
    assert with_experts.params is not None and without.params is not None
    assert with_experts.params - without.params == 2 * 4 * 8 * 16


def test_files_that_do_not_match_the_config(tmp_path):
    folder = folder_of(tmp_path, weights(layers=3, vocab=101))
    model = resolve_model(str(folder))
    assert model.params is None
    assert notes_of_checkpoint(model) == [
        "the weight files do not match config.json: 3 layers instead of 2 and an embedding of "
        "101 x 64 instead of 100 x 64"
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "model.safetensors is not a complete safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer (run git lfs pull)"),
        (b"\xff" * 16, "model.safetensors is not a complete safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "its header is damaged"),
    ],
)
def test_a_damaged_file_leaves_the_sizes_to_the_config(tmp_path, content, reason):
    folder = folder_of(tmp_path, weights())
    (folder / "model.safetensors").write_bytes(content)
    model = resolve_model(str(folder))
    assert model.params is None
    (note,) = notes_of_checkpoint(model)
    assert note.startswith("the sizes of the weights come from config.json: ")
    assert reason in note


def test_a_file_that_was_cut_off(tmp_path):
    file = folder_of(tmp_path, weights()) / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1000])
    (note,) = notes_of_checkpoint(resolve_model(str(tmp_path)))
    assert note.endswith(f"model.safetensors has {size - 1000:,} of {size:,} bytes")


@pytest.mark.parametrize(
    ("config", "name", "layers"),
    [
        ({"num_nextn_predict_layers": 1}, "model.layers.2.eh_proj.weight", "1 layer, "),
        ({"mtp_num_hidden_layers": 2}, "mtp.layers.1.fc.weight", "2 layers, "),
        ({}, "model.mtp_layers.0.fc.weight", ""),
    ],
)
def test_layers_for_multi_token_prediction_are_named_and_not_counted(
    tmp_path, config, name, layers
):
    head = {name: np.zeros((64, 128), np.float16)}
    model = resolve_model(str(folder_of(tmp_path / "mtp", weights() | head, **config)))
    plain = resolve_model(str(folder_of(tmp_path / "plain", weights())))
    assert model.params == plain.params
    assert notes_of_checkpoint(model) == [
        f"the checkpoint has a head for multi-token prediction ({layers}8.19e-06 billion "
        "parameters), which transformers does not load for training: it is neither counted nor "
        "trained"
    ]
