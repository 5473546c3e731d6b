"""accelerate.yaml and deepspeed.json: how a training script of one's own is launched, on one GPU or over several."""

import json

from autotune.core.files import load_data
from autotune.export import tool_file
from autotune.export.header import environment, on_cpu, sectioned, summary_lines
from autotune.study.summary import Recipe

MIXED = {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}  # of accelerate; anything else is "no"


def export(recipe: Recipe) -> dict[str, str]:
    """Both files. JSON has no comments: the head of accelerate.yaml also says what to know of deepspeed.json."""
    data = load_data("autotune.export", "accelerate")
    config = recipe.config
    mixed = MIXED.get(config.precision, "no")
    values = data["accelerate"] | {"mixed_precision": mixed, "use_cpu": on_cpu(recipe)}
    if config.compile == "per_layer":
        values |= data["compiled"]
    deepspeed = data["deepspeed"] | {name: {"enabled": mixed == name} for name in ("bf16", "fp16")}
    head = tool_file.texts(data["head"], tool_file.settings_of(recipe, "trl"))
    return {
        "accelerate.yaml": sectioned([*summary_lines(recipe), "", *head], [("", values)]),
        "deepspeed.json": json.dumps(deepspeed, indent=2) + "\n",
    }


def command(recipe: Recipe) -> str:
    """The command line that runs a script of the user's own."""
    return f"{environment(recipe)} accelerate launch --config_file accelerate.yaml your_script.py"
