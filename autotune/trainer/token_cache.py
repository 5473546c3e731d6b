"""A dataset as tokens in files, made once for each tokenizer: a run maps them into memory and holds none of them.

`tokens` has those of all examples as 32-bit integers (what is not trained on as its complement), `ends` where each
example ends as 64-bit integers, and `about.json` their numbers.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .examples import Encoder
from .reading import BadDataset, files_of, read_rows

VERSION = 1  # of the files, and of what they say about a row
BYTES_OF_TOKENS = {".parquet": 4.0, ".arrow": 1.5}  # for a byte of the dataset, at most about; for others 1
SAY_EVERY_S = 2.0
ABANDONED_S = 3600.0  # what a process that was killed has not written to for this long is removed


class CannotKeep(Exception):
    """Tokens that cannot be written. The message names the folder and the reason."""


def cache_folder() -> Path:
    """The folder of all caches: $XDG_CACHE_HOME or ~/.cache, and in it autotune/tokens."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune" / "tokens"


def tokenise(
    path: Path,
    tokenizer: Any,
    *,
    split: str | None = None,
    loss_on: str | None = None,
    encoder: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """The folder with the dataset's tokens, which are made unless they are there. `say` gets progress messages.

    `encoder` makes other examples than those for the next token.

    Raises BadDataset (a row that is no example, no rows at all), CannotKeep (no room on the disk), and ImportError
    where a file is read with a package that is not installed.
    """
    files = files_of(path, split)
    encoder = encoder or Encoder(tokenizer, loss_on)
    folder = cache_folder() / _key(files, tokenizer, encoder.key)
    try:
        if not _is_whole(folder):
            _make(folder, path, files, encoder, split, say)
    except OSError as error:
        if not _is_whole(folder):  # another process was quicker
            reason = f"{error.strerror or error} (XDG_CACHE_HOME names another place)"
            raise CannotKeep(f"its tokens cannot be kept in {folder.parent}: {reason}") from None
    return folder


def _make(
    folder: Path, path: Path, files: list[Path], encoder: Any, split: str | None, say: Callable[[str], None]
) -> None:
    """Write the tokens beside `folder`, and give them its name once they are whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.glob("tmp*"):
        with suppress(OSError):  # it is whole just now, and has its name
            if time.time() - max(file.stat().st_mtime for file in (other, *other.iterdir())) > ABANDONED_S:
                shutil.rmtree(other)
    needed = sum(BYTES_OF_TOKENS.get(file.suffix.lower(), 1.0) * file.stat().st_size for file in files)
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(f"they need about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _write(made, path, encoder, split, say)
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Whether the files are there, with the sizes that about.json says: a power cut leaves others."""
    try:
        about = read_about(folder)
        sizes = [(folder / name).stat().st_size for name in ("tokens", "ends")]
        return sizes == [4 * about["tokens"], 8 * about["examples"]] and "trained" in about
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _key(files: list[Path], tokenizer: Any, encoded: Any) -> str:
    """A name that changes with all that the tokens depend on. A file counts as unchanged by its size and time."""
    about = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    facts = [VERSION, about, words, tokenizer.chat_template, tokenizer.special_tokens_map, encoded]
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _write(folder: Path, path: Path, encoder: Any, split: str | None, say: Callable[[str], None]) -> None:
    said = time.monotonic()
    tokens = trained = examples = 0
    with (folder / "tokens").open("wb") as token_file, (folder / "ends").open("wb") as end_file:
        for example in encoder.encode(read_rows(path, split)):
            array("i", example).tofile(token_file)
            examples += 1
            tokens += len(example)
            trained += sum(token >= 0 for token in example)
            array("q", [tokens]).tofile(end_file)
            if time.monotonic() - said > SAY_EVERY_S:
                say(f"{examples:,} examples of {path.name}")
                said = time.monotonic()
    if not examples:
        raise BadDataset(f"{path} has no rows")
    about = {"examples": examples, "tokens": tokens, "trained": trained}
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def read_about(folder: Path) -> dict[str, int]:
    """How many examples there are, how many tokens, and how many of these are trained on."""
    about: dict[str, int] = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    return about


def read_ends(folder: Path) -> "array[int]":
    """Where each example ends among the tokens."""
    ends = array("q")
    ends.frombytes((folder / "ends").read_bytes())
    return ends
