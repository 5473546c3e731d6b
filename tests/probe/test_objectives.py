"""Probes of trainings for other objectives than the next token, through the trainers that people
use for them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.core.objective import Objective
from autotune.core.probe_types import Measurement, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import extrapolate
from autotune.probe.model_settings import model_settings
from autotune.probe.supervisor import WorkerProber
from autotune.study.evaluator import truncate_request
from autotune.trainer.model_builder import build, config_of
from tests.helpers.factories import TINY
from tests.helpers.probing import measured

pytestmark = pytest.mark.probe
MODEL = TINY | {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 4096,
}
MEASURED = [objective for objective in Objective if not objective.generates]
OTHERS = [objective for objective in MEASURED if objective is not Objective.SFT]


SMALL = MODEL | {"num_hidden_layers": 2}


def request(objective: Objective, model: dict[str, Any] = MODEL, **knobs: Any) -> ProbeRequest:
    values = {
        "micro_batch_size": 8,
        "seq_len": 64,
        "precision": "fp32",
        "checkpointing": "none",
    } | knobs
    if objective.trainers == ("trl",):
        pytest.importorskip("trl")
    return ProbeRequest(
        config=TrainConfig(**values),
        model=model,
        device="cpu",
        memory_gib=4.0,
        trainer=objective.trainers[0],
        objective=objective,
        min_timed_s=0.0,
        min_timed_micros=1,
        trained_share=0.5,
        evaluate=True,
    )


def not_evaluated(objective: Objective, seq_len: int) -> ProbeRequest:
    """A request as a study makes it: only a confirmation evaluates."""
    return replace(request(objective, seq_len=seq_len), evaluate=False)


SEEN: dict[str, Measurement] = {}


def first_time(prober: WorkerProber, asked: ProbeRequest) -> Measurement:
    """What this request measured when a test first needed it."""
    if asked.digest not in SEEN:
        SEEN[asked.digest] = measured(prober, asked)
    return SEEN[asked.digest]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("objective", OTHERS)
def test_a_probe_trains_for_its_objective_and_leaves_nothing(
    prober: WorkerProber, objective: Objective, method: str
) -> None:
    """What is learned first is known: no preference between two answers, and no more of one class
    than of the other.
    """
    sft = request(Objective.SFT, SMALL, method=method)
    before = first_time(prober, sft)
    other = measured(prober, request(objective, SMALL, method=method))
    first = {Objective.KTO: 0.5}.get(objective, 0.6931)
    assert other.micro_steps * other.losses[0] == pytest.approx(
        first, rel=0.1 if objective.num_labels else 1e-3
    )
    assert {"forward", "backward", "backward_layers", "optimizer"} <= set(other.segment_peak_gib)
    reference = before.model_gib if objective.has_reference and method == "full" else 0.0
    # that over the vocabulary is not there
    head = 4 * 4096 * 64 / 2**30 if objective.num_labels else 0.0
    assert other.model_gib == pytest.approx(before.model_gib + reference - head, rel=0.02)
    assert measured(prober, sft).losses == before.losses


@pytest.mark.parametrize("objective", OTHERS)
def test_two_depths_predict_what_an_objective_needs(
    prober: WorkerProber, objective: Objective
) -> None:
    # one over the vocabulary holds much of each token
    asked = not_evaluated(objective, 256 if objective.num_labels else 128)
    low, high = (measured(prober, truncate_request(asked, depth)) for depth in (1, 2))
    whole = first_time(prober, asked)
    predicted = extrapolate([(1, low), (2, high)], 4).measurement
    assert predicted.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.05)


@pytest.mark.parametrize("objective", [Objective.REWARD, Objective.CLASSIFICATION])
def test_a_head_over_labels_is_made_for_real_weights(
    prober: WorkerProber, objective: Objective, tmp_path: Path
) -> None:
    """Of a model without a padding token."""
    settings = model_settings(TrainConfig(precision="bf16_pure", attention="eager"), "llama")
    build(config_of(MODEL), settings, torch.device("cpu")).save_pretrained(tmp_path)
    found = measured(prober, replace(request(objective), weights=str(tmp_path)))
    assert (
        found.losses
        and found.total_params < 4096 * 64 + measured(prober, request(Objective.SFT)).total_params
    )


def test_a_pair_takes_twice_the_memory_of_an_example(prober: WorkerProber) -> None:
    reward, labels = (
        first_time(prober, not_evaluated(objective, 256)).peak_allocated_gib
        for objective in (Objective.REWARD, Objective.CLASSIFICATION)
    )
    assert reward / labels == pytest.approx(2.0, rel=0.15)


def test_a_probe_for_another_objective_is_another_probe() -> None:
    digests = {request(objective).digest for objective in MEASURED}
    assert len(digests) == len(MEASURED)
    sft = request(Objective.SFT)
    assert replace(sft, objective=Objective.SFT).digest == sft.digest
