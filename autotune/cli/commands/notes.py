"""Shows the messages of an estimate, and the progress of its dry probes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autotune.cli.terminal import notes_last


@contextmanager
def estimate_notes() -> Iterator[Callable[[str], None]]:
    """Yield the function of `notes_last`, which also gets the progress of dry probes.

    A dry probe of a long sequence takes up to a minute.
    """
    from autotune.planning.counted_memory import counting_says

    with notes_last() as say, counting_says(say):
        yield say
