"""Corrupt Parquet and Arrow files end in an error, and small files do not become large rows."""

import datetime
import os
import random
from contextlib import suppress
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


def test_a_date_is_the_number_that_the_file_has(tmp_path: Path) -> None:
    """Python has no dates after the year 9999, and examples need none."""
    far = pyarrow.array([2**62], pyarrow.int64()).cast(pyarrow.timestamp("s"))
    day = pyarrow.array([datetime.date(1970, 1, 3)])
    expected = [{"a": "x", "b": 2**62, "c": 2}]
    saved = save_arrow(tmp_path / "a.arrow", ["x"], far, day)
    assert [row for _, row in read_rows(saved)] == expected
    far = far.cast(pyarrow.int64())
    saved = save_parquet(tmp_path / "a.parquet", {"a": ["x"], "b": far, "c": day})
    assert [row for _, row in read_rows(saved)] == expected


# --- the same rows as pyarrow


def texts(chance: random.Random) -> str:
    return "".join(chance.choice("abcé 漢\n") for _ in range(chance.randint(0, 40)))


def values_of(kind: pyarrow.DataType, chance: random.Random) -> Any:
    """A value of this type, or None."""
    if chance.random() < 0.15 or pyarrow.types.is_null(kind):
        return None
    if pyarrow.types.is_struct(kind):
        return {field.name: values_of(field.type, chance) for field in kind}
    if pyarrow.types.is_map(kind):
        return [(str(key), chance.randint(0, 9)) for key in range(chance.randint(0, 3))]
    if pyarrow.types.is_fixed_size_list(kind):
        return [chance.randint(0, 9) for _ in range(kind.list_size)]
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [values_of(kind.value_type, chance) for _ in range(chance.randint(0, 4))]
    if pyarrow.types.is_boolean(kind):
        return chance.random() < 0.5
    if pyarrow.types.is_floating(kind):
        return float(chance.randint(-99, 99))
    if pyarrow.types.is_integer(kind):
        return chance.randint(0, 2 ** min(kind.bit_width - 1, 60) - 1)
    if pyarrow.types.is_fixed_size_binary(kind):
        return chance.randbytes(kind.byte_width)
    if pyarrow.types.is_binary(kind):
        return chance.randbytes(chance.randint(0, 9))
    return texts(chance)


MESSAGES = pyarrow.list_(
    pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
)
KINDS = {
    "prompt": pyarrow.string(),
    "large": pyarrow.large_string(),
    "messages": MESSAGES,
    "long": pyarrow.int64(),
    "short": pyarrow.uint8(),
    "double": pyarrow.float64(),
    "float": pyarrow.float32(),
    "flag": pyarrow.bool_(),
    "bytes": pyarrow.binary(),
    "four": pyarrow.binary(4),
    "lists": pyarrow.list_(pyarrow.list_(pyarrow.int32())),
    "struct": pyarrow.struct([("a", pyarrow.struct([("b", pyarrow.list_(pyarrow.string()))]))]),
    "map": pyarrow.map_(pyarrow.string(), pyarrow.int64()),
    "two": pyarrow.list_(pyarrow.int32(), 2),
    "nothing": pyarrow.null(),
}
DELTAS = {"prompt": "DELTA_BYTE_ARRAY", "bytes": "DELTA_LENGTH_BYTE_ARRAY"}
DELTAS |= {"long": "DELTA_BINARY_PACKED", "flag": "RLE"}


def random_table(chance: random.Random) -> pyarrow.Table:
    names = chance.sample(list(KINDS), chance.randint(1, 6))
    rows = chance.choice([0, 1, 7, 100])
    return pyarrow.table(
        {
            name: pyarrow.array([values_of(KINDS[name], chance) for _ in range(rows)], KINDS[name])
            for name in names
        }
    )


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_parquet_are_those_of_pyarrow(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    table, path = random_table(chance), tmp_path / "a.parquet"
    with_dictionary = chance.random() < 0.5
    deltas = {name: DELTAS[name] for name in table.column_names if name in DELTAS}
    pyarrow.parquet.write_table(
        table,
        path,
        compression=chance.choice(["none", "snappy", "gzip", "zstd", "brotli", "lz4"]),
        data_page_version=chance.choice(["1.0", "2.0"]),
        use_dictionary=with_dictionary,
        column_encoding=None if with_dictionary or chance.random() < 0.5 else deltas,
        row_group_size=chance.choice([None, 30]),
        data_page_size=chance.choice([None, 200]),
        use_compliant_nested_type=chance.random() < 0.7,
    )
    expected = pyarrow.parquet.read_table(path).to_pylist()
    assert [row for _, row in read_rows(path)] == expected


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_arrow_are_those_of_pyarrow(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    table, path = random_table(chance), tmp_path / "a.arrow"
    if "prompt" in table.column_names:
        table = table.append_column("d", table["prompt"].dictionary_encode())
    if table.num_rows > 5 and chance.random() < 0.3:
        table = table.slice(3)
    make = chance.choice([pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
    options = pyarrow.ipc.IpcWriteOptions(compression=chance.choice([None, "lz4", "zstd"]))
    with make(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=chance.choice([None, 13]))
    assert [row for _, row in read_rows(path)] == table.to_pylist()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_damaged_table_ends_in_an_error(suffix: str, tmp_path: Path) -> None:
    chance = random.Random(4)
    rows = [{"messages": values_of(MESSAGES, chance), "n": number} for number in range(100)]
    table, path = pyarrow.Table.from_pylist(rows), tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        with suppress(BadDataset):
            assert len(list(read_rows(path))) < 10_000


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
    assert len(found) < 64


def test_rows_of_a_large_file_may_repeat_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "FREE_BYTES", 0)
    columns = {"system": ["x" * 500] * 1000, "text": [str(number) for number in range(1000)]}
    assert len(list(read_rows(save_parquet(tmp_path / "a.parquet", columns)))) == 1000
