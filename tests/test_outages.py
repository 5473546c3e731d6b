"""A server that went away is waited for: by who may wait, once it had been reached, and until the user has enough."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from factories import FINGERPRINT, result
from outage import away, cut_off
from sessions import SPACE

from autotune.database import Outages, connected, engine_options, waiting_s
from autotune.errors import StorageError, UsageError
from autotune.leases import Leases, Worker
from autotune.result import Outcome
from autotune.search import Search
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


class BreaksOnce:
    """Cuts the session's connections off in the middle of one operation: after its first statement."""

    def __init__(self, url: str, engine: sa.Engine) -> None:
        self.url, self.struck = url, False
        sa.event.listen(engine, "after_cursor_execute", self)

    def __call__(self, *_: object) -> None:
        if not self.struck:
            self.struck = True
            cut_off(self.url)


Join = Callable[..., Leases]


@pytest.fixture
def join(server: str) -> Iterator[Join]:
    joined: list[Leases] = []

    def start(pid: int = 0, **options: Any) -> Leases:
        me = Worker.here("H200")
        joined.append(Leases(server, "one", replace(me, pid=pid or me.pid), **options))
        return joined[-1]

    yield start
    for one in joined:
        one._engine.dispose()


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_an_operation_that_is_cut_off_in_its_middle_is_run_again(server: str, join: Join, seconds: float) -> None:
    leases = join(outages=Outages(seconds=seconds))
    BreaksOnce(server, leases._engine)
    if seconds:
        assert leases.take("abc", 0)
        assert leases.taken() == {"abc"}
    else:
        with pytest.raises(StorageError) as failed:
            leases.take("abc", 0)
        assert failed.value.lost
        assert leases.taken() == set()


def test_what_was_done_before_it_was_cut_off_is_known_again(join: Join) -> None:
    """The lease is in the database, only that nobody was told so."""
    leases = join()
    assert leases.take("abc", 0) and leases.take("abc", 0) and not leases.take("abc", 1)
    assert not join(pid=1).take("abc", 0)


@pytest.mark.parametrize("act", ["ask", "tell", "remember", "repair"])
def test_optunas_operations_are_run_again_too(server: str, act: str) -> None:
    search = Search.create(server, "two", SPACE, seed=0, facts={}, outages=Outages(seconds=60.0))
    first = search.ask()
    BreaksOnce(server, search._storage.engine)
    if act == "ask":
        assert search.ask().number > first.number
    elif act == "tell":
        search.tell(first.number, Outcome.OK, 5.0, {"memory": -0.5})
        assert [(told.number, told.value) for told in search.finished()] == [(0, 5.0)]
    elif act == "remember":
        search.remember("phase", "searching")
        assert search.remembered("phase") == "searching"
    else:
        assert search.repair(lambda number: False) == 1 and search.is_waiting()
    search.close()


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
    engine = connected(f"{server}&connect_timeout=3")  # the URL's own counts
    with engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        assert driver.info.get_parameters()["connect_timeout"] == "3"
    engine.dispose()


def test_how_long_is_the_users_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waiting_s() == 300.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "90s")
    assert waiting_s() == 90.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "soon")
    with pytest.raises(UsageError, match="AUTOTUNE_DATABASE_WAIT"):
        waiting_s()
