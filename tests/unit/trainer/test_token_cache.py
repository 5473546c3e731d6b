"""A dataset is tokenised once for each tokenizer, and again when anything has changed."""

import errno
import json
import os
import shutil
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from autotune.trainer import token_cache
from autotune.trainer.reading import BadDataset
from autotune.trainer.rows import StoredExamples
from autotune.trainer.token_cache import CannotKeep, cache_folder, read_about, tokenise
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
    assert [len(example) for example in StoredExamples(folder)] == [about["tokens"] // 3] * 3
    assert (
        sum(int((example >= 0).sum()) for example in StoredExamples(folder))
        == about["trained"]
        < about["tokens"]
    )
    monkeypatch.setattr(token_cache, "_write", None)  # it would be called again
    assert tokenise(data, tokenizer) == folder


def test_others_cannot_read_the_tokens(data: Path, tokenizer: Any) -> None:
    before = os.umask(0)
    try:
        folder = tokenise(data, tokenizer)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_another_file_tokenizer_or_loss_is_another_folder(data: Path, tokenizer: Any) -> None:
    folders = {tokenise(data, tokenizer), tokenise(data, tokenizer, loss_on="all")}
    tokenizer.chat_template = "{{ messages[0].content }}"
    folders.add(tokenise(data, tokenizer))
    tokenizer.add_tokens(["one 1"])
    folders.add(tokenise(data, tokenizer))
    data.write_text(data.read_text() + "\n" + json.dumps({"text": "more"}))
    folders.add(tokenise(data, tokenizer))
    assert len(folders) == 5 == len(list(cache_folder().iterdir()))


def test_nothing_is_left_of_what_failed(
    data: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.write_text('{"text": "fine"}\n{"words": 1}\n')
    with pytest.raises(BadDataset, match=r"data\.jsonl:2: an example needs"):
        tokenise(data, tokenizer)
    assert not list(cache_folder().iterdir())
    data.write_text("\n\n")
    with pytest.raises(BadDataset, match="has no examples"):
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
def test_a_damaged_folder_is_made_again(
    data: Path, tokenizer: Any, name: str, size: int | None
) -> None:
    folder = tokenise(data, tokenizer)
    content = (folder / name).read_bytes()
    if size is None:
        (folder / name).unlink()
    else:
        os.truncate(folder / name, size)
    assert tokenise(data, tokenizer) == folder
    assert (folder / name).read_bytes() == content
    assert list(cache_folder().iterdir()) == [folder]


def test_what_a_killed_process_left_is_removed_but_not_what_another_writes(
    data: Path, tokenizer: Any
) -> None:
    for name in ("tmpkilled", "tmpbusy"):
        (cache_folder() / name).mkdir(parents=True)
        (cache_folder() / name / "tokens").write_bytes(b"half")
        os.utime(cache_folder() / name, (0, 0))
    os.utime(cache_folder() / "tmpkilled" / "tokens", (0, 0))
    folder = tokenise(data, tokenizer)
    assert {*cache_folder().iterdir()} == {folder, cache_folder() / "tmpbusy"}


@pytest.mark.parametrize(
    ("name", "needed"),
    [("data.jsonl", 100), ("data.csv", 100), ("data.parquet", 400), ("data.ARROW", 150)],
)
def test_tokens_need_so_much_for_a_dataset_of_100_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, needed: int
) -> None:
    """They are written beside the place where they will be."""
    (tmp_path / name).write_bytes(b"x" * 100)
    written: list[Path] = []
    folder = tmp_path / "cache" / "tokens" / "key"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(token_cache, "_write", lambda made, *_: written.append(made))
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        asked: Any = (folder, tmp_path / name, [tmp_path / name], None, None, print)
        if free == needed:
            token_cache._make(*asked)
        else:
            with pytest.raises(OSError, match=r"and 0\.0 GiB are free"):
                token_cache._make(*asked)
    assert [made.parent for made in written] == [folder.parent] and folder.is_dir()


@pytest.mark.parametrize(("age_s", "is_left"), [(3500, True), (3700, False)])
def test_what_was_not_written_to_for_an_hour_is_removed(
    data: Path, tokenizer: Any, age_s: int, is_left: bool
) -> None:
    other = cache_folder() / "tmpother"
    other.mkdir(parents=True)
    os.utime(other, (time.time() - age_s,) * 2)
    tokenise(data, tokenizer)
    assert other.exists() is is_left


def test_progress_is_told_every_two_seconds(
    data: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is asked at the start, after each row, and when something was said."""
    said: list[str] = []
    monkeypatch.setattr(
        token_cache,
        "time",
        SimpleNamespace(time=time.time, monotonic=iter([10, 11.5, 12.5, 13, 14.9]).__next__),
    )
    tokenise(data, tokenizer, say=said.append)
    assert said == ["2 examples of data.jsonl"]


def test_tokens_are_kept_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for variable in ("", None):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if variable is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", variable)
        assert cache_folder() == Path("/home/me/.cache/autotune/tokens")


class Words:
    """A tokenizer of these words, fast or slow."""

    chat_template = None
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def __init__(self, *words: str, merges: str = "", is_fast: bool = False) -> None:
        self.words, self.is_fast = words, is_fast
        self.backend_tokenizer = (
            SimpleNamespace(to_str=lambda: f"{words} {merges}") if is_fast else None
        )

    def get_vocab(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}


def test_a_name_stands_for_all_that_the_tokens_depend_on(data: Path) -> None:
    """Of a fast tokenizer that is more than its words."""
    tokenizers = [
        Words("a"),
        Words("b"),
        Words("a", is_fast=True),
        Words("a", merges="m", is_fast=True),
    ]
    names = {token_cache._key([data], one, None) for one in tokenizers}
    assert len(names) == 4 and {len(name) for name in names} == {32}
    assert token_cache._key([data], Words("a"), None) in names
