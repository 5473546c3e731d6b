"""Databases for the contract tests: a SQLite file, and a real PostgreSQL server started once a
session.
"""

import gc
import getpass
import itertools
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from autotune.probe.supervisor import WorkerProber
from tests.helpers.fork_server import Client, forked_processes
from tests.helpers.outage import make_tables
from tests.helpers.postgres import postgres_server
from tests.helpers.sessions import Start, starter

# spinning threads would take the processor from other tests
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# a study of tiny products takes 1.4 times as much with two
os.environ.setdefault("OMP_NUM_THREADS", "1")
# tests run side by side, so their probes disturb each other
os.environ.setdefault("AUTOTUNE_ASSUME_QUIET", "1")
# else each process that compiles starts a pool of others
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The code that earlier tests compiled: compiling it anew would take most of the time of some tests.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")),
)
# Without a width, output has no line breaks. Python's readline module, which pytest imports, sets
# these variables for child processes, such as the workers of pytest-xdist, but not in os.environ.
for _variable in ("COLUMNS", "LINES"):
    os.environ.pop(_variable, None)
    os.unsetenv(_variable)
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")
# rare collections: walking torch's objects took a fifth of the unit tests' time
gc.set_threshold(200_000, 50, 100)


@event.listens_for(Engine, "connect")
def _do_not_wait_for_the_disk(connection: Any, record: Any) -> None:
    """Skip syncs: tests kill processes, not machines, so that data in the kernel is safe."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(scope="session", autouse=True)
def _tokens_in_a_folder_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Examples that tests tokenise are not kept in the user's cache.

    The workers of one run share their dry counts.
    """
    cache = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    if "PYTEST_XDIST_WORKER" in os.environ:
        counts = tmp_path_factory.getbasetemp().parent / "counts"
        counts.mkdir(exist_ok=True)
        (cache / "autotune").mkdir()
        (cache / "autotune" / "dry").symlink_to(counts)


@pytest.fixture(scope="session", autouse=True)
def _a_processor_without_fast_bf16() -> Iterator[None]:
    """Every machine that tests is taken for one without AVX-512.

    A test of the other kind patches the same name.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.catalog.devices.multiplies_bf16", lambda: False)
        yield


# Most of these start real probes and real training, and take minutes: by the seconds of the whole
# file.
LONGEST = (
    "probe/test_dry",
    "probe/test_joined_lora",
    "system/test_end_to_end",
    "probe/test_worlds",
    "system/faults/test_struck_worker",
    "system/test_api",
    "probe/test_images",
    "probe/test_supervisor",
    "system/test_several_gpus",
    "system/faults/test_sessions",
    "probe/test_train_script",
    "probe/test_objectives",
    "system/test_questions",
    "probe/test_compile",
    "probe/test_chunked_loss",
    "system/test_worker_process",
    "system/test_train",
    "probe/test_packing",
    "system/test_quality",
    "probe/test_truncation",
    "system/test_objectives",
    "unit/study/test_loop",
    "probe/test_compile_ahead",
    "unit/study/test_distributed",
    "probe/test_dry_objectives",
    "probe/test_trl_trainer",
    "system/test_canary",
    "probe/test_padding",
    "unit/planning/test_run_check",
    "system/test_resume",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: much of the time a test waits for its study's processes to
    start or end.
    """
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that all workers of
    pytest-xdist end at about the same time.
    """
    tests = Path(__file__).parent
    order = {tests / f"{name}.py": index for index, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (order.get(item.path, len(order)), tests / "unit" in item.path.parents)
    )


FORKS = pytest.StashKey[Client]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fork the processes of probe and system tests from one that has imported torch, unless the
    test forbids it. Once it runs, other tests fork the process of dry probes from it.
    """
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    forks_all = folder in ("probe", "system")
    if item.get_closest_marker("real_processes") or not (forks_all or FORKS in item.config.stash):
        return (yield)
    if FORKS not in item.config.stash:
        item.config.stash[FORKS] = Client.start()
    only = None if forks_all else "autotune.dry.worker"
    with forked_processes(item.config.stash[FORKS], only):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each stage, summed over the workers of pytest-xdist."""
    seconds: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[Path(report.nodeid.partition("::")[0]).parts[1]] += report.duration
    stages = ", ".join(f"{stage} {spent:.0f}" for stage, spent in seconds.most_common())
    terminalreporter.write_line(f"seconds of each stage, added over all workers: {stages}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the fork server."""
    if FORKS in config.stash:
        config.stash[FORKS].close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], str]]:
    """A function that creates a database with all tables in it and returns its URL."""
    import psycopg

    with postgres_server() as server:
        uri = server.get_uri()
        with psycopg.connect(uri, autocommit=True) as connection:  # as with SQLite, skip syncs
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


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with empty tables. Copying it is faster than creating the tables."""
    file = tmp_path_factory.mktemp("tables") / "autotune.db"
    make_tables(f"sqlite:///{file}")
    return file


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once for SQLite and once for PostgreSQL."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("tables"), tmp_path / "autotune.db")
        return f"sqlite:///{tmp_path / 'autotune.db'}"
    create: Callable[[], str] = request.getfixturevalue("postgres")
    return create()


@pytest.fixture(scope="session")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProber]:
    """A warm worker shared by the tests that neither kill it nor depend on its earlier probes."""
    with WorkerProber("cpu", tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.fixture
def start(tmp_path: Path, tables: Path) -> Iterator[Start]:
    """A function that starts sessions of one study on a SQLite file."""
    shutil.copy(tables, tmp_path / "autotune.db")
    opened: list[Any] = []
    yield starter(f"sqlite:///{tmp_path / 'autotune.db'}", tmp_path / "logs", opened)
    for resource in opened:
        resource.close()


@pytest.fixture
def server(postgres: Callable[[], str]) -> str:
    """The URL of an empty PostgreSQL database."""
    return postgres()


@pytest.fixture
def start_anywhere(database: str, tmp_path: Path) -> Iterator[Start]:
    """A function that starts sessions of one study, once on SQLite and once on PostgreSQL."""
    opened: list[Any] = []
    yield starter(database, tmp_path / "logs", opened)
    for resource in opened:
        resource.close()
