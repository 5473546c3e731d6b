"""A stop is requested once, and ends what it interrupts without an error."""

import signal

import pytest

from autotune.core.errors import Cancelled, StorageError
from autotune.core.process import StopToken


def test_a_stop_is_seen_after_it_was_requested() -> None:
    token = StopToken()
    assert not token() and token.signal is None
    token.request()
    assert token() and token.signal == signal.SIGINT
    token.request(signal.SIGTERM)
    assert token.signal == signal.SIGTERM


def test_what_a_stop_interrupts_ends_quietly() -> None:
    token = StopToken()
    with token.ending():
        raise Cancelled
    token.request()
    with token.ending():
        raise StorageError("the database went first", remedy="none")


@pytest.mark.parametrize(("requested", "error"), [(False, StorageError), (False, ValueError), (True, ValueError)])
def test_errors_that_no_stop_explains_are_raised(requested: bool, error: type[Exception]) -> None:
    token = StopToken()
    if requested:
        token.request()
    with pytest.raises(error), token.ending():
        raise error("for another reason")
