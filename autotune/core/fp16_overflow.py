"""Warnings for types of models whose activations are known to overflow in fp16."""

from autotune.core.files import load_data


def fp16_warning(model_type: str) -> str | None:
    """Return a warning for a model type that is known to overflow in fp16, with its source."""
    rows = load_data("autotune.core", "fp16_overflow")
    source = next((row["source"] for row in rows if model_type in row["models"]), None)
    if source is None:
        return None
    return (
        f"{model_type} models are known to overflow in fp16 ({source}): the loss may become NaN; "
        "train in bf16, on a GPU that supports it"
    )
