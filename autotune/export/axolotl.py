"""axolotl.yaml: what `axolotl train` takes, and what that format cannot express."""

from autotune.export import keys
from autotune.export.header import (
    ENVIRONMENT,
    EVERY_LINEAR,
    UNTUNED,
    loop_difference,
    sectioned,
    tool_head,
    weights_note,
)
from autotune.study.summary import Recipe

VERSION = "0.19"  # the version of Axolotl whose keys are written
TRANSFORMERS = "5.16.1"  # the version of transformers that it pins


def export(recipe: Recipe) -> dict[str, str]:
    """`axolotl.yaml`, with the command to run it in its head."""
    head = tool_head(
        recipe,
        run="Run it, on one GPU, with the allocator as it was measured:",
        commands=[command(recipe)],
        known="The measured speed and memory are those of the trainer that was probed. Known differences here:",
        differences=_differences(recipe),
        gaps=keys.inexpressible("axolotl", recipe),
    )
    data = "your data, by Hub name or local path; a tokenizer without a padding token needs special_tokens: pad_token"
    notes = {"model": weights_note(recipe), "data": data, "adapters": EVERY_LINEAR, "schedule": UNTUNED}
    sections = ("model", "data", "adapters", "batch", "memory", "schedule")
    written = ((notes.get(section, ""), keys.write("axolotl", section, recipe)) for section in sections)
    return {"axolotl.yaml": sectioned(head, written)}


def command(recipe: Recipe) -> str:
    """The command line. What follows `--` goes to `accelerate launch`."""
    regional = " --dynamo_use_regional_compilation" if recipe.config.compile == "per_layer" else ""
    return f"{ENVIRONMENT} axolotl train axolotl.yaml -- --num_processes 1{regional}"


def _differences(recipe: Recipe) -> list[str]:
    """What Axolotl does differently, although the file says all it can."""
    config = recipe.config
    probed = recipe.fingerprint.packages.get("transformers", "another version")
    items = [f"Axolotl {VERSION} has transformers {TRANSFORMERS}; measured was {probed}.", loop_difference(recipe)]
    if config.packing:
        items.append("Axolotl packs examples in a random order by its own rule: rows are about as full.")
        if keys.attention_of("axolotl", config) == "sdpa":
            items.append("sdpa_varlen, on by default, is off as in the probe; it may be faster.")
    else:
        items.append("A padded row comes with a mask; the probe padded rows in the same way, without a mask.")
    if config.method == "lora":
        items.append("Its LoRA kernels, on by default, are off as in the probe; they may be faster.")
    if config.kernels == "liger":
        items.append("kernels liger: by Axolotl's plugin, where that knows the model.")
    if config.loss == "chunked":
        items.append("loss chunked: by Liger's fused head and loss, where that knows the model; its peak differs.")
    if config.offloads:
        items.append("checkpointing offload: by Axolotl's own hooks; its speed differs.")
    return items
