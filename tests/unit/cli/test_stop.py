"""A terminal that is closed ends no command before its files are written."""

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from autotune.cli.stop import stop_on_signals
from autotune.trainer.terminal import leave_terminal

# It prints after the terminal is closed. A shell and the kernel each send SIGHUP.
COMMAND = """
import os, signal, sys, time
from autotune.cli.stop import stop_on_signals
with stop_on_signals() as stop:
    print("ready", flush=True)
    while not stop():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)
    print("written", flush=True)
    print("written", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write(str(stop.signal))
"""


@pytest.mark.real_processes
def test_a_closed_terminal_stops_a_command_that_still_writes_its_files(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", COMMAND, str(tmp_path / "file")])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert (status, (tmp_path / "file").read_text()) == (0, str(int(signal.SIGHUP)))


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_open_terminal_is_kept(is_closed: bool) -> None:
    """A rank receives SIGTERM, not SIGHUP, if the terminal of its launcher is closed."""
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.write(1, b"ready")
        while is_closed and os.isatty(1):
            time.sleep(0.001)
        leave_terminal(if_closed=True)
        os._exit(10 + (os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev))
    assert b"ready" in os.read(terminal, 100)
    if is_closed:
        os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 10 + is_closed


def test_nohup_stays_and_handlers_return() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal is None
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
