"""Signals of the command line: the first requests a stop, the second ends the process at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.core.process import StopToken


@contextmanager
def stop_on_signals(stop: StopToken | None = None) -> Iterator[StopToken]:
    """Set a token on SIGINT (Ctrl-C) and SIGTERM inside this block: the given one, or a new one."""
    stop = stop or StopToken()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop():
            os._exit(128 + number)  # the probe worker ends with its parent
        stop.request(number)

    old_handlers = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
