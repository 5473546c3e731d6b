"""Errors a user can act on. Each says what happened, what to do about it, and how the process exits.

Expected failures of a probe (out of memory, timeout, ...) are values (`probe_types.Outcome`), not exceptions.
"""

from collections.abc import Iterable

PREEMPTED = 75  # the exit code that asks for another attempt later


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint "; did you mean 'a10' or 'a100'?", or an empty text if no known name is similar."""
    import difflib

    close = difflib.get_close_matches(str(name).lower(), sorted(set(known)))  # three at most
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


class AutotuneError(Exception):
    """An error shown to the user as one message and one remedy, without a traceback."""

    exit_code = 1
    explained: str | None = None  # where docs/errors.md says more

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


class UsageError(AutotuneError):
    """Wrong name, value or file given by the user."""

    exit_code = 2


class EnvironmentProblem(AutotuneError):
    """The machine lacks what was asked for: a GPU, a driver, a package."""

    exit_code = 3
    explained = "no-such-device"


class NothingFits(AutotuneError):
    """No configuration of the search space fits the device."""

    exit_code = 4
    explained = "nothing-fits"


class TooManyFailures(AutotuneError):
    """Probes keep failing for reasons other than memory: the machine, not the configuration, is suspect."""

    exit_code = 5
    explained = "too-many-failures"


class VerificationFailed(AutotuneError):
    """The exported run failed, or was slower or larger than predicted by more than the tolerance."""

    explained = "verification-failed"


class StorageError(AutotuneError):
    """A database or directory that cannot be reached, read or written."""

    exit_code = 6
    explained = "storage"
    lost = False  # the connection broke: whether the operation happened is unknown


class BudgetTooShort(AutotuneError):
    """The budget was over before there was anything to report."""

    exit_code = 7
    explained = "budget-too-short"


class Interrupted(AutotuneError):
    """Stopped by a signal; the study can be continued."""

    def __init__(self, message: str, *, remedy: str | None = None, exit_code: int = 130) -> None:
        super().__init__(message, remedy=remedy)
        self.exit_code = exit_code


class Cancelled(Exception):
    """The user asked to stop, or the budget was over, during a probe; the probe was ended and has no result."""
