# -*- coding: utf-8 -*-
"""Reads the rows of Parquet and Arrow files with pyarrow, in small parts, up to a memory limit.

pyarrow trusts the offsets in an Arrow file, so a corrupt file would crash the process if it were
not validated. A few hundred bytes of Parquet may expand to gigabytes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .parquet_footer import ROW_BYTES, VALUE_BYTES, least_bytes

PART_ROWS = 64  # rows to convert to Python at once; 1,000 rows at once are not faster
READ_BYTES = 2**20  # bytes of a column to read at once
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
    """Yield the rows of a Parquet file. Raises TableError, and ImportError without pyarrow."""
    pyarrow = _import_pyarrow(path)
    with _table_errors(pyarrow):
        Growth(path).add(least_bytes(path))
        with pyarrow.parquet.ParquetFile(path, buffer_size=READ_BYTES) as file:
            yield from _rows(file.iter_batches(PART_ROWS), Growth(path))


def read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow file. Raises TableError, and ImportError without pyarrow."""
    pyarrow = _import_pyarrow(path)
    with _table_errors(pyarrow), pyarrow.memory_map(str(path)) as source:
        try:
            batches = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:  # this file has Arrow's file format, not its stream format
            file = pyarrow.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        yield from _rows(batches, Growth(path))


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
    if isinstance(value, list):
        return VALUE_BYTES + sum(map(size_of, value))
    return VALUE_BYTES


def _rows(batches: Any, growth: Growth) -> Iterator[dict[str, Any]]:
    for batch in batches:
        batch.validate(full=True)  # a corrupt offset would otherwise crash the process
        for start in range(0, batch.num_rows, PART_ROWS):
            for row in batch.slice(start, PART_ROWS).to_pylist():
                growth.add(size_of(row))
                yield row


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(
            f"{path.name} is read with pyarrow: pip install pyarrow, or give JSON lines"
        ) from None
    return pyarrow


@contextmanager
def _table_errors(pyarrow: Any) -> Iterator[None]:
    """Convert errors of pyarrow, and of values that Python cannot represent, to TableError."""
    try:
        yield
    except (TableError, UnicodeError):
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise TableError(reason) from None


READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
