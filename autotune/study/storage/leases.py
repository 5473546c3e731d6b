"""The workers of a study: which are alive, and which configurations each worker has leased.

A lease reserves a configuration for one worker. The database accepts only one lease for each
configuration, so two workers never probe the same configuration. Each worker increases a heartbeat
count in the database. The other workers measure, by their own clocks, how long that count has not
changed, so the clocks of the machines need not agree. A worker on this machine is lost as soon as
its process ends.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from zlib import crc32

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from autotune.core.errors import StorageError
from autotune.study.storage.database import Database, Outages, retry_on_outage, storage_errors

BEAT_S = 5.0
LOST_S = 60.0  # a worker is lost if its heartbeat count has not changed for this time

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
    sa.Column("id", sa.Integer, primary_key=True),  # a later lease has a larger number
    sa.Column("study", sa.String(255), nullable=False),
    sa.Column("config", sa.String(16), nullable=False),
    sa.Column("trial", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(255), nullable=False),
    sa.UniqueConstraint("study", "config"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that works on a study.

    A pid is unique only within one boot of a machine and one process namespace; `realm` identifies
    the boot and the namespace.
    """

    host: str
    realm: str
    pid: int
    started: int  # in ticks since the boot, because the system's clock can be set
    device: str
    leads: bool = False

    @classmethod
    def this_process(cls, device: str, *, leads: bool = False) -> "Worker":
        """Describe this process."""
        pid = os.getpid()
        started = start_ticks(pid) or 0
        return cls(
            host=socket.gethostname(),
            realm=_realm(),
            pid=pid,
            started=started,
            device=device,
            leads=leads,
        )

    @property
    def name(self) -> str:
        """The worker's name: host, pid and start time, which together are practically unique."""
        return f"{self.host}:{self.pid}:{self.started}"

    def lives_here(self) -> bool | None:
        """Whether the process is alive, or None on another machine or in another namespace."""
        return start_ticks(self.pid) == self.started if self.realm == _realm() else None


class Leases:
    """The workers and leases of a study, as one worker sees them.

    Raises StorageError if the database cannot be reached.
    """

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
        # For each worker, the heartbeat count and the time at which the count last changed.
        self._seen: dict[str, tuple[int, float]] = {}
        self._beaten = clock()  # the time of this worker's last heartbeat
        self._was_paused = False
        self.outages = outages or Outages()
        self._database = Database(url, self.outages, _metadata)

    @contextmanager
    def join(self) -> Iterator["Leases"]:
        """Join the study's workers for a `with` block. At the end, release this worker's leases."""
        self._beat()
        stop = threading.Event()
        heart = threading.Thread(target=self._beat_on, args=(stop,), daemon=True)
        heart.start()

        try:
            yield self
        finally:
            stop.set()
            heart.join()
            with suppress(StorageError):  # the other workers then notice that heartbeats stop
                self.forget(self.name)
            self._database.close()

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    @retry_on_outage
    def take(self, config: str, trial: int) -> bool:
        """Lease a configuration by its digest; return False if another worker has it."""
        row = {"study": self._study, "config": config, "trial": trial, "worker": self.name}
        with storage_errors(self._database.url):
            try:
                with self._database.engine.begin() as connection:
                    # PostgreSQL assigns row ids before the rows become visible to other
                    # connections, so a lock serializes the inserts.
                    if connection.dialect.name == "postgresql":
                        lock = sa.func.pg_advisory_xact_lock(crc32(self._study.encode()))
                        connection.execute(sa.select(lock))
                    self._count_up(connection)
                    connection.execute(_leases.insert().values(**row))
            except IntegrityError:
                return self._holds(config, trial)
        return True

    @retry_on_outage
    def _holds(self, config: str, trial: int) -> bool:
        """Whether this worker holds this lease.

        If the connection broke after the database stored the lease, `take` runs again and finds the
        row.
        """
        same = {"study": self._study, "config": config, "trial": trial, "worker": self.name}
        with self._database.begin() as connection:
            return connection.execute(sa.select(_leases.c.id).filter_by(**same)).first() is not None

    @retry_on_outage
    def drop(self, config: str) -> None:
        """Release a configuration that is finished or given back."""
        with self._database.begin() as connection:
            connection.execute(
                _leases.delete().filter_by(study=self._study, config=config, worker=self.name)
            )

    @retry_on_outage
    def count_ahead(self, config: str) -> int:
        """Count the existing leases that were taken before this configuration's lease."""
        of_study = _leases.c.study == self._study
        own = sa.select(_leases.c.id).where(of_study, _leases.c.config == config).scalar_subquery()
        query = sa.select(sa.func.count()).select_from(_leases).where(of_study, _leases.c.id < own)
        with self._database.begin() as connection:
            return int(connection.execute(query).scalar_one())

    @retry_on_outage
    def leased_digests(self) -> set[str]:
        """The digests of the configurations that any worker has leased."""
        with self._database.begin() as connection:
            return set(
                connection.execute(
                    sa.select(_leases.c.config).where(_leases.c.study == self._study)
                ).scalars()
            )

    @retry_on_outage
    def workers(self) -> dict[str, Worker]:
        """Return all workers by name. Lost workers are removed together with their leases."""
        query = sa.select(_workers.c.name, _workers.c.beats, _workers.c.about).where(
            _workers.c.study == self._study
        )
        with self._database.begin() as connection:
            rows = connection.execute(query).all()

        now = self._clock()
        at_work = {self.name: self._me}
        # If this process was paused (because it was stopped, or the database was unreachable), it
        # has missed heartbeats of the other workers. So it forgets the heartbeat counts that it has
        # read.
        if self._was_paused or now - self._beaten > 2 * BEAT_S:
            self._seen.clear()
            self._was_paused = False

        for name, beats, about in rows:
            last_beats, last_change = self._seen.get(name, (None, now))
            self._seen[name] = (beats, now if last_beats != beats else last_change)
            worker = Worker(**json.loads(about))
            alive = worker.lives_here() is not False and now - self._seen[name][1] < LOST_S
            if alive:
                at_work[name] = worker
            elif name != self.name:
                self.forget(name)

        # Delete the leases of workers that are no longer in the table. A worker that was removed
        # while it was paused may have taken another lease before it was killed.
        with self._database.begin() as connection:
            joined = sa.select(_workers.c.name).where(_workers.c.study == self._study)
            lost = sa.and_(_leases.c.study == self._study, _leases.c.worker.not_in(joined))
            connection.execute(_leases.delete().where(lost))
        return at_work

    def confirmed_others(self, say: Callable[[str], None] = lambda text: None) -> dict[str, Worker]:
        """Return the other workers that are certainly alive.

        A worker is alive if its process runs on this machine, or if its heartbeats continue.

        If there are workers on other machines, this method waits for 2.5 heartbeat intervals to
        observe them.
        """
        others = {name: worker for name, worker in self.workers().items() if name != self.name}
        if any(worker.lives_here() is None for worker in others.values()):
            before = {name: self._seen[name][0] for name in others}
            say(
                f"checking for {2.5 * BEAT_S:.0f} s "
                "whether workers of other hosts are still running"
            )
            time.sleep(2.5 * BEAT_S)
            now = self.workers()
            return {
                name: worker
                for name, worker in others.items()
                if name in now and (worker.lives_here() or self._seen[name][0] != before[name])
            }
        return others

    @retry_on_outage
    def clear(self) -> None:
        """Delete the study's workers and leases."""
        with self._database.begin() as connection:
            for table in (_leases, _workers):
                connection.execute(table.delete().where(table.c.study == self._study))

    @retry_on_outage
    def forget(self, name: str) -> None:
        """Remove a worker that has left or is lost, with its leases."""
        with self._database.begin() as connection:
            connection.execute(_leases.delete().filter_by(study=self._study, worker=name))
            connection.execute(_workers.delete().filter_by(study=self._study, name=name))

    def _beat(self) -> None:
        """Increase this worker's heartbeat count.

        A worker that is not in the table is added: it is new, or other workers removed it as lost
        during a pause.
        """
        with self._database.begin() as connection:
            self._count_up(connection)
        before = self._beaten
        self._beaten = self._clock()
        if self._beaten - before > 2 * BEAT_S:
            self._was_paused = True

    def _count_up(self, connection: sa.Connection) -> None:
        me = {"study": self._study, "name": self.name}
        update = connection.execute(
            _workers.update().filter_by(**me).values(beats=_workers.c.beats + 1)
        )
        if not update.rowcount:
            connection.execute(
                _workers.insert().values(**me, beats=0, about=json.dumps(asdict(self._me)))
            )

    def _beat_on(self, stop: threading.Event) -> None:
        """Increase the heartbeat count until `stop` is set, even if the database fails."""
        while not stop.wait(BEAT_S):
            with suppress(StorageError):
                self._beat()


class SingleWorker:
    """Takes the place of Leases in a session without other workers, which needs no leases."""

    name = ""

    def take(self, config: str, trial: int) -> bool:
        """Return True: there is no other worker."""
        return True

    def drop(self, config: str) -> None:
        """Do nothing: there is no lease."""

    def count_ahead(self, config: str) -> int:
        """Return 0: there is no other worker."""
        return 0

    def leased_digests(self) -> set[str]:
        """Return an empty set: there is no lease."""
        return set()

    def workers(self) -> Collection[str]:
        """Return an empty collection: there is no other worker."""
        return ()


Coordinator = Leases | SingleWorker


def start_ticks(pid: int) -> int | None:
    """The time when a process of this machine started, in ticks since the boot.

    The result is None if the process does not exist or is a zombie.
    """
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(others[18])


def _realm() -> str:
    """Return a name for this boot of the machine and this process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
