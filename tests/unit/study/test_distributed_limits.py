"""When a search stops, by hand: patience over noise, and the part of the budget that is kept for
confirmation.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome, Rung
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import StepTimeEstimate
from autotune.problem.search_space import Knob, SearchSpace
from autotune.study import distributed as module
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.summary import TrialRecord
from tests.helpers.factories import add_measured, measurement
from tests.helpers.sessions import BASELINE, SPACE, Start

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


def row(
    number: int, speed: float | None, outcome: Outcome = Outcome.OK, **changes: Any
) -> TrialRecord:
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
    ("winner_s", "baseline_s", "limits", "kept_s"),
    [
        (None, None, {}, 0.0),
        (10.0, 10.0, {}, 36.0),  # the winner twice and the baseline, a fifth longer
        (10.0, 20.0, {"rounds": 3}, 60.0),
        (10.0, 300.0, {}, 24.0),  # more than a fifth of the budget: the baseline stays extrapolated
        (90.0, 90.0, {}, 150.0),  # a share of the budget
        (200.0, 10.0, {}, 240.0),  # or what the first of them takes
        (200.0, 10.0, {"rounds": 1}, 240.0),
        (300.0, 10.0, {}, 1000.0 / 3),  # but no more than a third
        (400.0, 10.0, {}, 0.0),  # where that is too little to end it, the search takes the time
    ],
)
def test_time_is_kept_for_confirmation(
    trials: Make,
    monkeypatch: pytest.MonkeyPatch,
    winner_s: float | None,
    baseline_s: float | None,
    limits: dict[str, int],
    kept_s: float,
) -> None:
    monkeypatch.setattr(
        Evaluator,
        "confirmation_s",
        lambda self, config, _: baseline_s if config == BASELINE else winner_s,
    )
    for now, is_spent in ((999.9 - kept_s, False), (1000.1 - kept_s, True)):
        made = trials(now, **limits)
        add_measured(made.selection, OTHER, measurement(0.5))
        add_measured(made.selection, BASELINE, measurement(1.0))
        assert made.is_spent() is is_spent is made.is_over()
        # the first trial runs in any case
        assert made.has_ended() is (now >= 1000.0) and not made.is_done()
        made.rows = [row(0, 1.0), row(1, 2.0, config=OTHER)]
        assert made.is_done() is is_spent


def test_no_time_is_kept_after_the_first_trial(
    trials: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second candidate says more than a confirmation of the only one."""
    monkeypatch.setattr(Evaluator, "confirmation_s", lambda *_: 90.0)
    made = trials(900.0)
    add_measured(made.selection, BASELINE, measurement(1.0))
    made.rows = [row(0, 1.0)]
    assert made.search_s() == pytest.approx(100.0) and not made.is_done()
    made.rows.append(row(1, None, Outcome.OOM, config=OTHER))
    assert made.is_done()


@pytest.mark.parametrize(("judged", "refused", "is_spent"), [(11, 9, False), (12, 0, True)])
def test_no_time_is_kept_before_a_few_layers_judged_twelve(
    trials: Make, monkeypatch: pytest.MonkeyPatch, judged: int, refused: int, is_spent: bool
) -> None:
    """240 s are kept for the best, of which 200 s are left, and another candidate takes 5 s."""
    monkeypatch.setattr(Evaluator, "confirmation_s", lambda *_: 200.0)
    made = trials(800.0)
    add_measured(made.selection, OTHER, measurement(0.5))
    made.evaluator.truncated_s = {OTHER: 5.0}
    made.rows = [row(number, 1.0) for number in range(judged)]
    made.rows += [row(judged + number, None, Outcome.REFUSED) for number in range(refused)]
    assert made.is_spent() is is_spent
    made.evaluator.truncated_s, made.evaluator.whole_s = {}, {OTHER: 5.0}
    assert made.is_spent()


def test_time_is_kept_for_each_finalist_once(trials: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner twice and three others, of which one is the
    baseline: 10 s each, and a fifth more.
    """
    monkeypatch.setattr(Evaluator, "confirmation_s", lambda *_: 10.0)
    for now, is_spent in ((939.9, False), (940.1, True)):
        made = trials(now)
        for number, config in enumerate(
            (OTHER, replace(OTHER, lora_rank=32), replace(OTHER, lora_rank=64), BASELINE)
        ):
            add_measured(made.selection, config, measurement(0.5 + number / 4))
        assert made.is_spent() is is_spent


@pytest.mark.parametrize(
    ("now", "compiles_ahead", "may"),
    [
        (0.0, False, True),  # there is time for fifteen
        (861.0, False, False),
        (861.0, True, True),
        (969.9, True, True),  # there is time for three
        (970.1, True, False),
    ],
)
def test_seeds_are_compiled_at_once_if_other_processes_compile_what_follows(
    trials: Make, now: float, compiles_ahead: bool, may: bool
) -> None:
    made = trials(now)
    made.rows = [row(0, 1.0)]
    made.evaluator.truncated_s[BASELINE] = 5.0
    made.compiles_ahead = compiles_ahead
    assert made.may_compile_seeds() is may


@pytest.mark.parametrize(
    ("judged", "took_s", "now", "hurried"),
    [
        (0, None, 999.0, False),  # nothing is known of how long they take
        (1, 5.0, 859.0, False),  # fourteen are missing, with 5 s to compile each
        (1, 5.0, 861.0, True),
        (15, 5.0, 999.0, False),
    ],
)
def test_a_search_is_in_a_hurry_while_it_might_not_judge_fifteen(
    trials: Make, judged: int, took_s: float | None, now: float, hurried: bool
) -> None:
    made = trials(now)
    made.rows = [row(number, 1.0) for number in range(judged)] + [row(99, None, Outcome.REFUSED)]
    if took_s is not None:
        made.evaluator.truncated_s[BASELINE] = took_s
    assert made.is_hurried() is hurried
    made.evaluator.whole_s[OTHER] = 90.0  # a tenth of the budget is for whole models
    assert made.spare_s() == (0.0 if hurried else pytest.approx(min(10.0, 1000.0 - now)))


def test_what_would_outlast_the_search_is_not_begun(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate with so many times the micro batch takes so many times as long."""
    monkeypatch.setattr(
        module,
        "estimate_step_time",
        lambda model, config: StepTimeEstimate(
            products_s=config.micro_batch_size, bytes_s=0.0, host_s=0.0, rest_s=0.0
        ),
    )
    made = start(began=0.0, budget_s=1000.0, begin=[BASELINE]).study.trials
    made.clock = lambda: 994.0
    made.evaluator.truncated_s = {
        replace(BASELINE, micro_batch_size=size): float(size) for size in (1, 2)
    }
    made.rows = [row(0, 1.0)]
    assert made.ask(SPACE.clip(replace(OTHER, micro_batch_size=8))) is None
    proposal = made.ask()  # the baseline, of 8 too, was queued
    assert proposal is not None and proposal.config.micro_batch_size == 4
    # Of what no formula knows it cannot be said.
    lasting = made.duration_predictor()
    monkeypatch.setattr(module, "estimate_step_time", lambda model, config: None)
    assert lasting(OTHER) == 0.0


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
            with made.return_trials_on_failure():
                raise error
        else:
            with pytest.raises(ValueError, match="x"), made.return_trials_on_failure():
                raise error
        assert made.optimizer.is_waiting() and not made._open
        again = made.ask()
        assert again is not None and again.config == wanted.config
        made.give_back(again.number)
        made.ask()
    assert made.too_short_for == ["the whole search"]
    made.record_omission("the whole search")
    made.record_omission("the rest")
    assert made.too_short_for == ["the whole search", "the rest"]


def test_what_nobody_tried_is_nearest_to_the_best(start: Start) -> None:
    session = start(begin=[BASELINE])
    made = session.study.trials
    made.run_one(None)
    near = made.pick_untried()
    assert near is not None
    config = SPACE.config(near)
    assert sum(getattr(config, name) != value for name, value in BASELINE.as_dict().items()) == 1
    made.rows += [
        row(9, None, Outcome.OOM, config=SPACE.config(each)) for each in SPACE.enumerate()
    ]
    assert made.pick_untried() is None


def test_seconds_of_the_budget_count_from_the_start(trials: Make) -> None:
    made = trials(900.0, began=100.0)
    assert made.left_s() == 200.0 == made.search_s() and not made.has_ended()
    made.clock = lambda: 1100.0
    assert made.left_s() == 0.0 and made.has_ended()


def test_a_candidate_takes_as_long_as_the_median_of_truncated_models_or_else_of_whole_ones(
    trials: Make,
) -> None:
    made = trials()
    assert made.compiled_s() == 0.0 and not made.is_spent()
    sizes = [replace(OTHER, micro_batch_size=size) for size in (1, 2, 4)]
    made.evaluator.whole_s = dict(zip(sizes, (20.0, 30.0, 90.0), strict=True))
    for left_s, spent in ((30.5, False), (30.0, True)):
        made.clock = lambda left_s=left_s: 1000.0 - left_s
        assert made.is_spent() is spent
    assert made.compiled_s() == 0.0
    made.evaluator.truncated_s = dict(zip(sizes, (2.0, 3.0, 9.0), strict=True))
    for left_s, spent in ((3.5, False), (3.0, True)):
        made.clock = lambda left_s=left_s: 1000.0 - left_s
        assert made.is_spent() is spent
    assert made.compiled_s() == 8.0  # 5 s more for compiling


def test_candidates_are_missing_to_fifteen_without_those_that_were_refused(trials: Make) -> None:
    made = trials()
    assert made.num_missing() == 15
    made.rows = [row(number, None, Outcome.OOM) for number in range(10)] + [
        row(10, None, Outcome.REFUSED)
    ]
    assert made.num_missing() == 5
    made._open = dict.fromkeys((11, 12), "")
    assert made.num_missing() == 3
    made.rows *= 2
    assert made.num_missing() == 0


@pytest.mark.parametrize(
    ("spent_s", "now", "spare_s"), [(0.0, 0.0, 100.0), (70.0, 0.0, 30.0), (70.0, 990.0, 10.0)]
)
def test_a_tenth_of_the_budget_is_for_whole_models(
    trials: Make, spent_s: float, now: float, spare_s: float
) -> None:
    made = trials(now)
    made.evaluator.whole_s = {OTHER: spent_s - 30.0, BASELINE: 30.0}
    assert made.spare_s() == pytest.approx(spare_s)
    made.evaluator.whole_s[OTHER] = 80.0
    assert made.spare_s() == 0.0


def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """By formula, micro batches take as many seconds as they have rows."""
    monkeypatch.setattr(
        module,
        "estimate_step_time",
        lambda model, config: StepTimeEstimate(
            products_s=config.micro_batch_size, bytes_s=0.0, host_s=0.0, rest_s=0.0
        ),
    )


def test_candidates_last_as_a_line_over_the_formula_says(
    trials: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four seconds, and two for each row; where layers are compiled, five more."""
    sized(monkeypatch)
    made, compiled = trials(), replace(BASELINE, micro_batch_size=4, compile="per_layer")
    assert made.duration_predictor()(OTHER) == 0.0
    made.evaluator.truncated_s = {replace(BASELINE, micro_batch_size=1): 6.0}
    assert made.duration_predictor()(OTHER) == 0.0  # no line leads through one point
    made.evaluator.truncated_s[compiled], made.evaluator.compiling_s[compiled] = 17.0, 5.0
    lasts_s = made.duration_predictor()
    assert lasts_s(replace(BASELINE, micro_batch_size=8)) == pytest.approx(20.0)
    assert lasts_s(replace(BASELINE, micro_batch_size=16, compile="per_layer")) == pytest.approx(
        41.0
    )
    assert lasts_s(compiled) == 0.0  # it is known


def test_nothing_lasts_less_than_no_time(trials: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that were compiled before take as long as others, and a line that falls ends at 0."""
    sized(monkeypatch)
    made = trials()
    one, two = (replace(BASELINE, micro_batch_size=size, compile="per_layer") for size in (1, 2))
    made.evaluator.truncated_s = {one: 3.0, two: 7.0}
    assert made.duration_predictor()(replace(BASELINE, micro_batch_size=4)) == pytest.approx(15.0)
    made.evaluator.truncated_s = {one: 7.0, two: 3.0}
    assert made.duration_predictor()(replace(BASELINE, micro_batch_size=4)) == 0.0
    assert made.duration_predictor()(replace(two, micro_batch_size=4)) == 5.0


@pytest.mark.parametrize(("took_s", "affords"), [(None, True), (166.0, True), (167.0, False)])
def test_a_confirmation_is_afforded_if_it_fits_though_it_takes_a_fifth_longer(
    trials: Make, monkeypatch: pytest.MonkeyPatch, took_s: float | None, affords: bool
) -> None:
    """200 s are left: all of them for a candidate, and for the baseline a fifth of the budget in
    all.
    """
    monkeypatch.setattr(Evaluator, "confirmation_s", lambda *_: took_s)
    made = trials(800.0)
    assert made.affords(OTHER) is made.affords(BASELINE) is affords
    made.evaluator.truncated_s = {BASELINE: 6.0, OTHER: 500.0}
    made.evaluator.whole_s = {replace(BASELINE, micro_batch_size=4): 4.0, OTHER: 500.0}
    assert made.affords(OTHER) is affords
    if took_s is not None:
        for took_now_s, fits in ((158.0, True), (159.0, False)):
            monkeypatch.setattr(
                Evaluator, "confirmation_s", lambda *_, took_now_s=took_now_s: took_now_s
            )
            assert made.affords(BASELINE) is fits


@pytest.mark.parametrize(("left_s", "micro_steps"), [(60.0, 4), (59.0, 2)])
def test_a_confirmation_has_longer_steps_where_half_of_the_time_left_suffices(
    trials: Make, monkeypatch: pytest.MonkeyPatch, left_s: float, micro_steps: int
) -> None:
    asked: list[int] = []

    def lasting(evaluator: Evaluator, config: object, steps: int) -> float:
        asked.append(steps)
        return 30.0

    monkeypatch.setattr(Evaluator, "confirmation_s", lasting)
    assert trials(1000.0 - left_s).confirmed_micro_steps(OTHER) == micro_steps and asked == [4]
    monkeypatch.setattr(Evaluator, "confirmation_s", lambda *_: None)
    assert trials(999.0).confirmed_micro_steps(OTHER) == 4  # nothing is known


def test_what_nobody_tried_has_the_values_asked_for_and_leaves_the_time_to_keep(
    trials: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line, a candidate takes as many seconds as it has rows. 20 s are left."""
    sized(monkeypatch)
    made = trials(980.0)
    made.evaluator.truncated_s = {
        replace(BASELINE, micro_batch_size=size): float(size) for size in (1, 2)
    }
    made.rows = [row(number, 1000.0) for number in range(15)]  # so that there is no hurry
    for keep_s, sizes in ((11.0, {8}), (13.0, {1, 2, 4}), (17.0, {1, 2}), (18.5, {1})):
        found = [
            made.pick_untried(keep_s=keep_s, lora_rank=32, checkpointing="none") for _ in range(20)
        ]
        chosen = [one for one in found if one is not None]
        assert {(one["lora_rank"], one["checkpointing"]) for one in chosen} == {(32, "none")}
        assert {one["micro_batch_size"] for one in chosen} == sizes and len(chosen) == 20
    assert made.pick_untried(keep_s=21.0, lora_rank=32) is None
    made.evaluator.truncated_s = {}  # then nothing is known to last, and fits into no time at all
    assert made.pick_untried(keep_s=20.0) is not None


@pytest.mark.parametrize(
    ("promised", "size"),
    [
        ({1: 0.4, 2: 1.8, 4: 0.8}, 2),
        ({1: 0.4, 2: 0.6, 4: 1.0}, 4),  # half of the best's
        ({1: 0.4, 2: 0.6, 4: 0.98}, None),
    ],
)
def test_in_a_hurry_the_most_promising_is_tried_if_it_may_be_half_as_fast_as_the_best(
    trials: Make, monkeypatch: pytest.MonkeyPatch, promised: dict[int, float], size: int | None
) -> None:
    def promise(task: object, config: TrainConfig) -> float:
        return (promised | {8: 2.0})[config.micro_batch_size]

    monkeypatch.setattr(module, "formula_speed", promise)
    made = trials(960.0)
    made.evaluator.truncated_s = {BASELINE: 1.0}  # fourteen that compile take 84 s
    made.rows = [row(0, 1000.0)]
    assert made.is_hurried()
    chosen = made.pick_untried(lora_rank=16, checkpointing="full")
    assert (chosen and chosen["micro_batch_size"]) == size
    made._open = {1: SPACE.config(chosen).digest} if chosen else {}
    again = made.pick_untried(lora_rank=16, checkpointing="full")
    assert again is None  # the others are too slow
    assert made.pick_untried(promising=False, lora_rank=16, checkpointing="full") is not None


def test_in_a_hurry_what_is_compiled_comes_first_if_it_promises_about_as_much(
    trials: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best compiles.

    Larger micro batches promise more; of what promises the same, some need no compilation.
    """

    def promise(task: object, config: TrainConfig) -> float:
        return 0.9 + 0.02 * config.micro_batch_size

    monkeypatch.setattr(module, "formula_speed", promise)
    made = trials(800.0)
    space = SearchSpace(
        name="compiling",
        knobs=(
            Knob(name="compile", values=("none", "per_layer")),
            Knob(name="micro_batch_size", values=(1, 2)),
            Knob(name="optimizer", values=("adamw_torch_fused", "adamw_8bit")),
            Knob(name="padding", values=("max_length",)),
        ),
    )
    made.task = replace(made.task, space=space)
    best = space.config(
        space.clip(
            TrainConfig(compile="per_layer", micro_batch_size=1, optimizer="adamw_torch_fused")
        )
    )
    made.evaluator.truncated_s = {best: 4.0}
    made.rows = [row(number, 1000.0, config=best) for number in range(15)]
    assert made.lacks_plenty() and not made.is_hurried()
    compiled = {1}
    made.is_compiled = lambda config: config.micro_batch_size in compiled

    def next_one() -> tuple[Any, ...]:
        chosen = made.pick_untried()
        assert chosen is not None
        config = space.config(chosen)
        made.rows.append(row(len(made.rows), 900.0, config=config))
        return config.micro_batch_size, config.optimizer, config.compile

    # the code of one is there
    ready = {(1, "adamw_torch_fused", "none"), (1, "adamw_8bit", "per_layer")}
    assert {next_one(), next_one()} == ready
    # a step further than what would have to be compiled
    assert next_one() == (2, "adamw_torch_fused", "none")
    compiled.clear()
    made.rows = [row(0, 1000.0, config=best)]
    assert next_one()[2] == "none"
    monkeypatch.setattr(module, "ALIKE", 3.0)
    # nothing is ready: the most promising
    assert next_one() == (2, "adamw_torch_fused", "per_layer")


def test_what_nobody_tried_is_one_step_from_the_best_wherever_that_is(trials: Make) -> None:
    made, best = trials(), replace(OTHER, micro_batch_size=1, lora_rank=32)
    made.rows = [row(0, 900.0), row(1, 1000.0, config=best)]
    for _ in range(20):
        chosen = made.pick_untried()
        assert chosen is not None
        assert sum(getattr(best, name) != value for name, value in chosen.items()) == 1
