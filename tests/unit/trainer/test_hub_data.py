"""Datasets of the Hub are read from the library's cache, by name, configuration and split."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.commands.train import _script_options
from autotune.problem.dataset import dataset_lengths, form_of
from autotune.trainer import hub_data
from autotune.trainer.reading import BadDataset, is_on_hub, read_rows
from tests.helpers.reported import run_command

PAIR = {"prompt": "two words", "completion": "an answer"}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 8}]}
ROWS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "default": {"train": [PAIR] * 3, "test": [PAIR]},
    "chats": {"validation": [CHAT] * 2},
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two configurations of org/name in the cache, as a download leaves them, and no network."""
    datasets = pytest.importorskip("datasets")
    from datasets.packaged_modules.json.json import Json
    from huggingface_hub import constants

    folder = tmp_path_factory.mktemp("hub")
    for config, splits in ROWS.items():
        files = {name: str(folder / f"{config}-{name}.jsonl") for name in splits}
        for name, rows in splits.items():
            Path(files[name]).write_text("\n".join(map(json.dumps, rows)))
        Json(
            cache_dir=str(folder / "cache"),
            dataset_name="name",
            config_name=config,
            config_id=config,
            hash="0123456789abcdef",
            data_files=files,
        ).download_and_prepare()
    (folder / "cache" / "name").rename(folder / "cache" / "org___name")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield
    hub_data.load_files.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rows_are_those_of_the_configuration_and_split() -> None:
    rows = list(read_rows(Path("org/name:default")))
    assert [row for _, row in rows] == [PAIR] * 3
    assert rows[2][0] == "org/name:default/name-train.arrow, row 3"
    assert [row for _, row in read_rows(Path("org/name:default"), "test")] == [PAIR]
    assert [row for _, row in read_rows(Path("org/name:chats"), "validation")] == [CHAT] * 2
    assert form_of(Path("org/name:chats"), "validation") == "messages"
    assert dataset_lengths(Path("org/name:default"), None).number == 3


def test_a_local_path_wins() -> None:
    assert is_on_hub(Path("org/name"))
    Path("org/name").mkdir(parents=True)
    Path("org/name/rows.jsonl").write_text('{"text": "local"}\n')
    assert not is_on_hub(Path("org/name"))
    assert [row for _, row in read_rows(Path("org/name"))] == [{"text": "local"}]


@pytest.mark.parametrize(
    "path", ["org/rows.jsonl", "name", "/org/name", "./../org/name", "a/b/c", "org/na me", "~/name"]
)
def test_a_missing_path_is_no_name(path: str) -> None:
    assert not is_on_hub(Path(path))
    with pytest.raises(BadDataset, match=r"there is no file|has no"):
        list(read_rows(Path(path)))


@pytest.mark.parametrize(
    ("name", "split", "reason"),
    [
        (
            "org/other",
            None,
            r"there is no file or folder org/other, and .*the Hub.*; give a local path or"
            r" org/name:c",
        ),
        (
            "org/name:default",
            "evaluation",
            r"Unknown split \"evaluation\"\. Should be one of \['train', 'test'\]",
        ),
        ("org/name:other", None, r"org/name:other.*other"),
        (
            "org/name:default",
            "train[:10%]",
            r"train\[:10%\] is not the name of a split: give --split NAME",
        ),
    ],
)
def test_a_missing_dataset_has_a_remedy(name: str, split: str | None, reason: str) -> None:
    with pytest.raises(BadDataset, match=reason) as refused:
        list(read_rows(Path(name), split))
    assert "Error" not in str(refused.value)


def test_without_the_library_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_data.load_files.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, _, errors = run_command("plan --model demo-3m --gpu a10 --dataset org/name")
    assert code == 3 and "pip install datasets" in errors


def test_the_exported_script_gets_the_name_and_not_a_path() -> None:
    assert _script_options(Path("org/name"), "test", None, None) == [
        "--dataset",
        "org/name",
        "--split",
        "test",
    ]
    Path("org/name").mkdir(parents=True)
    assert _script_options(Path("org/name"), None, None, None) == [
        "--dataset",
        str(Path("org/name").absolute()),
    ]


def test_commands_take_the_name() -> None:
    code, out, errors = run_command(
        "plan --json --model demo-3m --gpu a10 --dataset org/name:default --split train"
    )
    assert code == 0, errors
    assert json.loads(out)["workload"]["examples"] == 3
    code, _, errors = run_command("plan --model demo-3m --gpu a10 --dataset org/other")
    assert code == 2 and "  try: " in errors
