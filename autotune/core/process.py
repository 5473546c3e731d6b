"""Ends processes together with the process that started them, or when the user asks to stop."""

import ctypes
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.core.errors import Cancelled, StorageError

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, *, number: int | None = None) -> None:
    """Make Linux send the signal `number`, by default SIGKILL, when this process's parent dies.

    If `parent`, the parent's process id, is given and the parent is already dead, this process
    exits.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if number is None else number)
    if parent is not None and os.getppid() != parent:
        sys.exit("the parent process is dead")


def take_group_along(*handles: int, scratch: str) -> None:
    """Fork a watchdog that kills this process group when this process dies.

    The watchdog also removes the directory `scratch`. Without the watchdog, this directory, and the
    loaders and compilers that a worker starts, would stay after a worker is killed. The watchdog
    closes its copies of the file descriptors `handles`.
    """
    worker = os.getpid()
    if os.fork():
        return
    # From here on, only the watchdog process runs.
    for handle in (0, *handles):
        os.close(handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
    die_with_parent(number=signal.SIGUSR2)

    if os.getppid() == worker:  # otherwise the worker died before `die_with_parent` took effect
        signal.sigwait((signal.SIGUSR2,))
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(worker, signal.SIGKILL)  # this kills the watchdog too


def seconds_since_start() -> float:
    """Return the seconds since this process started.

    psutil's `create_time` adds the time of the boot, which Linux rounds to whole seconds.
    """
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2]
    started_s = int(after_name.split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def module_command(module: str) -> list[str]:
    """Return the command line that runs a module of this package.

    By default, Python looks for every module in the working directory first, which may hold another
    user's files. The option `-P` skips the working directory. `-P` is omitted only if the package
    itself is in the working directory.
    """
    safe = [] if Path.cwd() == Path(__file__).parents[2] else ["-P"]
    return [sys.executable, *safe, "-m", module]


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection while large libraries are imported inside the block.

    The libraries create a million objects, and garbage collections would take a fifth of the import
    time. Collections after the block, including the last one of the process, skip the objects that
    were made inside the block.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class StopToken:
    """The user's request to stop.

    Long operations call the token between their steps; any thread may request a stop.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self.signal is not None

    def request(self, number: int = signal.SIGINT) -> None:
        """Request a stop because of signal `number`, which determines the exit code."""
        self.signal = number

    @contextmanager
    def suppress_cancelled(self) -> Iterator[None]:
        """Suppress Cancelled inside the block, and StorageError too if a stop was requested.

        The caller must report the interruption.
        """
        try:
            yield
        except Cancelled:
            pass
        except StorageError:
            if self.signal is None:
                raise
