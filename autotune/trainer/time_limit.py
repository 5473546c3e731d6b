"""Limits the processor time of a block, for code of other authors that may not end."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _TimeUp(BaseException):
    """Ends the block. The code inside may catch each Exception."""


def _end(number: int, frame: Any) -> None:
    raise _TimeUp


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block takes more processor time. Blocks must not be nested.

    The limit needs a timer of the main thread, so other threads have none, and neither has Windows.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    handler = signal.signal(signal.SIGVTALRM, _end)
    # The timer repeats, because Python ignores an exception in the deletion of an object.
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    except _TimeUp:
        raise TimeoutError(f"it takes longer than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, handler)
