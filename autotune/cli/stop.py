"""How commands that take a while are stopped."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.core.errors import Cancelled, StorageError


class Stop:
    """Ctrl-C and SIGTERM: the first ends the running probe and keeps the study, the second leaves at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)  # the worker ends with its parent
        self.signal = number

    @contextmanager
    def ending(self) -> Iterator[None]:
        """What a stop ends: a probe, or the wait for a database that is away, of which was told."""
        try:
            yield
        except Cancelled:
            pass
        except StorageError:
            if self.signal is None:
                raise

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
