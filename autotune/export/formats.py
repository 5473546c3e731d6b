"""Lists the export formats by name, and returns the texts of the exported files."""

from collections.abc import Callable, Iterable
from functools import partial

from autotune.core.errors import UsageError
from autotune.core.parallelism import ZERO
from autotune.core.untested import untested
from autotune.export import accelerate, clusters, recipe_yaml, script, tool_file, transformers
from autotune.export.header import on_cpu
from autotune.study.summary import Recipe

FORMATS: dict[str, Callable[[Recipe], dict[str, str]]] = {
    "recipe": recipe_yaml.export,
    "trl": partial(tool_file.export, tool="trl"),
    "train": script.export,
    "axolotl": partial(tool_file.export, tool="axolotl"),
    "llamafactory": partial(tool_file.export, tool="llamafactory"),
    "transformers": transformers.export,
    "accelerate": accelerate.export,
    "kubernetes": partial(clusters.export, system="kubernetes"),
    "skypilot": partial(clusters.export, system="skypilot"),
    "slurm": partial(clusters.export, system="slurm"),
}
USUAL = ("recipe", "trl", "train", "axolotl", "llamafactory")  # the formats that every study writes
# The formats that need accelerate.yaml to train on several GPUs. Axolotl needs no accelerate.yaml,
# because its own file has keys for several GPUs.
BY_ACCELERATE = ("trl", "llamafactory", "transformers")


def usual_formats(recipe: Recipe) -> list[str]:
    """Return the formats that every study writes, if they can express the recipe."""
    return [name for name in USUAL if _obstacle(name, recipe) is None]


def export_all(recipe: Recipe, formats: Iterable[str]) -> dict[str, str]:
    """Return file name -> text for all `formats`. A file whose name ends in .sh must be executable.

    Raises UsageError for an unknown format, and for a format that cannot express the recipe.
    """
    names = list(formats)
    require_formats(names, FORMATS)

    for name in names:
        if obstacle := _obstacle(name, recipe):
            others = (name for name in FORMATS if _obstacle(name, recipe) is None)
            raise UsageError(
                f"{name} is not written: {obstacle}", remedy=f"take one of {', '.join(others)}"
            )
    if recipe.config.num_gpus > 1 and set(BY_ACCELERATE).intersection(names):
        names.append("accelerate")

    files = {file: text for name in names for file, text in FORMATS[name](recipe).items()}
    if "axolotl" in names and recipe.config.sharding in ZERO:
        files |= accelerate.deepspeed_file(recipe)
    return files


def _obstacle(name: str, recipe: Recipe) -> str | None:
    """Return why a format cannot express the objective, images or GPUs, or None if it can."""
    for setting, value in (
        ("images", bool(recipe.workload.pictured)),
        ("objective", recipe.workload.objective),
    ):
        if reason := untested(setting, value, "format", name):
            return reason

    if recipe.config.num_gpus == 1:
        return None
    if on_cpu(recipe) and name in (*BY_ACCELERATE, "accelerate", "axolotl"):
        return "accelerate starts a single process on a CPU"
    return None


def require_formats(wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError for a format that is unknown or was removed."""
    names = list(known)
    for name in wanted:
        if name == "torchtune" and "trl" in names:
            raise UsageError(
                "the format torchtune was removed: its project has ended, and autotune 0.1.0 was"
                " the last version that wrote its file",
                remedy="take trl, axolotl or llamafactory",
            )
        if name not in names:
            raise UsageError(
                f"there is no format {name!r}", remedy=f"the formats are {', '.join(names)}"
            )
