"""One GPU's part of a mixture's experts: its memory by hand, and its exchange of tokens."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.core.probe_types import DryCount, ExpertShard, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.dry.counting import dry_probe
from autotune.dry.expert_parallel import divide_experts
from tests.helpers.factories import TINY
from tests.probe.test_dry import counted_on, request
from tests.probe.test_dry import pytestmark as pytestmark

HIDDEN, VOCAB, HEAD, LAYERS, EXPERTS, WIDTH = 256, 512, 32, 2, 8, 128
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "head_dim": HEAD,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
FULL = TrainConfig(method="full", lora_rank=None, micro_batch_size=2, seq_len=64)


def counted(shard: ExpertShard | None, config: TrainConfig = FULL) -> DryCount:
    return dry_probe(
        ProbeRequest(config=config, model=TINY | MIXTURE, memory_gib=1.0, experts=shard)
    )


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_lasting_memory_is_that_of_hand_arithmetic(num_gpus: int) -> None:
    attention = 2 * HIDDEN * 8 * HEAD + 2 * HIDDEN * 2 * HEAD + 2 * HEAD
    experts = EXPERTS // num_gpus * 3 * HIDDEN * WIDTH
    layer = attention + experts + EXPERTS * HIDDEN + 2 * HIDDEN  # with the router and two norms
    params = 2 * VOCAB * HIDDEN + LAYERS * layer + HIDDEN

    found = counted(ExpertShard(num_gpus=num_gpus))
    assert found.total_params == found.trainable_params == params
    assert found.model_gib == pytest.approx(4 * params / GIB, rel=0.01)
    assert found.gradients_gib == pytest.approx(4 * params / GIB, rel=0.01)
    assert found.optimizer_gib == pytest.approx(8 * params / GIB, rel=0.01)
    assert found.expert_gradients_gib == pytest.approx(4 * LAYERS * experts / GIB, rel=0.01)


def test_the_adapters_of_experts_are_divided_too() -> None:
    config = TrainConfig(
        method="lora", lora_rank=8, lora_targets="attention_experts", micro_batch_size=2, seq_len=64
    )
    whole, half = counted(None, config), counted(ExpertShard(num_gpus=2), config)
    of_expert = 8 * (HIDDEN + 2 * WIDTH) + 8 * (WIDTH + HIDDEN)
    assert whole.trainable_params - half.trainable_params == LAYERS * EXPERTS // 2 * of_expert
    assert half.expert_gradients_gib == pytest.approx(
        4 * LAYERS * EXPERTS // 2 * of_expert / GIB, rel=0.01
    )


def test_the_fullest_gpu_gets_every_token_as_often_as_its_experts_permit() -> None:
    config = replace(FULL, micro_batch_size=8, seq_len=512, checkpointing="full", loss="chunked")
    mean, fullest = (
        counted(ExpertShard(num_gpus=4, fullest=fullest), config) for fullest in (False, True)
    )
    assert fullest.total_params == mean.total_params
    # 2 experts of 8 for each token, and 2 experts on this GPU: 4 x 2 / 2 times the mean
    rows = 8 * 512 * 2
    assert fullest.flops["grouped_mm_fallback"] == 4 * mean.flops["grouped_mm_fallback"]
    grown = fullest.segment_peak_gib["backward_layers"] - mean.segment_peak_gib["backward_layers"]
    assert grown > 3 * rows * 2 * HIDDEN * 2 / GIB


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_meta_device_counts_as_a_cpu_does(family: str) -> None:
    wanted = replace(
        request(family, precision="bf16_pure", loss="full", method="full", lora_rank=None),
        experts=ExpertShard(num_gpus=2),
    )
    dry, real = counted_on("meta", wanted), counted_on("cpu", wanted)
    # The gradients of norms on a CPU take temporary tensors that CUDA does not.
    assert dry.segment_peak_gib == pytest.approx(real.segment_peak_gib, abs=4096 / GIB, rel=0)
    names = ("model_gib", "gradients_gib", "optimizer_gib", "total_params", "expert_gradients_gib")
    assert all(getattr(dry, name) == getattr(real, name) for name in names)


def test_experts_that_cannot_be_divided_are_an_error() -> None:
    with pytest.raises(ValueError, match=re.escape("3 GPUs cannot share out 8 experts equally")):
        counted(ExpertShard(num_gpus=3))
    with pytest.raises(ValueError, match="Linear has no experts in transformers' interface"):
        divide_experts(torch.nn.Linear(2, 2), ExpertShard(num_gpus=2))
