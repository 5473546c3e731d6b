"""The answers of commands in words: each has the answer, its needs and cost, how certain they are,
and why.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.cli.last_screen import answer as last_screen
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_count, fmt_gib, fmt_usd
from autotune.report.answers import (
    Answer,
    check_answer,
    gpu_answer,
    plan_answer,
    shape,
    study_answer,
)
from autotune.report.describe import gpu_choices
from autotune.report.values.plan import NO_SPEED
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
    assert made.best is not None and made.best.cost is not None
    speed, usd = fmt_count(made.best.tokens_per_s), fmt_usd(made.best.cost.full_run_usd)
    assert f"fits a10: {shape(made.best.config)}, {speed} tokens/s, " in found.answer
    assert found.answer.endswith(f", {usd} (estimated)")
    assert "GiB for tensors" in found.needs and found.cost.startswith("$")
    assert "nothing was measured here; " in found.certainty
    assert found.reason.startswith(made.reason) and found.details is made and has_all(found)


def test_the_cost_says_how_many_tokens_are_cut_off() -> None:
    """Rows of 4,096 tokens, the longest of the space, leave 60 % of 10,240 tokens out."""
    made = autotune.plan(MODEL, gpu="a10", tokens_per_example=10_240)
    assert made.best is not None and made.best.config.seq_len == 4_096
    assert ", 60 % of the tokens cut off at 4,096, " in plan_answer(made).cost
    whole = autotune.plan(MODEL, gpu="a10", tokens_per_example=512)
    assert "cut off" not in plan_answer(whole).cost


def test_a_plan_without_a_winner_has_one_need() -> None:
    """The verdict and the line on memory are about the same configuration."""
    for model, gpu, space, words in (
        ("llama-3.1-70b", "a10", None, "does not fit a10: it needs at least"),
        ("llama-3.1-8b", "a10", "full", "does not fit a10: it needs at least"),
    ):
        made = autotune.plan(model, gpu=gpu, space=space)
        found = plan_answer(made)
        need = fmt_gib(made.shown.need_gib)
        assert made.best is None and f"{words} {need} of 20.1 GiB" in found.answer
        assert found.needs.startswith(f"{need} of 20.1 GiB")
        assert made.least is not None and need in made.facts()["memory"]
        assert made.shown is made.least and made.least.need_gib < made.baseline.need_gib

    fitting = replace(made.baseline, need_gib=12.0, memory=None)
    unknown = plan_answer(replace(made, reason=NO_SPEED, fitting=fitting))
    assert "fits a10, at an unknown speed: it needs 12.0 GiB of" in unknown.answer
    assert unknown.needs.startswith("12.0 GiB of")


def test_what_may_learn_differently_is_named_in_full_fine_tuning() -> None:
    full = TrainConfig(method="full", optimizer="paged_adamw_8bit", precision="bf16_pure")
    size = f"{full.micro_batch_size} x {full.seq_len:,}"
    assert shape(full) == f"full fine-tuning in pure bf16 with paged_adamw_8bit, {size}"
    usual = replace(full, optimizer="adamw_torch", precision="bf16_mixed")
    assert shape(usual) == f"full fine-tuning, {size}"


def test_the_answer_for_several_gpus_is_the_cheapest_and_the_fastest() -> None:
    made = autotune.plan(MODEL, gpu="h100", tokens_per_example=512, gpus=[1, 2])
    found = gpu_answer(made)
    assert found.answer.startswith("1 h100-sxm trains ") and " cheapest: LoRA r" in found.answer
    assert "the fastest is 2 h100-sxm with ddp: " in found.reason and has_all(found)


def test_a_comparison_says_that_it_leaves_out_unknown_speeds() -> None:
    """The interconnect of this card is unknown, so the speed of several is unknown."""
    own = "name=mine,memory=24,bf16_tflops=165,bandwidth_gb_s=1008"
    made = autotune.plan(MODEL, gpu=own, tokens_per_example=512, price=0.3, gpus=[1, 2])
    found = gpu_answer(made)
    assert found.answer.startswith("1 mine (as you described it) trains ")
    assert " cheapest (of the known speeds): LoRA r" in found.answer
    cheapest, fastest = gpu_choices(made, None)
    assert cheapest.startswith("cheapest of those with a known speed: 1 GPU (")
    assert fastest.startswith("fastest of those with a known speed: 1 GPU (")


@pytest.mark.parametrize(("gpu", "verdict"), [("h100", "fits: needs"), ("a10", "fits: needs")])
def test_the_answer_of_a_check_is_its_verdict(tmp_path: Path, gpu: str, verdict: str) -> None:
    (file := tmp_path / "trl.yaml").write_text(TRL)
    report = autotune.check(file, gpu=gpu)
    found = check_answer(report)
    assert found.answer.startswith(verdict) and "the peak is in the" in found.needs
    assert all(note in found.reason for note in report.notes) and has_all(found)
