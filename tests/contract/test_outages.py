"""A server that went away is waited for: by who may wait, once it had been reached, and until the user has enough."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from autotune.core.errors import Cancelled, StorageError, UsageError
from autotune.core.probe_types import Outcome
from autotune.core.process import StopToken
from autotune.study.optimizer import Optimizer
from autotune.study.storage.database import Database, Outages, engine_options, waiting_s
from autotune.study.storage.leases import Leases, Worker
from autotune.study.storage.probe_store import ProbeStore
from tests.helpers.factories import FINGERPRINT, result
from tests.helpers.outage import away, cut_off
from tests.helpers.sessions import BASELINE, SPACE

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
    assert len(said) == 2 and said[1] == "the database is back"
    assert "waiting for it (1 min at most): " in said[0] and "not currently accepting connections" in said[0]


def test_a_result_is_safe_before_anybody_waits(server: str, tmp_path: Path, said: list[str]) -> None:
    outbox = tmp_path / "outbox.jsonl"
    with closing(ProbeStore(server, outbox=outbox, outages=Outages(said.append, seconds=60.0))) as store, away(server):
        store.add("one", 0, result(), FINGERPRINT)
        assert outbox.stat().st_size
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
    """Cuts the session's connections off in the middle of one operation: before its n-th statement."""

    def __init__(self, url: str, engine: sa.Engine, statement: int) -> None:
        self.url, self.left = url, statement
        sa.event.listen(engine, "before_cursor_execute", self)

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if not self.left:
            cut_off(self.url)

    def struck(self) -> bool:
        """Whether it has. It will not any more."""
        struck, self.left = self.left <= 0, 0
        return struck


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
        one.close()


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_an_operation_that_is_cut_off_in_its_middle_is_run_again(server: str, join: Join, seconds: float) -> None:
    leases = join(outages=Outages(seconds=seconds))
    BreaksOnce(server, leases._database.engine, 2)
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


@pytest.mark.parametrize("act", ["ask", "wanted", "tell", "give back"])
def test_optunas_operations_are_run_again_wherever_they_break(server: str, act: str) -> None:
    """And leave neither a trial that nobody has, nor lose a choice that was queued."""
    wanted = SPACE.clip(BASELINE)
    for statement in itertools.count(1, 2):
        search = Optimizer.create(server, f"at {statement}", SPACE, seed=0, outages=Outages(seconds=60.0))
        open_: set[int] = set()
        if act in ("tell", "give back"):
            first = search.ask(worker="me")
            open_.add(first.number)
        elif act == "ask":
            search.enqueue(wanted)
        strike = BreaksOnce(server, search._storage.engine, statement)
        if act == "tell":
            assert search.tell(first.number, Outcome.OK, 5.0, {"memory": -0.5})
            struck = strike.struck()
            assert [(told.number, told.value) for told in search.finished()] == [(0, 5.0)]
            open_.clear()
        elif act == "give back":
            assert search.give_back(first.number)
            struck = strike.struck()
            assert search.is_waiting()
            open_.clear()
        else:
            asked = search.ask(wanted if act == "wanted" else None, worker="me")
            struck = strike.struck()
            open_.add(asked.number)
            nameless = [one for one in search._in_state(TrialState.RUNNING) if "worker" not in one.user_attrs]
            assert len(nameless) <= 1  # `repair` gives it back to the queue
            assert nameless or asked.config == SPACE.config(wanted)
        named = {one.number for one in search._in_state(TrialState.RUNNING) if "worker" in one.user_attrs}
        assert named == open_, statement
        search.close()
        if not struck:  # it has not so many statements
            break
    assert statement > 10


def test_a_trial_that_others_gave_back_meanwhile_is_asked_for_anew(server: str) -> None:
    """As they do of whoever was cut off for a minute."""
    for statement in range(4, 27, 2):
        name = f"at {statement}"
        search = Optimizer.create(server, name, SPACE, seed=0)
        other = Optimizer.open(server, name, SPACE)
        calls = itertools.count(1)

        def strike(*_: object, calls: Iterator[int] = calls, at: int = statement, other: Optimizer = other) -> None:
            if next(calls) == at:
                for one in other._in_state(TrialState.RUNNING):
                    other.withdraw(one.number)

        sa.event.listen(search._storage.engine, "before_cursor_execute", strike)
        asked = search.ask(worker="me")
        assert search._trial(asked.number).state is TrialState.RUNNING or statement > 20  # then nobody asks any more
        search.close()
        other.close()


def test_what_was_never_reached_is_not_waited_for(server: str, said: list[str]) -> None:
    with away(server), pytest.raises(StorageError):
        ProbeStore(server, outages=Outages(said.append, seconds=60.0))
    assert said == []


@pytest.mark.parametrize("error", [StorageError("away"), Cancelled()])
def test_who_is_stopped_while_waiting_was_stopped(error: Exception) -> None:
    """A preempted worker exits with 75, and its job goes on; with 6 it would end."""
    stop = StopToken()
    stop.request(15)
    with stop.ending():
        raise error
    with pytest.raises(StorageError), StopToken().ending():
        raise StorageError("away")


def test_what_was_reached_before_is_waited_for_from_the_first_connection_on(server: str, said: list[str]) -> None:
    """A worker reads what the study is about, and then takes some seconds to start."""
    outage = away(server)
    outage.__enter__()
    threading.Timer(2.0, outage.__exit__, (None, None, None)).start()
    ProbeStore(server, outages=Outages(said.append, seconds=60.0, reached=True)).close()
    assert said[1:] == ["the database is back"]


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
    assert limits["connect_timeout"] == 10 and limits["tcp_user_timeout"] == 10_000 and limits["keepalives_idle"] == 10
    url = f"{server}&connect_timeout=3"  # what the URL says counts
    with closing(Database(url, Outages(), sa.MetaData())) as database, database.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        assert driver.info.get_parameters()["connect_timeout"] == "3"


def test_how_long_is_the_users_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waiting_s() == 300.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "90s")
    assert waiting_s() == 90.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "0")
    assert waiting_s() == 0.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "soon")
    with pytest.raises(UsageError, match="AUTOTUNE_DATABASE_WAIT"):
        waiting_s()
