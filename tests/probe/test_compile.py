"""Layers compiled by a real worker: how often, and that they compute what they did before."""

import itertools
import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from autotune.core.probe_types import ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.probe,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

Rows = list[tuple[int, list[float]]]
Served = dict[str, Rows]
TINY_LLAMA = TINY | {"model_type": "llama", "num_hidden_layers": 6}
# The worker is in this process, so that its compiler can be asked.
SERVE = """
import json, sys
from autotune.probe.worker import Worker
from autotune.core.probe_types import ProbeRequest
from autotune.core.serialization import from_data

worker = Worker("cpu", lambda **message: None)
from torch._dynamo.utils import counters

for data in json.loads(sys.argv[1]):
    result, reusable = worker.serve(from_data(ProbeRequest, data))
    assert reusable, result
    print(json.dumps([counters["stats"]["unique_graphs"], *result.measurement.losses[:2]]))
"""

SHAPES: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 2, "depth": 2},
    {"micro_batch_size": 2, "depth": 4},
    {"micro_batch_size": 3, "depth": 2},
    {"micro_batch_size": 2},
)
FIRST = SHAPES[0]
BUDGETS = ("selective_50", "selective_30", "selective_50", "none")
MIXED: tuple[dict[str, Any], ...] = tuple(
    {"precision": "bf16_mixed", "micro_batch_size": 2, "depth": depth} for depth in (2, None)
)
JOINED: tuple[dict[str, Any], ...] = tuple(one | {"lora_kernels": "joined"} for one in MIXED)
# Each group continues in the worker of those before.
GROUPS: dict[str, list[dict[str, Any]]] = {
    "plain": [one | {"compile": "none"} for one in (*SHAPES, FIRST)],
    "compiled": [*SHAPES, FIRST],
    "plain in 16 bits": [one | {"compile": "none"} for one in MIXED],
    "joined": [*JOINED, JOINED[0]],
    "after joined": [MIXED[0] | {"compile": "none"}, FIRST],
    "budgets": [FIRST | {"checkpointing": value} for value in BUDGETS],
}


def request(
    micro_batch_size: int,
    depth: int | None = None,
    compile: str = "per_layer",
    checkpointing: str = "none",
    precision: str = "fp32",
    lora_kernels: str = "peft",
) -> ProbeRequest:
    return ProbeRequest(
        config=TrainConfig(
            micro_batch_size=micro_batch_size,
            seq_len=32,
            precision=precision,
            checkpointing=checkpointing,
            lora_kernels=lora_kernels,
            lora_rank=8,
            compile=compile,
        ),
        model=TINY_LLAMA,
        device="cpu",
        memory_gib=4.0,
        micro_steps=1,
        min_timed_micros=1,
        min_timed_s=0.0,
        depth=depth,
    )


@pytest.fixture(scope="module")
def served() -> Served:
    """For each request of a group: how many graphs were compiled until then, and the losses of the
    first two steps. One worker serves all of them.
    """
    asked = [to_data(request(**one)) for group in GROUPS.values() for one in group]
    command = [sys.executable, "-c", SERVE, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reported = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(reported) == len(asked) and all(len(one) == 3 for one in reported)
    rows = iter((graphs, losses) for graphs, *losses in reported)
    return {name: list(itertools.islice(rows, len(group))) for name, group in GROUPS.items()}


def graphs(rows: Rows) -> list[int]:
    return [compiled for compiled, _ in rows]


def test_layers_are_compiled_once_for_all_depths_and_for_whoever_comes_back(served: Served) -> None:
    """The first layer is no other than the rest, and another micro batch leaves the code of the one
    before alone.
    """
    assert graphs(served["plain"]) == [0] * 5 and graphs(served["compiled"]) == [1, 1, 2, 2, 2]
    for (_, found), (_, expected) in zip(served["compiled"], served["plain"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


def test_joined_adapters_have_code_of_their_own_for_all_depths_and_leave_nothing_behind(
    served: Served,
) -> None:
    assert graphs(served["joined"]) == [3, 3, 3] and graphs(served["after joined"]) == [3, 3]
    plain = [losses for _, losses in served["plain in 16 bits"]]
    of_joined = [losses for _, losses in served["joined"]]
    for found, expected in zip(of_joined, [*plain, plain[0]], strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
    assert of_joined[2] == pytest.approx(of_joined[0])
    after = [losses for _, losses in served["after joined"]]
    assert after[0] == pytest.approx(plain[0])
    assert after[1] == pytest.approx(served["compiled"][0][1])


def test_each_budget_of_activations_has_code_of_its_own_and_trains_the_same(served: Served) -> None:
    assert graphs(served["budgets"]) == [4, 5, 5, 5]
    for _, losses in served["budgets"]:
        assert losses == pytest.approx(served["compiled"][0][1], rel=1e-5)


COUNT = """
import json, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from autotune.trainer.lean_trainer import compile_layers
from autotune.trainer.model_builder import decoder_layers, require_input_gradients

torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(num_hidden_layers=1, vocab_size=100, use_cache=False, **shape, **heads)
base = LlamaForCausalLM(config)
model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
for parameter in adapters:
    torch.nn.init.normal_(parameter, std=0.1)
require_input_gradients(base)
tokens = torch.randint(0, 100, (2, 32))
for budget in (None, 1.0, 0.5, 0.3):
    if budget is not None:
        compile_layers(decoder_layers(model), budget)
    kept = []
    def keep(tensor):
        kept.append(tensor)
        return tensor
    for _ in range(2):  # compiled in the first
        model.zero_grad()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    size = sum(size for address, size in storages.items() if address not in weights)
    gradients = [value for parameter in adapters for value in parameter.grad.flatten().tolist()]
    print(json.dumps([size, float(loss), *gradients]))
"""


def test_a_smaller_budget_keeps_less_and_gradients_stay_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    sizes = [size for size, *_ in rows]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    for _, *values in rows[1:]:
        assert values == pytest.approx(rows[0][1:], rel=1e-4, abs=1e-6)
