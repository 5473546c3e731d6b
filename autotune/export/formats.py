"""The formats of the winner by name, those that a study writes unasked, and the texts of any of them."""

from collections.abc import Callable, Iterable
from functools import partial

from autotune.core.errors import UsageError
from autotune.export import accelerate, clusters, recipe_yaml, script, tool_file, torchtune, transformers
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
    "torchtune": torchtune.export,
}
USUAL = ("recipe", "trl", "train", "axolotl", "llamafactory")  # what a study writes unasked
ON_SEVERAL_GPUS = ("recipe", "train", "kubernetes", "skypilot", "slurm")  # what says how GPUs share out a training


def usual(recipe: Recipe) -> list[str]:
    """The formats that a study writes unasked."""
    return [name for name in USUAL if recipe.config.num_gpus == 1 or name in ON_SEVERAL_GPUS]


def export_all(recipe: Recipe, formats: Iterable[str]) -> dict[str, str]:
    """File name to text, for all `formats`. Names that end in .sh are to be made executable.

    Raises UsageError for any other, and for what cannot say how several GPUs share out the training.
    """
    require_formats(formats, FORMATS)
    for name in formats:
        if recipe.config.num_gpus > 1 and name not in ON_SEVERAL_GPUS:
            raise UsageError(
                f"{name} is not written for several GPUs yet", remedy=f"take one of {', '.join(ON_SEVERAL_GPUS)}"
            )
    return {file: text for name in formats for file, text in FORMATS[name](recipe).items()}


def require_formats(wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raises UsageError for a format that is not known."""
    names = list(known)
    for name in wanted:
        if name not in names:
            raise UsageError(f"there is no format {name!r}", remedy=f"the formats are {', '.join(names)}")
