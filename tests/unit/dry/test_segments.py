"""Segments follow the rules of torch's allocator, for which these sizes were computed by hand."""

import pytest

from autotune.core.units import MIB
from autotune.dry.segments import FixedSegments, Request, reserve

KIB = 1024


def served(*requests: Request) -> FixedSegments:
    segments = FixedSegments()
    segments.repeat(requests)
    return segments


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_a_request_decides_the_size_of_its_segment(size: int, reserved: int) -> None:
    assert served((1, size)).reserved == reserved


def test_small_requests_share_a_segment_and_take_none_of_a_large_one() -> None:
    small = [(key, 512 * KIB) for key in range(4)]
    assert served((9, 20 * MIB), (9, 0), *small).reserved == 22 * MIB
    assert served(*small, (9, 1)).reserved == 4 * MIB


def test_a_tensor_gets_the_smallest_free_block_that_is_large_enough() -> None:
    three = [(1, 40 * MIB), (2, 30 * MIB), (3, 50 * MIB), (1, 0), (2, 0), (3, 0)]
    segments = served(*three, (4, 32 * MIB), (5, 30 * MIB), (6, 50 * MIB))
    assert segments.reserved == 120 * MIB
    assert served(*three, (4, 51 * MIB)).reserved == 172 * MIB


def test_a_rest_of_more_than_a_mebibyte_is_a_block_of_its_own() -> None:
    assert served((1, 40 * MIB), (1, 0), (2, 28 * MIB), (3, 12 * MIB)).reserved == 40 * MIB
    assert served((1, 40 * MIB), (1, 0), (2, 39 * MIB), (3, 1 * MIB + 512)).reserved == 60 * MIB


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3)])
def test_free_neighbours_join(order: tuple[int, ...]) -> None:
    parts = [(0, 60 * MIB), (0, 0), *((key, 20 * MIB) for key in (1, 2, 3))]
    segments = served(*parts, *((key, 0) for key in order), (4, 60 * MIB))
    assert segments.reserved == 60 * MIB
    assert segments.holds(4) and not segments.holds(1)


def test_blocks_of_two_segments_never_join() -> None:
    assert served((1, 20 * MIB), (2, 20 * MIB), (1, 0), (2, 0), (3, 40 * MIB)).reserved == 80 * MIB


def test_the_memory_of_an_unknown_tensor_cannot_become_free() -> None:
    assert served((1, 0)).reserved == 0


def test_segments_without_a_tensor_are_not_occupied() -> None:
    segments = served((1, 40 * MIB), (2, 30 * MIB), (1, 0), (3, 60 * MIB))
    assert (segments.reserved, segments.peak_occupied) == (130 * MIB, 90 * MIB)


def test_a_part_of_a_segment_occupies_all_of_it() -> None:
    segments = served((1, 40 * MIB), (1, 0), (2, 12 * MIB), (3, 60 * MIB))
    assert segments.peak_occupied == 100 * MIB


def test_the_optimizer_fills_segments_of_the_first_step() -> None:
    """Its state takes the segment of the activations, which need another one in the next step."""
    step = [(1, 40 * MIB), (2, 30 * MIB), (1, 0), (2, 0)]
    made = reserve([(10, 20 * MIB)], [(11, 30 * MIB)], step, workspace=10 * MIB)
    assert made.reserved == (10 + 20 + 40 + 30 + 30) * MIB
    assert made.peak_occupied == made.reserved
    small = reserve([(10, 20 * MIB)], [(11, 10 * MIB)], step, workspace=10 * MIB)
    assert small.reserved == (10 + 20 + 40 + 30 + 30) * MIB


def test_each_step_makes_gradients_again() -> None:
    """A gradient is free until the next step makes it, but nothing takes its place."""
    state = [(11, 30 * MIB), (12, 14 * MIB)]
    step = [(1, 40 * MIB), (1, 0), (11, 0)]
    made = reserve([], state, step, workspace=10 * MIB)
    assert made.reserved == (10 + 40 + 14 + 40) * MIB
