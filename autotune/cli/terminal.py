"""What is printed: the names, configs and messages of other people can do nothing to the terminal.

`guard` puts streams before stdout and stderr that show control characters as question marks. rich writes past them,
since it colours and moves the cursor itself; `console` cleans each text before rich styles it.
"""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from autotune.core.text import printable_lines

if TYPE_CHECKING:
    from rich.console import Console


class _Guarded:
    """A text stream that passes on what a terminal can do no more than show."""

    def __init__(self, stream: Any) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        """Write the text, whose control characters are question marks."""
        self.unguarded.write(printable_lines(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


def guard() -> None:
    """Guard stdout and stderr of this process."""
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _Guarded):
            setattr(sys, name, _Guarded(stream))


def console(*, stderr: bool = False, **options: Any) -> "Console":
    """A console of rich's, whose texts are printable."""
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        def render(self, *arguments: Any, **named: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **named):
                yield segment if segment.control else segment._replace(text=printable_lines(segment.text))

    stream = sys.stderr if stderr else sys.stdout
    return Clean(file=getattr(stream, "unguarded", stream), **options)
