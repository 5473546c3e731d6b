"""accelerate.yaml and deepspeed.json: how a training script of one's own is launched, on one GPU or over several."""

import json
from typing import Any

from autotune.export.header import ENVIRONMENT, comment, summary_lines
from autotune.study.summary import Recipe

MIXED = {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}  # of accelerate; anything else is "no"
BLOCK_WISE = ("adafactor",)  # their state has the shape of a parameter, and ZeRO flattens parameters

COMMAND = f"{ENVIRONMENT} accelerate launch --config_file accelerate.yaml your_script.py"


def export(recipe: Recipe) -> dict[str, str]:
    """Both files; DeepSpeed's has no comments, and what is to be known of it stands in the other's head."""
    return {"accelerate.yaml": _accelerate(recipe), "deepspeed.json": json.dumps(_deepspeed(recipe), indent=2) + "\n"}


def launch_arguments(recipe: Recipe) -> list[str]:
    """Arguments of `accelerate launch` for what was probed."""
    # It overwrites ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION, so that only its own flag has an effect.
    regional = ["--dynamo_use_regional_compilation"] if recipe.config.compile == "per_layer" else []
    return ["--num_processes", "1", *regional]


def _accelerate(recipe: Recipe) -> str:
    import yaml

    config, compiled = recipe.config, recipe.config.compile == "per_layer"
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_machines": 1,
        "num_processes": 1,
        "machine_rank": 0,
        "mixed_precision": MIXED.get(config.precision, "no"),
        "use_cpu": recipe.device.kind == "cpu",
        "debug": False,
    }
    if compiled:
        values["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "default",
            "dynamo_use_dynamic": False,  # as probed: a shape is compiled as it is
            "dynamo_use_fullgraph": False,
            "dynamo_use_regional_compilation": True,
        }
    own = "train.py needs no launcher: start it by launch.sh"
    head = [
        *summary_lines(recipe),
        "",
        "For a script of your own, on one GPU:",
        f"  {COMMAND}",
        f"{own}, which compiles its layers itself." if compiled else f"{own}.",
        f"The speed was probed with {recipe.trainer}, and is valid for that loop only.",
        "",
        "deepspeed.json is for data parallelism later; it was not measured. Name it in training_args.json:",
        '"deepspeed": "deepspeed.json", and start with `accelerate launch --num_processes N`, without this file.',
        *(f"- {item}" for item in _several(recipe)),
    ]
    return f"{comment(head)}\n\n{yaml.safe_dump(values, sort_keys=False)}"


def _several(recipe: Recipe) -> list[str]:
    """What changes with DeepSpeed on several GPUs."""
    config = recipe.config
    lines = [
        "The global batch is N times as large: divide gradient_accumulation_steps"
        f" ({recipe.accumulation}) by N to keep it.",
        "Optimizer, learning rate and schedule are the Trainer's. A block of DeepSpeed's would put an Adam of its own"
        f" in the place of {config.optimizer}.",
    ]
    if config.precision in MIXED:
        lines.append(
            f"DeepSpeed computes in {MIXED[config.precision]} without autocast, and keeps what is trained in fp32 too."
        )
    if config.optimizer in BLOCK_WISE:
        lines.append(f"ZeRO flattens parameters: {config.optimizer} then factors nothing, and needs more memory.")
    return lines


def _deepspeed(recipe: Recipe) -> dict[str, Any]:
    """ZeRO-2 (keys of DeepSpeed 0.19). "auto" is the Trainer's to fill: any other value that differs is refused."""
    mixed = MIXED.get(recipe.config.precision)
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": mixed == "bf16"},
        "fp16": {"enabled": mixed == "fp16"},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": "auto",
        },
        "zero_allow_untested_optimizer": True,  # torch's AdamW it knows, those in 8 bits it does not
    }
