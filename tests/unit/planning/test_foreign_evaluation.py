"""The evaluations of other tools' files, and what they need."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.probe_types import Phase
from autotune.planning.foreign_config import parse
from autotune.planning.run_check import check
from autotune.prediction.estimate import Evaluation
from autotune.problem.run_cost import FITS, OOM
from autotune.report.answers import check_answer, verdict

TRL = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "load_in_4bit": True,
    "dtype": "bfloat16",
    "max_length": 4096,
    "per_device_train_batch_size": 1,
}
AXOLOTL = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 32,
    "lora_target_linear": True,
    "sequence_len": 4096,
    "micro_batch_size": 2,
    "datasets": [{"path": "x", "type": "alpaca"}],
}
FACTORY = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "dataset": "mine",
    "template": "llama3",
    "cutoff_len": 2048,
    "bf16": True,
    "per_device_train_batch_size": 2,
}
CUT = {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}
LIGER = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_fused_linear_cross_entropy": True,
}


@pytest.mark.parametrize(
    ("tool", "values", "expected"),
    [
        ("trl", {}, None),
        ("trl", {"eval_strategy": False}, None),  # YAML reads an unquoted `no` as false
        ("trl", {"do_eval": True}, None),
        ("trl", {"eval_strategy": "epoch"}, Evaluation(rows=8, loss="chunked")),
        (
            "trl",
            {"eval_strategy": "steps", "per_device_eval_batch_size": 32},
            Evaluation(rows=32, loss="chunked"),
        ),
        ("axolotl", {"evals_per_epoch": 4}, None),
        ("axolotl", {"val_set_size": 0.05}, None),
        # of one epoch: it is skipped
        ("axolotl", {"val_set_size": 0.05, "evals_per_epoch": 1}, None),
        ("axolotl", {"val_set_size": 0.05, "eval_steps": 50}, Evaluation(rows=None, loss="full")),
        (
            "axolotl",
            {"test_datasets": ["y"], "eval_strategy": "epoch"},
            Evaluation(rows=None, loss="full"),
        ),
        (
            "axolotl",
            {
                "val_set_size": 0.05,
                "evals_per_epoch": 4,
                "eval_batch_size": 16,
                "sample_packing": True,
            },
            Evaluation(rows=None, loss="full"),
        ),
        (
            "axolotl",
            {"val_set_size": 0.05, "eval_steps": 9, "eval_batch_size": 16, "sample_packing": True}
            | {"eval_sample_packing": False},
            Evaluation(rows=16, loss="full"),
        ),
        (
            "axolotl",
            {"val_set_size": 9, "eval_steps": 9} | CUT,
            Evaluation(rows=None, loss="chunked"),
        ),
        (
            "axolotl",
            {"val_set_size": 9, "eval_steps": 9} | LIGER,
            Evaluation(rows=None, loss="full"),
        ),
        ("llamafactory", {"eval_strategy": "steps"}, None),
        ("llamafactory", {"val_size": 0.1}, None),
        ("llamafactory", {"val_size": 0.1, "do_eval": True}, Evaluation(rows=8, loss="full")),
        (
            "llamafactory",
            {"eval_dataset": "other", "eval_strategy": "steps", "enable_liger_kernel": True},
            Evaluation(rows=8, loss="full"),
        ),
        (
            "llamafactory",
            {
                "val_size": 0.1,
                "max_samples": 1000,
                "eval_strategy": "epoch",
                "compute_accuracy": True,
            },
            Evaluation(rows=8, loss="full", kept_tokens=100 * 2048),
        ),
    ],
)
def test_the_evaluation_of_a_file(
    tool: str, values: dict[str, Any], expected: Evaluation | None
) -> None:
    base = {"trl": TRL, "axolotl": AXOLOTL, "llamafactory": FACTORY}[tool]
    assert parse(base | values, tool).evaluation == expected


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_an_evaluation_that_needs_more_than_a_step_decides_the_verdict(path: Path) -> None:
    path.write_text(
        yaml.safe_dump(TRL | {"eval_strategy": "steps", "per_device_eval_batch_size": 32})
    )
    report = check(path, {"gpu": "rtx-3090"})
    assert report.checked.state == OOM and report.checked.bounds.reported.phase is Phase.EVALUATE
    assert "on rtx-3090 in an evaluation" in verdict(report)
    assert "the peak is in an evaluation" in check_answer(report).needs
    assert report.notes[0].startswith(
        "The evaluation, not the training, sets the memory peak: 32 examples at a time"
        " (per_device_eval_batch_size). A training step"
    )
    assert report.fix is not None and report.fix.edits == {"per_device_eval_batch_size": 1}

    path.write_text(yaml.safe_dump(TRL))
    trained = check(path, {"gpu": "rtx-3090"})
    assert trained.checked.state == FITS
    assert report.fix.estimate.need_gib == trained.checked.estimate.need_gib


def test_a_default_of_8_examples_with_all_logits_is_named(path: Path) -> None:
    path.write_text(
        yaml.safe_dump(
            FACTORY | {"val_size": 0.1, "eval_strategy": "steps", "enable_liger_kernel": True}
        )
    )
    report = check(path, {"gpu": "a100-40gb-sxm"})
    assert (
        "8 examples at a time (per_device_eval_batch_size, by default), with the logits of all"
        in report.notes[0]
    )


def test_predictions_that_wait_for_metrics_take_16_bytes_a_token(path: Path) -> None:
    values = FACTORY | {"val_size": 2**20 // 2048, "eval_strategy": "steps"}
    path.write_text(yaml.safe_dump(values | {"compute_accuracy": True}))
    kept = check(path, {"gpu": "b200-sxm"}).checked
    path.write_text(yaml.safe_dump(values))
    freed = check(path, {"gpu": "b200-sxm"}).checked
    assert kept.estimate.need_gib - freed.estimate.need_gib == pytest.approx(16 / 1024)


def test_a_smaller_micro_batch_keeps_the_batch_of_the_evaluation(path: Path) -> None:
    path.write_text(
        yaml.safe_dump(TRL | {"per_device_train_batch_size": 32, "eval_strategy": "steps"})
    )
    report = check(path, {"gpu": "rtx-4090"})
    evaluated = replace(report.checked.run.config, micro_batch_size=8)
    for fixed, _ in report.fixes:
        if fixed.run.config.micro_batch_size == 1 and not {"max_length", "optim"} & set(
            fixed.edits
        ):
            assert (
                fixed.estimate.memory is not None and fixed.estimate.memory.phase is Phase.EVALUATE
            )
    assert report.checked.run.evaluation is not None
    assert (
        report.checked.run.evaluation.batch_of(report.checked.run.config).tokens == evaluated.tokens
    )
