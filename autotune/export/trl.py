"""trl_sft.yaml: what `trl sft --config` takes, and what that format cannot express."""

from autotune.export import keys
from autotune.export.header import ENVIRONMENT, EVERY_LINEAR, UNTUNED, sectioned, tool_head, weights_note
from autotune.study.summary import Recipe


def export(recipe: Recipe) -> dict[str, str]:
    """`trl_sft.yaml`, with the command to run it in its head."""
    head = tool_head(
        recipe,
        run="Run it, on one GPU, as it was measured:",
        commands=[command(recipe)],
        known="Known differences from what was measured:",
        differences=_differences(recipe),
        gaps=inexpressible(recipe),
    )
    memory = keys.write("trl", "memory", recipe)
    by_layer = "every_n_layers" in memory.get("gradient_checkpointing_kwargs", {})
    sections = [
        (weights_note(recipe), keys.write("trl", "model", recipe)),
        ("your data, by Hub name or local directory", keys.write("trl", "data", recipe)),
        ("" if recipe.config.method == "full" else EVERY_LINEAR, keys.write("trl", "adapters", recipe)),
        ("", keys.write("trl", "batch", recipe)),
        ("every_n_layers needs transformers 5.23" if by_layer else "", memory),
        (UNTUNED, keys.write("trl", "schedule", recipe)),
    ]
    return {"trl_sft.yaml": sectioned(head, sections)}


def inexpressible(recipe: Recipe) -> list[str]:
    """Knobs of the winner that `trl sft` cannot express, each with what happens instead."""
    return keys.inexpressible("trl", recipe)


def command(recipe: Recipe) -> str:
    """The command line. `trl sft` hands arguments that it does not know to `accelerate launch`."""
    return f"{ENVIRONMENT} trl sft --config trl_sft.yaml {' '.join(launch(recipe))}"


def launch(recipe: Recipe) -> list[str]:
    """The arguments of the command that are for `accelerate launch`."""
    # It overwrites ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION, so that only its own flag has an effect.
    regional = ["--dynamo_use_regional_compilation"] if recipe.config.compile == "per_layer" else []
    return ["--num_processes", "1", *regional]


def _differences(recipe: Recipe) -> list[str]:
    rows = "TRL pads to the longest row of a batch (to max_length where pad_to_multiple_of says so); the probe had"
    if recipe.trainer == "trl":
        return [f"{rows} rows of max_length."]
    return [
        "The speed is that of train.py, whose loop (runtime/lean_trainer.py) saves milliseconds in each micro batch.",
        f"{rows} every row padded to max_length, and no mask.",
    ]
