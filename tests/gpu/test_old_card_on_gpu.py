"""A card that is said to be of compute capability 7.5, as a T4 is, is probed in fp16, with nothing
of later cards.

What such a card lacks is refused here: a tensor of bf16, FlashAttention, and cuDNN's attention. The
probes run in a process of their own, since libraries ask for the capability when they are loaded.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.core.nvml import list_gpus

pytestmark = pytest.mark.skipif(not list_gpus(), reason="needs an NVIDIA GPU")

PROBES = """
import json, sys
import torch
torch.cuda.get_device_capability = lambda device=None: (7, 5)
torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tests.gpu.test_probe_on_gpu import request
from dataclasses import replace
from autotune.probe.worker import Worker

LACKING = ("flash_attention", "cudnn_attention")

class OldCard(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in LACKING):
            raise RuntimeError(f"this card has no {func}")
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is torch.bfloat16:
                raise RuntimeError(f"this card has no bf16: {func}")
        return found

answers = []
with OldCard():
    worker = Worker("cuda", lambda **message: None)
    for knobs in json.loads(sys.argv[1]):
        flash = knobs.pop("flash", False)
        result, _ = worker.serve(replace(request(14.6, **knobs), flash=flash))
        answers.append([result.outcome.value, result.reason])
print(json.dumps(answers))
"""


def outcomes(*probes: dict[str, Any]) -> list[tuple[str, str | None]]:
    command = [sys.executable, "-c", PROBES, json.dumps(probes)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(answer) for answer in json.loads(done.stdout.splitlines()[-1])]


def test_the_fp16_path_trains_where_there_is_no_bf16_and_no_flash_attention() -> None:
    fp16 = {"precision": "fp16_mixed"}
    probes = [
        fp16,
        fp16 | {"method": "full"},
        fp16 | {"quantization": "nf4", "checkpointing": "full"},
        fp16 | {"padding": "masked", "loss": "chunked"},
        fp16 | {"attention": "eager"},
    ]
    assert [outcome for outcome, _ in outcomes(*probes)] == ["ok"] * len(probes)


def test_what_such_a_card_lacks_would_be_seen() -> None:
    (bf16, reason), (flash, named) = outcomes(
        {"precision": "bf16_mixed"}, {"precision": "fp16_mixed", "flash": True}
    )
    assert (bf16, flash) == ("crash", "crash")
    assert "no bf16" in (reason or "") and "attention" in (named or "")
