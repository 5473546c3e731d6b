"""Which modules of a model get adapters, and which are trained whole beside them, by their names."""

from autotune.core.files import load_data
from autotune.core.knobs import KNOBS

ALL_LINEAR: str = KNOBS["lora_targets"].default


def target_modules(model_type: str, targets: str) -> list[str] | None:
    """The ends of the modules' paths for a value of the knob `lora_targets`; None for all linear layers but the head.

    All linear layers have names where PEFT refuses adapters on some. Empty where a model of this `model_type`,
    transformers' name of the family, has no such layers.
    """
    if targets not in KNOBS["lora_targets"].choices:
        return targets.split(",")
    table = load_data("autotune.core", "lora_targets")
    names = (table["usual"] | table.get(model_type, {}))[targets]
    return names if names is None else list(names)


def saved_modules(model_type: str, saved: str) -> list[str] | None:
    """The ends of the modules' paths for a value of the knob `modules_to_save`; None for no module."""
    table = load_data("autotune.core", "lora_targets")["ends"]
    ends: list[str] = table.get(model_type, ["embed_tokens", "lm_head"])
    return {"none": None, "embedding": ends[:1], "head": ends[1:]}.get(saved, ends)


def has_own_names(model_type: str) -> bool:
    """Whether the names of this type's layers of attention are known, and not taken to be the usual ones."""
    return model_type in load_data("autotune.core", "lora_targets")
