"""The limit of a block's processor time."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from autotune.trainer.time_limit import time_limit


def run_endlessly(stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(Exception):
            sum(range(1000))


def test_a_block_that_catches_each_exception_is_ended() -> None:
    with pytest.raises(TimeoutError, match=r"^it takes longer than 0\.05 s$"), time_limit(0.05):
        run_endlessly(threading.Event())


def test_a_timer_of_the_caller_goes_on() -> None:
    """The handler is the caller's again, too."""
    before = signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_VIRTUAL, 500.0, 7.0)
    try:
        with time_limit(1.0):
            pass
        left, interval = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert 400.0 < left <= 500.1 and interval == pytest.approx(7.0, abs=0.1)
        assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_IGN
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_another_thread_has_no_limit() -> None:
    def run() -> int:
        with time_limit(0.001):
            return sum(range(10**5))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == sum(range(10**5))
