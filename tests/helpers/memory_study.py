"""Optuna's studies in this process's memory, for tests of a search: what a database does with them
is tested apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from optuna.storages import InMemoryStorage


class MemoryStorage(InMemoryStorage):
    """Studies without a database, with the engine that an optimizer looks after; nothing connects
    to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = sa.create_engine("sqlite://")


def keep_studies_in_memory(patch: pytest.MonkeyPatch) -> None:
    """Let all optimizers of a URL share one storage in memory: half of a replayed study's time is
    its database's.
    """
    storages: dict[str, MemoryStorage] = {}

    def storage_of(url: str) -> MemoryStorage:
        return storages.setdefault(url, MemoryStorage())

    @contextmanager
    def opened(url: str) -> Iterator[MemoryStorage]:
        yield storage_of(url)

    patch.setattr("autotune.study.optimizer.optuna_storage", storage_of)
    patch.setattr("autotune.study.optimizer.opened_storage", opened)
