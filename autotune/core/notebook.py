"""Results and progress in Python's shell and in notebooks: a short table, and lines of progress."""

import html
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class ShownAsTable(ABC):
    """A result whose repr is a short table of facts. A notebook shows the same table as HTML.

    A dataclass with this base needs `repr=False`.
    """

    __slots__ = ()

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return the rows of the table: a name and a text."""

    def __repr__(self) -> str:
        rows = self.facts()
        width = max(map(len, rows), default=0)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in self.facts().items()
        )
        return f"<table>{''.join(rows)}</table>"


def is_notebook() -> bool:
    """Whether the output of this process appears in a notebook: its stdout belongs to ipykernel."""
    return type(sys.stdout).__module__.partition(".")[0] == "ipykernel"


def progress_or_default(progress: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """Return the user's function for progress; by default, only a notebook shows progress."""
    if progress is not None:
        return progress
    return print if is_notebook() else lambda text: None
