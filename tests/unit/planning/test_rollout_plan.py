"""Plans of GRPO runs: the layout that surely fits, and what to change if none does."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import autotune
from autotune.cli.plan_text import trl_settings
from autotune.core.errors import UsageError
from autotune.planning.rollout_plan import plan_rollouts
from autotune.planning.run_check import check
from autotune.problem.study_spec import StudySpec
from autotune.report.answers import rollout_answer
from autotune.report.values.rollouts import RolloutPlan

OPTIONS: dict[str, Any] = {"space": "lora", "tokens_per_example": 256, "pins": {"lora_rank": 16}}


def plan(model: str = "qwen3-4b", gpu: str = "h100", **options: Any) -> RolloutPlan:
    return plan_rollouts(StudySpec(model=model, gpu=gpu, objective="grpo", **OPTIONS | options))


def test_a_layout_that_fits_the_longest_completions() -> None:
    result = plan(mean_completion=600, p99_completion=2000)
    best = result.best
    assert best is not None and best.state == "fits" and result.fits_up_to is None
    assert best.need_gib <= result.limit_gib
    rollouts = best.rollouts
    assert rollouts.longest == best.config.seq_len == rollouts.engine.max_tokens
    assert 1900 < rollouts.completion_tokens < 2100 and rollouts.prompt_tokens == 256
    assert rollouts.sequences == 64 and 64 % best.config.micro_batch_size == 0
    # The cache holds all completions at their mean length.
    assert (best.cached_tokens or 0) >= 64 * (rollouts.mean_tokens or 0)
    answer = rollout_answer(result)
    assert answer.answer.startswith("Qwen3-4B fits h100-sxm with grpo: LoRA r16")
    assert answer.needs.startswith("rollout ") and "log-probabilities " in answer.needs
    assert "all 64 completions" in answer.reason


def test_a_small_gpu_gets_a_change_or_the_length_at_which_it_breaks() -> None:
    result = plan("llama-3.1-8b", "rtx-4090")
    assert result.best is None and result.change == "--space qlora"
    assert plan("llama-3.1-8b", "rtx-4090", space="qlora").best is not None

    pins = {"lora_rank": 16, "checkpointing": "none", "micro_batch_size": 8}
    long = plan(max_completion=16_000, pins=pins, mean_completion=600, p99_completion=2000)
    assert long.best is None and long.fits_up_to is not None and long.fits_up_to < 16_000
    fitting = plan(max_completion=long.fits_up_to, pins=pins)
    assert fitting.best is not None
    text = rollout_answer(long).change
    assert f"completions fit up to {long.fits_up_to:,} of 16,000 tokens" in text


def test_a_reference_needs_memory_in_full_fine_tuning_only() -> None:
    options = {"space": "full", "pins": {}}
    alone, compared = (plan("qwen2.5-0.5b", **options, beta=beta) for beta in (0.0, 0.04))
    assert alone.best and compared.best
    assert not alone.best.rollouts.has_reference and compared.best.rollouts.has_reference
    assert compared.leanest.need_gib > alone.leanest.need_gib + 0.9


def test_lengths_come_from_files(tmp_path: Path) -> None:
    completions = tmp_path / "completions.txt"
    completions.write_text("100\n300\n500\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "' + "word " * 80 + '"}\n'
        '{"prompt": [{"role": "user", "content": "' + "word " * 160 + '"}]}\n'
    )
    result = plan(completions=str(completions), dataset=str(prompts), tokens_per_example=None)
    rollouts = result.leanest.rollouts
    assert rollouts.completion_tokens == 500 and 180 <= rollouts.prompt_tokens <= 220
    assert rollouts.mean_tokens == pytest.approx(300 + result.task.workload.lengths.mean)
    cut = plan(completions=str(completions), max_completion=300).leanest.rollouts
    assert cut.completion_tokens == 300 and cut.mean_tokens == pytest.approx(256 + 700 / 3)


def test_assumptions_are_said() -> None:
    result = plan(tokens_per_example=None)
    assert result.completions.source == "assumed" and result.completions.mean == pytest.approx(
        600, rel=0.01
    )
    assert result.task.workload.lengths.source == "assumed"
    assert result.leanest.rollouts.prompt_tokens == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 32}, "global_batch has no effect with grpo"),
        ({"pins": {"seq_len": 1024}}, "seq_len has no effect with grpo"),
        ({"gpus": 2}, "a plan for grpo is for one GPU"),
        ({"mean_completion": 600.0}, "give mean_completion and p99_completion together"),
        ({"mean_completion": 600.0, "p99_completion": 60_000.0}, "no log-normal distribution"),
        ({"num_generations": 1}, "num_generations cannot be 1"),
        (
            {"max_completion": 10**9},
            "the longest prompt .256 tokens. and a completion",
        ),
        ({"tokens_per_example": 10**9}, "are longer than the context of Qwen3-4B"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**options)


def test_assumed_completions_end_at_the_context() -> None:
    assert plan("gpt2").leanest.rollouts.longest == 1024


def test_completions_are_for_grpo_only() -> None:
    with pytest.raises(UsageError, match="num_generations: only objective grpo generates"):
        StudySpec(model="qwen3-4b", num_generations=8)


def test_python_gives_the_same_plan() -> None:
    result = autotune.plan("qwen3-4b", objective="grpo", gpu="h100", **OPTIONS)
    assert isinstance(result, RolloutPlan) and result == plan()
    assert "vLLM's share" in repr(result)


def test_a_model_that_vllm_cannot_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="vLLM cannot hold the weights and one completion"):
        plan("llama-3.3-70b", "rtx-4090")


def test_check_agrees_with_the_planned_layout(tmp_path: Path) -> None:
    """The settings that the plan prints, in a file of TRL."""
    result = plan("qwen2.5-1.5b", "rtx-4090", mean_completion=300, p99_completion=900)
    best = result.best
    assert best is not None
    settings = {name: yaml.safe_load(value) for name, value in trl_settings(result, best).items()}
    config = best.config
    recomputes = {"gradient_checkpointing": config.checkpointing == "full"}
    assert config.checkpointing in ("none", "full")
    file = tmp_path / "grpo.yaml"
    model = {"model_name_or_path": "Qwen/Qwen2.5-1.5B", "reward_funcs": "a_reward"}
    adapters = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear"}
    others = {"dtype": "bfloat16", "optim": config.optimizer, "use_vllm": True, "lora_dropout": 0}
    file.write_text(yaml.safe_dump(model | adapters | others | recomputes | settings))
    report = check(file, {"gpu": "rtx-4090", "tokens_per_example": 256})
    assert report.checked.run.config == config
    found = report.bounds_of_phases
    assert found.keys() == best.bounds_of_phases.keys()
    for phase, bounds in best.bounds_of_phases.items():
        assert found[phase] == pytest.approx(bounds)
