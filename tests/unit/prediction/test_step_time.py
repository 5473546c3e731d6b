"""Step times by formula: within their range of what was measured on an H200, and ordered as they must be."""

from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import StepTimeEstimate, estimate_step_time
from autotune.prediction.transfer import interval

LARGE = {"micro_batch_size": 4, "seq_len": 2048}
TOGETHER = LARGE | {"precision": "bf16_pure", "checkpointing": "none", "compile": "per_layer", "loss": "chunked"}


def reported(model: str = "mistral-7b", **knobs: Any) -> StepTimeEstimate:
    found = estimate_step_time(resolve_model(model), TrainConfig(**knobs))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "knobs", "tokens_per_s"),
    [
        ("mistral-7b", LARGE, 8048),
        ("mistral-7b", LARGE | {"checkpointing": "none"}, 11503),
        ("mistral-7b", LARGE | {"compile": "per_layer"}, 11681),
        ("mistral-7b", LARGE | {"kernels": "liger"}, 9512),
        ("mistral-7b", TOGETHER, 17028),
        ("mistral-7b", TOGETHER | {"micro_batch_size": 1}, 15536),
        ("mistral-7b", TOGETHER | {"quantization": "fp8"}, 21615),
    ],
    ids=str,
)
def test_speeds_that_were_measured_lie_in_the_range(model: str, knobs: dict[str, Any], tokens_per_s: float) -> None:
    found = reported(model, **knobs)
    low, high = interval(found.micro_s, found.error)
    assert low <= TrainConfig(**knobs).tokens / tokens_per_s <= high


def test_small_micro_batches_wait_for_the_host() -> None:
    assert reported(micro_batch_size=1, seq_len=128).error > reported(**LARGE).error


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ({"checkpointing": "full"}, {"checkpointing": "none"}),
        ({"compile": "none"}, {"compile": "per_layer"}),
        ({"quantization": "nf4", "precision": "bf16_pure"}, {"precision": "bf16_pure"}),
        ({"kernels": "torch"}, {"kernels": "liger"}),
        ({"seq_len": 4096}, {"seq_len": 2048}),
    ],
    ids=str,
)
def test_what_takes_longer(slow: dict[str, Any], fast: dict[str, Any]) -> None:
    assert reported(**LARGE | slow).micro_s > reported(**LARGE | fast).micro_s


def test_an_optimizer_step_takes_longer_where_all_is_trained() -> None:
    assert reported(method="full").rest_s > 20 * reported().rest_s


@pytest.mark.parametrize("knobs", [{"quantization": "int8"}, {"quantization": "fp8"}, {"dora": True}], ids=str)
def test_what_nobody_timed_is_unknown(knobs: dict[str, Any]) -> None:
    assert estimate_step_time(resolve_model("mistral-7b"), TrainConfig(**LARGE | knobs)) is None
    assert estimate_step_time(resolve_model("gpt2"), TrainConfig()) is None
