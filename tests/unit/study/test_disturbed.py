"""A probe that other work disturbed: measured again, labelled, never reused, and no speed-up."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from autotune.cli import last_screen
from autotune.core.errors import Cancelled, EnvironmentProblem
from autotune.core.probe_types import (
    Evidence,
    Measurement,
    Outcome,
    ProbeRequest,
    ProbeResult,
    Rung,
)
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_count
from autotune.prediction.depth_extrapolation import DepthPredictor
from autotune.problem.disturbance import ASSUME_QUIET
from autotune.report import describe
from autotune.report.html import render
from autotune.study.ablation import ablate
from autotune.study.confirmation import MAX_CONFIRMATIONS
from autotune.study.history import restore
from autotune.study.selection import Selection
from autotune.study.summary import Recipe
from tests.helpers.factories import FINGERPRINT, measurement, result
from tests.helpers.layered import SHAPE, layered
from tests.helpers.replay import machine
from tests.helpers.sessions import BASELINE, Session, Start, by_tokens, subject_of, whole

REASON = "other processes used 60% of the GPU's time"
BEST = replace(BASELINE, micro_batch_size=8, checkpointing="none", lora_rank=16)
Answer = Callable[[ProbeRequest], ProbeResult]


@pytest.fixture(autouse=True)
def _judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASSUME_QUIET, raising=False)


def disturbed_if(
    is_disturbed: Callable[[ProbeRequest, int], bool],
    slower: float = 1.5,
    answers: Answer | None = None,
) -> Answer:
    """Answers of the usual machine. Some are slow, because others use its GPU.

    `is_disturbed` gets the request, and how often the same was requested before.
    """
    count = Counter[tuple[TrainConfig, Rung, int | None]]()
    usual = answers or machine(rate=by_tokens)

    def answer(request: ProbeRequest) -> ProbeResult:
        key = (request.config, request.rung, request.depth)
        count[key] += 1
        probed = usual(request)
        if probed.measurement is None or not is_disturbed(request, count[key] - 1):
            return probed
        slow = replace(
            probed.measurement,
            step_s=tuple(slower * step for step in probed.measurement.step_s),
            micro_step_s=tuple(slower * micro for micro in probed.measurement.micro_step_s),
            other_gpu=0.6,
        )
        return replace(probed, measurement=slow)

    return answer


def confirmed(session: Session, config: TrainConfig) -> int:
    requests = session.prober.requests
    return sum(one.rung is Rung.CONFIRM and one.config == config for one in requests)


def test_a_disturbed_probe_is_repeated_once_and_the_steady_one_counts(start: Start) -> None:
    session = start(disturbed_if(lambda request, earlier: earlier == 0))
    found = session.evaluator.evaluate(BASELINE, 0)
    assert session.prober.num_probes == 2
    assert (found.result.evidence, found.result.disturbed) == (Evidence.MEASURED, None)
    assert found.result.notes == (f"measured twice, because the first time {REASON}",)
    assert found.seconds == found.result.seconds["total"] == 2 * 3.0
    (stored,) = session.store.probes_of_study("one")
    assert stored.result.measurement == found.result.measurement


def test_a_probe_that_is_disturbed_twice_is_labelled_and_answers_no_later_request(
    start: Start,
) -> None:
    session = start(disturbed_if(lambda request, earlier: earlier < 2))
    first = session.evaluator.evaluate(BASELINE, 0)
    assert (first.result.evidence, first.result.disturbed) == (Evidence.DISTURBED, REASON)
    (stored,) = session.store.probes_of_study("one")
    assert (stored.result.evidence, stored.result.disturbed) == (Evidence.DISTURBED, REASON)

    second = session.evaluator.evaluate(BASELINE, 1)
    assert not second.reused and second.result.evidence is Evidence.MEASURED
    third = session.evaluator.evaluate(BASELINE, 2)
    assert third.reused and third.result.measurement == second.result.measurement


def test_a_trial_reuses_the_disturbed_probes_that_ran_before_the_search(start: Start) -> None:
    session = start(disturbed_if(lambda request, earlier: True))
    before = session.evaluator.evaluate(BASELINE, None, spare_s=0.0).result
    probes = session.prober.num_probes
    trial = session.evaluator.evaluate(BASELINE, 0)
    assert session.prober.num_probes == probes == 2
    assert trial.reused and trial.is_own and trial.result.measurement == before.measurement
    assert trial.result.evidence is Evidence.DISTURBED
    session.evaluator.evaluate(BASELINE, None)
    assert session.prober.num_probes == 2 * probes


def test_a_machine_that_is_never_quiet_has_time_for_more_candidates(start: Start) -> None:
    """Second probes were in vain, so trials get one. Confirmations and quiet probes reset this."""
    is_busy = True
    answers = machine(rate=by_tokens, limit_gib=3.1)
    session = start(disturbed_if(lambda request, earlier: is_busy, answers=answers))
    evaluator = session.evaluator
    too_large = replace(BEST, micro_batch_size=16)

    def probes(config: TrainConfig, trial: int | None) -> int:
        before = session.prober.num_probes
        evaluator.evaluate(config, trial)
        return session.prober.num_probes - before

    sizes = [replace(BASELINE, micro_batch_size=size) for size in (1, 2, 4, 8)]
    assert [probes(config, trial) for trial, config in enumerate(sizes)] == [2, 2, 1, 1]
    assert [probes(too_large, 4), probes(replace(sizes[0], lora_rank=32), 5)] == [1, 1]
    before = session.prober.num_probes
    assert evaluator.confirm(sizes[0], 2, 1).disturbed == REASON
    assert session.prober.num_probes == before + 2

    is_busy = False
    assert probes(BEST, 6) == 1
    is_busy = True
    assert probes(replace(BEST, lora_rank=32), 7) == 2


def test_the_search_repeats_no_probe_that_takes_much_of_its_budget(start: Start) -> None:
    """A probe takes 3 s. Confirmations are repeated."""
    session = start(disturbed_if(lambda request, earlier: True))
    evaluator = replace(session.evaluator, repeat_s=2.9)
    assert evaluator.evaluate(BASELINE, None, spare_s=0.0).result.disturbed == REASON
    assert evaluator.evaluate(BASELINE, 0).reused and session.prober.num_probes == 1
    assert evaluator.confirm(BASELINE, 2, 1).disturbed == REASON
    assert session.prober.num_probes == 3
    replace(evaluator, repeat_s=3.0).evaluate(BEST, 1)
    assert session.prober.num_probes == 5


@pytest.mark.parametrize("error", [Cancelled, EnvironmentProblem])
def test_a_stop_before_the_repetition_keeps_the_first_result(
    start: Start, error: type[Exception]
) -> None:
    answers = disturbed_if(lambda request, earlier: True)
    probes = [0]

    def answer(request: ProbeRequest) -> ProbeResult:
        probes[0] += 1
        if probes[0] == 2:
            raise error(*(["gone"] if error is EnvironmentProblem else []))
        return answers(request)

    session = start(answer)
    assert session.evaluator.confirm(BASELINE, 2, 1).disturbed == REASON
    assert len(session.store.probes_of_study("one")) == 1


def test_a_kill_in_the_repetition_keeps_the_first_result(start: Start) -> None:
    class Killed(BaseException):
        """Ends the session without a further step."""

    answers = disturbed_if(lambda request, earlier: True)
    probes = [0]

    def answer(request: ProbeRequest) -> ProbeResult:
        probes[0] += 1
        if probes[0] == 2:
            raise Killed
        return answers(request)

    with pytest.raises(Killed):
        start(answer).evaluator.evaluate(BASELINE, 0)
    (stored,) = start().store.probes_of_study("one")
    assert (stored.trial, stored.result.disturbed) == (0, REASON)


def test_memory_and_failures_of_a_disturbed_probe_hold(start: Start) -> None:
    session = start(disturbed_if(lambda request, earlier: True, answers=machine(limit_gib=1.1)))
    found = session.evaluator.evaluate(BEST, 0).result
    assert (found.outcome, found.disturbed) == (Outcome.OOM, None)
    assert session.prober.num_probes == 1

    selection = Selection(subject_of())
    large = measurement(peak_reserved_gib=30.0)
    steady = measurement(peak_reserved_gib=20.0)
    selection.add_result(result(BASELINE, measurement=steady, evidence=Evidence.EXTRAPOLATED))
    selection.add_confirmation(
        result(BASELINE, measurement=large, rung=Rung.CONFIRM, disturbed=REASON)
    )
    found_candidate = selection.candidate(BASELINE)
    assert found_candidate.measurement.peak_reserved_gib == 30.0
    assert found_candidate.memory_evidence is Evidence.MEASURED
    assert found_candidate.evidence is Evidence.EXTRAPOLATED


def test_a_disturbed_baseline_allows_no_speed_up(start: Start) -> None:
    """Its speed is too low by a third, which would make a headline of 1.5 times the truth."""
    session = whole(start, disturbed_if(lambda request, _: request.config == BASELINE))
    recipe = session.summary().recipe
    assert recipe is not None and recipe.baseline is not None
    assert recipe.baseline.evidence is recipe.speedup_evidence is Evidence.DISTURBED
    assert recipe.baseline.memory_evidence is Evidence.MEASURED
    assert (recipe.speedup, recipe.speedup_interval, recipe.differs) == (None, None, False)
    why = f"every measurement of {BASELINE.label()} was disturbed"
    assert describe.speed_up(recipe) == f"the machine is too unsteady for a speed-up: {why}"
    assert f"{why}: {REASON}" in recipe.caveats
    assert recipe.winner.config == BEST and recipe.winner.evidence is Evidence.MEASURED


def test_the_stored_study_says_the_same(start: Start) -> None:
    session = whole(start, disturbed_if(lambda request, earlier: earlier % 3 < 2))
    trials = session.study.trials
    _, selection = restore(
        trials.task, session.search.finished(), session.store.probes_of_study(trials.task.study)
    )
    fingerprint = session.prober.fingerprint
    assert selection.recipe(fingerprint) == trials.selection.recipe(fingerprint)


def test_a_machine_that_is_never_quiet_ends_the_study(start: Start) -> None:
    session = whole(start, disturbed_if(lambda request, earlier: True))
    recipe = session.summary().recipe
    assert recipe is not None and recipe.speedup is None
    assert recipe.winner.evidence is Evidence.DISTURBED
    assert all(row.evidence is Evidence.DISTURBED for row in session.study.trials.rows)
    assert not any("cut short" in caveat for caveat in recipe.caveats)
    assert max(confirmed(session, row.config) for row in session.study.trials.rows) <= 2 * 3


def test_a_leader_whose_confirmations_are_all_disturbed_is_not_confirmed_for_ever(
    start: Start,
) -> None:
    """The search measured it undisturbed, and it is the fastest."""

    def of_leader(request: ProbeRequest, earlier: int) -> bool:
        return request.rung is Rung.CONFIRM and request.config == BEST

    session = whole(start, disturbed_if(of_leader, slower=1.0), rounds=2)
    assert session.winner() == BEST
    assert confirmed(session, BEST) == 2 * MAX_CONFIRMATIONS


def test_a_finalist_whose_confirmation_was_disturbed_is_confirmed_in_the_next_round(
    start: Start,
) -> None:
    def first_confirmation(request: ProbeRequest, earlier: int) -> bool:
        return request.rung is Rung.CONFIRM and earlier < 2

    session = whole(start, disturbed_if(first_confirmation), rounds=2)
    recipe = session.summary().recipe
    assert recipe is not None and recipe.baseline is not None
    assert recipe.unsteady is recipe.disagreement is None
    for config in (BEST, BASELINE):
        assert session.study.trials.selection.record(config).confirmed
    assert recipe.winner.evidence is recipe.baseline.evidence is Evidence.MEASURED
    assert recipe.winner.config == BEST
    assert recipe.speedup == pytest.approx(by_tokens(BEST) / by_tokens(BASELINE), rel=0.01)


def steady(*step_s: float) -> Measurement:
    """A measurement of optimizer steps, each of which has four micro batches."""
    micro = tuple(step / 4 for step in step_s)
    return measurement(step_s=step_s, micro_step_s=micro, rest_s=(0.0,))


def repeated(
    baseline: tuple[Measurement, ...], best: tuple[Measurement, ...], searched: Measurement
) -> Selection:
    """A selection with these confirmations; the search measured the best one as `searched`."""
    selection = Selection(subject_of())
    selection.add_result(result(BASELINE, measurement=baseline[0]))
    selection.add_result(result(BEST, measurement=searched))
    for config, confirmations in ((BASELINE, baseline), (BEST, best)):
        for confirmation in confirmations:
            selection.confirm(config, confirmation)
    return selection


def recipe_of(selection: Selection) -> Recipe:
    recipe = selection.recipe(FINGERPRINT)
    assert recipe is not None and recipe.baseline is not None
    assert (recipe.baseline.config, recipe.config) == (BASELINE, BEST)
    return recipe


def test_a_confirmation_that_differs_from_the_search_widens_the_speed_up() -> None:
    quiet, slower = steady(1.0, 1.01, 1.02), steady(1.1, 1.11, 1.12)
    made = repeated((steady(1.8, 1.82, 1.84),) * 2, (slower,), quiet)
    recipe = recipe_of(made)
    assert recipe.disagreement == f"measurements of {BEST.label()} differ by 10%"
    assert recipe.unsteady is None and recipe.differs
    assert recipe.speedup == pytest.approx(1.82 / 1.11)  # the confirmation's
    assert recipe.speedup_interval == pytest.approx((1.8 / (1.01 * 1.11), 1.84 / 1.0))
    assert recipe.winner.performance.spread == pytest.approx((1.0 / 1.11 - 1, 0.01))
    assert recipe.speedup_evidence is Evidence.MEASURED
    assert describe.speed_up(recipe) == "1.6 to 1.9 times the speed of the baseline"
    assert any(caveat.startswith(recipe.disagreement) for caveat in recipe.caveats)

    # The second confirmation agrees with the first, so the search's short probe is not used.
    made.confirm(BEST, slower)
    recipe = recipe_of(made)
    assert recipe.disagreement is None
    assert recipe.speedup_interval == pytest.approx((1.8 / 1.11 / 1.01, 1.84 / 1.11 / 0.99))
    assert describe.speed_up(recipe) == "1.6 times the speed of the baseline"


def test_measurements_of_both_configurations_may_disagree() -> None:
    recipe = recipe_of(
        repeated((steady(1.8), steady(2.0)), (steady(1.1), steady(1.0)), steady(1.0))
    )
    assert recipe.disagreement == (
        f"measurements of {BASELINE.label()} differ by 11%; "
        f"measurements of {BEST.label()} differ by 10%"
    )
    assert recipe.speedup_interval == pytest.approx((1.8 / 1.1, 2.0 / 1.0))


@pytest.mark.parametrize(
    ("slow_s", "text"),
    [
        (1.18, "1.3 to 1.7 times the speed of the baseline"),
        (1.49, "4 to 64% faster than the baseline"),
        (1.55, "too unsteady"),  # from 0.6 % faster
        (1.6, "too unsteady"),  # from 2.5 % slower
    ],
)
def test_a_speed_up_is_stated_if_its_whole_interval_is_clearly_above_1(
    slow_s: float, text: str
) -> None:
    baseline = (steady(1.56, 1.6, 1.635),) * 2
    recipe = recipe_of(repeated(baseline, (steady(1.0), steady(slow_s)), steady(1.0)))
    assert text in describe.speed_up(recipe)
    if text == "too unsteady":
        assert recipe.unsteady is not None and recipe.unsteady == recipe.disagreement
        assert (recipe.speedup, recipe.speedup_interval, recipe.differs) == (None, None, False)
        assert recipe.speedup_evidence is Evidence.DISTURBED


def test_small_differences_are_no_disagreement() -> None:
    recipe = recipe_of(
        repeated((steady(1.8), steady(1.88)), (steady(1.0), steady(1.04)), steady(1.04))
    )
    assert recipe.disagreement is recipe.unsteady is None


def test_a_baseline_without_rivals_allows_no_speed_up(start: Start) -> None:
    """A budget that ends after the baseline says nothing about other configurations."""
    session = start(machine(rate=by_tokens))
    selection = Selection(session.study.trials.task)
    selection.add_result(session.evaluator.evaluate(BASELINE, 0).result)
    recipe = selection.recipe(session.prober.fingerprint)
    assert recipe.alone and recipe.speedup is None and recipe.speedup_interval is None
    assert (
        describe.speed_up(recipe) == "the speed-up is unknown, because only the baseline was tried"
    )
    selection.add_result(session.evaluator.evaluate(MIDDLE, 1).result)
    assert not selection.recipe(session.prober.fingerprint).alone


MIDDLE = TrainConfig(micro_batch_size=4, seq_len=512, checkpointing="none")


@pytest.mark.parametrize("is_disturbed", [True, False])
def test_disturbed_truncated_models_exclude_no_configuration(
    start: Start, is_disturbed: bool
) -> None:
    answers = disturbed_if(lambda request, _: is_disturbed, answers=layered())
    evaluator = replace(start(answers).evaluator, shape=SHAPE)
    pruned = evaluator.evaluate(MIDDLE, 0, lambda config, extrapolation: "too slow").result
    assert pruned.outcome is (Outcome.OK if is_disturbed else Outcome.SLOW)

    predicted = replace(evaluator, shallow_only=True).evaluate(BEST, 1).result
    assert predicted.is_prediction and predicted.outcome is Outcome.OK
    assert predicted.disturbed == (REASON if is_disturbed else None)
    expected = Evidence.DISTURBED if is_disturbed else Evidence.EXTRAPOLATED
    assert predicted.evidence is expected


def test_a_disturbed_truncated_model_corrects_no_other_prediction() -> None:
    predictor = DepthPredictor(SHAPE)
    other = replace(MIDDLE, micro_batch_size=2)
    request = ProbeRequest(config=MIDDLE, model={}, memory_gib=80.0, rung=Rung.SHALLOW)

    def learn(
        config: TrainConfig, depth: int | None, disturbed: str | None = None, slower: float = 1.0
    ) -> None:
        probed = layered()(replace(request, config=config, depth=depth))
        assert probed.measurement is not None
        slow = tuple(slower * seconds for seconds in probed.measurement.micro_step_s)
        measured = replace(probed.measurement, micro_step_s=slow)
        predictor.learn(replace(probed, depth=depth, disturbed=disturbed), measured)

    def predicted_s(config: TrainConfig) -> float:
        predicted = predictor.predict(config, 2)
        assert predicted is not None
        return predicted.measurement.micro_step_s[0]

    for depth in (2, 6):
        learn(MIDDLE, depth, disturbed=REASON, slower=3.0)
        learn(other, depth)
    extrapolated = predictor.predict_from_probes(MIDDLE, 2)
    assert extrapolated is not None and extrapolated.disturbed == REASON
    steady_s = predicted_s(other)
    learn(MIDDLE, None)  # 3 times as fast as the disturbed models predict
    assert predicted_s(other) == steady_s

    learn(other, 2, disturbed=REASON, slower=3.0)  # it does not replace the steady one
    assert predicted_s(other) == steady_s


def test_an_explanation_measures_everything_in_one_round(start: Start) -> None:
    session = start()
    task = session.study.trials.task
    ablate(task, session.evaluator, BEST, BASELINE)
    probes = session.prober.num_probes
    ablate(task, session.evaluator, BEST, BASELINE)
    assert session.prober.num_probes == 2 * probes
    assert session.prober.configs[0] == session.prober.configs[probes - 1] == BEST


def test_an_explanation_needs_a_steady_winner(start: Start) -> None:
    """Its two probes differ, or others disturb it."""
    rates = iter([1000.0, *[900.0] * 9])
    drifts = start(machine(rate=lambda config: next(rates)))
    with pytest.raises(EnvironmentProblem, match="two probes of the winner differ by 11%"):
        ablate(drifts.study.trials.task, drifts.evaluator, BEST, BASELINE)

    busy = start(disturbed_if(lambda request, earlier: True))
    with pytest.raises(EnvironmentProblem, match=f"too unsteady .*: {REASON}") as error:
        ablate(busy.study.trials.task, busy.evaluator, BEST, BASELINE)
    assert error.value.remedy == "stop other work on this machine, then run the command again"
    assert error.value.explained == "unsteady-machine"


def test_an_explanation_compares_no_disturbed_probe(start: Start) -> None:
    slow = replace(BEST, checkpointing="full")
    session = start(disturbed_if(lambda request, earlier: request.config == slow))
    done = ablate(session.study.trials.task, session.evaluator, BEST, BASELINE)
    (knob,) = [one for one in done.undone if one.config == slow]
    assert (knob.tokens_per_s, knob.evidence) == (None, Evidence.DISTURBED)
    assert knob.peak_gib is not None
    (line,) = [one for one in describe.ablation(done) if one.startswith("checkpointing")]
    assert line.endswith("no comparison: other work disturbed the measurement [disturbed]")


def slower_again(searched: Callable[[TrainConfig], float]) -> Answer:
    """Confirmations run at the usual speed, and the search's probes at the speed `searched`."""
    usual, in_search = machine(rate=by_tokens), machine(rate=searched)
    return lambda request: (usual if request.rung is Rung.CONFIRM else in_search)(request)


@pytest.mark.parametrize("lucky", [BEST, replace(BEST, micro_batch_size=4)])
def test_a_winner_below_the_best_trial_of_the_search_is_explained(
    start: Start, lucky: TrainConfig
) -> None:
    session = whole(
        start,
        slower_again(lambda config: by_tokens(config) * (1.2 if config == lucky else 1.0)),
    )
    made = session.summary()
    assert made.recipe is not None and made.recipe.winner.config == BEST
    row, *_ = [one for one in made.trials if one.config == lucky]
    who = "the winner" if lucky == BEST else f"trial {row.number}"
    found, again = fmt_count(1.2 * by_tokens(lucky)), fmt_count(by_tokens(lucky))
    assert made.slower_than_searched == (
        f"{who} reached {found} tokens/s in the search, but {again} tokens/s when it was measured "
        "again; the later measurements count"
    )
    assert made.slower_than_searched in render(made, "out")
    assert made.slower_than_searched in [one.text for one in last_screen.answer(made, made.recipe)]


def test_a_disturbed_trial_that_was_faster_than_the_winner_is_explained(start: Start) -> None:
    lucky = replace(BEST, micro_batch_size=4)
    answers = slower_again(lambda config: by_tokens(config) * (1.2 if config == lucky else 1.0))
    busy = disturbed_if(
        lambda request, _: request.config == lucky and request.rung is not Rung.CONFIRM,
        slower=1.0,
        answers=answers,
    )
    made = whole(start, busy, finalists=1).summary()
    assert made.slower_than_searched.endswith(
        "tokens/s in the search, but other work disturbed this measurement, so it does not count"
    )


def test_a_winner_that_kept_its_speed_needs_no_explanation(start: Start) -> None:
    assert whole(start).summary().slower_than_searched == ""
