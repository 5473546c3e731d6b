"""Directories for temporary files. If a process is killed, the next one removes its directory."""

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
    """Create a directory, and remove it at the end of the block.

    If this process is killed, the next caller removes the directory. A shared lock shows that a
    process uses the directory; an exclusive lock is the permission to remove it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{NAME}*"):
        # Skips a directory in use, or of another user.
        with suppress(OSError), _open_directory(left) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)

    new = tempfile.mkdtemp(prefix="autotune-new-")
    with _open_directory(new) as handle:
        with suppress(OSError):  # on a file system without locks, leftover directories stay
            fcntl.flock(handle, fcntl.LOCK_SH)

        # Another process could remove the directory if it got its final name before it was locked.
        path = new.replace("autotune-new-", NAME)
        os.rename(new, path)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _open_directory(path: str | Path) -> Iterator[int]:
    """Open a directory. Raises OSError for a link, and for a directory of another user."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise PermissionError
        yield handle
    finally:
        os.close(handle)
