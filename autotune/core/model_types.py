"""Finds the type of the language model in a transformers config."""

from collections.abc import Mapping
from typing import Any


def text_type(config: Mapping[str, Any]) -> str:
    """Return the language model's type; it may be a part of a model that also reads images."""
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return str(inner or config["model_type"])
