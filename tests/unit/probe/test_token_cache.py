"""A dataset is tokenised once for each tokenizer, and again when anything has changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from autotune.probe.runtime import token_cache
from autotune.probe.runtime.reading import BadDataset
from autotune.probe.runtime.rows import Stored
from autotune.probe.runtime.token_cache import cache_folder, read_about, tokenise
from tests.helpers.tokenizers import CHATML, byte_level


@pytest.fixture
def tokenizer() -> Any:
    return byte_level(CHATML)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"prompt": "one", "completion": f" {index}"} for index in range(3)]
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
    with pytest.raises(BadDataset, match=r"0\.0 GiB in .*XDG_CACHE_HOME"):
        tokenise(data, tokenizer)
