"""Signals of the command line: the first asks to stop and keeps what there is, the second ends the process at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.core.process import StopToken


@contextmanager
def stop_on_signals() -> Iterator[StopToken]:
    """A token that SIGINT (Ctrl-C) and SIGTERM set, inside this block."""
    stop = StopToken()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop():
            os._exit(128 + number)  # the probe worker ends with its parent
        stop.request(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
