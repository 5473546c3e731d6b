"""Step times by formula: within their range of what was measured on an H200, and ordered as they must be."""

import math
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import (
    DEVICE_ERROR,
    MEASURED_HOST,
    UNKNOWN_HOST,
    StepTimeEstimate,
    divide_step_time,
    estimate_step_time,
)
from autotune.prediction.transfer import USUAL_SHARE, SpeedTransfer, interval
from tests.helpers.factories import measurement

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


OTHER = SpeedTransfer(products=0.5, bytes=0.4, error=0.2)


def test_another_card_changes_the_times_of_the_device_and_not_that_of_the_host() -> None:
    here = reported(**LARGE)
    there = here.on(OTHER)
    assert (there.products_s, there.bytes_s, there.rest_s) == pytest.approx(
        (2 * here.products_s, 2.5 * here.bytes_s, 2.5 * here.rest_s)
    )
    assert here.device_s / there.device_s == pytest.approx(OTHER.ratio(here.products_share))
    assert there.host_s == here.host_s and there.host_share < here.host_share
    small = reported(micro_batch_size=1, seq_len=64)
    assert small.host_share > 0.99 and small.on(OTHER).micro_s == pytest.approx(small.micro_s, rel=0.01)


def test_compiled_layers_and_long_rows_are_more_of_products() -> None:
    plain, compiled, long = reported(**LARGE), reported(**TOGETHER), reported(**LARGE | {"seq_len": 32768})
    assert 0.4 < plain.products_share < 0.7 < compiled.products_share < 1
    assert long.products_share > plain.products_share


def test_the_error_is_that_of_the_part_that_sets_the_pace() -> None:
    large = reported(**LARGE).on(OTHER)
    assert large.error == pytest.approx(math.hypot(DEVICE_ERROR, 0.2), rel=0.01)
    assert reported(micro_batch_size=1, seq_len=64).on(OTHER).error == pytest.approx(MEASURED_HOST.error, rel=0.01)


@pytest.mark.parametrize("host_share", [None, 0.3, 0.9, 1.2])
def test_a_measured_time_has_the_parts_that_the_formula_gives_it(host_share: float | None) -> None:
    formula = reported(**LARGE)
    divided = divide_step_time(measurement(0.5, rest_s=(0.1,), host_share=host_share), formula)
    assert divided.micro_s == pytest.approx(0.5, rel=0.01) and divided.rest_s == 0.1
    assert divided.host_s == pytest.approx(0.5 * min(host_share or 0.0, 0.99))
    assert divided.products_share == pytest.approx(formula.products_share)
    assert divide_step_time(measurement(0.5), None).products_share == USUAL_SHARE
    # What the card sets is known but for the projection, and what the host sets is another host's there.
    error = divided.on(OTHER).error
    assert error == pytest.approx(0.2) if host_share is None else 0.2 < error < UNKNOWN_HOST.error


def test_a_host_that_is_not_known_is_uncertain() -> None:
    config = TrainConfig(micro_batch_size=1, seq_len=64)
    known, unknown = (
        estimate_step_time(resolve_model("mistral-7b"), config, host) for host in (MEASURED_HOST, UNKNOWN_HOST)
    )
    assert known is not None and unknown is not None and known.device_s == unknown.device_s
    assert unknown.host_s == pytest.approx(UNKNOWN_HOST.scale * known.host_s)
    low, high = interval(unknown.micro_s, unknown.error)
    assert low < 0.6 * unknown.micro_s and high > known.micro_s
