"""TRL's SFTTrainer as the loop of a study: probed for real, its space narrowed, its exports told apart."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_device
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.probe_types import Measurement, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.export import export_all, keys
from autotune.prediction.depth_extrapolation import extrapolate
from autotune.probe.supervisor import WorkerProber
from autotune.problem.setup import adapt_to_layers, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target
from autotune.study.evaluator import shortened
from tests.helpers.factories import TINY, summary

pytest.importorskip("trl")
MODEL = TINY | {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 4096}


def request(trainer: str = "trl", **knobs: Any) -> ProbeRequest:
    values = {"micro_batch_size": 8, "seq_len": 64, "precision": "fp32", "loss": "chunked"} | knobs
    return ProbeRequest(
        config=TrainConfig(**values),
        model=MODEL,
        device="cpu",
        memory_gib=4.0,
        trainer=trainer,
        min_timed_s=0.0,
        min_timed_micros=1,
        evaluate=True,
    )


def measured(prober: WorkerProber, asked: ProbeRequest) -> Measurement:
    result = prober.probe(asked, prober.logs / "probe.log")
    assert result.measurement is not None and result.notes == (), result.reason
    return result.measurement


@pytest.mark.probe
@pytest.mark.parametrize(
    "knobs", [{}, {"method": "full"}, {"checkpointing": "every_2"}, {"loader_workers": 2}], ids=str
)
def test_a_probe_through_sfttrainer_learns_what_transformers_trainer_does(
    prober: WorkerProber, knobs: dict[str, Any]
) -> None:
    before, trl, after = (measured(prober, request(one, **knobs)) for one in ("transformers", "trl", "transformers"))
    assert trl.losses[:2] == pytest.approx(before.losses[:2], rel=1e-4)
    assert after.losses[:2] == before.losses[:2]  # nothing of TRL is left in the worker
    assert trl.trainable_params == before.trainable_params and trl.micro_steps == 2
    assert {"forward", "backward", "backward_layers", "optimizer"} <= set(trl.segment_peak_gib)


@pytest.mark.probe
def test_two_depths_foretell_what_sfttrainer_needs(prober: WorkerProber) -> None:
    asked = request(checkpointing="none", micro_batch_size=8, seq_len=256)
    low, high, whole = (measured(prober, shortened(asked, depth) if depth else asked) for depth in (2, 4, None))
    foretold = extrapolate([(2, low), (4, high)], 8).measurement
    assert foretold.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.05)


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
    assert choices(setup, "precision") == ("bf16_mixed",)
    assert "every_2" in choices(setup, "checkpointing")
    assert choices(narrowed(monkeypatch, "5.17.0"), "checkpointing") == ("none", "full")
    assert "bf16_pure" in choices(narrowed(monkeypatch, space="qlora"), "precision")  # those adapters are bf16 in TRL
    full = narrowed(monkeypatch, space="full", allow_pure_bf16=True)
    assert "bf16_pure" in choices(full, "precision")
    assert all(config.loss == "chunked" for config in setup.task.baselines())
    # TRL's loss knows heads that cap or scale: it stays where ours would be taken out.
    assert choices(adapt_to_layers(setup, None), "loss") == ("chunked",)


def test_probes_of_another_trainer_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task = narrowed(monkeypatch).task
    plain = replace(task, trainer="transformers")
    assert task.model_key != plain.model_key == plain.model.digest
    assert request("trl").digest != request("transformers").digest


def test_without_trl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "trl" else there(name))
    with pytest.raises(EnvironmentProblem, match="TRL is not installed") as caught:
        set_up(StudySpec(model="mistral-7b", gpu="h200", trainer="trl"), Target(device=resolve_device("h200")))
    assert caught.value.remedy == "pip install trl"


def test_a_trainer_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="trainer cannot be 'unsloth'"):
        StudySpec(model="mistral-7b", trainer="unsloth")


def test_quality_is_not_asked_of_another_trainer(capfd: pytest.CaptureFixture[str]) -> None:
    from autotune.api import prepare_study

    with pytest.raises(UsageError, match="--quality trains with transformers' Trainer"):
        prepare_study(StudySpec(model="demo-3m", gpu="cpu", trainer="trl", quality=True))


@pytest.mark.parametrize("compile", ["none", "per_layer"])
def test_the_export_for_the_trainer_that_was_probed_promises_its_speed(compile: str) -> None:
    known = summary().recipe
    assert known is not None
    config = TrainConfig(loss="chunked", quantization="nf4", compile=compile)
    for trainer in ("transformers", "trl"):
        made = replace(known, winner=replace(known.winner, config=config), trainer=trainer)
        files = export_all(made, ["trl", "train"])
        text = files["trl_sft.yaml"]
        assert yaml.safe_load(text)["load_in_4bit"] is True
        assert f"Probed with {trainer}" in text
        assert ("The speed is that of train.py" in text) is (trainer == "transformers")
        assert ("not with this script" in files["train_config.json"]) is (trainer == "trl")
        named = {item.split()[0] for item in keys.inexpressible("trl", made)}
        assert named == ({"compile"} if compile != "none" else set()) | (
            {"precision"} if trainer == "transformers" else set()
        )
