"""The record of a study: it reads as written, and fixed fields and other versions are checked."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import StorageError, UsageError
from autotune.core.serialization import to_data
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.study.optimizer import Optimizer
from autotune.study.storage.optuna_storage import (
    all_attributes,
    delete_study,
    read_record,
    study_names,
)
from autotune.study.storage.study_record import (
    SCHEMA_VERSION,
    Limits,
    ProbeTerms,
    StudyPhase,
    StudyRecord,
    add_worker_seconds,
    start_record,
    update_record,
)
from tests.helpers.factories import FINGERPRINT
from tests.helpers.sessions import SPACE, record_of, subject_of

Begin = Callable[..., Optimizer]


@pytest.fixture
def begin(database: str) -> Iterator[Begin]:
    """A function that opens a new session of the study 'one'
    with this record, as after a restart.
    """
    opened: list[Optimizer] = []

    def create(record: StudyRecord | None = None) -> Optimizer:
        optimizer = Optimizer.create(database, "one", SPACE, seed=0)
        opened.append(optimizer)
        if record is not None:
            start_record(optimizer, record)
        return optimizer

    yield create
    for optimizer in opened:
        optimizer.close()


def test_a_record_reads_as_it_was_written(begin: Begin, database: str) -> None:
    assert study_names(database) == [] and read_record(database, "one") is None
    optimizer = begin()
    # it has not begun
    assert study_names(database) == ["one"] and read_record(database, "one") is None
    start_record(optimizer, record_of())
    assert read_record(database, "one") == record_of() and read_record(database, "two") is None
    limits = Limits(budget_s=60.0, trials=4)
    update_record(optimizer, limits=limits, phase=StudyPhase.SEARCHING, wall_seconds=2.5)
    add_worker_seconds(optimizer, "host:1:2", 3.0)
    add_worker_seconds(optimizer, "host:2:2", 1.0)
    stored = read_record(database, "one")
    workers = {"host:1:2": 3.0, "host:2:2": 1.0}
    changes: dict[str, Any] = {"limits": limits, "phase": StudyPhase.SEARCHING, "wall_seconds": 2.5}
    assert stored == record_of(**changes, worker_seconds=workers) and stored.others_seconds == 4.0
    assert list(all_attributes(database)) == ["one"]
    delete_study(database, "one")
    assert study_names(database) == []


def test_names_are_listed_without_loading_trials(
    begin: Begin, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(record_of())

    def load(*_: object, **__: object) -> None:
        raise AssertionError("summaries load the best trial of each study")

    monkeypatch.setattr("optuna.get_all_study_summaries", load)
    monkeypatch.setattr("optuna.storages.RDBStorage.get_all_trials", load)
    assert study_names(database) == ["one"] == list(all_attributes(database))
    assert read_record(database, "one") == record_of()


def test_fields_that_may_change_between_sessions_are_updated(begin: Begin, database: str) -> None:
    begin(record_of())
    later = record_of(out="elsewhere", terms=ProbeTerms(memory_gib=80.2, headroom=0.05, seed=7))
    begin(later)
    assert read_record(database, "one") == later


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"terms": ProbeTerms(memory_gib=40.0, headroom=0.05)},
            ["memory in GiB", "80 then, 40 now"],
        ),
        (
            {
                "fingerprint": replace(
                    FINGERPRINT, packages={**FINGERPRINT.packages, "torch": "2.0.0"}
                )
            },
            ["fingerprint", "packages: torch: ", "2.0.0 now"],
        ),
        ({"shallow_only": True}, ["shallow only", "False then, True now"]),
    ],
    ids=["memory", "fingerprint", "shallow"],
)
def test_a_changed_record_is_refused_and_the_difference_named(
    begin: Begin, database: str, changes: dict[str, Any], parts: list[str]
) -> None:
    begin(record_of())
    with pytest.raises(UsageError) as caught:
        begin(record_of(**changes))
    for part in ["'one'", *parts]:
        assert part in str(caught.value)
    assert "--study" in (caught.value.remedy or "")
    assert read_record(database, "one") == record_of()


def test_a_changed_space_is_refused_and_named(begin: Begin) -> None:
    begin(record_of())
    fewer, _ = SPACE.narrow("micro_batch_size", lambda value: value != 8, "a test")
    with pytest.raises(UsageError) as caught:
        begin(record_of(subject_of(fewer)))
    text = str(caught.value)
    assert "space differs" in text
    assert "micro_batch_size" in text and "[1, 2, 4, 8] then, [1, 2, 4] now" in text
    assert "lora_rank" not in text


def test_a_projection_by_one_ratio_is_read_as_that_of_products_and_bytes(
    begin: Begin, database: str
) -> None:
    """As studies on a stand-in were stored before the two had ratios of their own."""
    h200 = resolve_device("h200")
    carried = SpeedTransfer(products=0.4, bytes=0.4, error=0.1, basis=2)
    task = replace(subject_of(), study="one", measured_on=h200, carried=carried)
    optimizer = begin(record_of(task))
    stored = to_data(task)
    stored["carried"] = {"ratio": 0.4, "error": 0.1, "basis": 2}
    optimizer.remember("task", stored)
    record = read_record(database, "one")
    assert record is not None and record.task.carried == carried


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        (
            {"facts": {"model": "demo-3m"}, "subject": {"carried": None}},
            "an earlier version of autotune",
        ),
        ({"schema_version": SCHEMA_VERSION + 1}, "a newer version of autotune"),
        ({"schema_version": "9"}, "an earlier version of autotune"),
    ],
    ids=["string keys", "newer", "no number"],
)
def test_a_study_of_another_version_is_refused_in_one_sentence(
    begin: Begin, database: str, attributes: dict[str, Any], says: str
) -> None:
    """Version 1 had no number: a dictionary named "facts", and string keys around it."""
    optimizer = begin()
    for key, value in attributes.items():
        optimizer.remember(key, value)
    with pytest.raises(UsageError, match=f"study 'one' was written by {says}") as caught:
        read_record(database, "one")
    assert caught.value.remedy
    with pytest.raises(UsageError, match=says):
        begin(record_of())


@pytest.mark.parametrize(
    "damage", [{"task": {"workload": {"lengths": 1}}}, {"fingerprint": 5}, {"out": None}], ids=str
)
def test_a_damaged_record_is_a_storage_error(
    begin: Begin, database: str, damage: dict[str, Any]
) -> None:
    optimizer = begin(record_of())
    for key, value in damage.items():
        optimizer.remember(key, to_data(value) if not isinstance(value, dict) else value)
    with pytest.raises(StorageError, match="the record of study 'one' cannot be read") as caught:
        read_record(database, "one")
    assert caught.value.remedy
