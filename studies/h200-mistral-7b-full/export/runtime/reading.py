# -*- coding: utf-8 -*-
"""Reads the rows of a dataset: a file, a folder of files, or a dataset of the library `datasets`.

The library saves a dataset in a folder, or loads it from the Hugging Face Hub (`hub_data`).
Python's own modules read JSON and CSV, and `tables` reads Parquet and Arrow. Files are read in
parts, so that memory never holds a whole file; of an Arrow file, a part is a batch of its rows.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .hub_data import CannotLoad, is_hub_name, load_files
from .tables import READERS as TABLES
from .tables import TableError

JSON_CHUNK = 2**20  # characters of a JSON file to read at once
TEXT = (".jsonl", ".json", ".csv")  # the formats whose files have lines of text
NOT_ROWS = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")

Located = tuple[str, dict[str, Any]]  # a row's location, which messages show, and the row's columns


class BadDataset(ValueError):
    """Raised for an unreadable dataset, or for a row that is not an example.

    The message names the file and the line.
    """


class MissingFile(BadDataset):
    """Raised for a file that does not exist."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"there is no file {path}")
        self.path = path


class BrokenLine(BadDataset):
    """Raised for a line that is no text or no JSON object, so that nothing can be read from it."""


def read_rows(path: Path, split: str | None = None) -> Iterator[Located]:
    """Yield each row of a dataset with its location.

    Raises BadDataset. Raises ImportError if a file is compressed and neither cramjam nor pyarrow is
    installed.
    """
    is_cached = is_on_hub(path)
    for file in find_files(path, split):
        try:
            for where, row in READERS[file.suffix.lower()](file):
                # Locations show the name of the dataset on the Hub, not the folder of the cache.
                yield where.replace(f"{file.parent}/", f"{path}/") if is_cached else where, row
        except UnicodeError as error:
            raise _not_text(file, error) from None
        except OSError as error:
            raise BadDataset(f"cannot read {file}: {error.strerror or error}") from None


def _not_text(file: Path, error: UnicodeError) -> BadDataset:
    """Return the error for a file that is not UTF-8, with the first line that is not."""
    if file.suffix.lower() in TEXT:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as found:
                    byte = f"byte 0x{line[found.start]:02x} in position {found.start + 1}"
                    return BrokenLine(f"{file}:{number}: not UTF-8: {byte} of the line")
    return BadDataset(f"{file} is not UTF-8: {error}")


def find_files(path: Path, split: str | None = None) -> list[Path]:
    """Return the files of a dataset in order.

    If a folder has several splits, only the files of `split` are returned. `split` is `train` by
    default. Raises BadDataset if no file is found.
    """
    if is_on_hub(path):
        try:
            return list(load_files(path.as_posix(), split or "train"))
        except CannotLoad as error:
            raise BadDataset(str(error)) from None
    if not path.is_dir():
        return [_check_file(path, split)]

    if (path / "dataset_dict.json").is_file():  # a DatasetDict of `datasets`
        path /= split or "train"
        split = None
    if (path / "state.json").is_file():  # a Dataset of `datasets`
        chosen = _saved_files(path)
    else:
        named = [file for file in sorted(path.rglob("*")) if _may_have_rows(file.relative_to(path))]
        # Spark gives folders the names of files, such as data.parquet.
        files = [file for file in named if not file.is_dir()]
        chosen = [file for file in files if _is_in_split(file.relative_to(path), split or "train")]
        if not split and not chosen:
            chosen = files

    if not chosen:
        suffix = f" of split {split}" if split else ""
        raise BadDataset(f"{path} has no file of {', '.join(READERS)}{suffix}")
    for file in chosen:
        if not file.is_file():  # the file may be a broken link or a pipe
            raise MissingFile(file)
    return chosen


def is_on_hub(path: Path) -> bool:
    """Return whether this is the name of a dataset on the Hub, and not an existing local path."""
    return is_hub_name(path, tuple(READERS))


def _check_file(path: Path, split: str | None) -> Path:
    """Return `path` if it is a file of a known format; otherwise raise BadDataset."""
    if not path.is_file():
        raise MissingFile(path)
    if path.suffix.lower() not in READERS:
        raise BadDataset(f"the format of {path.name} is none of {', '.join(READERS)}")
    if split:
        raise BadDataset(f"{path.name} is a single file, and has no split {split}")
    return path


def _saved_files(path: Path) -> list[Path]:
    """Return the files of a Dataset that `datasets` has saved."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        names = [file["filename"] for file in state["_data_files"]]
        for name in names:
            if name != Path(name).name or Path(name).suffix != ".arrow":
                raise ValueError(f"{name!r:.80} is not an .arrow file in the same folder")
        return [path / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadDataset(
            f"{path / 'state.json'} is not in the format of datasets: {error!r}"
        ) from None


def _may_have_rows(file: Path) -> bool:
    """Return whether a file's name and folders suggest that it has rows.

    Hidden files and folders have no rows: they belong to editors, notebooks and downloads.
    """
    is_hidden = any(part.startswith(".") for part in file.parts)
    return file.suffix.lower() in READERS and file.name not in NOT_ROWS and not is_hidden


def _is_in_split(file: Path, split: str) -> bool:
    """Return whether a file's path contains a split's name.

    Examples: train.jsonl, data/train-00000-of-00002.parquet, train/a.csv.
    """
    return re.search(rf"(^|[/._-]){re.escape(split)}([/._-])", file.as_posix()) is not None


def _read_json_lines(path: Path) -> Iterator[Located]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BrokenLine(f"{where}: not JSON: {_reason(error, line)}") from None
            yield where, _check_object(where, row)


def _read_json(path: Path) -> Iterator[Located]:
    """Yield the elements of one JSON array, or JSON objects that follow each other."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(JSON_CHUNK)
        place = _skip_space(text, 0)
        is_array = text[place : place + 1] == "["

        # `line` counts the lines up to the position `counted`.
        line = 1
        counted = 0
        place += is_array
        while True:
            place = _skip_space(text, place, "," if is_array else "")
            if is_array and text[place : place + 1] == "]":
                if (text[place + 1 :] + file.read(JSON_CHUNK)).strip():
                    raise BadDataset(
                        f"{path}: text follows its array: give one array, or lines of JSON"
                    )
                return
            line += text.count("\n", counted, place)
            counted = place

            try:
                row, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                # The element may be incomplete. The next part is at least as long as the text that
                # is not parsed yet, so that parsing a long element takes linear time.
                more = file.read(max(JSON_CHUNK, len(text) - place))
                if not more:
                    if not is_array and place == len(text):
                        return
                    raise BrokenLine(f"{path}:{line}: not JSON: {_reason(error)}") from None
                text = text[place:] + more
                place = 0
                counted = 0
                continue

            yield f"{path}:{line}", _check_object(f"{path}:{line}", row)
            place = end


def _reason(error: Exception, line: str | None = None) -> str:
    """Return why a text is not JSON; in a `line` of its own, also the place of the mistake."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if line is None:
        return error.msg
    if error.pos >= len(line.rstrip()):
        return "the line ends before its object does"
    return f"{error.msg} at character {error.pos + 1}".replace(" at at ", " at ")


def _skip_space(text: str, place: int, besides: str = "") -> int:
    match = re.compile(rf"[\s{besides}]*").match(text, place)
    assert match
    return match.end()


def _check_object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BrokenLine(f"{where}: not a JSON object")
    if _is_by_columns(row):
        raise BadDataset(
            f"{where}: this is a table by columns, not by rows: write it with"
            " orient='records' if pandas made it"
        )
    return row


def _is_by_columns(row: dict[str, Any]) -> bool:
    """Return whether a row holds a whole table, column by column, as pandas may write it.

    In such a table, all values are objects that have the same keys: the row numbers.
    """
    columns = [value for value in row.values() if isinstance(value, dict)]
    if not row or len(columns) < len(row):
        return False
    numbers = set(columns[0])
    return all(set(one) == numbers for one in columns) and all(map(str.isdigit, numbers))


def _read_csv(path: Path) -> Iterator[Located]:
    """Yield the rows below the column names. A cell is text, or None if it is empty."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Without `strict`, a cell with an unclosed quote would contain the rest of the file.
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise BadDataset(
                        f"{path}:{reader.line_num}: it has more cells than there are columns"
                    )
                cells = {name: cell or None for name, cell in row.items()}
                yield f"{path}:{reader.line_num}", cells
        except csv.Error as error:
            # The faulty row begins one line after the last row that was read.
            raise BadDataset(f"{path}:{reader.line_num + 1}: {error}") from None


def _read_table(path: Path) -> Iterator[Located]:
    try:
        for number, row in enumerate(TABLES[path.suffix.lower()](path), 1):
            yield f"{path}, row {number}", row
    except TableError as error:
        raise BadDataset(f"cannot read {path}: {error}") from None


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_table,
    ".csv": _read_csv,
    ".arrow": _read_table,
}
