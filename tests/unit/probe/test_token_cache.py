"""A dataset is tokenised once for each tokenizer, and again when anything has changed."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from autotune.probe.runtime import token_cache
from autotune.probe.runtime.reading import BadDataset
from autotune.probe.runtime.rows import Stored
from autotune.probe.runtime.token_cache import CannotKeep, cache_folder, read_about, tokenise
from tests.helpers.tokenizers import CHATML, byte_level


@pytest.fixture
def tokenizer() -> Any:
    return byte_level(CHATML)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"prompt": "one", "completion": f" <s>{index}"} for index in range(3)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data.jsonl"


def test_tokens_are_made_once(data: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tokenise(data, tokenizer)
    about = read_about(folder)
    assert about["examples"] == 3
    assert [len(example) for example in Stored(folder)] == [about["tokens"] // 3] * 3
    assert sum(int((example >= 0).sum()) for example in Stored(folder)) == about["trained"] < about["tokens"]
    monkeypatch.setattr(token_cache, "_write", None)  # it would be called again
    assert tokenise(data, tokenizer) == folder


def test_another_file_tokenizer_or_loss_is_another_folder(data: Path, tokenizer: Any) -> None:
    folders = {tokenise(data, tokenizer), tokenise(data, tokenizer, loss_on="all")}
    tokenizer.chat_template = "{{ messages[0].content }}"
    folders.add(tokenise(data, tokenizer))
    tokenizer.add_tokens(["one 1"])
    folders.add(tokenise(data, tokenizer))
    data.write_text(data.read_text() + "\n" + json.dumps({"text": "more"}))
    folders.add(tokenise(data, tokenizer))
    assert len(folders) == 5 == len(list(cache_folder().iterdir()))


def test_nothing_is_left_of_what_failed(data: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data.write_text('{"text": "fine"}\n{"words": 1}\n')
    with pytest.raises(BadDataset, match=r"data\.jsonl:2: needs"):
        tokenise(data, tokenizer)
    assert not list(cache_folder().iterdir())
    data.write_text("\n\n")
    with pytest.raises(BadDataset, match="has no rows"):
        tokenise(data, tokenizer)
    data.write_text('{"text": "fine"}\n')
    usage = shutil.disk_usage(data)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3))
    with pytest.raises(CannotKeep, match=r"cache.* 0\.0 GiB are free \(XDG_CACHE_HOME"):
        tokenise(data, tokenizer)


def test_a_disk_that_is_full_in_mid_write_is_named_and_nothing_is_left(
    data: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path, *_: Any) -> None:
        (folder / "tokens").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_cache, "_write", fails)
    with pytest.raises(CannotKeep, match=r"cache.*: No space left on device"):
        tokenise(data, tokenizer)
    assert not list(cache_folder().iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(data))  # a file
    with pytest.raises(CannotKeep, match=r"data\.jsonl.*: Not a directory"):
        tokenise(data, tokenizer)


@pytest.mark.parametrize("name", ["tokens", "ends", "about.json"])
@pytest.mark.parametrize("size", [None, 0, 8])
def test_a_damaged_folder_is_made_again(data: Path, tokenizer: Any, name: str, size: int | None) -> None:
    folder = tokenise(data, tokenizer)
    content = (folder / name).read_bytes()
    if size is None:
        (folder / name).unlink()
    else:
        os.truncate(folder / name, size)
    assert tokenise(data, tokenizer) == folder
    assert (folder / name).read_bytes() == content
    assert list(cache_folder().iterdir()) == [folder]


def test_what_a_killed_process_left_is_removed_but_not_what_another_writes(data: Path, tokenizer: Any) -> None:
    for name in ("tmpkilled", "tmpbusy"):
        (cache_folder() / name).mkdir(parents=True)
        (cache_folder() / name / "tokens").write_bytes(b"half")
        os.utime(cache_folder() / name, (0, 0))
    os.utime(cache_folder() / "tmpkilled" / "tokens", (0, 0))
    folder = tokenise(data, tokenizer)
    assert {*cache_folder().iterdir()} == {folder, cache_folder() / "tmpbusy"}
