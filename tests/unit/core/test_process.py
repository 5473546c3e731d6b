"""A stop is requested once, and ends what it interrupts without an error. Processes load no foreign modules."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import autotune
from autotune.core.errors import Cancelled, StorageError
from autotune.core.process import StopToken, module_command


def test_a_stop_is_seen_after_it_was_requested() -> None:
    token = StopToken()
    assert not token() and token.signal is None
    token.request()
    assert token() and token.signal == signal.SIGINT
    token.request(signal.SIGTERM)
    assert token.signal == signal.SIGTERM


def test_what_a_stop_interrupts_ends_quietly() -> None:
    token = StopToken()
    with token.ending():
        raise Cancelled
    token.request()
    with token.ending():
        raise StorageError("the database went first", remedy="none")


@pytest.mark.parametrize(("requested", "error"), [(False, StorageError), (False, ValueError), (True, ValueError)])
def test_errors_that_no_stop_explains_are_raised(requested: bool, error: type[Exception]) -> None:
    token = StopToken()
    if requested:
        token.request()
    with pytest.raises(error), token.ending():
        raise error("for another reason")


def test_no_module_is_loaded_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("typer", "typing_extensions", "yaml"):
        (tmp_path / f"{name}.py").write_text("open('was_here', 'w')\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(autotune.__file__).parents[1]))
    ran = subprocess.run([*module_command("autotune"), "gpus", "--json"], capture_output=True, check=True)
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
        [sys.executable, "-c", GROUP, str(scratch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "alive\n"  # ends when all that might still write are dead
    assert not scratch.exists()


def test_the_package_may_be_in_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(autotune.__file__).parents[1])
    assert module_command("autotune") == [sys.executable, "-m", "autotune"]
