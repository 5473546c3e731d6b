"""What a probe trains on, step by step."""

import pytest

from autotune.core.probe_types import MicroBatch, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.schedule import Schedule


def schedule(*kinds: tuple[int, float], micro_steps: int = 2) -> Schedule:
    """Of kinds with these lengths and shares."""
    made = tuple(MicroBatch(rows=((length,),), length=length, share=share) for length, share in kinds)
    return Schedule.of(
        ProbeRequest(config=TrainConfig(), model={}, memory_gib=1.0, micro_steps=micro_steps, micro_batches=made)
    )


def test_full_rows_are_one_kind() -> None:
    one = schedule()
    assert [one.at(step) for step in range(3)] == [(0, 0)] * 3
    assert one.weights == (0.5, 0.5) and one.num_kinds == 1 and not one.uneven


def test_the_longest_is_trained_on_first_with_and_without_optimizer_state() -> None:
    kinds = schedule((10, 0.5), (40, 0.25), (20, 0.25), (100, 0.0))
    assert [kinds.at(step) for step in range(6)] == [(0, 3), (0, 3), (0, 1), (0, 2), (0, 1), (0, 2)]
    assert kinds.weights == (0.25, 0.25, 0.25, 0.25)  # the first is there twice
    assert [kinds.in_rounds(step) for step in range(6)] == [0, 0, 0, 1, 0, 2]
    assert kinds.uneven and kinds.num_kinds == 3


def test_a_longest_kind_that_is_timed_comes_once_before() -> None:
    """The rounds have it with optimizer state, last in a step, where the peak is."""
    kinds = schedule((100, 0.1), (10, 0.9))
    assert [kinds.at(step) for step in range(3)] == [(1, 0), (1, 0), (1, 0)]
    assert kinds.weights == pytest.approx((0.9, 0.1))
    alone = schedule((100, 0.1), (10, 0.9), micro_steps=1)
    assert [alone.at(step) for step in range(4)] == [(0,), (0,), (1,), (0,)]
    assert alone.weights == pytest.approx((0.1, 0.9))


def test_kinds_of_one_length_need_no_lead_of_their_own() -> None:
    packed = schedule(*[(64, 0.25)] * 4)
    assert [packed.at(step) for step in range(4)] == [(0, 1), (0, 1), (2, 3), (0, 1)]
    assert not packed.uneven and packed.num_kinds == 4


def test_a_round_that_its_kinds_do_not_fill_repeats_the_first() -> None:
    kinds = schedule((10, 0.2), (30, 0.3), (20, 0.5))
    assert kinds.round == ((0, 1), (0, 2))
    assert kinds.weights == pytest.approx((0.1, 0.3, 0.1, 0.5)) and sum(kinds.weights) == pytest.approx(1)
    assert kinds.mean([1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.1 + 0.6 + 0.3 + 2.0)
