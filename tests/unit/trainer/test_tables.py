"""Corrupt Parquet and Arrow files end in an error, and small files do not become large rows."""

import datetime
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from autotune.trainer import tables
from autotune.trainer.parquet_footer import least_bytes
from autotune.trainer.reading import BadDataset, read_rows


def save_arrow(path: Path, *columns: Any, compression: str | None = None) -> Path:
    table = pyarrow.table(dict(zip("abcdefgh", columns, strict=False)))
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_stream(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    return path


def save_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd", **options)
    return path


def ended(path: Path) -> str:
    """Read a file in a forked process, which a signal may end.

    Return the error, or the signal's number.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            list(read_rows(path))
        except BadDataset as error:
            os.write(sender, str(error).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else text


def test_a_corrupt_offset_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """The texts of a column are found by offsets, here 0, 3 and 6."""
    path = save_arrow(tmp_path / "a.arrow", ["abc", "def"])
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 3, 6))
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(
        content.replace(offsets, offsets[:4] + b"\xff\xff\xff\x6f" + b"\xff\xff\xff\x7f")
    )
    assert ended(path).startswith(f"cannot read {path}: ")


def test_the_sizes_in_a_footer_are_those_of_pyarrow(tmp_path: Path) -> None:
    texts = pyarrow.array([str(number) for number in range(5000)])
    lists = pyarrow.array([[True, None], []] * 2500)
    path = save_parquet(
        tmp_path / "a.parquet", {"text": texts, "l": lists, "n": [1.5] * 5000}, row_group_size=999
    )
    about = pyarrow.parquet.read_metadata(path)
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(3)]
    expected = (
        sum(max(one.total_uncompressed_size, 8 * one.num_values) for one in columns) + 64 * 5000
    )
    assert least_bytes(path) == expected and len(groups) == 6


def test_a_damaged_footer_is_named(tmp_path: Path) -> None:
    path = save_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    content = path.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - size : -8]
    deep = b"\x1c" * 100_000
    for damage in (
        b"",
        footer[:50],
        b"\x49\x15" + footer,
        b"\xff" * 50,
        deep,
        footer.replace(b"\x15", b"\x1d"),
    ):
        path.write_bytes(
            content[: -8 - size] + damage + len(damage).to_bytes(4, "little") + b"PAR1"
        )
        with pytest.raises(BadDataset, match=r"cannot read .*a\.parquet: "):
            list(read_rows(path))
    path.write_bytes(content[:20] + (2**31).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(BadDataset, match="not a complete Parquet file"):
        list(read_rows(path))


def test_a_date_that_python_does_not_have_is_an_error(tmp_path: Path) -> None:
    far = pyarrow.array([2**62], pyarrow.int64()).cast(pyarrow.timestamp("s"))
    path = save_arrow(tmp_path / "a.arrow", ["x"], far)
    with pytest.raises(BadDataset, match=r"cannot read .*a\.arrow: "):
        list(read_rows(path))
    fine = save_arrow(tmp_path / "b.arrow", ["x"], [datetime.date(2026, 1, 1)])
    assert [row for _, row in read_rows(fine)] == [{"a": "x", "b": datetime.date(2026, 1, 1)}]


@pytest.mark.parametrize(
    "columns",
    [
        # 300 million absent values in one row took 2.2 GiB, and 787 bytes of a file.
        {
            "l": pyarrow.ListArray.from_arrays(
                pyarrow.array([0, 3 * 10**6], pyarrow.int32()), pyarrow.nulls(3 * 10**6)
            )
        },
        {"text": pyarrow.repeat("xy", 10**6)},  # many rows
        {"text": pyarrow.repeat("x" * 10**6, 300)},  # a dictionary with one long text
    ],
    ids=["values", "rows", "dictionary"],
)
def test_a_small_file_does_not_become_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any]
) -> None:
    monkeypatch.setattr(tables, "FREE_BYTES", 2**24)
    path = save_parquet(tmp_path / "a.parquet", columns)
    assert path.stat().st_size < 10_000
    found = []
    with pytest.raises(
        BadDataset, match=r"its [\d,]+ bytes grow to more than [\d,]+ MiB: store it as JSON lines"
    ):
        found.extend(read_rows(path))
    assert len(found) < tables.PART_ROWS


def test_rows_of_a_large_file_may_repeat_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "FREE_BYTES", 0)
    columns = {"system": ["x" * 500] * 1000, "text": [str(number) for number in range(1000)]}
    assert len(list(read_rows(save_parquet(tmp_path / "a.parquet", columns)))) == 1000
