"""`plan --objective grpo` in a terminal, and commands that cannot do it."""

import pytest
from typer.testing import CliRunner

from autotune.cli.app import app
from autotune.core.errors import NothingFits, UsageError

PLAN = ("plan", "--gpu", "h100", "--model", "qwen2.5-0.5b", "--objective", "grpo")


def test_the_answer_comes_first_and_details_have_the_settings() -> None:
    result = CliRunner().invoke(app, PLAN)
    first, *rest = result.stdout.splitlines()
    assert result.exit_code == 0 and first.startswith("Qwen2.5-0.5B fits h100-sxm with grpo: LoRA")
    assert any(line.strip().startswith("needs  rollout") for line in rest)
    details = CliRunner().invoke(app, (*PLAN, "--details")).stdout
    assert details.splitlines()[0] == first
    for name in ("per_device_train_batch_size", "vllm_gpu_memory_utilization", "max_completion"):
        assert name in details
    assert "prompts 512 tokens" in details and "(assumed)" in details


def test_nothing_that_fits_is_an_error_with_a_change() -> None:
    small = (*PLAN[:2], "rtx-4090", "--model", "llama-3.1-8b", "--objective", "grpo")
    result = CliRunner().invoke(app, small)
    assert isinstance(result.exception, NothingFits)
    assert "does not fit rtx-4090 with grpo" in result.stdout
    assert "--space qlora makes it fit" in result.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("compare", "--model", "qwen2.5-0.5b", "--objective", "grpo"),
    ],
    ids=lambda args: args[0],
)
def test_other_commands_refuse_it(args: tuple[str, ...]) -> None:
    error = CliRunner().invoke(app, args).exception
    assert isinstance(error, UsageError)
    assert str(error) == "grpo trains on generated answers, and this search generates none"


@pytest.mark.parametrize("args", [(*PLAN, "--gpus", "2"), ("plan", "--gpu", "8xh100", *PLAN[3:])])
def test_several_gpus_are_refused(args: tuple[str, ...]) -> None:
    error = CliRunner().invoke(app, args).exception
    assert isinstance(error, UsageError) and str(error) == "a plan for grpo is for one GPU"
