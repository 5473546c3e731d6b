"""autotune from Python: the examples of the documentation, and the display in a notebook."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

import autotune
from autotune import SearchSpace, StudyResult, load_study, tune
from autotune.api.main import main
from autotune.cli.commands.run import resume
from autotune.core.errors import Interrupted, NothingFits, UsageError
from autotune.core.probe_types import Phase
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryAnswer
from autotune.planning import counted_memory
from autotune.problem.study_spec import NamedConfig, StudySpec
from tests.helpers.factories import summary
from tests.helpers.sessions import record_of

A_CASE = {"seq_len": 64, "precision": "fp32"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.probe
def test_the_documented_examples_run_and_their_study_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They print nothing, their studies leave no connection open, and the command line resumes one
    with its space.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    engines: list[Any] = []
    create = sqlalchemy.create_engine

    def remember(*arguments: Any, **options: Any) -> Any:
        engines.append(create(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr("sqlalchemy.create_engine", remember)
    monkeypatch.setattr("sqlalchemy.engine.create_engine", remember)  # Optuna's
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(example, names)
    assert capfd.readouterr() == ("", "")
    pools = [engine.pool for engine in engines if isinstance(engine.pool, sqlalchemy.QueuePool)]
    assert len(pools) > 4 and all(pool.checkedout() + pool.checkedin() == 0 for pool in pools)
    result, same, space = names["result"], names["same"], names["space"]
    assert isinstance(result.winner, TrainConfig) and result.winner.seq_len == 64
    assert len(result.trials) == 2 and result.trials == same.trials
    assert names["fastest"]["outcome"] == "ok" and "memory" in result.figures
    assert same.data()["winner"]["config"] == result.winner.as_dict()
    assert (tmp_path / "again" / "report.html").is_file() and (
        tmp_path / "again" / "export" / "train.py"
    ).is_file()

    assert result.record.spec.space == space
    resume(result.summary.study, trials=3, quiet=True)
    resumed = load_study(result.summary.study)
    assert resumed.record.spec.space == space and len(resumed.trials) == 3
    assert resumed.trials[:2] == result.trials and resumed.winner.seq_len == 64


def study_result(**changes: Any) -> StudyResult:
    return StudyResult(summary=replace(summary(), **changes), record=record_of())


def test_a_notebook_escapes_text() -> None:
    shown = study_result(study="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown
    assert "winner" in shown and "tokens/s" in shown and "[measured]" in shown


def test_a_result_prints_itself_in_a_few_words() -> None:
    whole = summary()
    result = StudyResult(
        summary=whole, record=record_of(), url="postgresql+psycopg://me:s3cr3t@host/db"
    )
    assert whole.recipe is not None
    for word in ("study='", "winner='", "baseline='", whole.recipe.config.label()):
        assert word in str(result)
    assert len(str(result)) < 600 and "s3cr3t" not in str(result)
    assert "no configuration succeeded" in repr(study_result(recipe=None))


def test_a_study_without_a_winner_raises_nothing_fits() -> None:
    nothing = study_result(recipe=None)
    assert "no configuration succeeded" in nothing._repr_html_()
    for ask in (lambda: nothing.winner, lambda: nothing.export("train")):
        with pytest.raises(NothingFits):
            ask()


def test_trials_are_plain_values_and_figures_are_plotly_figures() -> None:
    from plotly.graph_objects import Figure

    result = study_result()
    assert all(
        isinstance(value, str | int | float | bool | None)
        for trial in result.trials
        for value in trial.values()
    )
    assert result.figures and all(isinstance(figure, Figure) for figure in result.figures.values())


def test_unknown_names_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no database"):
        load_study("none")
    with pytest.raises(TypeError, match="budgets"):
        tune("demo-3m", gpu="cpu", budgets="60s")
    with pytest.raises(AttributeError, match="no attribute 'tunes'"):
        print(autotune.tunes)


def test_a_space_is_built_from_keyword_arguments() -> None:
    space = SearchSpace.of(micro_batch_size=[1, 2], lora_rank=16, checkpointing=("none", "full"))
    assert space.size() == 4 and {knob.name for knob in space.knobs if knob.kind == "learning"} == {
        "lora_rank"
    }
    assert SearchSpace.of(lora_rank=range(16, 18)).size() == 2
    for wrong in ([], [16, 16]):
        with pytest.raises(UsageError, match="each only once"):
            SearchSpace.of(lora_rank=wrong)
    with pytest.raises(UsageError, match="did you mean 'lora_rank'"):
        SearchSpace.of(lora_ranks=[16])
    with pytest.raises(UsageError, match="checkpointing"):
        SearchSpace.of(checkpointing=["some"])


def test_plans_need_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = autotune.plan("demo-3m", gpu="a10", examples=1000)
    assert made.best is not None and made.task.device.name == "a10"
    compared = autotune.compare("demo-3m", ["a10", "l4"], examples=1000)
    assert [card.device.name for card in compared.groups[0].cards]
    (tmp_path / "trl.yaml").write_text(
        "model_name_or_path: demo-3m\nmax_length: 256\nuse_peft: true\n"
    )
    assert autotune.check("trl.yaml", gpu="a10", examples=1000).checked.state == "fits"
    assert capfd.readouterr().out == ""


def test_a_plan_counts_what_no_formula_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        counted_memory, "dry_count", lambda *asked, **_: DryAnswer(refused="not here.")
    )
    with pytest.raises(autotune.AutotuneError, match=r"cannot be counted: not here$"):
        autotune.plan("gpt2", gpu="a10")


def test_an_impossible_option_is_an_autotune_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(autotune.AutotuneError, match="epochs cannot be 0") as caught:
        tune("demo-3m", gpu="cpu", epochs=0)
    assert caught.value.remedy and caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_suite_has_no_best() -> None:
    with pytest.raises(UsageError, match="no winner to return"):
        tune("demo-3m", gpu="cpu", configs=(NamedConfig(name="a case"),))


@pytest.mark.probe
@pytest.mark.parametrize(
    "configs", [(), (NamedConfig(name="a case", knobs=A_CASE),)], ids=["study", "suite"]
)
def test_the_budget_ends_a_probe_that_would_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configs: tuple[NamedConfig, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTUNE_INJECT", "hang")
    monkeypatch.setattr("autotune.probe.monitor.DEADLINES", dict.fromkeys(Phase, 100.0))
    space = SearchSpace.of(micro_batch_size=1, seq_len=64)
    options = {"space": None if configs else space, "study": "mine", "configs": configs}
    spec = StudySpec(model="demo-3m", gpu="cpu", examples=200, budget="20s", **options)
    error = main(spec).error
    assert error is not None and re.match(
        r"--budget 20s was too short for (the start|a case)", str(error)
    )
    assert error.remedy and error.exit_code == 7


@pytest.mark.probe
def test_an_interrupted_study_keeps_its_results_and_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C where nobody handles signals, as in a notebook."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)

    def interrupt(line: str) -> None:
        if line.startswith("trial 1:"):
            signal.raise_signal(signal.SIGINT)

    space = SearchSpace.of(
        micro_batch_size=[1, 2, 4], seq_len=64, lora_rank=16, checkpointing="none"
    )
    # pytest's own worker processes ignore Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted, match="results so far are stored") as caught:
            tune("demo-3m", gpu="cpu", space=space, examples=200, study="mine", progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.value.exit_code == 130
    written = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert written["trials"]["total"] == 2 == len(load_study("mine").trials)
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
