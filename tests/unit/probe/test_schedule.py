"""What a probe trains on, step by step."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.objective import Objective
from autotune.core.probe_types import MicroBatch, ProbeRequest, Rung
from autotune.core.train_config import TrainConfig
from autotune.probe import schedule as module
from autotune.probe.schedule import Schedule


def request(*kinds: tuple[int, float], **wanted: Any) -> ProbeRequest:
    """Of kinds with these lengths and shares."""
    made = tuple(
        MicroBatch(rows=((length,),), length=length, share=share) for length, share in kinds
    )
    return ProbeRequest(
        config=TrainConfig(), model={}, memory_gib=1.0, micro_batches=made, **wanted
    )


def schedule(*kinds: tuple[int, float], **wanted: Any) -> Schedule:
    return Schedule.plan(request(*kinds, **wanted))


def test_full_rows_are_one_kind() -> None:
    one = schedule()
    assert [one.micro_batches(step) for step in range(3)] == [(0, 0)] * 3
    assert one.weights == (0.5, 0.5) and one.num_kinds == 1 and not one.uneven


def test_the_shortest_makes_the_optimizer_state_and_the_longest_is_last_in_its_step() -> None:
    kinds = schedule((10, 0.1), (100, 0.02), (30, 0.5), (20, 0.38))
    assert [kinds.micro_batches(step) for step in range(5)] == [
        (0, 0),
        (0, 1),
        (3, 2),
        (0, 1),
        (3, 2),
    ]
    assert kinds.weights == pytest.approx((0.1, 0.02, 0.38, 0.5))
    assert [kinds.finished_rounds(step) for step in range(5)] == [0, 0, 1, 0, 2]
    assert kinds.uneven and kinds.num_kinds == 4


def test_a_frequent_longest_kind_is_trained_on_before_it_may_be_timed() -> None:
    kinds = schedule((100, 0.1), (10, 0.9))
    assert [kinds.micro_batches(step) for step in range(3)] == [(1, 0), (1, 0), (1, 0)]
    assert kinds.weights == pytest.approx((0.9, 0.1))
    alone = schedule((100, 0.1), (10, 0.9), micro_steps=1)
    assert [alone.micro_batches(step) for step in range(4)] == [(0,), (0,), (1,), (0,)]
    assert alone.weights == pytest.approx((0.1, 0.9))


@pytest.mark.parametrize(("micro_steps", "longest_at"), [(1, (3,)), (2, (0, 3)), (4, (0, 0, 0, 3))])
def test_a_longest_kind_that_is_not_timed_is_trained_on_once_with_optimizer_state(
    micro_steps: int, longest_at: tuple[int, ...]
) -> None:
    kinds = schedule((10, 0.5), (40, 0.25), (20, 0.25), (100, 0.0), micro_steps=micro_steps)
    assert kinds.lead == ((0,) * micro_steps, longest_at)
    assert {index for step in kinds.round for index in step} == {0, 1, 2} and kinds.num_kinds == 3


def test_a_generation_of_the_longest_rows_has_no_others_because_trl_mixes_its_rows() -> None:
    kinds = schedule((10, 1.0), (100, 0.0), objective=Objective.GRPO)
    assert kinds.lead == ((0, 0), (1, 1))


def test_what_the_lead_and_a_round_take_goes_by_their_tokens() -> None:
    """By hand: an average micro batch has 20 tokens.

    The lead has 10 + 10 and 10 + 100, a round 10 + 40 and 10 + 20.
    """
    kinds = schedule((10, 0.5), (40, 0.25), (20, 0.25), (100, 0.0))
    assert kinds.lead_micros == pytest.approx(130 / 20) and kinds.round_micros == pytest.approx(
        80 / 20
    )
    even = schedule(*[(64, 0.25)] * 4)
    assert (even.lead_micros, even.round_micros) == (2, 4)
    assert even.evaluation == (0, 0, 1) and even.evaluation_micros == 3


def test_the_first_round_counts_where_no_length_is_new_or_micro_batches_are_long() -> None:
    assert schedule().first_counts(0.001) and schedule(*[(64, 0.25)] * 4).first_counts(0.001)
    whole = [schedule((10, 0.5), (40, 0.5)).first_counts(micro_s) for micro_s in (0.5, 1.5)]
    truncated = [
        schedule((10, 0.5), (40, 0.5), depth=2).first_counts(micro_s) for micro_s in (0.2, 0.5)
    ]
    assert whole == truncated == [False, True]


def test_a_round_in_which_attention_plans_for_its_lengths_never_counts() -> None:
    assert not schedule((10, 0.5), (40, 0.5), trainer="trl").first_counts(1000.0)


@pytest.mark.parametrize(
    ("step_s", "wanted", "rounds"),
    [
        (0.3, {}, 2),  # four steps last a second, and a round has two
        (0.3, {"min_timed_s": 0.0}, 1),
        (0.3, {"min_timed_s": 0.0, "min_timed_micros": 5}, 2),
        (0.001, {}, 20),  # forty steps at most
    ],
)
def test_as_many_rounds_are_timed_as_last_long_enough(
    step_s: float, wanted: dict[str, Any], rounds: int
) -> None:
    asked = request((10, 0.5), (40, 0.25), (20, 0.25), **wanted)
    assert Schedule.plan(asked).rounds_to_time(asked, step_s, asked.min_timed_s) == rounds


def test_kinds_of_one_length_need_no_lead_of_their_own() -> None:
    packed = schedule(*[(64, 0.25)] * 4)
    assert [packed.micro_batches(step) for step in range(4)] == [(0, 1), (0, 1), (2, 3), (0, 1)]
    assert not packed.uneven and packed.num_kinds == 4


def test_a_round_that_its_kinds_do_not_fill_repeats_the_most_frequent() -> None:
    kinds = schedule((10, 0.2), (30, 0.3), (20, 0.5))
    assert kinds.round == ((0, 1), (2, 2))
    assert kinds.weights == pytest.approx((0.2, 0.3, 0.25, 0.25)) and sum(
        kinds.weights
    ) == pytest.approx(1)
    assert kinds.mean([1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.2 + 0.6 + 0.75 + 1.0)
    assert kinds.evaluation == (1, 0, 1, 2) and kinds.evaluation_micros == pytest.approx(
        (30 + 60) / 21
    )


@pytest.mark.parametrize(("share", "first"), [(0.0625, (0, 0)), (0.125, (0, 1))])
def test_the_longest_is_in_the_lead_if_more_than_a_share_of_micro_batches_are_as_long(
    share: float, first: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly that share is no more; shares are of what is timed, whatever they sum to."""
    monkeypatch.setattr(module, "OFTEN", 0.0625)
    assert schedule((10, 1 - share), (100, share)).lead == (first,)
    assert schedule((10, (1 - share) / 2), (100, share / 2)).lead == (first,)


def test_a_first_round_counts_once_attention_has_planned_for_its_lengths() -> None:
    asked = replace(
        request((10, 0.5), (20, 0.5)), config=TrainConfig(micro_batch_size=1, padding="masked")
    )
    assert not Schedule.plan(asked).first_counts(1e9)
    assert Schedule.plan(asked, planned=True).first_counts(1.1) and not Schedule.plan(
        asked, planned=True
    ).first_counts(0.9)


def test_weights_are_shares_of_what_is_timed() -> None:
    """Shares that sum to a half: a quarter each, and nothing for what is not timed."""
    kinds = schedule((10, 0.25), (20, 0.25), (90, 0.0), micro_steps=1)
    assert kinds.weights == (0.5, 0.5) and kinds.mean([1.0, 3.0]) == 2.0
    assert kinds.round_micros == pytest.approx(30 / 15) and kinds.lead_micros == pytest.approx(
        100 / 15
    )


def test_a_confirmation_of_one_length_needs_no_second_round() -> None:
    for kinds, rounds in ((((64, 0.5), (64, 0.5)), 1), (((64, 0.5), (32, 0.5)), 2)):
        asked = request(*kinds, min_timed_s=0.0, rung=Rung.CONFIRM)
        assert Schedule.plan(asked).rounds_to_time(asked, 1.0, 0.0) == rounds


@pytest.mark.parametrize(
    ("step_s", "most", "rounds"),
    [(0.25, 40, 4), (0.3, 40, 4), (2.0, 40, 1), (0.25, 3, 3), (0.25, 1, 1)],
)
def test_steps_of_one_kind_are_timed_until_the_time_is_up(
    step_s: float, most: int, rounds: int
) -> None:
    asked = request(max_timed_steps=most)
    assert Schedule.plan(asked).rounds_to_time(asked, step_s, 1.0) == rounds


def test_long_is_what_hides_the_loading_of_kernels() -> None:
    """10 ms are 1 % of a second, and 3 % of a third of one."""
    assert schedule().long_s == pytest.approx(1.0) and schedule(depth=2).long_s == pytest.approx(
        1 / 3
    )
    assert not schedule((10, 0.5), (40, 0.5)).first_counts(schedule().long_s)


def test_one_in_twenty_is_often() -> None:
    assert [schedule((10, 1 - share), (100, share)).lead[0] for share in (0.04, 0.06)] == [
        (0, 0),
        (0, 1),
    ]


def test_rounds_follow_the_lead_from_their_first_step_on() -> None:
    six = schedule(*[(64, 1 / 6)] * 6)
    assert (len(six.lead), len(six.round)) == (1, 3)
    assert [six.micro_batches(step) for step in range(1, 5)] == [(0, 1), (2, 3), (4, 5), (0, 1)]


def test_each_kind_is_evaluated_where_there_are_two_lengths() -> None:
    assert schedule((10, 0.5), (10, 0.3), (40, 0.2)).evaluation == (2, 0, 1, 2)
