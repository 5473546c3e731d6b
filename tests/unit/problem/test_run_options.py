"""When a run saves and evaluates."""

import pytest

from autotune.problem.run_options import RunOptions


@pytest.mark.parametrize(
    ("options", "saves", "evaluations"),
    [
        (RunOptions(), 900, 900),  # half an hour of 2 s each
        (RunOptions(save_steps=100), 100, 100),
        (RunOptions(eval_steps=50), 900, 50),
        (RunOptions(save_steps=9999, eval_steps=9999), 5000, 5000),
    ],
)
def test_steps_between(options: RunOptions, saves: int, evaluations: int) -> None:
    assert options.steps_between_saves(5000, 2.0) == saves
    assert options.steps_between_evaluations(5000, 2.0) == evaluations


@pytest.mark.parametrize("options", [RunOptions(), RunOptions(save_steps=7, eval_steps=7)])
def test_a_run_saves_and_evaluates_at_its_end_and_not_more_often_than_each_step(
    options: RunOptions,
) -> None:
    assert (
        options.steps_between_saves(1, 10_000.0)
        == options.steps_between_evaluations(1, 10_000.0)
        == 1
    )
    # a step takes longer than half an hour
    assert RunOptions().steps_between_saves(5, 10_000.0) == 1
    assert options.report_to == "none"
