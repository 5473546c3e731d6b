"""The packages that only some commands need, and the error that names how to install them.

`pip install autotune-llm` installs the packages that estimates need. The extra `run` adds the
packages of all other commands, which run on Linux only.
"""

from importlib.util import find_spec

from autotune.core.errors import UsageError

INSTALL = "pip install 'autotune-llm[run]'"
# The modules of the packages in the extra `run`
OF_RUN = frozenset(
    {"accelerate", "bitsandbytes", "huggingface_hub", "optuna", "peft", "plotly", "sqlalchemy"}
    | {"tokenizers", "torch", "transformers"}
)


class NotInstalled(UsageError):
    """A package of the extra `run` is missing."""

    explained = "a-light-install"

    def __init__(self, what: str, *, otherwise: str | None = None) -> None:
        """The feature `what` needs the extra; `otherwise` is an alternative without the extra."""
        super().__init__(
            f"{what} needs packages that are not installed",
            remedy=INSTALL + ("" if otherwise is None else f", or {otherwise}"),
        )


def missing(error: Exception, what: str) -> NotInstalled | None:
    """Return the error to show if `error` says that a package of the extra `run` is missing."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    return NotInstalled(what) if (error.name or "").partition(".")[0] in OF_RUN else None


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook, or None in sys.modules, blocks the module
        return False
