"""Who is at work on a study: leases that only one can hold, heartbeats, and workers that are gone."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

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
    for one in opened:
        one.close()


def far(number: int) -> Worker:
    return replace(ELSEWHERE, pid=number)


def test_one_configuration_is_taken_by_one_worker(join: Join) -> None:
    first, second = join(far(1)), join(far(2))
    assert first.take("aa", 1) and not second.take("aa", 2) and not first.take("aa", 3)
    assert second.take("bb", 4)
    assert first.taken() == second.taken() == {"aa", "bb"}
    second.drop("aa")  # is not its to drop
    assert not second.take("aa", 5)
    first.drop("aa")
    assert second.take("aa", 6)


def test_studies_do_not_know_of_one_another(join: Join) -> None:
    first, other = join(far(1)), join(far(2), "two")
    assert first.take("aa", 1) and other.take("aa", 1)
    assert set(first.workers()) == {first.name} and other.taken() == {"aa"}


def test_what_was_taken_before_is_ahead(join: Join) -> None:
    first, second = join(far(1)), join(far(2))
    for name, (worker, number) in {"aa": (first, 7), "bb": (second, 5), "cc": (first, 6)}.items():
        assert worker.take(name, number)
    assert [first.ahead(name) for name in ("aa", "bb", "cc")] == [0, 1, 2]
    first.drop("aa")
    assert second.ahead("cc") == 1


def test_of_many_at_once_one_gets_it(join: Join) -> None:
    coordinator = [join(far(number)) for number in range(6)]
    got: list[bool] = []
    threads = [threading.Thread(target=lambda one=one: got.append(one.take("aa", 1))) for one in coordinator]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 5 + [True]


def passes(clock: Clock, seconds: float, *hearts: Leases) -> None:
    """So much time, in which these hearts beat."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(clock.now + leases.BEAT_S, end)
        for one in hearts:
            one._beat()


def test_a_worker_elsewhere_is_gone_once_its_heart_has_stood_still(join: Join, clock: Clock) -> None:
    mine, theirs = join(far(1)), join(far(2))
    assert theirs.take("aa", 1) and set(mine.workers()) == {mine.name, theirs.name}
    for _ in range(3):
        passes(clock, 0.9 * leases.LOST_S, mine, theirs)
        assert set(mine.workers()) == {mine.name, theirs.name}
    passes(clock, 0.9 * leases.LOST_S, mine)
    assert theirs.name in mine.workers()
    passes(clock, 0.2 * leases.LOST_S, mine)
    assert set(mine.workers()) == {mine.name}
    assert mine.take("aa", 2)  # what it held is free
    theirs._beat()  # it had only been stopped
    assert set(mine.workers()) == {mine.name, theirs.name}


@pytest.mark.parametrize("beats_before", [False, True])
@pytest.mark.parametrize("beats_after", [False, True])
def test_whose_own_heart_stood_still_does_not_judge_others(
    join: Join, clock: Clock, beats_before: bool, beats_after: bool
) -> None:
    """The database was away, or the process was stopped: all counts stand still, its own too."""
    mine, theirs = join(far(1)), join(far(2))
    assert theirs.take("aa", 1) and set(mine.workers()) == {mine.name, theirs.name}
    if beats_before:  # between its look and the outage
        passes(clock, leases.BEAT_S, mine)
    passes(clock, 10 * leases.LOST_S)
    if beats_after:  # and theirs not yet
        mine._beat()
    assert set(mine.workers()) == {mine.name, theirs.name} and mine.taken() == {"aa"}
    mine._beat()
    assert theirs.name in mine.workers()  # from now on it is watched again
    passes(clock, 0.9 * leases.LOST_S, mine)
    assert theirs.name in mine.workers()
    passes(clock, 0.2 * leases.LOST_S, mine)
    assert set(mine.workers()) == {mine.name} and mine.taken() == set()


def test_what_a_worker_without_a_name_has_taken_is_free(join: Join) -> None:
    mine, theirs = join(far(1)), join(far(2))
    mine.forget(theirs.name)
    assert theirs.take("aa", 1)  # it wakes up, and joins again by this
    assert set(mine.workers()) == {mine.name, theirs.name} and mine.taken() == {"aa"}
    with mine._database.begin() as connection:
        connection.execute(leases._workers.delete().where(leases._workers.c.name == theirs.name))
    assert set(mine.workers()) == {mine.name} and mine.taken() == set()


def test_a_process_of_this_machine_that_ended_is_gone_at_once(join: Join) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = Worker.here("cpu")
    mine = join(here)
    theirs = join(replace(here, pid=child.pid, started=leases.began(child.pid) or 0))
    assert theirs.take("aa", 1) and set(mine.workers()) == {mine.name, theirs.name}
    child.kill()  # a parent that did not notice yet keeps a zombie
    while leases.began(child.pid) is not None:
        pass
    assert set(mine.workers()) == {mine.name} and mine.taken() == set()
    child.communicate()


def test_a_pid_that_another_process_has_now_is_not_the_worker(join: Join) -> None:
    mine = join(Worker.here("cpu"))
    other = join(replace(Worker.here("cpu"), started=1))
    assert os.getpid() == other._me.pid and set(mine.workers()) == {mine.name}


def test_who_leaves_holds_nothing(database: str) -> None:
    me = Worker.here("cpu")
    with Leases(database, "one", me).joined() as coordinator:
        assert coordinator.take("aa", 1) and set(coordinator.workers()) == {coordinator.name}
    with Leases(database, "one", me).joined() as coordinator:
        assert coordinator.taken() == set()


def test_the_heart_beats_on_where_the_database_fails(
    database: str, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    from autotune.core.errors import StorageError

    monkeypatch.setattr(leases, "BEAT_S", 0.01)
    coordinator, beats, failed = Leases(database, "one", Worker.here("cpu")), Leases._beat, threading.Event()
    again = threading.Event()

    def beat(self: Leases) -> None:
        if not failed.is_set() and threading.current_thread() is not threading.main_thread():
            failed.set()
            raise StorageError("gone")
        beats(self)
        if failed.is_set():
            again.set()

    monkeypatch.setattr(Leases, "_beat", beat)
    with coordinator.joined():
        assert again.wait(10)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def test_many_may_find_an_empty_database_at_once(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As the workers of a fleet do that wait for a study; each would make the tables, and only one can."""
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
