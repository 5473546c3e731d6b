"""A server that went away is waited for: by who may wait, once it had been reached, and until the user has enough."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from factories import FINGERPRINT, result
from outage import away

from autotune.database import Outages, connected, engine_options, waiting_s
from autotune.errors import StorageError, UsageError
from autotune.store import ProbeStore

pytestmark = pytest.mark.server


@pytest.fixture
def said() -> list[str]:
    return []


def test_who_reads_waits_and_goes_on(server: str, said: list[str]) -> None:
    with closing(ProbeStore(server, outages=Outages(said.append, seconds=60.0))) as store:
        store.add("one", 0, result(), FINGERPRINT)
        outage = away(server)
        outage.__enter__()
        threading.Timer(2.0, outage.__exit__, (None, None, None)).start()
        assert [row.trial for row in store.of_study("one")] == [0]
    assert len(said) == 2 and "waiting for it, 1 min at most" in said[0] and said[1] == "the database is back"


def test_a_result_is_safe_before_anybody_waits(server: str, tmp_path: Path, said: list[str]) -> None:
    spool = tmp_path / "spool.jsonl"
    with closing(ProbeStore(server, spool=spool, outages=Outages(said.append, seconds=60.0))) as store, away(server):
        store.add("one", 0, result(), FINGERPRINT)
        assert spool.stat().st_size
    assert "waits in" in said[-1] and not any("waiting for it" in line for line in said)


@pytest.mark.parametrize("stops", [True, False])
def test_it_ends_with_its_time_or_the_users_patience(server: str, said: list[str], stops: bool) -> None:
    outages = Outages(said.append, lambda: stops and len(said) > 0, seconds=60.0 if stops else 2.0)
    with (
        closing(ProbeStore(server, outages=outages)) as store,
        away(server),
        pytest.raises(StorageError, match="not currently accepting"),
    ):
        store.of_study("one")
    assert len(said) == 1


def test_what_was_never_reached_is_not_waited_for(server: str, said: list[str]) -> None:
    with away(server), pytest.raises(StorageError):
        ProbeStore(server, outages=Outages(said.append, seconds=60.0))
    assert said == []


def test_other_threads_do_not_wait(server: str, said: list[str]) -> None:
    """A heart beats again anyway, and must not hold up the end of its session."""
    failed: list[StorageError] = []
    with closing(ProbeStore(server, outages=Outages(said.append, seconds=60.0))) as store, away(server):

        def read() -> None:
            try:
                store.of_study("one")
            except StorageError as error:
                failed.append(error)

        other = threading.Thread(target=read)
        other.start()
        other.join(timeout=30)
    assert len(failed) == 1 and said == []


def test_a_host_that_vanishes_is_noticed(server: str) -> None:
    limits = engine_options(server)["connect_args"]
    assert limits == {"connect_timeout": 10, "tcp_user_timeout": 10_000}
    with closing(connected(f"{server}&connect_timeout=3").connect()) as connection:  # the URL's own counts
        assert connection.connection.dbapi_connection.info.get_parameters()["connect_timeout"] == "3"


def test_how_long_is_the_users_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waiting_s() == 300.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "90s")
    assert waiting_s() == 90.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "soon")
    with pytest.raises(UsageError, match="AUTOTUNE_DATABASE_WAIT"):
        waiting_s()
