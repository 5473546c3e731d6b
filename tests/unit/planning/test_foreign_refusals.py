"""Runs that their tool refuses at its start: check says so instead of a verdict."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.core.errors import UsageError
from autotune.core.files import load_data
from autotune.planning.foreign_config import adapt_to_model, parse, read_file
from autotune.planning.foreign_file import Refused
from autotune.planning.foreign_refusals import _table
from autotune.planning.run_check import check
from tests.unit.planning.test_foreign_evaluation import AXOLOTL, FACTORY, TRL

BASES = {"trl": TRL, "axolotl": AXOLOTL, "llamafactory": FACTORY}
ZERO_3 = {"deepspeed": "ds_z3.json"}
FACTS: dict[str, dict[str, Any]] = {
    "FULL": {"finetuning_type": "full"},
    "LORA": {},
    "DROPOUT": {"lora_dropout": 0.1},
    "DORA": {"use_dora": True, "peft_use_dora": True},
    "ZERO_3": ZERO_3,
    "SAME_STRATEGY": {"eval_strategy": "steps", "save_strategy": "steps"},
    "BEST": {"save_strategy": "best"},
}
VALUES: dict[str, Any] = {
    "deepspeed": "ds_z2.json",
    "eval_dataset": "other",
    "lora_target_parameters": ["mlp.experts.down_proj"],
    "max_samples": 9,
    "quantization_bit": 4,
    "test_datasets": [{"path": "y"}],
    "val_set_size": 0.1,
    "val_size": 0.1,
    "warmup_ratio": 0.1,
}
ROWS = [
    (tool, row) for group in _table("refusals") for tool in group["tools"] for row in group["rows"]
]
CALM: dict[str, dict[str, Any]] = {
    "trl": {"lora_dropout": 0},
    "axolotl": {},
    "llamafactory": {"bf16": False},
}


def described(tool: str, keys: list[str]) -> dict[str, Any]:
    """A file of the tool with these keys on."""
    values: dict[str, Any] = {}
    for key in keys:
        outer, _, inner = key.partition(".")
        if key.isupper():
            values |= FACTS[key]
        elif inner:
            values[outer] = values.get(outer, {}) | {inner: True}
        else:
            values[key] = VALUES.get(
                key, 1 if key.endswith(("_epoch", "_steps", "_size")) else True
            )
    return {key: value for key, value in values.items() if key != "use_dora" or tool != "axolotl"}


@pytest.mark.parametrize("tool", BASES)
@pytest.mark.parametrize(
    ("key", "value"), [("learning_rate", -1e-4), ("warmup_ratio", 1.5), ("weight_decay", "-0.1")]
)
def test_values_that_no_optimizer_takes_are_refused(tool: str, key: str, value: Any) -> None:
    with pytest.raises(Refused, match=f"^{key}: a number from 0 to "):
        parse(BASES[tool] | CALM[tool] | {key: value}, tool)
    assert parse(BASES[tool] | CALM[tool] | {key: 0.5}, tool)


@pytest.mark.parametrize(
    ("tool", "key", "wrong", "right"),
    [
        ("trl", "optim", "adamw_8bit_paged", "paged_adamw_8bit"),
        ("axolotl", "optimizer", "muonn", "muon"),
        ("llamafactory", "lr_scheduler_type", "cosin", "cosine"),
        ("trl", "attn_implementation", "flash_atention_2", "flash_attention_2"),
        ("llamafactory", "flash_attn", "fa22", "fa2"),
        ("axolotl", "save_strategy", "step", "steps"),
    ],
)
def test_a_value_that_the_tool_does_not_have_is_refused(
    tool: str, key: str, wrong: str, right: str
) -> None:
    with pytest.raises(Refused, match=f"^{key}: .*'{wrong}' is not a known value.*'{right}'"):
        parse(BASES[tool] | CALM[tool] | {key: wrong}, tool)
    assert parse(BASES[tool] | CALM[tool] | {key: right}, tool)


def test_the_installed_transformers_has_no_other_values() -> None:
    from transformers.trainer_utils import SaveStrategy, SchedulerType
    from transformers.training_args import OptimizerNames

    tables = {"optimizers": OptimizerNames, "schedules": SchedulerType, "times": SaveStrategy}
    for name, names in tables.items():
        assert {one.value for one in names} <= set(_table(name))


def test_a_refusal_names_ignored_keys_that_may_be_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    values = AXOLOTL | {"adapter": "qlora", "load_in_4bit": None, "load_in_4bitt": True}
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(UsageError, match=r"\(ignored by Axolotl .*'load_in_4bitt'; did you mean '"):
        read_file(file)


@pytest.mark.parametrize(("tool", "row"), ROWS, ids=str)
def test_each_row_refuses_its_keys_together_and_none_alone(tool: str, row: dict[str, Any]) -> None:
    values = described(tool, row["set"])
    if "unset" not in row:  # no earlier row applies
        values |= {"val_size": 0.1} if "predict_with_generate" in values else {}
        values |= {"max_steps": 9} if "streaming" in values else {}
    with pytest.raises(Refused, match="the run is refused at its start") as refused:
        parse(BASES[tool] | CALM[tool] | values, tool)
    assert row["why"] in str(refused.value) and refused.value.remedy == row["remedy"]

    if len(row["set"]) == 1 and "unset" not in row:
        return
    for other in row.get("unset") or [None]:
        allowed = (
            described(tool, row["set"] + [other]) if other else described(tool, row["set"][:1])
        )
        assert row["why"] not in message(tool, allowed)


def message(tool: str, values: dict[str, Any]) -> str:
    """The tool's refusal of these values, or ""."""
    try:
        parse(BASES[tool] | CALM[tool] | values, tool)
    except Refused as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    "key", sorted({key for _, row in ROWS for key in row["set"] if not key.isupper()})
)
def test_the_keys_of_the_rows_are_keys_of_the_tools(key: str) -> None:
    for tool in {tool for tool, row in ROWS if key in row["set"]}:
        assert key.partition(".")[0] in load_data("autotune.planning", "known_keys")[tool]["keys"]


def test_the_line_of_the_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(TRL, sort_keys=False) + "fp16: true\nbf16: true\n")
    with pytest.raises(
        UsageError, match=r"run\.yaml:9: fp16: the run is refused at its start: transformers"
    ) as error:
        read_file(path)
    assert error.value.remedy == "switch one of them off"


MIXTURE = TRL | {"model_name_or_path": "Qwen/Qwen3-30B-A3B"}


def test_peft_has_no_dropout_for_joined_experts(tmp_path: Path) -> None:
    """TRL's default is 0.05.

    The other tools name the linear layers that they find, without joined experts.
    """
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MIXTURE))
    with pytest.raises(
        UsageError,
        match=r"run\.yaml: lora_dropout: .*0\.05, but .* fuses the experts of qwen3_moe",
    ):
        check(path, {"gpu": "h200-sxm"})

    model = resolve_model("Qwen/Qwen3-30B-A3B")
    assert (
        adapt_to_model(parse(MIXTURE | {"lora_dropout": 0}, "trl"), model).config.lora_targets
        == "all-linear"
    )
    attention = MIXTURE | {"lora_target_modules": ["q_proj", "v_proj"]}
    assert adapt_to_model(parse(attention, "trl"), model).config.lora_dropout == 0.05
    found = adapt_to_model(
        parse(AXOLOTL | {"lora_dropout": 0.05, "base_model": model.name}, "axolotl"), model
    )
    assert found.config.lora_dropout == 0 and any(
        "no" in note and "fused experts" in note for note in found.notes
    )


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["gate_proj", "q_proj"], "adapts both gate_proj and up_proj"),
        (["q_proj", "lm_head"], "no adapter on the head"),
    ],
)
def test_targets_that_are_refused(targets: list[str], problem: str) -> None:
    values = MIXTURE | {"lora_target_modules": targets, "lora_dropout": 0}
    with pytest.raises(Refused, match=problem):
        adapt_to_model(parse(values, "trl"), resolve_model("Qwen/Qwen3-30B-A3B"))
