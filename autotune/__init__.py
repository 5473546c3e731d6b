"""autotune: find the best fine-tuning configuration by short real probes on the target GPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import Result, load_study, tune
    from autotune.problem.search_space import SearchSpace

__version__ = "0.1.0"
__all__ = ["Result", "SearchSpace", "load_study", "tune"]


def __getattr__(name: str) -> Any:
    """What is imported from here is loaded on use: `autotune --help` needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("autotune.problem.search_space" if name == "SearchSpace" else "autotune.api"), name)
