"""Sensors are read while steps are timed, and a phase that takes too long is noticed."""

import os
import subprocess
import sys
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from autotune.core.core_use import CoreUse, num_usable_cores
from autotune.core.probe_types import Phase, Telemetry
from autotune.probe import monitor
from autotune.probe.monitor import DEADLINES, Monitor
from autotune.problem.disturbance import disturbance
from tests.helpers.factories import measurement


class Sensors:
    """A card whose power and temperature rise with every sample."""

    def __init__(self) -> None:
        self.count = 0
        self.asked: list[tuple[float, Collection[int]]] = []

    def use_by_others(self, since_s: float, own: Collection[int]) -> float:
        self.asked.append((since_s, own))
        return 0.25

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
        utilization=0.5,
        power_w=250.0,
        energy_j=1000.0,
        throttle_reasons=("sw_power_cap",),
        num_samples=2,
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
    assert not watched.is_expired()
    now += 1.0
    assert watched.is_expired()
    watched.enter(Phase.CLEANUP)
    assert not watched.is_expired()


def watched(*samples: Telemetry) -> Monitor:
    """A monitor that has seen these samples while steps were timed, after one of an idle card."""
    idle = Telemetry(
        utilization=0.0, power_w=1.0, energy_j=1.0, temperature_c=1.0, sm_clock_mhz=1.0
    )
    left = [idle, *samples]
    sensors: Any = SimpleNamespace(sample=lambda: left.pop(0))
    made = Monitor(sensors)
    made.enter(Phase.STEADY)
    for _ in samples:
        made.tick()
    return made


def test_means_are_over_the_samples_that_have_a_value() -> None:
    found = watched(
        Telemetry(
            utilization=0.5,
            temperature_c=50.0,
            sm_clock_mhz=1000.0,
            energy_j=100.0,
            throttle_reasons=("b",),
        ),
        Telemetry(
            utilization=None, temperature_c=60.0, sm_clock_mhz=1500.0, throttle_reasons=("a", "b")
        ),
        Telemetry(utilization=1.0, temperature_c=None, sm_clock_mhz=2000.0, energy_j=350.0),
    ).telemetry()
    assert found == Telemetry(
        utilization=0.75,
        power_w=None,
        energy_j=250.0,
        temperature_c=55.0,
        sm_clock_mhz=1500.0,
        throttle_reasons=("a", "b"),
        num_samples=3,
    )


@pytest.mark.parametrize("energies", [(None, 5.0), (5.0, None)])
def test_energy_that_is_not_known_at_both_ends_is_not_known(
    energies: tuple[float | None, float | None],
) -> None:
    found = watched(*(Telemetry(energy_j=one) for one in energies)).telemetry()
    assert found is not None and found.energy_j is None


def test_a_fault_reports_heat_and_leaves_the_rest_of_a_sample() -> None:
    sensors: Any = Sensors()
    hot = Monitor(sensors, throttled=True)
    hot.enter(Phase.STEADY)
    hot.tick()
    found = hot.telemetry()
    assert (
        found is not None
        and found.throttle_reasons == (monitor.THERMAL,)
        and found.power_w == 200.0
    )


def test_how_long_a_phase_may_take_by_hand() -> None:
    """Compilation happens in the first step."""
    seconds = {
        Phase.START: 240,
        Phase.LOAD: 600,
        Phase.FIRST_STEP: 900,
        Phase.STEADY: 900,
        Phase.PROFILE: 600,
        Phase.ROLLOUT: 900,
        Phase.SLEEP: 120,
        Phase.WAKE: 120,
    }
    short = (Phase.EVALUATE, Phase.SAVE, Phase.CLEANUP, Phase.TRANSFER)
    assert seconds | dict.fromkeys(short, 300) == DEADLINES
    assert monitor.THERMAL == "hardware thermal"


def test_the_use_of_cores_by_others_is_that_of_the_timed_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uses = iter([CoreUse(10.0, 50.0, 5.0), CoreUse(12.0, 56.0, 7.0)])
    monkeypatch.setattr(CoreUse, "now", lambda: next(uses))
    watched = Monitor(None)
    watched.enter(Phase.FIRST_STEP)
    assert watched.core_use() is None
    watched.enter(Phase.STEADY)
    watched.enter(Phase.STEADY)  # of another rank
    assert watched.core_use() is None
    watched.enter(Phase.CLEANUP)
    assert watched.core_use() == (1.0, 2.0)
    found = watched.complete(measurement())
    assert (found.own_cores, found.other_cores, found.other_gpu) == (1.0, 2.0, None)


def test_without_counters_the_use_of_cores_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoreUse, "now", lambda: None)
    watched = Monitor(None)
    watched.enter(Phase.STEADY)
    watched.enter(Phase.CLEANUP)
    assert watched.core_use() is None


def test_the_use_of_the_gpu_by_others_is_that_of_the_timed_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sensors: Any = Sensors()
    clock = iter([100.0, 200.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    watched = Monitor(sensors)
    for phase in (Phase.FIRST_STEP, Phase.STEADY, Phase.STEADY, Phase.EVALUATE, Phase.SAVE):
        watched.enter(phase)
    assert watched.complete(measurement()).other_gpu == 0.25
    ((since_s, own),) = sensors.asked
    assert since_s == 100.0 and os.getpid() in own


@pytest.mark.real_processes
def test_a_busy_process_of_somebody_else_disturbs_a_probe() -> None:
    """It is a process of nobody that the test started, on each core."""
    cores = num_usable_cores()
    busy = f"{sys.executable} -c 'while True: pass' > /dev/null & echo $!"
    others = [
        psutil.Process(int(subprocess.check_output(["sh", "-c", busy]))) for _ in range(cores)
    ]
    try:
        watched = Monitor(None)
        watched.enter(Phase.STEADY)
        time.sleep(0.5)
        watched.enter(Phase.CLEANUP)
    finally:
        for other in others:
            other.kill()
    found = watched.complete(measurement())
    reason = disturbance(found, on_cpu=True, cores=cores, environment={})
    assert reason == f"other processes used {found.other_cores:.1f} of {cores} cores"
