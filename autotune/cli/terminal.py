"""Prints text safely: names, configs and messages of other people cannot control the terminal.

`guard` wraps stdout and stderr in streams that replace control characters by question marks. The
library rich must bypass these streams, because it writes colors and cursor moves itself. So
`console` cleans each text before rich styles it. If the terminal's encoding lacks a character, a
dash is replaced by a hyphen, and any other character by a question mark.
"""

import codecs
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from autotune.core.text import printable_lines
from autotune.core.units import DASH

if TYPE_CHECKING:
    from rich.console import Console

# The width of a table in a pipe or a file, in characters: enough to print every cell completely
_PIPE_WIDTH = 280


class _Guarded:
    """A text stream that replaces control characters by question marks."""

    def __init__(self, stream: Any) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        """Write the text with question marks for its control characters."""
        self.unguarded.write(printable_lines(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


def _closest(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks; also return the index of the next character."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join("-" if char == DASH else "?" for char in lacking), error.end


def guard() -> None:
    """Replace this process's stdout and stderr by guarded streams."""
    codecs.register_error("closest", _closest)
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _Guarded):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="closest")
            setattr(sys, name, _Guarded(stream))


def console(*, stderr: bool = False, **options: Any) -> "Console":
    """Return a console of the library rich that replaces control characters in all texts."""
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        def render(self, *arguments: Any, **keywords: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **keywords):
                if segment.control:
                    yield segment
                else:
                    yield segment._replace(text=printable_lines(segment.text))

    stream = sys.stderr if stderr else sys.stdout
    return Clean(file=getattr(stream, "unguarded", stream), **options)


def wrapped(text: str, start: str, width: int) -> list[str]:
    """Return the lines of a text after `start`, each at most `width` characters wide.

    Further lines are indented below the text. Only spaces break a line, so that the user can copy
    a path, a command or a setting. At least 30 characters are left for the text.
    """
    texts = textwrap.wrap(
        text, max(width - len(start), 30), break_long_words=False, break_on_hyphens=False
    ) or [""]
    return [(" " * len(start) if index else start) + line for index, line in enumerate(texts)]


def print_text(text: str, start: str = "") -> None:
    """Print `start` and a text on stdout. On a terminal, the text is wrapped between words."""
    lines = [f"{start}{text}"]
    if sys.stdout.isatty():
        lines = wrapped(text, start, shutil.get_terminal_size().columns)
    print("\n".join(lines))


def print_note(text: str) -> None:
    """Print a warning or progress on stderr."""
    print(text, file=sys.stderr)


def print_json(rows: Any) -> None:
    """Print data as JSON on stdout."""
    print(json.dumps(rows, indent=2))


def print_answer_json(answer: Any) -> None:
    """Print a value, or a list of values, as JSON on stdout."""
    from autotune.core.json_view import json_data

    print_json(json_data(answer))


def print_table(title: str | None, columns: dict[str, Any], rows: list[tuple[str, ...]]) -> None:
    """Print a table on stdout; `columns` maps each heading to the justification of its cells."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    if not screen.is_terminal:
        screen = console(width=_PIPE_WIDTH)

    table = Table(title=title, title_justify="left")
    for number, (heading, justify) in enumerate(columns.items()):
        longest = max((len(row[number]) for row in rows), default=0)
        # The first column names the rows. If it is short, its cells are never wrapped.
        is_whole = number == 0 and longest <= screen.width // 3
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=is_whole)

    for row in rows:
        # The cells are Text, because rich would read brackets in names as markup.
        table.add_row(*map(Text, row))
    screen.print(table)
