"""How many GPUs a user names, and by when a run is to end."""

import re
from collections.abc import Sequence

from autotune.core.errors import UsageError
from autotune.core.units import parse_duration

MOST_GPUS = 8  # of one host


def parse_gpus(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """'1,2,4', or [1, 2, 4] -> (1, 2, 4). Raises UsageError for what is no number of GPUs of one host."""
    text = given if isinstance(given, str) else ",".join(map(str, [given] if isinstance(given, int) else given))
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,6}", part) and int(part) for part in parts):
        raise UsageError(f"--gpus cannot be {text!r}", remedy="separate numbers by commas: --gpus 1,2,4,8")
    numbers = tuple(sorted({int(part) for part in parts}))
    if numbers[-1] > MOST_GPUS:
        raise UsageError(
            f"--gpus {numbers[-1]}: up to {MOST_GPUS} GPUs, in one host; others' links are not modelled",
            remedy=f"take {MOST_GPUS}, and measure how your hosts scale",
        )
    return numbers


def split_count(gpu: str) -> tuple[str | None, str]:
    """'8xh100' -> ('8', 'h100'), 'h100' -> (None, 'h100')."""
    found = re.fullmatch(r"\s*([0-9]+)\s*x\s*(.+)", gpu)
    return (found[1], found[2]) if found else (None, gpu)


def parse_within(within: str | float | None) -> float | None:
    """Hours: '6h' -> 6.0; a number is hours. Raises UsageError for what is no time above zero."""
    if within is None:
        return None
    try:
        return parse_duration(within if isinstance(within, str) else f"{within}h") / 3600
    except ValueError as error:
        raise UsageError(f"--within: {error}", remedy="for example --within 6h") from None
