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

import psutil
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from autotune.errors import StorageError
from autotune.store import engine_options, make_tables, storage_errors

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
    started: float
    device: str

    @classmethod
    def here(cls, device: str) -> "Worker":
        """This process."""
        return cls(
            host=socket.gethostname(),
            realm=_realm(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            device=device,
        )

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}:{self.started:.2f}"

    def lives_here(self) -> bool | None:
        """Whether the process is alive; None where that cannot be seen from here."""
        if self.realm != _realm():
            return None
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Leases:
    """One worker's view of a study. Raises StorageError where the database cannot be reached."""

    def __init__(self, url: str, study: str, me: Worker, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self._study, self._me, self._clock = url, study, me, clock
        self.name = me.name
        self._seen: dict[str, tuple[int, float]] = {}  # beats, and since when
        with storage_errors(url):
            self._engine = sa.create_engine(url, **engine_options(url))
            make_tables(self._engine, _metadata)

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
            self.forget(self.name)
            self._engine.dispose()

    def take(self, config: str, trial: int) -> bool:
        """Take a configuration up, by its digest; False where another worker is at it."""
        row = {"study": self._study, "config": config, "trial": trial, "worker": self.name}
        with storage_errors(self._url):
            try:
                with self._engine.begin() as connection:
                    connection.execute(_leases.insert().values(**row))
            except IntegrityError:
                return False
        return True

    def drop(self, config: str) -> None:
        """It is done, or given back."""
        mine = sa.and_(_leases.c.study == self._study, _leases.c.config == config, _leases.c.worker == self.name)
        with self._begin() as connection:
            connection.execute(_leases.delete().where(mine))

    def ahead(self, config: str) -> int:
        """How many were taken up before this one and are not done."""
        of_study = _leases.c.study == self._study
        own = sa.select(_leases.c.id).where(of_study, _leases.c.config == config).scalar_subquery()
        query = sa.select(sa.func.count()).select_from(_leases).where(of_study, _leases.c.id < own)
        with self._begin() as connection:
            return int(connection.execute(query).scalar_one())

    def taken(self) -> set[str]:
        """The digests of what anybody is at."""
        with self._begin() as connection:
            return set(connection.execute(sa.select(_leases.c.config).where(_leases.c.study == self._study)).scalars())

    def workers(self) -> dict[str, Worker]:
        """Everybody who is at work, by name. Who is gone is forgotten on the way."""
        query = sa.select(_workers.c.name, _workers.c.beats, _workers.c.about).where(_workers.c.study == self._study)
        with self._begin() as connection:
            rows = connection.execute(query).all()
        now, at_work = self._clock(), {}
        for name, beats, about in rows:
            then, since = self._seen.get(name, (None, now))
            if then != beats:
                since = now
            self._seen[name] = (beats, since)
            worker = Worker(**json.loads(about))
            if worker.lives_here() is not False and now - since < GONE_S:
                at_work[name] = worker
            else:
                self.forget(name)
        return at_work

    def forget(self, name: str) -> None:
        """A worker that left, or is gone: it holds nothing any more."""
        with self._begin() as connection:
            connection.execute(_leases.delete().where(_leases.c.study == self._study, _leases.c.worker == name))
            connection.execute(_workers.delete().where(_workers.c.study == self._study, _workers.c.name == name))

    @contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        with storage_errors(self._url), self._engine.begin() as connection:
            yield connection

    def _beat(self) -> None:
        """Count up. Who is not there joins: it is new, or was held to be gone since it was stopped for a while."""
        mine = sa.and_(_workers.c.study == self._study, _workers.c.name == self.name)
        row = {"study": self._study, "name": self.name, "beats": 0, "about": json.dumps(asdict(self._me))}
        with self._begin() as connection:
            if not connection.execute(_workers.update().where(mine).values(beats=_workers.c.beats + 1)).rowcount:
                connection.execute(_workers.insert().values(**row))

    def _beat_on(self, stop: threading.Event) -> None:
        """Until told to stop, whatever the database does meanwhile."""
        while not stop.wait(BEAT_S):
            with suppress(StorageError):
                self._beat()


def _realm() -> str:
    """Where a pid means the same process: this boot of this machine, and this namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
