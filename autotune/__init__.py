"""autotune: find the best fine-tuning configuration by short real probes on the target GPU."""

from typing import TYPE_CHECKING, Any

from autotune.core.version import __version__ as __version__

if TYPE_CHECKING:
    from autotune.api import (
        PreflightCallback,
        StudyResult,
        calibrate,
        check,
        compare,
        load_study,
        plan,
        tune,
    )
    from autotune.core.errors import AutotuneError
    from autotune.core.train_config import TrainConfig
    from autotune.problem.search_space import SearchSpace
    from autotune.problem.study_spec import StudySpec

__all__ = [
    "AutotuneError",
    "PreflightCallback",
    "SearchSpace",
    "StudyResult",
    "StudySpec",
    "TrainConfig",
    "calibrate",
    "check",
    "compare",
    "load_study",
    "plan",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Load a public name on its first use, so that `autotune --help` stays quick."""
    if name not in __all__:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("autotune.api"), name)


def __dir__() -> list[str]:
    """Return the public names, so that notebooks complete them."""
    return __all__
