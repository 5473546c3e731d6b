"""The YAML file that TRL, Axolotl or LLaMA-Factory takes, with what it cannot express in its head.

The keys are those of `keys.yaml`, heads and notes are in `tools.yaml`.
"""

import json
from collections.abc import Mapping
from typing import Any

from autotune.core.files import load_data
from autotune.export import keys
from autotune.export.header import (
    environment,
    has_published_weights,
    on_cpu,
    sectioned,
    summary_lines,
)
from autotune.study.summary import Recipe

SECTIONS = ("model", "data", "adapters", "batch", "memory", "schedule")


def export(recipe: Recipe, tool: str) -> dict[str, str]:
    """The file of a tool of `keys.TOOLS`, and other files that it reads."""
    about = load_data("autotune.export", "tools")[tool]
    values = settings_of(recipe, tool)
    head = [
        *summary_lines(recipe),
        "",
        about["run"].format_map(values),
        *(f"  {line}" for line in texts(about["commands"], values)),
        "",
        about["known"],
        *(f"- {text}" for text in texts(about["differences"], values)),
        *(f"not expressed: {item}" for item in keys.inexpressible(tool, recipe)),
    ]
    with_notes = []
    for name in SECTIONS:
        notes = texts([note for note in about["notes"] if note["section"] == name], values)
        with_notes.append((" ".join(notes), keys.write(tool, name, recipe)))
    kinds = about.get("json_files", {}).items()
    more = {
        name: json.dumps(of.get(values["form"], of["other"]), indent=2) + "\n" for name, of in kinds
    }
    return {file_of(recipe, tool): sectioned(head, with_notes), **more}


def file_of(recipe: Recipe, tool: str) -> str:
    """The name of the tool's file."""
    name: str = load_data("autotune.export", "tools")[tool]["file"]
    return name.format_map({"objective": recipe.workload.objective})


def training_command(recipe: Recipe, tool: str) -> str:
    """The command line that trains by the tool's file."""
    return texts(
        load_data("autotune.export", "tools")[tool]["commands"], settings_of(recipe, tool)
    )[-1]


def settings_of(recipe: Recipe, tool: str) -> dict[str, Any]:
    """What texts are filled in from, and `when` compares."""
    about = load_data("autotune.export", "tools")[tool]
    num_gpus = recipe.config.num_gpus
    return keys.settings(tool, recipe) | {
        "version": about.get("version"),
        "transformers": about.get("transformers"),
        "probed_transformers": recipe.fingerprint.packages.get("transformers", "another version"),
        "has_published_weights": has_published_weights(recipe),
        "environment": environment(recipe),
        "place": "on the processor"
        if on_cpu(recipe)
        else f"on {num_gpus} GPUs"
        if num_gpus > 1
        else "on one GPU",
        "launch_arguments": " ".join(launch_arguments(recipe)),
        "trainer": recipe.trainer,
    }


def texts(items: list[dict[str, Any]], values: Mapping[str, Any]) -> list[str]:
    """The texts of the items that apply, filled in."""
    return [
        item["text"].format_map(values)
        for item in items
        if keys.meets(values, item.get("when", {}))
    ]


def launch_arguments(recipe: Recipe) -> list[str]:
    """Arguments of `accelerate launch` for what was probed."""
    # It overwrites ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION, so that only its own flag has an effect.
    regional = ["--dynamo_use_regional_compilation"] if recipe.config.compile == "per_layer" else []
    return ["--num_processes", str(recipe.config.num_gpus), *regional]
