"""Number formats are held against the reference by their
losses, where real weights let them tell.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult, Rung
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace
from autotune.study.numerics import BOUND, coarse_formats, deviation, reference_of
from tests.helpers.factories import measurement
from tests.helpers.replay import machine
from tests.helpers.sessions import Session, Start, by_tokens, space, subject_of, whole

ALL_8BIT = space(
    micro_batch_size=(4, 8), seq_len=(256,), lora_rank=(16,), optimizer=("adamw_8bit",)
)
SMALLER = space(
    micro_batch_size=(4, 8),
    seq_len=(256,),
    lora_rank=(16,),
    optimizer=("adamw_torch_fused", "adamw_8bit"),
)


@pytest.mark.parametrize(
    ("knobs", "doubtful"),
    [
        ({}, ""),
        ({"precision": "fp32", "optimizer": "adamw_torch"}, ""),
        ({"quantization": "nf4"}, ""),  # another base, which is told apart elsewhere
        ({"precision": "fp16_mixed"}, "fp16_mixed"),
        (
            {"precision": "bf16_pure", "optimizer": "paged_adamw_8bit"},
            "bf16_pure and paged_adamw_8bit",
        ),
        ({"precision": "bf16_pure", "optimizer": "adafactor"}, "bf16_pure"),
    ],
)
def test_what_is_in_question(knobs: dict[str, Any], doubtful: str) -> None:
    config = TrainConfig(**knobs)
    assert coarse_formats(config) == doubtful
    for bf16 in (True, False):
        reference = reference_of(config, bf16=bf16)
        assert reference is not None and coarse_formats(reference) == ""


def test_the_reference_keeps_the_optimizer_or_is_none() -> None:
    """Two algorithms apart would say nothing of their number formats."""
    for optimizer, wanted in (
        ("adafactor", "adafactor"),
        ("paged_adamw_8bit", "adamw_torch_fused"),
    ):
        reference = reference_of(TrainConfig(optimizer=optimizer), bf16=True)
        assert reference is not None and reference.optimizer == wanted
    assert coarse_formats(TrainConfig(optimizer="lion_8bit")) == "lion_8bit"
    assert reference_of(TrainConfig(optimizer="lion_8bit"), bf16=True) is None


def test_the_reference_takes_the_same_batches() -> None:
    config = TrainConfig(
        micro_batch_size=2,
        seq_len=512,
        lora_rank=64,
        precision="fp16_mixed",
        optimizer="adamw_8bit",
        checkpointing="none",
        compile="per_layer",
        packing=True,
    )
    reference, plain = (reference_of(config, bf16=bf16) for bf16 in (True, False))
    assert reference is not None and plain is not None
    for name in (
        "micro_batch_size",
        "seq_len",
        "lora_rank",
        "packing",
        "attention",
        "quantization",
    ):
        assert getattr(reference, name) == getattr(config, name)
    assert (reference.precision, plain.precision) == ("bf16_mixed", "fp32")


def test_deviation_is_of_shared_micro_batches() -> None:
    one, other = measurement(losses=(2.0, 2.2, 9.0)), measurement(losses=(2.0, 2.0))
    assert deviation(one, other) == pytest.approx(0.05)
    assert deviation(one, measurement(losses=())) is None


def test_losses_below_and_above_the_reference_do_not_cancel_out() -> None:
    assert deviation(
        measurement(losses=(1.8, 2.2)), measurement(losses=(2.0, 2.0))
    ) == pytest.approx(0.1)


def test_the_reference_of_products_of_eight_bits_is_plain_and_recomputes_all() -> None:
    """What was compiled had rows of a few lengths, and keeps them."""
    config = TrainConfig(
        micro_batch_size=2,
        quantization="fp8",
        optimizer="adamw_8bit",
        checkpointing="none",
        compile="per_layer",
        loss="chunked",
    )
    assert coarse_formats(config) == "fp8 and adamw_8bit"
    assert reference_of(config, bf16=True) == TrainConfig(
        micro_batch_size=2, checkpointing="full", padding="bucket"
    )


def with_losses(off: float) -> Callable[[ProbeRequest], ProbeResult]:
    """8-bit state is twice as fast here, and its losses are `off` the reference's."""
    answers = machine(
        limit_gib=100.0,
        rate=lambda one: by_tokens(one) * (2.0 if one.optimizer.endswith("8bit") else 1.0),
    )

    def answer(request: ProbeRequest) -> ProbeResult:
        result = answers(request)
        factor = 1 + off * request.config.optimizer.endswith("8bit")
        losses = tuple(loss * factor for loss in (3.0, 2.9, 2.8, 2.7))
        return replace(
            result, measurement=result.measurement and replace(result.measurement, losses=losses)
        )

    return answer


def session_of(
    start: Start, off: float, choices: SearchSpace = SMALLER, *, weights: bool = True
) -> Session:
    task = subject_of(choices)
    if weights:
        task = replace(task, model=replace(task.model, weights="/weights"))
    return whole(start, with_losses(off), task=task, trials=6)


def references(session: Session) -> list[TrainConfig]:
    return [request.config for request in session.prober.requests if request.rung is Rung.REFERENCE]


def test_losses_that_are_far_off_are_an_outcome_and_no_winner(start: Start) -> None:
    session = session_of(start, 2 * BOUND)
    recipe = session.summary().recipe
    assert recipe is not None and recipe.winner.config.optimizer == "adamw_torch_fused"
    assert "no number format needs a comparison with" in recipe.numerics
    dropped = [caveat for caveat in recipe.caveats if "adamw_8bit" in caveat]
    assert dropped and all("its losses differ by 4.0% from" in caveat for caveat in dropped)
    outcomes = [
        row.result.outcome
        for row in session.store.probes_of_study("one")
        if row.result.rung is Rung.CONFIRM
    ]
    assert Outcome.NUMERICS in outcomes
    confirmed = [one.config for one in session.prober.requests if one.rung is Rung.CONFIRM]
    assert not any(config.optimizer == "adamw_8bit" for config in confirmed)

    task = session.study.trials.task
    # a later session knows it
    again = start(with_losses(2 * BOUND), task=task, trials=6).summary().recipe
    assert again is not None and (again.winner.config, again.numerics) == (
        recipe.winner.config,
        recipe.numerics,
    )


@pytest.mark.parametrize("choices", [SMALLER, ALL_8BIT], ids=["searched too", "measured apart"])
def test_losses_that_agree_are_reported(start: Start, choices: SearchSpace) -> None:
    session = session_of(start, BOUND / 4, choices)
    recipe = session.summary().recipe
    assert recipe is not None and recipe.winner.config.optimizer == "adamw_8bit"
    assert recipe.numerics.startswith("with adamw_8bit, the losses differ by 0.50% from")
    asked = references(session)
    assert len(asked) == len(set(asked)) and bool(asked) is (choices is ALL_8BIT)

    again = start(with_losses(BOUND / 4), task=session.study.trials.task, trials=6).summary().recipe
    assert again is not None and again.numerics == recipe.numerics


def test_random_weights_tell_nothing_and_that_is_said(start: Start) -> None:
    session = session_of(start, 2 * BOUND, weights=False)
    recipe = session.summary().recipe
    assert recipe is not None and recipe.winner.config.optimizer == "adamw_8bit"
    assert recipe.numerics.startswith("unknown: with random weights")
    assert references(session) == []


def test_a_reference_that_does_not_fit_leaves_it_unknown(start: Start) -> None:
    answers = with_losses(2 * BOUND)

    def answer(request: ProbeRequest) -> ProbeResult:
        if request.rung is Rung.REFERENCE:
            return replace(answers(request), outcome=Outcome.OOM, measurement=None)
        return answers(request)

    task = subject_of(ALL_8BIT)
    task = replace(task, model=replace(task.model, weights="/weights"))
    session = whole(start, answer, task=task, trials=6)
    recipe = session.summary().recipe
    assert recipe is not None and recipe.numerics.startswith("unknown: adamw_8bit was not compared")
    assert len(references(session)) == len(set(references(session)))


def test_who_joins_in_the_second_round_is_compared_too(start: Start) -> None:
    """The favourite comes through its first confirmation, and not the second; what is next has
    other losses.
    """
    answers, favourite = (
        with_losses(2 * BOUND),
        TrainConfig(micro_batch_size=8, seq_len=256, lora_rank=16),
    )
    confirmed: list[TrainConfig] = []

    def answer(request: ProbeRequest) -> ProbeResult:
        result = answers(request)
        if request.config == favourite and result.measurement is not None:
            quick = tuple(micro / 4 for micro in result.measurement.micro_step_s)
            steps = tuple(step / 4 for step in result.measurement.step_s)
            result = replace(
                result, measurement=replace(result.measurement, micro_step_s=quick, step_s=steps)
            )
        if request.rung is Rung.CONFIRM:
            confirmed.append(request.config)
            if request.config == favourite and confirmed.count(favourite) == 2:
                return replace(result, outcome=Outcome.CRASH, measurement=None)
        return result

    task = subject_of(SMALLER)
    task = replace(task, model=replace(task.model, weights="/weights"))
    session = whole(start, answer, task=task, trials=6, finalists=1)
    assert confirmed[0] == favourite and confirmed.count(favourite) == 2
    assert not any(config.optimizer == "adamw_8bit" for config in confirmed)
    assert session.winner().optimizer == "adamw_torch_fused" and session.winner() != favourite
