"""A real process compiles ahead: the worker finds the code, and whatever becomes of the process,
probes go on.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult
from autotune.probe.compile_ahead import CompileAhead
from autotune.probe.supervisor import WorkerProber
from tests.helpers.factories import TINY
from tests.helpers.fork_server import OWN_CODE
from tests.helpers.probing import alive, members, request, until

pytestmark = [
    pytest.mark.probe,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

MODEL = TINY | {"model_type": "llama", "num_hidden_layers": 4}


def asked(micro_batch_size: int, compile: str = "per_layer", depth: int | None = 2) -> ProbeRequest:
    knobs = {
        "micro_batch_size": micro_batch_size,
        "seq_len": 32,
        "lora_rank": 8,
        "lora_targets": "q_v",  # each kernel more takes g++ a second
        "compile": compile,
    }
    return replace(request(model=MODEL, **knobs), depth=depth)


@pytest.fixture
def prober(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProber]:
    """A worker with a process beside it that compiles ahead, and empty caches on disk."""
    monkeypatch.setenv(OWN_CODE, "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with WorkerProber("cpu", tmp_path / "logs") as prober:
        assert prober.fingerprint
        prober.ahead = CompileAhead("cpu", prober.logs, 1, 2)
        yield prober
        prober.ahead.close()
        assert not prober.ahead.is_running


def probed(prober: WorkerProber, wanted: ProbeRequest) -> ProbeResult:
    result = prober.probe(wanted, prober.logs / "probe.log")
    assert result.outcome is Outcome.OK, result.reason
    return result


@pytest.mark.timeout(900)
def test_what_was_compiled_ahead_is_there_for_the_probe(prober: WorkerProber) -> None:
    assert prober.ahead is not None
    # Both have the same code, which takes g++ long to compile.
    prober.ahead.compile_next({"two layers": asked(3), "all layers": asked(3, depth=None)})
    deadline = time.monotonic() + 600
    while "all layers" not in prober.ahead.compile_seconds():
        assert alive(pid(prober)) and time.monotonic() < deadline, (
            prober.logs / "ahead-0.log"
        ).read_text()
        time.sleep(0.1)
    cold = prober.ahead.compile_seconds()
    assert cold.keys() == prober.ahead.claimed_keys() == {"two layers", "all layers"}
    warm = probed(prober, asked(3)).seconds
    assert warm["compile"] < cold["two layers"] / 2
    assert probed(prober, asked(4, "none")).seconds.keys().isdisjoint({"compile"})


@pytest.mark.timeout(900)
def test_probes_go_on_whatever_becomes_of_the_process(prober: WorkerProber) -> None:
    assert prober.ahead is not None
    prober.ahead.compile_next({"two": asked(2)})
    until(lambda: bool(prober.ahead.claimed_keys()), "a claim")
    first = pid(prober)
    os.kill(first, signal.SIGKILL)
    until(lambda: not alive(first), "its end")
    probed(prober, asked(2, "none"))
    prober.ahead.compile_next(
        {"two": asked(2)}
    )  # which starts another, and nobody has claimed it any more
    second = pid(prober)
    assert second != first and not members(first)
    until(lambda: bool(prober.ahead.claimed_keys()), "a claim")
    prober.ahead.make_room()
    assert not prober.ahead.is_running and not prober.ahead.claimed_keys()
    until(lambda: not members(second), "the end of its compilers, which were killed too")
    probed(prober, asked(2, "none"))


def pid(prober: WorkerProber) -> int:
    assert prober.ahead is not None
    return prober.ahead._processes[0].pid
