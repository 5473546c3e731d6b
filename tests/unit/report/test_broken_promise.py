"""A failed verification is on the first screen of the run, the report, the dashboard and status."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.cli.commands.studies import status_lines
from autotune.cli.last_screen import answer
from autotune.core.train_config import TrainConfig
from autotune.report import dashboard, describe, html
from autotune.study.summary import StudySummary, Verification
from tests.helpers.factories import summary


def verified(**changes: Any) -> StudySummary:
    """A study whose winner was verified with the tolerance of 10 %."""
    study = summary()
    assert study.recipe is not None
    values: dict[str, Any] = {
        "config": study.recipe.config,
        "micro_steps": 100,
        "tolerance": 0.1,
        "promised_tokens_per_s": 1000.0,
        "promised_step_s": 2.0,
        "promised_gib": 20.0,
        "seconds_per_step": 2.0,
        "reserved_gib": 20.0,
    }
    return replace(study, verification=Verification(**values | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seconds_per_step": 10.2}, "the run is 5.1 times slower than predicted"),
        ({"seconds_per_step": 2.4}, "the run is slower than predicted by over 10%"),
        ({"reserved_gib": 30.0}, "the run is larger than predicted by over 10%"),
        ({"seconds_per_step": None, "reason": "exit 1"}, "the exported run failed: exit 1"),
    ],
)
def test_a_failed_verification_comes_first(changes: dict[str, Any], text: str) -> None:
    study = verified(**changes)
    assert study.recipe is not None
    broken = f"verify failed: {text}"
    assert describe.broken_promise(study) == broken

    assert describe.headline(study) == broken
    assert answer(study, study.recipe) == answer(replace(study, verification=None), study.recipe)
    assert html._headline(study) == f"V{broken[1:]}"
    assert dashboard._note(study).startswith(f"**`{broken}`**")
    assert status_lines(study, None, "out")["answer"] == broken


@pytest.mark.parametrize(
    "changes", [{}, {"seconds_per_step": 1.0}, {"config": TrainConfig(), "reason": "exit 1"}]
)
def test_a_verification_that_holds_or_is_of_another_winner_is_not_there(
    changes: dict[str, Any],
) -> None:
    study = verified(**changes)
    assert study.recipe is not None
    assert describe.broken_promise(study) is None
    first = status_lines(study, None, "out")["answer"]
    assert first == describe.headline(study) == describe.headline(replace(study, verification=None))
    assert first.startswith("2.1 times the speed of the baseline: the full run takes ")
    assert html._headline(study) == html._headline(replace(study, verification=None))
