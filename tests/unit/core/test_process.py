"""A stop is requested once, and ends what it interrupts without an error.

Processes load no foreign modules.
"""

import gc
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autotune
from autotune.core import process
from autotune.core.errors import Cancelled, StorageError
from autotune.core.process import StopToken, module_command, pause_garbage_collection


def test_a_stop_is_seen_after_it_was_requested() -> None:
    token = StopToken()
    assert not token() and token.signal is None
    token.request()
    assert token() and token.signal == signal.SIGINT
    token.request(signal.SIGTERM)
    assert token.signal == signal.SIGTERM


def test_what_a_stop_interrupts_ends_quietly() -> None:
    token = StopToken()
    with token.suppress_cancelled():
        raise Cancelled
    token.request()
    with token.suppress_cancelled():
        raise StorageError("the database went first", remedy="none")


@pytest.mark.parametrize(
    ("requested", "error"), [(False, StorageError), (False, ValueError), (True, ValueError)]
)
def test_errors_that_no_stop_explains_are_raised(requested: bool, error: type[Exception]) -> None:
    token = StopToken()
    if requested:
        token.request()
    with pytest.raises(error), token.suppress_cancelled():
        raise error("for another reason")


def test_no_module_is_loaded_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("typer", "typing_extensions", "yaml"):
        (tmp_path / f"{name}.py").write_text("open('was_here', 'w')\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(autotune.__file__).parents[1]))
    ran = subprocess.run(
        [*module_command("autotune"), "gpus", "--json"], capture_output=True, check=True
    )
    assert ran.stdout and not (tmp_path / "was_here").exists()


GROUP = """
import os, sys
from autotune.core.process import take_group_along
os.setpgid(0, 0)
take_group_along(scratch=sys.argv[1])
print("alive", flush=True)
if os.fork() == 0:
    sys.stdin.read()  # a process of its own, which ends with it alone
    print("outlived", flush=True)
    os._exit(0)
os._exit(0)
"""


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", GROUP, str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "alive\n"  # ends when all that might still write are dead
    assert not scratch.exists()


def test_the_package_may_be_in_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(autotune.__file__).parents[1])
    assert module_command("autotune") == [sys.executable, "-m", "autotune"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of Linux, in the place of which it is only noted."""
    calls: list[Any] = []
    prctl = SimpleNamespace(prctl=lambda *values: calls.append(("prctl", *values)))
    monkeypatch.setattr(process, "ctypes", SimpleNamespace(CDLL=lambda name: prctl))
    linux = SimpleNamespace(
        close=lambda handle: calls.append(("close", handle)),
        killpg=lambda group, number: calls.append(("killpg", group, number)),
        getpid=lambda: 41,
        getppid=lambda: 41,
        fork=lambda: 0,
    )
    monkeypatch.setattr(process, "os", linux)
    monkeypatch.setattr(
        process.signal, "pthread_sigmask", lambda how, numbers: calls.append(("mask", how, numbers))
    )
    monkeypatch.setattr(process.signal, "sigwait", lambda numbers: calls.append(("wait", numbers)))
    return calls


def test_linux_is_asked_to_end_a_process_with_its_parent(said: list[Any]) -> None:
    process.die_with_parent()
    process.die_with_parent(41, number=signal.SIGUSR2)
    assert said == [("prctl", 1, signal.SIGKILL), ("prctl", 1, signal.SIGUSR2)]
    with pytest.raises(SystemExit, match="the parent process is dead"):
        process.die_with_parent(40)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("alive", [True, False])
def test_a_watchdog_waits_for_the_end_of_its_worker_and_removes_what_is_left(
    said: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: bool, there: bool
) -> None:
    """The scratch directory may be gone already, and the worker may be dead before the watchdog
    begins.
    """
    scratch = tmp_path / "scratch"
    if there:
        (scratch / "below").mkdir(parents=True)
    monkeypatch.setattr(process.os, "getppid", lambda: 41 if alive else 1)
    process.take_group_along(7, 8, scratch=str(scratch))
    assert said == [
        *(("close", handle) for handle in (0, 7, 8)),
        ("mask", signal.SIG_BLOCK, (signal.SIGUSR2,)),
        ("prctl", 1, signal.SIGUSR2),
        *[("wait", (signal.SIGUSR2,))] * alive,
        ("killpg", 41, signal.SIGKILL),
    ]
    assert not scratch.exists()


def test_a_worker_goes_on_after_its_watchdog_began(
    said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.os, "fork", lambda: 42)
    process.take_group_along(7, scratch="/nowhere")
    assert said == []


@pytest.mark.parametrize("raised", [None, ImportError])
def test_what_was_loaded_is_not_collected_again(raised: type[Exception] | None) -> None:
    """Also where a library could not be imported."""
    frozen = gc.get_freeze_count()
    try:
        with nullcontext() if raised is None else pytest.raises(raised), pause_garbage_collection():
            during = gc.isenabled()
            if raised is not None:
                raise raised
        assert not during and gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_the_age_of_a_process_has_no_error_of_whole_seconds() -> None:
    code = "from autotune.core.process import seconds_since_start as age; print(age())"
    began = time.monotonic()
    command = [sys.executable, "-c", code]
    age = float(subprocess.run(command, capture_output=True, check=True).stdout)
    assert 0 < age < time.monotonic() - began + 0.02  # a clock tick
