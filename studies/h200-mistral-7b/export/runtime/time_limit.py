# -*- coding: utf-8 -*-
"""Limits the processor time of a block of code, because code by other authors may never end."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _TimeUp(BaseException):
    """Ends the block whose time is up.

    This class is a BaseException, so code in the block that catches every Exception does not catch
    it.
    """


def _end(number: int, frame: Any) -> None:
    raise _TimeUp


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the `with` block takes more than `seconds` of processor time.

    Do not nest blocks. Outside the main thread and on Windows, the time is not limited, because
    there is no timer.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    handler = signal.signal(signal.SIGVTALRM, _end)
    # The timer repeats, because Python ignores the exception if it is raised while an object is
    # deleted.
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    except _TimeUp:
        raise TimeoutError(f"it takes longer than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, handler)
