"""The pattern in which layers repeat is found with the fewest items."""

import pytest

from autotune.core.layer_pattern import repetition


@pytest.mark.parametrize(
    ("kinds", "prefix", "period"),
    [
        ("AAAAAAAA", 0, 1),
        ("AA", 0, 1),
        ("ABABABAB", 0, 2),
        ("ABAB", 0, 2),
        ("ABCABC", 0, 3),
        ("ABBB", 1, 1),
        ("ABABABABA", 0, 2),  # the last period is cut short
        ("SSSSSFSSSSSFSSSSSFSSSSSFSS", 0, 6),
        ("DDDSSSSSSSS", 3, 1),
        ("DABABABAB", 1, 2),
        ("AABAABAAB", 0, 3),
        ("ABCDEFGH", 0, None),
        ("SSSSSFSS", 0, None),  # the pattern is not seen twice
        ("AAAAAAAB", 0, None),
        ("ABCC", 0, None),  # half of it comes before
        ("ABCCC", 0, None),
        ("ABCCCC", 2, 1),
        ("ABACAC", 2, 2),
        ("A", 0, None),
        ("", 0, None),
    ],
)
def test_repetition(kinds: str, prefix: int, period: int | None) -> None:
    assert repetition(kinds) == (prefix, period)
