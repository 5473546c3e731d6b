"""Reading the catalogue's YAML files."""

import functools
from importlib.resources import files
from typing import Any

from autotune.core.files import load_yaml


@functools.cache
def load_data(name: str) -> Any:
    """The parsed `data/<name>.yaml`. Shared between callers: copy what you hand out."""
    return load_yaml(files("autotune.catalog").joinpath("data", f"{name}.yaml").read_text(encoding="utf-8"))
