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

TINY_LLAMA = TINY | {"model_type": "llama", "num_hidden_layers": 8}
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


def request(compile: str, micro_batch_size: int = 2, depth: int | None = None) -> ProbeRequest:
    return ProbeRequest(
        config=TrainConfig(
            micro_batch_size=micro_batch_size,
            seq_len=32,
            precision="fp32",
            checkpointing="none",
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
    """By request: how many graphs were compiled until then, and the losses of the first three steps."""
    asked = json.dumps([to_data(one) for one in requests])
    done = subprocess.run([sys.executable, "-c", SERVE, asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reported = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [(graphs, losses) for graphs, *losses in reported]


def test_layers_are_compiled_once_for_all_depths_and_for_whoever_comes_back() -> None:
    """The first layer is no other than the rest, and another micro batch leaves the code of the one before alone."""
    asked = [(2, 2), (2, 4), (3, 2), (2, None), (2, 2)]
    served = serve(*(request(compile, *one) for compile in ("none", "per_layer") for one in asked))
    plain, compiled = served[: len(asked)], served[len(asked) :]
    assert [graphs for graphs, _ in plain] == [0] * len(asked)
    assert [graphs for graphs, _ in compiled] == [1, 1, 2, 2, 2]
    for (_, found), (_, expected) in zip(compiled, plain, strict=True):
        steps = min(len(found), len(expected))  # how many a probe takes hangs on their time
        assert steps >= 2 and found[:steps] == pytest.approx(expected[:steps], rel=1e-4)
