"""Converts click's errors about a command line to errors with a message and a remedy.

Depending on its version, typer contains a copy of click or imports click. So the error classes are
taken from typer.
"""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from autotune.core.errors import UsageError, did_you_mean

# The base class of click's errors about a command line
CLICK_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]


def with_remedy(error: Any, words: Sequence[str], commands: Iterable[str]) -> UsageError:
    """Return the error about the command line `words` as a UsageError with a remedy.

    `commands` are the names of all commands.
    """
    command = _command(error, words, commands)
    help_ = f"`{command} --help` lists its options"
    parameter: Any = getattr(error, "param", None)
    if option := getattr(error, "option_name", None):
        # The option lacks its value, or it is a flag that was given a value.
        if not hasattr(error, "possibilities"):
            return UsageError(_sentence(error), remedy=_correct_use(error, option, help_))
        if remedy := _other_way(error, option, words):
            return UsageError(f"{command} has no option {option!r}", remedy=remedy)
        hint = did_you_mean(option, _options(error.ctx))
        return UsageError(f"{command} has no option {option!r}{hint}", remedy=help_)

    value = None if parameter is None else _value(parameter.opts, words)
    if value is None:  # an argument is missing, or there are too many arguments
        return UsageError(f"{command}: {_sentence(error)}", remedy=_usage(error, help_))
    name = max(parameter.opts, key=len)
    return UsageError(f"{name}: {value!r}: {_as_clause(error.message)}", remedy=help_)


def no_such_command(name: str, program: str, commands: Iterable[str]) -> UsageError:
    """Return the error for an unknown command, with the nearest names."""
    return UsageError(
        f"{program} has no command {name!r}{did_you_mean(name, commands)}",
        remedy=f"`{program} --help` lists the commands",
    )


def _command(error: Any, words: Sequence[str], commands: Iterable[str]) -> str:
    """Return the command as the user typed it. Some errors of the parser omit the command."""
    names = set(commands)
    called = next((word for word in words if word in names), "")
    if error.ctx is not None:
        called = error.ctx.command_path.partition(" ")[2]
    return f"autotune {called}".strip()


def _options(context: Any) -> list[str]:
    """Return the names of the options of a command."""
    parameters = context.command.get_params(context)
    return [name for one in parameters for name in (*one.opts, *one.secondary_opts) if "-" in name]


def _other_way(error: Any, option: str, words: Sequence[str]) -> str | None:
    """Return the remedy for an option that other versions or programs have, or None."""
    if option == "--dry-run":
        return "`autotune plan` estimates memory, speed and cost without a probe"
    name = option.removeprefix("--").replace("-", "_")
    if name in ("method", "methods"):
        return f"give --space {_value([option], words) or 'NAME'} (lora, qlora or full)"
    if name not in getattr(error.ctx.command.callback, "rare", ()):
        return None

    from autotune.problem.study_spec import StudySpec

    is_flag = StudySpec.__dataclass_fields__[name].type is bool
    value = "true" if is_flag else _value([option], words) or "VALUE"
    return f"give --set {shlex.quote(f'{name}={value}')}, or the key {name} in a file for --spec"


def _sentence(error: Any) -> str:
    return _as_clause(error.format_message())


def _as_clause(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


def _correct_use(error: Any, option: str, help_: str) -> str:
    """Return a remedy for an option that lacks its value, or has a value although it takes none."""
    if "does not take" in error.message:
        return f"give {option} alone"
    return f"give {option} VALUE; {help_}"


def _usage(error: Any, help_: str) -> str:
    """Return the usage line of a command."""
    if error.ctx is None:
        return help_
    usage = error.ctx.command.get_usage(error.ctx).removeprefix("Usage: ")
    return f"{' '.join(usage.split())}; {help_}"


def _value(names: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the value that follows one of `names` in the command line.

    Returns None for an argument, which is not named in the command line.
    """
    for place, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name in names and name.startswith("-"):
            return value if has_value else next(iter(words[place + 1 :]), None)
    return None
