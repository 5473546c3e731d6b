"""The finalists measured again: who, in which order, how often, with what between steps, and when
it ends.

The search is left out: its results are given as tokens/s, and so is what each confirmation will
find.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Evidence, Outcome, ProbeRequest, ProbeResult, Rung
from autotune.core.train_config import TrainConfig
from autotune.study.confirmation import measure_close_calls
from autotune.study.evaluator import Evaluator
from tests.helpers.factories import measurement, result
from tests.helpers.sessions import BASELINE, Session, Start, space, subject_of

CHOICES = space(
    micro_batch_size=(1, 2, 4, 8),
    seq_len=(256,),
    lora_rank=(16, 32),
    checkpointing=("none", "full"),
    optimizer=("adamw_torch_fused", "adamw_8bit"),
)
A = replace(BASELINE, checkpointing="none")
C, D, E = (replace(A, micro_batch_size=size) for size in (4, 2, 1))
B = BASELINE
COARSE = replace(A, optimizer="adamw_8bit")
NAMES = {A: "A", B: "B", C: "C", D: "D", E: "E", COARSE: "A"}
Found = float | Outcome | type[Cancelled]


def measured(config: TrainConfig, rate: float, **changes: Any) -> Any:
    """Steady steps at so many tokens/s, in half of the memory."""
    micro_s = config.tokens / rate
    return measurement(
        micro_s, 66.0, step_s=(2 * micro_s,) * 3, micro_step_s=(micro_s,), rest_s=(), **changes
    )


def searched(
    start: Start,
    search: dict[TrainConfig, float],
    again: dict[TrainConfig, tuple[Found, ...]] | None = None,
    *,
    took_s: float = 0.0,
    **options: Any,
) -> tuple[Session, list[float]]:
    """A session that searched.

    What a confirmation finds is the next in `again`, else what the search found.
    """
    now, count = [0.0], Counter[TrainConfig]()

    def answer(request: ProbeRequest) -> ProbeResult:
        config = request.config
        found: Found = search.get(config, 500.0)
        if request.rung is Rung.CONFIRM:
            found = dict(enumerate((again or {}).get(config, ()))).get(count[config], found)
            count[config] += 1
        now[0] += took_s
        if found is Cancelled:
            raise Cancelled
        if isinstance(found, Outcome):
            return result(config, found, reason="as told")
        return result(config, measurement=measured(config, found))  # type: ignore[arg-type]

    session = start(answer, **({"task": subject_of(CHOICES), "began": 0.0} | options))
    session.study.trials.clock = lambda: now[0]
    for config, rate in search.items():
        session.study.trials.selection.add_result(
            result(config, measurement=measured(config, rate), seconds={})
        )
    return session, now


def confirmed(session: Session) -> list[str]:
    """What was measured again, in order: 'A1' is A in the round named 1, 'A1+' with an evaluation
    and a save.
    """
    session.study.confirm()
    asked = zip(session.prober.requests, session.prober.logs, strict=True)
    rounds = [
        (one, log.rpartition("-")[2].removesuffix(".log"))
        for one, log in asked
        if one.rung is Rung.CONFIRM
    ]
    return [f"{NAMES[one.config]}{round_}{'+' * one.evaluate}" for one, round_ in rounds]


@pytest.mark.parametrize(
    ("search", "rounds", "order"),
    [
        # the baseline comes second
        ({A: 1000.0, C: 900.0, D: 800.0, E: 750.0, B: 700.0}, 2, "A1+ B1 C1 D1 A2"),
        ({A: 1000.0, C: 900.0, B: 800.0, D: 700.0}, 2, "A1+ B1 C1 A2"),
        ({B: 1000.0, A: 900.0, C: 800.0}, 2, "B1+ A1 C1 B2"),
        ({A: 1000.0, C: 995.0, B: 700.0}, 2, "A1+ B1 C1 A2 C2+"),  # a rival that may still win
        ({A: 1000.0, C: 995.0, B: 700.0}, 3, "A1+ B1 C1 A2 C2 A3 C3+"),
        ({A: 1000.0, C: 900.0, B: 700.0}, 1, "A1+ B1+ C1+"),
        ({A: 1000.0, C: 900.0, D: 800.0}, 1, "A1+ C1+ D1+"),  # without a baseline
    ],
)
def test_finalists_and_baseline_once_then_whoever_may_win(
    start: Start, search: dict[TrainConfig, float], rounds: int, order: str
) -> None:
    session, _ = searched(start, search, rounds=rounds)
    assert " ".join(confirmed(session)) == order
    assert [line for line in session.said if "round 1" in line] == [
        f"confirming, round 1 of {rounds}: {request.config.label()}"
        for request in session.prober.requests[: order.count("1")]
    ]
    assert session.study.trials.too_short_for == []


@pytest.mark.parametrize(
    ("search", "again", "rounds", "order"),
    [
        # The next best becomes the likely winner, so it is measured before the baseline.
        ({A: 1000.0, C: 900.0, B: 850.0, D: 800.0}, {A: (Outcome.OOM,)}, 1, "A1+ C1+ B1+ D1+"),
        (
            {A: 1000.0, C: 900.0, D: 800.0, E: 750.0, B: 700.0},
            {A: (Outcome.CRASH,)},
            1,
            "A1+ C1+ B1+ D1+",
        ),
        ({A: 1000.0, C: 900.0, B: 700.0}, {A: (Outcome.CRASH,)}, 2, "A1+ C1+ B1 C2"),
        # In the second round: who joins then is measured once more, as it leads.
        (
            {A: 1000.0, B: 700.0, C: 900.0},
            {A: (1000.0, Outcome.OOM), C: (Outcome.OOM,)},
            2,
            "A1+ B1 C1 A2 B3+",
        ),
        (
            {A: 1000.0, C: 950.0, B: 700.0, D: 900.0},
            {A: (1000.0, Outcome.OOM)},
            2,
            "A1+ B1 C1 A2 D2+ C3+",
        ),
        (
            {A: 1000.0, C: 900.0, D: 700.0},
            {A: (Outcome.OOM,), C: (Outcome.OOM,), D: (Outcome.OOM,)},
            2,
            "A1+ C1+ D1",
        ),
    ],
)
def test_a_finalist_that_fails_is_replaced_by_the_next_best(
    start: Start,
    search: dict[TrainConfig, float],
    again: dict[TrainConfig, tuple[Found, ...]],
    rounds: int,
    order: str,
) -> None:
    session, _ = searched(start, search, again, rounds=rounds, finalists=2)
    assert " ".join(confirmed(session)) == order


def test_a_baseline_that_does_not_fit_after_all_is_replaced_by_a_smaller_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = searched(start, {A: 1000.0, B: 700.0}, {B: (Outcome.OOM,)}, rounds=1, finalists=1)
    spare: list[float] = []
    evaluate = Evaluator.evaluate

    def evaluated(self: Evaluator, config: TrainConfig, trial: int | None, **options: float) -> Any:
        spare.append(options.get("spare_s", math.inf))
        return evaluate(self, config, trial, **options)

    monkeypatch.setattr(Evaluator, "evaluate", evaluated)
    session.study.confirm()
    smaller = replace(B, micro_batch_size=4)
    assert [one.config for one in session.prober.requests if one.rung is Rung.CONFIRM] == [
        A,
        B,
        smaller,
    ]
    assert spare == [0.0]  # by a few layers if that is possible: the confirmation measures it whole
    assert session.study.trials.selection.baseline() == smaller


@pytest.mark.parametrize(
    ("again", "order"),
    [
        ({A: (1000.0, 955.0)}, "A1+ B1 C1 A2"),  # 4.7 % apart
        ({A: (1000.0, 945.0)}, "A1+ B1 C1 A2 A3"),  # 5.8 %
        ({A: (1000.0, 945.0, 1000.0, 500.0)}, "A1+ B1 C1 A2 A3"),  # three at most
        # against the search, until two agree
        ({B: (600.0, 600.0), C: (700.0, 700.0)}, "A1+ B1 C1 A2 B3 C4"),
        ({B: (600.0, 500.0, 400.0), A: (1000.0, 945.0)}, "A1+ B1 C1 A2 A3 B4 B5"),
        # then C leads
        ({A: (1000.0, 945.0, Outcome.OOM), B: (600.0, 600.0)}, "A1+ B1 C1 A2 A3 B4 C5+"),
    ],
)
def test_measurements_that_disagree_are_taken_once_more(
    start: Start, again: dict[TrainConfig, tuple[Found, ...]], order: str
) -> None:
    session, _ = searched(start, {A: 1000.0, C: 800.0, B: 700.0}, again, rounds=2)
    assert " ".join(confirmed(session)) == order
    num_settling = len([one for one in order.split() if one[1] > "2" and not one.endswith("+")])
    assert (
        sum("once more, since measurements disagree" in line for line in session.said)
        == num_settling
    )


@pytest.mark.parametrize(
    ("again", "rounds", "order"),
    [
        ({A: (1000.0, 700.0, 700.0)}, 2, "A1+ B1 C1 A2 A3 C4+"),
        # then A leads again
        ({A: (1000.0, 700.0, 700.0), C: (900.0, Outcome.CRASH)}, 2, "A1+ B1 C1 A2 A3 C4+"),
        # a single round is one measurement of the leader
        ({A: (800.0, 800.0)}, 1, "A1+ C1+ B1+ A2"),
        # Two measurements of the leader are enough, however many rounds there are.
        ({A: (1000.0, Outcome.OOM)}, 3, "A1+ B1 C1 A2 C3+"),
    ],
)
def test_whoever_leads_in_the_end_is_measured_twice_and_has_saved(
    start: Start, again: dict[TrainConfig, tuple[Found, ...]], rounds: int, order: str
) -> None:
    session, _ = searched(start, {A: 1000.0, C: 900.0, B: 600.0}, again, rounds=rounds)
    assert " ".join(confirmed(session)) == order
    leads = [
        line for line in session.said if line.startswith("confirming, once more, since it leads")
    ]
    assert leads == [f"confirming, once more, since it leads: {C.label()}"] * ("C4" in order)


@pytest.mark.parametrize(
    ("budget_s", "order"),
    [
        (30.0, "A1+ B1 C1"),
        (40.0, "A1+ B1 C1 A2"),
        (50.0, "A1+ B1 C1 A2 A3"),
        (60.0, "A1+ B1 C1 A2 A3 C4+"),
    ],
)
def test_the_budget_ends_it_at_any_point(start: Start, budget_s: float, order: str) -> None:
    """Each takes 10 s.

    In the second round A is slower, A once more is to settle it, and then C leads.
    """
    again: dict[TrainConfig, tuple[Found, ...]] = {A: (1000.0, 700.0, 700.0)}
    search = {A: 1000.0, C: 900.0, B: 600.0}
    session, _ = searched(start, search, again, took_s=10.0, budget_s=budget_s, rounds=2)
    assert " ".join(confirmed(session)) == order
    assert session.study.trials.too_short_for == ["measuring the finalists again"] * (
        budget_s < 60.0
    )


def test_a_baseline_that_was_not_measured_again_wins_over_what_turns_out_slower(
    start: Start,
) -> None:
    """It had 700 tokens/s in the search.

    The budget is over when A, which had 1,000 there, is confirmed with 600.
    """
    session, _ = searched(
        start, {A: 1000.0, B: 700.0}, {A: (600.0, 600.0)}, took_s=10.0, budget_s=10.0, rounds=1
    )
    assert confirmed(session) == ["A1+"] and session.winner() == B
    assert session.study.trials.too_short_for == ["measuring the finalists again"]


@pytest.mark.parametrize(
    ("again", "order"),
    [
        (850.0, ["A", "D", "B"]),  # D, which had 950 in the search, is ahead now, and B has to wait
        (940.0, ["A", "B", "D"]),  # D equals it
    ],
)
def test_who_is_ahead_of_the_likely_winner_once_that_is_confirmed_comes_before_the_baseline(
    start: Start, again: float, order: list[str]
) -> None:
    search = {A: 1000.0, D: 950.0, C: 500.0, B: 400.0}
    session, _ = searched(start, search, {A: (again,)}, took_s=10.0, budget_s=30.0, rounds=1)
    assert confirmed(session) == [f"{name}1+" for name in order]
    assert session.winner() == D


def test_the_baseline_waits_for_as_many_as_there_are_finalists(start: Start) -> None:
    """Each turns out slower than the next was in the search, as if the card had become slower
    meanwhile.
    """
    search = {A: 1000.0, C: 960.0, D: 955.0, E: 950.0, B: 400.0}
    again: dict[TrainConfig, tuple[Found, ...]] = {A: (900.0,), C: (890.0,), D: (880.0,)}
    session, _ = searched(start, search, again, rounds=1, finalists=3)
    assert confirmed(session)[:4] == ["A1+", "C1+", "D1+", "B1+"]


def test_who_was_ahead_and_could_not_be_confirmed_wins_by_its_measurement_of_the_search(
    start: Start,
) -> None:
    session, _ = searched(
        start, {A: 1000.0, D: 950.0, B: 400.0}, {A: (850.0,)}, took_s=10.0, budget_s=10.0
    )
    assert confirmed(session) == ["A1+"] and session.winner() == D


@pytest.mark.parametrize(("batch", "steps"), [(32, 4), (16, 2), (8, 1)])
def test_a_step_has_up_to_four_micro_batches(start: Start, batch: int, steps: int) -> None:
    """As many as in the run: four of A's eight rows come to 32, four of D's two rows to 8."""
    task = subject_of(CHOICES)
    task = replace(task, workload=replace(task.workload, global_batch=batch))
    session, _ = searched(start, {A: 1000.0, D: 900.0}, task=task, rounds=1)
    session.study.confirm()
    assert [(one.config, one.micro_steps) for one in session.prober.requests] == [
        (A, steps),
        (D, 4),
    ]


def test_a_probe_that_is_cancelled_ends_it(start: Start) -> None:
    session, _ = searched(start, {A: 1000.0, C: 900.0, B: 600.0}, {B: (Cancelled,)})
    assert confirmed(session) == ["A1+", "B1"] and session.winner() == A
    assert session.study.trials.too_short_for == ["measuring the finalists again"]


@pytest.mark.parametrize(("second", "begins"), [(10.0, True), (11.0, False)])
def test_what_would_not_end_is_not_begun(
    start: Start, monkeypatch: pytest.MonkeyPatch, second: float, begins: bool
) -> None:
    """90 s of a budget of 100 s: the search had the time instead."""
    monkeypatch.setattr(Evaluator, "confirmation_s", lambda *_: 90.0)
    session, now = searched(start, {A: 1000.0}, budget_s=100.0)
    now[0] = second
    session.study.confirm()
    assert bool(session.prober.requests) is begins
    assert session.study.trials.too_short_for == ["measuring the finalists again"]


@pytest.mark.parametrize(("loss", "order"), [(3.09, "B1 C1 C2+"), (3.0, "A1+ B1 A2")])
def test_a_finalist_with_other_losses_than_its_reference_is_not_confirmed(
    start: Start, loss: float, order: str
) -> None:
    """A with 8-bit state: 3 % more loss than with 32 bits is too much."""
    task = subject_of(CHOICES)
    task = replace(task, model=replace(task.model, weights="/weights"))
    session, _ = searched(
        start, {COARSE: 1000.0, B: 700.0, C: 900.0}, task=task, rounds=2, finalists=1
    )
    found = measured(COARSE, 1000.0, losses=(loss,))
    session.study.trials.selection.add_result(result(COARSE, measurement=found, seconds={}))
    answers = session.prober._answers
    assert callable(answers)

    def answer(request: ProbeRequest) -> ProbeResult:
        made = answers(request)
        return replace(made, measurement=replace(made.measurement, losses=(3.0,)))  # type: ignore[type-var]

    session.prober._answers = answer
    assert " ".join(confirmed(session)) == order
    reference = next(one for one in session.prober.requests if one.rung is Rung.REFERENCE)
    assert reference.min_timed_s == 0.0 and reference.config == replace(A, checkpointing="full")


def test_losses_are_compared_before_the_first_confirmation_and_as_long_as_there_is_time(
    start: Start,
) -> None:
    task = subject_of(CHOICES)
    task = replace(task, model=replace(task.model, weights="/weights"))
    for budget_s, rungs in ((100.0, ["reference", "confirm", "confirm"]), (0.0, [])):
        session, _ = searched(
            start, {COARSE: 1000.0}, task=task, budget_s=budget_s, finalists=1, rounds=2
        )
        session.study.confirm()
        assert [request.rung.value for request in session.prober.requests] == rungs
        assert [line.partition(" of ")[0] for line in session.said if "losses" in line] == [
            "comparing the losses"
        ] * bool(rungs)


# --- what was only extrapolated, and comes close


def with_close_calls(
    start: Start, **options: Any
) -> tuple[Session, Callable[[], list[TrainConfig]], list[float]]:
    """A was measured at 1,000 tokens/s.

    Predicted to within 3 %: C at 990, D at 960, and a higher rank at 955.
    """
    session, now = searched(start, {A: 1000.0}, **options)
    for config, rate in ((C, 990.0), (D, 960.0), (HIGHER, 955.0)):
        found = measured(config, rate, time_error=0.03)
        session.study.trials.selection.add_result(
            result(config, Outcome.SLOW, measurement=found, evidence=Evidence.EXTRAPOLATED)
        )

    def probed() -> list[TrainConfig]:
        measure_close_calls(session.study.trials)
        return session.prober.configs

    return session, probed, now


HIGHER = replace(A, micro_batch_size=1, lora_rank=32)


def test_what_may_win_by_its_prediction_is_measured_the_most_capable_first(start: Start) -> None:
    session, probed, _ = with_close_calls(start)
    assert probed() == [HIGHER, C]  # 960 and 3 % more are less than 1,000
    assert session.study.trials.selection.record(C).measured is not None
    assert session.said == [
        f"measuring the whole model, close to the best: {one.label()}" for one in (HIGHER, C)
    ]


@pytest.mark.parametrize(("second", "num_probes"), [(60.0, 2), (66.0, 1), (67.0, 0)])
def test_close_calls_leave_the_time_of_confirmation(
    start: Start, monkeypatch: pytest.MonkeyPatch, second: float, num_probes: int
) -> None:
    """A third of a budget of 100 s is kept for the first confirmation, as it takes so long; each of
    these takes 4 s.
    """
    monkeypatch.setattr(Evaluator, "confirmation_s", lambda *_: 30.0)
    _, probed, now = with_close_calls(start, budget_s=100.0)
    now[0] = second
    assert len(probed()) == num_probes


@pytest.mark.parametrize(
    ("left_s", "baseline_s", "order", "short_for"),
    [
        (100.0, 10.0, "A1+ B1 C1 A2", []),
        # more than a fifth of 400 s
        (100.0, 90.0, "A1+ C1 A2", ["measuring the baseline with all layers"]),
        # each takes 10 s, and may take 12
        (13.5, 10.0, "A1+ B1", ["measuring the finalists again"]),
        (
            5.0,
            10.0,
            "",
            ["measuring the finalists again", "measuring the baseline with all layers"],
        ),
    ],
)
def test_what_does_not_fit_into_the_time_left_is_not_begun(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    left_s: float,
    baseline_s: float,
    order: str,
    short_for: list[str],
) -> None:
    monkeypatch.setattr(
        Evaluator, "confirmation_s", lambda self, config, _: baseline_s if config == B else 10.0
    )
    session, now = searched(
        start, {A: 1000.0, C: 900.0, B: 700.0}, budget_s=400.0, took_s=1.0, finalists=2
    )
    now[0] = 400.0 - left_s
    assert " ".join(confirmed(session)) == order
    assert session.study.trials.too_short_for == short_for


def test_a_close_call_that_fails_is_tried_once(start: Start) -> None:
    """An out-of-memory leaves what was predicted, and the next one has its turn."""
    session, probed, _ = with_close_calls(start)
    answers = session.prober._answers
    assert callable(answers)
    session.prober._answers = lambda request: (
        result(request.config, Outcome.CRASH) if request.config == HIGHER else answers(request)
    )
    assert probed() == [HIGHER, C]


def test_a_close_call_that_is_cancelled_is_the_last(start: Start) -> None:
    session, probed, _ = with_close_calls(start)

    def cancel(request: ProbeRequest) -> ProbeResult:
        raise Cancelled

    session.prober._answers = cancel
    assert probed() == [HIGHER]
