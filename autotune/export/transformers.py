"""Writes training_args.json, adapter_config.json and quantization_config.json for a Trainer script.

JSON has no comments. Therefore, `transformers_notes.md` explains how to load these files, and lists
the settings that they cannot express.
"""

import json
from typing import Any

from autotune.core.pages import environment
from autotune.export import keys, script
from autotune.export.accelerate import command
from autotune.export.header import has_published_weights, model_source, one_line, summary_lines
from autotune.probe.model_settings import model_settings
from autotune.study.summary import Recipe

# Keys of TRL's file that are not arguments of TrainingArguments.
_TRL_ONLY = ("max_length", "packing", "packing_strategy", "pad_to_multiple_of")
# Knobs that TRL passes to TrainingArguments unchanged.
_PASSED_KNOBS = (
    "checkpointing",
    "compile",
    "fp8_products",
    "optimizer_in_backward",
    "quantize_experts",
)


def export(recipe: Recipe) -> dict[str, str]:
    """Return the arguments, the notes and train_config.json.

    With LoRA, the result includes adapter_config.json. With a quantised base, it includes
    quantization_config.json.
    """
    config = recipe.config
    values: dict[str, Any] = {"training_args.json": _arguments(recipe)}
    built = model_settings(config, recipe.model.text_type)

    if lora := built.lora_arguments():
        base = {
            "peft_type": "LORA",
            "base_model_name_or_path": model_source(recipe),
            "inference_mode": False,
        }
        values["adapter_config.json"] = base | lora
    if bitsandbytes := built.bitsandbytes_arguments():
        compute = {"bnb_4bit_compute_dtype": config.base_dtype}
        values["quantization_config.json"] = {
            "quant_method": "bitsandbytes",
            **bitsandbytes,
            **compute,
        }

    files = {name: json.dumps(value, indent=2) + "\n" for name, value in values.items()}
    files["train_config.json"] = script.settings(recipe).to_json()
    return files | {"transformers_notes.md": _notes(recipe, files)}


def _arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of TrainingArguments, in a form that transformers 5.3 to 5.23 accept.

    These versions all accept a warm-up as a number of steps, and gradient_checkpointing as the key
    for activation checkpointing.
    """
    sections = ("batch", "memory", "schedule")
    values = {
        key: value
        for section in sections
        for key, value in keys.write("trl", section, recipe).items()
    }
    return {name: value for name, value in values.items() if name not in _TRL_ONLY}


def _notes(recipe: Recipe, files: dict[str, str]) -> str:
    gaps = [
        item for item in keys.inexpressible_knobs("trl", recipe) if item.startswith(_PASSED_KNOBS)
    ]
    page = environment("autotune.export").get_template("transformers_notes.md.j2")
    return page.render(
        recipe=recipe,
        config=recipe.config,
        files=files,
        summary=map(one_line, summary_lines(recipe)),
        command=command(recipe),
        has_published_weights=has_published_weights(recipe),
        gaps=gaps,
        offload_is_named=any(item.startswith("checkpointing") for item in gaps),
    )
