"""Who is at work on a study: its workers, what each of them has taken up, and which of them are gone.

The database itself keeps two workers from probing the same configuration: a lease is the one row that there can be of
it. Workers count heartbeats, and whoever looks judges by its own clock how long a count has stood still, so that no two
clocks need to agree. Of a worker on this very machine the process tells at once.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from zlib import crc32

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from autotune.core.errors import StorageError
from autotune.study.storage.database import Database, Outages, retried, storage_errors

BEAT_S = 5.0
GONE_S = 60.0  # a count that has stood still for so long is that of a worker that is gone

_metadata = sa.MetaData()
_workers = sa.Table(
    "autotune_workers",
    _metadata,
    sa.Column("study", sa.String(255), primary_key=True),
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("beats", sa.Integer, nullable=False),
    sa.Column("about", sa.Text, nullable=False),
)
_leases = sa.Table(
    "autotune_leases",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),  # the order in which they were taken
    sa.Column("study", sa.String(255), nullable=False),
    sa.Column("config", sa.String(16), nullable=False),
    sa.Column("trial", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(255), nullable=False),
    sa.UniqueConstraint("study", "config"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that works on a study. `realm` is where its pid means something: this boot, and process namespace."""

    host: str
    realm: str
    pid: int
    started: int  # ticks after the boot, which no setting of the clock moves
    device: str
    leads: bool = False

    @classmethod
    def here(cls, device: str, *, leads: bool = False) -> "Worker":
        """This process."""
        pid = os.getpid()
        started = began(pid) or 0
        return cls(host=socket.gethostname(), realm=_realm(), pid=pid, started=started, device=device, leads=leads)

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}:{self.started}"

    def lives_here(self) -> bool | None:
        """Whether the process is alive; None where that cannot be seen from here."""
        return began(self.pid) == self.started if self.realm == _realm() else None


class Leases:
    """One worker's view of a study. Raises StorageError where the database cannot be reached."""

    def __init__(
        self,
        url: str,
        study: str,
        me: Worker,
        *,
        clock: Callable[[], float] = time.monotonic,
        outages: Outages | None = None,
    ) -> None:
        self._study = study
        self._me = me
        self._clock = clock
        self.name = me.name
        self._seen: dict[str, tuple[int, float]] = {}  # beats, and since when
        self._beaten, self._stood_still = clock(), False
        self.outages = outages or Outages()
        self._database = Database(url, self.outages, _metadata)

    @contextmanager
    def joined(self) -> Iterator["Leases"]:
        """Be one of the study's workers; what was taken and not dropped goes back at the end."""
        self._beat()
        stop = threading.Event()
        heart = threading.Thread(target=self._beat_on, args=(stop,), daemon=True)
        heart.start()
        try:
            yield self
        finally:
            stop.set()
            heart.join()
            with suppress(StorageError):  # the others find out
                self.forget(self.name)
            self._database.close()

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    @retried
    def take(self, config: str, trial: int) -> bool:
        """Take a configuration up, by its digest; False where another worker is at it."""
        row = {"study": self._study, "config": config, "trial": trial, "worker": self.name}
        with storage_errors(self._database.url):
            try:
                with self._database.engine.begin() as connection:
                    if connection.dialect.name == "postgresql":  # it numbers rows before it shows them to others
                        lock = sa.func.pg_advisory_xact_lock(crc32(self._study.encode()))
                        connection.execute(sa.select(lock))
                    self._count_up(connection)
                    connection.execute(_leases.insert().values(**row))
            except IntegrityError:
                return self._holds(config, trial)
        return True

    @retried
    def _holds(self, config: str, trial: int) -> bool:
        """Whether a lease is this one: it may have been taken when a connection broke, and nobody been told."""
        same = {"study": self._study, "config": config, "trial": trial, "worker": self.name}
        with self._database.begin() as connection:
            return connection.execute(sa.select(_leases.c.id).filter_by(**same)).first() is not None

    @retried
    def drop(self, config: str) -> None:
        """It is done, or given back."""
        mine = sa.and_(_leases.c.study == self._study, _leases.c.config == config, _leases.c.worker == self.name)
        with self._database.begin() as connection:
            connection.execute(_leases.delete().where(mine))

    @retried
    def ahead(self, config: str) -> int:
        """How many were taken up before this one and are not done."""
        of_study = _leases.c.study == self._study
        own = sa.select(_leases.c.id).where(of_study, _leases.c.config == config).scalar_subquery()
        query = sa.select(sa.func.count()).select_from(_leases).where(of_study, _leases.c.id < own)
        with self._database.begin() as connection:
            return int(connection.execute(query).scalar_one())

    @retried
    def taken(self) -> set[str]:
        """The digests of what anybody is at."""
        with self._database.begin() as connection:
            return set(connection.execute(sa.select(_leases.c.config).where(_leases.c.study == self._study)).scalars())

    @retried
    def workers(self) -> dict[str, Worker]:
        """Everybody who is at work, by name. Who is gone is forgotten on the way."""
        query = sa.select(_workers.c.name, _workers.c.beats, _workers.c.about).where(_workers.c.study == self._study)
        with self._database.begin() as connection:
            rows = connection.execute(query).all()
        now, at_work = self._clock(), {self.name: self._me}
        # Whose own heart has stood still, with the database away or as it was stopped, cannot tell of others.
        if self._stood_still or now - self._beaten > 2 * BEAT_S:
            self._seen.clear()
            self._stood_still = False
        for name, beats, about in rows:
            then, since = self._seen.get(name, (None, now))
            self._seen[name] = (beats, now if then != beats else since)
            worker = Worker(**json.loads(about))
            alive = worker.lives_here() is not False and now - self._seen[name][1] < GONE_S
            if alive:
                at_work[name] = worker
            elif name != self.name:
                self.forget(name)
        with self._database.begin() as connection:  # of those who woke up, took something and were killed
            joined = sa.select(_workers.c.name).where(_workers.c.study == self._study)
            lost = sa.and_(_leases.c.study == self._study, _leases.c.worker.not_in(joined))
            connection.execute(_leases.delete().where(lost))
        return at_work

    def certainly(self, say: Callable[[str], None] = lambda text: None) -> dict[str, Worker]:
        """The other workers whose processes are here or whose hearts beat, which takes a few beats to see."""
        others = {name: one for name, one in self.workers().items() if name != self.name}
        if any(one.lives_here() is None for one in others.values()):
            before = {name: self._seen[name][0] for name in others}
            say(f"looking for {2.5 * BEAT_S:.0f} s whether workers of other hosts are still there")
            time.sleep(2.5 * BEAT_S)
            now = self.workers()
            return {
                name: one
                for name, one in others.items()
                if name in now and (one.lives_here() or self._seen[name][0] != before[name])
            }
        return others

    @retried
    def clear(self) -> None:
        """Forget the study's workers and leases."""
        with self._database.begin() as connection:
            for table in (_leases, _workers):
                connection.execute(table.delete().where(table.c.study == self._study))

    @retried
    def forget(self, name: str) -> None:
        """A worker that left, or is gone: it holds nothing any more."""
        with self._database.begin() as connection:
            connection.execute(_leases.delete().where(_leases.c.study == self._study, _leases.c.worker == name))
            connection.execute(_workers.delete().where(_workers.c.study == self._study, _workers.c.name == name))

    def _beat(self) -> None:
        """Count up. Who is not there joins: it is new, or was held to be gone since it was stopped for a while."""
        with self._database.begin() as connection:
            self._count_up(connection)
        before, self._beaten = self._beaten, self._clock()
        if self._beaten - before > 2 * BEAT_S:
            self._stood_still = True

    def _count_up(self, connection: sa.Connection) -> None:
        mine = sa.and_(_workers.c.study == self._study, _workers.c.name == self.name)
        row = {"study": self._study, "name": self.name, "beats": 0, "about": json.dumps(asdict(self._me))}
        if not connection.execute(_workers.update().where(mine).values(beats=_workers.c.beats + 1)).rowcount:
            connection.execute(_workers.insert().values(**row))

    def _beat_on(self, stop: threading.Event) -> None:
        """Until told to stop, whatever the database does meanwhile."""
        while not stop.wait(BEAT_S):
            with suppress(StorageError):
                self._beat()


def began(pid: int) -> int | None:
    """When a process of this machine began, in ticks after the boot; None where there is none, or only a zombie."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(others[18])


def _realm() -> str:
    """Where a pid means the same process: this boot of this machine, and this namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
