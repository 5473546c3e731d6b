"""The study loop with a `ReplayProber`: limits and confirmation."""

import time
from dataclasses import replace

import pytest

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome, Phase, ProbeRequest, ProbeResult, Rung
from autotune.core.train_config import TrainConfig
from autotune.study.summary import TrialRecord
from tests.helpers.factories import result
from tests.helpers.replay import machine, need_gib
from tests.helpers.sessions import BASELINE, Session, Start, by_tokens, space, subject_of, whole

# Limits


def test_trials_are_a_total_over_all_sessions(start: Start) -> None:
    first = start(trials=3)
    first.study.run()
    assert len(first.study.trials.rows) == 3
    second = start(trials=5)
    assert len(second.study.trials.rows) == 3
    second.study.run()
    assert [row.number for row in second.study.trials.rows] == [0, 1, 2, 3, 4]
    assert second.study.trials.rows[:3] == first.study.trials.rows
    third = start(trials=5)
    third.study.run()
    assert len(third.study.trials.rows) == 5 and third.prober.num_probes == 0


def test_refused_and_reused_trials_count_without_a_probe(start: Start) -> None:
    session = start(machine(limit_gib=2.2, rate=by_tokens), trials=12)
    session.study.run()
    rows = session.study.trials.rows
    assert len(rows) == 12
    launched = [row for row in rows if not row.reused and row.outcome is not Outcome.REFUSED]
    assert session.prober.num_probes == len(launched) < 12
    for row in rows:
        fits = need_gib(row.config) <= 2.2
        assert (row.tokens_per_second is not None) is fits
        assert row.outcome in ((Outcome.OK,) if fits else (Outcome.OOM, Outcome.REFUSED))


def test_the_search_ends_after_every_configuration_was_tried(start: Start) -> None:
    tiny = space(
        micro_batch_size=(1, 2), seq_len=(256,), lora_rank=(16,), checkpointing=("none", "full")
    )
    session = start(task=subject_of(tiny))
    session.study.run()
    assert {row.config.digest for row in session.study.trials.rows} == {
        tiny.config(chosen).digest for chosen in tiny.enumerate()
    }
    assert session.prober.num_probes == 4
    assert "every configuration of the space has been tried" in session.said


def test_a_known_proposal_is_replaced_by_a_neighbour_of_the_best(start: Start) -> None:
    session = start(machine(rate=by_tokens), begin=[BASELINE], trials=6)
    session.study.run()
    best = session.study.trials.best()
    assert best is not None
    seen = {row.config.digest for row in session.study.trials.rows}
    untried = session.study.trials.pick_untried()
    assert untried is not None
    asked = session.study.trials.task.space.config(untried)
    assert asked.digest not in seen
    changed = [
        name for name, value in asked.as_dict().items() if value != best.config.as_dict()[name]
    ]
    assert len(changed) == 1


def test_patience_counts_trials_without_a_better_one(start: Start) -> None:
    large = space(
        micro_batch_size=(1, 2, 4, 8, 16, 32), seq_len=tuple(range(64, 320, 8)), lora_rank=(16,)
    )
    session = start(machine(limit_gib=100.0), task=subject_of(large), patience=4)
    session.study.run()
    # Every configuration has the same rate, so that only padding makes one better than the first.
    rows = session.study.trials.rows
    assert len(rows) < 40
    best = max(range(len(rows)), key=lambda index: rows[index].tokens_per_second or 0.0)
    fresh = [row for row in rows[best + 1 :] if not row.reused]
    assert len(fresh) >= 4
    assert all(
        (row.tokens_per_second or 0.0) <= (rows[best].tokens_per_second or 0.0) for row in fresh
    )


def test_with_a_spent_budget_one_trial_is_measured_and_none_confirmed(start: Start) -> None:
    session = start(began=time.monotonic() - 1000, budget_s=100.0)
    session.study.run()
    assert len(session.study.trials.rows) == 1
    session.study.confirm()
    assert Rung.CONFIRM not in [request.rung for request in session.prober.requests]
    recipe = session.summary().recipe
    assert recipe is not None
    assert any("was not measured a second time" in caveat for caveat in recipe.caveats)
    assert session.study.trials.too_short_for == [
        "the whole search",
        "measuring the finalists again",
    ]


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.CONFIRM])
def test_what_the_budget_was_too_short_for_is_kept(start: Start, rung: Rung) -> None:
    """The prober raises Cancelled when the budget ends during a probe."""
    answers = machine(rate=by_tokens)

    def answer(request: ProbeRequest) -> ProbeResult:
        if request.rung is rung and request.config != BASELINE:
            raise Cancelled
        return answers(request)

    missed = "the whole search" if rung is Rung.FULL else "measuring the finalists again"
    assert whole(start, answer, trials=6).summary().notes == (
        f"the budget was too short for {missed}",
    )


def test_a_budget_that_sufficed_was_not_too_short(start: Start) -> None:
    assert whole(start, trials=6).summary().notes == ()


@pytest.mark.parametrize(("probe_s", "trials"), [(4000.0, 1), (1.0, 4)])
def test_the_budget_reserves_time_for_confirmation(
    start: Start, probe_s: float, trials: int
) -> None:
    """4,000 s of 10,000 s are left: enough for trials of a second, but for only one of 4,000 s."""
    answers = machine(rate=by_tokens)

    def slow(request: ProbeRequest) -> ProbeResult:
        return replace(answers(request), seconds={"total": probe_s})

    session = start(slow, began=time.monotonic() - 6000, budget_s=10_000.0, trials=4)
    session.study.run()
    assert len(session.study.trials.rows) == trials


def test_a_stop_before_the_start_prevents_all_probes(start: Start) -> None:
    session = start(should_stop=lambda: True)
    session.study.run()
    session.study.confirm()
    assert session.prober.num_probes == 0 and session.study.trials.rows == []


def test_every_trial_is_stored_and_then_reported_once(start: Start) -> None:
    heard: list[tuple[int, int]] = []
    session: Session

    def on_trial(row: TrialRecord) -> None:
        heard.append((row.number, len(session.store.probes_of_study("one"))))

    session = start(on_trial=on_trial, trials=3)
    session.study.run()
    assert heard == [(0, 1), (1, 2), (2, 3)]


# Confirmation


def confirmations(session: Session) -> list[TrainConfig]:
    return [request.config for request in session.prober.requests if request.rung is Rung.CONFIRM]


def test_confirming_measures_all_finalists_and_the_baseline_once_and_the_winner_again(
    start: Start,
) -> None:
    session = whole(
        start, machine(rate=lambda config: by_tokens(config) ** 2), trials=16, finalists=3, rounds=2
    )
    *first, last = confirmations(session)
    assert len(set(first)) == len(first) == 4
    assert first[1] == BASELINE
    ranked = sorted(
        session.study.trials.rows, key=lambda row: row.tokens_per_second or 0.0, reverse=True
    )
    assert ranked[0].config in first
    assert last == first[0] == session.winner()
    evaluated = [
        one.config for one in session.prober.requests if one.rung is Rung.CONFIRM and one.evaluate
    ]
    assert evaluated == [first[0]]


def test_a_disturbed_measurement_of_the_baseline_is_outvoted(start: Start) -> None:
    """Its first confirmation is 20 % slow and two others agree, so its speed is the true one.

    The interval of the speed-up covers the slow one, too.
    """
    answers, slower = machine(rate=by_tokens), machine(rate=lambda config: by_tokens(config) / 1.2)
    confirmed: list[TrainConfig] = []

    def answer(request: ProbeRequest) -> ProbeResult:
        confirmed.extend([request.config] if request.rung is Rung.CONFIRM else [])
        first = (
            request.rung is Rung.CONFIRM
            and request.config == BASELINE
            and confirmed.count(BASELINE) == 1
        )
        return (slower if first else answers)(request)

    session = whole(start, answer, trials=16, finalists=3, rounds=2)
    assert confirmations(session).count(BASELINE) == 3
    recipe = session.summary().recipe
    assert recipe is not None and any(BASELINE.label() in caveat for caveat in recipe.caveats)
    assert recipe.disagreement == f"measurements of {BASELINE.label()} differ by 20%"
    assert recipe.baseline is not None
    speed = recipe.baseline.performance.tokens_per_second
    assert speed == pytest.approx(by_tokens(BASELINE), rel=0.01)
    ratio = by_tokens(recipe.config) / by_tokens(BASELINE)
    assert recipe.speedup == pytest.approx(ratio, rel=0.01)
    low, high = recipe.speedup_interval or (1.0, 1.0)
    assert low == pytest.approx(ratio, rel=0.03) and high == pytest.approx(1.2 * ratio, rel=0.03)


@pytest.mark.parametrize("outcome", [Outcome.OOM, Outcome.CRASH])
def test_a_finalist_that_fails_its_confirmation_is_dropped(start: Start, outcome: Outcome) -> None:
    answers = machine(rate=by_tokens)
    best = TrainConfig(micro_batch_size=8, seq_len=256, lora_rank=16, checkpointing="none")

    def fails_in_evaluation(request: ProbeRequest) -> ProbeResult:
        if request.rung is Rung.CONFIRM and request.config == best:
            return result(best, outcome, phase=Phase.EVALUATE, reason="it failed in evaluate")
        return answers(request)

    session = whole(start, fails_in_evaluation, patience=100)
    asked = confirmations(session)
    assert asked.count(best) == 1  # not tried again in the second round
    assert asked[:3] == [best, session.winner(), BASELINE]
    fastest = max(session.study.trials.rows, key=lambda row: row.tokens_per_second or 0.0)
    assert fastest.config == best
    winner = session.winner()
    assert winner != best and asked.count(winner) == 2
    recipe = session.summary().recipe
    assert recipe is not None
    assert any(
        best.label() in caveat and "it failed in evaluate" in caveat for caveat in recipe.caveats
    )
    assert best not in [cell.config for cell in recipe.cells]

    again = start(patience=100)  # a later session has the same result
    again_recipe = again.summary().recipe
    assert again_recipe is not None and again_recipe.winner.config == winner


def test_confirmed_measurements_replace_those_of_the_search(start: Start) -> None:
    """The best of the search is slower than the second when both are measured again."""
    answers = machine(rate=by_tokens)
    favourite = TrainConfig(micro_batch_size=8, seq_len=256, lora_rank=16, checkpointing="none")
    slower = machine(rate=lambda config: by_tokens(config) / 2)

    def answer(request: ProbeRequest) -> ProbeResult:
        return (
            slower if request.rung is Rung.CONFIRM and request.config == favourite else answers
        )(request)

    session = whole(start, answer, patience=100)
    assert favourite in confirmations(session)
    assert session.winner() != favourite
