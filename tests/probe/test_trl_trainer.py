"""TRL's SFTTrainer as the loop of a real probe."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.errors import UsageError
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import extrapolate
from autotune.probe.supervisor import WorkerProber
from autotune.problem.study_spec import StudySpec
from autotune.study.evaluator import truncate_request
from tests.helpers.factories import TINY
from tests.helpers.probing import measured

pytest.importorskip("trl")
MODEL = TINY | {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "vocab_size": 4096,
}


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


@pytest.mark.probe
@pytest.mark.parametrize(
    "knobs", [{}, {"method": "full"}, {"checkpointing": "every_2"}, {"loader_workers": 2}], ids=str
)
def test_a_probe_through_sfttrainer_learns_what_transformers_trainer_does(
    prober: WorkerProber, knobs: dict[str, Any]
) -> None:
    before, trl, after = (
        measured(prober, request(one, **knobs)) for one in ("transformers", "trl", "transformers")
    )
    assert trl.losses[:2] == pytest.approx(before.losses[:2], rel=1e-4)
    assert after.losses[:2] == before.losses[:2]  # nothing of TRL is left in the worker
    assert trl.trainable_params == before.trainable_params and trl.micro_steps == 2
    assert {"forward", "backward", "backward_layers", "optimizer"} <= set(trl.segment_peak_gib)


@pytest.mark.probe
def test_two_depths_predict_what_sfttrainer_needs(prober: WorkerProber) -> None:
    asked = request(checkpointing="none", micro_batch_size=8, seq_len=256)
    asked = replace(asked, evaluate=False)  # only a confirmation evaluates
    low, high, whole = (
        measured(prober, truncate_request(asked, depth) if depth else asked)
        for depth in (2, 4, None)
    )
    predicted = extrapolate([(2, low), (4, high)], 8).measurement
    assert predicted.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.05)


def test_a_probe_through_another_trainer_is_another_probe() -> None:
    assert request("trl").digest != request("transformers").digest


def test_quality_is_not_asked_of_another_trainer(capfd: pytest.CaptureFixture[str]) -> None:
    from autotune.api.main import main

    with pytest.raises(UsageError, match="--quality trains with transformers' Trainer"):
        main(StudySpec(model="demo-3m", gpu="cpu", trainer="trl", quality=True))
