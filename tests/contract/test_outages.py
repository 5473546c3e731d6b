"""Waiting for an unreachable server: who waits, only after a first connection, and until a limit or
a stop.
"""

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
def messages() -> list[str]:
    return []


def test_a_read_waits_for_the_server_and_continues(server: str, messages: list[str]) -> None:
    with closing(ProbeStore(server, outages=Outages(messages.append, seconds=60.0))) as store:
        store.add("one", 0, result(), FINGERPRINT)
        outage = away(server)
        outage.__enter__()
        threading.Timer(2.0, outage.__exit__, (None, None, None)).start()
        assert [row.trial for row in store.probes_of_study("one")] == [0]
    assert len(messages) == 2 and messages[1] == "the database is back"
    assert (
        "waiting for it (1 min at most): " in messages[0]
        and "not currently accepting connections" in messages[0]
    )


def test_a_result_is_in_the_outbox_before_any_wait(
    server: str, tmp_path: Path, messages: list[str]
) -> None:
    outbox = tmp_path / "outbox.jsonl"
    with (
        closing(
            ProbeStore(server, outbox=outbox, outages=Outages(messages.append, seconds=60.0))
        ) as store,
        away(server),
    ):
        store.add("one", 0, result(), FINGERPRINT)
        assert outbox.stat().st_size
    assert "waits in" in messages[-1] and not any("waiting for it" in line for line in messages)


@pytest.mark.parametrize("stops", [True, False])
def test_waiting_ends_at_its_limit_or_at_a_stop(
    server: str, messages: list[str], stops: bool
) -> None:
    outages = Outages(
        messages.append, lambda: stops and len(messages) > 0, seconds=60.0 if stops else 2.0
    )
    with (
        closing(ProbeStore(server, outages=outages)) as store,
        away(server),
        pytest.raises(StorageError, match="not currently accepting"),
    ):
        store.probes_of_study("one")
    assert len(messages) == 1


class BreaksOnce:
    """Close the connections of a session during an operation, before its n-th statement."""

    def __init__(self, url: str, engine: sa.Engine, statement: int) -> None:
        self.url, self.left = url, statement
        sa.event.listen(engine, "before_cursor_execute", self)

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if not self.left:
            cut_off(self.url)

    def struck(self) -> bool:
        """Whether it has closed them. It will not do so later."""
        struck, self.left = self.left <= 0, 0
        return struck


Join = Callable[..., Leases]


@pytest.fixture
def join(server: str) -> Iterator[Join]:
    joined: list[Leases] = []

    def start(pid: int = 0, **options: Any) -> Leases:
        me = Worker.this_process("H200")
        joined.append(Leases(server, "one", replace(me, pid=pid or me.pid), **options))
        return joined[-1]

    yield start
    for leases in joined:
        leases.close()


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_an_interrupted_operation_is_run_again(server: str, join: Join, seconds: float) -> None:
    leases = join(outages=Outages(seconds=seconds))
    BreaksOnce(server, leases._database.engine, 2)
    if seconds:
        assert leases.take("abc", 0)
        assert leases.leased_digests() == {"abc"}
    else:
        with pytest.raises(StorageError) as failed:
            leases.take("abc", 0)
        assert failed.value.lost
        assert leases.leased_digests() == set()


def test_taking_a_lease_twice_succeeds_for_its_owner(join: Join) -> None:
    """The lease may be in the database although its answer was lost."""
    leases = join()
    assert leases.take("abc", 0) and leases.take("abc", 0) and not leases.take("abc", 1)
    assert not join(pid=1).take("abc", 0)


@pytest.mark.parametrize("act", ["ask", "wanted", "tell", "give back"])
def test_optunas_operations_are_run_again_after_any_interruption(server: str, act: str) -> None:
    """They neither leave a trial without a worker nor lose a queued configuration."""
    wanted = SPACE.clip(BASELINE)
    for statement in itertools.count(1, 2):
        search = Optimizer.create(
            server, f"at {statement}", SPACE, seed=0, outages=Outages(seconds=60.0)
        )
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
            assert [(trial.number, trial.value) for trial in search.finished()] == [(0, 5.0)]
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
            nameless = [
                trial
                for trial in search._trials_in_state(TrialState.RUNNING)
                if "worker" not in trial.user_attrs
            ]
            assert len(nameless) <= 1  # `repair` puts it back into the queue
            assert nameless or asked.config == SPACE.config(wanted)
        named = {
            trial.number
            for trial in search._trials_in_state(TrialState.RUNNING)
            if "worker" in trial.user_attrs
        }
        assert named == open_, statement
        search.close()
        if not struck:  # the operation has fewer statements
            break
    assert statement > 10


def test_a_trial_withdrawn_during_ask_is_replaced(server: str) -> None:
    """Others withdraw the trial of a worker that was disconnected for a minute."""
    for statement in range(4, 27, 2):
        name = f"at {statement}"
        search = Optimizer.create(server, name, SPACE, seed=0)
        other = Optimizer.open(server, name, SPACE)
        calls = itertools.count(1)

        def strike(
            *_: object, calls: Iterator[int] = calls, at: int = statement, other: Optimizer = other
        ) -> None:
            if next(calls) == at:
                for one in other._trials_in_state(TrialState.RUNNING):
                    other.withdraw(one.number)

        sa.event.listen(search._storage.engine, "before_cursor_execute", strike)
        asked = search.ask(worker="me")
        assert (
            search._trial(asked.number).state is TrialState.RUNNING or statement > 20
        )  # the operation has ended by then
        search.close()
        other.close()


def test_a_server_that_was_never_reached_is_not_waited_for(
    server: str, messages: list[str]
) -> None:
    with away(server), pytest.raises(StorageError):
        ProbeStore(server, outages=Outages(messages.append, seconds=60.0))
    assert messages == []


@pytest.mark.parametrize("error", [StorageError("away"), Cancelled()])
def test_a_stop_during_a_wait_is_not_a_storage_error(error: Exception) -> None:
    """A preempted worker exits with 75, so that its job continues; 6 would end the job."""
    stop = StopToken()
    stop.request(15)
    with stop.suppress_cancelled():
        raise error
    with pytest.raises(StorageError), StopToken().suppress_cancelled():
        raise StorageError("away")


def test_a_server_reached_earlier_is_waited_for_at_the_first_connection(
    server: str, messages: list[str]
) -> None:
    """A worker reads the record of the study and then needs some seconds to start."""
    outage = away(server)
    outage.__enter__()
    threading.Timer(2.0, outage.__exit__, (None, None, None)).start()
    ProbeStore(server, outages=Outages(messages.append, seconds=60.0, reached=True)).close()
    assert messages[1:] == ["the database is back"]


def test_other_threads_do_not_wait(server: str, messages: list[str]) -> None:
    """A heartbeat repeats anyway and must not delay the end of its session."""
    failed: list[StorageError] = []
    with (
        closing(ProbeStore(server, outages=Outages(messages.append, seconds=60.0))) as store,
        away(server),
    ):

        def read() -> None:
            try:
                store.probes_of_study("one")
            except StorageError as error:
                failed.append(error)

        other = threading.Thread(target=read)
        other.start()
        other.join(timeout=30)
    assert len(failed) == 1 and messages == []


def test_connections_detect_a_vanished_host(server: str) -> None:
    limits = engine_options(server)["connect_args"]
    assert (
        limits["connect_timeout"] == 10
        and limits["tcp_user_timeout"] == 10_000
        and limits["keepalives_idle"] == 10
    )
    url = f"{server}&connect_timeout=3"  # the URL takes precedence
    with (
        closing(Database(url, Outages(), sa.MetaData())) as database,
        database.connect() as connection,
    ):
        driver: Any = connection.connection.dbapi_connection
        assert driver.info.get_parameters()["connect_timeout"] == "3"


def test_the_user_sets_the_waiting_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waiting_s() == 300.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "90s")
    assert waiting_s() == 90.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "0")
    assert waiting_s() == 0.0
    monkeypatch.setenv("AUTOTUNE_DATABASE_WAIT", "soon")
    with pytest.raises(UsageError, match="AUTOTUNE_DATABASE_WAIT"):
        waiting_s()
