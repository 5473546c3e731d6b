"""The commands about stored studies: what they print, and where they write."""

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest

from autotune.api import load_study
from autotune.cli.commands import studies
from autotune.cli.commands.run import resume
from autotune.core.errors import UsageError
from autotune.problem.study_spec import StudySpec
from autotune.report.oom import oom_report
from autotune.study.optimizer import Optimizer
from autotune.study.session import worker_folder
from autotune.study.storage.location import from_stored_directory, to_stored_directory
from autotune.study.storage.study_record import start_record
from tests.helpers.replay import machine
from tests.helpers.sessions import SPACE, Start, by_tokens, record_of, whole
from tests.unit.cli.test_console import Terminal

URL = "sqlite:///autotune.db"


@pytest.fixture
def folder(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a study of eight trials in
    it, of which some ran out of memory.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    session = whole(start, machine(limit_gib=2.2, rate=by_tokens), trials=8)
    out = to_stored_directory(tmp_path / "runs" / "one", URL)
    start_record(session.search, record_of(out=Path(out)))
    return tmp_path


def test_every_column_of_the_list_has_a_heading(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.list_all(URL)
    _, heading, _, row, _ = capsys.readouterr().out.splitlines()
    headings = ["study", "model", "device", "trials", "tokens/s", "running"]
    assert [cell.strip() for cell in heading.strip("┃").split("┃")] == headings
    assert [cell.strip() for cell in row.strip("│").split("│")][3:] == ["8", "1,020", "no"]


def test_oom_is_laid_out_on_a_terminal_and_markdown_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.oom("one", URL)
    text = oom_report(load_study("one", URL).summary).markdown()
    assert capsys.readouterr().out == text and text.startswith("# ") and "|---" in text
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    studies.oom("one", URL)
    shown = screen.getvalue()
    assert "ran out of memory" in shown and "Nearest configurations that fit" in shown
    assert not any(mark in shown for mark in ("# ", "|--", "`", "**"))


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
