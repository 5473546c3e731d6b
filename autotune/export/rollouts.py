"""Writes a layout of a GRPO run as arguments of TRL 1.16, and a script that trains with them."""

import json
from importlib import resources
from typing import Any

from autotune.core.lora_targets import target_modules
from autotune.core.rollout_types import COLOCATED, TRANSFORMERS, Engine
from autotune.core.train_config import TrainConfig
from autotune.problem.rollouts import Rollouts

ARGUMENTS, SCRIPT = "grpo_arguments.json", "train_grpo.py"
RUNTIME = "runtime"  # the directory of the modules that the script imports
MODULES = ("packed_completions.py", "varlen.py")


def export_layout(
    model: str, arguments: dict[str, Any], lora: dict[str, Any] | None
) -> dict[str, str]:
    """Return the files of a layout: the arguments, a script that trains with them, and its modules.

    `model` is a Hub name or a directory. The script has no name of the user's in its code.
    """
    data = {"model": model, "arguments": {"output_dir": "grpo"} | arguments, "lora": lora}
    script = resources.files("autotune.export").joinpath("templates/train_grpo.txt")
    modules = resources.files("autotune.trainer")
    return {
        ARGUMENTS: json.dumps(data, indent=1) + "\n",
        SCRIPT: script.read_text(encoding="utf-8"),
    } | {
        f"{RUNTIME}/{name}": modules.joinpath(name).read_text(encoding="utf-8") for name in MODULES
    }


def trl_arguments(
    config: TrainConfig,
    rollouts: Rollouts,
    engine: Engine,
    *,
    updates: int = 1,
    iterations: int = 1,
    beta: float = 0.0,
) -> dict[str, Any]:
    """Return the arguments of GRPOConfig for a layout on one GPU.

    The optimizer takes `updates` steps on each generation, and `iterations` times as many in total.
    `beta` is the weight of the distance from the untrained model.

    Raises ValueError if the micro batches do not divide an optimizer step, or if TRL has no
    argument for a knob.
    """
    rows, rest = divmod(rollouts.sequences, updates)
    if rest or rows % config.micro_batch_size:
        raise ValueError(
            f"micro batches of {config.micro_batch_size} rows do not divide {rollouts.sequences} "
            f"completions in {updates} optimizer steps"
        )
    if config.checkpointing not in ("none", "full") or config.compile != "none":
        raise ValueError(f"TRL's trainer for GRPO has no argument for {config.label()}")
    if config.packing and engine.kind == TRANSFORMERS:
        raise ValueError("a model with varlen attention cannot generate")

    accumulation = rows // config.micro_batch_size
    arguments = {
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * updates,
        "num_generations": rollouts.num_generations,
        "num_iterations": iterations,
        "beta": beta,
        "max_completion_length": rollouts.completion_tokens,
        "gradient_checkpointing": config.checkpointing == "full",
        "bf16": config.precision == "bf16_mixed",
        "fp16": config.precision == "fp16_mixed",
        "optim": config.optimizer,
        "model_init_kwargs": {
            "dtype": config.base_dtype,
            "attn_implementation": config.attention_implementation,
        },
    }
    return arguments | engine_arguments(engine)


def engine_arguments(engine: Engine) -> dict[str, Any]:
    """Return the arguments of GRPOConfig for an engine in the training process."""
    if engine.kind != COLOCATED:
        return {"use_vllm": False}
    limit = {"vllm_max_model_length": engine.max_tokens} if engine.max_tokens else {}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": engine.share,
        "vllm_enable_sleep_mode": engine.sleeps,
    } | limit


def lora_arguments(config: TrainConfig, model_type: str) -> dict[str, Any] | None:
    """Return the arguments of PEFT's LoraConfig, or None for full fine-tuning."""
    if config.method == "full":
        return None
    return {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_dora": config.dora,
        "use_rslora": config.rslora,
        "target_modules": target_modules(model_type, config.lora_targets) or "all-linear",
        "task_type": "CAUSAL_LM",
    }
