"""What a layer keeps for its backward pass, counted on the autograd graph of real models, is what
the formula says.
"""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from autotune.catalog import ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import kept_bytes, kept_factors
from autotune.probe.resident import attach, build_resident
from autotune.trainer.model_builder import decoder_layers
from autotune.trainer.varlen import add_segments
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.probe,
    # PEFT 0.21 asks it
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SHAPES = (
    {
        "hidden_size": 96,
        "intermediate_size": 144,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 16,
    },
    {
        "hidden_size": 96,
        "intermediate_size": 112,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
)
WAYS: list[dict[str, Any]] = [
    {"precision": "bf16_mixed", "lora_rank": 8},
    {"precision": "bf16_pure", "lora_rank": 4},
    {"method": "full", "precision": "bf16_mixed"},
    {"method": "full", "precision": "bf16_pure"},
]


def counted(model: dict[str, Any], config: TrainConfig) -> int:
    """Bytes that the second of three layers keeps, beside the weights."""
    device = torch.device("cpu")
    resident = build_resident(
        ProbeRequest(config=config, model=model, device="cpu", memory_gib=4.0), device
    )
    trained = attach(resident, config, device, 0)
    if config.method == "lora":
        resident.base.get_input_embeddings().register_forward_hook(
            lambda module, args, made: made.requires_grad_(True)
        )
    known = {
        one.untyped_storage().data_ptr() for one in (*trained.parameters(), *trained.buffers())
    }
    alive, kept, current = [], 0, -1

    def enter(index: int) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            nonlocal current
            current = index

        return hook

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            alive.append(tensor)  # or its address may come again
            kept += storage.nbytes() if current == 1 else 0
        return tensor

    for index, layer in enumerate(decoder_layers(resident.base)):
        layer.register_forward_pre_hook(enter(index))
    tokens = torch.randint(0, 64, (config.micro_batch_size, config.seq_len))
    packed: dict[str, Any] = {}
    if config.packing:
        packed = {
            "position_ids": torch.arange(config.seq_len // 2)
            .repeat(2)
            .expand(config.micro_batch_size, -1)
        }
    if config.packed_attention == "varlen":
        packed = add_segments(packed)
    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16_mixed"),
    ):
        trained.train()(input_ids=tokens, labels=tokens, **packed)
    return kept


USUAL, EAGER_SCORES, PACKED = (
    {"attention": "sdpa"},
    {"attention": "eager"},
    {"attention": "sdpa", "packing": True},
)
BY_ITSELF = PACKED | {"packed_attention": "varlen"}
CASES = [
    (family, way, EAGER_SCORES if family == "gemma2" else USUAL)
    for family in sorted(kept_factors("eager"))
    for way in WAYS
]
CASES += [  # how attention computes, by method; Gemma 2 has no sdpa
    (family, way, how)
    for family in sorted(kept_factors("eager"))
    for way in (WAYS[0], WAYS[3])
    for how in (EAGER_SCORES, PACKED, BY_ITSELF)
    if family != "gemma2"
]
CASES += [
    (family, way, (EAGER_SCORES if family == "gemma2" else USUAL) | {"lora_targets": targets})
    for family in sorted(kept_factors("eager"))
    for way in WAYS[:2]
    for targets in ("attention", "q_v", "down_proj" if family == "phi3" else "gate_proj,o_proj")
]
CASES += [("phi3", way, BY_ITSELF) for way in WAYS[1:3]]  # which keeps less than with a mask
CASES += [(family, WAYS[1], BY_ITSELF | {"lora_targets": "q_v"}) for family in ("llama", "phi3")]


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(str(part) for part in value.values())


@pytest.mark.parametrize(("family", "way", "how"), CASES, ids=name_of)
def test_what_a_layer_keeps_of_a_token(
    family: str, way: dict[str, Any], how: dict[str, Any]
) -> None:
    for shape in SHAPES if how == USUAL else SHAPES[-1:]:
        model = (
            TINY
            | shape
            | {"model_type": family, "num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0}
        )
        model |= {"bos_token_id": 1, "eos_token_id": 2}
        if family == "phi3":
            model["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
        sizes = Sizes.of(ModelSpec(name="tiny", config=model))
        assert sizes is not None
        small, large = (
            TrainConfig(micro_batch_size=rows, seq_len=64, checkpointing="none", **how, **way)
            for rows in (2, 4)
        )
        more = large.tokens - small.tokens  # what does not grow with them is weights that were cast
        assert (counted(model, large) - counted(model, small)) / more == kept_bytes(sizes, large)
