# -*- coding: utf-8 -*-
"""Decompresses parts of Parquet and Arrow files."""

import zlib
from collections.abc import Callable
from importlib.util import find_spec


class Unreadable(ValueError):
    """Raised for a damaged file, and for a file with features that only pyarrow reads."""


def unpack(codec: str, data: bytes, size: int) -> bytes:
    """Return the decompressed data, which must have exactly `size` bytes.

    `codec` is gzip, snappy, brotli, zstd, lz4 (frames) or lz4_raw (a block). The memory of `size`
    bytes is never exceeded. Raises Unreadable, and ImportError without a package for the codec.
    """
    if not size:
        return b""
    if codec == "gzip":
        reader = _unpack_gzip
    elif find_spec("cramjam"):
        reader = _unpack_with_cramjam
    elif find_spec("pyarrow"):
        reader = _unpack_with_pyarrow
    else:
        raise ImportError(
            f"a file that is compressed with {codec} is read with cramjam or pyarrow: pip install"
            " cramjam, or give JSON lines"
        )
    try:
        unpacked = reader(codec, data, size)
    except Exception as error:  # each package has exceptions of its own
        raise Unreadable(f"a part of it cannot be decompressed: {error}") from None
    if len(unpacked) != size:
        raise Unreadable("a decompressed part is shorter than it says")
    return unpacked


def _unpack_gzip(codec: str, data: bytes, size: int) -> bytes:
    return zlib.decompressobj(31).decompress(data, size)


def _unpack_with_cramjam(codec: str, data: bytes, size: int) -> bytes:
    import cramjam

    readers: dict[str, Callable[[bytes, bytearray], int]] = {
        "snappy": cramjam.snappy.decompress_raw_into,
        "brotli": cramjam.brotli.decompress_into,
        "zstd": cramjam.zstd.decompress_into,
        "lz4": cramjam.lz4.decompress_into,
        "lz4_raw": cramjam.lz4.decompress_block_into,
    }
    buffer = bytearray(size)
    return bytes(buffer[: readers[codec](data, buffer)])


def _unpack_with_pyarrow(codec: str, data: bytes, size: int) -> bytes:
    import pyarrow

    return bytes(pyarrow.decompress(data, size, codec, asbytes=True))
