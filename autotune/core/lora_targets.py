"""The names of the modules that get adapters, and of the modules that are trained in full."""

from autotune.core.files import load_data
from autotune.core.knobs import KNOBS
from autotune.trainer.settings import EXPERT_PARAMETERS

ALL_LINEAR: str = KNOBS["lora_targets"].default
ATTENTION_EXPERTS = "attention_experts"


def target_modules(model_type: str, targets: str) -> list[str] | None:
    """Return the path endings of the modules that a value of the knob `lora_targets` selects.

    With adapters on experts, the result also has the path endings of the experts' parameters.
    `model_type` is transformers' name of the model family. If adapters are on all linear layers
    except the head, the result is None, because PEFT finds these layers itself. If PEFT refuses
    adapters on some layers of the family, the result lists the other layers. The result is empty if
    the family has no layer of the selected kind.
    """
    if targets not in KNOBS["lora_targets"].choices:
        return targets.split(",")
    table = load_data("autotune.core", "lora_targets")
    rows = table["usual"] | table.get(model_type, {})
    if targets == ATTENTION_EXPERTS:
        return [*rows["attention"], *EXPERT_PARAMETERS]
    names = rows[targets]
    return names if names is None else list(names)


def saved_modules(model_type: str, saved: str) -> list[str] | None:
    """Return the path endings that a value of `modules_to_save` selects, or None for `none`."""
    table = load_data("autotune.core", "lora_targets")["ends"]
    ends: list[str] = table.get(model_type, ["embed_tokens", "lm_head"])
    return {"none": None, "embedding": ends[:1], "head": ends[1:]}.get(saved, ends)


def has_own_names(model_type: str) -> bool:
    """Return whether lora_targets.yaml has a row of module names for this model type."""
    return model_type in load_data("autotune.core", "lora_targets")
