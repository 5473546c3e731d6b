"""The workers of a study: exclusive leases, heartbeats, and lost workers."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.schema import CreateTable

from autotune.study.storage import leases
from autotune.study.storage.leases import Leases, Worker
from autotune.study.storage.optuna_storage import read_record
from autotune.study.storage.probe_store import ProbeStore

ELSEWHERE = Worker(host="other", realm="another boot", pid=1, started=1, device="NVIDIA H200")
Join = Callable[..., Leases]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def join(database: str, clock: Clock) -> Iterator[Join]:
    opened: list[Leases] = []

    def start(me: Worker, study: str = "one") -> Leases:
        made = Leases(database, study, me, clock=clock)
        made._beat()
        opened.append(made)
        return made

    yield start
    for resource in opened:
        resource.close()


def far(number: int) -> Worker:
    return replace(ELSEWHERE, pid=number)


def test_only_one_worker_takes_a_configuration(join: Join) -> None:
    first, second = join(far(1)), join(far(2))
    assert first.take("aa", 1) and not second.take("aa", 2) and not first.take("aa", 3)
    assert second.take("bb", 4)
    assert first.leased_digests() == second.leased_digests() == {"aa", "bb"}
    second.drop("aa")  # not its own lease
    assert not second.take("aa", 5)
    first.drop("aa")
    assert second.take("aa", 6)


def test_studies_have_separate_leases(join: Join) -> None:
    first, other = join(far(1)), join(far(2), "two")
    assert first.take("aa", 1) and other.take("aa", 1)
    assert set(first.workers()) == {first.name} and other.leased_digests() == {"aa"}


def test_ahead_counts_earlier_leases(join: Join) -> None:
    first, second = join(far(1)), join(far(2))
    for name, (worker, number) in {"aa": (first, 7), "bb": (second, 5), "cc": (first, 6)}.items():
        assert worker.take(name, number)
    assert [first.count_ahead(name) for name in ("aa", "bb", "cc")] == [0, 1, 2]
    first.drop("aa")
    assert second.count_ahead("cc") == 1


def test_leases_of_another_study_count_nowhere(join: Join) -> None:
    """Even if they are leases of the same worker and the same configuration."""
    first, other = join(far(0)), join(far(0), "two")
    assert first.take("aa", 1) and other.take("bb", 1) and other.take("aa", 2)
    assert first.take("cc", 2)
    assert (first.count_ahead("cc"), other.count_ahead("aa")) == (1, 1)
    assert first.leased_digests() == {"aa", "cc"} and other.leased_digests() == {"aa", "bb"}
    other.drop("aa")
    assert first.leased_digests() == {"aa", "cc"}


def test_one_of_many_concurrent_workers_gets_the_lease(join: Join) -> None:
    coordinators = [join(far(number)) for number in range(6)]
    taken: list[bool] = []
    threads = [
        threading.Thread(target=lambda one=one: taken.append(one.take("aa", 1)))
        for one in coordinators
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False] * 5 + [True]


def advance(clock: Clock, seconds: float, *beating: Leases) -> None:
    """Advance the clock while these workers send heartbeats."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(clock.now + leases.BEAT_S, end)
        for worker in beating:
            worker._beat()


def test_a_remote_worker_counts_as_lost_after_its_heartbeat_stops(join: Join, clock: Clock) -> None:
    mine, theirs = join(far(1)), join(far(2))
    assert theirs.take("aa", 1) and set(mine.workers()) == {mine.name, theirs.name}
    for _ in range(3):
        advance(clock, 0.9 * leases.LOST_S, mine, theirs)
        assert set(mine.workers()) == {mine.name, theirs.name}
    advance(clock, 0.9 * leases.LOST_S, mine)
    assert theirs.name in mine.workers()
    advance(clock, 0.2 * leases.LOST_S, mine)
    assert set(mine.workers()) == {mine.name}
    assert mine.take("aa", 2)  # its leases are free
    theirs._beat()  # it was only suspended
    assert set(mine.workers()) == {mine.name, theirs.name}


@pytest.mark.parametrize("beats_before", [False, True])
@pytest.mark.parametrize("beats_after", [False, True])
def test_after_a_pause_of_its_own_a_worker_counts_silence_from_zero(
    join: Join, clock: Clock, beats_before: bool, beats_after: bool
) -> None:
    """The database was unreachable or the process was suspended, so that all counters stood still,
    its own too.
    """
    mine, theirs = join(far(1)), join(far(2))
    assert theirs.take("aa", 1) and set(mine.workers()) == {mine.name, theirs.name}
    if beats_before:  # between its last read and the outage
        advance(clock, leases.BEAT_S, mine)
    advance(clock, 10 * leases.LOST_S)
    if beats_after:  # the other worker has not beaten yet
        mine._beat()
    assert set(mine.workers()) == {mine.name, theirs.name} and mine.leased_digests() == {"aa"}
    mine._beat()
    assert theirs.name in mine.workers()  # counting starts again now
    advance(clock, 0.9 * leases.LOST_S, mine)
    assert theirs.name in mine.workers()
    advance(clock, 0.2 * leases.LOST_S, mine)
    assert set(mine.workers()) == {mine.name} and mine.leased_digests() == set()


@pytest.mark.parametrize("seconds", [59.0, 60.0])
def test_a_minute_of_silence_is_the_loss_of_a_worker(
    join: Join, clock: Clock, seconds: float
) -> None:
    mine, theirs = join(far(1)), join(far(2))
    mine.workers()
    advance(clock, seconds, mine)
    assert (theirs.name in mine.workers()) is (seconds < 60)


@pytest.mark.parametrize("pause_s", [10.0, 10.5])
@pytest.mark.parametrize("beats_after", [False, True])
def test_two_missed_heartbeats_of_its_own_are_no_pause(
    join: Join, clock: Clock, pause_s: float, beats_after: bool
) -> None:
    mine, theirs = join(far(1)), join(far(2))
    mine.workers()
    advance(clock, 55.0, mine)
    advance(clock, pause_s)
    if beats_after:
        mine._beat()
    assert (theirs.name in mine.workers()) is (pause_s > 10)


def test_a_worker_that_leaves_takes_only_what_is_its_own(join: Join) -> None:
    mine, theirs, other = join(far(1)), join(far(2)), join(far(2), "two")
    assert mine.take("aa", 1) and theirs.take("bb", 2) and other.take("cc", 1)
    mine.forget(theirs.name)
    assert (
        mine.leased_digests() == {"aa"}
        and set(other.workers()) == {other.name}
        and other.leased_digests() == {"cc"}
    )
    mine.clear()
    assert (
        mine.leased_digests() == set()
        and set(other.workers()) == {other.name}
        and other.leased_digests() == {"cc"}
    )


def test_only_heartbeats_tell_that_workers_of_other_hosts_are_still_running(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, said, waited = Worker.this_process("cpu"), list[str](), list[float]()
    mine, local = join(me), join(replace(me, host="by another name"))

    def wait(seconds: float) -> None:
        waited.append(seconds)
        beating._beat()
        mine.forget(leaving.name)

    monkeypatch.setattr("time.sleep", wait)
    assert mine.confirmed_others(said.append) == {local.name: local._me}
    assert said == [] and waited == []  # nobody needs to be waited for
    beating, silent, leaving = join(far(2)), join(far(3)), join(far(4))
    assert set(mine.workers()) == {each.name for each in (mine, local, beating, silent, leaving)}
    assert mine.confirmed_others(said.append) == {local.name: local._me, beating.name: beating._me}
    assert waited == [12.5] and said == [
        "checking for 12 s whether workers of other hosts are still running"
    ]


def test_alone_everything_is_free() -> None:
    alone = leases.SingleWorker()
    assert alone.take("aa", 1) and alone.take("aa", 2)
    alone.drop("aa")
    assert (alone.count_ahead("aa"), alone.leased_digests(), tuple(alone.workers())) == (
        0,
        set(),
        (),
    )


def test_the_tables_are_those_of_earlier_versions() -> None:
    """A study that was begun with them is continued, and SQLite would take other columns in
    silence.
    """
    workers, taken = (
        " ".join(str(CreateTable(table)).split()) for table in (leases._workers, leases._leases)
    )
    assert workers == (
        "CREATE TABLE autotune_workers ( study VARCHAR(255) NOT NULL, name VARCHAR(255) NOT NULL, "
        "beats INTEGER NOT NULL, about TEXT NOT NULL, PRIMARY KEY (study, name) )"
    )
    assert taken == (
        "CREATE TABLE autotune_leases ( id INTEGER NOT NULL, study VARCHAR(255) NOT NULL, "
        "config VARCHAR(16) NOT NULL, trial INTEGER NOT NULL, worker VARCHAR(255) NOT NULL, PRIMARY"
        " KEY (id), "
        "UNIQUE (study, config) )"
    )


def test_leases_of_an_unregistered_worker_are_free(join: Join) -> None:
    mine, theirs = join(far(1)), join(far(2))
    mine.forget(theirs.name)
    assert theirs.take("aa", 1)  # it wakes up and joins again with this call
    assert set(mine.workers()) == {mine.name, theirs.name} and mine.leased_digests() == {"aa"}
    with mine._database.begin() as connection:
        connection.execute(leases._workers.delete().where(leases._workers.c.name == theirs.name))
    assert set(mine.workers()) == {mine.name} and mine.leased_digests() == set()


def test_an_ended_process_of_this_machine_counts_as_lost_at_once(join: Join) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = Worker.this_process("cpu")
    mine = join(me)
    theirs = join(replace(me, pid=child.pid, started=leases.start_ticks(child.pid) or 0))
    assert theirs.take("aa", 1) and set(mine.workers()) == {mine.name, theirs.name}
    child.kill()  # the parent has not waited for it, so that it is a zombie
    while leases.start_ticks(child.pid) is not None:
        pass
    assert set(mine.workers()) == {mine.name} and mine.leased_digests() == set()
    child.communicate()


def test_a_reused_pid_is_not_the_worker(join: Join) -> None:
    mine = join(Worker.this_process("cpu"))
    other = join(replace(Worker.this_process("cpu"), started=1))
    assert os.getpid() == other._me.pid and set(mine.workers()) == {mine.name}


def test_a_worker_that_leaves_releases_its_leases(database: str) -> None:
    me = Worker.this_process("cpu")
    with Leases(database, "one", me).join() as coordinator:
        assert coordinator.take("aa", 1) and set(coordinator.workers()) == {coordinator.name}
    with Leases(database, "one", me).join() as coordinator:
        assert coordinator.leased_digests() == set()


def test_heartbeats_continue_after_a_database_error(
    database: str, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    from autotune.core.errors import StorageError

    monkeypatch.setattr(leases, "BEAT_S", 0.01)
    coordinator, beats, failed = (
        Leases(database, "one", Worker.this_process("cpu")),
        Leases._beat,
        threading.Event(),
    )
    again = threading.Event()

    def beat(self: Leases) -> None:
        if not failed.is_set() and threading.current_thread() is not threading.main_thread():
            failed.set()
            raise StorageError("unreachable")
        beats(self)
        if failed.is_set():
            again.set()

    monkeypatch.setattr(Leases, "_beat", beat)
    with coordinator.join():
        assert again.wait(10)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def test_many_workers_may_create_the_tables_at_once(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As the workers of a fleet that wait for a study: each tries to create the tables, and only
    one can.
    """
    url = f"sqlite:///{tmp_path / 'new.db'}"
    if kind == "postgresql":
        url = request.getfixturevalue("postgres")("template1")
    monkeypatch.setattr("autotune.study.storage.optuna_storage._compatible", set())
    together = threading.Barrier(8)

    def begin(number: int) -> None:
        together.wait()
        assert read_record(url, "one") is None
        Leases(url, "one", far(number)).close()
        ProbeStore(url).close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin, range(8)))
