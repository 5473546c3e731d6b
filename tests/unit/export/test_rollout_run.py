"""TRL's run of a GRPO layout: its phases, and the comparison with a composed step."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.core.probe_types import Phase
from autotune.export.rollout_run import RolloutRun, compare
from autotune.export.run import rollouts
from autotune.export.run.rollouts import run_trl
from autotune.prediction.rollout_step import RolloutStep


def step(number: int, rollout_s: float, update_gib: float) -> dict[str, Any]:
    return {
        "step": number,
        "seconds": {"rollout": rollout_s, "forward": 1.0},
        "peak_gib": {"rollout": 30.0, "backward": update_gib},
    }


COMPOSED = RolloutStep(
    phase_s={Phase.ROLLOUT: 4.0, Phase.UPDATE: 1.5},
    phase_gib={Phase.ROLLOUT: 33.0, Phase.FORWARD: 40.0, Phase.BACKWARD: 45.0},
    prompts=8,
)


def test_usual_steps_are_timed_and_all_steps_count_for_memory() -> None:
    run = RolloutRun(
        steps=(step(0, 90.0, 40.0), step(1, 4.0, 40.0), step(2, 6.0, 41.0), step(3, 9.0, 50.0)),
        longest=(3,),
    )
    assert run.step_s == 6.0
    assert run.phase_s == {"rollout": 5.0, "forward": 1.0}
    found = compare(COMPOSED, run)
    assert found.step_error == pytest.approx(5.5 / 6 - 1)
    assert found.phase_errors == pytest.approx({"rollout": 0.1, "update": -0.1})
    assert (found.steps, found.problem) == (4, None)


def test_two_updates_share_a_generation() -> None:
    steps = (step(0, 90.0, 1.0), step(1, 0.0, 1.0), step(2, 6.0, 1.0), step(3, 0.0, 1.0))
    assert RolloutRun(steps=steps, longest=(), updates=2).step_s == pytest.approx(8.0)


def test_a_run_that_fails_keeps_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(folder: Path, *args: Any, **options: Any) -> str:
        wanted = json.loads((folder / "run.json").read_text())
        assert wanted["longest_steps"] == [3, 4, 5]
        (folder / "steps.jsonl").write_text(json.dumps(step(0, 4.0, 40.0)) + "\n")
        return "torch.OutOfMemoryError: CUDA out of memory."

    monkeypatch.setattr(rollouts, "run_exported", failing)
    run = run_trl(tmp_path, {"num_generations": 8}, None, mean_tokens=600)
    assert run.out_of_memory
    found = compare(COMPOSED, run)
    assert (found.steps, found.step_error, found.out_of_memory) == (1, None, True)
