"""llamafactory.yaml: what `llamafactory-cli train` takes, and what that format cannot express."""

import json

from autotune.export import keys
from autotune.export.header import (
    ENVIRONMENT,
    UNTUNED,
    loop_difference,
    sectioned,
    tool_head,
    weights_note,
)
from autotune.study.summary import Recipe

VERSION = "0.9.5"  # the version of LLaMA-Factory whose keys are written
TRANSFORMERS = "5.6"  # the last version of transformers that it takes
DATASETS = {
    "your_dataset": {
        "file_name": "data.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    }
}


def export(recipe: Recipe) -> dict[str, str]:
    """`llamafactory.yaml`, with the command to run it in its head, and `dataset_info.json`, which it reads."""
    head = tool_head(
        recipe,
        run="Run it in this directory, on one GPU, with the allocator as it was measured:",
        commands=[command(recipe)],
        known="The measured speed and memory are those of the trainer that was probed. Known differences here:",
        differences=_differences(recipe),
        gaps=keys.inexpressible("llamafactory", recipe),
    )
    data = "your data: its file, format and columns are in dataset_info.json; the template is the tokenizer's own"
    notes = {"model": weights_note(recipe), "data": data, "schedule": UNTUNED}
    sections = ("model", "data", "adapters", "batch", "memory", "schedule")
    written = ((notes.get(section, ""), keys.write("llamafactory", section, recipe)) for section in sections)
    text = sectioned(head, written)
    return {"llamafactory.yaml": text, "dataset_info.json": json.dumps(DATASETS, indent=2) + "\n"}


def command(recipe: Recipe) -> str:
    """The command line. With one GPU there is no launcher, and accelerate reads its own variable."""
    regional = " ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true" if recipe.config.compile == "per_layer" else ""
    return f"{ENVIRONMENT}{regional} llamafactory-cli train llamafactory.yaml"


def _differences(recipe: Recipe) -> list[str]:
    """What LLaMA-Factory does differently, although the file says all it can."""
    config = recipe.config
    probed = recipe.fingerprint.packages.get("transformers", "another version")
    needs = f"LLaMA-Factory {VERSION} has transformers {TRANSFORMERS} or older; measured was {probed}."
    items = [needs, loop_difference(recipe)]
    if config.packing:
        items.append("It packs 1,000 examples at a time by its own rule, and makes their mask itself.")
    else:
        items.append(
            "It pads to the longest row of a batch, with a mask; the probe had rows of cutoff_len, without a mask."
        )
    if config.method == "lora" or config.precision == "bf16_pure":
        items.append(f"The base has the dtype of its checkpoint; what was measured has {config.base_dtype}.")
    if config.kernels == "liger" or config.loss == "chunked":
        items.append("Liger's code (pip install liger-kernel) does nothing for a model that it does not know.")
    if config.loss == "chunked":
        items.append("loss chunked: by Liger's fused head and loss; its peak differs.")
    if config.offloads:
        items.append("checkpointing offload: by use_unsloth_gc, which needs no Unsloth; its speed differs.")
    return items
