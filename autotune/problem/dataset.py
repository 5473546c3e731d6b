"""The user's examples: text, prompt and completion, or messages. They are read as the exported script reads them."""

import glob
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.files import refuse_special_files
from autotune.problem.length_distribution import Lengths

LOADERS = {".jsonl": "lines", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
BYTES_PER_TOKEN = 4.0  # bytes of UTF-8; English text has 3.5 to 4.5 with the vocabularies of today
ROWS = "give rows with `text`, `prompt` and `completion`, or `messages` with a `role` and a `content` each"
COLUMNS = ("text", "prompt", "completion", "messages")
BATCH = 1000  # rows that are counted at once, since a tokenizer counts several in parallel
Render = Callable[[dict[str, Any]], str]
Count = Callable[[list[str], bool], list[int]]


def dataset_lengths(path: Path, tokenizer: str | None, say: Callable[[str], None] = lambda text: None) -> Lengths:
    """The length of each example in tokens: counted with the tokenizer of a directory, or estimated from its bytes.

    `say` gets progress messages. Raises UsageError, which names a row of no known form, and EnvironmentProblem where
    the `datasets` library is needed and not installed.
    """
    say(f"reading {path.name}")
    render, count = _counting(tokenizer) if tokenizer else (_joined, _estimated)
    rows = enumerate(read_rows(path), 1)
    lengths: list[int] = []
    last_message = time.monotonic()
    while batch := list(islice(rows, BATCH)):
        for is_chat in (False, True):  # a chat template writes its own special tokens
            of_form = [(number, row) for number, row in batch if is_chat is (row.get("messages") is not None)]
            if of_form:
                lengths += count([_rendered(path, number, row, render) for number, row in of_form], is_chat)
        if time.monotonic() - last_message > 2:
            say(f"{len(lengths):,} examples of {path.name}")
            last_message = time.monotonic()
    if not lengths:
        raise _no_rows(path)
    return Lengths.of((max(tokens, 1) for tokens in lengths), "counted" if tokenizer else "characters")


def _rendered(path: Path, number: int, row: dict[str, Any], render: Render) -> str:
    try:
        text = render(row)
        text.encode()
        return text
    except UnicodeEncodeError:
        problem, remedy = "half of a surrogate pair is not a character", "write the text again as UTF-8"
    except (KeyError, TypeError, AttributeError):
        problem, remedy = f"it has none of the known forms; its columns: {', '.join(map(str, row))}", ROWS
    except Exception as error:  # chat templates raise errors of all kinds
        problem = f"the tokenizer's chat template refuses it: {_first_line(error)}"
        remedy = "change the messages, or leave the tokenizer out for an estimate"
    raise UsageError(f"{path}, row {number}: {problem}", remedy=remedy)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each row of a file. Raises the same errors as `dataset_lengths`."""
    loader = LOADERS.get(path.suffix.lower())
    if loader is None:
        raise UsageError(f"--dataset: {path.name} is none of {', '.join(LOADERS)}", remedy="convert it to JSON lines")
    if not path.is_file():
        raise UsageError(f"--dataset: there is no file {path}", remedy="name a file on this machine")
    if not path.stat().st_size:
        raise _no_rows(path)
    yield from _json_lines(path) if loader == "lines" else _loaded(path, loader)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON lines. Each line is read by itself, so that rows of several forms may be mixed."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row(path, number, line)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", remedy="check who may read it") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}", remedy="write it again as UTF-8") from None


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}, line {number} is not JSON: {error}", remedy=ROWS) from None
    if not isinstance(row, dict):
        raise UsageError(f"{path}, line {number} is not a JSON object", remedy=ROWS)
    return row


def _loaded(path: Path, loader: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise EnvironmentProblem(
            f"--dataset {path.name} needs the datasets library",
            remedy="pip install datasets, or give JSON lines or --lengths FILE",
        ) from None
    datasets.disable_progress_bars()
    try:  # which takes a path for a pattern
        rows = datasets.load_dataset(loader, data_files=glob.escape(str(path)), split="train", streaming=True)
        # Parquet may say that a column holds images or sounds by their addresses, which would be fetched.
        yield from rows.decode(False) if rows.features else rows
    except Exception as error:  # errors of pyarrow, of pandas and of the library
        raise UsageError(
            f"cannot read {path}: {_first_line(error)}", remedy="check the file, or convert it to JSON lines"
        ) from None


def _counting(directory: str) -> tuple[Render, Count]:
    from transformers import AutoTokenizer

    refuse_special_files(Path(directory))
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # errors of many kinds, depending on the files
        raise UsageError(
            f"the tokenizer in {directory} cannot be loaded: {_first_line(error)}",
            remedy="put tokenizer.json and tokenizer_config.json of the model there, or estimate without --tokenizer",
        ) from None

    def render(row: dict[str, Any]) -> str:
        if row.get("messages") is None:
            return _text(row) + (tokenizer.eos_token or "")
        chat: str = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        return chat

    def count(texts: list[str], is_chat: bool) -> list[int]:
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=not is_chat)["input_ids"]]

    return render, count


def _joined(row: dict[str, Any]) -> str:
    if row.get("messages") is None:
        return _text(row)
    return "".join(f"{message['role']}{message['content']}" for message in row["messages"])


def _estimated(texts: list[str], is_chat: bool) -> list[int]:
    return [round(len(text.encode()) / BYTES_PER_TOKEN) for text in texts]


def _text(row: dict[str, Any]) -> str:
    text: str = row["text"] if row.get("text") is not None else row["prompt"] + row["completion"]  # as train.py does
    if not isinstance(text, str):
        raise TypeError("not text")
    return text


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _no_rows(path: Path) -> UsageError:
    return UsageError(f"{path} has no rows", remedy=ROWS)
