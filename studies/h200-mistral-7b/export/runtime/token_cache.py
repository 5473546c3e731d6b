# -*- coding: utf-8 -*-
"""Stores a dataset as tokens in files, once for each tokenizer. A run maps the files into memory.

`tokens` has the tokens of all examples as 32-bit integers; a token that is not trained on is stored
as -1 - token. `ends` has the end of each example as a 64-bit integer. `about.json` has the numbers
of examples and tokens, and notes on text that the chat template leaves out.
"""

import hashlib
import json
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .cache_folders import user_cache
from .examples import Encoder
from .reading import BadDataset, find_files, read_rows

VERSION = 3  # increase this version if the format or the meaning of the files changes
# An upper estimate of the bytes that the tokens take for each byte of a file. For formats that are
# not listed, the estimate is 1.
BYTES_OF_TOKENS = {".parquet": 4.0, ".arrow": 1.5}
SAY_EVERY_S = 2.0
# A temporary folder without writes for this number of seconds is removed, because a killed process
# must have left it.
ABANDONED_S = 3600.0


class CannotKeep(Exception):
    """Raised if tokens cannot be written. The message names the folder and the reason."""


def cache_folder() -> Path:
    """Return the folder of all token caches."""
    return user_cache() / "tokens"


def tokenise(
    path: Path,
    tokenizer: Any,
    *,
    split: str | None = None,
    loss_on: str | None = None,
    encoder: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Return the folder with the dataset's tokens, and make them first if they are missing.

    `say` gets progress messages. `encoder` replaces the default `Encoder`.

    Raises BadDataset for an invalid row or a dataset without rows, CannotKeep for a full disk, and
    ImportError if a file needs a package that is not installed.
    """
    files = find_files(path, split)
    encoder = encoder or Encoder(tokenizer, loss_on)
    folder = cache_folder() / _key(files, tokenizer, encoder.key)

    try:
        if not _is_whole(folder):
            _make(folder, path, files, encoder, split, say)
    except OSError as error:
        if not _is_whole(folder):  # another process may have made the folder meanwhile
            reason = f"{error.strerror or error} (XDG_CACHE_HOME can name another folder)"
            raise CannotKeep(
                f"the dataset's tokens cannot be kept in {folder.parent}: {reason}"
            ) from None
    for note in read_about(folder)["notes"]:
        say(f"warning: {path.name}: {note}")
    return folder


def _make(
    folder: Path,
    path: Path,
    files: list[Path],
    encoder: Any,
    split: str | None,
    say: Callable[[str], None],
) -> None:
    """Write the tokens into a temporary folder, and rename it to `folder` when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.glob("tmp*"):
        with suppress(OSError):  # another process has just completed this folder and renamed it
            written = max(file.stat().st_mtime for file in (other, *other.iterdir()))
            if time.time() - written > ABANDONED_S:
                shutil.rmtree(other)

    needed = sum(
        BYTES_OF_TOKENS.get(file.suffix.lower(), 1.0) * file.stat().st_size for file in files
    )
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(
            f"they need about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        )

    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _write(made, path, encoder, split, say)
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Return whether the files exist with the sizes in about.json.

    After a power failure, files may be shorter than about.json says.
    """
    try:
        about = read_about(folder)
        sizes = [(folder / name).stat().st_size for name in ("tokens", "ends")]
        return sizes == [4 * about["tokens"], 8 * about["examples"]] and "notes" in about
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _key(files: list[Path], tokenizer: Any, encoded: Any) -> str:
    """Return the folder's name, a hash of everything that determines the tokens.

    A file counts as unchanged if its size and its modification time are unchanged.
    """
    about = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    facts = [VERSION, about, *tokenizer_facts(tokenizer), encoded]
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def tokenizer_facts(tokenizer: Any) -> list[Any]:
    """Return everything in a tokenizer that determines the tokens of a text or a chat."""
    words = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else sorted(tokenizer.get_vocab().items())
    )
    return [words, tokenizer.chat_template, tokenizer.special_tokens_map]


def _write(
    folder: Path, path: Path, encoder: Any, split: str | None, say: Callable[[str], None]
) -> None:
    told = time.monotonic()
    tokens = trained = examples = 0
    with (folder / "tokens").open("wb") as token_file, (folder / "ends").open("wb") as end_file:
        for example in encoder.encode(read_rows(path, split)):
            array("i", example).tofile(token_file)
            examples += 1
            tokens += len(example)
            trained += sum(token >= 0 for token in example)
            array("q", [tokens]).tofile(end_file)
            if time.monotonic() - told > SAY_EVERY_S:
                say(f"{examples:,} examples of {path.name}")
                told = time.monotonic()

    if not examples:
        raise BadDataset(f"{path} has no examples")
    notes = encoder.describe_notes(examples)
    about = {"examples": examples, "tokens": tokens, "trained": trained, "notes": notes}
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def read_about(folder: Path) -> dict[str, Any]:
    """Return the numbers of examples, tokens and tokens to train on, and notes for the user."""
    about: dict[str, Any] = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    return about


def read_ends(folder: Path) -> "array[int]":
    """Return the end of each example, as an index into the tokens."""
    ends = array("q")
    ends.frombytes((folder / "ends").read_bytes())
    return ends
