"""Conversions of units, and texts of values with units. An unknown value (None) becomes a dash."""

from decimal import Decimal
from typing import Any

MIB = 2**20
GIB = 2**30
# 80 % of a normal distribution is within this number of standard deviations of its mean
EIGHTY_PERCENT = 1.2816
DASH = "–"


def gib(num_bytes: float) -> float:
    """Convert bytes to GiB (2**30 bytes)."""
    return num_bytes / GIB


def fmt_gib(value: float | None) -> str:
    """Format a size: 1.5 -> '1.50 GiB', 23.46 -> '23.5 GiB', and a dash for None."""
    if value is None:
        return DASH
    return f"{value:.2f} GiB" if value < 9.995 else f"{value:.1f} GiB"


def fmt_count(value: float | None) -> str:
    """Format a number: 12345.6 -> '12,346'. Numbers below 100 get three significant digits."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fmt_many(number: float, noun: str) -> str:
    """Format a number of things: '1 example', '2,000 examples', '0.5 epochs'."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"


def fmt_usd(value: float | None) -> str:
    """Format a price: 12.3 -> '$12.30', 0.584 -> '$0.584', and a dash for None."""
    if value is None:
        return DASH
    if value > 0.995:
        return f"${value:,.2f}"
    text = f"{value:.3g}"
    return f"${value:.2f}" if float(text) == round(value, 2) else f"${Decimal(text):f}"


def fmt_seconds(value: float | None) -> str:
    """Format a time: 0.0123 -> '12 ms', 75 -> '1 min 15 s', 9000 -> '2 h 30 min'."""
    if value is None:
        return DASH
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        minutes, seconds = divmod(whole, 60)
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def fmt_hours(value: float | None) -> str:
    """Format a number of hours as `fmt_seconds` does: 2.5 -> '2 h 30 min'."""
    return fmt_seconds(None if value is None else value * 3600)


def parse_duration(text: str) -> float:
    """Convert '90', '90s', '2m', '1.5h' or '1h30m' to seconds.

    Raises ValueError for any other text, and for zero.
    """
    import re

    number = r"([0-9]+(?:\.[0-9]+)?)"
    plain = text.strip().lower()
    plain += "s" if re.fullmatch(number, plain) else ""
    parts = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s)?", plain)
    if not plain or parts is None:
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 10m or 1h30m")
    hours, minutes, rest = (float(part) if part else 0.0 for part in parts.groups())
    seconds = hours * 3600 + minutes * 60 + rest
    if not 0 < seconds < float("inf"):
        raise ValueError(f"a duration must be positive and finite, not {text!r}")
    return seconds


def fmt_difference(then: Any, now: Any) -> str:
    """Describe in one line how the plain data `now` differs from `then`."""
    if isinstance(then, dict) and isinstance(now, dict):
        parts = [
            f"{key}: {fmt_difference(then.get(key), now.get(key))}"
            for key in sorted(then.keys() | now.keys())
            if then.get(key) != now.get(key)
        ]
        return "; ".join(parts)
    return f"{then} then, {now} now"
