"""What fails for reasons other than the device's memory: when a study gives up, and what it keeps
of its numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import NothingFits, TooManyFailures
from autotune.core.probe_types import MicroBatch, Outcome, Phase, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import CONTEXT_GIB, MemoryBreakdown
from autotune.study.evaluator import Evaluator
from autotune.study.feasibility import Feasible, find_feasible, nothing_fits
from autotune.study.selection import Selection
from autotune.study.storage.probe_store import ProbeStore
from tests.helpers.factories import FINGERPRINT, add_measured, measurement, oom_detail, result
from tests.helpers.layered import SHAPE, layered
from tests.helpers.replay import ReplayProber, machine, need_gib
from tests.helpers.sessions import BASELINE, SPACE, Start, by_tokens, subject_of

BASE = TrainConfig(seq_len=256, checkpointing="none")
Session = Callable[..., tuple[Evaluator, ReplayProber]]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    opened = []

    def start(
        answers: Callable[[ProbeRequest], ProbeResult],
        micro_batches: Callable[[TrainConfig], tuple[MicroBatch, ...]] = lambda config: (),
    ) -> tuple[Evaluator, ReplayProber]:
        prober, store = (
            ReplayProber(answers, shape=SHAPE),
            ProbeStore(f"sqlite:///{tmp_path / 'autotune.db'}"),
        )
        opened.append(store)

        def request(config: TrainConfig) -> ProbeRequest:
            return ProbeRequest(
                config=config, model={}, memory_gib=100.0, micro_batches=micro_batches(config)
            )

        return Evaluator(
            prober,
            store,
            study="one",
            logs=tmp_path / "logs",
            request=request,
            model="m",
            shape=SHAPE,
        ), prober

    yield start
    for store in opened:
        store.close()


def of_rank(rank: int) -> TrainConfig:
    return replace(BASE, lora_rank=rank)


def never(config: TrainConfig, predicted: Any) -> str:
    return "it cannot win"


def test_failures_with_others_between_them_are_not_in_a_row(session: Session) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        crashes = (request.config.lora_rank or 0) % 2 == 0
        return result(outcome=Outcome.CRASH, reason="no kernel") if crashes else layered()(request)

    evaluator, _ = session(answer)
    for rank in range(2, 12):
        expected = Outcome.CRASH if rank % 2 == 0 else Outcome.SLOW
        assert evaluator.evaluate(of_rank(rank), rank, never).result.outcome is expected
    for rank in (12, 14):
        evaluator.evaluate(of_rank(rank), rank, never)
    with pytest.raises(TooManyFailures, match="3 probes in a row"):
        evaluator.evaluate(of_rank(16), 16, never)


def test_probes_that_are_fine_while_truncated_do_not_hide_that_whole_models_fail(
    session: Session,
) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        return (
            result(outcome=Outcome.CRASH, reason="disk")
            if request.depth is None
            else layered()(request)
        )

    evaluator, _ = session(answer)
    for rank in (1, 2):
        evaluator.evaluate(of_rank(rank), rank, lambda config, predicted: None)
    with pytest.raises(TooManyFailures):
        evaluator.evaluate(of_rank(3), 3, lambda config, predicted: None)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_rows_of_other_data_tell_nothing_of_time(session: Session, packed: bool) -> None:
    """They took half as long for as many tokens: everything like them would be predicted that much
    faster.
    """
    asked = replace(BASE, packing=packed)

    def of(*examples: int) -> tuple[MicroBatch, ...]:
        return (MicroBatch(rows=(examples,), length=256, share=1.0),)

    others, _ = session(layered(lambda config: 2000.0), lambda config: of(256))
    others.evaluate(asked, 0)
    evaluator, prober = session(layered(), lambda config: of(100, 156) if packed else of(100))
    evaluator.learn_from_others()
    verdict = evaluator.evaluate(asked, 1, never)
    assert [request.depth for request in prober.requests] == [2, 8]  # nothing was known
    assert verdict.result.measurement is not None
    micro_s = asked.tokens / 1000.0
    assert verdict.result.measurement.micro_step_s[0] == pytest.approx(micro_s, rel=0.01)


@pytest.mark.parametrize(("held_gib", "refused"), [(20.0, False), (99.0, True)])
def test_when_the_host_runs_out_of_memory_the_device_does_not(
    session: Session, held_gib: float, refused: bool
) -> None:
    detail = replace(oom_detail(), allocated_gib=held_gib, requested_gib=None, limit_gib=95.0)
    evaluator, _ = session(lambda request: result(outcome=Outcome.OOM, oom=detail))
    evaluator.evaluate(replace(BASE, checkpointing="offload"), 0)
    verdict = evaluator.evaluate(replace(BASE, checkpointing="full"), 1)
    assert (verdict.result.outcome is Outcome.REFUSED) is refused


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.CRASH, Outcome.OOM])
def test_a_baseline_that_failed_once_does_not_make_the_winner_look_better(outcome: Outcome) -> None:
    """One that ran out of memory is no baseline: the next smaller one is."""
    selection = Selection(subject_of())
    smaller = replace(BASELINE, micro_batch_size=4)
    for config, micro_s in (
        (BASELINE, 1.0),
        (smaller, 0.75),
        (replace(BASELINE, checkpointing="none"), 0.7),
    ):
        add_measured(selection, config, measurement(micro_s))
    selection.reject(BASELINE, "it took too long", fits=outcome is not Outcome.OOM)
    assert selection.baseline() == (smaller if outcome is Outcome.OOM else BASELINE)
    assert BASELINE not in selection.finalists(10)
    assert BASELINE not in [one.config for one in selection.pool()]


def flaky(times: int) -> Callable[[ProbeRequest], ProbeResult]:
    """A device on which the baseline times out so often at first."""
    left, fine = [times], machine(rate=by_tokens, limit_gib=100.0)

    def answer(request: ProbeRequest) -> ProbeResult:
        if request.config == BASELINE and left[0]:
            left[0] -= 1
            return result(outcome=Outcome.TIMEOUT, reason="a neighbour")
        return fine(request)

    return answer


def test_a_baseline_that_fails_is_tried_once_more(start: Start) -> None:
    session = start(flaky(1))
    assert find_feasible(subject_of(), SPACE, session.evaluator, session.said.append) == Feasible(
        tried=[BASELINE]
    )
    assert session.prober.configs == [BASELINE, BASELINE]


@pytest.mark.parametrize(
    ("limit_gib", "too_high", "tried", "probed"),
    [(1.1, 0.8, [2, 8, 4], [2, 4]), (2.4, 1.8, [2, 8], [2, 8]), (2.4, 1.0, [8], [8])],
    ids=["8 is refused", "8 fits after all", "8 should fit"],
)
def test_a_baseline_that_should_not_fit_is_tried_after_one_that_does(
    start: Start, limit_gib: float, too_high: float, tried: list[int], probed: list[int]
) -> None:
    """Micro batches of 8, 4 and 2 rows need 2, 1.5 and 1.25 GiB; the formula says so many times as
    much.

    There is more than the limit says, since no context takes it: in the first case 4 surely fits,
    as 2 shows.
    """
    session, parts = (
        start(layered()),
        ("adapters", "gradients", "optimizer", "activations", "logits"),
    )
    none = dict.fromkeys((*parts, "workspace", "reserved"), 0.0)
    session.evaluator.formula = lambda config, micro_steps: MemoryBreakdown(
        weights=too_high * need_gib(config), phase=Phase.BACKWARD, **none
    )
    asked = session.evaluator.request
    memory_gib = (limit_gib + CONTEXT_GIB) / 0.95
    session.evaluator.request = lambda config: replace(
        asked(config), memory_gib=memory_gib, headroom=0.05
    )
    found = find_feasible(subject_of(), SPACE, session.evaluator, session.said.append)
    assert not found.opens_reserve and [config.micro_batch_size for config in found.tried] == tried
    assert [config.micro_batch_size for config in session.prober.configs] == probed


def test_a_baseline_that_always_fails_does_not_end_the_study(start: Start) -> None:
    session = start(flaky(99), trials=8)
    tried = find_feasible(subject_of(), SPACE, session.evaluator, session.said.append).tried
    session.study.trials.begin(tried)
    session.study.run()
    assert len(session.study.trials.rows) == 8 and session.study.trials.best() is not None


def test_the_leanest_configuration_is_announced_where_the_baseline_does_not_fit(
    start: Start,
) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        if request.config in subject_of().baselines:
            return result(request.config, outcome=Outcome.OOM, oom=oom_detail())
        return by_tokens(request)

    session = start(answer, trials=8)
    task = subject_of()
    found = find_feasible(task, SPACE, session.evaluator, session.said.append)
    assert isinstance(found.problem, NothingFits)  # it is a baseline too
    lean = task.space.config(task.space.leanest())
    assert session.said[-1] == (
        "the baseline does not fit; trying the configuration that needs the least memory: "
        f"{lean.label()}"
    )


def test_a_baseline_that_comes_through_after_all_may_win() -> None:
    selection = Selection(subject_of())
    add_measured(selection, BASELINE, measurement(0.5))
    selection.reject(BASELINE, "a neighbour", fits=True)
    assert selection.finalists(1) == []
    selection.confirm(BASELINE, measurement(0.5))
    assert selection.finalists(1) == [BASELINE] == [selection.leader()]


def test_probes_of_another_global_batch_are_no_question_of_this_study(tmp_path: Path) -> None:
    """Eight rows do not divide a batch of four: what asks for them here raises, and nobody does."""
    store = ProbeStore(f"sqlite:///{tmp_path / 'autotune.db'}")
    made = machine()(ProbeRequest(config=BASE, model={}, memory_gib=100.0))
    store.add("other", 0, made, FINGERPRINT, model="m")

    def refuse(config: TrainConfig) -> ProbeRequest:
        raise ValueError("micro batch 8 does not divide the global batch 4")

    Evaluator(
        ReplayProber(machine()), store, study="one", logs=tmp_path, request=refuse, model="m"
    ).learn_from_others()
    store.close()


def test_the_climb_begins_once_anything_succeeded(start: Start) -> None:
    session = start(flaky(5), begin=[BASELINE], trials=12)
    session.study.run()
    assert session.study.trials.exempt


def test_what_was_climbed_does_not_count_as_patience_when_continued(start: Start) -> None:
    first = start(machine(rate=by_tokens, limit_gib=100.0), begin=[BASELINE], trials=6)
    first.study.run()
    second = start(machine(rate=by_tokens, limit_gib=100.0))
    assert second.study.trials.exempt == first.study.trials.exempt != set()
    assert second.study.trials.num_stale() == first.study.trials.num_stale()


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, "more than 133.0 GiB (allocated when memory ran out) of the 132.0 GiB available"),
        (
            {"oom": replace(oom_detail(), requested_gib=None)},
            "more than 131.0 GiB (allocated when memory ran out) of the 132.0 GiB available",
        ),
        (
            {"measurement": measurement(0.5)},  # four of them and 0.02 s for 32 rows of 256 tokens
            "133.0 GiB of the 132.0 GiB available (extrapolated from a few layers); it would train"
            " 4,055 tokens/s here "
            "if it fitted",
        ),
        ({"oom": None}, "more memory than is available"),
    ],
)
def test_where_nothing_fits_the_least_need_is_said(changes: dict[str, Any], needs: str) -> None:
    error = nothing_fits(result(BASELINE, Outcome.OOM, **changes), subject_of())
    assert str(error) == (
        "nothing in the search space fits: even the configuration that needs the least memory,"
        f" {BASELINE.label()}, needs {needs}"
    )
    assert error.remedy
