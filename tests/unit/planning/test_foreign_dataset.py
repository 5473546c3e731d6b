"""The dataset file that another tool's file names."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.planning.foreign_config import parse
from autotune.planning.foreign_dataset import absent_dataset, local_dataset, unread_datasets

NEEDED: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "m"},
    "axolotl": {"base_model": "m"},
    "llamafactory": {"model_name_or_path": "m", "do_train": True},
}


@pytest.mark.parametrize(
    ("tool", "keys", "found"),
    [
        ("trl", {"dataset_name": "a.jsonl"}, "a.jsonl"),
        ("trl", {"dataset_name": "absent.jsonl"}, None),
        ("trl", {"dataset_name": "x" * 5000}, None),
        ("trl", {}, None),
        ("trl", {"datasets": [{"path": "json", "data_files": "a.jsonl"}]}, "a.jsonl"),
        ("trl", {"datasets": [{"path": "json", "data_files": {"train": "a.jsonl"}}]}, "a.jsonl"),
        ("trl", {"datasets": [], "dataset_name": 5}, None),
        ("axolotl", {"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}, "a.jsonl"),
        ("axolotl", {"datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}, None),
        ("axolotl", {"datasets": [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}]}, None),
        ("llamafactory", {"dataset": "own"}, "data/b.jsonl"),
        ("llamafactory", {"dataset": "own", "dataset_dir": "other"}, None),
        ("llamafactory", {"dataset": "odd"}, None),
        ("llamafactory", {"dataset": "own,identity"}, None),
    ],
)
def test_the_only_file_beside_the_runs_own_is_found(
    tool: str, keys: dict[str, Any], found: str | None, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.jsonl", "data/b.jsonl"):
        (tmp_path / name).write_text("")
    known = {"own": {"file_name": "b.jsonl"}, "odd": ["b.jsonl"]}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(known))
    run = parse(NEEDED[tool] | keys, tool)
    expected = None if found is None else tmp_path / found
    assert local_dataset(tmp_path / "run.yaml", run) == expected


@pytest.mark.parametrize(
    ("tool", "keys", "absent"),
    [
        ("trl", {"dataset_name": "absent.jsonl"}, "absent.jsonl"),
        ("trl", {"dataset_name": "there.jsonl"}, ""),
        ("trl", {"dataset_name": "org/name"}, ""),
        ("trl", {"datasets": [{"path": "json", "data_files": "https://a.b/c.json"}]}, ""),
        ("axolotl", {"datasets": [{"path": "there.jsonl"}, {"path": "./absent"}]}, "./absent"),
        ("llamafactory", {"dataset": "own,identity"}, "data/absent.json"),
    ],
)
def test_a_dataset_file_that_is_absent_is_named_with_its_folders(
    tool: str, keys: dict[str, Any], absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    (folder / "data").mkdir(parents=True)
    (folder / "there.jsonl").write_text("")
    known = {"own": {"file_name": "absent.json"}}
    (folder / "data/dataset_info.json").write_text(json.dumps(known))
    said = absent_dataset(folder / "run.yaml", parse(NEEDED[tool] | keys, tool))
    assert (f"not found: {absent} in {folder} or in {tmp_path}. Pass" in said) is bool(absent)
    assert bool(said) is bool(absent)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"datasets": [{"path": "a.jsonl"}, {"path": "org/name"}]}, True),
        ({"datasets": [{"path": "a.jsonl"}]}, False),
        ({"datasets": [{"path": "org/name"}, {"path": "org/other"}]}, False),
    ],
)
def test_several_datasets_that_are_not_read_are_named(
    keys: dict[str, Any], said: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("")
    text = unread_datasets(tmp_path / "run.yaml", parse(NEEDED["axolotl"] | keys, "axolotl"))
    assert ("run.yaml names 2 datasets, which are not read together" in text) is said


def test_a_count_behind_a_name_limits_ms_swifts_examples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    names = ["a.jsonl#300", "org/name:subset#200"]
    swift = NEEDED["trl"] | {"ms-swift": True}
    assert parse(swift | {"dataset_name": names}, "trl").max_examples == 500
    assert parse(swift | {"dataset_name": [*names, "org/all"]}, "trl").max_examples is None
    assert parse(NEEDED["trl"] | {"dataset_name": names[0]}, "trl").max_examples is None
    one = parse(swift | {"dataset_name": names[:1]}, "trl")
    assert local_dataset(tmp_path / "run.sh", one) == tmp_path / "a.jsonl"


def test_a_broken_list_of_datasets_names_no_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text("{")
    run = parse(NEEDED["llamafactory"] | {"dataset": "own"}, "llamafactory")
    assert local_dataset(tmp_path / "run.yaml", run) is None
