"""Interrupted sessions, and the feasibility check before the search."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from autotune.core.errors import Cancelled, NothingFits, TooManyFailures
from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace
from autotune.problem.task import Task
from autotune.study.feasibility import Feasible, find_feasible
from autotune.study.summary import TrialRecord
from tests.helpers.factories import result
from tests.helpers.replay import machine
from tests.helpers.sessions import (
    BASELINE,
    SPACE,
    Session,
    Start,
    by_tokens,
    space,
    states,
    subject_of,
    whole,
)

# Interrupted sessions

TOTAL = 6


def cut_off(session: Session, step: str) -> TrainConfig:
    """Run two trials and abandon the third at a given step, without clean-up, as in a killed
    process.
    """
    session.study.trials.limits = replace(session.study.trials.limits, trials=2)
    session.study.run()
    if step == "reported":

        class Killed(BaseException):
            pass

        def die(row: TrialRecord) -> None:
            raise Killed

        session.study.trials.limits = replace(session.study.trials.limits, trials=3)
        session.study.trials.on_trial = die
        with pytest.raises(Killed):
            session.study.run()
        return session.study.trials.rows[-1].config
    asked = session.search.ask()
    if step == "stored":
        session.evaluator.evaluate(asked.config, asked.number)
    return asked.config


@pytest.mark.parametrize("step", ["asked", "stored", "reported"])
def test_a_session_killed_at_any_step_loses_nothing(
    start_anywhere: Start, database: str, step: str
) -> None:
    first = start_anywhere(begin=[BASELINE])
    config = cut_off(first, step)
    second = start_anywhere(trials=TOTAL)
    assert len(second.study.trials.rows) == (2 if step == "asked" else 3)
    second.study.run()
    rows = second.study.trials.rows
    assert len(rows) == TOTAL
    assert rows[: len(first.study.trials.rows)] == first.study.trials.rows
    assert config in [row.config for row in rows[:4]]
    # A stored trial is not launched again. A trial that was only proposed is.
    assert (config in second.prober.configs) is (step == "asked")
    launched = first.prober.configs + second.prober.configs
    assert len(launched) == len({one.digest for one in launched})
    trial_states = states(database)
    assert TrialState.RUNNING not in trial_states and TrialState.WAITING not in trial_states
    assert sum(state in (TrialState.COMPLETE, TrialState.PRUNED) for state in trial_states) == TOTAL
    assert trial_states.count(TrialState.FAIL) == (1 if step == "asked" else 0)
    second.study.confirm()
    assert second.summary().recipe is not None


def test_a_stored_but_unreported_oom_refuses_larger_ones_in_the_next_session(start: Start) -> None:
    first = start(machine(limit_gib=1.6))
    largest = TrainConfig(micro_batch_size=8, seq_len=256, lora_rank=16, checkpointing="none")
    first.search.enqueue(SPACE.clip(largest))
    asked = first.search.ask()
    assert first.evaluator.evaluate(asked.config, asked.number).result.outcome is Outcome.OOM

    second = start(machine(limit_gib=1.6), trials=2)
    (row,) = second.study.trials.rows
    assert (row.config, row.outcome) == (largest, Outcome.OOM) and (row.margin or 0) > 0
    second.search.enqueue(SPACE.clip(replace(largest, lora_rank=32)))
    second.study.run()
    assert second.study.trials.rows[1].outcome is Outcome.REFUSED
    assert second.prober.num_probes == 0


def confirmed(session: Session) -> set[str]:
    return {
        digest
        for digest, record in session.study.trials.selection.records.items()
        if record.confirmed
    }


def test_confirmations_survive_a_restart(start: Start) -> None:
    first = whole(start, trials=6)
    again = start(trials=6)
    assert confirmed(again) == confirmed(first) != set()
    assert again.study.trials.rows == first.study.trials.rows
    then, now = first.summary().recipe, again.summary().recipe
    assert now is not None and now == then


def test_a_cancelled_trial_goes_back_to_the_queue(start: Start, tmp_path: Path) -> None:
    answers = machine(rate=by_tokens)
    asked: list[TrainConfig] = []

    def stopped(request: ProbeRequest) -> ProbeResult:
        asked.append(request.config)
        if len(asked) == 3:
            raise Cancelled
        return answers(request)

    first = start(stopped, trials=TOTAL)
    first.study.run()
    assert len(first.study.trials.rows) == 2
    trial_states = states(f"sqlite:///{tmp_path / 'autotune.db'}")
    assert trial_states.count(TrialState.FAIL) == 1 and trial_states.count(TrialState.WAITING) == 1
    second = start(trials=TOTAL)
    second.study.run()
    assert second.study.trials.rows[2].config == asked[2]
    assert len(second.study.trials.rows) == TOTAL
    assert TrialState.RUNNING not in states(f"sqlite:///{tmp_path / 'autotune.db'}")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_unexpected_error_leaves_no_running_trial(
    start: Start, tmp_path: Path, error: type[BaseException]
) -> None:
    def broken(request: ProbeRequest) -> ProbeResult:
        raise error("surprise")

    session = start(broken, trials=TOTAL)
    with pytest.raises(error, match="surprise"):
        session.study.run()
    assert TrialState.RUNNING not in states(f"sqlite:///{tmp_path / 'autotune.db'}")
    again = start(trials=TOTAL)
    again.study.run()
    assert len(again.study.trials.rows) == TOTAL


def test_repeated_crashes_end_the_session_and_another_session_continues(start: Start) -> None:
    def sick(request: ProbeRequest) -> ProbeResult:
        return result(outcome=Outcome.CRASH, reason="the worker was killed by SIGSEGV")

    first = start(sick, trials=TOTAL)
    with pytest.raises(TooManyFailures, match="SIGSEGV"):
        first.study.run()
    assert first.prober.num_probes == 3
    second = start(trials=TOTAL)
    second.study.run()
    assert len(second.study.trials.rows) == TOTAL
    second.study.confirm()
    assert second.summary().recipe is not None


# Feasibility


def feasible(
    start: Start, limit_gib: float, task: Task, reserve: SearchSpace | None = None
) -> tuple[bool, list[TrainConfig], Session]:
    session = start(machine(limit_gib=limit_gib), task=task)
    found = find_feasible(task, reserve or task.space, session.evaluator, session.said.append)
    if found.problem is not None:
        raise found.problem
    return found.opens_reserve, found.tried, session


SMALL = space(
    micro_batch_size=(1, 2, 4, 8),
    seq_len=(256, 1024),
    lora_rank=(16,),
    checkpointing=("none", "full"),
)


def baseline(micro_batch_size: int, **changes: Any) -> TrainConfig:
    return TrainConfig(**({"micro_batch_size": micro_batch_size, "seq_len": 1024} | changes))


def test_the_baseline_fits(start: Start) -> None:
    opened, tried, session = feasible(start, 100.0, subject_of(SMALL))
    assert (opened, tried) == (False, [baseline(8)])
    assert session.prober.configs == tried and session.prober.logs == ["settle.log"]


def test_the_baseline_is_halved_until_it_fits(start: Start) -> None:
    opened, tried, session = feasible(start, 2.1, subject_of(SMALL))
    assert (opened, tried) == (False, [baseline(8), baseline(4), baseline(2)])
    assert session.prober.configs == tried


def test_the_leanest_configuration_is_tried_after_the_baseline(start: Start) -> None:
    opened, tried, session = feasible(start, 1.3, subject_of(SMALL))
    assert not opened
    assert tried == [*map(baseline, (8, 4, 2, 1)), baseline(1, seq_len=256)]
    assert session.prober.configs == tried


def test_the_reserve_is_opened_if_nothing_else_fits(start: Start) -> None:
    reserve = replace(
        SMALL, knobs=(*SMALL.knobs, Knob(name="quantization", values=("none", "nf4")))
    )
    opened, tried, session = feasible(start, 0.5, subject_of(SMALL), reserve)
    assert opened
    assert tried == [baseline(1, seq_len=256, quantization="nf4")]
    assert session.prober.configs[-1] == tried[0]


def test_if_nothing_fits_the_smallest_need_is_reported(start: Start) -> None:
    reserve = replace(
        SMALL, knobs=(*SMALL.knobs, Knob(name="quantization", values=("none", "nf4")))
    )
    with pytest.raises(NothingFits) as caught:
        feasible(start, 0.25, subject_of(SMALL), reserve)
    assert caught.value.exit_code == 4
    text = str(caught.value)
    # 0.25 GiB of weights in 4 bits and 0.125 GiB for 256 tokens with every layer recomputed
    assert "0.38 GiB" in text and "0.25 GiB" in text
    assert baseline(1, seq_len=256, quantization="nf4").label() in text
    assert "larger GPU" in (caught.value.remedy or "")


def test_a_crash_does_not_count_as_not_fitting(start: Start) -> None:
    session = start(lambda request: result(outcome=Outcome.CRASH), task=subject_of(SMALL))
    assert find_feasible(subject_of(SMALL), SMALL, session.evaluator, print) == Feasible(
        tried=[baseline(8)]
    )


def test_a_stop_during_the_feasibility_check_is_raised(start: Start) -> None:
    def cancel(request: ProbeRequest) -> ProbeResult:
        raise Cancelled

    session = start(cancel, task=subject_of(SMALL))
    with pytest.raises(Cancelled):
        find_feasible(subject_of(SMALL), SMALL, session.evaluator, print)


def test_the_feasibility_probes_are_reused_as_first_trials(start: Start) -> None:
    task = subject_of(SMALL)
    _, tried, session = feasible(start, 2.1, task)
    session.study.trials.begin(tried)
    session.study.trials.limits = replace(session.study.trials.limits, trials=3)
    session.study.run()
    rows = session.study.trials.rows
    assert [row.config for row in rows] == tried
    assert [row.outcome for row in rows] == [Outcome.OOM, Outcome.OOM, Outcome.OK]
    assert all(row.reused for row in rows)
    assert session.prober.num_probes == 3
    recipe = session.summary().recipe
    assert (
        recipe is not None and recipe.baseline is not None and recipe.baseline.config == baseline(2)
    )
