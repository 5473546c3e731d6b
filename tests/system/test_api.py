"""autotune from Python: the examples of the documentation, run as they stand, and what a notebook shows."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune import SearchSpace, StudyResult, load_study, tune
from autotune.core.errors import NothingFits, UsageError
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import load_space, shipped_spaces
from tests.helpers.factories import summary
from tests.helpers.sessions import record_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.probe
def test_the_examples_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(example, names)
    result, same = names["result"], names["same"]
    assert isinstance(result.winner, TrainConfig) and result.winner.seq_len == 64
    assert len(result.trials) == 2 and result.trials == same.trials
    assert names["fastest"]["outcome"] == "ok" and "memory" in result.figures
    assert same.data()["winner"]["config"] == result.winner.as_dict()
    assert (tmp_path / "again" / "report.html").is_file() and (tmp_path / "again" / "export" / "train.py").is_file()


def found(**changes: Any) -> StudyResult:
    return StudyResult(summary=replace(summary(), **changes), record=record_of())


def test_a_notebook_shows_text_as_text() -> None:
    shown = found(study="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown
    assert "winner" in shown and "tokens/s" in shown and "[measured]" in shown


def test_a_study_without_a_winner_says_so() -> None:
    nothing = found(recipe=None)
    assert "no configuration succeeded" in nothing._repr_html_()
    for ask in (lambda: nothing.winner, lambda: nothing.export("train")):
        with pytest.raises(NothingFits):
            ask()


def test_trials_are_plain_and_figures_are_plotlys() -> None:
    from plotly.graph_objects import Figure

    one = found()
    assert all(isinstance(value, str | int | float | bool | None) for trial in one.trials for value in trial.values())
    assert one.figures and all(isinstance(figure, Figure) for figure in one.figures.values())


def test_what_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no study"):
        load_study("none")
    with pytest.raises(TypeError, match="budgets"):
        tune("demo-3m", gpu="cpu", budgets="60s")
    with pytest.raises(AttributeError, match="no attribute 'tunes'"):
        print(autotune.tunes)


@pytest.mark.parametrize("name", shipped_spaces())
def test_a_space_that_is_written_reads_as_itself(name: str, tmp_path: Path) -> None:
    space = SearchSpace.load(name)
    (tmp_path / f"{name}.yaml").write_text(space.as_yaml())
    assert load_space(str(tmp_path / f"{name}.yaml")) == space


def test_a_space_of_ones_own() -> None:
    space = SearchSpace.of(micro_batch_size=[1, 2], lora_rank=16, checkpointing=("none", "full"))
    assert space.size() == 4 and {knob.name for knob in space.knobs if knob.kind == "learning"} == {"lora_rank"}
    assert SearchSpace.of(lora_rank=range(16, 18)).size() == 2
    for wrong in ([], [16, 16]):
        with pytest.raises(UsageError, match="each once"):
            SearchSpace.of(lora_rank=wrong)
    with pytest.raises(UsageError, match="did you mean 'lora_rank'"):
        SearchSpace.of(lora_ranks=[16])
    with pytest.raises(UsageError, match="checkpointing"):
        SearchSpace.of(checkpointing=["some"])
