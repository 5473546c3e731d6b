"""Finds the type of the language model in a transformers config, given as plain data."""

from collections.abc import Mapping
from typing import Any


def text_type(config: Mapping[str, Any]) -> str:
    """Return transformers' name of the language model, which may be inside a wrapper for images."""
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return str(inner or config["model_type"])
