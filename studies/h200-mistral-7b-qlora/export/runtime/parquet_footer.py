# -*- coding: utf-8 -*-
"""Reads a Parquet file's footer, which is written in Thrift's compact protocol."""

import os
from pathlib import Path
from typing import Any

MAGIC = b"PAR1"
VALUE_BYTES = 8  # bytes of memory that a number or a missing value takes
ROW_BYTES = 64  # the fewest bytes of memory that a row takes
# The ids of the fields in the format's definition, parquet.thrift
ROW_GROUPS = 4  # a field of the file's metadata
COLUMNS, NUM_ROWS = 1, 3  # fields of a row group
META_DATA = 3  # a field of a column
NUM_VALUES, UNCOMPRESSED_BYTES = 5, 6  # fields of a column's metadata


def least_bytes(path: Path) -> int:
    """Return a lower bound of the memory of all rows of a file, computed from the file's footer.

    Raises ValueError for a damaged footer.
    """
    try:
        groups = read_footer(path).get(ROW_GROUPS, [])
        return sum(map(_group_bytes, groups))
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("its footer is damaged") from None


def _group_bytes(group: dict[int, Any]) -> int:
    columns = [column[META_DATA] for column in group[COLUMNS]]
    sizes = [max(one[UNCOMPRESSED_BYTES], VALUE_BYTES * one[NUM_VALUES]) for one in columns]
    return int(ROW_BYTES * group[NUM_ROWS] + sum(sizes))


def read_footer(path: Path) -> dict[int, Any]:
    """Return the file's metadata. Raises ValueError for an incomplete file.

    The last 8 bytes of the file, after the metadata, are the metadata's size and a constant.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) - 8
        file.seek(max(end, 0))
        size, magic = int.from_bytes(file.read(4), "little"), file.read(4)
        if magic != MAGIC or size > end:
            raise ValueError("it is not a complete Parquet file")
        file.seek(end - size)
        return Thrift(file.read(size)).struct()


class Thrift:
    """Reads a struct of Thrift as a dict from the ids of its fields to their values.

    `place` is the place of the byte after what was read.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def struct(self) -> dict[int, Any]:
        """Read the fields up to the end of a struct."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2, 3):  # booleans in a list, and single bytes
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind in (7, 8):
            return self._bytes(8 if kind == 7 else self._varint())
        if kind in (9, 10):
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15) for _ in range(size)]
        if kind == 11:
            size = self._varint()
            kinds = self._byte() if size else 0
            return [(self._value(kinds >> 4), self._value(kinds & 15)) for _ in range(size)]
        if kind == 12:
            return self.struct()
        raise IndexError(kind)

    def _byte(self) -> int:
        self.place += 1
        return self._data[self.place - 1]

    def _bytes(self, size: int) -> bytes:
        found = self._data[self.place : self.place + size]
        self.place += size
        return found

    def _varint(self) -> int:
        number, shift = 0, 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def _integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)
