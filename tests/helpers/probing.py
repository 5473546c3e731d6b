"""Requests for probes of a tiny model on the CPU, and helpers for the worker's processes."""

import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from autotune.core.probe_types import Measurement, ProbeRequest, Rung
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
# The memory of a process varies by 2 or 3 MiB at any peak, so that a difference of 1 % shows only
# above about 400 MiB. This model reaches that quickly: it stores much for each token and computes
# little.
WIDE = MODEL | {"hidden_size": 32, "intermediate_size": 1024}
LARGE: dict[str, Any] = {"model": WIDE, "micro_batch_size": 32, "seq_len": 256}


def request(
    memory_gib: float = 4.0, *, rung: Rung = Rung.FULL, model: dict[str, Any] = MODEL, **knobs: Any
) -> Any:
    """A request for three short steps, of which the last is timed."""
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


def measured(prober: WorkerProber, asked: ProbeRequest) -> Measurement:
    """What a probe measured, which must have succeeded without notes."""
    result = prober.probe(asked, prober.logs / "probe.log")
    assert result.measurement is not None and result.notes == (), result.reason
    return result.measurement


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def members(group: int) -> list[int]:
    """The running processes of a process group."""
    pids = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group and alive(pid):
                pids.append(pid)
        except ProcessLookupError:
            continue
    return pids


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition is true. Fails after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited a minute for {what}"
        time.sleep(0.02)


def pid_of(prober: WorkerProber) -> int:
    assert prober._process is not None
    return prober._process.pid
