"""The images of a dataset's rows: their sizes, from the first bytes of each file, and the rows without them.

Rows name files as TRL and LLaMA-Factory read them: `images` (a list) or `image`, beside a text or messages. A file may
also be in the row itself, as `datasets` writes it.
"""

import io
import struct
from pathlib import Path
from typing import Any, BinaryIO

from autotune.core.files import refuse_special_files
from autotune.probe.runtime.examples import PLACEHOLDER
from autotune.probe.runtime.reading import BadDataset

PNG = b"\x89PNG\r\n\x1a\n"
TEXTS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text")


def sizes_of(where: str, row: dict[str, Any], folder: Path) -> list[tuple[int, int]]:
    """Width and height in pixels of each image of a row. Files are searched for from `folder`.

    Raises BadDataset, which names the row, for what is no image.
    """
    named = row.get("images") or row.get("image") or []
    sizes = []
    for one in named if isinstance(named, list | tuple) else [named]:
        path, content = (one.get("path"), one.get("bytes")) if isinstance(one, dict) else (one, None)
        try:
            if isinstance(content, bytes):
                sizes.append(size_of(io.BytesIO(content)))
                continue
            if not isinstance(path, str):
                raise ValueError(f"{one!r:.40} is no path of a file")
            file = folder / path
            refuse_special_files(file)
            with file.open("rb") as opened:
                sizes.append(size_of(opened))
        except (OSError, ValueError, struct.error) as error:
            raise BadDataset(f"{where}: its image cannot be read: {error}") from None
    return sizes


def size_of(file: BinaryIO) -> tuple[int, int]:
    """Width and height in pixels of a PNG or JPEG, or of what Pillow reads where that is installed.

    Raises ValueError and struct.error for anything else.
    """
    start = file.read(24)
    if start.startswith(PNG):
        width, height = struct.unpack(">II", start[16:24])
    elif start.startswith(b"\xff\xd8"):
        file.seek(2)
        width, height = _jpeg_size(file)
    else:
        file.seek(0)
        width, height = _pillow_size(file)
    if not width or not height:
        raise ValueError("it has no pixels")
    return width, height


def _jpeg_size(file: BinaryIO) -> tuple[int, int]:
    """From the segment that says how the image was encoded; those before it are skipped."""
    while True:
        mark, kind, length = struct.unpack(">BBH", file.read(4))
        if mark != 0xFF or length < 2:
            raise ValueError("it is a broken JPEG")
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # tables, which are no frames
            _, height, width = struct.unpack(">BHH", file.read(5))
            return width, height
        file.seek(length - 2, io.SEEK_CUR)


def _pillow_size(file: BinaryIO) -> tuple[int, int]:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("it is neither PNG nor JPEG; others are read with Pillow: pip install pillow") from None
    with Image.open(file) as image:
        width, height = image.size
    return int(width), int(height)


def without_images(row: dict[str, Any], *, flat: bool) -> dict[str, Any]:
    """The row with its text alone. Messages keep their parts for a chat template, or with `flat` become one text."""
    others = {name: value for name, value in row.items() if name not in ("image", "images")}
    return {name: _text_of(value, flat=flat) if name in TEXTS else value for name, value in others.items()}


def _text_of(value: Any, *, flat: bool) -> Any:
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, "")
    if isinstance(value, dict):
        return {name: _text_of(one, flat=flat) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    kept = [one for one in value if not (isinstance(one, dict) and one.get("type") == "image")]
    texts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in kept]
    if flat and all(isinstance(text, str) for text in texts) and (kept or value):
        return "".join(map(str, texts)).replace(PLACEHOLDER, "")
    return [_text_of(one, flat=flat) for one in kept]
