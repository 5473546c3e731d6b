# -*- coding: utf-8 -*-
"""Loads a dataset of the Hugging Face Hub with the library `datasets`, or without it.

The library keeps the rows as Arrow files in its cache, and reads them from there without a network.
Without the library, `hub_download` gets the Parquet files that the Hub has of the dataset.
"""

import functools
import re
from pathlib import Path

from .hub_download import NotDownloaded, download

# Matches a dataset's name with an optional configuration: org/name or org/name:config
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?", re.ASCII)
# Matches the name of an exception class, which is removed from the library's messages.
CLASS_NAME = re.compile(r" \(\w+(Error|Exception|IsEnabled)\)")
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")


class CannotLoad(Exception):
    """Raised for a dataset that is neither on the Hub nor in the cache."""


def is_hub_name(path: Path, suffixes: tuple[str, ...] = ()) -> bool:
    """Return whether `path` is the name of a dataset on the Hub, and not a local path.

    The result is False if the name ends with one of the `suffixes`, because the user then means a
    local file.
    """
    is_name = HUB_NAME.fullmatch(path.as_posix()) and path.suffix.lower() not in suffixes
    return bool(is_name) and not path.exists()


@functools.cache
def load_files(dataset: str, split: str) -> tuple[Path, ...]:
    """Return the files of a split, and download them if the cache does not have them.

    The files are in Arrow's format, or in Parquet without the library `datasets`. Raises
    CannotLoad.
    """
    # A part of a split such as train[:10%] is refused, because the files hold whole splits.
    if not SPLIT_NAME.fullmatch(split):
        raise CannotLoad(f"{split} is not the name of a split: give --split NAME, such as train")
    name, _, config = dataset.partition(":")
    try:
        import datasets
    except ImportError:
        try:
            return download(name, config, split)
        except NotDownloaded as error:
            raise CannotLoad(
                f"there is no file or folder {dataset}, and the Hub does not give it: {error}; give"
                " a local path or org/name:config, or pip install datasets"
            ) from None

    try:
        loaded = datasets.load_dataset(name, config or None, split=split, keep_in_memory=False)
    except Exception as error:  # the network and the files of a dataset raise many kinds of errors
        text = CLASS_NAME.sub("", " ".join(str(error).split()))
        reason = text[:300].rstrip(".") or "it cannot be read"
        raise CannotLoad(
            f"there is no file or folder {dataset}, and it cannot be loaded from the Hub or the"
            f" cache of datasets: {reason}; give a local path or org/name:config, or load it once"
            " with a network"
        ) from None
    return tuple(Path(file["filename"]) for file in loaded.cache_files)
