"""The rows of a dataset, one after the other: a file, a folder of files, or a dataset that `datasets` has saved.

JSON and CSV are read with Python's own modules, Parquet and Arrow with pyarrow. No file is held in memory.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

JSON_CHUNK = 2**20  # characters that are read at once
TABLE_BATCH = 1000  # rows that are read at once
NOT_ROWS = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")

Located = tuple[str, dict[str, Any]]  # where a row stands, for messages, and its columns


class BadDataset(ValueError):
    """A dataset that cannot be read, or a row of it that is no example. The message names the file and the line."""


def read_rows(path: Path, split: str | None = None) -> Iterator[Located]:
    """Yield each row of a dataset with the place where it stands.

    Raises BadDataset, and ImportError where pyarrow is needed and not installed.
    """
    for file in files_of(path, split):
        try:
            yield from READERS[file.suffix.lower()](file)
        except UnicodeError as error:
            raise BadDataset(f"{file} is not UTF-8: {error}") from None
        except OSError as error:
            raise BadDataset(f"cannot read {file}: {error.strerror or error}") from None


def files_of(path: Path, split: str | None = None) -> list[Path]:
    """The files of a dataset in order; of a folder with several splits those of `split`, by default of `train`.

    Raises BadDataset where there is none.
    """
    if not path.is_dir():
        if not path.is_file():
            raise BadDataset(f"there is no file {path}")
        if path.suffix.lower() not in READERS:
            raise BadDataset(f"{path.name} is none of {', '.join(READERS)}")
        if split:
            raise BadDataset(f"{path.name} is a single file, and has no split {split}")
        return [path]
    if (path / "dataset_dict.json").is_file():  # datasets has saved a DatasetDict
        path /= split or "train"
        split = None
    if (path / "state.json").is_file():  # datasets has saved a Dataset
        chosen = _saved(path)
    else:
        named = [file for file in sorted(path.rglob("*")) if _may_have_rows(file.relative_to(path))]
        files = [file for file in named if not file.is_dir()]  # Spark gives folders such names
        chosen = [file for file in files if _is_of(file.relative_to(path), split or "train")]
        if not split and not chosen:
            chosen = files
    if not chosen:
        raise BadDataset(f"{path} has no {', '.join(READERS)}{f' of split {split}' if split else ''}")
    for file in chosen:
        if not file.is_file():  # a link to nowhere, or a pipe
            raise BadDataset(f"there is no file {file}")
    return chosen


def _saved(path: Path) -> list[Path]:
    """The files of a Dataset that datasets has saved."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return [path / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadDataset(f"{path / 'state.json'} is not as datasets writes it: {error!r}") from None


def _may_have_rows(file: Path) -> bool:
    """By its name: hidden files and folders are those of editors, notebooks and downloads."""
    is_hidden = any(part.startswith(".") for part in file.parts)
    return file.suffix.lower() in READERS and file.name not in NOT_ROWS and not is_hidden


def _is_of(file: Path, split: str) -> bool:
    """Whether a split's name stands in a file's path: train.jsonl, data/train-00000-of-00002.parquet, train/a.csv."""
    return re.search(rf"(^|[/._-]){re.escape(split)}([/._-])", file.as_posix()) is not None


def _json_lines(path: Path) -> Iterator[Located]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise BadDataset(f"{where}: not JSON: {error}") from None
                yield where, _object(where, row)


def _json(path: Path) -> Iterator[Located]:
    """The elements of one JSON array, read piece by piece; a file that is none has lines of JSON."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(JSON_CHUNK)
        place = _after_space(text, 0)
        if text[place : place + 1] != "[":
            yield from _json_lines(path)
            return
        line, counted, place = 1, 0, place + 1
        while True:
            place = _after_space(text, place, ",")
            if text[place : place + 1] == "]":
                if (text[place + 1 :] + file.read(JSON_CHUNK)).strip():
                    raise BadDataset(f"{path}: more follows after its array: give one array, or lines of JSON")
                return
            line, counted = line + text.count("\n", counted, place), place
            try:
                row, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                more = file.read(max(JSON_CHUNK, len(text) - place))  # twice as much for a long row
                if not more:
                    raise BadDataset(f"{path}:{line}: not JSON: {error}") from None
                text, place, counted = text[place:] + more, 0, 0
                continue
            yield f"{path}:{line}", _object(f"{path}:{line}", row)
            place = end


def _after_space(text: str, place: int, besides: str = "") -> int:
    match = re.compile(rf"[\s{besides}]*").match(text, place)
    assert match
    return match.end()


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadDataset(f"{where}: not a JSON object")
    return row


def _csv(path: Path) -> Iterator[Located]:
    """The lines below the names of the columns; a cell is text, an empty one counts as missing."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)  # or a quote that is not closed would swallow all that follows
        try:
            for row in reader:
                if None in row:
                    raise BadDataset(f"{path}:{reader.line_num}: it has more cells than there are columns")
                yield f"{path}:{reader.line_num}", {name: cell or None for name, cell in row.items()}
        except csv.Error as error:
            raise BadDataset(f"{path}:{reader.line_num + 1}: {error}") from None  # where its row begins


def _parquet(path: Path) -> Iterator[Located]:
    pyarrow = _pyarrow(path)
    with _table_errors(path, pyarrow):
        yield from _rows_of(path, pyarrow.parquet.ParquetFile(path).iter_batches(TABLE_BATCH))


def _arrow(path: Path) -> Iterator[Located]:
    pyarrow = _pyarrow(path)
    with _table_errors(path, pyarrow), pyarrow.memory_map(str(path)) as source:
        try:
            batches = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:  # the other of Arrow's two formats
            file = pyarrow.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        yield from _rows_of(path, batches)


def _rows_of(path: Path, batches: Any) -> Iterator[Located]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, TABLE_BATCH):
            for row in batch.slice(start, TABLE_BATCH).to_pylist():
                number += 1
                yield f"{path}, row {number}", row


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{path.name} is read with pyarrow: pip install pyarrow, or give JSON lines") from None
    return pyarrow


@contextmanager
def _table_errors(path: Path, pyarrow: Any) -> Iterator[None]:
    """Turns pyarrow's errors into BadDataset."""
    try:
        yield
    except pyarrow.ArrowException as error:
        raise BadDataset(f"cannot read {path}: {str(error).splitlines()[0]}") from None


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
    ".arrow": _arrow,
}
