"""Prints an answer: its tables on stdout, and its page to a file."""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.terminal import print_table
from autotune.core.files import write_atomic

if TYPE_CHECKING:
    from autotune.report.answer import Answer


def print_answer(
    make: Callable[[date], "Answer"], *, html: Path | None = None, silent: bool = False
) -> None:
    """Print an answer's sentences and tables unless `silent`, and write its page to `html`.

    Raises StorageError if the page cannot be written.
    """
    if html is None and silent:
        return

    today = date.today()
    answer = make(today)
    if html is not None:
        from autotune.report.answer import page

        write_atomic(html, page(answer, today))
    if silent:
        return

    print(answer.title)
    for sentence in (*answer.found, *answer.notes):
        print(sentence)
    for table in answer.tables:
        print()
        print_table(table.title, table.columns, list(table.rows))
