"""Calibrations: what a file may hold, how rates are
interpolated, and what replaces a data sheet.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import DeviceSpec, resolve_device, resolve_model
from autotune.cli.commands.calibrate import facts
from autotune.core.errors import UsageError
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import CollectiveRates
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import MEASURED_HOST, UNKNOWN_HOST, estimate_step_time, host_of
from autotune.prediction.transfer import (
    BETWEEN,
    COPIED,
    IN_TRAINING,
    WITHIN,
    calibrated_parts,
    products_tflops,
    replaces_data_sheet,
    speed_transfer,
)
from autotune.problem.calibration import Calibration, kept_path, read_calibration, write_calibration
from tests.helpers.factories import calibration

H200, A10, T4, CPU = map(resolve_device, ("h200", "a10", "t4", "cpu"))


def changed(**values: Any) -> dict[str, Any]:
    data: dict[str, Any] = to_data(calibration())
    rates = values.pop("rates", {})
    return data | values | {"rates": data["rates"] | rates}


# The file


def test_what_was_written_is_read_and_says_where_it_was_found(tmp_path: Path) -> None:
    made = calibration()
    write_calibration(made, tmp_path / "here.json")
    read = read_calibration(tmp_path / "here.json")
    assert replace(read, place=made.place) == made
    assert (
        (tmp_path / "here.json")
        .read_text()
        .startswith('{\n  "device": "a10",\n  "fingerprint": {\n    "device"')
    )
    assert (made.label, read.label) == (
        "calibrated on this machine, 2026-11-22",
        "calibrated by here.json, 2026-11-22",
    )
    assert read.rates.products["bf16"][8192] == made.rates.products["bf16"][8192]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "is no calibration"),
        ("[" * 100_000, "is no calibration"),
        ('{"device": "a10"}', "fingerprint: Field required"),
        (json.dumps(changed(layer_ms=-1)), "a number is not between 1e-06 and 1e+09"),
        (
            json.dumps(changed(rates={"copy_gb_s": math.nan})),
            "a number is not between 1e-06 and 1e+09",
        ),
        (
            json.dumps(changed(rates={"products": {"bf16": {"1" + 400 * "0": 1}}})),
            "a number is not between",
        ),
        (json.dumps(changed(reference=0)), "a number is not between 1e-06 and 1e+09"),
        (
            json.dumps(changed(rates={"products": {"bf16": {"1024": math.inf}}})),
            "a number is not between 1e-06 and 1e+09",
        ),
        (
            json.dumps(changed(rates={"products": {"bf16": {"-1": 1}}})),
            "a number is not between 1e-06 and 1e+09",
        ),
        (json.dumps(changed(rates={"products": {}})), "no matrix multiplication was measured"),
        (
            json.dumps(changed(rates={"products": {"fp32": {"8": 1}, "bf16": {}}})),
            "no matrix multiplication was measured",
        ),
        (
            json.dumps(changed(rates={"products": {"bf16": {"large": 1}}})),
            "rates.products.bf16.large.[key]: ",
        ),
        (json.dumps(changed(day="yesterday")), "day: "),
        (
            json.dumps(changed(schema_version=2)),
            "version 2, and this autotune reads versions up to 1",
        ),
    ],
)
def test_a_broken_file_is_refused_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_calibration(path)
    assert str(caught.value).startswith(f"{path} is no calibration: ") and says in str(caught.value)
    assert caught.value.remedy and str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_calibration(tmp_path / "none.json")


def test_there_is_a_file_for_each_card_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_path("a10") == tmp_path / "autotune" / "calibration" / "a10.json"
    assert kept_path("../../x").parent == kept_path("a10").parent


# Rates


def test_rates_between_two_sizes_are_interpolated_by_logarithms() -> None:
    made = calibration(products={"fp32": {8: 1.0}, "bf16": {4096: 80.0, 1024: 20.0}})
    assert [made.products_tflops(side) for side in (1, 1024, 2048, 4096, 9999)] == pytest.approx(
        [20, 20, 40, 80, 80]
    )
    assert made.products_tflops() == 80.0
    three = calibration(products={"bf16": {1024: 20.0, 4096: 80.0, 16384: 160.0}})
    found = [three.products_tflops(side) for side in (4095.9, 4096, 8192, 99_999)]
    assert found == pytest.approx([80, 80, 80 * 2**0.5, 160], rel=1e-4)


@pytest.mark.parametrize("value", [1e-6, 1e9])
def test_the_ends_of_what_can_be_measured(value: float) -> None:
    made = calibration(layer_ms=value, disk_mb_s=None, reference=None)
    assert made.layer_ms == value
    with pytest.raises(ValueError, match="a number is not between 1e-06 and 1e\\+09"):
        replace(made, layer_ms=value / 2 if value < 1 else value * 2)


@pytest.mark.parametrize(
    ("dtypes", "rate"), [(("fp32", "fp16", "bf16"), 3.0), (("fp32", "fp16"), 2.0), (("fp32",), 1.0)]
)
def test_the_rate_is_that_of_the_dtype_the_card_trains_in(
    dtypes: tuple[str, ...], rate: float
) -> None:
    rates = {"fp32": 1.0, "fp16": 2.0, "bf16": 3.0}
    assert (
        calibration(products={name: {1024: rates[name]} for name in dtypes}).products_tflops()
        == rate
    )


# What it replaces


def as_the_data_sheet(device: DeviceSpec, **changes: Any) -> Calibration:
    """The calibration of a card that reaches what one expects from its data sheet."""
    products, bandwidth = products_tflops(device), device.bandwidth_gb_s
    assert products and bandwidth
    values = {
        "products": {"bf16": {1024: products / IN_TRAINING}},
        "copy_gb_s": COPIED * bandwidth,
        "reference": 1.0,
    }
    return calibration(device=device.name, **values | changes)


def test_a_card_that_reaches_what_is_expected_keeps_its_speed_and_is_more_certain() -> None:
    by_data_sheet = speed_transfer(H200, A10)
    alike, unlike = (
        speed_transfer(H200, A10, calibration=as_the_data_sheet(A10), alike=alike)
        for alike in (True, False)
    )
    assert by_data_sheet and alike and unlike
    for one in (alike, unlike):
        assert (one.products, one.bytes) == pytest.approx(
            (by_data_sheet.products, by_data_sheet.bytes)
        )
    one_known = speed_transfer(H200, A10, [1.0])
    assert one_known and alike.error == one_known.error < unlike.error == by_data_sheet.error
    assert alike.basis == unlike.basis == 0


def test_the_measured_rates_count_and_not_what_others_measured() -> None:
    made = as_the_data_sheet(A10, products={"bf16": {1024: 30.0, 4096: 60.0}}, copy_gb_s=440.0)
    small, large = (
        speed_transfer(H200, A10, [3.0], calibration=made, side=side) for side in (1024, 4096)
    )
    expected = products_tflops(H200)
    assert small and large and expected
    assert large.products == pytest.approx(60 * IN_TRAINING / expected) == 2 * small.products
    assert large.bytes == small.bytes == pytest.approx(440 / COPIED / 4800)
    there, back = (
        speed_transfer(A10, T4, calibration=made),
        speed_transfer(T4, A10, calibration=made),
    )
    assert (
        there
        and back
        and there.products * back.products == pytest.approx(1) == there.bytes * back.bytes
    )


def test_the_training_draws_both_rates_as_one_measurement_does() -> None:
    plain, slower = (
        speed_transfer(H200, A10, calibration=as_the_data_sheet(A10, reference=ratio))
        for ratio in (1.0, 0.5)
    )
    observed = speed_transfer(H200, A10, [0.5])
    assert plain and slower and observed
    for name in ("products", "bytes"):
        assert getattr(slower, name) == pytest.approx(getattr(observed, name))
        assert 0.5 < getattr(slower, name) / getattr(plain, name) < 0.7
    unknown = speed_transfer(
        H200, A10, calibration=as_the_data_sheet(A10, reference=None), alike=True
    )
    assert (
        unknown
        and unknown.products == plain.products
        and unknown.error == math.hypot(BETWEEN, WITHIN)
    )


def test_fp8_is_as_much_faster_as_the_data_sheet_has_it() -> None:
    h100 = resolve_device("h100")
    twice = as_the_data_sheet(
        h100, products={"bf16": {1024: 2 * (products_tflops(h100) or 0) / IN_TRAINING}}
    )
    expected = speed_transfer(H200, h100, precision="fp8")
    found = speed_transfer(H200, h100, precision="fp8", calibration=twice)
    assert found and expected and found.products == pytest.approx(2 * expected.products)
    assert speed_transfer(H200, A10, precision="fp8", calibration=as_the_data_sheet(A10)) is None


def test_a_card_outside_the_catalogue_has_a_speed_once_it_is_calibrated() -> None:
    own = DeviceSpec(
        name="some-laptop-gpu",
        vendor="nvidia",
        compute_capability="8.9",
        memory_gib=8.0,
        source="NVML",
    )
    assert speed_transfer(H200, own) is None
    found = speed_transfer(H200, own, calibration=calibration(device=own.name))
    assert found and found.error == pytest.approx(math.hypot(BETWEEN, WITHIN))


def test_another_card_the_reference_and_a_cpu_are_not_calibrated() -> None:
    assert replaces_data_sheet(calibration(device="a10"), A10)
    for device in (H200, CPU, T4):
        assert not replaces_data_sheet(calibration(device="a10"), device)
    for device in (H200, CPU):
        assert not replaces_data_sheet(calibration(device=device.name), device)
    assert not replaces_data_sheet(None, A10)
    assert (
        calibrated_parts(calibration(device="a10"), A10)
        == "GPU and host calibrated on this machine, 2026-11-22"
    )
    assert (
        calibrated_parts(calibration(device="a10"), T4)
        == "host calibrated on this machine, 2026-11-22"
    )
    assert calibrated_parts(None, A10) is None


def test_the_pace_of_the_host_replaces_the_assumed_one() -> None:
    assert host_of(None) == UNKNOWN_HOST
    # A layer takes the hosts of the measurements 6 ms, and 0.7 times as long again where it is
    # recomputed.
    assert host_of(calibration(layer_ms=10.2)).scale == pytest.approx(1.0)
    assert host_of(calibration(layer_ms=5.1)).scale == pytest.approx(0.5)
    assert host_of(calibration()).error == MEASURED_HOST.error < UNKNOWN_HOST.error
    on_cpu = calibration(device="cpu", compute_capability=None)
    assert host_of(on_cpu) == replace(host_of(calibration()), error=UNKNOWN_HOST.error)


def test_the_size_of_products_is_that_of_the_layers() -> None:
    """Seven matrices of 31 million weights in the mean, times 8,192 tokens: as many multiply-adds
    as 6,340 cubed.
    """
    large, small = (
        estimate_step_time(resolve_model("mistral-7b"), TrainConfig(micro_batch_size=rows))
        for rows in (8, 1)
    )
    assert large and small and large.side == pytest.approx(6340, rel=0.001) == 2 * (small.side or 0)


def test_the_calibration_of_another_card_leaves_what_others_measured() -> None:
    assert speed_transfer(H200, A10, [1.3], calibration=calibration("t4")) == speed_transfer(
        H200, A10, [1.3]
    )


def test_three_problems_of_a_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        read_calibration(tmp_path / "empty.json")
    assert str(caught.value).count("Field required") == 3


def test_the_link_is_that_of_so_many_gpus_and_of_what_they_do() -> None:
    pair = CollectiveRates(num_gpus=2, gather_gb_s=250.0, scatter_gb_s=240.0, reduce_gb_s=150.0)
    made = calibration(collectives=(pair, replace(pair, num_gpus=8, reduce_gb_s=300.0)))
    shards, copies = (Parallelism(num_gpus=2, strategy=strategy) for strategy in ("fsdp2", "ddp"))
    assert (made.bus_gb_s(shards), made.bus_gb_s(copies)) == (240.0, 150.0)
    assert made.bus_gb_s(replace(copies, num_gpus=8)) == 300.0
    assert made.bus_gb_s(replace(shards, num_gpus=4)) is calibration().bus_gb_s(shards) is None
    assert facts(made)["GPUs"].startswith(
        "GB/s by number of GPUs: 2: 250 all-gather, 240 reduce-scatter, 150 all-reduce; 8: "
    )
    with pytest.raises(ValueError, match="a number is not between"):
        calibration(collectives=(replace(pair, reduce_gb_s=0.0),))


def test_a_calibration_of_several_gpus_is_kept(tmp_path: Path) -> None:
    pair = CollectiveRates(num_gpus=2, gather_gb_s=250.0, scatter_gb_s=240.0, reduce_gb_s=150.0)
    path = tmp_path / "made.json"
    write_calibration(calibration(collectives=(pair,)), path)
    assert read_calibration(path).collectives == (pair,)
    old = {name: value for name, value in to_data(calibration()).items() if name != "collectives"}
    path.write_text(json.dumps(old))
    assert read_calibration(path).collectives == ()
