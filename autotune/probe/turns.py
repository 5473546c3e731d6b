"""Processes that use one device in turns: one probes on it, others compile ahead for it (`compile_ahead`).

While code is compiled the device is not needed, and is left to the others. So nothing of theirs runs on it while steps
are timed. A folder holds the lock, and a file for each of the others with the memory that it holds meanwhile.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

# Files of the folder: the one that is locked, the one that is while the prober waits for it, and what is to be
# compiled; ends of the names of those with what a process holds, and of those for what one has begun to compile.
LOCK, NEXT, WANTED, HELD, CLAIMED = "turn", "next", "wanted.json", ".held", ".claimed"
PATIENCE_S = 30.0  # what a turn takes at most: to build a few layers, or to run them once
POLL_S = 0.002
TRIES = (
    "_should_pad",
    "should_pad_bench",
)  # functions of Inductor that time a product: the first in newer versions


def held_by_others_gib(folder: Path) -> float:
    """What those that compile ahead hold of the device's memory, their contexts included."""
    held_gib = 0.0
    for file in folder.glob(f"*{HELD}"):
        with suppress(OSError, ValueError):  # it has just ended
            held_gib += float(file.read_text(encoding="ascii"))
    return held_gib


class Turns:
    """This process's turns on the device. Without a `folder` nobody else uses it.

    `before_giving` is called before the device is left to others, `on_wait` with the times between which it was waited
    for. A process that is to wait no longer than `patience_s`, the one that probes, has the next turn before all
    others; after that time it goes on without one, and `is_stuck` is then true, also on a file system without locks.
    `compile_s` are the seconds of compilation in the last `held` block.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        patience_s: float | None = None,
        before_giving: Callable[[], None] = lambda: None,
        on_wait: Callable[[float, float], None] = lambda begin, end: None,
    ) -> None:
        self._file, self._next = (
            _opened(folder / name) if folder else None for name in (LOCK, NEXT)
        )
        self._patience_s = patience_s
        self._before_giving, self._on_wait = before_giving, on_wait
        self._began: float | None = None  # when the compilation in progress began
        self.compile_s = 0.0
        self.is_stuck = False

    def close(self) -> None:
        """Leave the device to others for good."""
        if self._file is not None and self._next is not None:
            os.close(self._file)
            os.close(self._next)
            self._file = self._next = None

    @contextmanager
    def held(self, *, compiles: bool) -> Iterator[None]:
        """Use the device in this block, but for the time in which it `compiles`."""
        self.compile_s, self._began = 0.0, None
        self._take()
        try:
            if not compiles:
                yield
                return
            with self._around_compilation():
                yield
        finally:
            self._give()

    @contextmanager
    def _around_compilation(self) -> Iterator[None]:
        from torch._dynamo.callback import callback_handler

        # Older versions of torch call back without arguments.
        begin = callback_handler.register_start_callback(lambda *_: self._begin_compiling())
        end = callback_handler.register_end_callback(lambda *_: self._end_compiling())
        try:
            with self._products_in_turn():
                yield
        finally:
            with suppress(ValueError):  # who resets Dynamo has removed them
                callback_handler.remove_start_callback(begin)
                callback_handler.remove_end_callback(end)

    @contextmanager
    def _products_in_turn(self) -> Iterator[None]:
        """Take a turn where Inductor, while it compiles, tries on the device whether a product is quicker padded.

        It does so for numbers of tokens that are no multiple of 8.
        """
        if self._file is None:
            yield
            return
        from torch._inductor.fx_passes import pad_mm

        names = [name for name in TRIES if hasattr(pad_mm, name)]
        theirs = {name: getattr(pad_mm, name) for name in names}
        for name, function in theirs.items():
            setattr(pad_mm, name, partial(self._in_turn, function))
        try:
            yield
        finally:
            for name, function in theirs.items():
                setattr(pad_mm, name, function)

    def _in_turn(self, function: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        if self._began is None:  # it is this process's turn
            return function(*args, **kwargs)
        self._end_compiling()
        try:
            return function(*args, **kwargs)
        finally:
            self._begin_compiling()

    def _begin_compiling(self) -> None:
        self._began = time.perf_counter()
        self._give()

    def _end_compiling(self) -> None:
        if self._began is not None:
            self.compile_s += time.perf_counter() - self._began
        self._began = None
        self._take()

    def offer(self) -> None:
        """In a `held` block: leave the device to the one that probes, if it waits, and go on after its turn."""
        if self._file is not None and self._began is None and self._prober_waits():
            self._give()
            self._take()

    def _take(self) -> None:
        if self._file is None or self._next is None:
            return
        begin = time.perf_counter()
        try:
            if self._patience_s is not None:
                fcntl.flock(self._next, fcntl.LOCK_EX)  # others lock it for a moment alone
            while not self._is_taken():
                if self._patience_s is not None and time.perf_counter() - begin > self._patience_s:
                    self.is_stuck = True
                    break
                time.sleep(POLL_S)
        except OSError:  # a file system without locks
            if self._patience_s is None:
                raise
            self.is_stuck = True
        with suppress(OSError):
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self._on_wait(begin, time.perf_counter())

    def _is_taken(self) -> bool:
        assert self._file is not None
        if self._patience_s is None and self._prober_waits():
            return False
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _prober_waits(self) -> bool:
        assert self._next is not None
        with suppress(BlockingIOError):
            fcntl.flock(self._next, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._next, fcntl.LOCK_UN)
            return False
        return True

    def _give(self) -> None:
        if self._file is None:
            return
        try:
            self._before_giving()
        finally:
            with suppress(OSError):  # as in `_take`
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
