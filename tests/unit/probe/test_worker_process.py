"""A worker gets what it needs of its parent's environment, and no more; it ends with all that it
started.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from autotune.core.errors import Cancelled
from autotune.probe import worker_process
from autotune.probe.monitor import Monitor
from autotune.probe.worker_process import WorkerProcess

# A worker that ends when it is asked to, and whose child does not. Both leave the files of a
# compiler.
OUTLIVED = """
import os, signal, sys, tempfile, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), tempfile.mkstemp()[1], flush=True)
time.sleep(600)
"""


def test_nothing_that_a_worker_started_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        worker_process, "module_command", lambda name: [sys.executable, "-c", OUTLIVED]
    )
    log = tmp_path / "log"
    worker = WorkerProcess("cpu", log)
    while not log.read_text().endswith("\n"):
        assert worker.wait_for_exit(0.05) is None
    pid, file = log.read_text().split()
    child = psutil.Process(int(pid))
    assert Path(file).exists()
    worker.close()
    child.wait(10)  # raises TimeoutExpired
    assert not Path(file).exists()


class Watch(Monitor):
    """A monitor whose phase has expired from so many ticks on."""

    def __init__(self, ticks: float) -> None:
        super().__init__(None)
        self.left = ticks

    def tick(self) -> None:
        self.left -= 1

    def is_expired(self) -> bool:
        return self.left <= 0


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkerProcess, socket.socket]]:
    """A worker process that was never started, and the other end of its channel."""
    monkeypatch.setattr(worker_process, "SAMPLE_EVERY_S", 0.0)
    ours, theirs = socket.socketpair()
    made = WorkerProcess.__new__(WorkerProcess)
    made._channel, made._buffer = ours, b""
    with ours, theirs:
        yield made, theirs


def never() -> bool:
    return False


def test_messages_are_lines_however_they_arrive(
    channel: tuple[WorkerProcess, socket.socket],
) -> None:
    made, theirs = channel
    theirs.sendall(b'{"event": "phase"}\n{"event": "ready"}\n{"ev')
    assert made.receive(Watch(1), never) == {"event": "phase"}
    assert made.receive(Watch(0), never) == {"event": "ready"}  # it is here already
    theirs.sendall(b'ent": "result"}\n')
    assert made.receive(Watch(1), never) == {"event": "result"}
    made.send({"rates": True, "name": "ü"})
    assert json.loads(theirs.recv(100)) == {"rates": True, "name": "ü"}


def test_what_has_arrived_is_never_late(channel: tuple[WorkerProcess, socket.socket]) -> None:
    made, theirs = channel
    theirs.sendall(b'{"event": "' + b"x" * (1 << 16) + b'"}\n')  # it is read in two parts
    found = made.receive(Watch(1), never)
    assert found is not None and len(found["event"]) == 1 << 16


def test_who_waits_watches_the_phase_and_may_be_stopped(
    channel: tuple[WorkerProcess, socket.socket],
) -> None:
    made, theirs = channel
    watch = Watch(3)
    assert made.receive(watch, never) is None and watch.left == 0
    with pytest.raises(Cancelled):
        made.receive(Watch(3), lambda: True)
    theirs.close()
    with pytest.raises(EOFError):
        made.receive(Watch(3), never)


class Process:
    """A process that ends when it gets this signal."""

    pid = 41

    def __init__(self, ends_at: int, said: list[Any]) -> None:
        self.ends_at = ends_at
        self.said = said
        self.ended = False

    def send_signal(self, number: int) -> None:
        self.said.append(number)

    def wait(self, timeout: float | None = None) -> int:
        self.said.append(("wait", timeout))
        if not self.ended:
            assert timeout is not None
            raise subprocess.TimeoutExpired("worker", timeout)
        return -self.ends_at


@pytest.mark.parametrize("ends_at", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_is_asked_to_end_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, ends_at: int
) -> None:
    """So is what it started: the signals go to its group, and the last one after its end."""
    said: list[Any] = []
    made = WorkerProcess.__new__(WorkerProcess)
    process = Process(ends_at, said)
    made._process = process  # type: ignore[assignment]
    made._killed = False
    made._channel = SimpleNamespace(close=lambda: said.append("closed"))  # type: ignore[assignment]
    made._scratch = SimpleNamespace(close=lambda: said.append("removed"))  # type: ignore[assignment]

    def killpg(group: int, number: int) -> None:
        said.append((group, number))
        process.ended |= number == ends_at

    monkeypatch.setattr(worker_process.os, "killpg", killpg)
    made.close()
    end = [(41, signal.SIGKILL), ("wait", None), "removed"]
    assert said == ["closed", (41, signal.SIGTERM), ("wait", 3.0), *end]
    said.clear()
    made.kill()
    made.close()
    assert said == [(41, signal.SIGKILL), "closed", *end]
    said.clear()
    made.dump_stacks()
    assert said == [signal.SIGUSR1] and made.pid == 41 and made.wait_for_exit(0.5) == -ends_at
    process.ended = False
    assert made.wait_for_exit(0.5) is None


def test_a_group_that_is_gone_needs_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(group: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(worker_process.os, "killpg", gone)
    made = WorkerProcess.__new__(WorkerProcess)
    made._process = Process(9, [])  # type: ignore[assignment]
    made._signal_group(signal.SIGTERM)


def test_a_worker_is_started_in_a_session_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the number of its channel, its device, our pid and its scratch directory; its output
    follows the log's.
    """
    started: list[Any] = []
    monkeypatch.setattr(
        worker_process.subprocess, "Popen", lambda *asked, **how: started.append((asked, how))
    )
    monkeypatch.setenv("LC_TEST", "x")
    (tmp_path / "log").write_text("before\n")
    made = WorkerProcess("cpu", tmp_path / "log")
    ((command,), how) = started[0]
    handle, device, parent, scratch = command[-4:]
    assert command[-6:-4] == ["-m", "autotune.probe.worker"] and (device, parent) == (
        "cpu",
        str(os.getpid()),
    )
    assert (
        how["pass_fds"] == [int(handle)]
        and how["start_new_session"]
        and how["stdin"] == subprocess.DEVNULL
    )
    assert how["env"]["LC_TEST"] == "x" and "GOMP_SPINCOUNT" in how["env"]
    assert how["stdout"] is how["stderr"] and (how["stdout"].name, how["stdout"].mode) == (
        str(tmp_path / "log"),
        "ab",
    )
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(int(handle))  # only the worker has that end
    assert Path(scratch).is_dir() and made._buffer == b""
    made._scratch.close()
    made._channel.close()
    assert not Path(scratch).exists()


def test_how_often_a_worker_is_sampled_and_how_long_its_end_may_take() -> None:
    assert (worker_process.SAMPLE_EVERY_S, worker_process.END_WITHIN_S) == (0.1, 3.0)
