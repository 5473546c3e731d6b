"""The pattern in which a model's layers repeat."""

from collections.abc import Sequence
from typing import Any


def repetition(kinds: Sequence[Any]) -> tuple[int, int | None]:
    """(prefix, period) of a sequence in which `prefix` items are followed by the same `period` items over and over.

    The pair with the smallest sum is returned. The period is None where nothing repeats at least twice.
    """
    length = len(kinds)
    best: tuple[int, int] | None = None
    for prefix in range(length // 2):
        for period in range(1, (length - prefix) // 2 + 1):
            if best is not None and prefix + period >= sum(best):
                break
            if all(kinds[index] == kinds[index + period] for index in range(prefix, length - period)):
                best = (prefix, period)
                break
    return best if best is not None else (0, None)
