"""accelerate.yaml: how a training script of one's own is launched, and how several GPUs share out what it trains."""

import json

from autotune.core.files import load_data
from autotune.export import tool_file
from autotune.export.header import environment, on_cpu, sectioned, summary_lines
from autotune.study.summary import Recipe

MIXED = {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}  # of accelerate; anything else is "no"


def export(recipe: Recipe) -> dict[str, str]:
    """accelerate.yaml; for one GPU also deepspeed.json, for several later, of which the head of the other tells."""
    data = load_data("autotune.export", "accelerate")
    config = recipe.config
    mixed = MIXED.get(config.precision, "no")
    values = data["accelerate"] | {"mixed_precision": mixed, "use_cpu": on_cpu(recipe)}
    values |= {"num_processes": config.num_gpus} | data["sharding"][config.sharding]
    if config.compile == "per_layer":
        values |= data["compiled"]
    head = tool_file.texts(data["head"], tool_file.settings_of(recipe, "trl"))
    files = {"accelerate.yaml": sectioned([*summary_lines(recipe), "", *head], [("", values)])}
    if config.num_gpus == 1:
        deepspeed = data["deepspeed"] | {name: {"enabled": mixed == name} for name in ("bf16", "fp16")}
        files["deepspeed.json"] = json.dumps(deepspeed, indent=2) + "\n"
    return files


def command(recipe: Recipe) -> str:
    """The command line that runs a script of the user's own."""
    return f"{environment(recipe)} accelerate launch --config_file accelerate.yaml your_script.py"
