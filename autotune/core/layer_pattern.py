"""Finds the repeating pattern of a model's layers."""

from collections.abc import Sequence
from typing import Any


def repetition(kinds: Sequence[Any]) -> tuple[int, int | None]:
    """Split a sequence into a prefix and a repeating period, and return the lengths of both.

    After `prefix` items, the next `period` items repeat until the end of the sequence. If several
    splits are possible, the split with the smallest sum of the two lengths is returned. The period
    is None if no items repeat in this way.
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
