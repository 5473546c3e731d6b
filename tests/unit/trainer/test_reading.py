"""Rows are read from each kind of file and folder, one after the other, and a bad one is named by
file and line.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from autotune.trainer import reading, unpacking
from autotune.trainer.reading import BadDataset, find_files, read_rows

ROWS: list[dict[str, Any]] = [
    {"text": f"row {index}", "more": [{"a": index}]} for index in range(3)
]


def found(path: Path, split: str | None = None) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(path, split)]


def save(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(path)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "\n\n".join(map(json.dumps, ROWS))),
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps(ROWS, indent=3)),
        ("a.json", "\n".join(map(json.dumps, ROWS))),
        ("a.json", "\n".join(json.dumps(row, indent=3) for row in ROWS)),
    ],
)
def test_json_in_each_of_its_forms(
    tmp_path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    for size in (2**20, 5):  # a row is longer than a piece that is read
        monkeypatch.setattr(reading, "JSON_CHUNK", size)
        assert found(tmp_path / name) == ROWS


def test_a_table_by_columns_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": {"0": "one", "1": "two"}, "id": {"0": 1, "1": 2}}')
    with pytest.raises(BadDataset, match=r"a\.json:1: this is a table by columns.*records'"):
        found(tmp_path / "a.json")


def test_a_table_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion\n"one, and\ntwo",3\nfour,\n')
    assert list(read_rows(tmp_path / "a.csv")) == [
        (f"{tmp_path}/a.csv:3", {"prompt": "one, and\ntwo", "completion": "3"}),
        (f"{tmp_path}/a.csv:4", {"prompt": "four", "completion": None}),
    ]


def test_what_datasets_writes(tmp_path: Path) -> None:
    assert found(save(tmp_path / "a.parquet")) == ROWS
    assert found(save(tmp_path / "saved")) == ROWS
    import datasets

    tables = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[:1]),
    }
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "both")
    assert found(tmp_path / "both") == ROWS
    assert found(tmp_path / "both", "test") == ROWS[:1]
    with pytest.raises(BadDataset, match=r"both/validation"):
        found(tmp_path / "both", "validation")


def test_shards_in_a_folder(tmp_path: Path) -> None:
    for index in (1, 0):
        save(tmp_path / "data" / f"train-0000{index}-of-00002.parquet", ROWS[index : index + 1])
    (tmp_path / "data" / "validation-00000-of-00001.jsonl").write_text(json.dumps(ROWS[2]))
    (tmp_path / "README.md").write_text("no rows")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert found(tmp_path) == ROWS[:2]
    assert found(tmp_path, "validation") == ROWS[2:]
    assert len(find_files(tmp_path / "data")) == 2
    with pytest.raises(BadDataset, match="of split test"):
        found(tmp_path, "test")


def test_a_folder_without_names_of_splits_is_read_whole(tmp_path: Path) -> None:
    for index, row in enumerate(ROWS):
        (tmp_path / f"trained-{index}.jsonl").write_text(json.dumps(row))
    assert found(tmp_path) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"a": 1}\n\n{"a": \n',
            r"a\.jsonl:3: not JSON: the line ends before",
        ),
        ("a.jsonl", b'{"a" 1}\n', r"jsonl:1: not JSON: Expecting ':' delimiter at character 6$"),
        ("a.jsonl", b'{"a": "x', r"Unterminated string starting at character 7$"),
        ("a.jsonl", b'{"a": 1}\n\n\xff\n', r"a\.jsonl:3: not UTF-8: byte 0xff in position 1"),
        ("a.jsonl", b"null\n", r"a\.jsonl:1: not a JSON object"),
        ("a.json", b'[{"a": 1},\n\n {"a": ]', r"a\.json:3: not JSON: Expecting value$"),
        ("a.json", b'[{"a": 1},\n 5]', r"a\.json:2: not a JSON object"),
        ("a.json", b'[{"a": 1}', r"a\.json:1: not JSON"),
        ("a.json", b'[{"a": 1}]\n[{"a": 2}]\n', r"a\.json: text follows its array"),
        ("a.json", b'[{"a": 1}]x', r"a\.json: text follows its array"),
        ("a.json", b'\n[\n{"a": }]', r"a\.json:3: not JSON"),
        ("a.csv", b"text\none\ntwo,three\n", r"a\.csv:3: it has more cells"),
        ("a.csv", b'text\none\n"two\nthree\n', r"a\.csv:3: unexpected end of data"),
        (
            "a.jsonl",
            '{"text": "é"}\n'.encode("latin-1"),
            r"jsonl:1: not UTF-8: byte 0xe9",
        ),
        ("a.parquet", b"no parquet", "cannot read .*a.parquet"),
        ("a.arrow", b"no arrow", "cannot read .*a.arrow"),
        ("a.xlsx", b"", "the format of a.xlsx is none of .jsonl"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadDataset, match=message):
        found(tmp_path / name)


def test_a_file_whose_name_is_no_text_is_read(tmp_path: Path) -> None:
    save(tmp_path / "a.parquet").rename(tmp_path / "\udcff.parquet")
    assert found(tmp_path) == ROWS


def test_only_files_that_are_shown_are_read_and_none_is_skipped(tmp_path: Path) -> None:
    save(tmp_path / "train.parquet" / "part-0.parquet")  # as Spark writes it
    for name in (".ipynb_checkpoints/train-checkpoint.jsonl", "._train.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff")
    (tmp_path / "all").symlink_to(tmp_path)
    assert found(tmp_path) == ROWS
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(BadDataset, match=r"there is no file .*train\.jsonl"):
        found(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.jsonl").symlink_to("gone")
    with pytest.raises(BadDataset, match=r"there is no file .*train\.jsonl"):
        found(tmp_path)


@pytest.mark.parametrize(
    "state",
    [
        *(
            "{",
            "{}",
            "[]",
            '{"_data_files": [{}]}',
            "\xff",
            "[" * 10_000,
            '{"_data_files": [{"filename": 5}]}',
        ),
        *(
            f'{{"_data_files": [{{"filename": "{name}"}}]}}'
            for name in ("a.txt", "", "../a.arrow", "/a.arrow", "a/b.arrow")
        ),
    ],
)
def test_a_saved_dataset_that_is_damaged_is_named(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_bytes(state.encode("latin-1"))
    with pytest.raises(BadDataset, match=r"state\.json is not in the format of datasets"):
        found(tmp_path)


def test_what_is_no_dataset(tmp_path: Path) -> None:
    for path, split, message in (
        (tmp_path / "none.jsonl", None, "there is no file"),
        (tmp_path, None, "has no file of .jsonl"),
        (Path(__file__), None, "is none of"),
    ):
        with pytest.raises(BadDataset, match=message):
            found(path, split)
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(BadDataset, match="a single file, and has no split test"):
        found(tmp_path / "a.jsonl", "test")


def test_lines_are_counted_over_the_pieces_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first piece ends just before the end of the first line."""
    monkeypatch.setattr(reading, "JSON_CHUNK", 10)
    (tmp_path / "a.json").write_text('[{"a": 1},\n{"b": 2},\n\n5]')
    rows = read_rows(tmp_path / "a.json")
    assert [next(rows)[0].rpartition(":")[2] for _ in range(2)] == ["1", "2"]
    with pytest.raises(BadDataset, match=r"a\.json:4: not a JSON object"):
        next(rows)


def test_a_cell_may_be_long_and_have_any_ends_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text,more\r\n"one\r\ntwo",' + b"x" * 200_000 + b"\r\n")
    assert found(tmp_path / "a.csv") == [{"text": "one\r\ntwo", "more": "x" * 200_000}]


def test_rows_of_a_table_are_numbered(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet")
    assert [where for where, _ in read_rows(path)] == [
        f"{path}, row {number}" for number in (1, 2, 3)
    ]


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.jsonl").touch()
    monkeypatch.setitem(reading.READERS, ".jsonl", refuse)
    with pytest.raises(BadDataset, match=r"cannot read .*a\.jsonl: Permission denied"):
        found(tmp_path / "a.jsonl")


def test_a_compressed_table_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "a.parquet")
    monkeypatch.setattr(unpacking, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError,
        match=r"compressed with snappy is read with cramjam or pyarrow: pip install cramjam, or",
    ):
        found(path)
