"""Sessions that are cut off, and what a study stands on before it searches."""

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
from autotune.study.feasibility import find_feasible
from autotune.study.summary import TrialRecord
from tests.helpers.factories import result
from tests.helpers.replay import machine
from tests.helpers.sessions import BASELINE, SPACE, Session, Start, by_tokens, space, states, subject_of, whole

# Sessions that are cut off

TOTAL = 6


def cut_off(session: Session, step: str) -> TrainConfig:
    """Two trials, and a third whose session is gone at a given step. A killed process runs no clean-up either."""
    session.study.trials.limits = replace(session.study.trials.limits, trials=2)
    session.study.run()
    if step == "told":

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


@pytest.mark.parametrize("step", ["asked", "stored", "told"])
def test_nothing_is_lost_wherever_a_session_is_killed(start_anywhere: Start, database: str, step: str) -> None:
    first = start_anywhere(begin=[BASELINE])
    config = cut_off(first, step)
    second = start_anywhere(trials=TOTAL)
    assert len(second.study.trials.rows) == (2 if step == "asked" else 3)
    second.study.run()
    rows = second.study.trials.rows
    assert len(rows) == TOTAL
    assert rows[: len(first.study.trials.rows)] == first.study.trials.rows
    assert config in [row.config for row in rows[:4]]
    # Nothing that was stored is launched a second time; what was only asked for is.
    assert (config in second.prober.configs) is (step == "asked")
    launched = first.prober.configs + second.prober.configs
    assert len(launched) == len({one.digest for one in launched})
    found = states(database)
    assert TrialState.RUNNING not in found and TrialState.WAITING not in found
    assert sum(state in (TrialState.COMPLETE, TrialState.PRUNED) for state in found) == TOTAL
    assert found.count(TrialState.FAIL) == (1 if step == "asked" else 0)
    second.study.confirm()
    assert second.summary().recipe is not None


def test_an_oom_that_was_stored_but_not_told_refuses_in_the_next_session(start: Start) -> None:
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
    return {digest for digest, record in session.study.trials.selection.records.items() if record.confirmed}


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
    found = states(f"sqlite:///{tmp_path / 'autotune.db'}")
    assert found.count(TrialState.FAIL) == 1 and found.count(TrialState.WAITING) == 1
    second = start(trials=TOTAL)
    second.study.run()
    assert second.study.trials.rows[2].config == asked[2]
    assert len(second.study.trials.rows) == TOTAL
    assert TrialState.RUNNING not in states(f"sqlite:///{tmp_path / 'autotune.db'}")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_unexpected_error_leaves_no_running_trial(start: Start, tmp_path: Path, error: type[BaseException]) -> None:
    def broken(request: ProbeRequest) -> ProbeResult:
        raise error("surprise")

    session = start(broken, trials=TOTAL)
    with pytest.raises(error, match="surprise"):
        session.study.run()
    assert TrialState.RUNNING not in states(f"sqlite:///{tmp_path / 'autotune.db'}")
    again = start(trials=TOTAL)
    again.study.run()
    assert len(again.study.trials.rows) == TOTAL


def test_a_sick_machine_ends_the_session_and_a_healthy_one_goes_on(start: Start) -> None:
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


# Footing


def footing(
    start: Start, limit_gib: float, task: Task, reserve: SearchSpace | None = None
) -> tuple[bool, list[TrainConfig], Session]:
    session = start(machine(limit_gib=limit_gib), task=task)
    opened, tried = find_feasible(task, reserve or task.space, session.evaluator, session.said.append)
    return opened, tried, session


FOOTING = space(micro_batch_size=(1, 2, 4, 8), seq_len=(256, 1024), lora_rank=(16,), checkpointing=("none", "full"))


def baseline(micro_batch_size: int, **changes: Any) -> TrainConfig:
    return TrainConfig(**({"micro_batch_size": micro_batch_size, "seq_len": 1024} | changes))


def test_the_baseline_fits(start: Start) -> None:
    opened, tried, session = footing(start, 100.0, subject_of(FOOTING))
    assert (opened, tried) == (False, [baseline(8)])
    assert session.prober.configs == tried and session.prober.logs == ["settle.log"]


def test_the_baseline_is_halved_until_it_fits(start: Start) -> None:
    opened, tried, session = footing(start, 2.1, subject_of(FOOTING))
    assert (opened, tried) == (False, [baseline(8), baseline(4), baseline(2)])
    assert session.prober.configs == tried


def test_then_the_leanest_of_the_space(start: Start) -> None:
    opened, tried, session = footing(start, 1.3, subject_of(FOOTING))
    assert not opened
    assert tried == [*map(baseline, (8, 4, 2, 1)), baseline(1, seq_len=256)]
    assert session.prober.configs == tried


def test_then_the_reserve_is_opened(start: Start) -> None:
    reserve = replace(FOOTING, knobs=(*FOOTING.knobs, Knob(name="quantization", values=("none", "nf4"))))
    opened, tried, session = footing(start, 0.5, subject_of(FOOTING), reserve)
    assert opened
    assert tried == [baseline(1, seq_len=256, quantization="nf4")]
    assert session.prober.configs[-1] == tried[0]


def test_nothing_fits_and_the_least_need_is_told(start: Start) -> None:
    reserve = replace(FOOTING, knobs=(*FOOTING.knobs, Knob(name="quantization", values=("none", "nf4"))))
    with pytest.raises(NothingFits) as caught:
        footing(start, 0.25, subject_of(FOOTING), reserve)
    assert caught.value.exit_code == 4
    text = str(caught.value)
    # 0.25 GiB in 4 bits and 0.125 for 256 tokens with every layer recomputed
    assert "0.38 GiB" in text and "0.25 GiB" in text
    assert baseline(1, seq_len=256, quantization="nf4").label() in text
    assert "larger GPU" in (caught.value.remedy or "")


def test_a_crash_is_no_proof_that_it_does_not_fit(start: Start) -> None:
    session = start(lambda request: result(outcome=Outcome.CRASH), task=subject_of(FOOTING))
    assert find_feasible(subject_of(FOOTING), FOOTING, session.evaluator, print) == (False, [baseline(8)])


def test_a_stop_meanwhile_gets_through(start: Start) -> None:
    def cancel(request: ProbeRequest) -> ProbeResult:
        raise Cancelled

    session = start(cancel, task=subject_of(FOOTING))
    with pytest.raises(Cancelled):
        find_feasible(subject_of(FOOTING), FOOTING, session.evaluator, print)


def test_the_footing_is_the_first_trials_and_is_not_probed_twice(start: Start) -> None:
    task = subject_of(FOOTING)
    _, tried, session = footing(start, 2.1, task)
    session.study.trials.begin(tried)
    session.study.trials.limits = replace(session.study.trials.limits, trials=3)
    session.study.run()
    rows = session.study.trials.rows
    assert [row.config for row in rows] == tried
    assert [row.outcome for row in rows] == [Outcome.OOM, Outcome.OOM, Outcome.OK]
    assert all(row.reused for row in rows)
    assert session.prober.num_probes == 3
    recipe = session.summary().recipe
    assert recipe is not None and recipe.baseline is not None and recipe.baseline.config == baseline(2)
