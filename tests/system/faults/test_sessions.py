"""Faults of the tuner: killed at each step, its database unreachable, locked or damaged, its disk
full.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.trial import TrialState
from sqlalchemy.engine import make_url

from autotune.core.errors import StorageError
from autotune.core.probe_types import ProbeRequest, ProbeResult, Rung
from autotune.study.storage.probe_store import ProbeStore, StoredProbe
from tests.helpers.outage import away, cut_off, make_tables
from tests.helpers.postgres import postgres_server
from tests.helpers.replay import machine
from tests.helpers.sessions import BASELINE, Session, Start, by_tokens, starter, states
from tests.system.faults.tuner import LAUNCHED, STEPS, TOTAL

HERE = Path(__file__).parent
RecordFault = Callable[..., None]


def tune(url: str, out: Path, step: str = "") -> subprocess.CompletedProcess[str]:
    out.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, str(HERE / "tuner.py"), url, str(out), step]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )


def rows_of(url: str) -> list[StoredProbe]:
    store = ProbeStore(url)
    try:
        return store.probes_of_study("one")
    finally:
        store.close()


def launches(out: Path) -> list[tuple[str, str]]:
    """Digest and rung of every probe so far."""
    return [tuple(json.loads(line)) for line in (out / LAUNCHED).read_text().splitlines()]


def num_lost(url: str, before: list[StoredProbe], launched: list[tuple[str, str]]) -> int:
    """How many results of `before` are not stored any more, or
    were measured again: launched since.
    """
    after = rows_of(url)
    known = {
        (row.result.request_digest, row.result.rung.value)
        for row in before
        if row.result.rung is Rung.FULL
    }
    return sum(row not in after for row in before) + len(known & set(launched))


def continued(url: str, out: Path, before: list[StoredProbe]) -> int:
    """Resume the study of a killed tuner to its end.

    Return the number of results lost or measured again.
    """
    begun = len(launches(out))
    ended = tune(url, out)
    assert ended.returncode == 0, ended.stderr
    trial_states = states(url)
    num_finished = sum(state in (TrialState.COMPLETE, TrialState.PRUNED) for state in trial_states)
    assert int(ended.stdout) == TOTAL == num_finished
    assert not {TrialState.RUNNING, TrialState.WAITING} & set(trial_states)
    assert json.loads((out / "summary.json").read_text())["winner"] is not None
    assert "</html>" in (out / "report.html").read_text()
    return num_lost(url, before, launches(out)[begun:])


def test_a_study_continues_after_the_tuner_is_killed_at_any_step(
    tmp_path: Path, database: str, record_fault: RecordFault
) -> None:
    """One study, whose tuner is killed at each step in turn: the next one goes on, and the last one
    ends.
    """
    out, before, begun, fault = tmp_path / "out", list[StoredProbe](), 0, ""
    for step in STEPS:
        killed = tune(database, out, step)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if fault:
            record_fault(
                fault, survived=True, lost=num_lost(database, before, launches(out)[begun:])
            )
        stored = rows_of(database)
        assert len(stored) > len(before) or step == "written part of the export"
        before, begun, fault = (
            stored,
            len(launches(out)),
            f"SIGKILL to the tuner once it has {step}",
        )
    record_fault(fault, survived=True, lost=continued(database, out, before))


def test_a_study_continues_after_a_full_disk(
    tmp_path: Path, tables: Path, record_fault: RecordFault
) -> None:
    """No file may grow beyond the size of the database: not the database, the outbox or the report.

    Then a bit more.
    """
    out, file = tmp_path / "out", tmp_path / "autotune.db"
    file.write_bytes(tables.read_bytes())
    url, size = f"sqlite:///{file}", file.stat().st_size
    for spare in (4096, 40_000):
        full = tune(url, out, str(size + spare))
        assert full.returncode == 1 and "StorageError: " in full.stderr.splitlines()[-1], (
            full.stderr
        )
    lost = continued(url, out, rows_of(url))
    record_fault("the disk is full", survived=True, lost=lost)


def test_a_study_continues_after_a_full_drive(
    tmp_path: Path, tables: Path, record_fault: RecordFault
) -> None:
    """A drive of 16 MiB with 64 KiB left: SQLite, the outbox and the report share it."""
    drive = tmp_path / "drive"
    drive.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", drive],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:  # a container may lack the rights
        pytest.skip(f"cannot mount a drive: {mounted.stderr.strip()}")
    try:
        out, ballast, url = drive / "out", drive / "ballast", f"sqlite:///{drive / 'autotune.db'}"
        (drive / "autotune.db").write_bytes(tables.read_bytes())
        ballast.write_bytes(bytes(shutil.disk_usage(drive).free - 65_536))
        full = tune(url, out)
        assert full.returncode == 1 and "StorageError: " in full.stderr.splitlines()[-1], (
            full.stderr
        )
        ballast.unlink()
        lost = continued(url, out, rows_of(url))
        record_fault("the drive is full", survived=True, lost=lost)
    finally:
        subprocess.run(["umount", "--lazy", drive], check=True)


# In one process with a ReplayProber: the database fails while the third probe runs

FEW = 5  # trials


def struck(act: Callable[[], None]) -> Callable[[ProbeRequest], ProbeResult]:
    fine, asked = machine(rate=by_tokens, limit_gib=100.0), [0]

    def answer(request: ProbeRequest) -> ProbeResult:
        asked[0] += 1
        if asked[0] == 3:
            act()
        return fine(request)

    return answer


def finished(session: Session, database: str) -> bool:
    session.study.run()
    session.study.confirm()
    trial_states = states(database)
    num_finished = sum(state in (TrialState.COMPLETE, TrialState.PRUNED) for state in trial_states)
    whole = (
        len(session.study.trials.rows) == num_finished == FEW
        and TrialState.RUNNING not in trial_states
    )
    return whole and session.summary().recipe is not None


def num_repeated(session: Session) -> int:
    """How many whole models were measured again."""
    asked = [request.digest for request in session.prober.requests if request.rung is Rung.FULL]
    return len(asked) - len(set(asked))


def test_a_result_survives_an_unreachable_database(
    start_anywhere: Start, database: str, record_fault: RecordFault
) -> None:
    outage = away(database)
    first = start_anywhere(struck(outage.__enter__), begin=[BASELINE], trials=FEW)
    with pytest.raises(StorageError, match="the database"):
        first.study.run()
    outage.__exit__(None, None, None)
    second = start_anywhere(trials=FEW)
    launched = {request.digest for request in first.prober.requests}
    survived = finished(second, database)
    again = launched & {
        request.digest for request in second.prober.requests if request.rung is Rung.FULL
    }
    record_fault(
        "the database is unreachable while a probe runs", survived=survived, lost=len(again)
    )


def test_a_short_outage_loses_nothing(
    start_anywhere: Start, database: str, record_fault: RecordFault
) -> None:
    def blink() -> None:
        with away(database):
            pass

    session = start_anywhere(struck(blink), begin=[BASELINE], trials=FEW)
    survived = finished(session, database)
    record_fault(
        "the database is unreachable for a moment while a probe runs",
        survived=survived,
        lost=num_repeated(session),
    )


@pytest.mark.server
def test_a_study_waits_for_the_server_to_come_back(
    start_on_server: Start, server: str, record_fault: RecordFault
) -> None:
    outage = away(server)

    def vanish() -> None:
        outage.__enter__()
        threading.Timer(2.5, outage.__exit__, (None, None, None)).start()

    session = start_on_server(struck(vanish), begin=[BASELINE], trials=FEW, waits_s=60.0)
    survived = finished(session, server)
    assert sum("cannot be reached, waiting for it" in line for line in session.said) == 1
    assert session.said.count("the database is back") == 1
    fault = "the database server is unreachable for some seconds, and the study waits"
    record_fault(fault, survived=survived, lost=num_repeated(session))


@pytest.mark.server
def test_closed_connections_are_opened_again(
    start_on_server: Start, server: str, record_fault: RecordFault
) -> None:
    session = start_on_server(struck(lambda: cut_off(server)), begin=[BASELINE], trials=FEW)
    survived = finished(session, server)
    record_fault("the server closes all connections", survived=survived, lost=num_repeated(session))


def test_a_study_waits_for_the_lock_of_another_process(
    start: Start, tmp_path: Path, record_fault: RecordFault
) -> None:
    file = tmp_path / "autotune.db"

    def lock() -> None:
        taken = threading.Event()

        def hold() -> None:
            connection = sqlite3.connect(file)
            connection.execute("BEGIN EXCLUSIVE")
            taken.set()
            time.sleep(1.0)
            connection.close()

        threading.Thread(target=hold).start()
        taken.wait()

    session = start(struck(lock), begin=[BASELINE], trials=FEW)
    survived = finished(session, f"sqlite:///{file}")
    record_fault(
        "the database is locked by another process", survived=survived, lost=num_repeated(session)
    )


def test_an_overwritten_database_is_an_error_and_a_copy_of_it_continues(
    start: Start, tmp_path: Path, record_fault: RecordFault
) -> None:
    file = tmp_path / "autotune.db"
    copies: list[bytes] = []

    def overwrite() -> None:
        copies.append(file.read_bytes())
        file.write_bytes(b"certainly not SQLite" * 500)

    session = start(struck(overwrite), begin=[BASELINE], trials=FEW)
    with pytest.raises(StorageError):
        session.study.run()
    file.write_bytes(copies[0])
    second = start(trials=FEW)
    survived = finished(second, f"sqlite:///{file}")
    launched = {request.digest for request in session.prober.requests}
    again = launched & {
        request.digest for request in second.prober.requests if request.rung is Rung.FULL
    }
    record_fault("the database is overwritten and restored", survived=survived, lost=len(again))


@pytest.fixture
def start_on_server(server: str, tmp_path: Path) -> Any:
    opened: list[Any] = []
    yield starter(server, tmp_path / "logs", opened)
    for resource in opened:
        resource.close()


def test_a_killed_server_restarts_with_all_results(
    tmp_path: Path,
    postgres: Callable[[], str],
    record_fault: RecordFault,
) -> None:
    """SIGKILL to all processes of PostgreSQL during a write."""
    with postgres_server() as own:
        url = own.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
        make_tables(url)
        opened: list[Any] = []
        start = starter(url, tmp_path / "logs", opened)

        def kill() -> None:
            pid = own.get_pid()
            assert pid is not None
            postmaster = psutil.Process(pid)
            postmaster.suspend()  # else it might start another process meanwhile
            processes = [postmaster, *postmaster.children(recursive=True)]
            for one in processes:
                one.kill()
            psutil.wait_procs(processes, timeout=30)

        first = start(struck(kill), begin=[BASELINE], trials=FEW, waits_s=2.0)
        with pytest.raises(StorageError):
            first.study.run()
        own.ensure_postgres_running()
        assert make_url(url).host == make_url(own.get_uri()).host
        second = start(trials=FEW)
        launched = {request.digest for request in first.prober.requests}
        survived = finished(second, url)
        again = launched & {
            request.digest for request in second.prober.requests if request.rung is Rung.FULL
        }
        for one in opened:
            one.close()
        record_fault(
            "SIGKILL to the database server, restarted", survived=survived, lost=len(again)
        )
