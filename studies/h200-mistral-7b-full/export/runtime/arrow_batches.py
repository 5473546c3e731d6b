# -*- coding: utf-8 -*-
"""Reads the rows of an Arrow file in Python (`parquet_pages` has the reason).

A file is a stream of messages: a schema, dictionaries, and batches of rows. A message has metadata
in the format of FlatBuffers, and a body with the buffers of all columns. A file in Arrow's file
format contains such a stream after its first 8 bytes. Times and decimals stay the integers or the
bytes that the file has. Damaged offsets raise an error, because Python checks each access. The
format is defined in Message.fbs and Schema.fbs of apache/arrow.
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .parquet_footer import ROW_BYTES, VALUE_BYTES
from .unpacking import Unreadable, unpack

MAGIC = b"ARROW1\0\0"  # the first bytes of Arrow's file format
CONTINUES = b"\xff\xff\xff\xff"  # precedes each message
SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # kinds of messages
# Types of columns
NULL, INT, FLOAT, BINARY, UTF8, BOOL, DECIMAL, DATE, TIME, TIMESTAMP = range(1, 11)
LIST, STRUCT, FIXED_BINARY, FIXED_LIST, MAP, DURATION = 12, 13, 15, 16, 17, 18
LARGE_BINARY, LARGE_UTF8, LARGE_LIST = 19, 20, 21
CODECS = {0: "lz4", 1: "zstd"}
INTEGERS = {8: "b", 16: "h", 32: "i", 64: "q"}  # bits, and their letter in the module struct
FLOATS = {0: "e", 1: "f", 2: "d"}

# Called with the bytes that rows will take; raises an error if they are too many
Grow = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of FlatBuffers: fields with numbers, each of which may be missing."""

    data: bytes
    place: int

    def number(self, index: int, letter: str, default: int = 0) -> int:
        """Return an integer field; `letter` is its type in the module struct."""
        place = self._field(index)
        return int(struct.unpack_from(f"<{letter}", self.data, place)[0]) if place else default

    def table(self, index: int) -> "_Table | None":
        place = self._field(index)
        return _Table(self.data, _follow(self.data, place)) if place else None

    def tables(self, index: int) -> "list[_Table]":
        places = self._vector(index, 4)
        return [_Table(self.data, _follow(self.data, place)) for place in places]

    def pairs(self, index: int) -> list[tuple[int, int]]:
        """Return a vector of structs with two integers of 64 bits."""
        places = self._vector(index, 16)
        return [struct.unpack_from("<qq", self.data, place) for place in places]

    def text(self, index: int) -> str:
        place = self._field(index)
        if not place:
            return ""
        start = _follow(self.data, place)
        size = struct.unpack_from("<I", self.data, start)[0]
        return self.data[start + 4 : start + 4 + size].decode()

    def _vector(self, index: int, size: int) -> range:
        """Return the places of a vector's elements, which have `size` bytes each."""
        place = self._field(index)
        if not place:
            return range(0)
        start = _follow(self.data, place)
        count = struct.unpack_from("<I", self.data, start)[0]
        if count * size > len(self.data):
            raise Unreadable("a list in its metadata is longer than the metadata")
        return range(start + 4, start + 4 + count * size, size)

    def _field(self, index: int) -> int:
        """Return the place of a field, or 0 if it is missing."""
        table = self.place - struct.unpack_from("<i", self.data, self.place)[0]
        if table < 0:
            raise IndexError
        size = struct.unpack_from("<H", self.data, table)[0]
        entry = 4 + 2 * index
        if entry + 2 > size:
            return 0
        offset = struct.unpack_from("<H", self.data, table + entry)[0]
        return self.place + offset if offset else 0


def _follow(data: bytes, place: int) -> int:
    return place + int(struct.unpack_from("<I", data, place)[0])


def read_rows(path: Path, grow: Grow) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow file. Raises Unreadable, and ImportError without cramjam.

    `grow` gets the bytes that the rows of a batch take at least, before they are read.
    """
    if not path.stat().st_size:
        raise Unreadable("it is empty")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield from _Reader(data, grow).rows()
    except (KeyError, IndexError, TypeError, struct.error, RecursionError, OverflowError):
        raise Unreadable("it is damaged") from None


class _Reader:
    def __init__(self, data: mmap.mmap, grow: Grow) -> None:
        self._data = data
        self._grow = grow
        self._dictionaries: dict[int, list[Any]] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        fields: list[_Table] = []
        of_dictionaries: dict[int, _Table] = {}
        for message, body in self._messages():
            kind, header = message.number(1, "B"), message.table(2)
            if header is None:
                raise Unreadable("a message has no header")
            if kind == SCHEMA:
                if header.number(0, "h"):
                    raise Unreadable("its bytes are in the order of another machine")
                fields = header.tables(1)
                of_dictionaries = _encoded_fields(fields)
            elif kind == DICTIONARY:
                self._read_dictionary(header, body, of_dictionaries)
            elif kind == BATCH:
                batch = _Batch(header, body, self._dictionaries, self._grow)
                names = [field.text(0) for field in fields]
                columns = [batch.column(field) for field in fields]
                for row in zip(*columns, strict=True):
                    yield dict(zip(names, row, strict=True))

    def _messages(self) -> Iterator[tuple[_Table, bytes]]:
        """Yield each message with its body, up to the end of the stream."""
        place = 8 if self._data[:8] == MAGIC else 0
        while place < len(self._data):
            if self._data[place : place + 4] == CONTINUES:
                place += 4
            size = struct.unpack_from("<i", self._data, place)[0]
            place += 4
            if size == 0:
                return
            metadata = self._data[place : place + size]
            if size < 0 or len(metadata) < size:
                raise Unreadable("it ends within a message")
            message = _Table(metadata, _follow(metadata, 0))
            place += size
            length = message.number(3, "q")
            if not 0 <= length <= len(self._data) - place:
                raise Unreadable("it ends within a message")
            yield message, self._data[place : place + length]
            place += length

    def _read_dictionary(self, header: _Table, body: bytes, fields: dict[int, _Table]) -> None:
        number, data = header.number(0, "q"), header.table(1)
        if data is None:
            raise Unreadable("a dictionary has no values")
        batch = _Batch(data, body, self._dictionaries, self._grow)
        values = batch.column(fields[number], of_dictionary=True)
        known = self._dictionaries.get(number, []) if header.number(2, "B") else []
        self._dictionaries[number] = known + values


def _encoded_fields(fields: Sequence[_Table]) -> dict[int, _Table]:
    """Return the fields whose values are in dictionaries, by the number of the dictionary."""
    found: dict[int, _Table] = {}
    for field in fields:
        if (encoding := field.table(4)) is not None:
            found[encoding.number(0, "q")] = field
        found |= _encoded_fields(field.tables(5))
    return found


class _Batch:
    """The columns of a batch: the metadata lists the lengths and the buffers of all, in order."""

    def __init__(
        self, header: _Table, body: bytes, dictionaries: dict[int, list[Any]], grow: Grow
    ) -> None:
        self._nodes = iter(header.pairs(1))
        self._buffers = iter(header.pairs(2))
        compression = header.table(3)
        self._codec = None if compression is None else CODECS[compression.number(0, "b")]
        self._body = body
        self._dictionaries = dictionaries
        self._grow = grow
        grow(ROW_BYTES * max(header.number(0, "q"), 0))

    def column(self, field: _Table, *, of_dictionary: bool = False) -> list[Any]:
        """Return the values of a column; with `of_dictionary`, those of its dictionary."""
        length, _ = next(self._nodes, (-1, 0))
        if length < 0:
            raise Unreadable("a column has no length")
        self._grow(VALUE_BYTES * length)
        kind, type_ = field.number(2, "B"), field.table(3)
        encoding = None if of_dictionary else field.table(4)
        if kind == NULL and encoding is None:
            return [None] * length

        valid = self._buffer()
        if encoding is not None:
            known = self._dictionaries.get(encoding.number(0, "q"), [])
            indices = self._integers(encoding.table(1), length)
            values: list[Any] = [known[index] if known else None for index in indices]
        else:
            if type_ is None:
                raise Unreadable("a column has no type")
            values = self._values(field, kind, type_, length)
        if valid:
            values = [
                value if valid[index >> 3] >> (index & 7) & 1 else None
                for index, value in enumerate(values)
            ]
        return values

    def _values(self, field: _Table, kind: int, type_: _Table, length: int) -> list[Any]:
        """Return the values of a column, some of which may be invalid."""
        if kind == INT:
            return self._integers(type_, length)
        if kind == FLOAT:
            return self._numbers(FLOATS[type_.number(0, "h")], length)
        if kind == BOOL:
            bits = self._buffer()
            return [bool(bits[index >> 3] >> (index & 7) & 1) for index in range(length)]
        if kind in (DATE, TIME, TIMESTAMP, DURATION):
            return self._numbers("i" if _is_short_time(kind, type_) else "q", length)
        if kind in (BINARY, UTF8, LARGE_BINARY, LARGE_UTF8):
            ends = self._offsets(kind in (LARGE_BINARY, LARGE_UTF8), length)
            data = self._buffer()
            self._grow(len(data))
            parts = [data[start:end] for start, end in _spans(ends, len(data))]
            return [part.decode() for part in parts] if kind in (UTF8, LARGE_UTF8) else parts
        if kind in (FIXED_BINARY, DECIMAL):
            size = type_.number(0, "i") if kind == FIXED_BINARY else type_.number(2, "i", 128) // 8
            data = self._buffer()
            return [data[index * size : (index + 1) * size] for index in range(length)]
        return self._nested(field, kind, type_, length)

    def _nested(self, field: _Table, kind: int, type_: _Table, length: int) -> list[Any]:
        children = field.tables(5)
        if kind == STRUCT:
            names = [child.text(0) for child in children]
            columns = [self.column(child) for child in children]
            if not columns:
                return [{} for _ in range(length)]
            rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
            if len(rows) != length:
                raise Unreadable("columns of a struct differ in length")
            return rows
        if kind == FIXED_LIST:
            size = type_.number(0, "i")
            items = self.column(children[0])
            return [items[index * size : (index + 1) * size] for index in range(length)]
        if kind in (LIST, LARGE_LIST, MAP):
            ends = self._offsets(kind == LARGE_LIST, length)
            items = self.column(children[0])
            if kind == MAP:
                items = [item and tuple(item.values()) for item in items]
            return [items[start:end] for start, end in _spans(ends, len(items))]
        raise Unreadable(f"only pyarrow reads its type {kind}: pip install pyarrow")

    def _integers(self, type_: _Table | None, length: int) -> list[int]:
        """Return a buffer of integers; without `type_`, they have 32 bits."""
        bits, is_signed = (
            (32, True) if type_ is None else (type_.number(0, "i"), type_.number(1, "B"))
        )
        letter = INTEGERS[bits]
        return self._numbers(letter if is_signed else letter.upper(), length)

    def _offsets(self, is_large: bool, length: int) -> list[int]:
        """Return the places where values begin, and the end of the last."""
        letter, data = "q" if is_large else "i", self._buffer()
        # An empty column may have no offsets at all.
        return list(struct.unpack_from(f"<{length + 1}{letter}", data)) if length else [0]

    def _numbers(self, letter: str, length: int) -> list[Any]:
        return list(struct.unpack_from(f"<{length}{letter}", self._buffer()))

    def _buffer(self) -> bytes:
        """Return the next buffer, decompressed."""
        place, size = next(self._buffers, (0, -1))
        if place < 0 or size < 0 or place + size > len(self._body):
            raise Unreadable("a buffer is outside of its message")
        data = self._body[place : place + size]
        if self._codec is None or not data:
            return data
        unpacked = struct.unpack_from("<q", data)[0]
        if unpacked == -1:
            return data[8:]
        if unpacked < 0:
            raise Unreadable("the size of a buffer is negative")
        self._grow(unpacked)
        return unpack(self._codec, data[8:], unpacked)


def _spans(ends: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each value. Raises Unreadable if one is outside of `size`."""
    for start, end in pairwise(ends):
        if not 0 <= start <= end <= size:
            raise Unreadable("an offset is outside of its column")
        yield start, end


def _is_short_time(kind: int, type_: _Table) -> bool:
    """Return whether a date or a time has 32 bits instead of 64."""
    if kind == DATE:
        return type_.number(0, "h", 1) == 0
    return kind == TIME and type_.number(1, "i", 32) == 32
