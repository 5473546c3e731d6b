"""`autotune oom` with an error message, in each form in which a user can pass it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.cli.commands import studies
from autotune.core.errors import UsageError

MESSAGE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
ANSWER = "The GPU has no room for 2.00 GiB more."


@pytest.fixture
def stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Replace stdin by a pipe, in an empty directory; yields the end that a test writes to."""
    monkeypatch.chdir(tmp_path)
    reads, writes = os.pipe()
    with open(reads) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        yield writes


@pytest.mark.parametrize("argument", [MESSAGE, "run.log", "-", None])
def test_a_message_is_explained_in_each_form(
    stdin: int, capsys: pytest.CaptureFixture[str], argument: str | None
) -> None:
    Path("run.log").write_text(f"step 3: loss 2.1\n{MESSAGE}\n")
    os.write(stdin, MESSAGE.encode())
    os.close(stdin)
    studies.oom(argument)
    assert capsys.readouterr().out.startswith(ANSWER)


def test_stdin_can_be_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.log").write_text(MESSAGE)
    with open(tmp_path / "run.log") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        studies.oom(None)
    assert capsys.readouterr().out.startswith(ANSWER)


def test_a_silent_pipe_is_not_waited_for(stdin: int) -> None:
    with pytest.raises(UsageError, match="there is no database") as caught:
        studies.oom(None)
    assert "pass its message" in caught.value.remedy
    os.close(stdin)


def test_a_text_that_is_no_study_is_refused_as_a_text(stdin: int) -> None:
    with pytest.raises(UsageError, match="this text has no out-of-memory error") as caught:
        studies.oom("something else went wrong")
    assert "the whole message" in caught.value.remedy
    os.close(stdin)


@pytest.mark.parametrize("argument", ["run.yaml", "-"])
def test_a_text_without_an_error_is_refused(stdin: int, argument: str) -> None:
    Path("run.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\n")
    os.write(stdin, b"step 3: loss 2.1\n")
    os.close(stdin)
    with pytest.raises(UsageError, match="has no out-of-memory error") as caught:
        studies.oom(argument)
    assert "autotune check" in caught.value.remedy
