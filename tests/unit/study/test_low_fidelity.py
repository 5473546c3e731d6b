"""The shallow rung: what two truncated depths decide, what they leave to the whole model, and what
is learned of it.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.memory_budget import memory_limit_gib
from autotune.core.probe_types import (
    Evidence,
    KernelTimes,
    Measurement,
    ModelShape,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    Rung,
)
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import SEEN, Extrapolation
from autotune.prediction.memory_formula import CONTEXT_GIB, MemoryBreakdown
from autotune.prediction.memory_predictor import MemoryEstimate, MemoryPredictor
from autotune.study.evaluator import Evaluation, Evaluator, _ran_out_on_device, truncate_request
from autotune.study.storage.probe_store import ProbeStore
from tests.helpers.factories import measurement, result
from tests.helpers.layered import FULL_S, SHAPE, SHORT_S, Answer, asked, layered
from tests.helpers.replay import ReplayProber

MIDDLE = TrainConfig(micro_batch_size=4, seq_len=512, checkpointing="none")  # needs 3 GiB
# 2 GiB and 5
HALF, TWICE = replace(MIDDLE, micro_batch_size=2), replace(MIDDLE, micro_batch_size=8)

Start = Callable[..., tuple[Evaluator, ReplayProber]]


def failing(depth: int, outcome: Outcome) -> Answer:
    def answer(request: ProbeRequest) -> ProbeResult:
        return (
            result(outcome=outcome, reason="no") if request.depth == depth else layered()(request)
        )

    return answer


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for one in found:
        one.close()


@pytest.fixture
def store(tmp_path: Path, opened: list[Any]) -> ProbeStore:
    opened.append(ProbeStore(f"sqlite:///{tmp_path / 'autotune.db'}"))
    return opened[-1]


@pytest.fixture
def session(store: ProbeStore, tmp_path: Path) -> Start:
    def start(
        answers: Answer | None = None,
        *,
        limit_gib: float = 100.0,
        study: str = "one",
        shape: ModelShape | None = SHAPE,
        shallow_only: bool = False,
        micro_steps: Callable[[TrainConfig], int] = lambda config: 2,
        store: ProbeStore = store,
        formula: Callable[
            [TrainConfig, int], MemoryBreakdown | None
        ] = lambda config, micro_steps: None,
    ) -> tuple[Evaluator, ReplayProber]:
        prober = ReplayProber(answers or layered(), shape=shape)

        def request(config: TrainConfig) -> ProbeRequest:
            memory_gib = limit_gib / 0.95
            return ProbeRequest(
                config=config, model={}, memory_gib=memory_gib, micro_steps=micro_steps(config)
            )

        logs = tmp_path / "logs"
        shape = prober.describe({})
        more: dict[str, Any] = {
            "model": "m",
            "shape": shape,
            "shallow_only": shallow_only,
            "formula": formula,
        }
        return Evaluator(prober, store, study=study, logs=logs, request=request, **more), prober

    return start


def never(config: TrainConfig, predicted: Extrapolation) -> str:
    return "it cannot win"


def hopeful(config: TrainConfig, predicted: Extrapolation) -> None:
    """Whatever is predicted may win."""


def how(verdict: Evaluation) -> tuple[Outcome, Rung, Evidence]:
    return verdict.result.outcome, verdict.result.rung, verdict.result.evidence


def predicted_of(evaluator: Evaluator, config: TrainConfig) -> Measurement:
    looked = evaluator.evaluate_low_fidelity(config, 99)
    assert isinstance(looked, Extrapolation)
    return looked.measurement


# The order of things


def test_the_time_to_compile_is_summed_over_truncated_probes_alone(session: Start) -> None:
    def compiled(request: ProbeRequest) -> ProbeResult:
        answer = layered()(request)
        return replace(answer, seconds=answer.seconds | {"compile": float(request.depth or 100)})

    evaluator, _ = session(compiled)
    evaluator.evaluate(MIDDLE, 3)
    assert evaluator.compiling_s == {MIDDLE: 2.0 + 8.0}


def test_two_depths_come_before_the_whole_model_and_all_of_it_is_stored(
    session: Start, store: ProbeStore
) -> None:
    evaluator, prober = session()
    verdict = evaluator.evaluate(MIDDLE, 3)
    assert asked(prober) == [2, 8, None]
    assert [request.rung for request in prober.requests] == [Rung.SHALLOW, Rung.SHALLOW, Rung.FULL]
    assert prober.logs == ["trial-0003-depth2.log", "trial-0003-depth8.log", "trial-0003.log"]
    assert all(
        request.min_timed_s < 1 and request.min_timed_micros >= 3 for request in prober.requests[:2]
    )
    assert how(verdict) == (Outcome.OK, Rung.FULL, Evidence.MEASURED)
    assert (verdict.reused, verdict.seconds) == (False, FULL_S + 2 * SHORT_S)
    rows = store.probes_of_study("one")
    assert [(row.trial, row.result.depth) for row in rows] == [(3, 2), (3, 8), (3, None)]
    assert rows[-1].result == verdict.result


@pytest.mark.parametrize(
    ("checkpointing", "shape", "depths"),
    [
        ("every_4", SHAPE, [4, 8, None]),
        ("every_16", SHAPE, [None]),
        ("full", replace(SHAPE, num_layers=4), [None]),
        ("full", replace(SHAPE, period=None), [None]),
        ("full", None, [None]),
    ],
)
def test_only_whole_periods_are_left_out(
    session: Start, checkpointing: str, shape: ModelShape | None, depths: list[int | None]
) -> None:
    evaluator, prober = session(shape=shape)
    assert (
        evaluator.evaluate(replace(MIDDLE, checkpointing=checkpointing), 0).result.rung is Rung.FULL
    )
    assert asked(prober) == depths


# Memory


@pytest.mark.parametrize(("limit_gib", "depths"), [(0.4, [2]), (0.8, [2, 8])])
def test_what_a_few_layers_run_out_of_is_not_enough(
    session: Start, store: ProbeStore, limit_gib: float, depths: list[int]
) -> None:
    evaluator, prober = session(limit_gib=limit_gib)
    verdict = evaluator.evaluate(MIDDLE, 3)
    assert asked(prober) == depths
    assert how(verdict) == (Outcome.OOM, Rung.SHALLOW, Evidence.EXTRAPOLATED)
    assert f"with only {depths[-1]} of 32 layers" in (verdict.result.reason or "")
    assert verdict.result.depth is None and verdict.result.phase is Phase.FORWARD
    *truncated, last = [row.result for row in store.probes_of_study("one")]
    assert [row.depth for row in truncated] == depths and last == verdict.result
    assert verdict.result.oom == truncated[-1].oom
    refused = evaluator.evaluate(TWICE, 4).result
    assert refused.outcome is Outcome.REFUSED and "trial 3" in (refused.reason or "")
    assert asked(prober) == depths


def test_what_is_predicted_to_need_more_is_not_tried(session: Start, store: ProbeStore) -> None:
    evaluator, prober = session(limit_gib=2.9)
    verdict = evaluator.evaluate(MIDDLE, 3)
    assert asked(prober) == [2, 8]
    assert how(verdict) == (Outcome.OOM, Rung.SHALLOW, Evidence.EXTRAPOLATED)
    oom, measured = verdict.result.oom, verdict.result.measurement
    assert oom is not None and measured is not None
    assert (oom.reserved_gib, oom.limit_gib) == pytest.approx((3.0, 2.9))
    assert oom.margin == pytest.approx(3.0 / 2.9 - 1)
    assert sum(oom.terms_gib.values()) == pytest.approx(oom.allocated_gib)
    assert oom.phase is verdict.result.phase is Phase.BACKWARD
    assert measured.peak_reserved_gib == pytest.approx(3.0)
    assert "extrapolated from 2 and 8 layers" in (verdict.result.reason or "")
    assert store.probes_of_study("one")[-1].result == verdict.result
    assert evaluator.evaluate(TWICE, 4).result.outcome is Outcome.REFUSED


def test_whole_models_tell_which_share_of_the_limit_sharded_tensors_may_take(
    session: Start,
) -> None:
    """The truncated models reserve more than the limit, as streams of communication do."""
    evaluator, _ = session(limit_gib=100.0)

    def took(allocated_gib: float, reserved_gib: float = 110.0) -> Measurement:
        return measurement(
            peak_allocated_gib=allocated_gib, peak_reserved_gib=reserved_gib, limit_gib=100.0
        )

    def ran_out(allocated_gib: float) -> OomDetail:
        return OomDetail(
            phase=Phase.FORWARD,
            requested_gib=None,
            allocated_gib=allocated_gib,
            reserved_gib=99.9,
            limit_gib=100.0,
        )

    def verdicts(config: TrainConfig, *allocated: float) -> list[tuple[bool, bool]]:
        return [
            (evaluator._surely_fits(config, took(one)), evaluator._may_fit(config, took(one)))
            for one in allocated
        ]

    sharded = replace(MIDDLE, num_gpus=2, sharding="fsdp2")
    kept = replace(sharded, sharding="fsdp2_keep")
    assert evaluator._surely_fits(sharded, took(90.0, reserved_gib=99.0))
    assert verdicts(sharded, 80.0, 101.0) == [(False, True), (False, False)]
    assert verdicts(MIDDLE, 80.0) == [(False, False)]  # one GPU needs what it reserves

    evaluator.learn(None, result(sharded, measurement=took(85.0, reserved_gib=99.9)))
    evaluator.learn(None, result(sharded, Outcome.OOM, oom=ran_out(95.0)))
    assert verdicts(sharded, 84.0, 86.0, 95.0) == [(True, True), (False, True), (False, False)]
    assert verdicts(kept, 84.0, 96.0) == [(False, True), (False, True)]
    truncated = result(sharded, Outcome.OOM, oom=ran_out(70.0), depth=2, rung=Rung.SHALLOW)
    evaluator.learn(None, truncated)
    assert verdicts(sharded, 84.0, 86.0) == [(True, True), (False, True)]


@pytest.mark.parametrize(
    ("need", "outcome", "rung"),
    [
        (1.005, Outcome.OOM, Rung.SHALLOW),
        (0.995, Outcome.OK, Rung.FULL),
        (0.9, Outcome.OK, Rung.FULL),
    ],
)
def test_close_to_the_limit_truncated_depths_decide(
    session: Start, need: float, outcome: Outcome, rung: Rung
) -> None:
    verdict = session(limit_gib=3.0 / need)[0].evaluate(MIDDLE, 0)
    assert (verdict.result.outcome, verdict.result.rung) == (outcome, rung)


@pytest.mark.parametrize(
    ("need", "outcome", "depths"),
    [
        (1.035, Outcome.REFUSED, []),
        (1.025, Outcome.OOM, [2, 8]),
        (1.005, Outcome.OOM, [2, 8]),
        (0.98, Outcome.OK, [2, 8, None]),
        (0.96, Outcome.OK, [None]),  # surely fits, and there is no promise to hold it to
    ],
)
def test_the_gate_refuses_what_is_predicted_to_be_far_beyond_the_limit(
    session: Start, need: float, outcome: Outcome, depths: list[int | None]
) -> None:
    for config in (HALF, TWICE):
        session(study="another")[0].evaluate(config, None)
    evaluator, prober = session(limit_gib=3.0 / need)
    evaluator.learn_from_others()
    found = evaluator.evaluate(MIDDLE, 0).result
    assert found.outcome is outcome and asked(prober) == depths
    if outcome is Outcome.REFUSED:
        assert found.rung is Rung.GATE and "learned from 2 similar configurations" in (
            found.reason or ""
        )
        assert found.oom is not None and found.oom.margin == pytest.approx(need - 1)


@pytest.mark.parametrize(
    ("low", "likely", "high", "refused"),
    [(1.02, 1.10, 1.20, False), (0.90, 1.00, 1.50, False), (1.04, 1.10, 1.20, True)],
)
def test_the_gate_refuses_only_where_the_least_that_is_needed_is_too_much(
    session: Start,
    monkeypatch: pytest.MonkeyPatch,
    low: float,
    likely: float,
    high: float,
    refused: bool,
) -> None:
    estimate = MemoryEstimate(
        low_gib=3 * low,
        gib=3 * likely,
        high_gib=3 * high,
        limit_gib=3.0,
        phase=Phase.BACKWARD,
        basis=2,
    )
    monkeypatch.setattr(MemoryPredictor, "predict", lambda *args: estimate)
    evaluator, prober = session(limit_gib=3.2)
    found = evaluator.evaluate(MIDDLE, 0).result
    assert (found.outcome is Outcome.REFUSED) is refused and bool(prober.requests) is not refused
    if refused:
        assert found.oom is not None and found.oom.margin == pytest.approx(likely - 1)


def test_the_gate_learns_from_truncated_depths_too(session: Start) -> None:
    evaluator, prober = session(limit_gib=6.0)
    for config in (HALF, MIDDLE):
        assert evaluator.evaluate(config, 0, never).result.outcome is Outcome.SLOW
    # 9 GiB
    assert evaluator.evaluate(replace(MIDDLE, micro_batch_size=16), 1).result.rung is Rung.GATE
    assert None not in asked(prober)


def test_what_was_predicted_to_need_more_than_another_limit_is_not_refused_under_this_one(
    session: Start,
) -> None:
    assert (
        session(study="small", limit_gib=2.0)[0].evaluate(MIDDLE, 0).result.outcome is Outcome.OOM
    )
    evaluator, _ = session(limit_gib=100.0)
    evaluator.learn_from_others()
    assert evaluator.evaluate(TWICE, 0).result.outcome is Outcome.OK


def test_a_fresh_study_reuses_and_learns_from_its_own_results_alone(session: Start) -> None:
    """Another study measured all depths of three configurations."""
    for config in (HALF, MIDDLE, TWICE):
        session(study="another", limit_gib=9.0)[0].evaluate(config, None)
    evaluator, prober = session(study="mine", limit_gib=9.0)
    fresh = replace(evaluator, studies=("mine",))
    fresh.learn_from_others()
    for expected in (False, True):
        found = fresh.evaluate(MIDDLE, 0)
        assert (found.result.outcome, found.reused) == (Outcome.OK, expected)
    assert asked(prober) == [2, 8, None]
    again = replace(session(study="mine", limit_gib=9.0)[0], studies=("mine",))
    assert again.evaluate(MIDDLE, 0).reused and evaluator.evaluate(HALF, 1).reused


def test_depths_of_steps_of_one_micro_batch_and_of_two_are_not_mixed(session: Start) -> None:
    """`twice` is a whole batch here, and was half of one in a study before; MIDDLE needs 3.5 GiB of
    3.6.
    """
    gradients, twice = layered(gradients_gib=0.5), replace(TWICE, method="full", lora_rank=None)
    session(gradients, study="larger batch")[0].evaluate(twice, 0, never)
    evaluator, _ = session(
        gradients, limit_gib=3.6, micro_steps=lambda config: 8 // config.micro_batch_size
    )
    evaluator.learn_from_others()
    assert evaluator.evaluate(twice, 0).result.outcome is Outcome.OOM
    assert evaluator.evaluate(MIDDLE, 1).result.outcome is Outcome.OK


# Time


def test_what_cannot_win_is_slow(session: Start, store: ProbeStore) -> None:
    evaluator, prober = session()
    heard: list[tuple[TrainConfig, float]] = []

    def promise(config: TrainConfig, predicted: Extrapolation) -> str | None:
        heard.append((config, predicted.measurement.micro_step_s[0]))
        return "too slow" if config == MIDDLE else None

    verdict = evaluator.evaluate(MIDDLE, 5, promise)
    assert how(verdict) == (Outcome.SLOW, Rung.SHALLOW, Evidence.EXTRAPOLATED)
    assert (verdict.result.reason, verdict.reused, verdict.seconds) == (
        "too slow",
        False,
        2 * SHORT_S,
    )
    assert verdict.result.measurement is not None
    assert store.probes_of_study("one")[-1].result == verdict.result
    assert evaluator.evaluate(HALF, 6, promise).result.rung is Rung.FULL
    assert asked(prober) == [2, 8, 2, 8, None]
    assert [config for config, _ in heard] == [MIDDLE, HALF]
    assert [micro for _, micro in heard] == pytest.approx([2.048, 1.024])


def test_what_takes_longer_than_predicted_corrects_what_is_predicted_next(session: Start) -> None:
    evaluator, _ = session(layered(slower=1.1))
    assert predicted_of(evaluator, HALF).micro_step_s == pytest.approx((1.024,))
    evaluator.evaluate(MIDDLE, 0, hopeful)
    assert predicted_of(evaluator, HALF).micro_step_s == pytest.approx((1.1 * 1.024,))
    assert predicted_of(evaluator, HALF).step_s == pytest.approx((1.1 * 2.048,) * 3)
    another_kind = replace(HALF, checkpointing="full")
    assert predicted_of(evaluator, another_kind).micro_step_s == pytest.approx((1.024,))


def test_another_optimizer_is_predicted_the_micro_batches_that_were_measured(
    session: Start,
) -> None:
    evaluator, _ = session(layered(slower=1.1))
    evaluator.evaluate(MIDDLE, 0)
    reported = predicted_of(evaluator, replace(MIDDLE, optimizer="adamw_8bit"))
    assert reported.micro_step_s == pytest.approx((1.1 * 2.048,))
    assert reported.step_s == pytest.approx((1.1 * 4.096,) * 3)
    assert reported.time_error == pytest.approx(SEEN)
    assert predicted_of(evaluator, replace(MIDDLE, lora_rank=64)).time_error > 0.015


def test_where_a_step_has_a_single_micro_batch_it_is_not_timed_apart_from_the_optimizer(
    session: Start,
) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        found = layered(slower=1.1)(request)
        assert found.measurement is not None
        return replace(found, measurement=replace(found.measurement, rest_s=()))

    evaluator, _ = session(answer, micro_steps=lambda config: 1)
    evaluator.evaluate(MIDDLE, 0)
    assert predicted_of(evaluator, replace(MIDDLE, optimizer="adamw_8bit")).time_error > 0.015


@pytest.mark.parametrize(
    ("shape", "share", "known"), [(SHAPE, 0.3, 0.3), (SHAPE, 0.9, 0.9), (None, 0.9, None)]
)
def test_truncated_models_tell_whether_the_host_sets_the_pace(
    session: Start, shape: ModelShape | None, share: float, known: float | None
) -> None:
    """With all layers the device's queue is full, and the host waits: issuing takes it as long as
    the device.
    """

    def answer(request: ProbeRequest) -> ProbeResult:
        found = layered()(request)
        assert found.measurement is not None
        host_s = (share if request.depth else 0.97) * min(found.measurement.micro_step_s)
        return replace(found, measurement=replace(found.measurement, host_micro_s=host_s))

    evaluator, _ = session(answer, shape=shape)
    for reported in (evaluator.evaluate(MIDDLE, 0).result, evaluator.confirm(MIDDLE, 4, 1)):
        assert reported.measurement is not None
        assert reported.measurement.host_share == (None if known is None else pytest.approx(known))
        assert reported.measurement.host_bound is (known == 0.9)


def test_truncated_models_tell_what_the_card_does_in_the_whole_one(session: Start) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        found = layered()(request)
        assert found.measurement is not None
        if request.depth is None:
            return found
        bytes_s, micro_s = 0.001 * request.depth, min(found.measurement.micro_step_s)
        kernels = KernelTimes(
            products_s=0.0,
            fp8_s=0.0,
            attention_s=0.0,
            bytes_s=bytes_s,
            busy_s=bytes_s,
            micro_s=micro_s,
            num_kernels=1,
        )
        return replace(found, measurement=replace(found.measurement, kernels=kernels))

    evaluator, _ = session(answer)
    for reported in (evaluator.evaluate(MIDDLE, 0).result, evaluator.confirm(MIDDLE, 4, 1)):
        assert reported.measurement is not None and reported.measurement.kernels is not None
        assert reported.measurement.kernels.bytes_s == pytest.approx(0.001 * SHAPE.num_layers)


def test_a_disturbed_shallow_probe_does_not_end_the_session(session: Start) -> None:
    """On a CPU the first probe may take longer than a wider one: the line through both leads below
    nothing.
    """
    plain = layered()

    def disturbed(request: ProbeRequest) -> ProbeResult:
        answer = plain(request)
        assert answer.measurement is not None
        micro_s = 9.0 if request.depth == 2 else answer.measurement.micro_step_s[0]
        return replace(
            answer,
            measurement=replace(answer.measurement, host_micro_s=None, micro_step_s=(micro_s,) * 3),
        )

    evaluator, _ = session(disturbed)
    assert evaluator.evaluate(MIDDLE, 0).result.outcome is Outcome.OK
    assert evaluator.evaluate(HALF, 1, hopeful).result.outcome is Outcome.OK


# Where it is the last rung, and where it fails


def test_with_shallow_only_nobody_asks_for_the_whole_model(session: Start) -> None:
    session(study="another")[0].evaluate(MIDDLE, 0)  # not even if it is known
    evaluator, prober = session(shallow_only=True, study="two", limit_gib=4.0)
    fits, too_large = evaluator.evaluate(MIDDLE, 0, never), evaluator.evaluate(TWICE, 1)
    assert how(fits) == (Outcome.OK, Rung.SHALLOW, Evidence.EXTRAPOLATED)
    assert fits.result.measurement is not None
    assert fits.result.measurement.micro_step_s == pytest.approx((2.048,))
    assert too_large.result.outcome in (Outcome.OOM, Outcome.REFUSED)
    assert asked(prober)[:2] == [2, 8] and None not in asked(prober)


def test_with_shallow_only_a_crash_does_not_lead_to_the_whole_model_either(session: Start) -> None:
    evaluator, prober = session(failing(8, Outcome.CRASH), shallow_only=True)
    assert evaluator.evaluate(MIDDLE, 0).result.outcome is not Outcome.OK
    assert None not in asked(prober)


def test_with_shallow_only_layers_that_cannot_be_left_out_do_not_either(session: Start) -> None:
    evaluator, prober = session(shallow_only=True)
    evaluator.evaluate(replace(MIDDLE, checkpointing="every_16"), 0)
    assert None not in asked(prober)


@pytest.mark.parametrize("outcome", [Outcome.CRASH, Outcome.TIMEOUT, Outcome.NUMERICS])
@pytest.mark.parametrize(("depth", "depths"), [(2, [2, None]), (8, [2, 8, None])])
def test_a_truncated_model_that_fails_leaves_it_to_the_whole_one(
    session: Start, outcome: Outcome, depth: int, depths: list[int | None]
) -> None:
    evaluator, prober = session(failing(depth, outcome))
    assert how(evaluator.evaluate(MIDDLE, 0, never)) == (Outcome.OK, Rung.FULL, Evidence.MEASURED)
    assert asked(prober) == depths


@pytest.mark.parametrize("answers", [layered(), failing(2, Outcome.CRASH)], ids=["fine", "crash"])
def test_looking_again_costs_nothing(session: Start, answers: Answer) -> None:
    evaluator, prober = session(answers)
    evaluator.evaluate_low_fidelity(MIDDLE, 0)
    before = prober.num_probes
    evaluator.evaluate_low_fidelity(MIDDLE, 0)
    assert prober.num_probes == before


# What is stored


def test_truncated_probes_of_another_study_are_not_made_again(session: Start) -> None:
    session(study="another")[0].evaluate(MIDDLE, 0, never)
    evaluator, prober = session()
    slow = evaluator.evaluate(MIDDLE, 0, never)
    assert (slow.result.outcome, slow.reused, slow.seconds) == (Outcome.SLOW, True, 0.0)
    assert prober.num_probes == 0
    assert evaluator.evaluate(MIDDLE, 1).result.rung is Rung.FULL  # what was slow then may win now
    assert asked(prober) == [None]


@pytest.mark.parametrize("others", [False, True])
def test_what_was_stored_leads_to_the_same_decisions(
    session: Start, store: ProbeStore, tmp_path: Path, opened: list[Any], others: bool
) -> None:
    """After a restart, of everything that came up before and of what is new: memory, times, and who
    is named.
    """
    answers = layered(slower=1.1)
    first, _ = session(answers, limit_gib=4.0)
    first.evaluate(HALF, 0)
    first.evaluate(replace(MIDDLE, lora_rank=64), 1, never)
    first.evaluate(replace(TWICE, seq_len=500), 2)
    shutil.copy(tmp_path / "autotune.db", tmp_path / "killed.db")
    rest = ProbeStore(f"sqlite:///{tmp_path / 'killed.db'}")
    opened.append(rest)
    second, _ = session(answers, limit_gib=4.0, store=rest)
    if others:
        second.learn_from_others()
    for row in rest.probes_of_study("one"):
        second.learn(row.trial, row.result)
    wanted = [
        HALF,
        MIDDLE,
        TWICE,
        replace(TWICE, lora_rank=32),
        replace(HALF, checkpointing="full"),
    ]
    for config in wanted:
        then, now = first.evaluate_low_fidelity(config, 9), second.evaluate_low_fidelity(config, 9)
        assert now == then, config
    assert {type(first.evaluate_low_fidelity(config, 9)) for config in wanted} == {
        Evaluation,
        Extrapolation,
    }


@pytest.mark.parametrize(
    ("need_gib", "refused"), [(100.0, False), (107.9, False), (108.1, True), (None, False)]
)
def test_the_formula_refuses_what_is_far_too_large_before_anything_is_loaded(
    session: Start, need_gib: float | None, refused: bool
) -> None:
    """Of 100 GiB for tensors; its error is 4 %, of which twice as much is allowed for."""
    parts = dict.fromkeys(
        ("adapters", "gradients", "optimizer", "activations", "logits", "workspace", "reserved"),
        0.0,
    )
    need = (
        None
        if need_gib is None
        else MemoryBreakdown(weights=need_gib, phase=Phase.BACKWARD, **parts)
    )
    evaluator, prober = session(
        limit_gib=100.0 + CONTEXT_GIB, formula=lambda config, micro_steps: need
    )
    found = evaluator.evaluate(MIDDLE, 0, never).result
    assert (found.outcome is Outcome.REFUSED) is refused
    assert bool(prober.requests) is not refused
    if refused:
        assert found.reason == "needs 108.1 GiB of 100.0 GiB by formula" and found.oom is not None
        assert found.oom.terms_gib == {"weights": 108.1}


def test_what_surely_fits_by_measurement_is_not_left_to_the_formula(session: Start) -> None:
    asked_for: list[TrainConfig] = []

    def formula(config: TrainConfig, micro_steps: int) -> None:
        asked_for.append(config)

    evaluator, _ = session(formula=formula)
    evaluator.evaluate(TWICE, 0)
    evaluator.evaluate(HALF, 1)
    assert asked_for == [TWICE]


def test_a_whole_model_is_measured_if_it_fits_into_the_time_to_spare(session: Start) -> None:
    evaluator, prober = session()
    short = evaluator.evaluate(MIDDLE, 0, spare_s=0.0).result
    assert (short.outcome, short.rung, short.evidence) == (
        Outcome.OK,
        Rung.SHALLOW,
        Evidence.EXTRAPOLATED,
    )
    assert short.measurement is not None and asked(prober) == [2, 8]
    assert evaluator.truncated_s == {MIDDLE: 2 * SHORT_S} and evaluator.whole_s == {}
    assert evaluator.evaluate(MIDDLE, 0, spare_s=30.0).result.evidence is Evidence.MEASURED
    assert asked(prober) == [2, 8, None] and evaluator.whole_s == {MIDDLE: FULL_S}


def test_what_a_new_worker_loads_in_its_first_step_is_no_candidates_time(session: Start) -> None:
    """A cold machine took 15.2 s for its first probe, 13.4 s of them in the first step, and 1.9 s
    for the second.
    """
    cold = {"first_step": 13.4, "steady": 0.2, "total": 15.2}
    warm = {"first_step": 1.0, "steady": 0.7, "total": 1.9}
    linear = layered()
    compiled = replace(MIDDLE, compile="per_layer")
    for config, spent_s in ((MIDDLE, 15.2 - 13.4 + 1.6 + 1.9), (compiled, 15.2 + 1.9)):
        asked_for: list[ProbeRequest] = []

        def answer(request: ProbeRequest, before: list[ProbeRequest] = asked_for) -> ProbeResult:
            before.append(request)
            found, is_warm = linear(request), len(before) > 1
            assert found.measurement is not None
            measured = replace(found.measurement, warm_s=1.6)
            return replace(
                found, measurement=measured, warm=is_warm, seconds=warm if is_warm else cold
            )

        evaluator, prober = session(answer)
        evaluated = evaluator.evaluate(config, 0, spare_s=0.0)
        assert asked(prober) == [2, 8] and evaluated.seconds == pytest.approx(15.2 + 1.9)
        assert evaluator.truncated_s == {config: pytest.approx(spent_s)}


def test_a_truncated_model_is_timed_for_seven_tenths_of_a_second_at_most() -> None:
    request = ProbeRequest(config=MIDDLE, model={}, memory_gib=80.0)
    for asked_s, timed_s in ((1.0, 0.7), (0.2, 0.2)):
        short = truncate_request(replace(request, min_timed_s=asked_s), 4)
        assert (short.depth, short.rung, short.min_timed_s, short.min_timed_micros) == (
            4,
            Rung.SHALLOW,
            timed_s,
            3,
        )


def test_a_finalist_is_timed_for_two_seconds_and_a_reference_for_a_step(session: Start) -> None:
    evaluator, prober = session()
    evaluator.confirm(MIDDLE, 4, 1)
    evaluator.reference(HALF)
    evaluator.confirm(MIDDLE, 4, 2)
    assert [(one.rung, one.min_timed_s, one.micro_steps) for one in prober.requests] == [
        (Rung.CONFIRM, 2.0, 4),
        (Rung.REFERENCE, 0.0, 2),
        (Rung.CONFIRM, 2.0, 4),
    ]
    assert prober.logs[:2] == [f"confirm-{MIDDLE.digest}-1.log", f"reference-{HALF.digest}.log"]
    assert evaluator.whole_s == {MIDDLE: 2 * FULL_S} and evaluator.truncated_s == {}


def test_a_reference_whose_losses_are_known_is_not_measured_again(
    session: Start, store: ProbeStore
) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        found = layered()(request)
        assert found.measurement is not None
        return replace(found, measurement=replace(found.measurement, losses=(2.0, 1.9)))

    session(answer, study="another")[0].evaluate(HALF, 0)
    evaluator, prober = session(answer)
    for config, probes in ((HALF, 0), (MIDDLE, 1), (MIDDLE, 1)):
        measured = evaluator.reference(config)
        assert (
            measured is not None and measured.losses == (2.0, 1.9) and prober.num_probes == probes
        )
    rows = [row.result for row in store.probes_of_study("one")]
    assert {one.rung for one in rows} == {Rung.REFERENCE}
    log = f"reference-{MIDDLE.digest}.log"
    assert [(one.seconds, one.log) for one in rows] == [
        ({}, None),
        ({"total": FULL_S}, log),
        ({}, None),
    ]
    silent, prober = session(study="silent")  # what has no losses is no reference
    silent.reference(TWICE)
    silent.reference(TWICE)
    assert prober.num_probes == 2


def test_a_confirmation_takes_longer_while_its_evaluation_is_to_come(session: Start) -> None:
    evaluator, _ = session()
    assert evaluator.confirmation_s(MIDDLE, 2) is None
    evaluator.evaluate(MIDDLE, 0)
    first_s = evaluator.confirmation_s(MIDDLE, 2)
    evaluator.saved.add(MIDDLE)
    again_s = evaluator.confirmation_s(MIDDLE, 2)
    assert first_s is not None and again_s is not None and first_s > again_s > 0


def test_what_nothing_is_known_of_fits_into_any_time(session: Start) -> None:
    evaluator, _ = session()
    assert [evaluator.fits_into(spare_s, MIDDLE) for spare_s in (0.0, 0.1, math.inf)] == [
        False,
        True,
        True,
    ]
    evaluator.evaluate(MIDDLE, 0)
    assert [evaluator.fits_into(spare_s, MIDDLE) for spare_s in (0.1, 1e9, math.inf)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("basis", "said"), [(1, "1 similar configuration"), (2, "2 similar configurations")]
)
def test_the_gate_says_what_is_needed_and_how_it_knows(
    session: Start, monkeypatch: pytest.MonkeyPatch, basis: int, said: str
) -> None:
    estimate = MemoryEstimate(
        low_gib=3.12, gib=3.3, high_gib=3.6, limit_gib=3.0, phase=Phase.BACKWARD, basis=basis
    )
    monkeypatch.setattr(MemoryPredictor, "predict", lambda *args: estimate)
    found = session(limit_gib=3.2)[0].evaluate(MIDDLE, 0).result
    assert found.reason == f"needs 3.12 GiB to 3.60 GiB of 3.00 GiB, as learned from {said}"


def test_what_needs_all_that_the_formula_is_trusted_with_is_tried(session: Start) -> None:
    limit_gib = memory_limit_gib(80.0, 0.05, taken_gib=CONTEXT_GIB)
    parts = dict.fromkeys(
        ("adapters", "gradients", "optimizer", "activations", "logits", "workspace", "reserved"),
        0.0,
    )
    for need_gib, refused in (
        (limit_gib * 1.08, False),
        (math.nextafter(limit_gib * 1.08, 999), True),
    ):
        need = MemoryBreakdown(weights=need_gib, phase=Phase.BACKWARD, **parts)
        evaluator, _ = session(formula=lambda config, micro_steps, need=need: need)
        request = replace(evaluator.request(MIDDLE), memory_gib=80.0, headroom=0.05)
        assert (evaluator._gate_by_formula(request) is not None) is refused


def breakdown(gib: float) -> MemoryBreakdown:
    parts = dict.fromkeys(
        ("adapters", "gradients", "optimizer", "activations", "logits", "workspace", "reserved"),
        0.0,
    )
    return MemoryBreakdown(weights=gib, phase=Phase.BACKWARD, **parts)


@pytest.mark.parametrize(("over", "refused"), [(1.029, False), (1.031, True)])
def test_a_smaller_micro_batch_corrects_the_formula(
    session: Start, over: float, refused: bool
) -> None:
    """The formula is 20 times too high for the smaller one, which needs 2 GiB: 100 are 5."""
    by_formula = {HALF: 40.0, MIDDLE: 100.0}
    evaluator, _ = session(formula=lambda config, micro_steps: breakdown(by_formula[config]))
    evaluator.evaluate(HALF, 0)
    memory_gib = (5.0 / over + CONTEXT_GIB) / 0.95
    found = evaluator._gate_by_formula(
        replace(evaluator.request(MIDDLE), memory_gib=memory_gib, headroom=0.05)
    )
    assert (found is not None) is refused
    if found:
        assert found.reason == (
            "needs 5.00 GiB of 4.85 GiB by formula,"
            " corrected by a similar configuration's measurement"
        )
        assert found.oom is not None and found.oom.allocated_gib == pytest.approx(5.0)


def test_by_formula_all_that_is_below_the_limit_should_fit(session: Start) -> None:
    limit_gib = memory_limit_gib(100.0 / 0.95, 0.05, taken_gib=CONTEXT_GIB)
    for need_gib, fits in ((limit_gib * 0.999, True), (limit_gib * 1.001, False)):
        evaluator, _ = session(
            formula=lambda config, micro_steps, need_gib=need_gib: breakdown(need_gib)
        )
        assert evaluator.should_fit(MIDDLE) is fits
    assert session()[0].should_fit(MIDDLE)  # nothing says that it does not


def test_only_the_narrower_model_is_asked_for_new_lengths(session: Start) -> None:
    evaluator, prober = session()
    evaluator.evaluate(MIDDLE, 0)
    assert [(request.depth, request.new_lengths) for request in prober.requests] == [
        (2, True),
        (8, False),
        (None, True),
    ]


@pytest.mark.parametrize(
    ("high_gib", "bounded", "asked_for"), [(3.0, True, 0), (3.01, True, 1), (2.0, False, 1)]
)
def test_what_certainly_needs_no_more_than_there_is_is_not_left_to_the_formula(
    session: Start, monkeypatch: pytest.MonkeyPatch, high_gib: float, bounded: bool, asked_for: int
) -> None:
    estimate = MemoryEstimate(
        low_gib=1.0,
        gib=2.0,
        high_gib=high_gib,
        limit_gib=3.0,
        phase=Phase.BACKWARD,
        basis=2,
        bounded=bounded,
    )
    monkeypatch.setattr(MemoryPredictor, "predict", lambda *args: estimate)
    formula: list[TrainConfig] = []
    evaluator, _ = session(formula=lambda config, micro_steps: formula.append(config))
    assert evaluator.evaluate(MIDDLE, 0).result.outcome is Outcome.OK and len(formula) == asked_for


@pytest.mark.parametrize(
    ("outcome", "refused"), [(Outcome.OK, True), (Outcome.NUMERICS, False), (Outcome.SLOW, False)]
)
def test_what_did_not_succeed_teaches_no_memory(
    session: Start, outcome: Outcome, refused: bool
) -> None:
    """Two sizes that need 1.5 and 2 GiB lead to 5 GiB for what there are 2.5 of."""
    evaluator, prober = session(shape=None, limit_gib=2.5)
    for config in (HALF, replace(HALF, micro_batch_size=1)):
        request = evaluator.request(config)
        found = replace(
            layered()(request), request_digest=request.digest, config=config, outcome=outcome
        )
        evaluator.learn(0, replace(found, rung=Rung.FULL))
    assert (evaluator.evaluate(TWICE, 1).result.outcome is Outcome.REFUSED) is refused
    assert prober.num_probes == (0 if refused else 1)


def test_a_whole_model_that_runs_out_after_all_has_no_share_of_the_host(session: Start) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        return layered()(request) if request.depth else result(outcome=Outcome.OOM)

    evaluator, prober = session(answer)
    found = evaluator.evaluate(MIDDLE, 0).result
    assert (found.outcome, found.measurement, asked(prober)) == (Outcome.OOM, None, [2, 8, None])


@pytest.mark.parametrize(
    ("checkpointing", "allocated_gib", "requested_gib", "on_device"),
    [
        ("full", 1.0, None, True),
        ("offload", 91.0, None, True),
        ("offload", 90.0, None, False),  # a tenth is free: the host ran out
        ("offload", 80.0, 10.5, True),
        ("offload", 80.0, 9.0, False),
    ],
)
def test_where_checkpoints_wait_in_the_host_either_may_run_out(
    checkpointing: str, allocated_gib: float, requested_gib: float | None, on_device: bool
) -> None:
    oom = OomDetail(
        phase=Phase.FORWARD,
        requested_gib=requested_gib,
        allocated_gib=allocated_gib,
        reserved_gib=allocated_gib,
        limit_gib=100.0,
    )
    config = replace(MIDDLE, checkpointing=checkpointing)
    assert _ran_out_on_device(result(config, Outcome.OOM, oom=oom)) is on_device
    assert not _ran_out_on_device(result(config, Outcome.OOM, oom=None))
