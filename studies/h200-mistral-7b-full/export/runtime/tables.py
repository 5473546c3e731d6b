# -*- coding: utf-8 -*-
"""Reads the rows of Parquet and Arrow files in parts, up to a memory limit.

A few hundred bytes of such a file may expand to gigabytes, so the rows are counted while they are
read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import arrow_batches, parquet_pages
from .parquet_footer import ROW_BYTES, VALUE_BYTES, least_bytes

# All rows of a file may take at most FREE_BYTES in memory, plus GROWTH bytes for each byte of the
# file. If the rows take more, TableError is raised. Valid files grow too: a column that repeats a
# long text in each row grows a hundredfold.
FREE_BYTES = 2**28
GROWTH = 1000


class TableError(ValueError):
    """Raised for a corrupt table, or for a table whose rows take too much memory.

    The message has no file name.
    """


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file.

    Raises TableError, and ImportError without a package that decompresses the file.
    """
    with _table_errors():
        Growth(path).add(least_bytes(path))
        yield from _counted(parquet_pages.read_rows(path), Growth(path))


def read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow file, in the stream format or in the file format.

    Raises TableError, and ImportError without a package that decompresses the file.
    """
    with _table_errors():
        yield from _counted(arrow_batches.read_rows(path, Growth(path).add), Growth(path))


class Growth:
    """Checks that a file's rows do not take much more memory than the size of the file."""

    def __init__(self, path: Path) -> None:
        self._file_bytes = path.stat().st_size
        self._bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count the bytes of further rows. Raises TableError if the rows are too large."""
        self._bytes += num_bytes
        if self._bytes > FREE_BYTES + GROWTH * self._file_bytes:
            raise TableError(
                f"its {self._file_bytes:,} bytes grow to more than {self._bytes / 2**20:,.0f} MiB:"
                " store it as JSON lines if this size is correct"
            )


def size_of(value: Any) -> int:
    """Return roughly how many bytes a value of a row takes in memory."""
    if isinstance(value, str | bytes):
        return VALUE_BYTES + len(value)
    if isinstance(value, dict):
        return ROW_BYTES + sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return VALUE_BYTES + sum(map(size_of, value))
    return VALUE_BYTES


def _counted(rows: Iterator[dict[str, Any]], growth: Growth) -> Iterator[dict[str, Any]]:
    for row in rows:
        growth.add(size_of(row))
        yield row


@contextmanager
def _table_errors() -> Iterator[None]:
    """Convert the errors of damaged files to TableError."""
    try:
        yield
    except (TableError, UnicodeError):
        raise
    except (ValueError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise TableError(reason) from None


READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
