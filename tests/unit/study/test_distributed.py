"""Several workers on one study, in threads, on recorded answers: nothing twice, nothing lost, the
total kept.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult
from autotune.problem.search_space import SearchSpace
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.loop import Study
from autotune.study.optimizer import Optimizer
from autotune.study.storage.leases import Leases, Worker
from autotune.study.storage.optuna_storage import opened_storage
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.storage.study_record import Limits
from tests.helpers.replay import ReplayProber, machine
from tests.helpers.sessions import BASELINE, by_tokens, space, subject_of

WIDE = space(
    micro_batch_size=(1, 2, 4, 8),
    seq_len=(128, 256),
    lora_rank=(16,),
    checkpointing=("none", "every_2", "full"),
    optimizer=("adamw_torch_fused", "adamw_8bit"),
)
# For what a worker makes of what it read, where other tests have tried the same operations on both
# databases.
SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@dataclass(frozen=True)
class Member:
    study: Study
    prober: ReplayProber
    search: Optimizer
    store: ProbeStore
    coordinator: Leases


Join = Callable[..., Member]


def slowly(request: ProbeRequest) -> ProbeResult:
    time.sleep(0.01)
    return machine(rate=by_tokens, limit_gib=100.0)(request)


@pytest.fixture
def join(database: str, tmp_path: Path) -> Iterator[Join]:
    """A worker of the study; the first begins it.

    All are of one process, so that names tell them apart.
    """
    members = list[Member]()

    def start(answers: Any = slowly, space: SearchSpace = WIDE, **limits: Any) -> Member:
        task = subject_of(space)
        number = len(members)
        me = replace(Worker.this_process("replay"), realm=f"machine {number}", pid=number + 1)
        prober, store = ReplayProber(answers), ProbeStore(database)
        search = Optimizer.create(database, "one", space, seed=number)

        def request(config: Any) -> ProbeRequest:
            return ProbeRequest(config=config, model=task.model.config, memory_gib=100.0)

        evaluator = Evaluator(prober, store, study="one", logs=tmp_path, request=request)
        coordinator = opened.enter_context(Leases(database, "one", me).join())
        trials = SharedTrials(
            task=task,
            optimizer=search,
            evaluator=evaluator,
            limits=Limits(**({"budget_s": 1e6, "patience": 1000} | limits)),
            started=time.monotonic(),
            coordinator=coordinator,
            new_rows=lambda: store.new_rows("one"),
        )
        trials.resume(store.probes_of_study("one"))
        if not number:
            trials.begin([BASELINE])
        members.append(Member(Study(trials), prober, search, store, coordinator))
        return members[-1]

    with ExitStack() as opened:
        yield start
    for one in members:
        one.search.close()
        one.store.close()


def together(members: list[Member]) -> None:
    """The first leads, the others help; each in a thread of its own."""
    errors: list[BaseException] = []

    def run(place: int, member: Member) -> None:
        try:
            if place:
                member.study.work(lambda: False)
            else:
                member.study.run()
                member.study.trials.sync(reap=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=one) for one in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors and not any(thread.is_alive() for thread in threads)


def states(database: str) -> Counter[TrialState]:
    with opened_storage(database) as storage:
        return Counter(
            one.state for one in optuna.load_study(storage=storage, study_name="one").trials
        )


def test_together_they_try_as_many_as_one_would_and_nothing_twice(
    join: Join, database: str
) -> None:
    coordinator = [join(trials=16) for _ in range(3)]
    together(coordinator)
    reported = states(database)
    assert (
        reported[TrialState.COMPLETE] + reported[TrialState.PRUNED] == 16
        and not reported[TrialState.RUNNING]
    )
    probed = Counter(config.digest for one in coordinator for config in one.prober.configs)
    assert (
        set(probed.values()) == {1} and sum(bool(one.prober.num_probes) for one in coordinator) > 1
    )
    assert coordinator[0].coordinator.leased_digests() == set()
    # Whoever leads knows all of them, each once, and what the others measured can win.
    numbers = [row.number for row in coordinator[0].study.trials.rows]
    assert len(numbers) == len(set(numbers)) == 16
    best = max(row.tokens_per_second or 0.0 for row in coordinator[0].study.trials.rows)
    assert max(one.score for one in coordinator[0].study.trials.selection.pool()) == pytest.approx(
        best
    )


@SQLITE
def test_what_one_ran_out_with_is_refused_to_the_other(join: Join) -> None:
    narrow = machine(rate=by_tokens, limit_gib=2.2)
    first, second = join(narrow), join(narrow)
    large = {"micro_batch_size": 8, "seq_len": 256, "lora_rank": 16, "checkpointing": "none"}
    first.study.trials.run_one(None, large | {"optimizer": "adamw_8bit"})
    assert first.study.trials.rows[-1].outcome is Outcome.OOM
    row = second.study.trials.run_one(None, large | {"optimizer": "adamw_torch_fused"})
    assert row is not None and row.outcome is Outcome.REFUSED and second.prober.num_probes == 0


def test_the_trial_that_another_is_just_beginning_is_waited_for(join: Join) -> None:
    first, second = join(), join()
    first.study.trials.run_one(None)
    assert not first.study.trials.await_others()
    second.search.ask(worker=second.coordinator.name)  # it has no lease yet
    assert first.coordinator.leased_digests() == set() and first.study.trials.await_others()


@pytest.mark.parametrize(
    "limits", [{}, {"trials": 2}], ids=["its choice is taken", "all trials are taken"]
)
def test_who_got_nothing_since_another_was_at_it_asks_again(
    join: Join, limits: dict[str, int]
) -> None:
    """By the time it looks who is still at work, the other may have finished: that does not mean
    that all is done.
    """
    first, second = join(**limits), join(**limits)
    first.study.trials.run_one(None)
    wanted = WIDE.clip(replace(BASELINE, micro_batch_size=4))
    asked = first.study.trials.ask(wanted)
    assert asked is not None and second.study.trials.run_one(None, wanted) is None
    first.study.trials.record(
        asked, first.study.trials.evaluator.evaluate(asked.config, asked.number)
    )
    assert second.study.trials.await_others()
    assert not second.study.trials.await_others()  # it has not met anybody since


def test_what_another_is_at_is_left_to_it(join: Join) -> None:
    first, second = join(), join()
    wanted = WIDE.clip(BASELINE)
    asked = first.study.trials.ask(wanted)
    assert asked is not None and second.study.trials.ask(wanted) is None
    # the queue holds it too, and something else is taken
    assert second.study.trials.run_one(None) is not None
    assert asked.config.digest not in {row.config.digest for row in second.study.trials.rows}


def test_what_a_worker_that_is_gone_had_begun_is_done_by_another(
    join: Join, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = join(trials=6), join(trials=6)
    asked = second.study.trials.ask()
    reported = second.study.trials.ask()
    assert asked is not None and reported is not None
    # stored, and not reported
    second.study.trials.evaluator.evaluate(reported.config, reported.number)
    first.coordinator.forget(second.coordinator.name)
    monkeypatch.setattr(first.coordinator, "workers", lambda: {first.coordinator.name})
    first.study.trials.sync(reap=True)
    after = states(database)
    assert after[TrialState.RUNNING] == 0 and after[TrialState.FAIL] == 1
    assert after[TrialState.COMPLETE] == 1  # what it had stored counts, and is not probed again
    assert [row.number for row in first.study.trials.rows] == [reported.number]
    first.study.run()
    assert {asked.config.digest, reported.config.digest} <= {
        row.config.digest for row in first.study.trials.rows
    }
    assert reported.config.digest not in {config.digest for config in first.prober.configs}
    # It had only been stopped: what it found out late is kept, and its trial is not reported twice.
    second.study.trials.record(
        asked, second.study.trials.evaluator.evaluate(asked.config, asked.number)
    )
    assert states(database)[TrialState.RUNNING] == 0
    # another has done it since
    assert asked.number not in {row.number for row in second.study.trials.rows}
    assert second.study.trials.selection.record(asked.config).measured


@SQLITE
def test_who_helps_ends_once_everything_was_tried(join: Join, database: str) -> None:
    small = space(
        micro_batch_size=(1, 2, 4),
        seq_len=(256,),
        lora_rank=(16,),
        checkpointing=("none", "every_2", "full"),
    )
    leader, helper = join(space=small), join(space=small)
    leader.study.trials.run_one(None)
    helper.study.work(lambda: states(database)[TrialState.COMPLETE] > 50)
    tried = states(database)[TrialState.COMPLETE]
    assert tried < 40 and len({row.config.digest for row in helper.study.trials.rows}) == 9


@SQLITE
def test_who_helps_keeps_to_the_rank_that_the_leader_holds(join: Join, database: str) -> None:
    ranks = space(
        micro_batch_size=(1, 2, 4, 8),
        seq_len=(256,),
        lora_rank=(16, 32, 64),
        checkpointing=("none", "full"),
    )
    leader, helper = join(space=ranks), join(space=ranks)
    leader.study.trials.run_one(None)
    helper.study.work(lambda: states(database)[TrialState.COMPLETE] >= 7)
    tried = [row.config.lora_rank for row in helper.study.trials.rows]
    assert tried == [BASELINE.lora_rank] * 7
    assert helper.study.trials.rank == BASELINE.lora_rank


def test_at_the_limit_nobody_begins_what_would_be_too_much(join: Join, database: str) -> None:
    first, second = join(trials=1), join(trials=1)
    asked = first.study.trials.ask()
    assert asked is not None
    second.search.enqueue(WIDE.clip(BASELINE))
    for _ in range(3):
        assert second.study.trials.ask() is None
    assert second.search.is_waiting() and states(database)[TrialState.FAIL] == 0
    first.study.trials.record(
        asked, first.study.trials.evaluator.evaluate(asked.config, asked.number)
    )
    second.study.trials.sync()
    assert second.study.trials.is_done() and [row.number for row in second.study.trials.rows] == [
        asked.number
    ]


def test_a_result_whose_trial_was_given_back_is_no_trial(join: Join) -> None:
    first, second = join(), join()
    asked = second.study.trials.ask()
    assert asked is not None
    assert first.search.give_back(asked.number)
    second.study.trials.record(
        asked, second.study.trials.evaluator.evaluate(asked.config, asked.number)
    )
    first.study.trials.sync()
    assert asked.number not in {row.number for row in first.study.trials.rows}
    # the queue holds it again, and what was found out late answers it
    first.study.trials.run_one(None)
    assert first.study.trials.rows[-1].config == asked.config and first.study.trials.rows[-1].reused


def test_a_trial_whose_result_is_stored_again_is_known_once(join: Join) -> None:
    """The second answer takes no time, as it was known already, and is heard of instead of the
    first.
    """
    first, second = join(), join()
    row = second.study.trials.run_one(None)
    assert row is not None
    first.study.trials.sync()
    assert [(one.number, one.seconds) for one in first.study.trials.rows] == [(row.number, 3.0)]
    assert second.study.trials.evaluator.evaluate(row.config, row.number).reused
    first.study.trials.sync()
    assert [(one.number, one.seconds) for one in first.study.trials.rows] == [(row.number, 0.0)]


@SQLITE
def test_who_helps_ends_when_the_study_does(join: Join) -> None:
    leader, helper = join(), join()
    leader.study.trials.run_one(None)
    over = iter([False, False, True])
    helper.study.work(lambda: next(over, True))
    assert len(helper.study.trials.rows) == 3  # one was heard of


@SQLITE
def test_a_helper_closes_the_queue_after_the_end(join: Join) -> None:
    """It may give its trial back after the leader closed the queue."""
    helper = join()
    helper.search.enqueue(WIDE.clip(BASELINE))
    helper.study.work(lambda: True)
    assert not helper.search.has_unfinished()


def test_what_is_queued_is_handed_to_one(database: str) -> None:
    coordinator = [Optimizer.create(database, "one", WIDE, seed=number) for number in range(4)]
    handed: list[int] = []
    for size in (1, 2, 4, 8):
        for seq_len in (128, 256):
            coordinator[0].enqueue(
                WIDE.clip(replace(BASELINE, micro_batch_size=size, seq_len=seq_len))
            )
    start = threading.Barrier(len(coordinator))

    def ask(search: Optimizer) -> None:
        for _ in range(2):
            start.wait(timeout=60)
            handed.append(search.ask().number)

    threads = [threading.Thread(target=ask, args=(one,)) for one in coordinator]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for one in coordinator:
        one.close()
    assert sorted(handed) == list(range(8))


@SQLITE
def test_every_fifteen_seconds_the_trials_of_the_dead_are_settled(
    join: Join, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = join(), join()
    said, now, trials = list[str](), [100.0], first.study.trials
    trials.say, trials.clock = said.append, lambda: now[0]
    trials.sync()
    assert second.study.trials.ask() is not None
    first.coordinator.forget(second.coordinator.name)
    monkeypatch.setattr(first.coordinator, "workers", lambda: {first.coordinator.name})
    now[0] = 114.9
    trials.sync()
    assert states(database)[TrialState.RUNNING] == 1 and said == []
    now[0] = 115.0
    trials.sync()
    assert states(database)[TrialState.RUNNING] == 0
    assert said == ["trials of a worker that died, queued again: 1"]


@SQLITE
def test_what_others_found_is_heard_of_and_is_not_this_workers_patience(join: Join) -> None:
    first, second = join(), join()
    heard = list[tuple[int, float]]()
    first.study.trials.on_trial_of_others = lambda row: heard.append((row.number, row.seconds))
    wanted = {"micro_batch_size": 8, "seq_len": 256, "lora_rank": 16, "optimizer": "adamw_8bit"}
    found = [
        second.study.trials.run_one(None, wanted | {"checkpointing": how})
        for how in ("none", "full")
    ]
    first.study.trials.sync()
    assert heard == [(row.number, 3.0) for row in found if row is not None] and len(heard) == 2
    assert (first.study.trials.num_stale(), second.study.trials.num_stale()) == (0, 1)
