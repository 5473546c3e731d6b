"""What is slow about a machine: from its calibration, and without one from what the kernel says."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.planning import slow_parts as module
from autotune.planning.slow_parts import LIMITS, slow_parts
from autotune.prediction.transfer import products_tflops
from autotune.problem.calibration import Calibration
from tests.helpers.factories import calibration

A10, CPU = resolve_device("a10"), resolve_device("cpu")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the processors and the memory of this machine."""

    def set_to(cores: float, memory_gib: float) -> None:
        monkeypatch.setattr(module, "num_cores", lambda: cores)
        monkeypatch.setattr(module, "host_memory_gib", lambda: memory_gib)

    set_to(16, 64)
    return set_to


def found(of: Calibration | None, device: Any = A10) -> dict[str, str]:
    return {one.limit.part: str(one) for one in slow_parts(of, device)}


def test_a_good_machine_has_nothing_slow(host: Any) -> None:
    good = calibration(products={"bf16": {8192: 90.0}})
    assert found(good) == found(None) == {}


@pytest.mark.parametrize(
    ("changes", "part", "says"),
    [
        ({"disk_mb_s": 90.0}, "disk", "90 MB/s, below 200: "),
        ({"layer_ms": 20.4}, "host", "0.5 times the pace of the hosts"),
        (
            {"products": {"bf16": {1024: 90.0, 8192: 30.0}}},
            "products",
            "of the rate expected from the GPU's data sheet, below",
        ),
        ({"copy_gb_s": 264.0}, "memory of the GPU", "0.5 of the bandwidth"),
    ],
)
def test_each_slow_part_is_named_with_its_limit(
    host: Any, changes: dict[str, Any], part: str, says: str
) -> None:
    slow = found(calibration(**{"products": {"bf16": {8192: 90.0}}} | changes))
    assert list(slow) == [part] and says in slow[part]


def test_processors_and_memory_are_known_without_a_calibration(host: Any) -> None:
    host(2, 8)
    assert list(found(None)) == ["cores", "host memory"]
    assert found(None)["cores"].startswith("2 processors, below 4: ")


def test_what_was_not_measured_is_not_slow(host: Any) -> None:
    """The host of a CPU also computes, and there is no data sheet of it; the disk may not have been
    writable.
    """
    assert (
        found(
            calibration(device="cpu", compute_capability=None, layer_ms=99.0, disk_mb_s=None), CPU
        )
        == {}
    )


def test_each_limit_has_a_reason() -> None:
    assert len({limit.part for limit in LIMITS}) == len(LIMITS)
    assert all(len(limit.why) > 30 and limit.unit for limit in LIMITS)


@pytest.mark.parametrize(
    ("part", "least"),
    [
        ("cores", 4),
        ("host memory", 16),
        ("disk", 200),
        ("link to the GPU", 10),
        ("host", 0.7),
        ("products", 0.75),
        ("memory of the GPU", 0.75),
    ],
)
def test_the_limits(part: str, least: float) -> None:
    assert [limit.least for limit in LIMITS if limit.part == part] == [least]


def test_a_part_at_its_limit_is_not_slow(host: Any) -> None:
    host(4, 16)
    good = calibration(products={"bf16": {8192: 90.0}}, disk_mb_s=200.0)
    assert found(replace(good, rates=replace(good.rates, link_gb_s=10.0))) == {}
    assert list(found(replace(good, rates=replace(good.rates, link_gb_s=9.9)))) == [
        "link to the GPU"
    ]
    host(3.9, 15.9)
    assert list(found(good)) == ["cores", "host memory"]


def test_each_value_by_hand(host: Any) -> None:
    """Products reach 0.67 / 0.72 of what they reach alone, a copy 0.88 of the 600 GB/s; a layer
    took 10.2 ms before.
    """
    host(3, 15)
    expected = products_tflops(A10)
    assert expected is not None
    made = calibration(
        products={"bf16": {8192: 20.0}}, copy_gb_s=132.0, layer_ms=40.8, disk_mb_s=150.0
    )
    made = replace(made, rates=replace(made.rates, link_gb_s=3.0))
    values = {one.limit.part: one.value for one in slow_parts(made, A10)}
    assert values == {
        "cores": 3,
        "host memory": 15,
        "disk": 150.0,
        "link to the GPU": 3.0,
        "host": pytest.approx(0.25),
        "products": pytest.approx(20 * 0.67 / 0.72 / expected),
        "memory of the GPU": pytest.approx(132 / 0.88 / 600),
    }
    units = [one.limit.unit.split()[0] for one in slow_parts(made, A10)]
    assert units == ["processors", "GiB", "MB/s", "GB/s", "times", "of", "of"]
    assert {one.limit.part for one in slow_parts(None, A10)} == {"cores", "host memory"}
    # A card without one of the two rates of its data sheet is judged by the other.
    for unknown, part in (
        ({"bf16_tflops": None, "fp16_tflops": None}, "products"),
        ({"bandwidth_gb_s": None}, None),
    ):
        parts = {one.limit.part for one in slow_parts(made, replace(A10, **unknown))}
        assert set(values) - parts == {part or "memory of the GPU"}


def test_without_a_data_sheet_only_the_host_is_judged(host: Any) -> None:
    """A layer takes ten times the 10.2 ms of the hosts of the measurements."""
    unknown = replace(A10, bf16_tflops=None, fp16_tflops=None, bandwidth_gb_s=None)
    slow = found(
        calibration(layer_ms=102.0, copy_gb_s=1.0, products={"bf16": {8192: 1.0}}), unknown
    )
    assert list(slow) == ["host"] and slow["host"].startswith("0.1 times the pace")
