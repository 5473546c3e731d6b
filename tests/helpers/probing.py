"""Probes of a tiny model on this machine's processor, and the processes that do them."""

import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from autotune.core.probe_types import ProbeRequest, Rung
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
}
# A process's memory wanders by 2 or 3 MiB, whatever its peak: 1 % can be told from that only on some 400 MiB. They are
# soonest reached by a model that keeps much of each token and computes little with it.
WIDE = MODEL | {"hidden_size": 32, "intermediate_size": 1024}
LARGE: dict[str, Any] = {"model": WIDE, "micro_batch_size": 32, "seq_len": 256}


def request(memory_gib: float = 4.0, *, rung: Rung = Rung.FULL, model: dict[str, Any] = MODEL, **knobs: Any) -> Any:
    """Three short steps, the last of them timed."""
    small = {"micro_batch_size": 4, "seq_len": 64, "precision": "fp32", "checkpointing": "none"}
    return ProbeRequest(
        config=TrainConfig(**(small | knobs)),
        model=model,
        device="cpu",
        memory_gib=memory_gib,
        micro_steps=1,
        min_timed_micros=1,
        min_timed_s=0.0,
        rung=rung,
    )


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group and alive(pid):
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited a minute for {what}"
        time.sleep(0.02)


def pid_of(prober: WorkerProber) -> int:
    assert prober._process is not None
    return prober._process.pid
