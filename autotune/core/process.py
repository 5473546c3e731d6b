"""What Linux does for processes at the end of one of them."""

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.core.errors import Cancelled, StorageError

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, *, number: int = signal.SIGKILL) -> None:
    """Linux sends this process a signal when its parent dies, however it dies; who has lost it already ends here."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        sys.exit("the parent is gone")


def take_group_along(*handles: int, scratch: str) -> None:
    """A second process ends this one's group once this one is gone, however it went, and the parent with it.

    What a worker starts (loaders, compilers) would outlive it where nobody is left to end the group, and so would its
    directory for files, `scratch`. The second process closes `handles`, which end with the first.
    """
    worker = os.getpid()
    if os.fork():
        return
    for handle in (0, *handles):
        os.close(handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
    die_with_parent(number=signal.SIGUSR2)
    if os.getppid() == worker:  # or it is gone already
        signal.sigwait((signal.SIGUSR2,))
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(worker, signal.SIGKILL)  # this one as well


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
