# -*- coding: utf-8 -*-
"""Reads the rows of a Parquet file in Python.

pyarrow takes 140 MB and crashes the process on some damaged files, and its rows are not faster to
make.

A file has row groups, a row group has a chunk for each column, and a chunk has pages of values.
Each value has two levels: the definition level says which of its optional ancestors exist, and the
repetition level says which list it continues. All sizes in a file are checked against the file's
footer, and the footer against the limits of `tables`. Times and decimals stay the integers or the
bytes that the file has. The format is defined in parquet.thrift and Encodings.md of
apache/parquet-format.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from .parquet_footer import (
    COLUMNS,
    META_DATA,
    NUM_ROWS,
    NUM_VALUES,
    ROW_GROUPS,
    UNCOMPRESSED_BYTES,
    Thrift,
    read_footer,
)
from .unpacking import Unreadable, unpack

# The ids of the fields in the format's definition, parquet.thrift
SCHEMA = 2  # a field of the file's metadata
TYPE, TYPE_LENGTH, REPETITION, NAME, NUM_CHILDREN, CONVERTED, LOGICAL = 1, 2, 3, 4, 5, 6, 10
CODEC, COMPRESSED_BYTES, FIRST_DATA, FIRST_DICTIONARY = 4, 7, 9, 11  # of a column's metadata
PAGE_TYPE, PAGE_BYTES, STORED_BYTES, DATA, DICTIONARY, DATA_2 = 1, 2, 3, 5, 7, 8  # of a page

OPTIONAL, REPEATED = 1, 2  # repetition types
BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE, BYTES, FIXED = range(8)  # types of values
TEXTS = {0, 4, 19}  # converted types: UTF8, enum and JSON
LOGICAL_TEXTS = {1, 4, 12}  # logical types: string, enum and JSON
MAP, MAP_ENTRIES, LIST = 1, 2, 3  # converted types
LOGICAL_MAP, LOGICAL_LIST = 2, 3
FORMATS = {INT32: "i", INT64: "q", FLOAT: "f", DOUBLE: "d"}  # of the module struct
HEADER_BYTES = 2**16  # a page's header is shorter, unless it has long statistics
UNCOMPRESSED = 0
CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
PLAIN, PLAIN_DICTIONARY, RLE, DELTA, DELTA_LENGTHS, DELTA_PREFIXES, DICTIONARY_INDICES = (
    *(0, 2, 3, 5, 6, 7),
    8,
)


@dataclass(slots=True)
class _Node:
    """A column, or a group of columns, of the schema.

    `definition` and `repetition` are the largest levels of a value at this node.
    """

    name: str
    element: dict[int, Any]
    definition: int
    repetition: int
    children: list["_Node"] = field(default_factory=list)
    leaves: list["_Leaf"] = field(default_factory=list)

    @property
    def is_repeated(self) -> bool:
        return bool(self.element.get(REPETITION) == REPEATED)

    @property
    def is_list(self) -> bool:
        return self.element.get(CONVERTED) == LIST or LOGICAL_LIST in self._logical

    @property
    def is_map(self) -> bool:
        of_map = self.element.get(CONVERTED) in (MAP, MAP_ENTRIES) or LOGICAL_MAP in self._logical
        return of_map and not self.is_repeated

    @property
    def is_text(self) -> bool:
        return self.element.get(CONVERTED) in TEXTS or bool(LOGICAL_TEXTS & self._logical.keys())

    @property
    def _logical(self) -> dict[int, Any]:
        return self.element.get(LOGICAL) or {}


class _Leaf:
    """The values of a column in a row group, with their levels; read one by one."""

    def __init__(self, node: _Node) -> None:
        self.node = node
        self.fill(iter(()))

    def fill(self, entries: Iterator[tuple[int, int, Any]]) -> None:
        """Read from these (repetition level, definition level, value), up to their end."""
        self._entries = entries
        self._value: Any = None
        self._next()

    def take(self) -> Any:
        """Return the current value, and go to the next."""
        if self.repetition < 0:
            raise Unreadable("a column ends before its rows")
        value = self._value
        self._next()
        return value

    def _next(self) -> None:
        """Read the next entry; the levels are -1 at the end."""
        self.repetition, self.definition, self._value = next(self._entries, (-1, -1, None))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file. Raises Unreadable, and ImportError without cramjam."""
    try:
        footer = read_footer(path)
        root = _schema(footer[SCHEMA])
        with path.open("rb") as file:
            for group in footer[ROW_GROUPS]:
                for leaf, column in zip(root.leaves, group[COLUMNS], strict=True):
                    leaf.fill(_Chunk(file, leaf.node, column[META_DATA]).entries())
                for _ in range(group[NUM_ROWS]):
                    yield {child.name: _value(child) for child in root.children}
    except (KeyError, IndexError, TypeError, AttributeError, struct.error, RecursionError):
        raise Unreadable("it is damaged") from None


def _schema(elements: Sequence[dict[int, Any]]) -> _Node:
    """Return the tree of a schema, whose elements are listed depth first."""
    rest = iter(elements)

    def node(definition: int, repetition: int, *, is_root: bool = False) -> _Node:
        element = next(rest, None)
        if element is None:
            raise Unreadable("its schema is incomplete")
        kind = 0 if is_root else element.get(REPETITION, 0)
        definition += kind in (OPTIONAL, REPEATED)
        repetition += kind == REPEATED
        made = _Node(element[NAME].decode(), element, definition, repetition)
        for _ in range(element.get(NUM_CHILDREN) or 0):
            made.children.append(node(definition, repetition))
        if not made.children:
            made.leaves = [_Leaf(made)]
        else:
            made.leaves = [leaf for child in made.children for leaf in child.leaves]
        return made

    return node(0, 0, is_root=True)


# --- rows from columns


def _value(node: _Node) -> Any:
    """Return the next value of a node, from the current entries of its columns."""
    first = node.leaves[0]
    if node.element.get(REPETITION) in (OPTIONAL, REPEATED) and first.definition < node.definition:
        for leaf in node.leaves:
            leaf.take()
        return [] if node.is_repeated else None
    if not node.is_repeated:
        return _content(node)
    items = [_content(node)]
    while first.repetition == node.repetition:
        items.append(_content(node))
    return items


def _content(node: _Node) -> Any:
    """Return the value of a node that exists: of a column, a list, a map or a struct."""
    if not node.children:
        return node.leaves[0].take()
    if (node.is_list or node.is_map) and len(node.children) == 1 and node.children[0].is_repeated:
        repeated = node.children[0]
        items = _value(repeated)
        if node.is_map:
            return [tuple(item.values()) for item in items]
        # Old writers have no group between a list and its elements.
        if len(repeated.children) == 1 and repeated.name not in ("array", f"{node.name}_tuple"):
            return [next(iter(item.values())) for item in items]
        return items
    return {child.name: _value(child) for child in node.children}


# --- pages


class _Chunk:
    """The pages of a column in a row group."""

    def __init__(self, file: BinaryIO, node: _Node, meta: dict[int, Any]) -> None:
        self._file = file
        self._node = node
        self._codec = meta[CODEC]
        self._left = meta[NUM_VALUES]
        self._bytes_left = max(meta[UNCOMPRESSED_BYTES], 0) + HEADER_BYTES
        starts = (meta.get(FIRST_DICTIONARY), meta[FIRST_DATA])
        self._place = min((start for start in starts if start), default=0)
        self._end = self._place + meta[COMPRESSED_BYTES]
        self._dictionary: Sequence[Any] = ()

    def entries(self) -> Iterator[tuple[int, int, Any]]:
        """Yield (repetition level, definition level, value) of each value."""
        while self._left > 0:
            header, stored = self._next_page()
            if header[PAGE_TYPE] == 2:
                data = self._unpack(stored, header[PAGE_BYTES])
                number = header[DICTIONARY][1]
                self._dictionary = self._plain(data, number)
            elif header[PAGE_TYPE] in (0, 3):
                yield from self._data_page(header, stored)

    def _next_page(self) -> tuple[dict[int, Any], bytes]:
        if not 0 <= self._place < self._end:
            raise Unreadable("a column has too few pages")
        self._file.seek(self._place)
        thrift = Thrift(self._file.read(HEADER_BYTES))
        header = thrift.struct()
        size = header[STORED_BYTES]
        if not 0 <= size <= self._end - self._place:
            raise Unreadable("a page is longer than its column")
        self._file.seek(self._place + thrift.place)
        self._place += thrift.place + size
        return header, self._file.read(size)

    def _data_page(self, header: dict[int, Any], stored: bytes) -> Iterator[tuple[int, int, Any]]:
        node = self._node
        is_second = header[PAGE_TYPE] == 3
        about = header[DATA_2 if is_second else DATA]
        number = about[1]
        if not 0 <= number <= self._left:
            raise Unreadable("a page has more values than its column")
        self._left -= number

        levels = []
        if is_second:
            of_definition, of_repetition = about[5], about[6]
            cut = of_repetition + of_definition
            levels = [stored[:of_repetition], stored[of_repetition:cut]]
            data = stored[cut:]
            if about.get(7, True):
                data = self._unpack(data, header[PAGE_BYTES] - cut)
        else:
            data = self._unpack(stored, header[PAGE_BYTES])
            for largest in (node.repetition, node.definition):
                size = 4 + int.from_bytes(data[:4], "little") if largest else 0
                levels.append(data[4:size])
                data = data[size:]

        repetitions, definitions = (
            _hybrid(part, largest.bit_length(), number) if largest else [0] * number
            for part, largest in zip(levels, (node.repetition, node.definition), strict=True)
        )
        present = definitions.count(node.definition)
        values = iter(self._values(data, about[4] if is_second else about[2], present))
        for repetition, definition in zip(repetitions, definitions, strict=True):
            is_present = definition == node.definition
            yield repetition, definition, next(values) if is_present else None

    def _unpack(self, data: bytes, size: int) -> bytes:
        """Decompress `size` bytes, which count towards the size in the footer."""
        self._bytes_left -= size
        if size < 0 or self._bytes_left < 0:
            raise Unreadable("its pages are larger than its footer says")
        if self._codec == UNCOMPRESSED:
            return data
        if self._codec not in CODECS:
            raise Unreadable(f"only pyarrow reads its compression {self._codec}")
        return unpack(CODECS[self._codec], data, size)

    def _values(self, data: bytes, encoding: int, number: int) -> Sequence[Any]:
        kind = self._node.element[TYPE]
        if encoding == PLAIN:
            return self._plain(data, number)
        if encoding in (PLAIN_DICTIONARY, DICTIONARY_INDICES):
            width = data[0] if data else 0
            indices = _hybrid(data[1:], width, number)
            return [self._dictionary[index] for index in indices]
        if encoding == RLE and kind == BOOLEAN:
            return [bool(bit) for bit in _hybrid(data[4:], 1, number)]
        if encoding == DELTA and kind in (INT32, INT64):
            return _delta(data, number)[0]
        if encoding == DELTA_LENGTHS and kind == BYTES:
            lengths, place = _delta(data, number)
            return self._decoded(_cut(data[place:], lengths))
        if encoding == DELTA_PREFIXES and kind in (BYTES, FIXED):
            return self._decoded(_prefixed(data, number))
        raise Unreadable(f"only pyarrow reads its encoding {encoding}: pip install pyarrow")

    def _plain(self, data: bytes, number: int) -> Sequence[Any]:
        kind = self._node.element[TYPE]
        if kind == BOOLEAN:
            return [bool(data[index >> 3] >> (index & 7) & 1) for index in range(number)]
        if kind in FORMATS:
            return struct.unpack_from(f"<{number}{FORMATS[kind]}", data)
        if kind in (INT96, FIXED):
            size = 12 if kind == INT96 else self._node.element[TYPE_LENGTH]
            return self._decoded(_cut(data, [size] * number))
        values, place = [], 0
        for _ in range(number):
            size = int.from_bytes(data[place : place + 4], "little")
            place += 4 + size
            values.append(data[place - size : place])
        if place > len(data):
            raise Unreadable("a text is longer than its page")
        return self._decoded(values)

    def _decoded(self, values: list[bytes]) -> Sequence[Any]:
        """Decode texts. Raises UnicodeDecodeError."""
        return [value.decode() for value in values] if self._node.is_text else values


# --- encodings


def _hybrid(data: bytes, width: int, number: int) -> list[int]:
    """Return `number` integers of `width` bits, stored as repeated values or in packed groups."""
    found: list[int] = []
    if width > 32:
        raise Unreadable("an integer has more than 32 bits")
    size, place = -(-width // 8), 0
    while len(found) < number:
        head, place = _varint(data, place)
        if head & 1:
            groups = min(head >> 1, -(-(number - len(found)) // 8))
            found += _packed(data[place : place + groups * width], width, groups * 8)
            place += (head >> 1) * width
        else:
            value = int.from_bytes(data[place : place + size], "little")
            found += [value] * min(head >> 1, number - len(found))
            place += size
            if not head >> 1:
                raise Unreadable("a run of values is empty")
    return found[:number]


def _packed(data: bytes, width: int, number: int) -> list[int]:
    """Return integers of `width` bits, the lowest bit first."""
    mask = (1 << width) - 1
    found: list[int] = []
    # Shifting a long integer takes time in proportion to its length, so 64 values are read at once.
    for start in range(0, number, 64):
        part = int.from_bytes(data[start * width // 8 : (start + 64) * width // 8], "little")
        found += [part >> (index * width) & mask for index in range(min(64, number - start))]
    return found


def _delta(data: bytes, number: int) -> tuple[list[int], int]:
    """Return integers that are stored as differences, and the place of the byte after them."""
    block, place = _varint(data, 0)
    minis, place = _varint(data, place)
    total, place = _varint(data, place)
    value, place = _signed(data, place)
    if total < number or not minis or block % (8 * minis):
        raise Unreadable("a page of differences is damaged")
    found = [value][:total]
    each = block // minis
    while len(found) < total:
        least, place = _signed(data, place)
        widths, place = data[place : place + minis], place + minis
        for width in widths:
            if len(found) >= total:
                break
            size = each * width // 8
            for more in _packed(data[place : place + size], width, each)[: total - len(found)]:
                value += least + more
                found.append(value)
            place += size
    return found[:number], place


def _prefixed(data: bytes, number: int) -> list[bytes]:
    """Return texts that begin with a part of the text before them."""
    prefixes, place = _delta(data, number)
    lengths, size = _delta(data[place:], number)
    found, last = [], b""
    for prefix, rest in zip(prefixes, _cut(data[place + size :], lengths), strict=True):
        last = last[:prefix] + rest
        found.append(last)
    return found


def _cut(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    found, place = [], 0
    for length in lengths:
        if length < 0:
            raise Unreadable("a length is negative")
        found.append(data[place : place + length])
        place += length
    if place > len(data):
        raise Unreadable("a text is longer than its page")
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return an integer of 7 bits in each byte, and the place of the byte after it."""
    number = shift = 0
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
        shift += 7


def _signed(data: bytes, place: int) -> tuple[int, int]:
    number, place = _varint(data, place)
    return (number >> 1) ^ -(number & 1), place
