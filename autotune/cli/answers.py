"""Prints an answer's sentences and tables on stdout, and writes its HTML page to a file."""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.terminal import print_table, print_text
from autotune.core.files import write_atomic

if TYPE_CHECKING:
    from autotune.report.answer import Answer


def print_answer(
    make: Callable[[date], "Answer"], *, html: Path | None = None, silent: bool = False
) -> None:
    """Print an answer unless `silent`, and write its HTML page to the file `html`, if given.

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

    print_text(answer.title)
    for sentence in (*answer.found, *answer.notes):
        print_text(sentence)
    for table in answer.tables:
        print()
        print_table(table.title, table.columns, list(table.rows))
