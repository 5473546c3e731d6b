"""The probe table on SQLite and PostgreSQL: rows are read as written, and only valid results are
reused.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.schema import CreateTable

from autotune.core.errors import AutotuneError, StorageError, UsageError
from autotune.core.probe_types import Outcome, Rung
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace
from autotune.study.optimizer import Optimizer
from autotune.study.storage import probe_store
from autotune.study.storage.database import network_drive, public_url
from autotune.study.storage.location import shared_url
from autotune.study.storage.optuna_storage import read_record, study_names
from autotune.study.storage.probe_store import ProbeStore
from tests.helpers.factories import FINGERPRINT, result

CANARY = "s3cr3t-c4n4ry"
FULL = (Rung.FULL, Rung.CONFIRM)


@pytest.fixture
def store(database: str) -> Iterator[ProbeStore]:
    opened = ProbeStore(database)
    yield opened
    opened.close()


def test_round_trip(store: ProbeStore, database: str) -> None:
    config = TrainConfig(micro_batch_size=4)
    rows = [
        (3, result(config, log="logs/trial-0003.log", notes=("a note: é €",), warm=True)),
        (None, result(config, rung=Rung.CONFIRM)),
        (4, result(outcome=Outcome.OOM)),
        (5, result(outcome=Outcome.CRASH, reason="killed by SIGKILL")),
    ]
    for trial, row in rows:
        store.add("one", trial, row, FINGERPRINT)
    store.add("another", 0, result(), FINGERPRINT)

    again = ProbeStore(database)  # as in a later session
    stored = again.probes_of_study("one")
    assert [(row.trial, row.result) for row in stored] == rows
    assert [row.result for row in again.probes_of_model("", FINGERPRINT.digest)] == [
        *(row for _, row in rows),
        result(),
    ]
    again.close()
    assert store.probes_of_study("nobody's") == []


@pytest.mark.parametrize("text", ['{"outcome": "won"}', "[]", "half a {"])
def test_a_row_of_no_known_form_is_a_storage_error(store: ProbeStore, text: str) -> None:
    store.add("one", 0, result(), FINGERPRINT)
    with store._database.begin() as connection:
        connection.execute(probe_store._probes.update().values(result=text))
    with pytest.raises(StorageError, match=r"^row 1 of the probes cannot be read: \S"):
        store.probes_of_study("one")


def test_the_table_is_that_of_earlier_versions() -> None:
    """Results of years may be in it, and SQLite would take other columns in silence."""
    made = " ".join(str(CreateTable(probe_store._probes)).split())
    assert made == (
        "CREATE TABLE autotune_probes ( id INTEGER NOT NULL, study VARCHAR(255) NOT NULL, "
        "model VARCHAR(16) NOT NULL, trial INTEGER, config VARCHAR(16) NOT NULL, request"
        " VARCHAR(16) NOT NULL, "
        "fingerprint VARCHAR(16) NOT NULL, rung VARCHAR(16) NOT NULL, outcome VARCHAR(16) NOT"
        " NULL, "
        "created_at VARCHAR(40) NOT NULL, result TEXT NOT NULL, circumstances TEXT NOT NULL,"
        " PRIMARY KEY (id) )"
    )
    indexed = {column.name for index in probe_store._probes.indexes for column in index.columns}
    assert indexed == {"study", "model", "config", "request"}


def test_rows_of_a_model_are_of_all_studies_under_one_fingerprint(store: ProbeStore) -> None:
    other = replace(FINGERPRINT, driver="590.1")
    rows = [
        ("one", "m", FINGERPRINT),
        ("two", "m", FINGERPRINT),
        ("one", "n", FINGERPRINT),
        ("one", "m", other),
    ]
    for number, (study, model, fingerprint) in enumerate(rows):
        store.add(study, number, result(), fingerprint, model=model)
    store.add("one", 9, result(), FINGERPRINT)  # of no named model
    assert [row.trial for row in store.probes_of_model("m", FINGERPRINT.digest)] == [0, 1]
    assert [row.trial for row in store.probes_of_model("", FINGERPRINT.digest)] == [9]
    store.forget("one")
    assert store.probes_of_study("one") == [] and [
        row.trial for row in store.probes_of_study("two")
    ] == [1]


def test_new_rows_are_those_of_others_each_once(store: ProbeStore, database: str) -> None:
    other = ProbeStore(database)
    other.add("one", 0, result(), FINGERPRINT)
    store.add("one", 1, result(), FINGERPRINT)
    other.add("two", 2, result(), FINGERPRINT)
    assert [row.trial for row in store.new_rows("one")] == [0]
    assert store.new_rows("one") == []
    other.add("one", 3, result(), FINGERPRINT)
    assert [row.trial for row in store.probes_of_study("one")] == [0, 1, 3]
    assert store.new_rows("one") == []  # they were read
    assert [row.trial for row in other.new_rows("one")] == [1]
    other.close()


@pytest.mark.parametrize(("number", "seen"), [(1001, True), (1000, False)])
def test_a_row_that_becomes_visible_late_is_read_too(
    store: ProbeStore, number: int, seen: bool
) -> None:
    """Its transaction ended after that of a higher number: among the last thousand it counts."""
    numbered = {
        "study": "one",
        "model": "",
        "config": "",
        "request": "",
        "fingerprint": "",
        "rung": "",
        "outcome": "",
    }
    values = numbered | {
        "created_at": "",
        "result": json.dumps(to_data(result())),
        "circumstances": "",
    }
    for each, found in ((2000, [7]), (number, [8] * seen)):
        with store._database.begin() as connection:
            connection.execute(
                probe_store._probes.insert().values(**values, id=each, trial=7 + (each != 2000))
            )
        assert [row.trial for row in store.new_rows("one")] == found


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_repeatable_outcomes_are_reused(store: ProbeStore, outcome: Outcome) -> None:
    row = result(outcome=outcome, request_digest="abc")
    store.add("one", 0, row, FINGERPRINT)
    expected = row if outcome in (Outcome.OK, Outcome.OOM, Outcome.NUMERICS) else None
    assert store.find("abc", FINGERPRINT.digest, FULL) == expected


def test_reuse_needs_the_same_request_fingerprint_and_rung(store: ProbeStore) -> None:
    other = replace(FINGERPRINT, packages={**FINGERPRINT.packages, "torch": "2.13.0"})
    store.add("one", 0, result(request_digest="abc"), FINGERPRINT)
    assert store.find("abc", FINGERPRINT.digest, FULL) is not None
    assert store.find("abd", FINGERPRINT.digest, FULL) is None
    assert store.find("abc", other.digest, FULL) is None
    assert store.find("abc", FINGERPRINT.digest, (Rung.SHALLOW,)) is None


def test_the_newest_result_of_any_study_is_reused(store: ProbeStore) -> None:
    for study, seconds in (("one", 1.0), ("two", 2.0)):
        store.add(study, 0, result(request_digest="abc", seconds={"total": seconds}), FINGERPRINT)
    store.add("two", 1, result(outcome=Outcome.CRASH, request_digest="abc"), FINGERPRINT)
    newest = store.find("abc", FINGERPRINT.digest, FULL)
    assert newest is not None and newest.seconds == {"total": 2.0}
    own = store.find("abc", FINGERPRINT.digest, FULL, studies=("one", "one, explained"))
    assert own is not None and own.seconds == {"total": 1.0}
    assert store.find("abc", FINGERPRINT.digest, FULL, studies=("three",)) is None


def test_a_study_has_measured_what_it_probed_and_not_what_it_reused(store: ProbeStore) -> None:
    config, reused = TrainConfig(micro_batch_size=4), TrainConfig(micro_batch_size=2)
    store.add("one", None, result(config, depth=2, seconds={"total": 1.0}), FINGERPRINT)
    store.add("one", 0, result(config, seconds={}), FINGERPRINT)
    store.add("one", 1, result(reused, seconds={}), FINGERPRINT)
    assert store.has_measured("one", config) and not store.has_measured("two", config)
    assert not store.has_measured("one", reused)


def _touch(url: str, how: str) -> None:
    if how == "store":
        ProbeStore(url)
    elif how == "search":
        Optimizer.create(url, "x", SearchSpace.load("lora"), seed=0)
    elif how == "open":
        Optimizer.open(url, "x", SearchSpace.load("lora"))
    elif how == "record":
        read_record(url, "x")
    else:
        study_names(url)


OPERATIONS = ("store", "search", "open", "record", "names")


def _whole_text(error: BaseException) -> str:
    """The text of an error with its remedy, and of all its causes that a traceback would show."""
    parts, seen = [], set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        parts += [str(current), repr(current), str(getattr(current, "remedy", ""))]
        todo += [current.__cause__, None if current.__suppress_context__ else current.__context__]
    return "\n".join(parts)


@pytest.mark.parametrize("how", OPERATIONS)
@pytest.mark.parametrize(
    ("url", "kind", "named"),
    [
        (f"postgresql+psycopg://tuner:{CANARY}@127.0.0.1:1/studies", StorageError, "127.0.0.1"),
        (
            f"postgresql+psycopg://tuner:{CANARY}@no-such-host.invalid/studies",
            StorageError,
            "no-such-host.invalid",
        ),
        (f"nonsense://tuner:{CANARY}@host/studies", UsageError, "nonsense"),
        (f"postgresql+psycopg://tuner:{CANARY}@host:port/studies", UsageError, "--storage"),
        (f"tuner:{CANARY}@host/studies", UsageError, "--storage"),
        ("runs/autotune.db", UsageError, "--storage"),
        (f"mysql+nodriver://tuner:{CANARY}@host/studies", UsageError, "nodriver"),
        (f"oracle+oracledb://tuner:{CANARY}@host/studies", UsageError, "oracledb"),
    ],
    ids=[
        "refused",
        "unknown-host",
        "no-dialect",
        "no-port",
        "no-scheme",
        "a-path",
        "no-driver",
        "not-installed",
    ],
)
def test_the_error_of_a_bad_url_hides_the_password(
    url: str, kind: type[AutotuneError], named: str, how: str
) -> None:
    with pytest.raises(kind) as caught:
        _touch(url, how)
    assert named in str(caught.value)
    assert caught.value.remedy
    assert CANARY not in _whole_text(caught.value)


@pytest.mark.server
@pytest.mark.parametrize("in_query", [False, True])
@pytest.mark.parametrize("how", OPERATIONS)
def test_the_error_of_a_server_hides_the_password(
    postgres: Callable[[], str], how: str, in_query: bool
) -> None:
    url = make_url(postgres()).set(database="no_such_database")
    url = url.update_query_dict({"password": CANARY}) if in_query else url.set(password=CANARY)
    with pytest.raises(StorageError, match="no_such_database") as caught:
        _touch(url.render_as_string(hide_password=False), how)
    assert CANARY not in _whole_text(caught.value)


def test_public_url_hides_passwords() -> None:
    assert (
        public_url(f"postgresql+psycopg://me:{CANARY}@host/db")
        == "postgresql+psycopg://me:***@host/db"
    )
    assert CANARY not in public_url(f"me:{CANARY}@host")
    in_query = f"postgresql+psycopg://me@/db?host=here&password={CANARY}&sslpassword={CANARY}"
    assert public_url(in_query) == "postgresql+psycopg://me@/db?host=here"


@pytest.mark.parametrize("how", OPERATIONS)
def test_an_unwritable_sqlite_path_is_a_storage_error(tmp_path: Path, how: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="unable to open database file") as caught:
        _touch(f"sqlite:///{tmp_path}/file/autotune.db", how)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("how", OPERATIONS)
def test_a_file_that_is_no_database_is_a_storage_error(tmp_path: Path, how: str) -> None:
    path = tmp_path / "autotune.db"
    path.write_bytes(b"certainly not SQLite" * 500)
    with pytest.raises(StorageError, match="not a database"):
        _touch(f"sqlite:///{path}", how)


def test_two_processes_write_to_one_sqlite_file(tmp_path: Path) -> None:
    """Each waits for the other's lock and no row is lost."""
    url = f"sqlite:///{tmp_path / 'autotune.db'}"
    ProbeStore(url).close()
    code = (
        "import sys; from tests.helpers.factories import FINGERPRINT, result\n"
        "from autotune.study.storage.probe_store import ProbeStore\n"
        "store = ProbeStore(sys.argv[1])\n"
        "for number in range(20): store.add('one', number, result(), FINGERPRINT)\n"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    writers = [
        subprocess.Popen([sys.executable, "-c", code, url], env=environment) for _ in range(2)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    reader = ProbeStore(url)
    trials = [row.trial for row in reader.probes_of_study("one")]
    reader.close()
    assert sorted(trials) == sorted([*range(20), *range(20)])


def test_sharing_a_file_on_a_network_drive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mounted" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "mounted")
    drives = {
        "/": "ext4",
        str(tmp_path / "mounted"): "nfs4",
        str(tmp_path / "mounted" / "inner"): "ext4",
    }
    partitions = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in drives.items()]
    monkeypatch.setattr(
        "autotune.study.storage.database.psutil.disk_partitions", lambda all: partitions
    )
    for folder, kind in (
        ("", None),
        ("mounted", "nfs4"),
        ("link", "nfs4"),
        ("mounted/inner", None),
    ):
        assert network_drive(f"sqlite:///{tmp_path / folder / 'autotune.db'}") == kind
    monkeypatch.chdir(tmp_path / "mounted")
    with pytest.raises(UsageError, match=r"on a network drive \(nfs4\)"):
        shared_url("sqlite:///autotune.db")
    partitions[1].fstype = "fuse.sshfs"
    assert network_drive("sqlite:///autotune.db") == "fuse.sshfs"
    server = f"postgresql+psycopg://me:{CANARY}@host/db"
    assert shared_url(server) == server
