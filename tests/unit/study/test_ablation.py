"""Why the winner won: which knobs are set back, what is said of each, and that it stays with the
study.
"""

from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import EnvironmentProblem
from autotune.core.probe_types import (
    Evidence,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    World,
)
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.report import describe
from autotune.report.html import render
from autotune.study.ablation import AblatedKnob, Ablation, ablate, ablated_configs, to_ablated_knob
from autotune.study.summary import summary_data
from tests.helpers.factories import measurement, result, summary
from tests.helpers.replay import machine
from tests.helpers.sessions import Start, by_tokens, space, subject_of

BASELINE = TrainConfig(micro_batch_size=4, seq_len=256, lora_rank=32)
WINNER = replace(BASELINE, micro_batch_size=8, checkpointing="none", lora_rank=16)


def test_each_knob_that_differs_is_set_back_alone() -> None:
    found = dict(ablated_configs(WINNER, BASELINE))
    assert found == {
        "micro_batch_size": replace(WINNER, micro_batch_size=4),
        "lora_rank": replace(WINNER, lora_rank=32),
        "checkpointing": replace(WINNER, checkpointing="full"),
    }
    assert dict(ablated_configs(WINNER, WINNER)) == {}


def test_several_gpus_are_set_back_to_one(start: Start) -> None:
    """They share nothing out then.

    What would not divide the global batch is left out, and speeds are projected.
    """
    pair = replace(WINNER, num_gpus=2, sharding="ddp")
    assert dict(ablated_configs(pair, BASELINE))["num_gpus"] == WINNER
    assert "sharding" not in dict(ablated_configs(pair, BASELINE))
    played = subject_of(space().pin("num_gpus", 2), world=World.FAKE, device=resolve_device("h200"))
    session = start(machine(rate=by_tokens, limit_gib=100.0), task=played)
    winner = replace(pair, micro_batch_size=4, num_gpus=8)
    found = ablate(played, session.evaluator, winner, replace(BASELINE, micro_batch_size=8))
    assert [knob.knob for knob in found.undone] == ["lora_rank", "checkpointing", "num_gpus"]
    assert found.winner.evidence is Evidence.PROJECTED
    (of_gpus,) = [
        line for line in describe.ablation(found) if line.startswith("num_gpus 8 instead of 1: ")
    ]
    assert of_gpus.endswith("[projected]")


@pytest.mark.parametrize("quantised_wins", [True, False])
def test_a_second_quantisation_goes_with_its_base(quantised_wins: bool) -> None:
    nf4 = replace(WINNER, quantization="nf4", double_quant=True)
    pair = (nf4, WINNER) if quantised_wins else (WINNER, nf4)
    assert [name for name, _ in ablated_configs(*pair)] == ["quantization"]
    assert dict(ablated_configs(*pair))["quantization"] == pair[1]
    assert [name for name, _ in ablated_configs(nf4, replace(nf4, double_quant=False))] == [
        "double_quant"
    ]


def test_what_each_is_worth_is_found_out_by_probes(start: Start) -> None:
    session = start(machine(limit_gib=60.0, rate=by_tokens))
    done = ablate(session.study.trials.task, session.evaluator, WINNER, BASELINE)
    by_knob = {one.knob: one for one in done.undone}
    assert by_knob.keys() == {"micro_batch_size", "lora_rank", "checkpointing"}
    assert done.winner.tokens_per_s and done.winner.config == WINNER
    slower = by_knob["checkpointing"]
    assert slower.tokens_per_s == pytest.approx(0.7 * done.winner.tokens_per_s)
    assert done.ranked()[0] is slower
    assert describe.ablation(done)[0].startswith(
        "checkpointing none instead of full: 1.43 times as fast"
    )


def test_a_winner_that_does_not_come_through_again_is_an_error(start: Start) -> None:
    session = start(machine(limit_gib=0.01, rate=by_tokens))
    with pytest.raises(EnvironmentProblem, match="the winner failed this time"):
        ablate(session.study.trials.task, session.evaluator, WINNER, BASELINE)


def test_a_stop_leaves_what_there_is(start: Start) -> None:
    session = start(machine(rate=by_tokens))
    done = ablate(
        session.study.trials.task, session.evaluator, WINNER, BASELINE, should_stop=lambda: True
    )
    assert done.undone == () and done.winner.config == WINNER


def one(knob: str, config: TrainConfig, **changes: Any) -> AblatedKnob:
    return AblatedKnob(
        **(
            {"knob": knob, "config": config, "outcome": Outcome.OK, "evidence": Evidence.MEASURED}
            | changes
        )
    )


def reported(**changes: Any) -> Ablation:
    winner = one("", WINNER, tokens_per_s=1000.0, error=0.01, peak_gib=20.0)
    undone = one("checkpointing", replace(WINNER, checkpointing="full"), **changes)
    return Ablation(winner=winner, baseline=BASELINE, undone=(undone,))


def test_what_did_not_fit_says_what_it_needed(start: Start) -> None:
    """Which is more than what was reserved when it ran out."""
    oom = OomDetail(
        phase=Phase.FORWARD,
        requested_gib=3.0,
        allocated_gib=19.5,
        reserved_gib=20.0,
        limit_gib=21.5,
    )
    result = replace(
        machine(rate=by_tokens)(ProbeRequest(config=WINNER, model={}, memory_gib=80.0)),
        outcome=Outcome.OOM,
        oom=oom,
    )
    assert to_ablated_knob(start().study.trials.task, "checkpointing", result).peak_gib == 22.5


def test_what_is_known_of_a_knob_is_what_its_probe_measured(start: Start) -> None:
    """Eight rows of 256 tokens in 0.5 s: a step of four micro batches and 0.02 s more."""
    task = start().study.trials.task
    found = result(
        WINNER,
        measurement=measurement(step_s=(0.9, 1.02, 1.05), peak_reserved_gib=20.0, limit_gib=60.0),
    )
    read = to_ablated_knob(task, "compile", found)
    assert (read.knob, read.config, read.outcome, read.evidence) == (
        "compile",
        WINNER,
        Outcome.OK,
        Evidence.MEASURED,
    )
    assert read.tokens_per_s == pytest.approx(32 * 256 / 2.02)
    # the shortest step is further off than the longest
    assert read.error == pytest.approx(1 - 0.9 / 1.02)
    assert (read.peak_gib, read.limit_gib, read.too_large) == (20.0, 60.0, False)
    slow = to_ablated_knob(task, "compile", replace(found, outcome=Outcome.SLOW))
    assert (slow.tokens_per_s, slow.error, slow.peak_gib, slow.limit_gib) == (None, 0.0, None, None)
    out = to_ablated_knob(task, "loss", result(WINNER, Outcome.OOM))
    assert (out.peak_gib, out.limit_gib, out.too_large, out.tokens_per_s) == (
        133.0,
        132.0,
        True,
        None,
    )
    assert to_ablated_knob(task, "loss", result(WINNER, Outcome.REFUSED)).too_large


def test_an_explanation_is_of_one_winner() -> None:
    made = reported(tokens_per_s=500.0)
    assert made.of(WINNER) and not made.of(BASELINE)


def test_what_does_not_fit_is_worth_more_than_what_is_slowest() -> None:
    slowest = one("compile", replace(WINNER, compile="per_layer"), tokens_per_s=0.5)
    too_large = one(
        "micro_batch_size", replace(WINNER, micro_batch_size=4), outcome=Outcome.REFUSED
    )
    ranked = replace(reported(tokens_per_s=500.0), undone=(slowest, too_large)).ranked()
    assert [each.knob for each in ranked] == ["micro_batch_size", "compile"]


def test_what_failed_by_chance_helped_nobody() -> None:
    made = reported(tokens_per_s=500.0)
    crashed = one("compile", replace(WINNER, compile="per_layer"), outcome=Outcome.CRASH)
    too_large = one(
        "micro_batch_size", replace(WINNER, micro_batch_size=4), outcome=Outcome.OOM, peak_gib=30.0
    )
    ranked = replace(made, undone=(crashed, *made.undone, too_large)).ranked()
    assert [each.knob for each in ranked] == ["micro_batch_size", "checkpointing", "compile"]


def test_it_is_kept_with_the_study_and_shown() -> None:
    made = summary()
    assert made.recipe is not None
    mine = reported(tokens_per_s=500.0)
    mine = replace(mine, winner=replace(mine.winner, config=made.recipe.winner.config))
    assert from_data(Ablation, to_data(mine)) == mine
    shown = replace(made, explanation=mine)
    assert summary_data(shown, "out")["explanation"]["undone"][0]["knob"] == "checkpointing"
    assert "2.00 times as fast" in render(shown, "out")
    assert "autotune explain" in render(made, "out")


def test_each_knob_is_announced_and_one_that_fails_ends_nothing(start: Start) -> None:
    """Three crashes in a row would end a search."""
    said: list[str] = []

    def answer(request: ProbeRequest) -> ProbeResult:
        return (
            machine(rate=by_tokens)(request)
            if request.config == WINNER
            else result(outcome=Outcome.CRASH)
        )

    session = start(answer)
    baseline = replace(BASELINE, loss="chunked")
    done = ablate(session.study.trials.task, session.evaluator, WINNER, baseline, say=said.append)
    assert [(one.outcome, one.tokens_per_s) for one in done.undone] == [(Outcome.CRASH, None)] * 4
    assert said[0] == f"without micro_batch_size 8: {replace(WINNER, micro_batch_size=4).label()}"
    assert len(said) == 4 and session.evaluator.failures_in_a_row == 0
