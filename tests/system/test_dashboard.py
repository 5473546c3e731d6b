"""`autotune dashboard`: the real command with a real study. No request changes the database."""

import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
import sqlalchemy as sa

from autotune.api import load_study
from autotune.cli import app
from autotune.core.errors import StorageError, UsageError
from autotune.core.probe_types import Outcome
from autotune.report import dashboard, infos
from autotune.report.dashboard import LiveDashboard, gate
from autotune.study.optimizer import METRIC, Optimizer
from autotune.study.storage.database import read_only
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.storage.study_record import start_record
from tests.helpers.browser import Page, chromium, needs_chromium
from tests.helpers.factories import FINGERPRINT, result, summary
from tests.helpers.replay import machine
from tests.helpers.sessions import (
    SPACE,
    Session,
    Start,
    by_tokens,
    record_of,
    starter,
    subject_of,
    whole,
)

COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from"
    " autotune.cli.app import main; main()"
)


def finished(start: Start, out: Path) -> Session:
    """A study of eight trials with the record of the command. Some ran out of memory."""
    session = whole(start, machine(limit_gib=2.2, rate=by_tokens), trials=8)
    start_record(session.search, record_of(out=out))
    return session


# ---- the command itself


class Served:
    """A running `autotune dashboard`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        (folder / "tmp").mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-c",
            COMMAND,
            "dashboard",
            "--storage",
            "sqlite:///autotune.db",
            *flags,
        ]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": str(Path(app.__file__).parents[2]), "TMPDIR": str(folder / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = self._until("Ctrl-C")
        self.url = next(line for line in self.lines if line.startswith("http"))
        self.host = urlsplit(self.url).netloc

    def _until(self, last: str) -> list[str]:
        lines: list[str] = []
        while not (lines and last in lines[-1]):
            assert self._process.stdout and self._process.stderr
            line = self._process.stdout.readline()
            assert line, self._process.stderr.read()
            lines.append(line.strip())
        return lines

    def ask(
        self, path: str, method: str = "GET", body: Any = None, **headers: str
    ) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection(self.host, timeout=30)) as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def get(self, path: str) -> Any:
        status, body = self.ask(path)
        assert status == 200
        return json.loads(body)

    def end(self, how: signal.Signals) -> tuple[int, str]:
        """Send a signal and return (exit status, stderr)."""
        self._process.send_signal(how)
        _, errors = self._process.communicate(timeout=30)
        return self._process.returncode, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tables: Path) -> Path:
    """A folder with the database of a finished study."""
    folder = tmp_path_factory.mktemp("it's here & 100%")
    shutil.copy(tables, folder / "autotune.db")
    opened: list[Any] = []
    finished(
        starter(f"sqlite:///{folder / 'autotune.db'}", folder / "logs", opened),
        folder / "runs" / "one",
    )
    for resource in opened:
        resource.close()
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    served = Served(folder, "--port", "0")
    yield served
    served.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def study(served: Served) -> dict[str, Any]:
    data: dict[str, Any] = served.get("/api/studies/0")
    return data


def test_the_study_is_served_with_the_name_of_its_metric(
    served: Served, study: dict[str, Any]
) -> None:
    assert [one["study_name"] for one in served.get("/api/studies")["study_summaries"]] == ["one"]
    assert (study["directions"], study["objective_names"], len(study["trials"])) == (
        ["maximize"],
        [METRIC],
        8,
    )
    assert urlsplit(served.url).path == "/dashboard/studies/0"


def test_a_trial_that_does_not_fit_violates_a_constraint(study: dict[str, Any]) -> None:
    outcomes = [
        {one["key"]: one["value"] for one in trial["user_attrs"]}["outcome"]
        for trial in study["trials"]
    ]
    assert {"ok", "oom"} <= set(outcomes)
    for outcome, trial in zip(outcomes, study["trials"], strict=True):
        assert len(trial["constraints"]) == 2
        assert any(margin > 0 for margin in trial["constraints"]) is (outcome != "ok")


def test_every_trial_has_a_note(study: dict[str, Any]) -> None:
    notes = [trial["note"]["body"] for trial in study["trials"]]
    won = next(note for note in notes if note.startswith("**fits**, the winner [measured]"))
    assert "1,020 tokens/s, 1.50 GiB reserved, limit 2.20 GiB" in won
    ran_out = next(note for note in notes if note.startswith("**out of memory**"))
    assert "Reason: `out of memory in backward`" in ran_out
    assert "Log: `trial-" in ran_out
    answer, winner, *_ = study["note"]["body"].split("\n\n")
    assert "the full run takes " in answer.lower() and winner.startswith("**Winner** (trial ")


def test_the_figures_of_the_report_are_served(study: dict[str, Any]) -> None:
    drawn = {
        one["id"]: json.loads(one["graph_object"])["layout"]
        for one in study["plotly_graph_objects"]
    }
    assert {"scatter", "history", "memory"} <= drawn.keys()
    assert drawn["scatter"]["title"]["text"] == "Speed against memory"


def test_the_reports_can_be_opened(served: Served, study: dict[str, Any]) -> None:
    texts = {
        one["filename"]: served.ask(f"/artifacts/0/{one['artifact_id']}")
        for one in study["artifacts"]
    }
    assert texts.keys() == {"report.html", "oom_report.md"}
    assert all(status == 200 for status, _ in texts.values())
    assert texts["report.html"][1].startswith(b"<!doctype html>")
    assert texts["oom_report.md"][1].startswith(b"# ")


def test_the_dashboard_draws_the_shares_of_the_report_and_calls_the_winner_best() -> None:
    made = summary(trials=60)
    rows = tuple(
        replace(
            row,
            outcome=Outcome.OK,
            config=replace(row.config, lora_rank=4 + row.number),
            tokens_per_second=speed,
        )
        for row, speed in zip(made.trials, map(float, range(60)), strict=True)
    )
    # The last trial tries the winner's configuration again.
    rows = (*rows[:-1], replace(rows[-1], config=rows[7].config))
    assert made.recipe is not None
    winner = replace(made.recipe.winner, config=rows[7].config)
    study = replace(made, trials=rows, recipe=replace(made.recipe, winner=winner))
    trials = [
        optuna.trial.create_trial(value=float(row.number), user_attrs={"a": 1}) for row in rows
    ]
    app = LiveDashboard(lambda: ({}, trials), lambda: study, "out")
    shown = get(app, "/api/studies/0")
    assert [one["number"] for one in shown["best_trials"]] == [7]  # 59 has the largest value
    winners = [one["number"] for one in shown["trials"] if ", the winner" in one["note"]["body"]]
    assert winners == [7]
    (shares,) = get(app, "/api/studies/0/param_importances")["param_importances"]
    own = infos.importances(study)
    assert (
        {one["name"]: one["importance"] for one in shares}
        == {knob: one.share for knob, one in own.items()}
        != {}
    )


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/api/studies/0", {}),
        ("POST", "/api/studies", {"study_name": "new", "directions": ["minimize"]}),
        ("POST", "/api/studies/0/rename", {"study_name": "new"}),
        ("PUT", "/api/studies/0/note", {"version": 2, "body": "mine"}),
        ("PUT", "/api/studies/0/1/note", {"version": 2, "body": "mine"}),
        ("POST", "/api/trials/1/tell", {"state": "Fail"}),
        ("POST", "/api/artifacts/0", {"file": "data:text/plain;base64,", "filename": "a"}),
    ],
)
def test_nothing_can_be_written(
    served: Served, folder: Path, study: dict[str, Any], method: str, path: str, body: Any
) -> None:
    before = (folder / "autotune.db").read_bytes()
    status, answer = served.ask(path, method, body)
    assert (status, json.loads(answer)) == (405, {"reason": "this view is read-only"})
    assert served.get("/api/studies/0") == study
    assert (folder / "autotune.db").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["autotune.db", "tmp"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9", 200),
        ("[::1]:9", 200),
        ("example.com", 403),
        ("127.0.0.1.example.com", 403),
        ("", 403),
        ("[", 400),
        ("[::1", 400),
    ],
)
def test_a_foreign_host_name_is_refused(served: Served, host: str, status: int) -> None:
    assert served.ask("/api/studies", Host=host)[0] == status


@pytest.fixture(scope="module")
def page(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@needs_chromium
def test_a_browser_lists_the_study(served: Served, page: Page) -> None:
    page.open(f"http://{served.host}/dashboard/")
    assert "Direction: MAXIMIZE" in page.text("0. one")


@needs_chromium
def test_a_browser_shows_the_study_with_its_figures_and_reports(served: Served, page: Page) -> None:
    page.open(served.url)
    shown = page.text("one (id=0)", "Best Trial", "Speed against memory", "oom_report.md")
    assert "report.html" in shown
    assert "fingerprint" not in shown  # internal data is not shown
    assert page.run("document.querySelectorAll('.js-plotly-plot .point').length") > 8
    assert "1020" in shown.splitlines()  # the best speed, with few digits

    page.screen(390, 844, dark=True)
    page.wait("document.documentElement.scrollWidth === 390")
    filters = (
        "[...document.querySelectorAll('.js-plotly-plot')].map(p => getComputedStyle(p).filter)"
    )
    assert page.run(f"{filters}.filter(one => one.includes('invert')).length") >= 3
    page.screen(1200, 900)


@needs_chromium
def test_a_browser_shows_notes_and_violated_constraints(
    served: Served, page: Page, study: dict[str, Any]
) -> None:
    page.open(f"{served.url}/note")
    page.text("Winner (trial ", "1,020 tokens/s, 1.50 GiB, full run ", "[measured]")
    ran_out = next(
        one for one in study["trials"] if one["note"]["body"].startswith("**out of memory**")
    )
    page.open(f"{served.url}/trials?numbers={ran_out['number']}")
    page.text(
        f"Trial {ran_out['number']} (trial_id=",
        "out of memory [measured]",
        "Reason: out of memory in backward",
    )
    # The dashboard marks a trial that fits as the best, not one that ran out of memory.
    best = page.run(
        "[...document.querySelectorAll('li')].filter(one => one.innerText.includes('Best"
        " Trial')).length"
    )
    fits = [one["number"] for one in study["trials"] if max(one["constraints"]) <= 0]
    assert best == 1 and ran_out["number"] not in fits


@needs_chromium
@pytest.mark.parametrize(
    ("place", "ready", "refused"),
    [
        ("", "0. one", ("rename study", "delete study", "AddBoxIcon")),
        ("studies/0", "oom_report.md", ("delete artifact", "UploadFileIcon")),
        ("studies/0/note", "Winner (trial ", ("EditIcon",)),
        ("studies/0/trials", "Trial 0 (trial_id=", ("EditIcon",)),
    ],
)
def test_a_browser_shows_no_button_that_is_refused(
    served: Served, page: Page, place: str, ready: str, refused: tuple[str, ...]
) -> None:
    """They are on the page, so another version of optuna-dashboard that calls them otherwise fails
    here.
    """
    page.open(f"http://{served.host}/dashboard/{place}")
    page.text(ready)
    for name in refused:
        found = f'[...document.querySelectorAll(\'[aria-label="{name}"], [data-testid="{name}"]\')]'
        assert page.run(f"{found}.length") > 0, name
        assert page.run(f"{found}.filter(one => one.getClientRects().length).length") == 0, name
    assert (
        page.run("[...document.querySelectorAll('button')].filter(one => one.offsetParent).length")
        > 0
    )


@needs_chromium
def test_a_browser_cannot_write(
    served: Served, page: Page, folder: Path, study: dict[str, Any]
) -> None:
    page.open(f"http://{served.host}/dashboard/")
    page.text("0. one")
    before = (folder / "autotune.db").read_bytes()
    tried = (
        "fetch('/api/studies/0', {method: 'DELETE'}).then(async one => [one.status, (await"
        " one.json()).reason])"
    )
    assert page.run(tried) == [405, "this view is read-only"]
    page.open(f"http://{served.host}/dashboard/")
    page.text("0. one")
    assert served.get("/api/studies/0") == study and (folder / "autotune.db").read_bytes() == before


def test_a_taken_port_is_an_error_and_ctrl_c_ends_it(served: Served, folder: Path) -> None:
    port = str(urlsplit(served.url).port)
    other = Served(folder, "--port", port)
    own = urlsplit(other.url).port
    assert other.lines[0] == f"port {port} is taken, so the dashboard uses port {own}"
    assert f"ssh -N -L {own}:127.0.0.1:{own} {socket.gethostname()}" in other.lines[2]
    assert other.ask("/dashboard/studies/0")[0] == 200
    assert other.end(signal.SIGINT) == (130, "")
    assert list((folder / "tmp").iterdir()) == []


# ---- refusals


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["autotune", "dashboard", *flags])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.com"])
def test_a_public_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    code, message = refusal(monkeypatch, capsys, "--host", host, "--port", "8099")
    assert code == 2
    assert f"--host {host}: the dashboard asks for no password" in message
    assert "ssh -N -L 8099:127.0.0.1:8099 " in message


def test_a_missing_dashboard_package_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, message = refusal(monkeypatch, capsys)
    assert code == 3
    assert message.startswith(
        "error: optuna-dashboard is not installed\n  try: pip install optuna-dashboard\n"
    )


def test_the_dashboard_creates_no_database(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, message = refusal(monkeypatch, capsys, "--storage", f"sqlite:///{tmp_path}/no.db")
    assert code == 2
    assert "there is no database sqlite:///" in message
    assert list(tmp_path.iterdir()) == []


# ---- both kinds of database, in this process


def rows(url: str) -> dict[str, list[Any]]:
    """All rows of all tables of a database."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        names = sa.inspect(connection).get_table_names()
        contents = {
            name: sorted(map(repr, connection.execute(sa.text(f'SELECT * FROM "{name}"'))))
            for name in names
        }
    engine.dispose()
    return contents


def get(app: Any, path: str) -> Any:
    environ: dict[str, Any] = {"PATH_INFO": path, "HTTP_HOST": "localhost"}
    setup_testing_defaults(environ)
    return json.loads(b"".join(app(environ, lambda *_: None)))


def test_a_running_study_is_read_again(
    start_anywhere: Start, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, url = finished(start_anywhere, tmp_path / "one"), read_only(database)
    monkeypatch.setattr(dashboard, "REFRESH_S", 0.0)
    with closing(Optimizer.open(url, "one", SPACE)) as search:
        before = rows(database)
        app = gate(LiveDashboard(search.record, lambda: load_study("one", url).summary, "one"))
        assert len(get(app, "/api/studies/0")["trials"]) == 8
        assert rows(database) == before

        asked = running.search.ask()
        assert [trial["state"] for trial in get(app, "/api/studies/0")["trials"]][8:] == ["Running"]
        running.search.tell(
            asked.number, Outcome.CRASH, None, {"memory": 0.0, "health": 1.0}, reason="a `tick`"
        )
        last = get(app, "/api/studies/0")["trials"][8]
        assert (last["state"], last["constraints"]) == ("Pruned", [1.0, 0.0])
        assert last["note"]["body"].endswith("Reason: `` a `tick` ``")

        # a trial that ends between the two reads is not in the record yet
        attributes, trials = search.record()
        early = LiveDashboard(
            lambda: (attributes, trials[:5]), lambda: load_study("one", url).summary, "one"
        )
        assert len(get(early, "/api/studies/0")["trials"]) == 5


def test_the_last_copy_is_served_when_the_database_breaks(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finished(start, tmp_path)
    url = read_only(f"sqlite:///{tmp_path / 'autotune.db'}")
    monkeypatch.setattr(dashboard, "REFRESH_S", 0.0)
    with closing(Optimizer.open(url, "one", SPACE)) as search:
        app = LiveDashboard(search.record, lambda: load_study("one", url).summary, "one")
        (tmp_path / "autotune.db").write_text("certainly not SQLite" * 100)
        assert len(get(app, "/api/studies/0")["trials"]) == 8
    assert "cannot read the study again: the database" in capsys.readouterr().err


def test_a_read_only_database_refuses_writes(
    start_anywhere: Start, database: str, tmp_path: Path
) -> None:
    finished(start_anywhere, tmp_path)
    with closing(ProbeStore(read_only(database))) as store:
        assert store.probes_of_study("one")
        with pytest.raises(StorageError, match=r"read-?only"):
            store.add("one", None, result(subject_of().space.config({})), FINGERPRINT)
    with (
        closing(Optimizer.open(read_only(database), "one", SPACE)) as search,
        pytest.raises(StorageError, match=r"read-?only"),
    ):
        search.remember("mine", 1)


def test_a_read_only_url_keeps_its_options(tmp_path: Path) -> None:
    assert sa.make_url(
        read_only("postgresql+psycopg://me:pw@host/db?options=-c%20a%3Db")
    ).query == {"options": "-c a=b -c default_transaction_read_only=on"}
    assert "me:pw@host/db?" in read_only("postgresql+psycopg://me:pw@host/db")
    with pytest.raises(UsageError, match="there is no database sqlite://"):
        read_only("sqlite://")
