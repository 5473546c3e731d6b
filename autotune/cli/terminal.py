"""Prints text safely: names, configs and messages of other people cannot control the terminal.

`guard` wraps stdout and stderr in streams that replace control characters with question marks. The
library rich must bypass these streams, because it writes colors and cursor moves itself. So
`console` cleans each text before rich styles it. If the terminal's encoding lacks a character, a
dash is replaced by a hyphen, and any other character by a question mark.
"""

import codecs
import io
import json
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autotune.core.text import printable_lines
from autotune.core.units import DASH

if TYPE_CHECKING:
    from rich.console import Console

# The width of a table in a pipe or a file, in characters: enough to print every cell completely
_PIPE_WIDTH = 280
# If stderr is no terminal, progress is printed only after a computation has taken this long.
SILENT_S = 2.0


class ReaderEnded(Exception):
    """The program that reads the output has ended.

    This error replaces BrokenPipeError, on which click would exit with code 1.
    """


class _Guarded:
    """A text stream that replaces control characters with question marks.

    Its methods raise ReaderEnded if the stream is a pipe without a reader.
    """

    def __init__(self, stream: Any) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        """Write the text with question marks for its control characters."""
        with _reader():
            self.unguarded.write(printable_lines(text))
        return len(text)

    def flush(self) -> None:
        """Write the content of the buffer."""
        with _reader():
            self.unguarded.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


@contextmanager
def _reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderEnded from None


def _closest(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks; also return the index of the next character."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join("-" if char == DASH else "?" for char in lacking), error.end


def guard() -> None:
    """Replace this process's stdout and stderr with guarded streams."""
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

        def on_broken_pipe(self) -> None:
            raise ReaderEnded  # rich would exit with 1

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


def text_width() -> int | None:
    """Return the width of a terminal, or COLUMNS; None for a pipe or a file without COLUMNS."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def print_text(text: str, start: str = "") -> None:
    """Print `start` and a text on stdout, wrapped between words to the width of the terminal."""
    width = text_width()
    print("\n".join(wrapped(text, start, width) if width else [f"{start}{text}"]))


def print_lines(lines: Mapping[str, str]) -> None:
    """Print labelled texts on stdout, one below the other. Empty texts are left out."""
    width = max(map(len, lines))
    for label, text in lines.items():
        if text:
            print_text(text, f"{label:>{width}}  ")


@contextmanager
def notes_last() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the messages of a computation; warnings follow its answer.

    Warnings are printed on stderr when the block ends. On a terminal, progress messages disappear
    when the block ends. Elsewhere, progress messages are lines on stderr, which appear only if the
    block takes longer than SILENT_S seconds.
    """
    screen = console(stderr=True)
    warnings: dict[str, None] = {}
    try:
        with _spinner(screen) if screen.is_terminal else _late_lines() as show:

            def say(text: str) -> None:
                if text.startswith("warning: "):
                    warnings[text] = None
                else:
                    show(text)

            yield say
    finally:
        for text in warnings:
            print_note(text)


@contextmanager
def _spinner(screen: "Console") -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a message next to a spinner, in place of the last message."""
    from rich.text import Text

    status = screen.status("", spinner="line")

    def show(text: str) -> None:
        status.start()
        status.update(Text(text))

    try:
        yield show
    finally:
        status.stop()


@contextmanager
def _late_lines() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints messages on stderr once the block has run for SILENT_S seconds.

    Of the messages before this time, only the latest is printed. Later messages are printed at
    once.
    """
    latest = ""
    is_late = False

    def begin() -> None:
        nonlocal is_late
        is_late = True
        if latest:
            print_note(latest)

    def show(text: str) -> None:
        nonlocal latest
        latest = text
        if is_late:
            print_note(text)

    timer = threading.Timer(SILENT_S, begin)
    timer.daemon = True
    timer.start()
    try:
        yield show
    finally:
        timer.cancel()


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


def print_table(
    title: str | None, columns: dict[str, Any], rows: Sequence[tuple[str, ...]]
) -> None:
    """Print a table on stdout; `columns` maps each heading to the justification of its cells.

    Cells are wrapped between words. If even their longest words do not fit side by side, the
    columns are divided into several tables, and each table begins with the first column.
    """
    from rich.table import Table
    from rich.text import Text

    width = text_width() or _PIPE_WIDTH
    texts = [(heading, *cells) for heading, *cells in zip(columns, *rows, strict=True)]
    least = [max(len(word) for text in cells for word in (text or "-").split()) for cells in texts]
    # The first column names the rows. If it is short, its cells are never wrapped.
    names = max(map(len, texts[0]))
    if names <= width // 3:
        least[0] = names

    for part in _parts(least, width):
        most = [max(map(len, texts[number])) for number in part]
        widths = _widths([least[number] for number in part], most, width)
        table = Table(title=title, title_justify="left")
        for number, cell_width in zip(part, widths, strict=True):
            heading = texts[number][0]
            table.add_column(heading, justify=columns[heading], overflow="fold", width=cell_width)

        for row in rows:
            # The cells are Text, because rich would read brackets in names as markup.
            table.add_row(*(Text(row[number]) for number in part))
        console(width=max(width, sum(widths) + _frame(len(part)))).print(table)
        title = None


def _frame(num_columns: int) -> int:
    """Return the total width of a table's borders and padding, in characters."""
    return 3 * num_columns + 1


def _parts(least: Sequence[int], width: int) -> Iterator[list[int]]:
    """Divide the columns into tables that fit the width; each table has the first column.

    `least` has the smallest possible width of each column. Yields the column numbers of each table.
    """
    part = [0]
    for number in range(1, len(least)):
        needed = sum(least[index] for index in (*part, number)) + _frame(len(part) + 1)
        if len(part) > 1 and needed > width:
            yield part
            part = [0]
        part.append(number)
    yield part


def _widths(least: Sequence[int], most: Sequence[int], width: int) -> list[int]:
    """Return a width for each column, from its `least` to its `most` width.

    As many columns as possible get their `most` width, at which no cell is wrapped.
    """
    free = width - _frame(len(least)) - sum(least)
    widths = list(least)
    for number in sorted(range(len(least)), key=lambda number: most[number] - least[number]):
        extra = max(0, min(free, most[number] - least[number]))
        widths[number] += extra
        free -= extra
    return widths
