"""Users' YAML fails with its line, hostile YAML fails at once, and files are written whole or not
at all.
"""

import os
import re
import stat
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from autotune.core import files
from autotune.core.errors import StorageError, UsageError
from autotune.core.files import (
    MAX_BYTES,
    MAX_VALUES,
    _line_of,
    load_yaml,
    read_regular,
    read_user_text,
    read_user_yaml,
    refuse_special_files,
    sync_directory,
    write_atomic,
    write_errors,
)


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size: int = 1
    sizes: list[int] = []


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = ""
    epochs: int = 1
    inner: Inner = Inner()
    parts: dict[str, Inner] = {}
    anything: object = None

    @model_validator(mode="after")
    def _whole(self, info: ValidationInfo) -> "Form":
        if self.epochs < 1:
            raise ValueError(f"epochs cannot be {self.epochs}")
        return self


def read(tmp_path: Path, text: str | bytes) -> Form:
    path = tmp_path / "a file.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_user_yaml(path, Form)


def failure(tmp_path: Path, text: str | bytes) -> str:
    """The message of the error, from after the directory."""
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert caught.value.remedy
    return str(caught.value).replace(f"{tmp_path}/a file.yaml", "FILE")


def bomb(levels: int = 8) -> str:
    """Nine values a level, each the whole level below: nine to the power of the levels once written
    out.
    """
    lines = ["anything:", "  - &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_a_file_is_read(tmp_path):
    form = read(
        tmp_path, "name: ä\nparts:\n  a: &a {size: 3}\n  b: *a\n  c: {<<: *a, sizes: [1, 2]}\n"
    )
    assert (form.name, form.epochs) == ("ä", 1)
    assert form.parts == {"a": Inner(size=3), "b": Inner(size=3), "c": Inner(size=3, sizes=[1, 2])}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nepoch: 1\n", "FILE:2: epoch: there is no such key; did you mean 'epochs'?"),
        ("# one\n\nname: a\nepochs: many\n", "FILE:4: epochs: Input should be a valid integer"),
        ("epochs: true\n", "FILE:1: epochs: Input should be a valid integer"),
        (
            "name: a\ninner:\n  size: 1\n  sises: []\n",
            "FILE:4: inner.sises: there is no such key",
        ),
        (
            "inner:\n  sizes:\n    - 1\n    - 2\n    - x\n",
            "FILE:5: inner.sizes.2: Input should be a valid integer",
        ),
        (
            "parts:\n  a: {}\n  b:\n    size: x\n",
            "FILE:4: parts.b.size: Input should be a valid integer",
        ),
        ("name: a\nepochs: -1\n", "FILE:2: the file: epochs cannot be -1"),
        (
            "name: a\ninner:\n  - 1\n",
            "FILE:2: inner: Input should be a valid dictionary or instance of Inner",
        ),
        ("", "FILE:1: the file: Input should be a valid dictionary or instance of Form"),
        ("just words", "FILE:1: the file: Input should be a valid dictionary or instance of Form"),
        ("- a\n- b\n", "FILE:1: the file: Input should be a valid dictionary or instance of Form"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, text, message):
    assert failure(tmp_path, text) == message


@pytest.mark.parametrize(
    ("loc", "line"),
    [
        ((), 2),
        (("x",), 2),
        (("a",), 2),
        (("a", 1), 4),
        (("a", 2), 2),
        (("a", "0"), 2),
        (("a", 0, "b"), 3),
        (("c",), 5),
    ],
)
def test_the_line_is_that_of_the_deepest_part_that_is_there(loc, line):
    assert _line_of(yaml.compose("\na:\n  - 1\n  - b\nc:\n  d: 1\n"), loc) == line
    assert _line_of(None, loc) == 1


def test_five_problems_at_most(tmp_path):
    found = failure(tmp_path, "".join(f"key{n}: 1\n" for n in range(9))).splitlines()
    assert [line.partition(" ")[0] for line in found] == [f"FILE:{n}:" for n in range(1, 6)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: a\ninner: [1\nepochs: 2\n",
            "FILE:3: not valid YAML: expected ',' or ']', but got ':'",
        ),
        (
            "name: a\n\tinner: 1\n",
            "FILE:2: not valid YAML: found character '\\t' that cannot start any token",
        ),
        ("name: a\n---\nname: b\n", "FILE:2: not valid YAML: but found another document"),
        ("name: a\nepochs: 1\nname: b\n", "FILE:3: not valid YAML: 'name' occurs twice"),
        ("parts:\n  a: {}\n  b: {}\n  a: {}\n", "FILE:4: not valid YAML: 'a' occurs twice"),
        ("name: a\n? [1]\n: b\n", "FILE:2: not valid YAML: found unhashable key"),
        ("name: a\nepochs: \x00\n", "FILE:2: not valid YAML: special characters are not allowed"),
        ("\nname: \x1b[31m\n", "FILE:2: not valid YAML: special characters are not allowed"),
        ("name: \x1b[31m\n", "FILE:1: not valid YAML: special characters are not allowed"),
        ("name: !!timestamp soon\n", "FILE: not valid YAML: a value does not match its YAML tag"),
        ("name: 2021-13-45\n", "FILE: not valid YAML: month must be in 1..12"),
        ("name: *nobody\n", "FILE:1: not valid YAML: found undefined alias 'nobody'"),
        ("0: []\n", "FILE:1: 0: Keys should be strings"),
        (b"\xff\xfe\x00", "cannot read FILE: it is not UTF-8 text"),
    ],
)
def test_what_is_not_yaml(tmp_path, text, message):
    assert failure(tmp_path, text) == message


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!mine"]
)
def test_no_object_is_ever_made(tmp_path, tag):
    message = failure(tmp_path, f'name: a\nanything: {tag} ["touch {tmp_path}/made"]\n')
    assert message.startswith(
        "FILE:2: not valid YAML: could not determine a constructor for the tag"
    )
    assert not (tmp_path / "made").exists()
    with pytest.raises(Exception, match="could not determine a constructor"):
        load_yaml(f"{tag} [a]")


def test_a_file_from_windows_is_read_without_its_byte_order_mark(tmp_path):
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfname: a\r\n")
    assert read_user_text(tmp_path / "file") == "name: a\r\n"
    (tmp_path / "file").write_bytes("name: a\n".encode("utf-16"))
    with pytest.raises(UsageError, match="it is not UTF-8 text") as raised:
        read_user_text(tmp_path / "file")
    assert raised.value.remedy == "save it as UTF-8, or check the path"


def test_an_alias_bomb_is_refused_unread(tmp_path):
    message = "FILE: not valid YAML: more than 10,000 values after its aliases are expanded"
    assert MAX_VALUES == 10_000
    assert failure(tmp_path, bomb()) == message
    assert failure(tmp_path, "anything: &a [*a]\n") == message
    assert failure(tmp_path, "anything: &a {b: {c: *a}}\n") == message
    assert len(read(tmp_path, bomb(levels=3)).anything) == 3  # 9 + 90 + 819 values are fine


def test_a_file_of_just_the_most_values_is_read(tmp_path):
    """Its mapping, its key and its list are values too."""
    assert len(read(tmp_path, f"anything: [{'x, ' * 9_997}]").anything) == 9_997
    assert "more than 10,000 values" in failure(tmp_path, f"anything: [{'x, ' * 9_998}]")


def test_an_alias_counts_as_what_it_stands_for(tmp_path, monkeypatch):
    """Twice a list of 47 words, a word, the list around them, the key and the mapping."""
    monkeypatch.setattr(files, "MAX_VALUES", 100)
    text = "anything: [&a [{}], *a{}]"
    assert len(read(tmp_path, text.format("x, " * 47, ", x")).anything) == 3
    assert "more than 100 values" in failure(tmp_path, text.format("x, " * 47, ", x, x"))


@pytest.mark.parametrize("text", ["[" * 3000, "anything: " + "{a: " * 3000 + "1" + "}" * 3000])
def test_deep_nesting_is_refused(tmp_path, text):
    assert failure(tmp_path, text) == "FILE: not valid YAML: nested too deeply"


def test_a_huge_number_is_refused(tmp_path):
    assert "Exceeds the limit" in failure(tmp_path, f"epochs: {'9' * 5000}\n")


def test_what_cannot_be_read(tmp_path):
    """A pipe without a writer, and a device without an end, are refused at once."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (MAX_BYTES + 1))
    reasons = {
        tmp_path / "nothing": "No such file or directory",
        tmp_path: "Is a directory",
        tmp_path / "pipe": "it is not a regular file",
        Path("/dev/zero"): "it is not a regular file",
        tmp_path / "large": "it has more than 1 MiB",
        Path("a\0b"): "embedded null byte",
    }
    for path, reason in reasons.items():
        with pytest.raises(
            UsageError, match=f"^cannot read {re.escape(str(path))}: {reason}$"
        ) as caught:
            read_user_yaml(path, Form)
        assert caught.value.remedy


def test_a_file_of_just_the_limit_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"#" * MAX_BYTES)
    assert read_user_text(tmp_path / "file") == "#" * MAX_BYTES
    (tmp_path / "file").write_bytes(b"123")
    assert read_regular(tmp_path / "file", 3) == b"123"
    with pytest.raises(OSError, match="more than"):
        read_regular(tmp_path / "file", 2)


def test_a_directory_with_a_pipe_is_refused(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link to nothing").symlink_to("nowhere")
    refuse_special_files(tmp_path)
    (tmp_path / "tokenizer_config.json").symlink_to("/dev/null")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is not a regular file"):
        refuse_special_files(tmp_path)


# --- writing


def test_a_folder_is_named_and_a_device_or_a_pipe_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", "..", "", str(tmp_path)):
        with pytest.raises(StorageError, match=r"cannot write .*: Is a directory"):
            write_atomic(Path(folder), "text")

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(pipe, "text")
        assert os.read(reader, 100) == b"text" and pipe.is_fifo()
    finally:
        os.close(reader)

    device = tmp_path / "device"
    device.symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"cannot write .*device: No space left on device"):
        write_atomic(device, "text")
    assert device.is_char_device() and sorted(tmp_path.iterdir()) == [device, pipe]


def test_write_atomic_replaces_whole_files_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "a'; echo foo" / "file.txt"
    write_atomic(path, "one\n")
    write_atomic(path, "zwei ä\n")
    assert path.read_text(encoding="utf-8") == "zwei ä\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_written_file_has_the_mode_that_the_umask_leaves(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        for options, expected in (({}, mode), ({"executable": True}, 0o777 & ~mask)):
            write_atomic(tmp_path / "file", "text", **options)
            assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == expected
    finally:
        os.umask(before)


def test_a_file_is_on_disk_before_it_has_its_name_and_its_name_before_we_go_on(
    tmp_path, monkeypatch
):
    """Otherwise a power cut could leave an empty file in the place of the old one."""
    path, events = tmp_path / "file", []
    sync, rename = os.fsync, os.replace

    def synced(handle):
        sync(handle)
        target = Path(os.readlink(f"/proc/self/fd/{handle}"))
        events.append("directory" if target == tmp_path else target.read_text())

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(
        os, "replace", lambda source, target: events.append("rename") or rename(source, target)
    )
    write_atomic(path, "whole\n")
    assert events == ["whole\n", "rename", "directory"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_atomic(path, "old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        StorageError, match=r"cannot write .*file\.txt: No space left on device"
    ) as caught:
        write_atomic(path, "new")
    assert "--out" in caught.value.remedy
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\udcff")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_a_file_that_cannot_be_opened_is_not_looked_for(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StorageError, match="Permission denied"):
        write_atomic(tmp_path / "file", "text")


def test_nothing_stays_open_after_a_directory_is_on_disk(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    sync_directory(tmp_path)
    sync_directory(tmp_path / "nowhere")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_in_the_way_of_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*/file/below: "):
        write_atomic(tmp_path / "file" / "below", "text")


def test_storage_errors_name_the_path_and_pass_the_rest_on(tmp_path):
    with (
        pytest.raises(StorageError, match="cannot write /some/where: boom"),
        write_errors(Path("/some/where")),
    ):
        raise OSError("boom")
    with pytest.raises(KeyError), write_errors(tmp_path):
        raise KeyError("mine")
