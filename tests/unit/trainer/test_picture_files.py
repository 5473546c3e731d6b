"""Images of rows: regular files below the dataset's folder, in a few formats, of a limited size."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.image_files import size_of
from autotune.trainer.picture_files import (
    MAX_PIXELS,
    BadPicture,
    open_file,
    read_header,
    read_picture,
)
from tests.unit.problem.test_images import png

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    (made / "images").mkdir(parents=True)
    (made / "a.png").write_bytes(png(4, 3))
    (tmp_path / "secret.png").write_bytes(png(4, 3))
    os.mkfifo(made / "pipe.png")
    (made / "device.png").symlink_to("/dev/zero")
    (made / "images" / "link.png").symlink_to(made / "a.png")
    return made


def test_files_below_the_folder_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a relative or an absolute path, and through links of the user's own."""
    monkeypatch.chdir(folder.parent)
    for name in ("a.png", "images/../a.png", "./images/link.png", str(folder / "a.png")):
        for place in (folder, Path("data")):
            assert read_picture(name, place).size == (4, 3)
    assert read_picture({"bytes": png(2, 5), "path": "/absent"}, folder).size == (2, 5)
    assert read_picture({"bytes": None, "path": "a.png"}, folder).size == (4, 3)


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("../secret.png", "not below"),
        ("images/../../secret.png", "not below"),
        ("/etc/hostname", "not below"),
        ({"path": "/dev/stdin"}, "not below"),
        ("../data-2/a.png", "not below"),
        ("pipe.png", "not a regular file"),
        ("device.png", "not a regular file"),
        ("images", "Is a directory|not a regular file"),
        ("absent.png", "No such file"),
        ("a\0.png", "null"),
        ("x" * 5000, "name too long"),
        (None, "not the path"),
        ({"bytes": "text"}, "not the path"),
        (7, "not the path"),
    ],
)
def test_other_files_are_refused(folder: Path, named: Any, reason: str) -> None:
    with pytest.raises(BadPicture, match=reason):
        open_file(named, folder)


def header(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"")


@pytest.mark.parametrize(
    ("width", "height"), [(MAX_PIXELS + 1, 1), (20_000, 20_000), (2**31 - 1, 2**31 - 1)]
)
def test_a_decompression_bomb_is_refused(width: int, height: int) -> None:
    """Before its pixels are read, with the same limit in plans and in runs."""
    for read in (size_of, read_header):
        with pytest.raises(BadPicture, match=r"more than 89 million pixels|exceeds limit"):
            read(io.BytesIO(header(width, height)))
    assert size_of(io.BytesIO(header(MAX_PIXELS, 1))) == (MAX_PIXELS, 1)


@pytest.mark.parametrize(
    "content",
    [
        # Ghostscript would draw it
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n",
        b"P6 2 2 255 " + b"x" * 12,
        b"",
        png(4, 3)[:40],
        b"\xff\xd8\xff\xc0",
        b"GIF89a" + b"\xff" * 20,
        b"BM" + b"\xff" * 60,
        b"II*\0" + b"\xff" * 30,
        b"RIFF\xff\xff\xff\x7fWEBPVP8X" + b"\xff" * 20,
    ],
    ids=range(9),
)
def test_other_formats_and_broken_files_are_refused(folder: Path, content: bytes) -> None:
    with pytest.raises(BadPicture):
        read_picture({"bytes": content or b"x"}, folder)


def test_each_format_is_read(folder: Path) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        Image.new("RGB", (6, 5)).save(folder / "b", kind)
        assert read_picture("b", folder).size == (6, 5)
        with open_file("b", folder) as file:
            assert size_of(file) == (6, 5)
