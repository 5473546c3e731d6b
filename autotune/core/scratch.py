"""Directories for temporary files, which the next process removes where the process that used one was killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "autotune-scratch-"


@contextmanager
def scratch_directory() -> Iterator[str]:
    """A new directory, removed at the end, and by the next caller if this process is killed.

    A shared lock shows that a process uses the directory: whoever gets the lock alone may remove it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{NAME}*"):
        with suppress(OSError), _opened(left) as handle:  # which is in use, or somebody else's
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    new = tempfile.mkdtemp(prefix="autotune-new-")
    with _opened(new) as handle:
        with suppress(OSError):  # a file system without locks, on which nothing is removed
            fcntl.flock(handle, fcntl.LOCK_SH)
        path = new.replace("autotune-new-", NAME)
        os.rename(new, path)  # only now, as it could be removed before it was locked
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _opened(path: str | Path) -> Iterator[int]:
    """The descriptor of a directory. Raises OSError for a link, and for one of another user."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise PermissionError
        yield handle
    finally:
        os.close(handle)
