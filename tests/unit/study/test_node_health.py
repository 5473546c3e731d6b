"""Is a node like the others: what of a reading counts, against the median of the fleet, and what is told of it."""

from dataclasses import replace

import pytest

from autotune.core.probe_types import Telemetry
from autotune.study.node_health import NodeReading, apart
from tests.helpers.factories import measurement

LIKE = NodeReading(micro_s=0.5, reserved_gib=20.0, temperature_c=55.0, about="1980 MHz, 650 W")


def test_a_reading_is_of_the_median_micro_batch_with_what_the_driver_tells() -> None:
    told = Telemetry(
        utilization=1.0,
        power_w=312.4,
        energy_j=None,
        temperature_c=81.0,
        sm_clock_mhz=1005.0,
        throttle_reasons=("software thermal",),
        num_samples=9,
    )
    reading = NodeReading.of(measurement(0.5, 20.0, micro_step_s=(0.5, 0.51, 3.0), telemetry=told))
    assert (reading.micro_s, reading.reserved_gib, reading.temperature_c) == (0.51, pytest.approx(20.4), 81.0)
    assert reading.about == "1005 MHz, 312 W, 81 C, slowed down by software thermal"
    silent = NodeReading.of(measurement(telemetry=None))
    assert (silent.temperature_c, silent.about) == (None, "")


def test_nothing_is_apart_where_there_are_no_others() -> None:
    assert apart(LIKE, []) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"micro_s": 0.52, "reserved_gib": 20.3, "temperature_c": 64.0}, []),
        ({"micro_s": 0.55}, ["-9% tokens/s against the fleet's median (1980 MHz, 650 W)"]),
        ({"micro_s": 0.45, "about": ""}, ["+11% tokens/s against the fleet's median"]),
        ({"reserved_gib": 21.0}, ["it reserves 21.0 GiB, the fleet 20.0 GiB"]),
        ({"temperature_c": 70.0}, ["it is at 70 C, the fleet at 55 C"]),
        ({"temperature_c": None}, []),
    ],
)
def test_a_node_apart_says_in_what(changes: dict[str, float], says: list[str]) -> None:
    # One that limps moves no median.
    fleet = [LIKE, LIKE, replace(LIKE, micro_s=5.0, reserved_gib=90.0, temperature_c=95.0)]
    assert apart(replace(LIKE, **changes), fleet) == says


def test_on_processors_that_are_shared_memory_alone_counts() -> None:
    slow = replace(LIKE, micro_s=5.0, temperature_c=95.0)
    assert apart(slow, [LIKE], timed=False) == []
    assert len(apart(replace(slow, reserved_gib=30.0), [LIKE], timed=False)) == 1


def test_a_segment_of_the_allocator_is_not_apart() -> None:
    tiny = replace(LIKE, reserved_gib=0.02)
    assert apart(replace(tiny, reserved_gib=0.035), [tiny]) == []


def test_a_fleet_whose_drivers_say_nothing_has_no_temperature() -> None:
    assert apart(LIKE, [replace(LIKE, temperature_c=None)]) == []
