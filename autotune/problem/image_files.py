"""Read the sizes of the images in a dataset's rows, and the text of a row without its images.

The size of an image is read from the start of its file. `trainer.forms` finds the path of each
image in a row. Instead of a path, a row may contain the image file itself, as the library
`datasets` does.
"""

import io
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from autotune.core.errors import UsageError
from autotune.core.images import Picture
from autotune.trainer.forms import FLAGS, Chat, Plain, is_image
from autotune.trainer.picture_files import BadPicture, check_size, open_file, read_header

PNG = b"\x89PNG\r\n\x1a\n"


def pictures_of(
    where: str, named: Iterable[Any], folder: Path, picture: Callable[[int, int], Picture]
) -> tuple[Picture, ...]:
    """Return a Picture, the output of the model's image processor, for each image of a row.

    Paths are relative to `folder`. Raises UsageError, with the row and the file, for an unreadable
    image and for an image that `picture` refuses.
    """
    pictures = []
    for one in named:
        path = one.get("path") if isinstance(one, dict) else one
        name = f"{where}: its image " + (f"{path!r:.80} " if path else "")
        try:
            with open_file(one, folder) as file:
                size = size_of(file)
            pictures.append(picture(*size))
        except UsageError as error:
            raise UsageError(f"--dataset: {name}is refused: {error}", remedy=error.remedy) from None
        except ValueError as error:
            remedy = (
                f"give the path of a complete image file from {folder}, or leave the example out"
            )
            raise UsageError(f"--dataset: {name}cannot be read: {error}", remedy=remedy) from None

    return tuple(pictures)


def size_of(file: BinaryIO) -> tuple[int, int]:
    """Return the width and height in pixels of an image file.

    `picture_files.FORMATS` lists the formats. Formats other than PNG and JPEG need Pillow, which is
    optional. Raises BadPicture for any other file.
    """
    try:
        width, height = _read_size(file)
    except (OSError, struct.error) as error:
        raise BadPicture(str(error)) from None
    check_size(width, height)
    return width, height


def _read_size(file: BinaryIO) -> tuple[int, int]:
    start = file.read(24)
    if start.startswith(PNG):
        width, height = struct.unpack(">II", start[16:24])
        return width, height
    if start.startswith(b"\xff\xd8"):
        file.seek(2)
        return _jpeg_size(file)
    file.seek(0)
    return _pillow_size(file)


def _jpeg_size(file: BinaryIO) -> tuple[int, int]:
    """Return the size in a JPEG's frame header; segments before the header are skipped."""
    while True:
        mark, kind, length = struct.unpack(">BBH", file.read(4))
        if mark != 0xFF or length < 2:
            raise BadPicture("it is a broken JPEG")
        # The three excluded codes are in the range of frame headers, but other segments begin with
        # them.
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            _, height, width = struct.unpack(">BHH", file.read(5))
            return width, height
        file.seek(length - 2, io.SEEK_CUR)


def _pillow_size(file: BinaryIO) -> tuple[int, int]:
    try:
        with read_header(file) as image:
            width, height = image.size
    except ImportError:
        raise BadPicture(
            "it is neither PNG nor JPEG; other formats need Pillow: pip install pillow"
        ) from None
    return int(width), int(height)


def text_of(form: Chat, *, whole: bool = True) -> dict[str, Any]:
    """Return the row without the images in its messages.

    The content of each message is a list of parts: texts and images.

    If `whole` is false, the text ends before the last image.
    """
    messages = []
    until = len(form.messages)
    if not whole:
        with_images = (
            place for place, one in enumerate(form.messages) if any(map(is_image, one["content"]))
        )
        until = max(with_images) + 1
    for place, message in enumerate(form.messages[:until]):
        parts = message["content"]
        if not whole and place == until - 1:
            parts = parts[: max(index for index, part in enumerate(parts) if is_image(part))]
        texts = [part for part in parts if not is_image(part)]
        content = {"content": texts or [{"type": "text", "text": ""}]}
        # Flags limit training to some messages. If the text ends before the last image, the flags
        # are left out, because all tokens of this text are counted.
        flags = () if whole else FLAGS
        messages.append({key: message[key] for key in message if key not in flags} | content)

    extras = form.unread | {"tools": form.tools, "chat_template_kwargs": form.options}
    if form.completion is None or not whole:
        return extras | {"messages": messages}
    return extras | {
        "prompt": messages[: form.completion],
        "completion": messages[form.completion :],
    }


def flat(form: Plain | Chat) -> Plain | Chat:
    """Return the row with the text parts of each message joined to one string."""
    if isinstance(form, Plain):
        return form
    texts = ["".join(part["text"] for part in message["content"]) for message in form.messages]
    messages = [
        message | {"content": text} for message, text in zip(form.messages, texts, strict=True)
    ]
    return replace(form, messages=messages)
