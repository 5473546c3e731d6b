"""Writes accelerate.yaml, which launches the user's own training script on one or several GPUs."""

import json

from autotune.core.files import load_data
from autotune.core.parallelism import FSDP2, ZERO, Parallelism
from autotune.export import tool_file
from autotune.export.header import environment, on_cpu, summary_lines, yaml_sections
from autotune.prediction.sharded_memory import Shares
from autotune.study.summary import Recipe
from autotune.trainer.settings import deepspeed_settings

SIZES = "parallelism_config_"  # the prefix of accelerate's keys for the sizes of its parallelism
# Accelerate's names for mixed precision. For all other precisions, its value is "no".
MIXED = {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}


def export(recipe: Recipe) -> dict[str, str]:
    """Return the text of accelerate.yaml, and of deepspeed.json if a DeepSpeed stage was measured.

    For one GPU, deepspeed.json is also returned, so that the user can later train on several GPUs.
    The comment at the top of accelerate.yaml explains how.
    """
    data = load_data("autotune.export", "accelerate")
    config = recipe.config
    mixed = MIXED.get(config.precision, "no")
    values = data["accelerate"] | {"mixed_precision": mixed, "use_cpu": on_cpu(recipe)}
    values |= {"num_processes": config.num_gpus} | data["sharding"][config.sharding]
    values = {key: value for key, value in values.items() if value is not None}

    if config.copies > 1:
        shards = Parallelism.of(config).num_shards
        sizes = {f"{SIZES}dp_replicate_size": config.copies, f"{SIZES}dp_shard_size": shards}
        values |= {"parallelism_config": sizes}
    if config.quantization == "nf4" and config.sharding in FSDP2:
        values["fsdp_config"] = values["fsdp_config"] | data["fsdp_1"][config.sharding]
    if config.offload:
        values["fsdp_config"] = values["fsdp_config"] | {"fsdp_offload_params": True}
    if config.compile == "per_layer":
        values |= data["compiled"]

    head = tool_file.texts(data["head"], tool_file.settings_of(recipe, "trl"))
    files = {"accelerate.yaml": yaml_sections([*summary_lines(recipe), "", *head], [("", values)])}
    return files | (
        deepspeed_file(recipe) if config.num_gpus == 1 or config.sharding in ZERO else {}
    )


def deepspeed_file(recipe: Recipe) -> dict[str, str]:
    """Return deepspeed.json with the measured settings or, for one GPU, with ZeRO's stage 2."""
    config = recipe.config
    mixed = MIXED.get(config.precision)
    precisions = {name: {"enabled": mixed == name} for name in ("bf16", "fp16")}
    stage = int(config.sharding[-1]) if config.sharding in ZERO else 2
    layer = Shares.from_measurement(recipe.model, config, recipe.winner.measurement).layer
    settings = deepspeed_settings(stage, round(layer)) | precisions
    return {"deepspeed.json": json.dumps(settings, indent=2) + "\n"}


def command(recipe: Recipe) -> str:
    """Return the command line that runs a user's own script."""
    return f"{environment(recipe)} accelerate launch --config_file accelerate.yaml your_script.py"
