"""The rungs: the gate launches nothing, what is known is not probed again, and a sick machine is
noticed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import Cancelled, TooManyFailures
from autotune.core.probe_types import Fingerprint, Outcome, ProbeRequest, ProbeResult, Rung
from autotune.core.train_config import TrainConfig
from autotune.study.evaluator import Evaluator
from autotune.study.storage.probe_store import ProbeStore
from tests.helpers.factories import FINGERPRINT, result
from tests.helpers.replay import Answers, ReplayProber, machine

MIDDLE = TrainConfig(
    micro_batch_size=4, seq_len=512, lora_rank=16, checkpointing="every_2", optimizer="adamw_8bit"
)

Session = Callable[..., tuple[Evaluator, ReplayProber]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ProbeStore]:
    opened = ProbeStore(f"sqlite:///{tmp_path / 'autotune.db'}")
    yield opened
    opened.close()


@pytest.fixture
def session(store: ProbeStore, tmp_path: Path) -> Session:
    def start(
        answers: Answers,
        *,
        fingerprint: Fingerprint = FINGERPRINT,
        study: str = "one",
        memory_gib: float = 4.0,
    ) -> tuple[Evaluator, ReplayProber]:
        prober = ReplayProber(answers, fingerprint)

        def request(config: TrainConfig) -> ProbeRequest:
            return ProbeRequest(config=config, model={"model_type": "llama"}, memory_gib=memory_gib)

        return Evaluator(
            prober, store, study=study, logs=tmp_path / "logs", request=request
        ), prober

    return start


def only_oom(request: ProbeRequest) -> ProbeResult:
    return result(outcome=Outcome.OOM)


@pytest.mark.parametrize(
    "larger",
    [
        {"micro_batch_size": 8},
        {"seq_len": 1024},
        {"lora_rank": 32},
        {"checkpointing": "none"},
        {"checkpointing": "every_3"},
        {"optimizer": "adamw_torch_fused"},
        {"micro_batch_size": 8, "seq_len": 1024, "lora_rank": 64, "checkpointing": "none"},
    ],
    ids=str,
)
def test_what_is_larger_than_a_known_oom_is_refused_and_not_launched(
    session: Session, store: ProbeStore, larger: dict[str, Any]
) -> None:
    evaluator, prober = session(only_oom)
    evaluator.evaluate(MIDDLE, 3)
    verdict = evaluator.evaluate(replace(MIDDLE, **larger), 4)
    assert prober.configs == [MIDDLE]
    assert (verdict.result.outcome, verdict.result.rung, verdict.reused) == (
        Outcome.REFUSED,
        Rung.GATE,
        False,
    )
    reason = verdict.result.reason or ""
    assert "trial 3" in reason and MIDDLE.label() in reason
    assert verdict.result.oom == result(outcome=Outcome.OOM).oom
    assert [(row.trial, row.result) for row in store.probes_of_study("one")][-1] == (
        4,
        verdict.result,
    )
    assert verdict.seconds == 0.0


@pytest.mark.parametrize(
    "other",
    [
        {"micro_batch_size": 8, "seq_len": 256},
        {"micro_batch_size": 2, "lora_rank": 64},
        {"seq_len": 1024, "checkpointing": "full"},
        {"micro_batch_size": 64, "precision": "bf16_pure"},
        {"micro_batch_size": 64, "quantization": "nf4"},
        {"micro_batch_size": 64, "method": "full"},
        {"micro_batch_size": 64, "attention": "eager"},
        {"micro_batch_size": 64, "compile": "per_layer"},
        {"micro_batch_size": 64, "optimizer": "adafactor"},
        {"micro_batch_size": 64, "optimizer": "paged_adamw_8bit"},
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_tried(session: Session, other: dict[str, Any]) -> None:
    evaluator, prober = session(only_oom)
    evaluator.evaluate(MIDDLE, 3)
    config = replace(MIDDLE, **other)
    assert evaluator.evaluate(config, 4).result.outcome is Outcome.OOM
    assert prober.configs == [MIDDLE, config]


def test_an_oom_of_an_earlier_session_refuses_too(session: Session) -> None:
    evaluator, prober = session(machine())
    evaluator.learn(None, result(MIDDLE, Outcome.OOM))
    verdict = evaluator.evaluate(replace(MIDDLE, seq_len=2048), 0)
    assert verdict.result.outcome is Outcome.REFUSED
    assert "an earlier probe" in (verdict.result.reason or "")
    assert prober.num_probes == 0


def test_what_ran_out_on_another_node_refuses_nothing(session: Session) -> None:
    evaluator, prober = session(machine(limit_gib=100.0), memory_gib=140.0)
    evaluator.learn(None, result(MIDDLE, Outcome.OOM, rung=Rung.NODE))
    assert evaluator.evaluate(replace(MIDDLE, seq_len=2048), 0).result.outcome is Outcome.OK
    assert prober.num_probes == 1


def test_other_outcomes_refuse_nothing(session: Session) -> None:
    evaluator, prober = session(machine(limit_gib=100.0), memory_gib=140.0)
    for outcome in (Outcome.OK, Outcome.CRASH, Outcome.NUMERICS, Outcome.TIMEOUT):
        evaluator.learn(0, result(MIDDLE, outcome))
    assert evaluator.evaluate(replace(MIDDLE, seq_len=2048), 1).result.outcome is Outcome.OK
    assert prober.num_probes == 1


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.OOM, Outcome.NUMERICS])
def test_the_stored_answer_is_taken_across_sessions_and_studies(
    session: Session, outcome: Outcome
) -> None:
    first, _ = session(lambda request: result(outcome=outcome))
    stored = first.evaluate(MIDDLE, 0)
    again, prober = session(machine(), study="another")
    verdict = again.evaluate(MIDDLE, 7)
    assert verdict.reused and not stored.reused and verdict.seconds == 0.0
    assert not verdict.is_own and first.evaluate(MIDDLE, 1).is_own
    assert verdict.result == replace(stored.result, log=None)
    assert prober.num_probes == 0


def test_a_known_answer_gets_a_row_in_the_study_that_reuses_it(
    session: Session, store: ProbeStore
) -> None:
    session(machine())[0].evaluate(MIDDLE, 0)
    session(machine(), study="another")[0].evaluate(MIDDLE, 7)
    (row,) = store.probes_of_study("another")
    assert (row.trial, row.result.outcome) == (7, Outcome.OK)
    assert row.result.measurement is not None
    assert row.result.seconds == {}  # nothing was spent on it here


def test_a_stored_oom_refuses_what_is_larger(session: Session) -> None:
    first, _ = session(only_oom)
    first.evaluate(MIDDLE, 0)
    again, prober = session(machine(), study="another")
    again.evaluate(MIDDLE, 5)
    refused = again.evaluate(replace(MIDDLE, micro_batch_size=8), 6).result
    assert refused.outcome is Outcome.REFUSED and "trial 5" in (refused.reason or "")
    assert prober.num_probes == 0


@pytest.mark.parametrize(
    "changes",
    [{"fingerprint": replace(FINGERPRINT, driver="590.1")}, {"memory_gib": 5.0}],
    ids=["fingerprint", "memory"],
)
def test_other_circumstances_are_probed_again(session: Session, changes: dict[str, Any]) -> None:
    session(machine(limit_gib=100.0))[0].evaluate(MIDDLE, 0)
    evaluator, prober = session(machine(limit_gib=100.0), **changes)
    assert not evaluator.evaluate(MIDDLE, 0).reused
    assert prober.num_probes == 1


@pytest.mark.parametrize("outcome", [Outcome.CRASH, Outcome.TIMEOUT])
def test_a_failure_is_tried_again(session: Session, outcome: Outcome) -> None:
    session(lambda request: result(outcome=outcome))[0].evaluate(MIDDLE, 0)
    evaluator, prober = session(machine(limit_gib=100.0))
    assert evaluator.evaluate(MIDDLE, 1).result.outcome is Outcome.OK
    assert prober.num_probes == 1


def sizes(*numbers: int) -> list[TrainConfig]:
    return [replace(MIDDLE, seq_len=64 * number) for number in numbers]


def test_three_failures_in_a_row_are_too_many(session: Session, store: ProbeStore) -> None:
    outcomes = iter([Outcome.CRASH, Outcome.TIMEOUT, Outcome.CRASH])
    evaluator, prober = session(
        lambda request: result(outcome=next(outcomes), reason="an illegal memory access")
    )
    one, two, three = sizes(1, 2, 3)
    evaluator.evaluate(one, 0)
    evaluator.evaluate(two, 1)
    with pytest.raises(
        TooManyFailures, match=r"3 probes in a row.*an illegal memory access"
    ) as caught:
        evaluator.evaluate(three, 2)
    assert caught.value.exit_code == 5
    assert "trial-0002.log" in (caught.value.remedy or "") and "--study" in (
        caught.value.remedy or ""
    )
    assert [row.result.outcome for row in store.probes_of_study("one")] == [
        Outcome.CRASH,
        Outcome.TIMEOUT,
        Outcome.CRASH,
    ]
    assert prober.num_probes == 3


@pytest.mark.parametrize("between", [Outcome.OK, Outcome.OOM, Outcome.NUMERICS])
def test_anything_else_between_them_starts_the_count_anew(
    session: Session, between: Outcome
) -> None:
    outcomes = iter([Outcome.CRASH, Outcome.CRASH, between, Outcome.CRASH, Outcome.CRASH])
    evaluator, prober = session(lambda request: result(outcome=next(outcomes)), memory_gib=140.0)
    # each smaller, so that no OOM refuses the next
    for trial, config in enumerate(sizes(9, 8, 7, 6, 5)):
        evaluator.evaluate(config, trial)
    assert prober.num_probes == 5


def test_who_joins_in_the_second_round_is_evaluated_too(session: Session) -> None:
    """It takes the place of one that failed in the first."""
    evaluator, prober = session(machine(limit_gib=100.0))
    evaluator.confirm(MIDDLE, 4, 1)
    evaluator.confirm(TrainConfig(), 4, 2)
    evaluator.confirm(MIDDLE, 4, 2)
    assert [request.evaluate for request in prober.requests] == [True, True, False]


def test_who_was_not_evaluated_yet_can_be_later(session: Session) -> None:
    evaluator, prober = session(machine(limit_gib=100.0))
    for round_, whole in ((1, False), (2, True), (3, True)):
        evaluator.confirm(MIDDLE, 4, round_, whole=whole)
    assert [request.evaluate for request in prober.requests] == [False, True, False]


def test_a_confirmation_that_crashed_has_not_evaluated(session: Session) -> None:
    usual = machine(limit_gib=100.0)
    answers = iter([result(outcome=Outcome.CRASH)])
    evaluator, prober = session(lambda request: next(answers, None) or usual(request))
    for round_ in (1, 2, 3):
        evaluator.confirm(MIDDLE, 4, round_)
    assert [request.evaluate for request in prober.requests] == [True, True, False]


def test_confirming_asks_for_more_and_is_never_answered_from_the_table(
    session: Session, store: ProbeStore
) -> None:
    evaluator, prober = session(machine(limit_gib=100.0))
    evaluator.evaluate(MIDDLE, 0)
    evaluator.evaluate(TrainConfig(), None)
    for round_ in (1, 2):
        assert evaluator.confirm(MIDDLE, 4, round_).rung is Rung.CONFIRM
    asked = prober.requests[2:]
    assert [(request.rung, request.micro_steps) for request in asked] == [(Rung.CONFIRM, 4)] * 2
    assert [request.evaluate for request in asked] == [True, False]
    assert prober.logs == [
        "trial-0000.log",
        "settle.log",
        f"confirm-{MIDDLE.digest}-1.log",
        f"confirm-{MIDDLE.digest}-2.log",
    ]
    assert [row.trial for row in store.probes_of_study("one")] == [0, None, None, None]


def test_an_oom_while_confirming_refuses_what_is_larger(session: Session) -> None:
    evaluator, _ = session(only_oom)
    evaluator.confirm(MIDDLE, 4, 1)
    assert evaluator.evaluate(replace(MIDDLE, lora_rank=64), 9).result.outcome is Outcome.REFUSED


def test_a_cancelled_probe_leaves_no_row(session: Session, store: ProbeStore) -> None:
    def cancel(request: ProbeRequest) -> ProbeResult:
        raise Cancelled

    evaluator, _ = session(cancel)
    with pytest.raises(Cancelled):
        evaluator.evaluate(MIDDLE, 0)
    assert store.probes_of_study("one") == []
