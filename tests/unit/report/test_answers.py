"""The answers of commands in words: each has the answer, its needs and cost, how certain they are,
and why.
"""

from pathlib import Path

import pytest

import autotune
from autotune.cli.last_screen import answer as last_screen
from autotune.report.answers import Answer, check_answer, gpu_answer, plan_answer, study_answer
from tests.helpers.factories import summary

MODEL = "qwen2.5-0.5b"
TRL = (
    f"model_name_or_path: {MODEL}\nper_device_train_batch_size: 1\nuse_peft: true\n"
    "max_length: 512\n"
)


def has_all(answer: Answer) -> bool:
    return all((answer.answer, answer.needs, answer.cost, answer.certainty))


def test_the_last_screen_prints_the_answer_of_the_study() -> None:
    study = summary()
    assert study.recipe is not None
    found = study_answer(study.recipe)
    printed = {field.text for field in last_screen(study, study.recipe)}
    assert {found.answer, found.needs, found.cost, found.certainty} <= printed
    assert found.reason == study.recipe.reason and found.details is study.recipe


def test_the_answer_of_a_plan_is_its_best_configuration() -> None:
    made = autotune.plan(MODEL, gpu="a10", tokens_per_example=512)
    found = plan_answer(made)
    assert made.best is not None and found.answer == made.best.config.label()
    assert (
        "fits: weights" in found.needs
        and found.cost.startswith("$")
        and made.how_sure in found.certainty
    )
    assert found.reason.startswith(made.reason) and found.details is made and has_all(found)


def test_the_answer_for_several_gpus_is_the_cheapest_and_the_fastest() -> None:
    made = autotune.plan(MODEL, gpu="h100", tokens_per_example=512, gpus=[1, 2])
    found = gpu_answer(made)
    assert found.answer.startswith("cheapest: 1 GPU") and "\nfastest: 2 GPUs" in found.answer
    assert made.how_sure in found.certainty and has_all(found)


def test_a_comparison_says_that_it_leaves_out_unknown_speeds() -> None:
    """The interconnect of an RTX 4090 is unknown, so the speed of several is unknown."""
    made = autotune.plan(MODEL, gpu="rtx-4090", tokens_per_example=512, gpus=[1, 2])
    cheapest, fastest = gpu_answer(made).answer.splitlines()
    assert cheapest.startswith("cheapest of those with a known speed: 1 GPU (")
    assert fastest.startswith("fastest of those with a known speed: 1 GPU (")


@pytest.mark.parametrize(("gpu", "verdict"), [("h100", "fits: needs"), ("a10", "fits: needs")])
def test_the_answer_of_a_check_is_its_verdict(tmp_path: Path, gpu: str, verdict: str) -> None:
    (file := tmp_path / "trl.yaml").write_text(TRL)
    report = autotune.check(file, gpu=gpu)
    found = check_answer(report)
    assert found.answer.startswith(verdict) and "the peak is in the" in found.needs
    assert all(note in found.reason for note in report.notes) and has_all(found)
