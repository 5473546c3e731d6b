"""Layers compiled by a real worker: how often, and that they compute what they did before."""

import json
import shutil
import subprocess
import sys

import pytest

from autotune.core.probe_types import ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.probe,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

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
    print(json.dumps([counters["stats"]["unique_graphs"], *result.measurement.losses[:3]]))
"""


def request(
    compile: str,
    micro_batch_size: int = 2,
    depth: int | None = None,
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


def serve(*requests: ProbeRequest) -> list[tuple[int, list[float]]]:
    """By request: how many graphs were compiled until then, and the losses of the first three
    steps.
    """
    asked = json.dumps([to_data(one) for one in requests])
    done = subprocess.run(
        [sys.executable, "-c", SERVE, asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reported = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [(graphs, losses) for graphs, *losses in reported]


def test_layers_are_compiled_once_for_all_depths_and_for_whoever_comes_back() -> None:
    """The first layer is no other than the rest, and another micro batch leaves the code of the one
    before alone.
    """
    asked = [(2, 2), (2, 4), (3, 2), (2, None), (2, 2)]
    served = serve(*(request(compile, *one) for compile in ("none", "per_layer") for one in asked))
    plain, compiled = served[: len(asked)], served[len(asked) :]
    assert [graphs for graphs, _ in plain] == [0] * len(asked)
    assert [graphs for graphs, _ in compiled] == [1, 1, 2, 2, 2]
    for (_, found), (_, expected) in zip(compiled, plain, strict=True):
        steps = min(len(found), len(expected))  # how many a probe takes hangs on their time
        assert steps >= 2 and found[:steps] == pytest.approx(expected[:steps], rel=1e-4)


def test_joined_adapters_have_code_of_their_own_for_all_depths_and_leave_nothing_behind() -> None:
    asked = [
        ("peft", 2),
        ("joined", 2),
        ("joined", None),
        ("peft", None),
        ("peft", 2),
        ("joined", 2),
    ]
    served = serve(
        *(request("per_layer", 2, depth, "none", "bf16_mixed", kernels) for kernels, depth in asked)
    )
    assert [graphs for graphs, _ in served] == [1, 2, 2, 2, 2, 2]
    by_case = dict(zip(asked, (losses[:2] for _, losses in served), strict=True))
    for depth in (2, None):
        assert by_case["joined", depth] == pytest.approx(by_case["peft", depth], rel=1e-3)
    assert served[4][1][:2] == pytest.approx(served[0][1][:2]) and served[5][1][
        :2
    ] == pytest.approx(served[1][1][:2])


def test_each_budget_of_activations_has_code_of_its_own_and_trains_the_same() -> None:
    values = ("none", "selective_50", "selective_30", "selective_50", "none")
    served = serve(*(request("per_layer", depth=2, checkpointing=value) for value in values))
    assert [graphs for graphs, _ in served] == [1, 2, 3, 3, 3]
    for _, losses in served[1:]:
        assert losses[:2] == pytest.approx(served[0][1][:2], rel=1e-5)


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
for budget in (None, 1.0, 0.8, 0.5, 0.3):
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
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 5
    for _, *values in rows[1:]:
        assert values == pytest.approx(rows[0][1:], rel=1e-4, abs=1e-6)
