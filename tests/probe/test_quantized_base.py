"""A quantised base with random weights holds what one with
real weights holds: every tensor once.
"""

from typing import Any

import pytest
import torch

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.dry.counting import dry_probe
from autotune.probe.accounting import parameter_gib
from autotune.probe.resident import build_resident
from tests.helpers.factories import TINY
from tests.helpers.probing import request

pytestmark = pytest.mark.probe

MODEL = TINY | {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
}


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of all tensors that can be reached from the modules, storages counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        if isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, torch.nn.Module | torch.Tensor) or type(value).__name__ in (
            "QuantState",
            "MatmulLtState",
        ):
            walk(vars(value))

    walk(model)
    return sum(storages.values())


@pytest.mark.parametrize("quantization", ["nf4", "nf4-double", "int8"])
def test_a_quantised_base_holds_what_it_weighs(quantization: str) -> None:
    kind, _, double = quantization.partition("-")
    config = TrainConfig(quantization=kind, double_quant=bool(double))
    request = ProbeRequest(config=config, model=MODEL, device="cpu", memory_gib=1.0)
    base = build_resident(request, torch.device("cpu")).base
    assert held_bytes(base) == pytest.approx(parameter_gib(base) * GIB, rel=0.01)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT
def test_a_model_that_reads_a_weight_itself_is_told_that_it_is_packed() -> None:
    """Jamba multiplies by a weight itself, unless its config says that weights are quantised."""
    jamba = MODEL | {
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_dt_rank": 8,
        "mamba_d_state": 8,
    }
    plain = dry_probe(request(model=jamba, precision="bf16_pure"))
    packed = dry_probe(request(model=jamba, precision="bf16_pure", quantization="nf4"))
    assert packed.model_gib < 0.9 * plain.model_gib
