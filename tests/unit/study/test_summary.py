"""What a finished study says: counts by hand, and summary.json with every key, also where nothing
won.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.json_view import json_data
from autotune.core.learning_rate import OF_DEMO
from autotune.core.objective import Objective
from autotune.core.probe_types import Evidence, Outcome, Rung
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate
from autotune.study.learning import Attempt, Learning
from autotune.study.summary import (
    Learned,
    Quality,
    StudySummary,
    TrialRecord,
    Verification,
    summary_data,
)
from tests.helpers.factories import result, summary

EMPTY = StudySummary(study="s", recipe=None, trials=(), wall_seconds=0.0, search_usd=None)


def row(number: int, outcome: Outcome, size: int = 8, reused: bool = False) -> TrialRecord:
    config = TrainConfig(micro_batch_size=size)
    return TrialRecord(number=number, config=config, outcome=outcome, rung=Rung.FULL, reused=reused)


def test_counts():
    rows = [
        row(0, Outcome.OK, 1),
        row(1, Outcome.OK, 1, reused=True),  # the same configuration is judged once
        row(2, Outcome.OOM, 2),
        row(3, Outcome.REFUSED, 4),
        row(4, Outcome.REFUSED, 8),
        row(5, Outcome.CRASH, 16),  # says nothing about the configuration
        row(6, Outcome.TIMEOUT, 32),
        row(7, Outcome.NUMERICS, 64),
        row(8, Outcome.SLOW, 128),
    ]
    assert replace(EMPTY, trials=tuple(rows)).counts() == {
        "total": 9,
        "judged": 5,
        "ok": 2,
        "oom": 1,
        "refused": 2,
        "slow": 1,
        "failed": 3,
        "reused": 1,
    }
    assert set(EMPTY.counts().values()) == {0}


def test_speedup_and_accumulation():
    recipe = summary().recipe
    # 4 micro batches of 1.02 s against 8 of 0.245 s, and 0.02 s for the rest of a step.
    assert recipe.speedup == pytest.approx((4 * 1.02 + 0.02) / (8 * 0.245 + 0.02))
    assert recipe.accumulation == 8
    assert recipe.speedup_interval == pytest.approx(
        (recipe.speedup * 0.99 / 1.01, recipe.speedup * 1.01 / 0.99), rel=1e-3
    )
    bare = replace(recipe, baseline=None)
    assert (bare.speedup, bare.speedup_interval, bare.differs) == (None, None, False)


def test_the_learning_rate_is_the_one_that_was_found_or_the_usual_one():
    """An older version's rate, which has no default beside it, holds at rank 16 and in full
    fine-tuning.
    """
    recipe = summary().recipe
    assert recipe.learning_rate == recipe.default_learning_rate == 2e-4
    full = replace(recipe.winner, config=replace(recipe.config, method="full", lora_rank=None))
    assert replace(recipe, winner=full).learning_rate == 1e-5
    demo = replace(resolve_model("demo-3m"), weights="a folder")
    assert replace(recipe, model=demo).learning_rate == OF_DEMO["lora"]
    dpo = replace(recipe.workload, objective=Objective.DPO)
    assert replace(recipe, model=demo, workload=dpo).learning_rate == 5e-6
    attempts = (Attempt(learning_rate=1e-3, seed=0, steps=5, loss=1.0, seconds=1.0),)
    for rank, default, is_learned in (
        (16, None, True),
        (64, None, False),
        (64, 2e-4, True),
        (None, None, True),
    ):
        winner = full if rank is None else recipe.winner
        winner = replace(winner, config=replace(winner.config, lora_rank=rank))
        found = Learning(
            config=winner.config, attempts=attempts, run_steps=100, held_out=8, default=default
        )
        made = replace(recipe, winner=winner, learning=found)
        assert made.is_rate_learned is is_learned
        assert made.learning_rate == (1e-3 if is_learned else 2e-4)


def test_an_uncertain_speedup_is_none():
    recipe = summary().recipe
    disturbed = replace(recipe, baseline=replace(recipe.baseline, evidence=Evidence.DISTURBED))
    same = replace(recipe, winner=recipe.baseline, disagreement="measurements differ by 9%")
    for unknown in (disturbed, same, replace(recipe, alone=True)):
        assert (unknown.speedup, unknown.speedup_interval, unknown.differs) == (None, None, False)
    assert recipe.differs and recipe.speedup_evidence is Evidence.MEASURED
    assert disturbed.speedup_evidence is same.speedup_evidence is Evidence.DISTURBED
    assert same.unsteady == same.disagreement
    assert replace(disturbed, baseline=None).unsteady is None
    assert replace(recipe, disagreement="measurements differ by 9%").differs
    projected = replace(recipe.baseline, evidence=Evidence.PROJECTED)
    assert replace(recipe, baseline=projected).speedup_evidence is Evidence.PROJECTED


def test_candidate_data():
    winner = summary().recipe.winner
    data = json_data(winner)
    assert data["config"] == winner.config.as_dict()
    assert data["performance"]["step_time_s"] == pytest.approx(1.98)
    assert data["memory"] == {
        "model_gib": 13.5,
        "peak_during_training_gib": 53.3,
        "peak_reserved_gib": pytest.approx(53.3 * 1.02),
        "limit_gib": 132.0,
    }
    assert data["cost"]["usd_per_hour"] == find_price("h200-sxm").usd_per_hour
    assert data["cost"]["full_run_usd"] == pytest.approx(
        312.5 * 1.98 / 3600 * data["cost"]["usd_per_hour"]
    )
    assert len(data["cost"]["interval_usd"]) == len(data["cost"]["interval_hours"]) == 2
    assert data["evidence"] == "measured"
    assert json_data(replace(winner, evidence=Evidence.PROJECTED))["evidence"] == "projected"


def test_no_price_is_null():
    winner = summary().recipe.winner
    unpriced = dict.fromkeys(
        ("usd_per_hour", "full_run_usd", "interval_usd", "cost_per_1000_samples_usd")
    )
    cost = replace(winner.cost, **unpriced, startup_s=20.0)
    data = json.loads(json.dumps(json_data(replace(winner, cost=cost))))
    assert {name for name, value in data["cost"].items() if value is None} == {*unpriced, "pauses"}


def test_summary_data():
    study = summary()
    data = json.loads(json.dumps(summary_data(study, "runs/a'; echo"), allow_nan=False))
    assert (data["schema_version"], data["study"], data["out_dir"]) == (
        1,
        "h200-mistral-7b",
        "runs/a'; echo",
    )
    assert (data["model"], data["device"], data["evidence"]) == (
        "mistralai/Mistral-7B-v0.3",
        "h200-sxm",
        "measured",
    )
    assert data["winner"] == json.loads(json.dumps(json_data(study.recipe.winner)))
    assert data["speedup"] == pytest.approx(study.recipe.speedup)
    assert data["speedup_interval"][0] < data["speedup"] < data["speedup_interval"][1]
    assert data["trials"] == study.counts()
    assert len(data["cells"]) == 2
    assert data["caveats"] == list(study.recipe.caveats)
    assert data["fingerprint"]["packages"]["torch"] == "2.11.0"


def test_a_study_without_a_winner_has_the_same_keys():
    data = json.loads(json.dumps(summary_data(EMPTY, ".")))
    assert set(data) == set(summary_data(summary(), "."))
    nothing = (
        "evidence",
        "model",
        "device",
        "winner",
        "baseline",
        "speedup",
        "reason",
        "search_usd",
        "fingerprint",
    )
    assert {data[name] for name in nothing} == {None}
    assert (data["cells"], data["caveats"]) == ([], [])


def test_speeds_apart_are_those_whose_interval_does_not_hold_one():
    recipe = summary().recipe
    for micro_s, differs in ((1.2, True), (1.04, True), (1.0, False), (0.98, False), (0.9, True)):
        low, high = (one / micro_s for one in (0.98, 1.02))
        speed = replace(recipe.baseline.performance, tokens_per_second=8000.0, spread=(0.0, 0.0))
        faster = replace(
            speed, tokens_per_second=8000.0 / micro_s, spread=(1 / 1.02 - 1, 1 / 0.98 - 1)
        )
        made = replace(
            recipe,
            winner=replace(recipe.winner, performance=faster),
            baseline=replace(recipe.baseline, performance=speed),
        )
        assert made.speedup_interval == pytest.approx((low, high)) and made.differs is differs


def test_a_winner_says_what_it_drew_and_how_much_its_host_does():
    winner = summary().recipe.winner
    winner = replace(winner, measurement=replace(winner.measurement, host_share=0.4))
    data = json_data(winner)
    assert data["energy_j_per_token"] == pytest.approx(650.0 * 1.98 / (32 * 1024), rel=0.01)
    assert (data["telemetry"]["power_w"], data["host_share"], data["memory_evidence"]) == (
        650.0,
        0.4,
        "measured",
    )
    silent = json_data(replace(winner, measurement=replace(winner.measurement, telemetry=None)))
    assert silent["energy_j_per_token"] is silent["telemetry"] is None


def test_a_card_that_is_not_quoted_has_no_cost():
    card = Estimate(
        device=resolve_device("a100-80gb"),
        config=TrainConfig(),
        state="OOM",
        need_gib=9.0,
        limit_gib=8.0,
    )
    assert summary_data(
        replace(EMPTY, cards=(replace(card, tokens_per_s=7.0, num_observations=3),)), "."
    )["cards"][0] == {
        "card": card.device.name,
        "state": "OOM",
        "need_gib": 9.0,
        "limit_gib": 8.0,
        "tokens_per_second": 7.0,
        **dict.fromkeys(
            ("full_run_hours", "interval_hours", "full_run_usd", "spot_usd", "evidence")
        ),
        "measurements_on_this_card": 3,
    }
    assert summary_data(replace(EMPTY, cards=(card,)), ".")["cards"][0]["card"] == card.device.name


def test_seconds_of_probes_are_summed_up():
    probes = (
        result(seconds={"total": 3.0}),
        result(seconds={"load": 9.0}),
        result(seconds={"total": 0.5, "load": 9.0}),
    )
    assert replace(EMPTY, probes=probes).probe_seconds == 3.5


# --- what was learned


def learned(size: int, hours: float, loss: float | None, reason: str | None = None) -> Learned:
    config = TrainConfig(micro_batch_size=size)
    return Learned(
        config=config,
        full_run_hours=hours,
        full_run_usd=None,
        seconds=1.0,
        loss_after=loss,
        reason=reason,
    )


def quality(*each: Learned) -> Quality:
    return Quality(steps=20, trained_on=640, held_out=64, tokens=32, learned=each)


def test_who_learned_most_and_whom_none_beats_in_loss_and_time():
    fast, slow, worse, best = (
        learned(1, 1.0, 2.0),
        learned(2, 3.0, 1.5),
        learned(4, 2.0, 2.5),
        learned(8, 9.0, 0.0),
    )
    equal, failed, late = learned(16, 1.0, 2.2), learned(32, 0.5, None), learned(64, 4.0, 1.5)
    made = quality(worse, failed, late, slow, equal, best, fast)
    assert made.ranked() == (best, late, slow, fast, equal, worse, failed)
    assert made.pareto_front() == (fast, slow, best)


@pytest.mark.parametrize(
    ("each", "said"),
    [
        (
            (learned(1, 1.0, 2.0),),
            "the winner's loss is unknown: --quality trained other finalists",
        ),
        (
            (learned(8, 1.0, None, "it crashed"),),
            "the winner's loss is unknown, because its training failed: it crashed",
        ),
        ((learned(8, 1.0, 2.0), learned(1, 1.0, 2.0)), ""),
        ((learned(8, 1.0, 2.0), learned(1, 1.0, None)), ""),
        (
            (learned(8, 1.0, 2.0), learned(1, 1.0, 1.9), learned(2, 1.0, 1.5)),
            f"{TrainConfig(micro_batch_size=2).label()} learned more in 20 steps from one seed: "
            "loss 1.5000 against the winner's 2.0000",
        ),
    ],
)
def test_what_a_reader_should_know_of_the_winners_loss(each: tuple[Learned, ...], said: str):
    notes = quality(*each).notes(TrainConfig(micro_batch_size=8))
    assert [note[: len(said)] for note in notes] == [said] * bool(said)


# --- what the exported run did


def run(**changes: Any) -> Verification:
    """A run that was promised 2 s a step and 20 GiB, and kept to it."""
    values: dict[str, Any] = {
        **{
            "config": TrainConfig(),
            "micro_steps": 4,
            "tolerance": 0.1,
            "promised_tokens_per_s": 1000.0,
        },
        **{
            "promised_step_s": 2.0,
            "promised_gib": 20.0,
            "seconds_per_step": 2.0,
            "reserved_gib": 20.0,
        },
    }
    return Verification(**values | changes)


@pytest.mark.parametrize(
    ("changes", "worse", "better"),
    [
        ({}, (), ()),
        ({"seconds_per_step": 2.18, "reserved_gib": 22.0}, (), ()),  # 9 % each, as 20 of 22 is
        ({"seconds_per_step": 2.25}, ("slower",), ()),
        ({"seconds_per_step": 1.75}, (), ("faster",)),
        ({"reserved_gib": 25.0}, ("larger",), ()),
        ({"reserved_gib": 16.0}, (), ("smaller",)),
        ({"seconds_per_step": 3.0, "reserved_gib": 40.0}, ("slower", "larger"), ()),
        ({"seconds_per_step": 1.0, "reserved_gib": 10.0}, (), ("faster", "smaller")),
        ({"seconds_per_step": 1.0, "reserved_gib": None}, (), ("faster",)),
        # nothing was promised
        ({"seconds_per_step": 3.0, "reserved_gib": 40.0, "probed": False}, (), ()),
        ({"seconds_per_step": 3.0, "reserved_gib": 40.0, "soak": True}, ("larger",), ()),
        ({"seconds_per_step": 1.0, "reserved_gib": 10.0, "soak": True}, (), ()),
    ],
)
def test_a_run_is_as_promised_within_the_tolerance(
    changes: dict[str, Any], worse: Any, better: Any
):
    made = run(**changes)
    assert (made.worse, made.better, made.holds) == (worse, better, not worse)


def test_the_errors_of_a_run_are_promised_over_done():
    made = run(seconds_per_step=2.5, reserved_gib=16.0)
    assert (made.tokens_per_s, made.speed_error, made.memory_error) == (800.0, 0.25, 0.25)
    failed = run(seconds_per_step=None, reserved_gib=None, reason="it crashed")
    assert failed.tokens_per_s is failed.speed_error is failed.memory_error is None
    assert not failed.holds and failed.worse == failed.better == ()


@pytest.mark.parametrize(
    ("peaks_gib", "grown"),
    [
        ((9.0, 10.0, 10.0, 10.25), (10.0, 10.25)),
        ((9.0, 10.0, 99.0, 10.15), None),  # 2 % of 10 GiB may come and go
        ((1.0, 1.0, 1.0, 1.09), None),  # or a tenth of a GiB
        ((1.0, 1.0, 1.0, 1.11), (1.0, 1.11)),
        ((9.0, 10.0, 12.0), None),
        ((), None),
    ],
)
def test_memory_that_grows_in_a_soak_does_not_hold(peaks_gib: tuple[float, ...], grown: Any):
    soak = run(soak=True, peaks_gib=peaks_gib)
    assert soak.memory_growth_gib == grown and soak.holds is (grown is None)
    assert run(peaks_gib=peaks_gib).memory_growth_gib is None


def test_a_verification_in_the_summary_says_whether_it_holds():
    for seconds, holds in ((2.0, True), (3.0, False)):
        data = summary_data(
            replace(EMPTY, verification=run(seconds_per_step=seconds), quality=quality()), "."
        )
        assert (
            data["verification"]["holds"] is holds and data["verification"]["promised_gib"] == 20.0
        )
        assert data["quality"]["steps"] == 20
