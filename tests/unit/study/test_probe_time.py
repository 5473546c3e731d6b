"""How long whole models are predicted to take, from probes whose times are known."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.probe_types import MicroBatch, ModelShape, ProbeRequest, Rung
from autotune.core.train_config import TrainConfig
from autotune.study.probe_time import ProbeTimes
from tests.helpers.factories import measurement, result

CONFIG = TrainConfig()
LENGTHS = ((100, 0.8), (600, 0.2))
# two micro batches a step, timed for a second
REQUEST = ProbeRequest(config=CONFIG, model={}, memory_gib=80.0)


def learned(
    *probes: tuple[int | None, float, dict[str, float]], config: TrainConfig = CONFIG
) -> ProbeTimes:
    """Of a model of 32 layers, from (depth, seconds of a micro batch, seconds of the parts)."""
    times = ProbeTimes(ModelShape(num_layers=32, prefix=0, period=1))
    for depth, micro_s, seconds in probes:
        measured = measurement(micro_s, micro_step_s=(micro_s,))
        times.learn(
            result(config, depth=depth, measurement=measured, seconds={"total": 9.0} | seconds),
            measured,
        )
    return times


def test_nothing_known_is_none() -> None:
    assert learned().whole_s(REQUEST) is None
    assert (
        learned((2, 1.0, {})).whole_s(replace(REQUEST, config=replace(CONFIG, lora_rank=8))) is None
    )


def test_loads_and_micro_batches_are_lines_over_depth() -> None:
    """At 32 layers a load takes 7 s and a micro batch 3.2 s, four of which make the first two
    steps.
    """
    times = learned(
        (2, 0.2, {"load": 1.0, "first_step": 0.8}), (8, 0.8, {"load": 2.2, "first_step": 3.2})
    )
    assert times.whole_s(REQUEST) == pytest.approx(7.0 + 12.8)
    # Four micro batches a step double the first steps; of twelve timed ones four are among these.
    longer = replace(REQUEST, micro_steps=4, min_timed_micros=12)
    assert times.whole_s(longer) == pytest.approx(7.0 + 25.6 + 8 * 3.2)


def test_joining_other_ranks_takes_as_long_with_any_number_of_layers() -> None:
    """The longest of all times counts, as a rank may wait for another one to start."""
    parts = {"load": 1.0, "first_step": 0.8}
    times = learned((2, 0.2, parts | {"join": 0.5}), (8, 0.8, parts | {"join": 3.0}))
    alone = learned((2, 0.2, parts), (8, 0.8, parts))
    expected = alone.whole_s(REQUEST)
    assert expected is not None and times.whole_s(REQUEST) == pytest.approx(expected + 3.0)


def test_the_deepest_model_tells_what_the_first_steps_take_beside_its_micro_batches() -> None:
    """Two layers waited half of their time for kernels to load, eight did not."""
    times = learned((2, 0.2, {"first_step": 1.6}), (8, 0.8, {"first_step": 3.2}))
    assert times.whole_s(REQUEST) == pytest.approx(12.8)


def test_the_longest_rows_of_the_first_step_count() -> None:
    times = learned((2, 0.2, {"first_step": 1.6}), (8, 0.8, {"first_step": 6.4}))
    assert times.whole_s(REQUEST) == pytest.approx(25.6)


@pytest.mark.parametrize(("micro_s", "timed_s"), [(0.02, 0.96), (0.01, 0.78)])
def test_short_micro_batches_are_timed_for_a_second_or_forty_steps(
    micro_s: float, timed_s: float
) -> None:
    """Of which the first step is one."""
    times = learned((None, micro_s, {"load": 1.0, "first_step": 4 * micro_s}))
    assert times.whole_s(REQUEST) == pytest.approx(1.0 + 4 * micro_s + timed_s)


@pytest.mark.parametrize(("micro_s", "rounds"), [(0.5, 1), (2.0, 0)])
def test_a_round_of_padded_rows_takes_as_long_as_its_tokens(micro_s: float, rounds: int) -> None:
    """An average micro batch has 200 tokens: lead and round of
    100 and 600 are as long as 3.5 each.
    """
    kinds = tuple(
        MicroBatch(rows=((tokens,),), length=tokens, share=share) for tokens, share in LENGTHS
    )
    padded = replace(REQUEST, micro_batches=kinds, min_timed_s=0.0)
    times = learned((None, micro_s, {"first_step": 20.0}))
    assert times.whole_s(padded) == pytest.approx(20.0 + rounds * 3.5 * micro_s)
    # the lead has two more of 100 tokens, the round is doubled
    more = replace(padded, micro_steps=4)
    assert times.whole_s(more) == pytest.approx(
        20.0 * (4.5 + 7.0) / (3.5 + 3.5) + rounds * 7.0 * micro_s
    )


def test_a_confirmation_of_padded_rows_has_a_second_round_and_an_evaluation() -> None:
    """An average micro batch has 200 tokens; evaluated are one of 100 tokens and two of 600, at
    half of the time.
    """
    kinds = tuple(
        MicroBatch(rows=((tokens,),), length=tokens, share=share) for tokens, share in LENGTHS
    )
    confirmed = replace(REQUEST, micro_batches=kinds, min_timed_s=0.0, rung=Rung.CONFIRM)
    times = learned((None, 2.0, {"first_step": 20.0}))
    # the first of the two is in the 20 s
    assert times.whole_s(confirmed) == pytest.approx(20.0 + 1 * 3.5 * 2.0)
    assert times.whole_s(replace(confirmed, evaluate=True)) == pytest.approx(27.0 + 6.5 * 2.0 / 2)


@pytest.mark.parametrize(
    ("changes", "micro_s", "first_s"),
    [({}, 1.0, 30.0), ({"compile": "per_layer"}, 1.0, 12.0), ({"compile": "per_layer"}, 2.0, 24.0)],
)
def test_what_was_compiled_is_there_the_next_time(
    changes: dict[str, Any], micro_s: float, first_s: float
) -> None:
    config = replace(CONFIG, **changes)
    times = learned((None, micro_s, {"first_step": 30.0}), config=config)
    assert times.whole_s(replace(REQUEST, config=config)) == pytest.approx(first_s)


def test_a_whole_model_outranks_a_part_and_a_longer_load_a_shorter_one() -> None:
    whole = (None, 2.0, {"load": 5.0, "first_step": 8.0})
    times = learned(
        (2, 0.1, {}), (8, 0.4, {}), whole, (None, 2.0, {"load": 0.0, "first_step": 8.0})
    )
    assert times.whole_s(REQUEST) == pytest.approx(5.0 + 8.0)


def test_what_another_study_answered_has_no_times() -> None:
    times = ProbeTimes(None)
    times.learn(result(CONFIG, seconds={}), measurement())
    assert times.whole_s(REQUEST) is None


@pytest.mark.parametrize(("micro_s", "tried_s"), [(0.1, 5 * 0.25), (2.0, 6.0 + 2.15)])
def test_new_lengths_are_tried_after_the_timed_rounds(micro_s: float, tried_s: float) -> None:
    """Five, or as many as begin in six seconds, each with a plan of 0.15 s."""
    measured = measurement(micro_s, micro_step_s=(micro_s,), new_length_s=0.15)
    without = learned((None, micro_s, {"load": 1.0, "first_step": 4.0})).whole_s(REQUEST)
    times = ProbeTimes(ModelShape(num_layers=32, prefix=0, period=1))
    times.learn(
        result(
            CONFIG, measurement=measured, seconds={"total": 9.0, "load": 1.0, "first_step": 4.0}
        ),
        measured,
    )
    assert without is not None and times.whole_s(REQUEST) == pytest.approx(without + tried_s)


def test_the_narrower_model_says_how_long_new_lengths_take() -> None:
    times = ProbeTimes(ModelShape(num_layers=32, prefix=0, period=1))
    for depth, new_length_s in ((2, 0.15), (8, None)):
        measured = measurement(0.1, micro_step_s=(0.1,), new_length_s=new_length_s)
        found = result(
            CONFIG,
            depth=depth,
            measurement=measured,
            seconds={"total": 9.0, "load": 1.0, "first_step": 4.0},
        )
        times.learn(found, measured)
    without = learned(
        (2, 0.1, {"load": 1.0, "first_step": 4.0}), (8, 0.1, {"load": 1.0, "first_step": 4.0})
    )
    (known_s, with_s) = (one.whole_s(REQUEST) for one in (without, times))
    assert known_s is not None and with_s == pytest.approx(known_s + 5 * 0.25)


def test_a_single_depth_is_taken_in_proportion() -> None:
    """Of 32 layers, or of as many as were probed where nobody says how many there are."""
    part = (8, 0.5, {"load": 1.0, "first_step": 2.0})
    assert learned(part).whole_s(REQUEST) == pytest.approx(4.0 + 8.0)
    measured = measurement(2.0, micro_step_s=(2.0,))
    times = ProbeTimes(None)
    times.learn(
        result(CONFIG, depth=8, measurement=measured, seconds={"total": 9.0, "load": 1.0}), measured
    )
    assert times.whole_s(REQUEST) == pytest.approx(1.0 + 9.0)  # without a first step, all of it is


def test_a_wider_model_that_was_faster_predicts_no_less_for_the_whole_one() -> None:
    """Something else had disturbed the first probe."""
    times = learned(
        (2, 4.0, {"load": 3.0, "first_step": 16.0}), (8, 2.0, {"load": 1.0, "first_step": 8.0})
    )
    assert times.whole_s(REQUEST) == pytest.approx(1.0 + 8.0)


def test_a_single_layer_is_no_whole_model() -> None:
    whole = (None, 2.0, {"load": 5.0, "first_step": 8.0})
    times = learned(whole, (1, 0.1, {"load": 0.5, "first_step": 0.4}))
    assert times.whole_s(REQUEST) == pytest.approx(5.0 + 8.0)


def test_of_a_model_of_unknown_depth_the_deepest_stands_for_the_whole() -> None:
    times = ProbeTimes(None)
    for depth, micro_s in ((2, 0.5), (8, 2.0)):
        measured = measurement(micro_s, micro_step_s=(micro_s,))
        seconds = {"total": 9.0, "load": 1.0, "first_step": 8.0}
        times.learn(result(CONFIG, depth=depth, measurement=measured, seconds=seconds), measured)
    assert times.whole_s(REQUEST) == pytest.approx(1.0 + 8.0)


def test_rounds_of_two_lengths_are_timed_for_as_long_as_single_steps() -> None:
    """One micro batch a step: a round of 100 and 600 tokens is as long as 3.5 average ones of 10
    ms, 17.5 ms a step.

    A second takes 58 steps, of which there are 40 at most: 20 rounds. The lead has one of each
    length too.
    """
    kinds = tuple(
        MicroBatch(rows=((tokens,),), length=tokens, share=share) for tokens, share in LENGTHS
    )
    short = replace(REQUEST, micro_batches=kinds, micro_steps=1, min_timed_s=0.1)
    times = ProbeTimes(None)
    measured = measurement(0.01, micro_step_s=(0.01,), micro_steps=1)
    times.learn(
        result(CONFIG, measurement=measured, seconds={"total": 9.0, "first_step": 5.0}), measured
    )
    # A tenth of a second takes 6 steps of 17.5 ms: three rounds of 35 ms.
    assert times.whole_s(short) == pytest.approx(5.0 + 3 * 0.035)
    assert times.whole_s(replace(short, min_timed_s=1.0)) == pytest.approx(5.0 + 20 * 0.035)
