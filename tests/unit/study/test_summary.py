"""What a finished study says: counts by hand, and summary.json with every key, also where nothing won."""

import json
from dataclasses import replace

import pytest

from autotune.core.probe_types import Evidence, Outcome, Rung
from autotune.core.train_config import TrainConfig
from autotune.study.summary import StudySummary, TrialRecord, candidate_data, summary_data
from tests.helpers.factories import summary

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


def test_candidate_data():
    winner = summary().recipe.winner
    data = candidate_data(winner)
    assert data["config"] == winner.config.as_dict()
    assert data["performance"]["step_time_s"] == pytest.approx(1.98)
    assert data["memory"] == {
        "model_gib": 13.5,
        "peak_during_training_gib": 53.3,
        "peak_reserved_gib": pytest.approx(53.3 * 1.02),
        "limit_gib": 132.0,
    }
    assert data["cost"]["usd_per_hour"] == 3.39
    assert data["cost"]["full_run_usd"] == pytest.approx(313 * 1.98 / 3600 * 3.39)
    assert len(data["cost"]["interval_usd"]) == len(data["cost"]["interval_hours"]) == 2
    assert data["evidence"] == "measured"
    assert candidate_data(replace(winner, evidence=Evidence.PROJECTED))["evidence"] == "projected"


def test_no_price_is_null():
    winner = summary().recipe.winner
    unpriced = dict.fromkeys(("usd_per_hour", "full_run_usd", "interval_usd", "cost_per_1000_samples_usd"))
    cost = replace(winner.cost, **unpriced, startup_s=20.0)
    data = json.loads(json.dumps(candidate_data(replace(winner, cost=cost))))
    assert {name for name, value in data["cost"].items() if value is None} == set(unpriced)


def test_summary_data():
    study = summary()
    data = json.loads(json.dumps(summary_data(study, "runs/a'; echo"), allow_nan=False))
    assert (data["schema_version"], data["study"], data["out_dir"]) == (1, "h200-mistral-7b", "runs/a'; echo")
    assert (data["model"], data["device"], data["evidence"]) == ("mistralai/Mistral-7B-v0.3", "h200-sxm", "measured")
    assert data["winner"] == json.loads(json.dumps(candidate_data(study.recipe.winner)))
    assert data["speedup"] == pytest.approx(study.recipe.speedup)
    assert data["speedup_interval"][0] < data["speedup"] < data["speedup_interval"][1]
    assert data["trials"] == study.counts()
    assert len(data["cells"]) == 2
    assert data["caveats"] == list(study.recipe.caveats)
    assert data["fingerprint"]["packages"]["torch"] == "2.11.0"


def test_a_study_without_a_winner_has_the_same_keys():
    data = json.loads(json.dumps(summary_data(EMPTY, ".")))
    assert set(data) == set(summary_data(summary(), "."))
    nothing = ("evidence", "model", "device", "winner", "baseline", "speedup", "reason", "search_usd", "fingerprint")
    assert {data[name] for name in nothing} == {None}
    assert (data["cells"], data["caveats"]) == ([], [])
