"""The promise against the exported run: what holds, what does not, and a real run of train.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import summary

from autotune.catalog import resolve_device, resolve_model
from autotune.commands import verify as command
from autotune.commands.session import verification_of
from autotune.config import TrainConfig
from autotune.errors import Cancelled, EnvironmentProblem, UsageError
from autotune.lengths import Lengths
from autotune.recipe import Recipe, Verification, summary_data
from autotune.report import render
from autotune.result import Evidence, to_data
from autotune.spec import StudySpec
from autotune.verify import done_as, verify
from autotune.workload import Workload


def promise(**changes: Any) -> Verification:
    values: dict[str, Any] = {
        "config": TrainConfig(),
        "micro_steps": 200,
        "tolerance": 0.05,
        "promised_tokens_per_s": 1000.0,
        "promised_step_s": 2.0,
        "promised_gib": 20.0,
    }
    return Verification(**values | changes)


@pytest.mark.parametrize(
    ("said", "holds"),
    [
        ({"seconds_per_step": 2.0, "peak_reserved_gib": 20.0}, True),
        ({"seconds_per_step": 2.08, "peak_reserved_gib": 20.9}, True),
        ({"seconds_per_step": 2.2, "peak_reserved_gib": 20.0}, False),  # promised too much
        ({"seconds_per_step": 1.8, "peak_reserved_gib": 20.0}, False),  # promised too little is as wrong
        ({"seconds_per_step": 2.0, "peak_reserved_gib": 25.0}, False),
        ({"seconds_per_step": 2.0, "peak_reserved_gib": None}, True),  # a CPU does not tell
        ({"seconds_per_step": 2.0, "peak_reserved_gib": 20.0, "tokens_per_second": 500.0}, True),  # other examples
    ],
)
def test_what_holds(said: dict[str, Any], holds: bool) -> None:
    done = done_as(promise(), said | {"steps": 3}, None, 3)
    assert done.reason is None and done.holds is holds
    assert all("promised" in line for line in done.said())


@pytest.mark.parametrize(
    ("said", "reason", "told"),
    [
        (None, "OutOfMemoryError: CUDA out of memory", "CUDA out of memory"),
        (None, None, "it said nothing"),
        ({"steps": 2, "seconds_per_step": 2.0}, None, "it took 2 steps of 3"),
        ({"steps": 3, "seconds_per_step": None}, None, "of None s"),
        ({"steps": 3, "seconds_per_step": float("nan")}, None, "of nan s"),
    ],
)
def test_a_run_that_did_not_come_through_holds_nothing(said: Any, reason: str | None, told: str) -> None:
    done = done_as(promise(), said, reason, 3)
    assert not done.holds and told in done.said()[0] and done.tokens_per_s is None


def test_it_is_kept_with_the_study_and_shown() -> None:
    done = done_as(promise(), {"steps": 3, "seconds_per_step": 2.0 / 0.99, "peak_reserved_gib": 19.9}, None, 3)
    assert verification_of({"verification": to_data(done)}) == done
    assert verification_of({}) is None
    told = replace(summary(), verification=done)
    assert summary_data(told, "out")["verification"]["holds"] is True
    page = render(told, "out")
    assert "held against the exported run" in page and "990 in the exported run" in page
    assert "held against the exported run" not in render(summary(), "out")


def recipe(**changes: Any) -> Recipe:
    found = summary().recipe
    assert found is not None
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        ({"winner": {"evidence": Evidence.PROJECTED}}, UsageError, "projected, not measured"),
        ({"winner": {"evidence": Evidence.EXTRAPOLATED}}, UsageError, "extrapolated, not measured"),
        ({"trainer": "trl"}, UsageError, "TRL"),
        ({}, EnvironmentProblem, "no NVIDIA GPU"),
    ],
)
def test_what_cannot_be_verified_here(
    made: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.gpu.list_gpus", list)
    winner = replace(recipe().winner, **made.pop("winner", {}))
    with pytest.raises(error, match=message):
        command.check(recipe(winner=winner, **made))


@pytest.mark.parametrize("spec", [{"shallow_only": True}, {"trainer": "trl"}])
def test_only_what_is_measured_is_verified(spec: dict[str, Any]) -> None:
    from autotune.commands.run import run

    with pytest.raises(UsageError, match=r"--verify runs train\.py on the device itself"):
        run(StudySpec(model="demo-3m", gpu="cpu", verify=True, **spec))


def on_cpu() -> Recipe:
    config = TrainConfig(micro_batch_size=2, seq_len=32, precision="fp32", checkpointing="none")
    workload = Workload(examples=64, lengths=Lengths.constant(32), global_batch=4)
    base = recipe(model=resolve_model("demo-3m"), workload=workload, device=resolve_device("cpu"))
    return replace(base, winner=replace(base.winner, config=config))


@pytest.mark.probe
def test_the_exported_script_really_runs(tmp_path: Path) -> None:
    """With an evaluation before and after, and adapters saved; of it only the log stays."""
    (tmp_path / "logs").mkdir()
    done = verify(on_cpu(), tmp_path, micro_steps=4)
    assert done.reason is None and done.tokens_per_s and done.seconds_per_step and done.micro_steps == 4
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert (tmp_path / "logs" / "verify.log").is_file()
    with pytest.raises(Cancelled):
        verify(on_cpu(), tmp_path, micro_steps=4, should_stop=lambda: True)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_an_unknown_study_and_a_wrong_number_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no study"):
        command.command("nobody", f"sqlite:///{tmp_path / 'a.db'}", micro_steps=10, tolerance=0.05)
    with pytest.raises(UsageError, match="--micro-steps is a positive number"):
        command.command("nobody", f"sqlite:///{tmp_path / 'a.db'}", micro_steps=0, tolerance=0.05)
