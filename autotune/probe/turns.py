"""Lets the probing process and processes that compile code for later probes share one device.

The processes take turns. A process does not need the device while it compiles, so it lets another
process use the device. While steps are timed, only the probing process uses the device. The lock is
a file in a shared folder. For each process that compiles ahead, the folder also has a file with the
device memory that the process holds.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

# Files in the shared folder: the lock of the process whose turn it is, the lock of the probing
# process while it waits for the next turn, and the requests to compile ahead.
LOCK = "turn"
NEXT = "next"
WANTED = "wanted.json"
HELD = ".held"  # suffix of a file with the GiB of device memory that a process holds
CLAIMED = ".claimed"  # suffix of a file that marks a request as begun by a process
# The longest time in seconds that the probing process waits for its turn. In one turn, another
# process only builds a few layers or runs them once.
PATIENCE_S = 30.0
POLL_S = 0.002
# Functions of Inductor that time a matrix product on the device. Only newer versions of torch have
# the first function.
TIMING_FUNCTIONS = ("_should_pad", "should_pad_bench")


def held_by_others_gib(folder: Path) -> float:
    """The GiB of device memory that compile-ahead processes hold, including CUDA contexts."""
    held_gib = 0.0
    for file in folder.glob(f"*{HELD}"):
        with suppress(OSError, ValueError):  # the process has just ended, and its file is gone
            held_gib += float(file.read_text(encoding="ascii"))
    return held_gib


class Turns:
    """Lets this process take turns on the device.

    Without a `folder`, no other process uses the device.

    `on_give` is called before this process lets other processes use the device. `on_wait` is called
    after each wait, with its start and end. Only the probing process sets `patience_s`, its longest
    wait in seconds. The probing process gets the next turn before all other processes. After its
    longest wait, it continues without a turn, and `is_stuck` is true. On a file system without
    locks, the probing process also continues without turns. `compile_s` is the compilation time of
    the last `take` block.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        patience_s: float | None = None,
        on_give: Callable[[], None] = lambda: None,
        on_wait: Callable[[float, float], None] = lambda begin, end: None,
    ) -> None:
        self._file = _open_file(folder / LOCK) if folder else None
        self._next = _open_file(folder / NEXT) if folder else None
        self._patience_s = patience_s
        self._on_give = on_give
        self._on_wait = on_wait

        self._began: float | None = None  # when the running compilation began, or None
        self.compile_s = 0.0
        self.is_stuck = False

    def close(self) -> None:
        """Give up the device for good, so that only other processes use it."""
        if self._file is not None and self._next is not None:
            os.close(self._file)
            os.close(self._next)
            self._file = None
            self._next = None

    @contextmanager
    def take(self, *, compiles: bool) -> Iterator[None]:
        """Hold the device in this block; if `compiles`, lend it to others while torch compiles."""
        self.compile_s = 0.0
        self._began = None
        self._take()
        try:
            if not compiles:
                yield
                return
            with self._release_while_compiling():
                yield
        finally:
            self._give()

    @contextmanager
    def _release_while_compiling(self) -> Iterator[None]:
        from torch._dynamo.callback import callback_handler

        # Older versions of torch call these functions without arguments.
        begin = callback_handler.register_start_callback(lambda *_: self._begin_compiling())
        end = callback_handler.register_end_callback(lambda *_: self._end_compiling())
        try:
            with self._take_turns_for_timing():
                yield
        finally:
            with suppress(ValueError):  # a reset of Dynamo has removed the callbacks
                callback_handler.remove_start_callback(begin)
                callback_handler.remove_end_callback(end)

    @contextmanager
    def _take_turns_for_timing(self) -> Iterator[None]:
        """Take a turn while Inductor times a matrix product with padding and without padding.

        Inductor times such products during a compilation, if the number of tokens is not a multiple
        of 8.
        """
        if self._file is None:
            yield
            return

        from torch._inductor.fx_passes import pad_mm

        names = [name for name in TIMING_FUNCTIONS if hasattr(pad_mm, name)]
        originals = {name: getattr(pad_mm, name) for name in names}
        for name, function in originals.items():
            setattr(pad_mm, name, partial(self._run_in_turn, function))
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(pad_mm, name, function)

    def _run_in_turn(self, function: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        if self._began is None:  # this process has the turn already
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
        """Within a `take` block, let the probing process take a turn if it waits, then continue."""
        if self._file is not None and self._began is None and self._prober_waits():
            self._give()
            self._take()

    def _take(self) -> None:
        if self._file is None or self._next is None:
            return

        begin = time.perf_counter()
        try:
            if self._patience_s is not None:
                # This wait is short, because other processes lock this file only briefly.
                fcntl.flock(self._next, fcntl.LOCK_EX)
            while not self._try_lock():
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

    def _try_lock(self) -> bool:
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
            self._on_give()
        finally:
            with suppress(OSError):  # a file system without locks raises an error
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _open_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
