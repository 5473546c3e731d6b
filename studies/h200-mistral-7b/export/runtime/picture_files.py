# -*- coding: utf-8 -*-
"""Opens the images that rows of a dataset name or hold.

Rows may be written by an attacker, so they can name only regular files in the dataset's folder.
Only common formats are read, because Pillow starts a program for some other formats.
"""

import io
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Images with more pixels are refused, because even a file of a few KiB may have far more pixels
# than this. Pillow warns of images above the same limit.
MAX_PIXELS = 89_478_485


class BadPicture(ValueError):
    """Raised for an image that cannot be read. The message says why."""


def open_file(named: Any, folder: Path) -> BinaryIO:
    """Open an image. `named` is its path, or a dict with its `bytes` or its `path`.

    Paths are relative to `folder`, and must lie below this folder. Raises BadPicture.
    """
    content = named.get("bytes") if isinstance(named, dict) else None
    if isinstance(content, bytes) and content:
        return io.BytesIO(content)
    path = named.get("path") if isinstance(named, dict) else named
    if not isinstance(path, str):
        raise BadPicture("it is not the path of a file")

    # Symbolic links in the folder are followed, because the user made them, for example in the
    # cache of the Hub.
    root = os.path.abspath(folder)
    full = os.path.normpath(os.path.join(root, path))
    if os.path.commonpath([root, full]) != root:
        raise BadPicture(f"it is not below {folder}, the folder of the dataset")
    try:
        # With O_NONBLOCK, opening a named pipe does not wait. Windows lacks this flag.
        handle = os.open(full, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:  # a path with a NUL character raises ValueError
        raise BadPicture(getattr(error, "strerror", None) or str(error)) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadPicture("it is not a regular file")
    return open(handle, "rb")


def check_size(width: int, height: int) -> None:
    """Raise BadPicture for an image without pixels, or with more than MAX_PIXELS."""
    if width < 1 or height < 1:
        raise BadPicture("it has no pixels")
    if width * height > MAX_PIXELS:
        raise BadPicture(f"it has more than {MAX_PIXELS // 10**6} million pixels")


def read_header(file: BinaryIO) -> Any:
    """Open a file as an image of Pillow, without reading its pixels.

    Raises BadPicture, and ImportError without Pillow.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise BadPicture(f"its format is none of {', '.join(FORMATS)}") from None
    except Exception as error:
        raise _broken(error) from None
    check_size(*image.size)
    return image


def read_picture(named: Any, folder: Path) -> Any:
    """Return an image in RGB, as Pillow's Image. Raises BadPicture."""
    with open_file(named, folder) as file, read_header(file) as image:
        try:
            return image.convert("RGB")
        except Exception as error:
            raise _broken(error) from None


def _broken(error: Exception) -> BadPicture:
    """Return a BadPicture with the message of any error that Pillow raised."""
    return BadPicture(str(error).partition("\n")[0] or type(error).__name__)
