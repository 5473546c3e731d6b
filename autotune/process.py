"""What Linux does for a process at its parent's end."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, *, number: int = signal.SIGKILL) -> None:
    """Linux sends this process a signal when its parent dies, however it dies; who has lost it already ends here."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        sys.exit("the parent is gone")
