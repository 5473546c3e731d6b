"""The access to a study's database: its URL, connections, outages and errors.

If the database is unreachable, a session waits. Every error of the database is raised as a
StorageError, and an unusable URL as a UsageError. The message has the true cause in plain words and
no password.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from urllib.parse import quote, unquote

import psutil
import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    PendingRollbackError,
    SQLAlchemyError,
)

from autotune.core.errors import StorageError, UsageError
from autotune.core.units import fmt_seconds, parse_duration

WAIT_VARIABLE = "AUTOTUNE_DATABASE_WAIT"
WAIT_S = 300.0
# The remedy for a table row that this version cannot read.
OTHER = "use the version of autotune that wrote it, or another database with --storage"
RETRY_EVERY_S = 1.0
TRIES = 4  # how often an operation is tried if its connection breaks
# The attempts to create the tables. An attempt fails if another process creates the same table at
# the same time, so there are more attempts than tables.
TABLE_TRIES = 30
TABLE_RETRY_S = 0.1
P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound="HasOutages")

LIBPQ_DRIVERS = ("psycopg", "psycopg2")  # drivers that take libpq's options
# With these timeouts, PostgreSQL's client gives up on a host that does not respond. The first
# timeout limits an attempt to connect (in s), and the second limits the time until the host
# acknowledges sent data (in ms). The last three limit the wait for an answer: the seconds before
# the first keepalive, the seconds between keepalives, and the number of keepalives.
LIBPQ_TIMEOUTS = {
    "connect_timeout": 10,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}

NETWORK_FILE_SYSTEMS = {
    *(
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "sshfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "glusterfs",
        "s3fs",
    )
}


class Outages:
    """Makes a session wait for an unreachable server, with a retry every second.

    The wait lasts at most `seconds`. Only the thread that created this object waits; in other
    threads, operations fail at once. `say` reports the outage and its end, and `should_stop` ends
    the wait. If `reached` is True, the session waits even for its first connection. The session
    never waits for an SQLite file.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        seconds: float = 0.0,
        reached: bool = False,
    ) -> None:
        self.say = say
        self._should_stop = should_stop
        self._seconds = seconds
        self._thread = threading.get_ident()
        self._reached = reached
        # The time at which all connections stop waiting for an unreachable database.
        self._until: float | None = None

    def waits(self) -> bool:
        """Whether an operation that failed now, in this thread, should be tried again."""
        return (
            self._seconds > 0 and threading.get_ident() == self._thread and not self._should_stop()
        )

    @contextmanager
    def fail_fast(self) -> Iterator[None]:
        """Let operations inside this block fail at once if the database is unreachable."""
        seconds = self._seconds
        self._seconds = 0.0
        try:
            yield
        finally:
            self._seconds = seconds

    def watch(self, engine: sa.Engine) -> None:
        """Make this engine's connections wait through outages."""
        if engine.dialect.name == "sqlite":
            return

        def connect(dialect: Any, _: Any, arguments: Any, options: Any) -> Any:
            while True:
                try:
                    connection = dialect.connect(*arguments, **options)
                except dialect.loaded_dbapi.OperationalError as error:
                    self._wait_after(error, engine.url)
                else:
                    self._report_end()
                    self._reached = True
                    return connection

        sa.event.listen(engine, "do_connect", connect)

    def _wait_after(self, error: BaseException, url: URL) -> None:
        """Sleep before the next attempt to connect, or raise the error if no attempt is left."""
        if not self._reached or not self.waits():
            raise error

        if self._until is None:
            self._until = time.monotonic() + self._seconds
            self.say(
                f"the database {_hide_secrets(url)} cannot be reached, waiting for it "
                f"({fmt_seconds(self._seconds)} at most): {_first_line(error, url)}"
            )

        if time.monotonic() >= self._until:
            raise error
        time.sleep(RETRY_EVERY_S)

    def _report_end(self) -> None:
        if self._until is not None and threading.get_ident() == self._thread:
            self._until = None
            self.say("the database is back")


class HasOutages(Protocol):
    """An object that holds database connections of a session."""

    outages: Outages


def retry_on_outage(
    operation: Callable[Concatenate[Owner, P], T],
) -> Callable[Concatenate[Owner, P], T]:
    """Make a method run again if its connection broke and `outages.waits()` is True.

    The method must be idempotent.
    """

    @wraps(operation)
    def run(self: Owner, /, *arguments: P.args, **named: P.kwargs) -> T:
        for _ in range(TRIES - 1):
            try:
                return operation(self, *arguments, **named)
            except StorageError as error:
                if not error.lost or not self.outages.waits():
                    raise
        return operation(self, *arguments, **named)

    return run


class Database:
    """The connections of one component to one database.

    Errors are raised as StorageError, and operations wait while the database is unreachable.
    """

    def __init__(self, url: str, outages: Outages, tables: sa.MetaData) -> None:
        """Create missing tables.

        Raises StorageError, or UsageError for an unusable URL.
        """
        self.url = url
        with storage_errors(url):
            self.engine = sa.create_engine(_parsed(url), **engine_options(url))
        outages.watch(self.engine)
        with storage_errors(url):
            with_tables(lambda: tables.create_all(self.engine))

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Open a transaction. Raises StorageError."""
        with storage_errors(self.url), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def connect(self) -> Iterator[sa.Connection]:
        """Open a connection to read with. Raises StorageError."""
        with storage_errors(self.url), self.engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def waiting_s() -> float:
    """The time to wait for an unreachable server, from AUTOTUNE_DATABASE_WAIT; 0 means no wait.

    Raises UsageError.
    """
    text = os.environ.get(WAIT_VARIABLE) or f"{WAIT_S:.0f}s"
    try:
        return 0.0 if text == "0" else parse_duration(text)
    except ValueError as error:
        raise UsageError(
            f"{WAIT_VARIABLE}: {error}", remedy=f"for example {WAIT_VARIABLE}=5m"
        ) from None


def with_tables(make: Callable[[], T]) -> T:
    """Call `make`, which creates missing tables, until it succeeds.

    If several processes find a table missing at once, all but one fail and must try again.
    """
    for _ in range(TABLE_TRIES):
        try:
            return make()
        except Exception as error:
            cause = (
                error if isinstance(error, DBAPIError) else error.__cause__
            )  # Optuna wraps some errors
            if not isinstance(cause, IntegrityError) and "already exists" not in str(cause):
                raise
            time.sleep(TABLE_RETRY_S)
    return make()


def engine_options(url: str, *, pooled: bool = True) -> dict[str, Any]:
    """Return the options of `create_engine`.

    SQLite waits up to 60 s while another process locks the file. A server's pooled connection is
    checked before use. PostgreSQL's client gets timeouts for a host that no longer answers, unless
    the URL sets them. With `pooled` set to False, a connection closes after its use.
    """
    parsed = _parsed(url)
    options: dict[str, Any] = {} if pooled else {"poolclass": sa.NullPool}

    if parsed.get_backend_name() == "sqlite":
        return options | {"connect_args": {"timeout": 60}}
    options |= {"pool_pre_ping": True, "pool_recycle": 1800}

    if parsed.get_backend_name() == "postgresql" and parsed.get_driver_name() in LIBPQ_DRIVERS:
        options["connect_args"] = {
            name: value for name, value in LIBPQ_TIMEOUTS.items() if name not in parsed.query
        }
    return options


def one_at_a_time(engine: sa.Engine) -> None:
    """Make SQLite lock its file when a transaction begins, and not only when it first writes.

    Otherwise two workers could both read that a trial is queued, and both take it.
    """
    if engine.dialect.name == "sqlite":
        engine.dispose()
        sa.event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
        sa.event.listen(
            engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE")
        )


def network_drive(url: str) -> str | None:
    """The type of the network file system that holds an SQLite file.

    The result is None for a file on a local disk, and for a database server.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return None
    path = Path(parsed.database).resolve()  # a link may point to a network drive
    mounts = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    kind = next((mounts[folder] for folder in path.parents if folder in mounts), "")
    return kind if kind.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS else None


def sqlite_folder(url: str) -> Path | None:
    """The directory of the SQLite file of a URL, or None for a server."""
    path = _sqlite_file(url)
    return path and path.parent.resolve()


def _sqlite_file(url: str) -> Path | None:
    path = _parsed(url).database if url.startswith("sqlite") else None
    if not path:
        return None
    return Path(unquote(path.removeprefix("file:")) if path.startswith("file:") else path)


def require_database(url: str) -> None:
    """Raise UsageError if the SQLite file is missing, because opening it would create it."""
    path = _sqlite_file(url)
    if url.startswith("sqlite") and (path is None or not path.exists()):
        raise UsageError(
            f"there is no database {public_url(url)}",
            remedy="start a study with `autotune run`, or give another --storage",
        )


def read_only(url: str) -> str:
    """Return a URL of the same database that makes SQLite and PostgreSQL refuse to write.

    Raises UsageError if the SQLite file does not exist.
    """
    with storage_errors(url):
        require_database(url)
        parsed = _parsed(url)
        backend = parsed.get_backend_name()
        path = parsed.database or ""

        if backend == "postgresql":
            options = f"{parsed.query.get('options', '')} -c default_transaction_read_only=on"
            parsed = parsed.update_query_dict({"options": options.strip()})
        elif backend == "sqlite":
            if not path.startswith("file:"):
                parsed = parsed.set(database=f"file:{quote(path)}")
            parsed = parsed.update_query_dict({"mode": "ro", "uri": "true"})

        return parsed.render_as_string(hide_password=False)


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":  # SQLite's driver is always installed
            parsed.get_dialect()().create_connect_args(parsed)
        return parsed
    except ValueError:  # the error's text may contain part of a password
        raise ArgumentError("the port, or an option after '?', is not a number") from None


def public_url(url: str) -> str:
    """Return the URL without its password."""
    try:
        return _hide_secrets(_parsed(url))
    except ArgumentError:
        return "the storage URL"


def has_password(url: str) -> bool:
    """Return whether the URL contains a password, or cannot be parsed and may contain one."""
    try:
        parsed = _parsed(url)
    except ArgumentError:
        return True
    return parsed.password is not None or bool(_secrets(parsed))


def _hide_secrets(url: URL) -> str:
    return url.difference_update_query(_secrets(url)).render_as_string(hide_password=True)


def _secrets(url: URL) -> dict[str, str]:
    """Find the passwords in a URL's query: ?password=, ?sslpassword= (libpq), ?passwd= (MySQL)."""
    return {name: str(value) for name, value in url.query.items() if "passw" in name.lower()}


def _first_line(error: BaseException, url: URL) -> str:
    """Return the first line of a driver's message without the password."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    for secret in filter(None, (url.password, *_secrets(url).values())):
        text = text.replace(str(secret), "***")
    return text


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Convert database errors to StorageError, or to UsageError for an unusable URL.

    The password is hidden.
    """
    try:
        yield
    except (ArgumentError, NoSuchModuleError) as error:
        # Some versions of SQLAlchemy repeat a URL that they cannot parse, including its password.
        why = f" ({error})" if isinstance(error, NoSuchModuleError) else ""
        raise UsageError(
            f"--storage is not a usable database URL: {public_url(url)}{why}",
            remedy="write sqlite:///FILE.db or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE",
        ) from None
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or error.name  # Optuna wraps the error
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

        message = _first_line(getattr(cause, "orig", None) or cause, make_url(url))
        failed = StorageError(
            f"the database {public_url(url)} failed: {message}",
            remedy="check that the database can be reached and written, "
            "then run the same command with --study to continue",
        )
        failed.lost = isinstance(error, PendingRollbackError) or getattr(
            error, "connection_invalidated", False
        )

        raise failed from None
