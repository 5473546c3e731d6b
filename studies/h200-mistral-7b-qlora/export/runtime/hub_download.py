# -*- coding: utf-8 -*-
"""Downloads a dataset of the Hugging Face Hub without the library `datasets`, which takes 300 MB.

The Hub converts each public dataset to Parquet files. Its API lists them by configuration and
split: `/api/datasets/NAME/parquet`. Downloaded files stay in the user's cache, and are read from
there without a network.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from .cache_folders import user_cache

ENDPOINT = "https://huggingface.co"
LONGEST_S = 60.0  # the longest wait for an answer
LIST = "files.json"  # the list of a split's files in the cache; written after the files


class NotDownloaded(Exception):
    """Raised for a dataset that the Hub does not give, with the reason."""


def download(name: str, config: str, split: str) -> tuple[Path, ...]:
    """Return the Parquet files of a split from the cache, or download them.

    Without `config`, the dataset's only configuration is meant, or the one with the name default.
    Raises NotDownloaded.
    """
    folder = user_cache() / "datasets" / name.replace("/", "___") / (config or "_") / split
    listed = folder / LIST
    if not listed.is_file():
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false"):
            raise NotDownloaded("HF_HUB_OFFLINE is set")
        try:
            _fetch(name, config, split, folder)
        except HTTPError as error:
            error.close()
            raise NotDownloaded(f"{error}") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise NotDownloaded(str(reason)) from None
    return tuple(folder / file for file in json.loads(listed.read_text(encoding="utf-8")))


def _fetch(name: str, config: str, split: str, folder: Path) -> None:
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
    with _open(f"{endpoint}/api/datasets/{quote(name)}/parquet") as answer:
        urls = _split_urls(json.load(answer), config, split)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:05}.parquet" for number in range(len(urls))]
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        for file, url in zip(names, urls, strict=True):
            with _open(url) as answer, Path(unfinished, file).open("wb") as part:
                shutil.copyfileobj(answer, part)
            Path(unfinished, file).replace(folder / file)
    (folder / LIST).write_text(json.dumps(names), encoding="utf-8")


def _split_urls(listed: dict[str, dict[str, list[str]]], config: str, split: str) -> list[str]:
    """Return the addresses of a split's files. Raises NotDownloaded if there is no such split."""
    chosen = config or (next(iter(listed)) if len(listed) == 1 else "default")
    if chosen not in listed:
        raise NotDownloaded(f"its configurations are {', '.join(sorted(listed))}")
    if split not in listed[chosen]:
        raise NotDownloaded(f"its splits are {', '.join(sorted(listed[chosen]))}")
    return listed[chosen][split]


def _open(url: str) -> Any:
    """Open an address of the Hub. The user's token is not passed on to other servers."""
    if not url.startswith(("https://", "http://")):
        raise NotDownloaded(f"{url:.80} is not an address of the web")
    request = Request(url)  # noqa: S310 - the scheme was checked
    if token := os.environ.get("HF_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return urlopen(request, timeout=LONGEST_S)  # noqa: S310
