"""Probe results in a table beside Optuna's: append-only evidence, found again by request and fingerprint.

The only file that imports SQLAlchemy. Errors leave as StorageError with the true cause and without a password. A result
that cannot be written waits in a file, since it cost GPU time.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from autotune.errors import StorageError, UsageError
from autotune.result import Fingerprint, Outcome, ProbeResult, Rung, from_data, to_data
from autotune.spool import Spool

_metadata = sa.MetaData()
_probes = sa.Table(
    "autotune_probes",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("study", sa.String(255), nullable=False, index=True),
    sa.Column("model", sa.String(16), nullable=False, index=True),
    sa.Column("trial", sa.Integer),
    sa.Column("config", sa.String(16), nullable=False, index=True),
    sa.Column("request", sa.String(16), nullable=False, index=True),
    sa.Column("fingerprint", sa.String(16), nullable=False),
    sa.Column("rung", sa.String(16), nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("created_at", sa.String(40), nullable=False),
    sa.Column("result", sa.Text, nullable=False),
    sa.Column("circumstances", sa.Text, nullable=False),
)
# Only these say the same when asked again; a crash or a timeout may not.
REUSABLE = (Outcome.OK, Outcome.OOM, Outcome.NUMERICS)

# File systems of other machines.
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "s3fs"}
LATE_ROWS = 1000  # a row may be seen after others with higher numbers: whoever began first need not end first


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProbe:
    """One row. `trial` is None for probes outside the search, such as those that confirm."""

    trial: int | None
    result: ProbeResult
    fingerprint: str


class ProbeStore:
    """The probe table of one database. `spool` is where results wait while it is away; `say` is told of it."""

    def __init__(self, url: str, *, spool: Path | None = None, say: Callable[[str], None] = lambda text: None) -> None:
        self._spool, self._say = Spool(path=spool) if spool else None, say
        with storage_errors(url):
            self._url = url
            self._engine = sa.create_engine(_parsed(url), **engine_options(url))
            make_tables(self._engine, _metadata)
        self._known: set[int] = set()  # rows that were written or read here
        self._read_to = 0  # the highest that was read

    def add(
        self, study: str, trial: int | None, result: ProbeResult, fingerprint: Fingerprint, *, model: str = ""
    ) -> None:
        """Append one result, durably, before anybody else hears of it. `model` is the digest of its config.

        Raises StorageError if neither the database nor the spool takes it.
        """
        row = {
            "study": study,
            "model": model,
            "trial": trial,
            "config": result.config.digest,
            "request": result.request_digest,
            "fingerprint": fingerprint.digest,
            "rung": result.rung.value,
            "outcome": result.outcome.value,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "result": json.dumps(to_data(result)),
            "circumstances": json.dumps(to_data(fingerprint)),
        }
        try:
            self._replay()
            with storage_errors(self._url), self._engine.begin() as connection:
                self._insert(connection, row)
        except StorageError as error:
            if self._spool is None:
                raise
            self._spool.add(row)
            self._say(f"{error}; the result waits in {self._spool.path}")

    def _insert(self, connection: sa.Connection, row: dict[str, Any]) -> None:
        self._known.add(connection.execute(_probes.insert().values(**row).returning(_probes.c.id)).scalar_one())

    def _replay(self) -> None:
        """Write what waits in the spool, each row once: an error does not say whether the database had it already."""
        if self._spool is None or self._spool.is_empty():
            return
        with self._spool.drained() as rows, storage_errors(self._url), self._engine.begin() as connection:
            for row in rows:
                same = (column == row[column.name] for column in _probes.c if column is not _probes.c.id)
                if connection.execute(sa.select(_probes.c.id).where(*same)).first() is None:
                    self._insert(connection, row)
        self._say(f"{len(rows)} waiting results are in the database now")

    def find(self, request: str, fingerprint: str, rungs: Iterable[Rung]) -> ProbeResult | None:
        """The newest stored answer to a request under the same fingerprint, from any study of this database."""
        query = (
            sa.select(_probes.c.result)
            .where(
                _probes.c.request == request,
                _probes.c.fingerprint == fingerprint,
                _probes.c.rung.in_([rung.value for rung in rungs]),
                _probes.c.outcome.in_([outcome.value for outcome in REUSABLE]),
            )
            .order_by(_probes.c.id.desc())
            .limit(1)
        )
        self._replay()
        with storage_errors(self._url), self._engine.connect() as connection:
            text = connection.execute(query).scalar_one_or_none()
        return None if text is None else from_data(ProbeResult, json.loads(text))

    def of_study(self, study: str) -> list[StoredProbe]:
        """Every row of a study, in the order they were written."""
        return self._rows(_probes.c.study == study)

    def news(self, study: str) -> list[StoredProbe]:
        """The rows of a study that others wrote, and that were not read here."""
        which = sa.and_(_probes.c.study == study, _probes.c.id > self._read_to - LATE_ROWS)
        query = sa.select(_probes.c.id).where(which)
        with storage_errors(self._url), self._engine.connect() as connection:
            unknown = set(connection.execute(query).scalars()) - self._known
        return self._rows(_probes.c.id.in_(unknown)) if unknown else []

    def forget(self, study: str) -> None:
        """Delete the rows of a study."""
        with storage_errors(self._url), self._engine.begin() as connection:
            connection.execute(_probes.delete().where(_probes.c.study == study))

    def of_model(self, model: str, fingerprint: str) -> list[StoredProbe]:
        """Every row of a model under this fingerprint, of all studies, in the order they were written."""
        return self._rows(sa.and_(_probes.c.model == model, _probes.c.fingerprint == fingerprint))

    def _rows(self, which: sa.ColumnElement[bool]) -> list[StoredProbe]:
        query = sa.select(_probes).where(which).order_by(_probes.c.id)
        self._replay()
        with storage_errors(self._url), self._engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        self._known.update(row["id"] for row in rows)
        self._read_to = max((self._read_to, *(row["id"] for row in rows)))
        return [
            StoredProbe(
                trial=row["trial"],
                result=from_data(ProbeResult, json.loads(row["result"])),
                fingerprint=row["fingerprint"],
            )
            for row in rows
        ]

    def close(self) -> None:
        self._engine.dispose()


def make_tables(engine: sa.Engine, metadata: sa.MetaData) -> None:
    """Those that are missing. Of several processes that find them missing at once all but one fail, and look again."""
    try:
        metadata.create_all(engine)
    except DBAPIError:
        metadata.create_all(engine)


def engine_options(url: str) -> dict[str, Any]:
    """SQLite waits for its lock; servers are asked whether a pooled connection still lives."""
    if _parsed(url).get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": 60}}
    return {"pool_pre_ping": True, "pool_recycle": 1800}


def one_at_a_time(engine: sa.Engine) -> None:
    """SQLite locks when a transaction begins, not when it first writes: else two workers read that a trial is queued,
    and both take it."""
    if engine.dialect.name == "sqlite":
        engine.dispose()
        sa.event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))


def network_drive(url: str) -> str | None:
    """The kind of file system that an SQLite file lies on, if that is of another machine."""
    parsed = _parsed(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return None
    path = Path(parsed.database).resolve()  # a link may lead there
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    kind = next((mounts[folder] for folder in path.parents if folder in mounts), "")
    return kind if kind.removeprefix("fuse.") in NETWORK else None


def read_only(url: str) -> str:
    """The URL of the same database over which nothing can be written: SQLite's and PostgreSQL's refuse it themselves.

    Raises:
        UsageError: there is no such SQLite file, which opening would make.
    """
    with storage_errors(url):
        parsed = _parsed(url)
        backend, path = parsed.get_backend_name(), parsed.database or ""
        if backend == "postgresql":
            options = f"{parsed.query.get('options', '')} -c default_transaction_read_only=on"
            parsed = parsed.update_query_dict({"options": options.strip()})
        elif backend == "sqlite":
            if not path.startswith("file:"):
                if not Path(path).is_file():
                    remedy = "start a study with `autotune run`, or name --storage"
                    raise UsageError(f"there is no database {public_url(url)}", remedy=remedy)
                parsed = parsed.set(database=f"file:{quote(path)}")
            parsed = parsed.update_query_dict({"mode": "ro", "uri": "true"})
        return parsed.render_as_string(hide_password=False)


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except ValueError:  # a port that is no number; the text may be part of a password
        raise ArgumentError("the port is not a number") from None


def public_url(url: str) -> str:
    """The URL without its password."""
    try:
        return _parsed(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "the storage URL"


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn database errors into StorageError (or UsageError for a URL that is none), password hidden."""
    try:
        yield
    except (ArgumentError, NoSuchModuleError) as error:
        # Some versions of SQLAlchemy repeat a URL that they cannot parse, password and all.
        why = f" ({error})" if isinstance(error, NoSuchModuleError) else ""
        raise UsageError(
            f"--storage: not a database URL that can be used: {public_url(url)}{why}",
            remedy="write sqlite:///FILE.db or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE",
        ) from None
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or error.name  # Optuna wraps it
        if missing is None:
            raise
        raise UsageError(
            f"--storage: the driver {missing!r} for {public_url(url)} is not installed",
            remedy=f"pip install {missing}",
        ) from None
    except SQLAlchemyError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        password = make_url(url).password
        text = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        if password:
            text = text.replace(str(password), "***")
        raise StorageError(
            f"the database {public_url(url)} failed: {text}",
            remedy="check that it can be reached and written, then run the same command with --study to continue",
        ) from None
