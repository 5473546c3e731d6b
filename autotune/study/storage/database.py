"""How databases are spoken to: connections, what goes wrong with them in words, waiting for one that went away.

Errors leave as StorageError with the true cause and without a password.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from urllib.parse import quote

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

WAIT_VARIABLE, WAIT_S, ASK_EVERY_S, TRIES = "AUTOTUNE_DATABASE_WAIT", 300.0, 1.0, 4
TABLES, MADE_S = 30, 0.1  # more than there are, each of which another may be about to make; how long that takes
P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound="HasOutages")

LIBPQ = ("psycopg", "psycopg2")  # drivers that take libpq's options
# Seconds (but for the milliseconds of tcp_user_timeout) after which a host that says nothing is held to be gone: while
# connecting, with something sent that it did not acknowledge, and while its answer is awaited.
VANISHED = {"connect_timeout": 10, "tcp_user_timeout": 10_000}
VANISHED |= {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}

# File systems of other machines.
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "s3fs"}


class Outages:
    """What a session does when a server that it had `reached` goes away: it asks again every second, for so long.

    Only the thread that made this waits. `say` is told, and `should_stop` ends it. Files are not waited for.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        seconds: float = 0.0,
        reached: bool = False,
    ) -> None:
        self.say, self._should_stop, self._seconds = say, should_stop, seconds
        self._thread, self._reached = threading.get_ident(), reached
        self._until: float | None = None  # while it is away: of one outage, however many ask

    def waits(self) -> bool:
        """Whether it pays to ask again, here and now."""
        return self._seconds > 0 and threading.get_ident() == self._thread and not self._should_stop()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What fails in here fails without waiting."""
        seconds, self._seconds = self._seconds, 0.0
        try:
            yield
        finally:
            self._seconds = seconds

    def watch(self, engine: sa.Engine) -> None:
        """Have this engine's connections made so."""
        public = _public(engine.url)

        def connect(dialect: Any, _: Any, arguments: Any, options: Any) -> Any:
            while True:
                try:
                    connection = dialect.connect(*arguments, **options)
                except dialect.loaded_dbapi.OperationalError as error:
                    if not self._reached or not self.waits():
                        raise
                    if self._until is None:
                        self._until = time.monotonic() + self._seconds
                        limit, why = fmt_seconds(self._seconds), _line(error, engine.url)
                        self.say(f"the database {public} is away, waiting for it ({limit} at most): {why}")
                    if time.monotonic() >= self._until:
                        raise
                    time.sleep(ASK_EVERY_S)
                else:
                    if self._until is not None and threading.get_ident() == self._thread:
                        self._until = None
                        self.say("the database is back")
                    self._reached = True
                    return connection

        if engine.dialect.name != "sqlite":
            sa.event.listen(engine, "do_connect", connect)


class HasOutages(Protocol):
    """Who holds connections of a session."""

    outages: Outages


def outlasting(operation: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """A method that is run again where its connection broke on the way, if `outages` wait. Twice must do no harm."""

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


def waiting_s() -> float:
    """For how long to wait for a server, by AUTOTUNE_DATABASE_WAIT (0: not at all). Raises UsageError."""
    text = os.environ.get(WAIT_VARIABLE) or f"{WAIT_S:.0f}s"
    try:
        return 0.0 if text == "0" else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{WAIT_VARIABLE}: {error}", remedy=f"for example {WAIT_VARIABLE}=5m") from None


def connected(url: str, outages: Outages | None = None) -> sa.Engine:
    """An engine; nothing is connected yet. Raises UsageError for a URL that is none."""
    with storage_errors(url):
        engine = sa.create_engine(_parsed(url), **engine_options(url))
    if outages is not None:
        outages.watch(engine)
    return engine


def with_tables(make: Callable[[], T]) -> T:
    """`make`, which makes the tables that are missing. Of several processes that find one missing at once all but one
    fail, and look again."""
    for _ in range(TABLES):
        try:
            return make()
        except Exception as error:
            cause = error if isinstance(error, DBAPIError) else error.__cause__  # Optuna wraps some
            if not isinstance(cause, IntegrityError) and "already exists" not in str(cause):
                raise
            time.sleep(MADE_S)
    return make()


def engine_options(url: str, *, pooled: bool = True) -> dict[str, Any]:
    """SQLite waits for its lock; servers are asked whether a pooled connection still lives. One that is not `pooled`
    ends with what it was for.

    A host that vanished never says so: PostgreSQL's own timeouts tell, where the URL sets none.
    """
    parsed = _parsed(url)
    options: dict[str, Any] = {} if pooled else {"poolclass": sa.NullPool}
    if parsed.get_backend_name() == "sqlite":
        return options | {"connect_args": {"timeout": 60}}
    options |= {"pool_pre_ping": True, "pool_recycle": 1800}
    if parsed.get_backend_name() == "postgresql" and parsed.get_driver_name() in LIBPQ:
        options["connect_args"] = {name: value for name, value in VANISHED.items() if name not in parsed.query}
    return options


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
        return _public(_parsed(url))
    except ArgumentError:
        return "the storage URL"


def _public(url: URL) -> str:
    return url.difference_update_query(_secrets(url)).render_as_string(hide_password=True)


def _secrets(url: URL) -> dict[str, str]:
    """What else of a URL is a password, as libpq and MySQL's drivers take them: ?password=, ?sslpassword=, ?passwd=."""
    return {name: str(value) for name, value in url.query.items() if "passw" in name.lower()}


def _line(error: BaseException, url: URL) -> str:
    """What a driver says, without the password."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    for secret in filter(None, (url.password, *_secrets(url).values())):
        text = text.replace(str(secret), "***")
    return text


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
        failed = StorageError(
            f"the database {public_url(url)} failed: {_line(getattr(cause, 'orig', None) or cause, make_url(url))}",
            remedy="check that it can be reached and written, then run the same command with --study to continue",
        )
        failed.lost = isinstance(error, PendingRollbackError) or getattr(error, "connection_invalidated", False)
        raise failed from None
