"""Writes the YAML file for TRL, Axolotl or LLaMA-Factory.

A comment at the top of the file lists the settings that the tool cannot express. The keys come from
`keys.yaml`, and the comments from `tools.yaml`.
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
    summary_lines,
    yaml_sections,
)
from autotune.study.summary import Recipe

SECTIONS = ("model", "data", "adapters", "batch", "memory", "schedule")


def export(recipe: Recipe, tool: str) -> dict[str, str]:
    """Return the YAML file for a tool in `keys.TOOLS`, and the other files that the tool reads."""
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
        *(f"not expressed: {item}" for item in keys.inexpressible_knobs(tool, recipe)),
    ]

    with_notes = []
    for name in SECTIONS:
        notes = texts([note for note in about["notes"] if note["section"] == name], values)
        with_notes.append((" ".join(notes), keys.write(tool, name, recipe)))

    json_files = {}
    for name, of in about.get("json_files", {}).items():
        data = keys.with_dataset(of.get(values["form"], of["other"]), tool, recipe.data)
        json_files[name] = json.dumps(data, indent=2) + "\n"
    return {file_of(recipe, tool): yaml_sections(head, with_notes), **json_files}


def file_of(recipe: Recipe, tool: str) -> str:
    """Return the name of the tool's file."""
    name: str = load_data("autotune.export", "tools")[tool]["file"]
    return name.format_map({"objective": recipe.workload.objective})


def training_command(recipe: Recipe, tool: str) -> str:
    """Return the command line that trains with the tool's file."""
    commands = load_data("autotune.export", "tools")[tool]["commands"]
    return texts(commands, settings_of(recipe, tool))[-1]


def settings_of(recipe: Recipe, tool: str) -> dict[str, Any]:
    """Return the values for the texts and for the conditions (`when`) in `tools.yaml`."""
    about = load_data("autotune.export", "tools")[tool]

    return keys.settings(tool, recipe) | {
        "version": about.get("version"),
        "transformers": about.get("transformers"),
        "probed_transformers": recipe.fingerprint.packages.get("transformers", "another version"),
        "has_published_weights": has_published_weights(recipe),
        "environment": environment(recipe),
        "place": _place(recipe),
        "launch_arguments": " ".join(launch_arguments(recipe)),
        "trainer": recipe.trainer,
    }


def _place(recipe: Recipe) -> str:
    if on_cpu(recipe):
        return "on the processor"
    num_gpus = recipe.config.num_gpus
    return f"on {num_gpus} GPUs" if num_gpus > 1 else "on one GPU"


def texts(items: list[dict[str, Any]], values: Mapping[str, Any]) -> list[str]:
    """Return the texts of the items whose `when` is true, with `values` filled in."""
    return [
        item["text"].format_map(values)
        for item in items
        if keys.meets(values, item.get("when", {}))
    ]


def launch_arguments(recipe: Recipe) -> list[str]:
    """Return the arguments of `accelerate launch` for the probed configuration."""
    # The launcher overwrites the environment variable ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION,
    # so the flag of the launcher is set instead.
    regional = ["--dynamo_use_regional_compilation"] if recipe.config.compile == "per_layer" else []
    return ["--num_processes", str(recipe.config.num_gpus), *regional]
