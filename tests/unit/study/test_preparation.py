"""Preparing a session: what the budget counts, and which options exclude each other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import UsageError
from autotune.problem.setup import set_up
from autotune.problem.study_spec import NamedConfig, StudySpec
from autotune.problem.target import Target
from autotune.study import preparation, worker_group
from autotune.study.optimizer import Optimizer
from autotune.study.preparation import prepare_session
from tests.unit.problem.test_target import card


def spec(**changes: Any) -> StudySpec:
    return StudySpec(
        **{"model": "demo-3m", "gpu": "cpu", "study": "mine", "storage": "sqlite:///a.db"} | changes
    )


def test_reading_the_dataset_does_not_count_against_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that stands still except while the setup, which reads the dataset, takes 100 s."""
    monkeypatch.chdir(tmp_path)
    now = 5.0

    def slow(*arguments: Any) -> Any:
        nonlocal now
        now += 100.0
        return set_up(*arguments)

    monkeypatch.setattr(preparation, "set_up", slow)
    monkeypatch.setattr(preparation.time, "monotonic", lambda: now)
    plan = prepare_session(spec())
    assert plan.started == 105.0 and plan.preparation_s == 100.0 and plan.device == "cpu"


@pytest.mark.parametrize(
    "options",
    [
        {"quality": True, "shallow_only": True},
        {"verify": True, "shallow_only": True},
        {"budget": "soon"},
        {"quality": True, "trainer": "trl"},
        {"gpus": 2, "workers": 2},
        {"gpus": 2, "quality": True},
        {"gpus": 2, "ray": "auto"},
        *(
            {"configs": (NamedConfig(name="a"),), option: True}
            for option in ("quality", "verify", "shallow_only")
        ),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        prepare_session(spec(**options))
    assert list(tmp_path.iterdir()) == []


def test_one_gpu_plays_a_rank_where_too_few_share_out_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    device = resolve_device("h200")
    monkeypatch.setattr(preparation, "find_target", lambda name: Target(device=device, card=card()))
    monkeypatch.setattr(preparation, "visible", lambda: [0, 1])
    said: list[str] = []
    here = prepare_session(spec(model="mistral-7b", gpus=2), said.append).task
    assert (here.numbers_of_gpus, here.probing_gpus, here.plays_ranks, said) == ((2,), 2, False, [])
    compared = prepare_session(spec(model="mistral-7b", gpus="1,2"), said.append).task
    assert (compared.numbers_of_gpus, compared.probing_gpus, said) == ((1, 2), 2, [])
    without_formula = {"gpus": 4, "model": "falcon-h1-1.5b"}
    for asked in ({"gpus": 4}, {"gpus": 2, "play_ranks": True}, without_formula):
        task = prepare_session(spec(**({"model": "mistral-7b"} | asked)), said.append).task
        assert (task.numbers_of_gpus, task.probing_gpus, task.plays_ranks) == (
            (asked["gpus"],),
            1,
            True,
        )
        assert said.pop() == (
            f"one GPU simulates one of {asked['gpus']} ranks: memory is measured, "
            "speeds are projected"
        )
        assert task.search_price == task.price


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"play_ranks": True}, "this study is for one GPU"),
        ({"gpus": 2, "expert_parallel": 2}, "its trainer sends no tokens to experts on another"),
        ({"gpus": 4, "verify": True}, "this machine has 2 and simulates a rank"),
        ({"gpus": 4, "gpu": "rtx-4090-laptop"}, "a host has only one rtx-4090-laptop"),
        (
            {"gpus": 4, "gpu": "memory=24,bf16_tflops=165,bandwidth_gb_s=1008"},
            "the interconnect bandwidth of .* is unknown",
        ),
        (
            {"gpus": 4, "pins": {"sharding": "fsdp2", "offload": True}},
            "with offload to the host's memory",
        ),
    ],
    ids=str,
)
def test_a_rank_is_played_only_where_its_speed_can_be_projected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    device = resolve_device(options.get("gpu", "h200"))
    monkeypatch.setattr(preparation, "find_target", lambda name: Target(device=device, card=card()))
    monkeypatch.setattr(preparation, "visible", lambda: [0, 1])
    with pytest.raises(UsageError, match=reason):
        prepare_session(spec(**({"model": "mistral-7b"} | options)))
    assert list(tmp_path.iterdir()) == []


def test_the_budget_begins_with_the_command_and_covers_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preparation.time, "monotonic", lambda: 7.0)
    assert prepare_session(spec(budget="2m"), began=5.0).search_until == 5.0 + 120.0 - 1.5
    assert prepare_session(spec(budget="10s")).search_until == pytest.approx(7.0 + 10.0 - 0.2)


def test_a_session_is_resolved_and_its_directory_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = prepare_session(spec(budget="90s", workers=3, out="here"))
    assert (plan.budget_s, plan.cards, plan.out, plan.url) == (
        90.0,
        [None, None],
        tmp_path / "here",
        "sqlite:///a.db",
    )
    assert (plan.study, plan.task.model.name, plan.task.device.kind) == ("mine", "demo-3m", "cpu")
    assert (plan.out / "logs").is_dir() and plan.started > 0 and plan.preparation_s >= 0
    adjusted = prepare_session(
        spec(), adjust=lambda setup: replace(setup, task=replace(setup.task, study="another"))
    )
    assert adjusted.study == "another" and adjusted.out == tmp_path / "runs" / "another"
    monkeypatch.setattr("autotune.study.storage.database.network_drive", lambda url: "nfs")
    assert prepare_session(spec()).cards == []  # alone on a network drive
    with pytest.raises(UsageError, match="network drive"):
        prepare_session(spec(workers=2))


def test_a_study_without_a_name_gets_one_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        plan = prepare_session(spec(study=None))
        names.append(plan.study)
        Optimizer.create(plan.url, plan.study, plan.task.space, seed=0).close()
    assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]
    suite = prepare_session(
        spec(study=None, configs=(NamedConfig(name="a"),), pins={"lora_rank": 16})
    )
    assert suite.study == f"{names[0]}-suite" and suite.spec.pins == {"lora_rank": 16}
    assert suite.task.space.choices("lora_rank") != (16,)  # pins are of the cases, not of the space


def test_what_is_missing_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker_group, "find_spec", lambda name: None)
    monkeypatch.setattr("autotune.core.nvml.visible", list)
    with pytest.raises(UsageError, match="ray: Ray is not installed"):
        prepare_session(spec(ray="auto"))
    with pytest.raises(UsageError, match="--budget: ") as caught:
        prepare_session(spec(budget="soon"))
    assert caught.value.remedy == "for example --budget 15m" and list(tmp_path.iterdir()) == []


def test_a_ray_cluster_shares_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker_group, "find_spec", lambda name: object())
    monkeypatch.setattr("autotune.study.storage.database.network_drive", lambda url: "nfs")
    with pytest.raises(UsageError, match="network drive"):
        prepare_session(spec(ray="auto"))
    assert prepare_session(spec()).url == "sqlite:///a.db"
