"""`autotune fleet` writes the files of a study's workers, and no password of its database."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.commands.studies import fleet
from autotune.core.errors import UsageError
from autotune.report.json_forms import form_of
from autotune.study.storage.study_record import start_record, update_record
from tests.helpers.sessions import Start, record_of
from tests.unit.export.test_clusters import loaded

CANARY = "s3cr3t-c4n4ry"


@pytest.fixture
def shared(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that writes the files of a study, which is taken to be on a server."""
    session = start(trials=1)
    session.study.run()
    start_record(session.search, record_of(session.study.trials.task, tmp_path))
    update_record(session.search, limits=session.study.trials.limits)
    url = f"sqlite:///{tmp_path / 'autotune.db'}"
    monkeypatch.setattr("autotune.api.studies.existing_url", lambda storage: url)
    server = f"postgresql+psycopg://me:{CANARY}@host/db"
    return lambda *formats, out=None, json_=False: fleet(
        "one", workers=3, format_=list(formats), out=out, storage=server, json_=json_
    )


def test_the_command_writes_the_files_and_no_password(
    shared: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared(out=tmp_path / "fleet")
    written = {path.name: path.read_text() for path in (tmp_path / "fleet").iterdir()}
    assert set(written) == {"workers.yaml", "workers.sky.yaml", "workers.sbatch"}
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "fleet" / name)
        for name in ("workers.yaml", "workers.sky.yaml", "workers.sbatch")
    ]
    assert not [name for name, text in written.items() if CANARY in text or "postgresql" in text]
    assert "#SBATCH --array=1-3\n" in written["workers.sbatch"]
    assert loaded(written["workers.yaml"])["spec"]["completions"] == 3


def test_the_files_as_json_have_their_form(
    shared: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared("slurm", out=tmp_path / "fleet", json_=True)
    form_of("fleet").validate_json(printed := capsys.readouterr().out)
    found = json.loads(printed)
    assert (found["study"], [Path(file).name for file in found["files"]]) == (
        "one",
        ["workers.sbatch"],
    )


def test_an_unknown_format_and_a_study_on_sqlite_are_refused(
    shared: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="there is no format 'swarm'"):
        shared("swarm")
    with pytest.raises(UsageError, match="an SQLite file, which other machines cannot share"):
        fleet("one", storage=f"sqlite:///{tmp_path / 'autotune.db'}")
