"""A study whose trainer is TRL's SFTTrainer: its space, its key, and what it says where TRL is
missing.
"""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import EnvironmentProblem
from autotune.problem.setup import adapt_to_layers, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target

pytest.importorskip("trl")


def narrowed(monkeypatch: pytest.MonkeyPatch, transformers: str = "5.23.0", **asked: Any) -> Any:
    monkeypatch.setattr("importlib.metadata.version", lambda name: transformers)
    spec = StudySpec(model="mistral-7b", gpu="h200", trainer="trl", **asked)
    return set_up(spec, Target(device=resolve_device("h200")))


def choices(setup: Any, knob: str) -> tuple[Any, ...]:
    found: tuple[Any, ...] = setup.task.space.knob(knob).choices()
    return found


def test_the_space_is_what_sfttrainer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = narrowed(monkeypatch)
    assert choices(setup, "loss") == ("chunked",)
    assert choices(setup, "packing") == (False,)
    assert "sdpa_cudnn" not in choices(narrowed(monkeypatch, space="everything"), "attention")
    assert choices(setup, "precision") == ("bf16_mixed",)
    assert "every_2" in choices(setup, "checkpointing")
    assert choices(narrowed(monkeypatch, "5.17.0"), "checkpointing") == ("none", "full")
    qlora = narrowed(monkeypatch, space="qlora", allow_pure_bf16=True)
    assert "bf16_pure" in choices(qlora, "precision")  # those adapters are bf16 in TRL
    full = narrowed(monkeypatch, space="full", allow_pure_bf16=True)
    assert "bf16_pure" in choices(full, "precision")
    assert all(config.loss == "chunked" for config in setup.task.baselines)
    # TRL's loss knows heads that cap or scale: it stays where ours would be taken out.
    assert choices(adapt_to_layers(setup, None), "loss") == ("chunked",)


def test_probes_of_another_trainer_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task = narrowed(monkeypatch).task
    plain = replace(task, trainer="transformers")
    assert task.model_key != plain.model_key == plain.model.digest


def test_without_trl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "trl" else there(name)
    )
    with pytest.raises(EnvironmentProblem, match="TRL is not installed") as caught:
        set_up(
            StudySpec(model="mistral-7b", gpu="h200", trainer="trl"),
            Target(device=resolve_device("h200")),
        )
    assert caught.value.remedy == "pip install trl"


def test_a_trainer_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="trainer cannot be 'unsloth'"):
        StudySpec(model="mistral-7b", trainer="unsloth")
