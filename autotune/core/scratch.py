"""Directories for temporary files, which are removed even if their process was killed."""

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

    If this process is killed, a later call, in any process, removes the directory. A process holds
    a shared lock on the directory that it uses. Only a process that gets an exclusive lock may
    remove a directory.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{NAME}*"):
        # A directory that is in use, or belongs to another user, raises OSError and is skipped.
        with suppress(OSError), _open_directory(left) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)

    new = tempfile.mkdtemp(prefix="autotune-new-")
    with _open_directory(new) as handle:
        # A file system without locks raises OSError; leftover directories then stay.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)

        # Other processes remove unlocked directories whose names begin with NAME. So the directory
        # gets such a name only now, after it was locked.
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
