"""Finds the repeating pattern of a model's layers."""

from collections.abc import Sequence
from typing import Any


def repetition(kinds: Sequence[Any]) -> tuple[int, int | None]:
    """Return the lengths of a sequence's prefix and period, with the smallest sum.

    After `prefix` items, the next `period` items repeat until the end of the sequence. The period
    is None if no items occur twice in this way.
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
