"""The lock of a study's directory, held by the process that runs the study."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.core.errors import UsageError

LOCK = ".lock"  # the name of the lock file in the study's directory


@contextmanager
def locked(directory: Path, study: str) -> Iterator[None]:
    """Hold the lock of a study's directory during the `with` block.

    The lock is also released when the process ends. Raises UsageError if another process holds the
    lock.
    """
    with (directory / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UsageError(
                f"study {study!r} is being run by process {file.read().strip() or '?'}",
                remedy="wait until it ends, or give another name with --study",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def running_process(directory: Path) -> str | None:
    """The id of the process on this host that runs the directory's study, or None."""
    try:
        with (directory / LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read().strip() or "?"
    except OSError:
        pass
    return None
