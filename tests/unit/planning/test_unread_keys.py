"""No key of a user's file is dropped without a word."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.core.errors import UsageError
from autotune.core.files import load_data
from autotune.planning.foreign_config import parse, read_file
from autotune.planning.foreign_sharding import shard_run

MODEL = "Qwen/Qwen2.5-0.5B"
GRPO = {"num_generations": 8, "per_device_train_batch_size": 8, "use_vllm": True}
ADAPTERS = {"use_peft": True, "load_in_4bit": True, "lora_target_modules": ["q_proj", "v_proj"]}
# Runs of each tool. Together, they read every key that the tool's reader knows.
RUNS: dict[str, list[dict[str, Any]]] = {
    "trl": [
        {},
        ADAPTERS | {"eval_strategy": "epoch"},
        ADAPTERS | {"fsdp": "full_shard", "dtype": "bfloat16"},
        {"fsdp": "full_shard", "gradient_accumulation_steps": 2},
        GRPO,
        GRPO | {"vllm_mode": "server"},
        {"objective": "dpo"},
    ],
    "axolotl": [
        {},
        {
            **{"adapter": "qlora", "lora_r": 8, "load_in_4bit": True, "val_set_size": 0.1},
            **{"eval_steps": 5, "plugins": ["liger", "cut_cross_entropy"], "sample_packing": True},
        },
        {"adapter": "lora", "lora_r": 8, "val_set_size": 0.1, "eval_steps": 5},
        {"rl": "grpo", "micro_batch_size": 8, "trl": {"use_vllm": True}},
        {"rl": "dpo"},
        {"fsdp_version": 2, "fsdp_config": {"x": 1}},
        {"model_quantization_config": "x"},
    ],
    "llamafactory": [
        {"stage": "sft", "do_train": True},
        {
            **{"stage": "sft", "do_train": True, "finetuning_type": "lora", "quantization_bit": 4},
            **{"val_size": 0.1, "eval_strategy": "steps", "compute_accuracy": True},
        },
        {"stage": "sft", "do_train": True, "finetuning_type": "oft"},
        {"stage": "dpo", "do_train": True, "finetuning_type": "full"},
        {
            **{"stage": "sft", "do_train": True, "finetuning_type": "full", "bf16": True},
            **{"fsdp": "full_shard", "gradient_accumulation_steps": 2},
        },
    ],
}
VALUES: list[Any] = [
    *(True, False, 1, 3, 4, 64, 0.5, 0.05, "x", "auto", "full", "float32", "int8", "steps", "no"),
    *("bfloat16", "adafactor", "eager", "fsdp2", "server", ["a", "b"], ["q_proj", "k_proj"]),
    *(["lm_head", "up_proj"], {"a": 1}, {"use_vllm": False}, {"dequantize": True}),
    *("zero3.json", "full_shard", {"stage": 3}),
    {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
]


def described(values: dict[str, Any], tool: str, gpus: int | None) -> str:
    """What the reader makes of a file: the run, on several GPUs if asked, or why it refuses it."""
    try:
        run = parse(values, tool)
        run = run if gpus is None else shard_run(run, resolve_model(MODEL), gpus)
    except UsageError as error:
        return f"refused: {error}"
    return repr(replace(run, values={}))


@cache
def _plain(run: str, tool: str, gpus: int | None) -> str:
    return described(json.loads(run), tool, gpus)


def is_read(key: str, tool: str, runs: list[dict[str, Any]]) -> bool:
    """Whether some value of a key changes some run."""
    return any(
        described(run | {key: value}, tool, gpus) != _plain(json.dumps(run), tool, gpus)
        for gpus in (None, 2)
        for run in runs
        for value in VALUES
    )


@pytest.mark.parametrize("tool", RUNS)
def test_every_key_of_a_tool_is_read_or_named_or_without_influence(tool: str) -> None:
    tables = load_data("autotune.planning", "unread_keys")
    excused = {*tables["not_counted"], *tables["without_influence"][tool]}
    known = set(load_data("autotune.planning", "known_keys")[tool]["keys"])
    model_key = "base_model" if tool == "axolotl" else "model_name_or_path"
    runs = [{model_key: MODEL} | run for run in RUNS[tool]]
    silent = [key for key in sorted(known - excused) if not is_read(key, tool, runs)]
    assert silent == []


def test_the_tables_name_no_key_twice_and_no_key_that_no_tool_has() -> None:
    tables = load_data("autotune.planning", "unread_keys")
    known = load_data("autotune.planning", "known_keys")
    everywhere = set().union(*(known[tool]["keys"] for tool in known))
    assert set(tables["not_counted"]) <= everywhere
    for tool, names in tables["without_influence"].items():
        assert set(names) <= set(known[tool]["keys"])
        assert not set(names) & set(tables["not_counted"])


def test_keys_of_another_objective_are_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"model_name_or_path": MODEL, "max_length": 512} | GRPO))
    assert read_file(file).ignored == (
        "not read, because TRL's trainer for grpo has no such key: max_length"
    )
    assert read_file(file, "sft").ignored == (
        "not read, because TRL's trainer for sft has no such key: num_generations, use_vllm"
    )


def test_keys_that_are_not_counted_are_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    keys = {"tf32": True, "label_smoothing_factor": 0.1, "torch_empty_cache_steps": None}
    keys["accelerator_config"] = {"split_batches": True}
    file.write_text(yaml.safe_dump({"model_name_or_path": MODEL, "dataset_name": "a/b"} | keys))
    assert read_file(file).ignored == (
        "not counted: accelerator_config.split_batches, label_smoothing_factor, tf32"
    )
