"""Results wait in a file while the database is unreachable and are stored afterwards, each once and
in order.
"""

import fcntl
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import StorageError
from autotune.study.storage.database import Outages
from autotune.study.storage.outbox import Outbox
from autotune.study.storage.probe_store import ProbeStore
from tests.helpers.factories import FINGERPRINT, result
from tests.helpers.outage import away


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(database: str, tmp_path: Path, messages: list[str]) -> Iterator[ProbeStore]:
    opened = ProbeStore(
        database, outbox=tmp_path / "outbox.jsonl", outages=Outages(messages.append)
    )
    yield opened
    opened.close()


def trials(store: ProbeStore) -> list[int | None]:
    return [row.trial for row in store.probes_of_study("one")]


def test_a_row_and_the_name_of_its_file_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, str]] = []

    def sync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append((path, path.read_text().strip() if path.is_file() else ""))

    monkeypatch.setattr("os.fsync", sync)
    Outbox(path=tmp_path / "outbox.jsonl").add({"a": 1})
    assert synced == [(tmp_path / "outbox.jsonl", '{"a": 1}'), (tmp_path, "")]


def test_a_full_disk_leaves_no_empty_file(tmp_path: Path) -> None:
    outbox = Outbox(path=tmp_path / "outbox.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*outbox\.jsonl: File too large"):
            outbox.add({"a": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_comes_while_the_file_is_emptied_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has opened the file, and waits for its lock."""
    outbox = Outbox(path=tmp_path / "outbox.jsonl")
    outbox.add({"a": 1})
    waits = threading.Event()
    lock = fcntl.flock

    def flock(file: Any, kind: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            waits.set()
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    other = threading.Thread(target=outbox.add, args=({"b": 2},))
    with outbox.drain() as rows:
        other.start()
        assert rows == [{"a": 1}] and waits.wait(10)
    other.join()
    with outbox.drain() as rows:
        assert rows == [{"b": 2}]
    assert list(tmp_path.iterdir()) == []


def test_results_measured_during_an_outage_are_stored_afterwards(
    store: ProbeStore, database: str, tmp_path: Path, messages: list[str]
) -> None:
    store.add("one", 0, result(), FINGERPRINT)
    with away(database):
        store.add("one", 1, result(), FINGERPRINT)
        store.add("one", None, result(), FINGERPRINT)
        with pytest.raises(StorageError):
            trials(store)
    assert len(messages) == 2 and all(
        "failed" in line and "outbox.jsonl" in line for line in messages
    )
    store.add("one", 2, result(), FINGERPRINT)
    assert trials(store) == [0, 1, None, 2]
    assert messages[2:] == ["2 results that waited for the database are stored in it now"]
    assert Outbox(path=tmp_path / "outbox.jsonl").is_empty()


def test_a_kept_result_is_stored_by_the_next_session_unless_it_is_discarded(
    store: ProbeStore, database: str, tmp_path: Path
) -> None:
    with away(database):
        store.add("one", 1, result(), FINGERPRINT)
    kept = store.keep("one", 2, result(), FINGERPRINT)
    store.discard(kept)
    store.keep("one", 3, result(), FINGERPRINT)

    again = ProbeStore(database, outbox=tmp_path / "outbox.jsonl")
    assert trials(again) == [1, 3]
    again.close()
    assert not (tmp_path / "outbox.jsonl").exists()


def test_the_next_session_stores_waiting_results(
    store: ProbeStore, database: str, tmp_path: Path
) -> None:
    with away(database):
        store.add("one", 7, result(), FINGERPRINT)
    again = ProbeStore(database, outbox=tmp_path / "outbox.jsonl")
    assert trials(again) == [7] == trials(store)
    again.close()


def test_a_row_that_the_database_has_is_not_written_twice(
    store: ProbeStore, database: str, tmp_path: Path
) -> None:
    """For example if the connection breaks at a commit, or a replay is killed before it empties the
    file.
    """
    path = tmp_path / "outbox.jsonl"
    with away(database):
        store.add("one", 7, result(), FINGERPRINT)
    waiting = path.read_text()
    assert trials(store) == [7]
    path.write_text(waiting)
    assert trials(store) == [7]


def test_an_incomplete_line_does_not_damage_others(
    store: ProbeStore, database: str, tmp_path: Path
) -> None:
    path = tmp_path / "outbox.jsonl"
    path.write_text('{"study": "one", "tri')
    with away(database):
        store.add("one", 7, result(), FINGERPRINT)
    assert trials(store) == [7]


def test_without_a_writable_outbox_the_error_is_raised(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ProbeStore(database)
    (tmp_path / "full").mkdir()
    full = ProbeStore(database, outbox=tmp_path / "full")
    with away(database):
        for store, named in ((plain, "the database"), (full, "cannot write")):
            with pytest.raises(StorageError, match=named):
                store.add("one", 7, result(), FINGERPRINT)
            store.close()


def test_waiting_rows_stay_if_the_replay_fails(tmp_path: Path) -> None:
    outbox = Outbox(path=tmp_path / "outbox.jsonl")
    outbox.add({"a": 1})
    with pytest.raises(ZeroDivisionError), outbox.drain():
        raise ZeroDivisionError
    with outbox.drain() as rows:
        assert rows == [{"a": 1}]
    assert outbox.is_empty()
