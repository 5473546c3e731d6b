"""When a search stops, by hand: patience over noise, and the part of the budget that is kept for confirmation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult, Rung
from autotune.study.distributed import SharedTrials
from autotune.study.summary import TrialRecord
from tests.helpers.factories import add_measured, measurement
from tests.helpers.replay import machine
from tests.helpers.sessions import BASELINE, SPACE, Start, by_tokens

Make = Callable[..., SharedTrials]
OTHER = replace(BASELINE, checkpointing="none")


@pytest.fixture
def trials(start: Start) -> Make:
    """Trials of a session whose clock stands at `now` seconds."""

    def make(now: float = 0.0, **options: Any) -> SharedTrials:
        made = start(**({"began": 0.0, "budget_s": 1000.0} | options)).study.trials
        made.clock = lambda: now
        return made

    return make


def row(number: int, speed: float | None, outcome: Outcome = Outcome.OK, **changes: Any) -> TrialRecord:
    values: dict[str, Any] = {"config": BASELINE, "rung": Rung.FULL, "tokens_per_second": speed}
    return TrialRecord(number=number, outcome=outcome, **(values | changes))


@pytest.mark.parametrize(
    ("speeds", "stale"),
    [
        ([], 0),
        ([1000.0], 0),
        ([1000.0, 1009.0], 1),  # within twice 0.5 %
        ([1000.0, 1011.0], 0),
        ([1000.0, 1009.0, 1018.0], 2),  # each is compared with the best so far
        ([1000.0, 900.0, 1200.0, 1100.0, 1199.0], 2),
        ([1000.0, None, None], 0),  # what failed has no number
    ],
)
def test_patience_counts_trials_that_are_not_better_than_noise(
    trials: Make, speeds: list[float | None], stale: int
) -> None:
    made = trials(patience=2)
    made.rows = [row(number, speed) for number, speed in enumerate(speeds)]
    assert made.num_stale() == stale and made.is_done() is (stale >= 2)


def test_patience_leaves_out_what_was_known_climbed_or_done_by_others(trials: Make) -> None:
    made = trials()
    made.rows = [
        row(0, 1000.0),
        row(1, 900.0, reused=True),
        row(2, 900.0),  # climbed
        row(3, 900.0),  # by another worker
        row(4, 2000.0, Outcome.SLOW),  # what is only predicted improves nothing, and counts
        row(5, 1020.0),
        row(6, 900.0),
    ]
    made.exempt, made._by_others = {2}, {3}
    assert made.num_stale() == 1
    made.rows.pop(5)
    assert made.num_stale() == 2


def test_steps_that_scatter_need_a_larger_gain(trials: Make) -> None:
    """A standard deviation of 3 %: 5 % more is no gain, and 7 % is."""
    for gain, stale in ((1.05, 1), (1.07, 0)):
        made = trials()
        add_measured(made.selection, OTHER, measurement(step_s=(0.97, 1.03)))
        made.rows = [row(0, 1000.0), row(1, 1000.0 * gain, config=OTHER)]
        assert made.num_stale() == stale


@pytest.mark.parametrize(
    ("probes", "limits", "kept_s"),
    [
        ([], {}, 0.0),
        ([(10.0, False)], {}, 60.0),  # the finalist and the baseline, and the winner again, twice as long
        ([(10.0, False), (30.0, False), (999.0, True)], {}, 200.0),  # of two that did not compile 20 s; four, and one
        ([(10.0, False)] * 9, {}, 100.0),  # no more than three finalists
        ([(10.0, False)] * 9, {"finalists": 5, "rounds": 3}, 160.0),
        ([(40.0, True)], {}, 240.0),  # all compiled
        ([(300.0, False)], {}, 500.0),  # at most half of the budget
    ],
)
def test_time_is_kept_for_confirmation(
    trials: Make, probes: list[tuple[float, bool]], limits: dict[str, int], kept_s: float
) -> None:
    for now, is_spent in ((999.0 - kept_s, False), (1000.0 - kept_s, True)):
        made = trials(now, **limits)
        made._whole_probes = list(probes)
        assert made.is_spent() is is_spent is made.is_over()
        assert made.has_ended() is (now >= 1000.0) and not made.is_done()  # the first trial runs in any case
        made.rows = [row(0, 1.0)]
        assert made.is_done() is is_spent


def test_a_stop_ends_everything(trials: Make) -> None:
    made = trials(should_stop=lambda: True)
    assert made.has_ended() and made.is_over() and made.is_done() and not made.is_spent()


def test_the_number_of_trials_counts_those_that_are_open(start: Start) -> None:
    made = start(trials=2, begin=[BASELINE]).study.trials
    first, second = made.ask(), made.ask()
    assert first is not None and second is not None
    assert made.is_over() and made.is_done()
    made.give_back(second.number)
    assert not made.is_over() and made.optimizer.is_waiting()
    made.record(first, made.evaluator.evaluate(first.config, first.number))
    assert len(made.rows) == 1 and not made.is_done()


@pytest.mark.parametrize(("compile_", "compiled"), [("none", False), ("per_layer", True)])
def test_probes_of_whole_models_are_remembered_with_their_seconds(start: Start, compile_: str, compiled: bool) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        return replace(machine(rate=by_tokens)(request), seconds={"total": 7.0})

    session = start(answer, begin=[BASELINE])
    made = session.study.trials
    proposal = made.ask(SPACE.clip(BASELINE))
    assert proposal is not None
    config = replace(proposal.config, compile=compile_)
    evaluation = made.evaluator.evaluate(config, proposal.number)
    made.record(proposal, evaluation)
    assert made._whole_probes == [(7.0, compiled)]
    again = made.ask()
    assert again is not None
    made.record(again, replace(evaluation, reused=True))
    assert made._whole_probes == [(7.0, compiled)]  # nothing was spent on it
    later = start()
    assert later.study.trials._whole_probes == [(7.0, compiled)]


def test_the_best_succeeded_with_a_number(trials: Make) -> None:
    made = trials()
    assert made.best() is None
    made.rows = [row(0, 10.0), row(1, 30.0, Outcome.SLOW), row(2, 20.0), row(3, None)]
    best = made.best()
    assert best is not None and best.number == 2


def test_what_is_unfinished_goes_back_to_the_queue(start: Start) -> None:
    made = start().study.trials
    for error, passes in ((Cancelled(), True), (ValueError("x"), False)):
        wanted = made.ask(SPACE.clip(OTHER))
        assert wanted is not None
        if passes:
            with made.giving_back():
                raise error
        else:
            with pytest.raises(ValueError, match="x"), made.giving_back():
                raise error
        assert made.optimizer.is_waiting() and not made._open
        again = made.ask()
        assert again is not None and again.config == wanted.config
        made.give_back(again.number)
        made.ask()
    assert made.too_short_for == ["the whole search"]
    made.cut("the whole search")
    made.cut("the rest")
    assert made.too_short_for == ["the whole search", "the rest"]


def test_what_nobody_tried_is_nearest_to_the_best(start: Start) -> None:
    session = start(begin=[BASELINE])
    made = session.study.trials
    made.run_one(None)
    near = made.untried()
    assert near is not None
    config = SPACE.config(near)
    assert sum(getattr(config, name) != value for name, value in BASELINE.as_dict().items()) == 1
    made.rows += [row(9, None, Outcome.OOM, config=SPACE.config(each)) for each in SPACE.enumerate()]
    assert made.untried() is None
