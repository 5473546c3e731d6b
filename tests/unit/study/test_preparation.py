"""Preparing a session: what the budget counts, and which options exclude each other."""

from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import UsageError
from autotune.problem.setup import set_up
from autotune.problem.study_spec import StudySpec
from autotune.study import preparation
from autotune.study.preparation import prepare_session


def spec(**changes: Any) -> StudySpec:
    return StudySpec(**{"model": "demo-3m", "gpu": "cpu", "study": "mine", "storage": "sqlite:///a.db"} | changes)


def test_reading_the_dataset_does_not_count_against_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still except while the setup, which reads the dataset, takes 100 s."""
    monkeypatch.chdir(tmp_path)
    now = 5.0

    def slow(*arguments: Any) -> Any:
        nonlocal now
        now += 100.0
        return set_up(*arguments)

    monkeypatch.setattr(preparation, "set_up", slow)
    monkeypatch.setattr(preparation.time, "monotonic", lambda: now)
    plan = prepare_session(spec())
    assert plan.started == 105.0 and plan.preparation_s == 100.0 and plan.device == "cpu"


@pytest.mark.parametrize(
    "options",
    [{"quality": True, "shallow_only": True}, {"verify": True, "shallow_only": True}, {"budget": "soon"}],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        prepare_session(spec(**options))
    assert list(tmp_path.iterdir()) == []
