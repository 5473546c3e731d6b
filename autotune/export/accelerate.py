"""accelerate.yaml and deepspeed.json: how a training script of one's own is launched, on one GPU or over several."""

import json

from autotune.core.files import load_data
from autotune.export.header import environment, on_cpu, sectioned, summary_lines
from autotune.study.summary import Recipe

MIXED = {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}  # of accelerate; anything else is "no"
BLOCK_WISE = ("adafactor",)  # their state has the shape of a parameter, and ZeRO flattens parameters


def export(recipe: Recipe) -> dict[str, str]:
    """Both files. JSON has no comments: the head of accelerate.yaml also says what to know of deepspeed.json."""
    data = load_data("autotune.export", "accelerate")
    config = recipe.config
    mixed = MIXED.get(config.precision, "no")
    values = data["accelerate"] | {"mixed_precision": mixed, "use_cpu": on_cpu(recipe)}
    if config.compile == "per_layer":
        values |= data["compiled"]
    deepspeed = data["deepspeed"] | {name: {"enabled": mixed == name} for name in ("bf16", "fp16")}
    return {
        "accelerate.yaml": sectioned(_head(recipe), [("", values)]),
        "deepspeed.json": json.dumps(deepspeed, indent=2) + "\n",
    }


def command(recipe: Recipe) -> str:
    """The command line that runs a script of the user's own."""
    return f"{environment(recipe)} accelerate launch --config_file accelerate.yaml your_script.py"


def launch_arguments(recipe: Recipe) -> list[str]:
    """Arguments of `accelerate launch` for what was probed."""
    # It overwrites ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION, so that only its own flag has an effect.
    regional = ["--dynamo_use_regional_compilation"] if recipe.config.compile == "per_layer" else []
    return ["--num_processes", "1", *regional]


def _head(recipe: Recipe) -> list[str]:
    own = "train.py needs no launcher: start it by launch.sh"
    return [
        *summary_lines(recipe),
        "",
        f"For a script of your own, on {'the processor' if on_cpu(recipe) else 'one GPU'}:",
        f"  {command(recipe)}",
        f"{own}, which compiles its layers itself." if recipe.config.compile == "per_layer" else f"{own}.",
        f"The speed was probed with {recipe.trainer}, and is valid for that loop only.",
        "",
        "deepspeed.json is for data parallelism later; it was not measured. Name it in training_args.json:",
        '"deepspeed": "deepspeed.json", and start with `accelerate launch --num_processes N`, without this file.',
        *(f"- {item}" for item in _several(recipe)),
    ]


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
