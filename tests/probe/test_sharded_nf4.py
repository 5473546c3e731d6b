"""4-bit layers that FSDP2 can shard: the same bits as bitsandbytes' layers, and random shards."""

import copy
import weakref
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from autotune.core.train_config import TrainConfig
from autotune.probe.accounting import logical_params
from autotune.probe.model_settings import model_settings
from autotune.trainer.model_builder import (
    config_of,
    is_outline,
    materialize,
    outline,
    trainable_model,
)
from autotune.trainer.sharded_nf4 import (
    Layout,
    fill_shard,
    is_sharded_4_bit,
    shard_4_bit_layers,
)
from tests.helpers.probing import MODEL

pytestmark = [
    pytest.mark.probe,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CPU = torch.device("cpu")


def quantised(double_quant: bool, dtype: torch.dtype) -> Any:
    """A layer of bitsandbytes in a model of its own; its 240 blocks end in the middle of a group
    of scales.
    """
    torch.manual_seed(0)
    how: dict[str, Any] = {"compress_statistics": double_quant, "quant_type": "nf4"}
    layer = bnb.nn.Linear4bit(96, 160, True, compute_dtype=dtype, **how)
    weight = torch.randn(160, 96, dtype=dtype)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **how)
    layer.bias = nn.Parameter(torch.randn(160, dtype=dtype), requires_grad=False)
    return nn.Sequential(layer.to(CPU))


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_bitsandbytes_own(double_quant: bool, dtype: torch.dtype) -> None:
    theirs = quantised(double_quant, dtype)
    ours = copy.deepcopy(theirs)
    ours[0].quant_state = ours[0].weight.quant_state
    shard_4_bit_layers(ours, CPU)
    assert is_sharded_4_bit(ours[0]) and not is_sharded_4_bit(theirs[0])
    # one parameter, which FSDP2 gathers without a cast
    assert ours[0].weight.dtype is torch.bfloat16 and not ours[0].weight.requires_grad
    assert logical_params(ours) == 160 * 96 + 160

    results = []
    for model in (theirs, ours):
        rows = torch.ones(3, 96, dtype=dtype, requires_grad=True)
        output = model(rows)
        output.square().sum().backward()
        results.append((output, rows.grad))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)


def test_the_scales_of_a_whole_layer_are_freed() -> None:
    """A rank that kept them would hold a whole model's scales, which is 1 GiB for 70B weights."""
    model = quantised(True, torch.bfloat16)
    scales = weakref.ref(model[0].quant_state.absmax)
    shard_4_bit_layers(model, CPU)
    assert scales() is None


@pytest.mark.parametrize("double_quant", [False, True])
def test_random_shards_make_weights_of_the_usual_size(double_quant: bool) -> None:
    """Each rank fills its own part, wherever the parts of the layer begin."""
    model = quantised(double_quant, torch.float32)
    shard_4_bit_layers(model, CPU)
    layer = model[0]
    for start in range(0, layer.weight.numel(), 1000):
        fill_shard(layer, layer.weight.data[start : start + 1000], start)
    packed, state = layer.unpacked_state()
    weight = bnb.functional.dequantize_4bit(packed.view(-1, 1), state)
    assert weight.shape == (160, 96)
    assert 0.015 < weight.std().item() < 0.025 and weight.abs().max().item() < 0.05


def test_the_parts_of_a_layer_can_be_viewed_in_32_bits() -> None:
    layout = Layout(96 * 160, double_quant=True)
    assert layout.ends == [0, 7680, 7920, 7936] and layout.size % 16 == 0
    assert [len(part) for part in layout.parts(torch.zeros(layout.size))] == [7680, 240, 8]


def test_an_outlined_4_bit_base_has_memory_only_for_its_shards() -> None:
    config = TrainConfig(quantization="nf4", double_quant=True, precision="fp32")
    settings = model_settings(config, "llama")
    shape = MODEL | {"tie_word_embeddings": False}
    base = outline(config_of(shape), settings, CPU, 0.0)
    assert base is not None and is_outline(base)
    model = trainable_model(base, settings, CPU)
    shard_4_bit_layers(model, CPU)
    assert all(one.weight.is_meta for one in model.modules() if is_sharded_4_bit(one))
    materialize(model, CPU)
    loss = model(input_ids=torch.ones(1, 8, dtype=torch.long), labels=torch.ones(1, 8).long()).loss
    assert not is_outline(model) and loss.isfinite()
