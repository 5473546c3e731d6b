"""Prints the answer to a question: its tables or its JSON on stdout, and its page to a file."""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.terminal import print_json, print_table
from autotune.core.files import write_atomic

if TYPE_CHECKING:
    from autotune.report.answer import Answer


def print_answer(make: Callable[[date], "Answer"], *, html: Path | None = None, data: Any = None) -> None:
    """Print `data`, or else the tables of the answer; with `html` write its page. Raises StorageError."""
    today = date.today()
    if data is not None:
        print_json(data)
    if html is None and data is not None:
        return
    answer = make(today)
    if html is not None:
        from autotune.report.answer import page

        write_atomic(html, page(answer, today))
    if data is not None:
        return
    print(answer.title)
    for note in answer.notes:
        print(note)
    for table in answer.tables:
        print()
        print_table(table.title, table.columns, list(table.rows))
