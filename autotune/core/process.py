"""Ending processes together with the process that started them, by the means of Linux."""

import ctypes
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.core.errors import Cancelled, StorageError

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, *, number: int = signal.SIGKILL) -> None:
    """Have Linux send this process signal `number` when its parent dies; exit if the pid `parent` is dead already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        sys.exit("the parent process is dead")


def take_group_along(*handles: int, scratch: str) -> None:
    """Fork a watchdog that kills this process group when this process dies, for example when its parent was killed.

    Without it, the processes that a worker starts (loaders, compilers) and its directory for files, `scratch`, would
    outlive a worker whose parent is dead. The watchdog closes its copies of the file descriptors `handles`.
    """
    worker = os.getpid()
    if os.fork():
        return
    for handle in (0, *handles):
        os.close(handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
    die_with_parent(number=signal.SIGUSR2)
    if os.getppid() == worker:  # else the worker is dead already
        signal.sigwait((signal.SIGUSR2,))
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(worker, signal.SIGKILL)  # this process as well


def module_command(module: str) -> list[str]:
    """The command that runs a module of this package.

    By itself Python takes every module from the working directory first, where files may be anybody's. `-P` forbids
    that; it is left out only where the package itself is in the working directory.
    """
    safe = [] if Path.cwd() == Path(__file__).parents[2] else ["-P"]
    return [sys.executable, *safe, "-m", module]


@contextmanager
def loading() -> Iterator[None]:
    """Import large libraries inside: collections among their million objects take a fifth of the time.

    Later collections, and that at the end of the process, leave out what was made inside.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class StopToken:
    """Whether the user asked to stop. Long operations call it between their steps; any thread may request a stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self.signal is not None

    def request(self, number: int = signal.SIGINT) -> None:
        """Ask to stop; `number` is the signal that said so, from which the exit code follows."""
        self.signal = number

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Swallow Cancelled, and StorageError if a stop was requested; the caller reports the interruption."""
        try:
            yield
        except Cancelled:
            pass
        except StorageError:
            if self.signal is None:
                raise
