"""Sensors are read while steps are timed, and a phase that takes too long is noticed."""

from typing import Any

import pytest

from autotune.core.probe_types import Phase, Telemetry
from autotune.probe import monitor
from autotune.probe.monitor import DEADLINES, Monitor


class Sensors:
    """A card whose power and temperature rise with every sample."""

    def __init__(self) -> None:
        self.count = 0

    def sample(self) -> Telemetry:
        self.count += 1
        return Telemetry(
            utilization=0.5,
            power_w=100.0 * self.count,
            energy_j=1000.0 * self.count,
            temperature_c=None,
            throttle_reasons=("sw_power_cap",) * (self.count > 2),
        )


def test_only_timed_steps_are_watched() -> None:
    sensors: Any = Sensors()
    watched = Monitor(sensors)
    for phase in (Phase.LOAD, Phase.FIRST_STEP, Phase.CLEANUP):
        watched.enter(phase)
        watched.tick()
    assert sensors.count == 0 and watched.telemetry() is None
    watched.enter(Phase.STEADY)
    assert sensors.count == 1 and watched.telemetry() is None  # it precedes the load of the steps
    watched.tick()
    watched.tick()
    watched.enter(Phase.CLEANUP)
    assert watched.telemetry() == Telemetry(
        utilization=0.5, power_w=250.0, energy_j=1000.0, throttle_reasons=("sw_power_cap",), num_samples=2
    )


def test_without_sensors_there_is_nothing_to_read_unless_heat_is_asked_for() -> None:
    plain, hot = Monitor(None), Monitor(None, throttled=True)
    for one in (plain, hot):
        one.enter(Phase.STEADY)
        one.tick()
    found = hot.telemetry()
    assert plain.telemetry() is None and found is not None
    assert found.throttle_reasons == (monitor.THERMAL,) and found.power_w is None


def test_a_phase_expires_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now)
    watched = Monitor(None)
    watched.enter(Phase.STEADY)
    assert watched.deadline_s() == DEADLINES[Phase.STEADY]
    now += DEADLINES[Phase.STEADY]
    assert not watched.expired()
    now += 1.0
    assert watched.expired()
    watched.enter(Phase.CLEANUP)
    assert not watched.expired()
