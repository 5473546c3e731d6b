"""torchtune.yaml: what `tune run` takes (torchtune's recipes for one GPU), and what that format cannot express."""

import shlex
from typing import Any

from autotune.export import keys, torchtune_models
from autotune.export.header import ENVIRONMENT, UNTUNED, has_published_weights, sectioned, summary_lines, tool_head
from autotune.study.summary import Recipe

VERSION = "0.6.1"  # the version whose components and recipes are written; torchtune's development has ended


def export(recipe: Recipe) -> dict[str, str]:
    """`torchtune.yaml`, with the commands to run it in its head."""
    head = tool_head(
        recipe,
        run="Run it in this directory, on one GPU, with the allocator as it was measured:",
        commands=commands(recipe),
        known="The speed of torchtune was not measured: it has its own loop and its own model code. Known to differ:",
        differences=_differences(recipe),
        gaps=keys.inexpressible("torchtune", recipe),
    )
    number = len(summary_lines(recipe)) + 1
    head[number:number] = _warning(recipe)
    data = "your data, by Hub name, in the messages of its column; of a file, source: json and data_files: data.jsonl"
    weights = "every file of weights in that directory, by name"
    if not has_published_weights(recipe):
        weights = f"no published weights: put a model of yours there; {weights}"

    def part(section: str) -> dict[str, Any]:
        return keys.write("torchtune", section, recipe)

    sections: list[tuple[str, dict[str, Any]]] = [
        ("", {"model": torchtune_models.builder(recipe) | part("adapters")}),
        ("", {"tokenizer": torchtune_models.tokenizer(recipe, _directory(recipe)) | part("tokenizer")}),
        (weights, {"checkpointer": _checkpointer(recipe)}),
        (data, part("data")),
        ("", part("batch")),
        ("", part("memory")),
        (UNTUNED, part("schedule")),
    ]
    return {"torchtune.yaml": sectioned(head, sections)}


def commands(recipe: Recipe) -> list[str]:
    """The command that fetches published weights, and the command that trains."""
    download = []
    if has_published_weights(recipe) and recipe.model.weights is None:
        download.append(f"tune download {shlex.quote(recipe.model.name)} --output-dir model")
    method = recipe.config.method
    return [*download, f"{ENVIRONMENT} tune run {method}_finetune_single_device --config torchtune.yaml"]


def _warning(recipe: Recipe) -> list[str]:
    obstacle = torchtune_models.obstacle(recipe)
    if not obstacle:
        return []
    return [
        f"INCOMPLETE: torchtune {VERSION} cannot make this model: {obstacle}.",
        "Write the _component_ of one of yours, with its sizes, under model, and a tokenizer and model_type below.",
        "",
    ]


def _differences(recipe: Recipe) -> list[str]:
    """What torchtune does differently, although the file says all it can."""
    config = recipe.config
    probed = "TRL's SFTTrainer" if recipe.trainer == "trl" else "train.py, with its lean loop (runtime/lean_trainer.py)"
    items = [
        f"The speed above is that of {probed}.",
        f"torchtune {VERSION} is the last version, and needs an older torchao: 0.9 has what it imports, 0.18 does not.",
    ]
    if config.packing:
        items.append("It packs the examples in their order before the training: rows may be less full.")
    else:
        items.append("It pads to the longest row of a micro batch; the probe had rows of max_seq_len.")
    if config.compile == "per_layer" and config.packing:
        items.append("compile compiles the loss besides the layers.")
    if config.quantization == "nf4":
        items.append("The nf4 of the base is torchao's and not that of bitsandbytes; its speed differs.")
    if config.rslora:
        items.append("rslora: it divides by the rank, so that lora_alpha is written for the same scale.")
    if config.method == "full" and config.optimizer in ("adamw_8bit", "paged_adamw_8bit", "lion_8bit"):
        items.append("The optimizer has the embedding's state in 8 bits too; it was measured in 32.")
    if config.optimizer == "adafactor":
        items.append("optimizer: that of transformers, which torchtune does not install.")
    elif config.optimizer in ("adamw_8bit", "paged_adamw_8bit", "lion_8bit"):
        items.append("optimizer: that of bitsandbytes, which torchtune does not install.")
    if config.offloads:
        items.append("checkpointing offload: by torchtune's own hooks; its speed differs.")
    if torchtune_models.leaves_out_window(recipe):
        items.append("The model's sliding window is left out: a token looks back over its whole row.")
    if recipe.model.config["model_type"] == "phi3" and config.method == "lora":
        items.append("Adapters are on query, key, value, gate and up apart; they were measured on the fused layers.")
    return [
        *items,
        "It saves only at the end of an epoch, merged weights too: a run that is stopped repeats its epoch.",
    ]


def _directory(recipe: Recipe) -> str:
    """Where the weights are to be. OmegaConf would fill in what stands in ${...}: such a path is not written."""
    weights = recipe.model.weights
    return weights if weights and "${" not in weights else "model"


def _checkpointer(recipe: Recipe) -> dict[str, Any]:
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": _directory(recipe),
        "checkpoint_files": ["model.safetensors"],
        "output_dir": "out",
        **torchtune_models.checkpoint(recipe),
    }
