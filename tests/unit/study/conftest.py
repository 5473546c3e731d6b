"""Sessions whose Optuna study is kept in memory.

Those of `start_anywhere` and of the other folders have a database.
"""

import pytest

from tests.helpers.memory_study import keep_studies_in_memory
from tests.helpers.sessions import Start


@pytest.fixture
def start(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    keep_studies_in_memory(monkeypatch)
    return start
