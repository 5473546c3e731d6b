"""What is probed once more since the machine may be to blame, and which of the two answers counts.

The answers are given: heat and crashes that come and go cannot be had at will. `tests/faults` has those that can.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.errors import EnvironmentProblem, TooManyFailures
from autotune.core.probe_types import Outcome, Phase, ProbeRequest, ProbeResult, Telemetry
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import HOST_OOM, WorkerProber
from tests.helpers.factories import measurement, result

HOT = result(measurement=measurement(telemetry=Telemetry(throttle_reasons=("hardware thermal",))))
COOL = result(measurement=measurement(telemetry=Telemetry(throttle_reasons=("power cap",))))
OOM = result(outcome=Outcome.OOM)
CRASH = result(outcome=Outcome.CRASH, reason="the worker was killed by SIGSEGV")
GONE = EnvironmentProblem("the probe worker could not start")
REQUEST = ProbeRequest(config=TrainConfig(), model={}, memory_gib=1.0)
Answers = Callable[..., WorkerProber]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    def start(*given: ProbeResult | Exception) -> WorkerProber:
        prober, left = WorkerProber("cpu", tmp_path), list(given)

        def once(request: ProbeRequest, log: Path) -> ProbeResult:
            one = left.pop(0)
            if isinstance(one, Exception):
                raise one
            return one

        monkeypatch.setattr(prober, "_once", once)
        return prober

    return start


def outcomes(prober: WorkerProber, times: int) -> list[tuple[Outcome, bool]]:
    """Of so many probes: what came of each, and whether it was tried twice."""
    found = [prober.probe(REQUEST, Path("one.log")) for _ in range(times)]
    return [(one.outcome, any("twice" in note for note in one.notes)) for one in found]


def test_a_crash_is_tried_once_more_and_the_second_answer_counts(answers: Answers) -> None:
    again = replace(COOL, seconds={"total": 2.0}, started_at="2026-11-22T12:00:10+00:00")
    first = replace(CRASH, started_at="2026-11-22T12:00:00+00:00")
    found = answers(first, again).probe(REQUEST, Path("one.log"))
    assert found.outcome is Outcome.OK and found.notes == (f"tried twice, since the first time {CRASH.reason}",)
    assert found.seconds["total"] == 5.0 and found.started_at == first.started_at  # both tries


def test_what_crashed_twice_is_not_tried_twice_again(answers: Answers) -> None:
    other = replace(CRASH, config=TrainConfig(micro_batch_size=2))
    assert outcomes(answers(CRASH, CRASH, CRASH, other, COOL), 3) == [
        (Outcome.CRASH, True),
        (Outcome.CRASH, False),
        (Outcome.OK, True),
    ]


def test_what_has_a_reason_of_its_own_is_not_tried_again(answers: Answers) -> None:
    for known in (
        replace(CRASH, reason=HOST_OOM),
        replace(CRASH, phase=Phase.LOAD, reason="ValueError: no such attention"),
        replace(CRASH, outcome=Outcome.TIMEOUT, phase=Phase.STEADY),
        OOM,
    ):
        assert outcomes(answers(known), 1) == [(known.outcome, False)]
    broken = replace(CRASH, phase=Phase.STEADY, reason="AcceleratorError: CUDA error: an illegal memory access")
    assert outcomes(answers(broken, COOL), 1) == [(Outcome.OK, True)]


def test_a_crash_after_which_no_worker_starts_is_the_result(answers: Answers) -> None:
    prober = answers(CRASH, GONE, GONE)
    assert outcomes(prober, 1) == [(Outcome.CRASH, False)]
    with pytest.raises(EnvironmentProblem):
        prober.probe(REQUEST, Path("one.log"))


def test_a_hot_measurement_counts_where_the_second_fails(answers: Answers) -> None:
    for second in (CRASH, OOM):
        assert outcomes(answers(HOT, second), 1) == [(Outcome.OK, True)]
    assert outcomes(answers(HOT, GONE), 1) == [(Outcome.OK, False)]


def test_a_card_that_stays_hot_is_as_it_is_until_it_was_seen_cool(answers: Answers) -> None:
    twice, once, out = (Outcome.OK, True), (Outcome.OK, False), (Outcome.OOM, False)
    assert outcomes(answers(HOT, HOT, OOM, HOT, COOL, HOT, COOL), 5) == [twice, out, once, once, twice]
    assert outcomes(answers(HOT, COOL, HOT, COOL), 2) == [twice, twice]


def test_new_errors_of_the_cards_own_memory_end_the_session(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        def uncorrected_errors(self) -> int:
            return 3

    prober = answers(CRASH)
    monkeypatch.setattr(prober, "_nvml", Card())
    monkeypatch.setattr(prober, "_memory_errors", 1)
    with pytest.raises(TooManyFailures, match="2 uncorrected ECC errors"):
        prober.probe(REQUEST, Path("one.log"))
