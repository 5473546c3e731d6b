"""Finds the dataset file that another tool's file names, if this machine has it."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any

from autotune.core.errors import AutotuneError
from autotune.core.files import is_file, read_user_text
from autotune.report.values.check import ForeignConfig

_KEYS = ("datasets", "pretraining_dataset", "dataset_name", "dataset")
# Values of `path` that name a format of the files in `data_files`
_FORMATS = ("json", "parquet", "arrow", "csv", "text")
LIMITED = re.compile(r"#(\d+)$")  # the number of examples behind the name of a dataset
_ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt")


def local_dataset(file: Path, run: ForeignConfig) -> Path | None:
    """Return the file of examples that a run names, or None if it has none or several.

    The file is looked up beside the run's file, then in the current directory.
    """
    found = [_find(file, name) for name in _file_names(file, run)]
    return found[0] if len(found) == 1 else None


def unread_datasets(file: Path, run: ForeignConfig) -> str:
    """Return a sentence about a run's several datasets of which this machine has a file, or ""."""
    names = _file_names(file, run)
    found = [name for name in names if _find(file, name) is not None]
    if len(names) < 2 or not found:
        return ""
    return (
        f"{file.name} names {len(names)} datasets, which are not read together: their number of "
        "examples and their lengths are assumed. Pass one file with all examples: --dataset FILE."
    )


def absent_dataset(file: Path, run: ForeignConfig) -> str:
    """Return a sentence about the files of examples that a run names but this machine lacks, or "".

    A name counts as a file if it has a file's ending, or begins as a path does.
    """
    names = [name for name in _file_names(file, run) if _is_file_name(name)]
    absent = [name for name in names if _find(file, name) is None]
    if not absent:
        return ""
    folders = {str(folder.absolute()): None for folder in (file.parent, Path())}
    where = "" if all(map(os.path.isabs, absent)) else f" in {' or in '.join(folders)}"
    return (
        f"{file.name} names examples that were not found: {', '.join(absent)}{where}. Pass them "
        "with --dataset, or check the run on the machine that has them."
    )


def _file_names(file: Path, run: ForeignConfig) -> list[str]:
    """Return the names of a run's datasets; LLaMA-Factory's are those of the registered files."""
    names = [LIMITED.sub("", name) for name in _names(run.values)]
    if run.format == "llamafactory":
        names = list(_registered(file, run.values, names))
    return names


def _is_file_name(name: str) -> bool:
    is_path = name.startswith(("./", "../", "/", "~"))
    return "://" not in name and (is_path or Path(name).suffix.lower() in _ENDINGS)


def _names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names and the files of all datasets."""
    value: Any = next(filter(None, map(values.get, _KEYS)), [])
    items = value.split(",") if isinstance(value, str) else value
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, Mapping):
            yield str(item).strip()
        elif item.get("path") in _FORMATS or item.get("data_files"):
            files = item.get("data_files") or ""
            files = files.get("train", "") if isinstance(files, Mapping) else files
            yield from map(str, files if isinstance(files, list) else [files])
        else:
            yield str(item.get("path", ""))


def _registered(file: Path, values: Mapping[str, Any], names: list[str]) -> Iterator[str]:
    """Yield LLaMA-Factory's files of these datasets, from the dataset_info.json in dataset_dir."""
    folder = Path(str(values.get("dataset_dir") or "data"))
    table = _find(file, str(folder / "dataset_info.json"))
    known: Any = {}
    if table is not None:
        try:
            known = json.loads(read_user_text(table))
        except (AutotuneError, ValueError, RecursionError):  # the tool itself reports this file
            known = {}
    for name in names:
        about = known.get(name) if isinstance(known, dict) else None
        file_name = about.get("file_name") if isinstance(about, dict) else None
        yield str(folder / file_name) if isinstance(file_name, str) else name


def _find(file: Path, name: str) -> Path | None:
    path = Path(expanduser(name))
    return next((one for one in (file.parent / path, path) if name and is_file(one)), None)
