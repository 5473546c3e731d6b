"""The commands about stored studies: what they print, and where they write."""

import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autotune.api import load_study
from autotune.catalog import resolve_model
from autotune.cli.commands import studies
from autotune.cli.commands.run import resume
from autotune.core.errors import UsageError
from autotune.problem.study_spec import StudySpec
from autotune.report.oom import oom_report
from autotune.study.optimizer import Optimizer
from autotune.study.session import worker_folder
from autotune.study.storage.location import from_stored_directory, to_stored_directory
from autotune.study.storage.study_record import StudyPhase, start_record, update_record
from tests.helpers.replay import machine
from tests.helpers.sessions import (
    SPACE,
    Start,
    by_tokens,
    record_of,
    starter,
    subject_of,
    whole,
)
from tests.unit.cli.test_console import Terminal

URL = "sqlite:///autotune.db"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tables: Path) -> Path:
    """A folder with a study of eight trials in it, of which some ran out of memory."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copy(tables, folder / "autotune.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        opened: list[Any] = []
        start = starter(f"sqlite:///{folder / 'autotune.db'}", folder / "logs", opened)
        session = whole(start, machine(limit_gib=2.2, rate=by_tokens), trials=8)
        out = to_stored_directory(folder / "runs" / "one", URL)
        start_record(session.search, record_of(out=Path(out)))
        for resource in opened:
            resource.close()
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, a copy of `finished`."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    return tmp_path


def test_every_column_of_the_list_has_a_heading(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.list_all(URL)
    answer, _, heading, _, row, _ = capsys.readouterr().out.splitlines()
    assert answer == ("1 study, 0 running; the newest is one: demo-3m on h200-sxm, 1,020 tokens/s")
    headings = ["study", "model", "device", "trials", "tokens/s", "running"]
    assert [cell.strip() for cell in heading.strip("┃").split("┃")] == headings
    assert [cell.strip() for cell in row.strip("│").split("│")][3:] == ["8", "1,020", "no"]


def test_oom_prints_the_answer_and_on_request_the_details(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.oom("one", storage=URL)
    report = oom_report(load_study("one", URL).summary)
    *answer, more, command = capsys.readouterr().out.splitlines()
    assert answer == [*report.answer()] and len(answer) <= 6
    assert re.match(r"1 of 8 trials ran out of memory: .* First change: \w+ \w+ → \w+\.", answer[0])
    assert more.endswith(":") and command == "  autotune oom one --details"

    studies.oom("one", details=True, storage=URL)
    text = report.markdown()
    assert capsys.readouterr().out == text and text.startswith("# 1 of 8 trials") and "|---" in text
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    studies.oom("one", details=True, storage=URL)
    shown = screen.getvalue()
    assert "ran out of memory" in shown and "Nearest configurations that fit" in shown
    assert not any(mark in shown for mark in ("# ", "|--", "`", "**"))


def test_status_begins_with_the_answer_and_calls_no_own_result_reused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.status("one", URL)
    answer, *lines = capsys.readouterr().out.splitlines()
    assert re.match(r"1\.\d times the speed of the baseline: the full run takes \d+ ", answer)
    assert "(demo-3m on h200-sxm)" in answer
    named = {line[:7].strip(): line[9:] for line in lines}
    assert [*named] == ["study", "trials", "time", "files", "best", "search"]
    assert named["search"].startswith("saves ")
    assert any(row.reused for row in load_study("one", URL).summary.trials)
    assert "reused" not in named["trials"]
    studies.status("one", URL, json_=True)
    assert json.loads(capsys.readouterr().out)["trials"]["reused"] > 0


@pytest.mark.parametrize("command", [studies.oom, studies.status, studies.list_all])
@pytest.mark.parametrize("columns", [40, 80, 100, 160])
def test_a_terminal_of_any_width_breaks_no_word(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: int,
    command: Callable[..., None],
) -> None:
    """Only a word that is wider than the terminal, such as a path, stands out."""
    command(storage=URL)
    words = [word for line in capsys.readouterr().out.splitlines() for word in line.split()]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    command(storage=URL)
    lines = screen.getvalue().splitlines()
    if command is studies.list_all:  # the rest is a table
        lines = list(itertools.takewhile(lambda line: "━" not in line, lines))
        words = words[: words.index("tokens/s") + 1]
    assert " ".join(lines).split() == words
    assert all(len(line) <= columns or len(line.split()) <= 2 for line in lines)


def test_two_studies_make_one_page(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    studies.report("one", "one", tmp_path / "page", URL, json_=True)
    (written,) = json.loads(capsys.readouterr().out)["files"]
    assert written == str(tmp_path / "page" / "against-one.html") and not (folder / "runs").exists()
    page = Path(written).read_text()
    assert (
        "<h1>No measurable difference in speed</h1>" in page
        and "The studies differ in more than" not in page
    )
    with pytest.raises(UsageError, match="no study"):
        studies.report("one", "another", None, URL)


def test_studies_of_different_models_are_not_compared(start: Start, folder: Path) -> None:
    other = subject_of(study="other", model=resolve_model("mistral-7b"))
    session = whole(start, machine(rate=by_tokens), trials=4, task=other)
    start_record(session.search, record_of(other, out=folder / "runs" / "other"))
    with pytest.raises(UsageError) as refused:
        studies.report("one", "other", None, URL)
    assert "the speeds of different models cannot be compared" in str(refused.value)
    assert "mistralai/Mistral-7B" in str(refused.value) and refused.value.exit_code == 2
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("phase", "named", "begins"),
    [
        (StudyPhase.ENDED, False, False),
        (StudyPhase.ENDED, True, True),
        (StudyPhase.STOPPED, False, True),
        (None, False, True),  # its process was killed
    ],
)
def test_a_finished_study_is_continued_only_by_name(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: StudyPhase | None,
    named: bool,
    begins: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    session = whole(start, machine(rate=by_tokens), trials=2)
    start_record(session.search, record_of(out=tmp_path / "one"))
    update_record(session.search, phase=phase)
    begun: list[StudySpec] = []
    monkeypatch.setattr("autotune.cli.commands.run.run_spec", lambda spec, **_: begun.append(spec))
    if begins:
        resume("one" if named else None, storage=URL)
    else:
        with pytest.raises(UsageError, match="'one', is finished") as refused:
            resume(storage=URL, budget="1h")
        assert "`autotune resume one --budget " in refused.value.remedy
    assert bool(begun) is begins


def test_a_study_that_was_copied_is_written_where_it_is_opened(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("another machine")
    shutil.copy(folder / "autotune.db", elsewhere / "autotune.db")
    url = f"sqlite:///{elsewhere}/autotune.db"
    assert load_study("one", url).report() == elsewhere / "runs" / "one" / "report.html"
    assert (elsewhere / "runs" / "one" / "export" / "train.py").is_file() and not (
        folder / "runs"
    ).exists()

    resumed: list[StudySpec] = []
    monkeypatch.setattr(
        "autotune.cli.commands.run.run_spec", lambda spec, **_: resumed.append(spec)
    )
    resume("one", storage=url)
    assert resumed[0].out == str(elsewhere / "runs" / "one")
    with closing(Optimizer.open(url, "one", SPACE)):
        assert (
            worker_folder(load_study("one", url).record, url, None).parent
            == elsewhere / "runs" / "one"
        )


def test_where_a_study_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its SQLite file it is found by its path from there; elsewhere where it was, or else
    under runs/.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    (tmp_path / "link").symlink_to("a b")
    beside, server = "sqlite:///a b/x.db", "postgresql+psycopg://me@host/db"
    read_only = "sqlite:///file:a%20b/x.db?mode=ro&uri=true"
    for out in (tmp_path / "a b" / "runs" / "one", tmp_path / "link" / "runs" / "one"):
        assert to_stored_directory(out, beside) == "runs/one"
    for url in (beside, read_only):
        assert from_stored_directory("runs/one", url, "one") == tmp_path / "a b" / "runs" / "one"
    assert (
        to_stored_directory(tmp_path / "out", beside)
        == to_stored_directory(tmp_path / "out", server)
        == str(tmp_path / "out")
    )
    for url in (beside, server):
        assert from_stored_directory(str(tmp_path / "a b"), url, "one") == tmp_path / "a b"
        assert (
            from_stored_directory("/no/such/machine/out", url, "one") == tmp_path / "runs" / "one"
        )


def test_the_copy_of_the_trainer_is_printed_as_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "export"
    files = [export / "train.py", export / "runtime" / "a.py", export / "runtime" / "b.py"]
    studies._print_files("one", files, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        str(export / "train.py"),
        str(export / "runtime"),
    ]
    studies._print_files("one", files, as_json=True)
    assert json.loads(capsys.readouterr().out)["files"] == list(map(str, files))
