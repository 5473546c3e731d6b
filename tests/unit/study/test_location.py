"""Where a study is kept, and by what URL: directories that move together, locks, and read-only
databases.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from autotune.core.errors import StorageError, UsageError
from autotune.study.storage import database
from autotune.study.storage.database import (
    Outages,
    engine_options,
    has_password,
    network_drive,
    public_url,
    read_only,
    retry_on_outage,
    sqlite_folder,
    with_tables,
)
from autotune.study.storage.location import (
    from_stored_directory,
    make_writable,
    shared_url,
    storage_url,
    study_directory,
    to_stored_directory,
)
from autotune.study.storage.optuna_storage import study_names

SERVER = "postgresql+psycopg://me:secret@host/db"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    return tmp_path


# --- places


def test_a_database_is_the_one_named_or_of_the_environment_or_in_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert storage_url("sqlite:///b.db") == "sqlite:///b.db" and not Path("runs").exists()
    assert (
        storage_url(None) == "sqlite:///runs/autotune.db" == shared_url(None)
        and Path("runs").is_dir()
    )
    monkeypatch.setenv("AUTOTUNE_STORAGE", SERVER)
    assert storage_url(None) == SERVER and storage_url("sqlite:///b.db") == "sqlite:///b.db"


def test_a_directory_inside_that_of_the_database_moves_with_it(here: Path) -> None:
    url = f"sqlite:///{here}/runs/a.db"
    assert to_stored_directory(here / "runs" / "one", url) == "one" and to_stored_directory(
        here / "two", url
    ) == str(here / "two")
    assert to_stored_directory(here / "one", SERVER) == str(here / "one")
    moved = f"sqlite:///{here}/elsewhere/a.db"
    assert from_stored_directory("one", moved, "x") == here / "elsewhere" / "one"
    assert from_stored_directory("one", SERVER, "x") == here / "one"
    assert from_stored_directory(str(here), url, "x") == here
    assert (
        from_stored_directory(str(here / "gone"), url, "a study/of mine")
        == study_directory(None, "a study/of mine").absolute()
    )
    assert study_directory("out", "x") == Path("out") and study_directory(None, "x") == Path(
        "runs/x"
    )


def test_the_folder_of_a_database_is_that_of_its_file(here: Path) -> None:
    assert sqlite_folder(f"sqlite:///{here}/a/b.db") == here / "a"
    assert sqlite_folder(f"sqlite:///file:{here}/a%20c/b.db?uri=true") == here / "a c"
    assert sqlite_folder(SERVER) is sqlite_folder("sqlite://") is None


def test_a_directory_is_checked_before_it_is_used(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_writable(here / "one")
    assert [path.name for path in (here / "one").iterdir()] == ["logs"]
    make_writable(here / "one")  # a later session
    (here / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        make_writable(here / "file")
    for free, fits in ((200 * 2**20, True), (200 * 2**20 - 1024, False)):
        monkeypatch.setattr(
            os,
            "statvfs",
            lambda _, free=free: SimpleNamespace(f_bavail=free // 1024, f_frsize=1024),
        )
        if fits:
            make_writable(here / "one")
        else:
            with pytest.raises(StorageError, match="less than 200 MiB are free at"):
                make_writable(here / "one")


# --- URLs


def test_a_read_only_url_refuses_writes_and_creates_nothing(here: Path) -> None:
    with pytest.raises(UsageError, match="there is no database sqlite:///none"):
        read_only("sqlite:///none.db")
    assert not Path("none.db").exists()
    sa.create_engine("sqlite:///a b.db").connect().close()
    url = sa.make_url(read_only("sqlite:///a b.db"))
    assert (url.database, url.query) == ("file:a%20b.db", {"mode": "ro", "uri": "true"})
    with (
        sa.create_engine(url).connect() as connection,
        pytest.raises(sa.exc.OperationalError, match="readonly"),
    ):
        connection.execute(sa.text("CREATE TABLE a (b INTEGER)"))
    assert read_only(read_only("sqlite:///a b.db")) == read_only("sqlite:///a b.db")
    options = sa.make_url(read_only(f"{SERVER}?options=-c%20a%3Db")).query["options"]
    assert options == "-c a=b -c default_transaction_read_only=on"
    assert sa.make_url(read_only(SERVER)).query["options"] == "-c default_transaction_read_only=on"
    assert read_only(SERVER).startswith("postgresql+psycopg://me:secret@host/db?")
    other = "mysql+pymysql://me@host/db"
    assert read_only(other) == other


def test_options_of_an_engine() -> None:
    assert engine_options("sqlite:///a.db") == {"connect_args": {"timeout": 60}}
    assert engine_options("sqlite:///a.db", pooled=False)["poolclass"] is sa.NullPool
    limits = {
        "connect_timeout": 10,
        "tcp_user_timeout": 10_000,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
    }
    pool = {"pool_pre_ping": True, "pool_recycle": 1800}
    assert engine_options(SERVER) == pool | {"connect_args": limits | {"keepalives_count": 3}}
    assert "keepalives_count" not in engine_options(f"{SERVER}?keepalives_count=9")["connect_args"]
    assert (
        engine_options("postgresql+pg8000://me@host/db")
        == pool
        == engine_options("mysql+pymysql://me@host/db")
    )


def test_passwords_are_not_shown() -> None:
    assert public_url(SERVER) == "postgresql+psycopg://me:***@host/db"
    assert (
        public_url("mysql://me@host/db?passwd=secret&charset=utf8")
        == "mysql://me@host/db?charset=utf8"
    )
    assert public_url("postgresql://me:secret@host:port/db") == "the storage URL"

    without = ["sqlite:///a.db", "postgresql+psycopg://me@host/db"]
    with_one = [SERVER, "mysql://me@host/db?passwd=secret", "postgresql://me:secret@host:port/db"]
    assert [has_password(url) for url in (*without, *with_one)] == [False] * 2 + [True] * 3


@pytest.mark.parametrize("kind", ["nfs", "cifs", "fuse.sshfs", "lustre", "fuse.s3fs"])
def test_drives_of_a_network_are_recognised(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    # network drives are not among the physical ones
    def partitions(*, all: bool = False) -> list[Any]:
        return [SimpleNamespace(mountpoint="/", fstype=kind)] if all else []

    monkeypatch.setattr(database.psutil, "disk_partitions", partitions)
    assert network_drive("sqlite:///a.db") == kind
    assert network_drive("sqlite://") is network_drive(SERVER) is None
    with pytest.raises(UsageError, match="network drive"):
        shared_url("sqlite:///a.db")
    assert storage_url("sqlite:///a.db") == "sqlite:///a.db"  # of one process alone


@pytest.mark.parametrize(
    "url",
    [
        "x",
        "postgresql+psycopg://me:secret@host:abc/db",
        "sqlite:///x.db?timeout=abc",
        "sqlite://host:99/x",
    ],
)
def test_a_url_that_is_none_is_refused_by_each_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for read in (shared_url, study_names):
        with pytest.raises(
            UsageError, match=r"^--storage is not a usable database URL: "
        ) as caught:
            read(url)
        assert "secret" not in str(caught.value)


# --- trying again


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The seconds that were slept, by a clock that they move."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    yield slept
    monkeypatch.undo()


def test_tables_that_another_process_creates_are_looked_for_again(waits: list[float]) -> None:
    exists = sa.exc.OperationalError("CREATE", {}, Exception("table already exists"))
    left: list[Any] = [exists, IntegrityError("CREATE", {}, Exception("unique")), 7]

    def make() -> Any:
        if isinstance(found := left.pop(0), Exception):
            raise found
        return found

    assert with_tables(make) == 7 and waits == [0.1, 0.1]
    wrapped = RuntimeError("Optuna's")
    wrapped.__cause__ = exists
    left[:] = [wrapped] * 30 + [8]
    assert with_tables(make) == 8
    left[:] = [wrapped] * 31
    with pytest.raises(RuntimeError):
        with_tables(make)
    left[:] = [sa.exc.OperationalError("CREATE", {}, Exception("disk full"))]
    with pytest.raises(sa.exc.OperationalError):
        with_tables(make)


class Owner:
    """Its operation fails so many times."""

    def __init__(self, failures: int, outages: Outages, *, lost: bool = True) -> None:
        self.outages, self.left, self.lost, self.calls = outages, failures, lost, 0

    @retry_on_outage
    def read(self, one: int, *, other: int) -> int:
        self.calls += 1
        if self.calls <= self.left:
            error = StorageError("broken")
            error.lost = self.lost
            raise error
        return one + other


@pytest.mark.parametrize(
    ("owner", "calls"),
    [
        (Owner(3, Outages(seconds=1.0)), 4),
        (Owner(4, Outages(seconds=1.0)), -4),
        (Owner(1, Outages(seconds=1.0), lost=False), -1),
        (Owner(1, Outages()), -1),
        (Owner(1, Outages(should_stop=lambda: True, seconds=1.0)), -1),
    ],
)
def test_an_operation_is_run_four_times_if_its_connection_breaks(owner: Owner, calls: int) -> None:
    if calls > 0:
        assert owner.read(1, other=2) == 3
    else:
        with pytest.raises(StorageError):
            owner.read(1, other=2)
    assert owner.calls == abs(calls)


def failing_engine(outages: Outages, left: list[int], url: str = SERVER) -> sa.Engine:
    """An engine whose server is away for so many attempts to connect."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)

    def connect(*_: object, **__: object) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise engine.dialect.loaded_dbapi.OperationalError("no route with secret\nsecond line")
        raise InterruptedError("reached")

    engine.dialect.connect = connect  # type: ignore[method-assign]
    outages.watch(engine)
    return engine


def test_an_outage_is_waited_for_a_second_at_a_time_until_its_limit(waits: list[float]) -> None:
    said: list[str] = []
    outages = Outages(said.append, seconds=3.0, reached=True)
    with pytest.raises(InterruptedError):
        failing_engine(outages, [3]).connect()
    assert waits == [1.0, 1.0, 1.0] and said == [
        "the database postgresql+psycopg://me:***@host/db cannot be reached, waiting for it (3.0 s"
        " at most): "
        "no route with ***"
    ]
    outages._report_end()
    outages._report_end()
    assert said[1:] == ["the database is back"]
    with pytest.raises(sa.exc.OperationalError):  # a new outage has its own patience
        failing_engine(outages, [99]).connect()
    assert waits == [1.0] * 6 and len(said) == 3


@pytest.mark.parametrize("options", [{"seconds": 3.0}, {"reached": True}, {}])
def test_what_was_never_reached_or_is_not_to_be_waited_for_fails_at_once(
    waits: list[float], options: Any
) -> None:
    with pytest.raises(sa.exc.OperationalError):
        failing_engine(Outages(**options), [1]).connect()
    assert waits == []


def test_at_once_nothing_waits(waits: list[float]) -> None:
    outages = Outages(seconds=3.0, reached=True)
    with pytest.raises(sa.exc.OperationalError), outages.fail_fast():
        failing_engine(outages, [1]).connect()
    assert waits == [] and outages.waits()
