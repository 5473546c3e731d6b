"""Errors that a user can act on, each with a message, a remedy and an exit code.

Expected failures of a probe (out of memory, timeout, ...) are values (`probe_types.Outcome`), not
exceptions.
"""

from collections.abc import Iterable

PREEMPTED = 75  # the exit code that tells the job system to start the command again later


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint such as "; did you mean 'a10' or 'a100'?", empty if no name is similar."""
    import difflib

    bare = {one.lstrip("-"): one for one in known}  # the dashes of options make all alike
    wanted = str(name).lower().lstrip("-")
    # First the names that a user may have cut short, such as 'rtx-4060-ti'
    longer = [one for one in sorted(bare) if len(wanted) > 2 and one.lower().startswith(wanted)]
    near = dict.fromkeys([*longer, *difflib.get_close_matches(wanted, sorted(bare))])
    close = [bare[one] for one in list(near)[:3]]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


class AutotuneError(Exception):
    """An error shown to the user as one message and one remedy, without a traceback."""

    exit_code = 1
    explained: str | None = None  # the section of docs/errors.md that explains the error

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


class UsageError(AutotuneError):
    """The user gave a wrong name, value or file."""

    exit_code = 2


class EnvironmentProblem(AutotuneError):
    """The machine lacks a GPU, a driver or a package that the command needs."""

    exit_code = 3
    explained = "no-such-device"


class UnsteadyMachine(EnvironmentProblem):
    """Other work on the machine changes the measurements, so that they cannot be compared."""

    explained = "unsteady-machine"


class NothingFits(AutotuneError):
    """No configuration of the search space fits the device."""

    exit_code = 4
    explained = "nothing-fits"


class TooManyFailures(AutotuneError):
    """Probes keep failing for reasons other than memory, so the machine may be faulty."""

    exit_code = 5
    explained = "too-many-failures"


class VerificationFailed(AutotuneError):
    """The exported run failed, or its time or memory exceeded the prediction by too much."""

    explained = "verification-failed"


class StorageError(AutotuneError):
    """A database or directory cannot be reached, read or written."""

    exit_code = 6
    explained = "storage"
    lost = False  # True if the connection broke, so it is unknown whether the operation was done


class BudgetTooShort(AutotuneError):
    """The study's time budget ended before any result existed."""

    exit_code = 7
    explained = "budget-too-short"


class Interrupted(AutotuneError):
    """A signal stopped the command; the study can be continued."""

    def __init__(self, message: str, *, remedy: str | None = None, exit_code: int = 130) -> None:
        super().__init__(message, remedy=remedy)
        self.exit_code = exit_code


class Cancelled(Exception):
    """The user stopped the command or the budget ended during a probe; the probe has no result."""
