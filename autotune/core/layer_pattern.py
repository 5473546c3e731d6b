"""The pattern in which a model's layers repeat."""

from collections.abc import Sequence
from typing import Any


def repetition(kinds: Sequence[Any]) -> tuple[int, int | None]:
    """(prefix, period) of a sequence in which `prefix` items are followed by the same `period` items over and over.

    The pair with the smallest sum is returned. The period is None where nothing repeats at least twice.
    """
    length = len(kinds)
    for total in range(1, length):
        for period in range(1, total + 1):
            prefix = total - period
            is_seen_twice = prefix < length // 2 and prefix + 2 * period <= length
            if is_seen_twice and all(
                kinds[at] == kinds[at + period] for at in range(prefix, length - period)
            ):
                return prefix, period
    return 0, None
