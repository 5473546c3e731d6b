"""Signals of the command line: the first requests a stop, the second ends the process at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.core.process import StopToken
from autotune.trainer.terminal import leave_terminal

HANGUP = getattr(signal, "SIGHUP", None)  # Windows lacks this signal


@contextmanager
def stop_on_signals(stop: StopToken | None = None) -> Iterator[StopToken]:
    """In this block, Ctrl-C, SIGTERM and SIGHUP request a stop through `stop` or a new token.

    A terminal often sends SIGHUP twice when it is closed, so a second SIGHUP does not end the
    process.
    """
    stop = stop or StopToken()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == HANGUP:
            leave_terminal()
        elif stop():
            os._exit(128 + number)  # the worker process that runs a probe then ends, too
        stop.request(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    # A process under nohup ignores SIGHUP.
    if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
        numbers.append(HANGUP)
    old_handlers = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
