"""Reports of people who fine-tune: the program gives the correct result for each of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.dry.prober import DryProber
from autotune.planning import counted_memory
from tests.helpers.reported import CASES, Case, unmet

pytest.importorskip("trl")


@pytest.fixture(scope="module", autouse=True)
def _one_counting_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        DryProber(tmp_path_factory.mktemp("counts")) as prober,
    ):
        patch.setattr(counted_memory, "_prober", lambda: prober)
        yield


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_report_has_its_correct_result(case: Case, tmp_path: Path) -> None:
    assert unmet(case, tmp_path, slow=False) == []


def test_a_wrong_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the files of a case, each of its steps has another result."""
    monkeypatch.chdir(tmp_path)
    (checks,) = (case for case in CASES if case.name.startswith("10-"))
    (masks,) = (case for case in CASES if case.name.startswith("23-"))
    Path("rendered.jsonl").write_text('{"text": "Q1"}\n')
    assert all(list(step.unmet()) for step in (*checks.steps, *masks.steps))
