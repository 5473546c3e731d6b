"""autotune from Python: tune a model, load a study, plan without a GPU.

The command line calls these functions too. `main.py` is the first file to read: it shows the whole
program.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api.estimates import calibrate, check, compare, longest, plan
    from autotune.api.studies import StudyResult, load_study, result_of, tune
    from autotune.api.trainer_callback import PreflightCallback
    from autotune.core.errors import AutotuneError
    from autotune.core.train_config import TrainConfig
    from autotune.problem.search_space import SearchSpace
    from autotune.problem.study_spec import StudySpec

# Each name is imported from its module on first use, so that planning imports few modules.
HOMES = {
    "AutotuneError": "autotune.core.errors",
    "PreflightCallback": "autotune.api.trainer_callback",
    "SearchSpace": "autotune.problem.search_space",
    "StudyResult": "autotune.api.studies",
    "StudySpec": "autotune.problem.study_spec",
    "TrainConfig": "autotune.core.train_config",
    "calibrate": "autotune.api.estimates",
    "check": "autotune.api.estimates",
    "compare": "autotune.api.estimates",
    "load_study": "autotune.api.studies",
    "longest": "autotune.api.estimates",
    "plan": "autotune.api.estimates",
    "result_of": "autotune.api.studies",
    "tune": "autotune.api.studies",
}
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
    "longest",
    "plan",
    "result_of",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in HOMES:
        raise AttributeError(f"module 'autotune.api' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, so that notebooks complete them."""
    return __all__
