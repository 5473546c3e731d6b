"""Reads the out-of-memory error that a user passes to `autotune oom` instead of a study."""

import os
import stat
import sys
from pathlib import Path
from select import select

from autotune.core.errors import UsageError
from autotune.core.files import is_file, read_user_text
from autotune.report.engine_message import read_engine_message
from autotune.report.oom_message import OomMessage, read_message

STDIN = "-"
MESSAGE_FORMS = (
    "for the out-of-memory error of another training, pass its message in quotation marks, its "
    "log file, or - for stdin"
)


def message_of(argument: str | None) -> OomMessage | None:
    """Return the message that the argument of `oom` is, or None if it names a study.

    The argument is the text itself, a file, or "-" for stdin. Without an argument, a text that
    waits in stdin is read. Raises UsageError for a file or a stdin without an out-of-memory error.
    """
    if argument is None or argument == STDIN:
        if argument is None and not _has_input():
            return None
        source, text = "stdin", sys.stdin.buffer.read().decode(errors="replace")
        if argument is None and not text.strip():
            return None
    elif is_file(Path(argument)):
        source, text = argument, read_user_text(Path(argument))
    else:
        return _read(argument)

    if (message := _read(text)) is None:
        raise UsageError(
            f"{source} has no out-of-memory error",
            remedy="pass the log with the error message of the training; for the file that "
            "configures a training, use `autotune check FILE`",
        )
    return message


def _read(text: str) -> OomMessage | None:
    """Read an error of torch or, if there is none, of a vLLM engine."""
    return read_message(text) or read_engine_message(text)


def _has_input() -> bool:
    """Return, without blocking, whether stdin is a file or a pipe that holds text."""
    try:
        number = sys.stdin.fileno()
        kind = os.fstat(number).st_mode
    except (AttributeError, OSError, ValueError):  # no stdin, or one without a number
        return False
    return stat.S_ISREG(kind) or (stat.S_ISFIFO(kind) and bool(select([number], [], [], 0)[0]))
