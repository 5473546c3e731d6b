"""A file of rows that are not in the database yet.

A row waits here while the database is unreachable, or while its probe is repeated. Each row is one
line of the file. The file is removed once the database contains its rows.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autotune.core.files import sync_directory, write_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """One file of waiting rows, as lines of JSON. Several processes may share it."""

    path: Path

    def is_empty(self) -> bool:
        """Whether the file is missing or empty."""
        return not (self.path.is_file() and self.path.stat().st_size)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, which is on disk when this method returns. Raises StorageError."""
        with self._locked() as file:
            # If a process is killed while it writes, half a line stays in the file. The leading
            # newline separates this row from such a half line.
            file.write("\n" + json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
            sync_directory(self.path.parent)  # so that a new file survives a power failure

    def remove(self, row: dict[str, Any]) -> None:
        """Remove a waiting row; other rows keep waiting. Raises StorageError."""
        with self._locked() as file:
            file.seek(0)
            others = [line for line in file if line.strip() != json.dumps(row)]
            file.truncate(0)
            if any(map(str.strip, others)):
                file.writelines(others)
                file.flush()

    @contextmanager
    def drain(self) -> Iterator[list[dict[str, Any]]]:
        """Yield all waiting rows, and delete them if the `with` block ends without an error.

        Raises StorageError.
        """
        with self._locked() as file:
            file.seek(0)
            rows = []
            for line in file:
                with suppress(ValueError):
                    rows.append(json.loads(line))
            yield rows
            file.truncate(0)

    @contextmanager
    def _locked(self) -> Iterator[IO[str]]:
        """Open and lock the file, and remove it at the end if it is empty."""
        with write_errors(self.path), self._open() as file:
            try:
                yield file
            finally:
                if not os.fstat(file.fileno()).st_size:
                    self.path.unlink()

    def _open(self) -> IO[str]:
        while True:
            file = self.path.open("a+", encoding="utf-8")
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    return file
            file.close()  # another process removed the file before the lock was acquired
