"""A parallelism is checked when it is made."""

from typing import Any

import pytest

from autotune.core.parallelism import Parallelism


def test_one_gpu_is_the_default() -> None:
    assert Parallelism() == Parallelism(world_size=1, sharding="none")


@pytest.mark.parametrize("world_size", [0, -1, 1.0, True, "2", None])
def test_a_world_size_is_a_positive_integer(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size is a positive integer, not"):
        Parallelism(world_size=world_size)


def test_unknown_sharding_is_refused() -> None:
    with pytest.raises(ValueError, match="sharding is one of none, not 'fsdp'"):
        Parallelism(sharding="fsdp")
