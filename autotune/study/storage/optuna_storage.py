"""Optuna's tables: open them, translate Optuna's errors, and list a database's studies."""

import contextlib
from collections.abc import Iterator
from typing import Any

import optuna
from optuna.storages import RDBStorage

from autotune.core.errors import StorageError
from autotune.study.storage.database import engine_options, public_url, storage_errors, with_tables
from autotune.study.storage.study_record import StudyRecord

_compatible: set[str] = set()  # the URLs of databases whose tables this version of Optuna can use


def optuna_storage(url: str) -> RDBStorage:
    """Open Optuna's storage on this database. The caller must dispose of the storage's engine.

    Optuna's check of the tables is slow, because it reads all migrations. So each process checks a
    database only once.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if url not in _compatible:
        # This storage has no connection pool, because no caller could close the pool if the check
        # fails.
        with_tables(lambda: RDBStorage(url, engine_kwargs=engine_options(url, pooled=False)))
        _compatible.add(url)
    return RDBStorage(url, engine_kwargs=engine_options(url), skip_compatibility_check=True)


@contextlib.contextmanager
def opened_storage(url: str) -> Iterator[RDBStorage]:
    """Open Optuna's storage for a `with` block, which closes its connections."""
    storage = optuna_storage(url)
    try:
        yield storage
    finally:
        storage.engine.dispose()


@contextlib.contextmanager
def optuna_errors(url: str) -> Iterator[None]:
    """Convert Optuna's errors to StorageError with the true cause.

    Optuna's own message is the same for every cause.
    """
    with storage_errors(url):
        try:
            yield
        except optuna.exceptions.StorageInternalError as error:
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise StorageError(f"the database {public_url(url)} failed: {error}") from None


def study_names(url: str) -> list[str]:
    """Return the names of all studies of a database, the oldest first."""
    return list(all_attributes(url))


def all_attributes(url: str) -> dict[str, dict[str, Any]]:
    """Map the name of every study to its attributes, the oldest study first."""
    with optuna_errors(url), opened_storage(url) as storage:
        return {study.study_name: dict(study.user_attrs) for study in storage.get_all_studies()}


def read_record(url: str, name: str) -> StudyRecord | None:
    """Read the record of a study; return None if the study does not exist or has not begun.

    Raises:
        UsageError: another version of autotune wrote the study.
        StorageError: the database cannot be read, or the record is damaged.
    """
    with optuna_errors(url), opened_storage(url) as storage:
        try:
            study = optuna.load_study(storage=storage, study_name=name)
        except KeyError:
            return None
        attributes = dict(study.user_attrs)
    return StudyRecord.from_attributes(name, attributes)


def delete_study(url: str, name: str) -> None:
    """Delete a study with its trials. Raises KeyError if no study has this name."""
    with optuna_errors(url), opened_storage(url) as storage:
        optuna.delete_study(study_name=name, storage=storage)
