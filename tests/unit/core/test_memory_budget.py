"""The one formula of the memory limit."""

import pytest

from autotune.core.memory_budget import memory_limit_gib


def test_the_limit_is_the_cap_less_the_reserve_and_what_is_taken() -> None:
    assert memory_limit_gib(20.0, 0.1) == pytest.approx(18.0)
    assert memory_limit_gib(20.0, 0.1, taken_gib=1.5) == pytest.approx(16.5)
    assert memory_limit_gib(1.0, 0.1, taken_gib=1.5) < 0
