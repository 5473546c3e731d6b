"""Whole studies with shallow probes: the same winner for less, what Optuna receives, and what
selection makes of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from autotune.core.probe_types import Evidence, ModelShape, Outcome, ProbeRequest, ProbeResult, Rung
from autotune.core.train_config import TrainConfig
from autotune.problem.constraints import Floors
from autotune.problem.task import Task
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.loop import Study
from autotune.study.optimizer import Optimizer
from autotune.study.selection import Selection
from autotune.study.storage.optuna_storage import opened_storage
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.storage.study_record import Limits
from tests.helpers.factories import add_measured, measurement, result
from tests.helpers.layered import FULL_S, SHAPE, SHORT_S, Answer, asked, layered
from tests.helpers.memory_study import keep_studies_in_memory
from tests.helpers.replay import ReplayProber
from tests.helpers.sessions import BASELINE, Session, by_tokens, space, subject_of

SPACE = space(
    micro_batch_size=(4, 8), seq_len=(256,), lora_rank=(16, 32), checkpointing=("none", "full")
)
Open = Callable[..., Session]
Finished = tuple[Session, Session, list[FrozenTrial]]


def opener(folder: Path, opened: list[Any]) -> Open:
    def start(
        answers: Answer,
        *,
        name: str = "study",
        task: Task | None = None,
        shape: ModelShape | None = SHAPE,
        shallow_only: bool = False,
        limit_gib: float = 4.0,
        clock: Callable[[], float] = lambda: 0.0,
        **limits: Any,
    ) -> Session:
        """A session of the study 'one' in the database `name`, the baseline in its queue."""
        task, url = task or subject_of(SPACE), f"sqlite:///{folder / name}.db"
        prober, store = ReplayProber(answers, shape=shape), ProbeStore(url)
        search = Optimizer.create(url, "one", task.space, seed=0)
        opened.extend((store, search))

        def request(config: TrainConfig) -> ProbeRequest:
            return ProbeRequest(config=config, model={}, memory_gib=limit_gib / 0.95)

        more: dict[str, Any] = {"shape": shape, "shallow_only": shallow_only}
        evaluator = Evaluator(
            prober, store, study="one", logs=folder / "logs", request=request, **more
        )
        trials = SharedTrials(
            task=task,
            optimizer=search,
            evaluator=evaluator,
            limits=Limits(**({"budget_s": 1e6} | limits)),
            started=0.0,
            clock=clock,
        )
        trials.resume(store.probes_of_study("one"))
        if not search.is_waiting():
            trials.begin([BASELINE])
        return Session(
            study=Study(trials),
            prober=prober,
            search=search,
            evaluator=evaluator,
            store=store,
            said=[],
        )

    return start


@pytest.fixture
def open_stored(tmp_path: Path) -> Iterator[Open]:
    opened: list[Any] = []
    yield opener(tmp_path, opened)
    for one in opened:
        one.close()


@pytest.fixture
def open_study(open_stored: Open, monkeypatch: pytest.MonkeyPatch) -> Open:
    keep_studies_in_memory(monkeypatch)
    return open_stored


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """A study that tried the whole space, the session that came after it, and its trials as Optuna
    knows them.
    """
    folder, opened = tmp_path_factory.mktemp("finished"), list[Any]()
    start = opener(folder, opened)
    first = whole(start(layered(by_tokens, slower=1.03), patience=100, limit_gib=100.0))
    yield first, start(layered(by_tokens), limit_gib=100.0), trials(folder)
    for one in opened:
        one.close()


def whole(session: Session) -> Session:
    session.study.run()
    session.study.confirm()
    return session


def full_depth(session: Session) -> int:
    return sum(request.rung is Rung.FULL for request in session.prober.requests)


def trials(tmp_path: Path, name: str = "study") -> list[FrozenTrial]:
    with opened_storage(f"sqlite:///{tmp_path / name}.db") as storage:
        return optuna.load_study(storage=storage, study_name="one").trials


def test_the_winner_is_the_same_for_fewer_whole_models(
    open_study: Open, finished: Finished
) -> None:
    with_it = finished[0]
    without = whole(
        open_study(layered(by_tokens, slower=1.03), patience=100, limit_gib=100.0, shape=None)
    )
    assert with_it.winner() == without.winner()
    assert full_depth(with_it) < full_depth(without) == SPACE.size()
    assert {row.config for row in with_it.study.trials.rows} == {
        row.config for row in without.study.trials.rows
    }


def test_the_winner_is_the_same_where_memory_is_short(open_study: Open) -> None:
    answers = layered(by_tokens)
    with_it = whole(open_study(answers, trials=9, limit_gib=2.2))
    without = whole(open_study(answers, trials=9, limit_gib=2.2, shape=None, name="without"))
    assert with_it.winner() == without.winner()
    assert full_depth(with_it) < full_depth(without)


def test_who_leaves_more_memory_free_within_the_slack_wins_with_it_too(open_study: Open) -> None:
    two = subject_of(
        space(micro_batch_size=(4, 8), seq_len=(256,), lora_rank=(16,), checkpointing=("none",))
    )
    answers = layered(lambda config: 1000.0 if config.micro_batch_size == 8 else 970.0)
    with_it = whole(open_study(answers, task=two, limit_gib=3.2))
    without = whole(open_study(answers, task=two, limit_gib=3.2, shape=None, name="without"))
    assert without.winner().micro_batch_size == 4
    assert with_it.winner() == without.winner()


def test_what_was_slow_is_pruned_with_what_it_would_have_done(
    finished: Finished,
) -> None:
    session, _, found = finished
    slow = [row for row in session.study.trials.rows if row.outcome is Outcome.SLOW]
    assert slow
    for row in slow:
        trial = found[row.number]
        assert trial.state is TrialState.PRUNED
        assert trial.intermediate_values == pytest.approx({0: row.tokens_per_second})
        assert trial.constraints["memory"] < 0 and trial.constraints["health"] == 0
    best = session.study.trials.best()
    assert best is not None and all(
        (row.tokens_per_second or 0) < (best.tokens_per_second or 0) for row in slow
    )


def test_what_capability_costs_is_measured_on_whole_models(open_study: Open) -> None:
    session = open_study(layered(by_tokens), trials=6, limit_gib=100.0)
    session.study.run()
    raised = [
        request.depth for request in session.prober.requests if request.config.lora_rank == 32
    ]
    assert raised[:3] == [2, 8, None]


def test_the_sampler_stays_at_the_rank_of_the_climb(open_study: Open) -> None:
    """Though another is faster: its code would have to be compiled for every micro batch."""
    wide = subject_of(
        space(
            micro_batch_size=(1, 2, 4, 8),
            seq_len=(256,),
            lora_rank=(16, 32),
            checkpointing=("none", "full"),
        )
    )
    session = open_study(
        layered(lambda config: by_tokens(config) * (1.2 if config.lora_rank == 32 else 1.0)),
        task=wide,
        trials=9,
        limit_gib=100.0,
    )
    session.study.run()
    ranks = [row.config.lora_rank for row in session.study.trials.rows]
    assert session.study.trials.best().config.lora_rank == 32  # type: ignore[union-attr]
    assert set(ranks[ranks.index(32) + 1 : -1]) == {16}


def test_a_study_is_remembered_as_it_was(finished: Finished) -> None:
    first, again, _ = finished
    assert {row.outcome for row in first.study.trials.rows} == {Outcome.OK, Outcome.SLOW}
    assert again.summary().recipe == first.summary().recipe
    for then, now in zip(first.study.trials.rows, again.study.trials.rows, strict=True):
        assert now == then


def test_only_what_was_known_before_is_said_to_be_reused(
    finished: Finished,
) -> None:
    first = {row.config: row for row in reversed(finished[0].study.trials.rows)}
    assert len(first) == SPACE.size()
    assert [row.config.label() for row in first.values() if row.reused] == []


@pytest.mark.parametrize("depth", [8, None])
def test_a_session_that_was_killed_between_depths_reported_nothing_wrong(
    open_stored: Open, tmp_path: Path, depth: int | None
) -> None:
    class Killed(BaseException):
        pass

    def killed(request: ProbeRequest) -> ProbeResult:
        if request.depth == depth:
            raise Killed
        return layered()(request)

    first = open_stored(killed)
    cut_off = first.search.ask()
    with pytest.raises(Killed):
        first.evaluator.evaluate(cut_off.config, cut_off.number)
    second = open_stored(layered(), trials=1)
    assert second.study.trials.rows == []
    second.study.run()
    (row,) = second.study.trials.rows
    # it is the baseline
    assert (row.config, row.outcome, row.rung) == (cut_off.config, Outcome.OK, Rung.SHALLOW)
    assert asked(second.prober) == ([8] if depth == 8 else [])
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.FAIL, TrialState.COMPLETE]


@pytest.mark.parametrize("budget_s", [60.0, 200.0])
def test_the_budget_is_kept_to_within_one_configuration(open_study: Open, budget_s: float) -> None:
    now, answers = [0.0], layered(by_tokens)

    def takes_time(request: ProbeRequest) -> ProbeResult:
        answer = answers(request)
        now[0] += answer.seconds["total"]
        return answer

    whole(open_study(takes_time, clock=lambda: now[0], budget_s=budget_s, patience=100))
    assert now[0] <= budget_s + FULL_S + 2 * SHORT_S


# What the judge makes of it


def test_a_cell_just_behind_the_best_is_measured_in_the_end(open_study: Open) -> None:
    """The lesser rank is predicted to be 4 % slower: it cannot win, but readers will want to know
    what it costs.
    """
    two = subject_of(
        space(micro_batch_size=(8,), seq_len=(256,), lora_rank=(16, 32), checkpointing=("full",))
    )
    answers = layered(lambda config: 1000.0 if config.lora_rank == 32 else 960.0)
    first = open_study(answers, task=two)
    first.search.enqueue({"lora_rank": 32})
    session = whole(first)
    recipe = session.summary().recipe
    assert recipe is not None
    assert {cell.config.lora_rank: cell.evidence for cell in recipe.cells} == dict.fromkeys(
        (16, 32), Evidence.MEASURED
    )


def test_where_nothing_was_measured_what_was_predicted_wins_and_says_so(open_study: Open) -> None:
    session = open_study(layered(by_tokens), shallow_only=True, trials=10, limit_gib=100.0)
    session.study.run()
    assert full_depth(session) == 0
    recipe = session.summary().recipe
    assert recipe is not None and recipe.baseline is not None
    assert recipe.winner.evidence is recipe.baseline.evidence is Evidence.EXTRAPOLATED
    assert any("nothing was probed at full depth" in caveat for caveat in recipe.caveats)
    assert recipe.winner.config == replace(BASELINE, checkpointing="none")


def reported(selection: Selection, config: TrainConfig, micro_s: float, evidence: Evidence) -> None:
    outcome = Outcome.SLOW if evidence is Evidence.EXTRAPOLATED else Outcome.OK
    selection.add_result(
        result(config, outcome, evidence=evidence, measurement=measurement(micro_s))
    )


def test_what_was_measured_outranks_what_was_predicted() -> None:
    selection, slower = Selection(subject_of(SPACE)), replace(BASELINE, lora_rank=32)
    reported(selection, BASELINE, 1.0, Evidence.MEASURED)
    reported(selection, slower, 0.5, Evidence.EXTRAPOLATED)
    assert selection.finalists(5) == [BASELINE]  # only a measurement wins
    assert selection.close_calls() == [slower]
    assert selection.candidate(slower).evidence is Evidence.EXTRAPOLATED
    reported(selection, slower, 1.5, Evidence.MEASURED)
    assert selection.candidate(slower).evidence is Evidence.MEASURED
    assert selection.candidate(slower).measurement.micro_step_s[0] == 1.5
    assert selection.close_calls() == []


def test_only_the_best_of_a_cell_within_the_slack_is_a_close_call() -> None:
    selection = Selection(subject_of(SPACE, floors=Floors(slack=0.05)))
    assert selection.close_calls() == []
    reported(selection, BASELINE, 1.0, Evidence.MEASURED)
    near, far = (
        replace(BASELINE, lora_rank=32, checkpointing=checkpointing)
        for checkpointing in ("none", "full")
    )
    reported(selection, near, 1.04, Evidence.EXTRAPOLATED)
    reported(selection, far, 1.2, Evidence.EXTRAPOLATED)
    reported(
        selection, replace(BASELINE, checkpointing="none"), 1.01, Evidence.EXTRAPOLATED
    )  # its cell has a better one
    assert selection.close_calls() == [near]
    assert Selection(subject_of(SPACE)).close_calls() == []


def test_who_failed_to_confirm_does_not_come_back_as_predicted() -> None:
    selection, failed = Selection(subject_of(SPACE)), replace(BASELINE, lora_rank=32)
    reported(selection, BASELINE, 1.0, Evidence.MEASURED)
    reported(selection, failed, 1.01, Evidence.EXTRAPOLATED)
    add_measured(selection, failed, measurement(1.01))
    selection.reject(failed, "out of memory")
    assert failed not in selection.close_calls()
    recipe = selection.recipe(ReplayProber({}).fingerprint)
    assert recipe is not None and [cell.config for cell in recipe.cells] == [BASELINE]


def test_what_was_stopped_and_can_win_by_now_is_a_close_call() -> None:
    """What it had to beat was more capable, and has fallen out of the slack since: only the fastest
    is left.
    """
    selection = Selection(subject_of(SPACE))
    able, lean = replace(BASELINE, lora_rank=32), replace(BASELINE, optimizer="adamw_8bit")
    reported(selection, replace(lean, micro_batch_size=4), 0.5, Evidence.MEASURED)
    reported(selection, able, 1.04, Evidence.MEASURED)
    reported(selection, BASELINE, 1.01, Evidence.EXTRAPOLATED)
    assert selection.finalists(1) == [able]  # 4 % dearer than the fastest
    assert selection.close_calls() == []
    reported(selection, replace(lean, micro_batch_size=2), 0.24, Evidence.MEASURED)
    assert selection.finalists(1) == [replace(lean, micro_batch_size=2)]
    reported(selection, replace(BASELINE, micro_batch_size=1), 0.122, Evidence.EXTRAPOLATED)
    assert selection.close_calls() == [replace(BASELINE, micro_batch_size=1)]


def test_the_baseline_and_what_is_not_wanted_whole_stay_extrapolated(open_study: Open) -> None:
    made, other = (
        open_study(layered(by_tokens), limit_gib=100.0).study.trials,
        replace(BASELINE, checkpointing="none"),
    )
    evidence = []
    for config, wanted in ((BASELINE, True), (other, True), (replace(other, lora_rank=32), False)):
        proposal = made.ask(SPACE.clip(config))
        assert proposal is not None and proposal.config == config
        evidence.append(made.evaluate(proposal, None, whole=wanted).evidence)
    assert evidence == [Evidence.EXTRAPOLATED, Evidence.MEASURED, Evidence.EXTRAPOLATED]
