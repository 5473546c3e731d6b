"""Create the tables of a database, and make it unreachable for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url

from autotune.study.storage.probe_store import ProbeStore


def make_tables(url: str) -> None:
    """Create the tables of Optuna and of autotune."""
    storage = RDBStorage(url)
    storage.engine.dispose()
    ProbeStore(url).close()


@contextmanager
def away(database: str) -> Iterator[None]:
    """Make the database unreachable inside the block and close all its connections."""
    url = make_url(database)
    if url.get_backend_name() == "sqlite":
        file = Path(url.database or "")
        moved = file.rename(file.with_suffix(".away"))
        file.mkdir()
        yield
        file.rmdir()
        moved.rename(file)
        return
    import psycopg

    with psycopg.connect(_maintenance_url(database), autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{url.database}" ALLOW_CONNECTIONS false')
        cut_off(database)
        yield
        connection.execute(f'ALTER DATABASE "{url.database}" ALLOW_CONNECTIONS true')


def cut_off(database: str) -> None:
    """Close every connection to a PostgreSQL database."""
    import psycopg

    with psycopg.connect(_maintenance_url(database), autocommit=True) as connection:
        name = make_url(database).database
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )


def _maintenance_url(database: str) -> str:
    """The URL of another database on the same server."""
    return (
        make_url(database)
        .set(drivername="postgresql", database="postgres")
        .render_as_string(hide_password=False)
    )
