"""Is a node like the others: what of a reading counts, against the median of the fleet, and what is
reported of it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult, Rung, Telemetry
from autotune.core.train_config import TrainConfig
from autotune.study import node_health
from autotune.study.node_health import NodeMonitor, NodeReading, differences
from tests.helpers.factories import FINGERPRINT, measurement
from tests.helpers.replay import Answers, ReplayProber, machine
from tests.helpers.sessions import BASELINE, Session, Start, altered, begun, by_tokens

LIKE = NodeReading(micro_s=0.5, reserved_gib=20.0, temperature_c=55.0, about="1980 MHz, 650 W")


def test_a_reading_is_of_the_median_micro_batch_with_what_the_driver_tells() -> None:
    reported = Telemetry(
        utilization=1.0,
        power_w=312.4,
        energy_j=None,
        temperature_c=81.0,
        sm_clock_mhz=1005.0,
        throttle_reasons=("software thermal",),
        num_samples=9,
    )
    reading = NodeReading.of(
        measurement(0.5, 20.0, micro_step_s=(0.5, 0.51, 3.0), telemetry=reported)
    )
    assert (reading.micro_s, reading.reserved_gib, reading.temperature_c) == (
        0.51,
        pytest.approx(20.4),
        81.0,
    )
    assert reading.about == "1005 MHz, 312 W, 81 C, slowed down by software thermal"
    silent = NodeReading.of(measurement(telemetry=None))
    assert (silent.temperature_c, silent.about) == (None, "")


def test_nothing_is_apart_where_there_are_no_others() -> None:
    assert differences(LIKE, []) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"micro_s": 0.52, "reserved_gib": 20.3, "temperature_c": 64.0}, []),
        ({"micro_s": 0.55}, ["-9% tokens/s against the fleet's median (1980 MHz, 650 W)"]),
        ({"micro_s": 0.45, "about": ""}, ["+11% tokens/s against the fleet's median"]),
        ({"reserved_gib": 21.0}, ["it reserves 21.0 GiB, the fleet's median is 20.0 GiB"]),
        ({"reserved_gib": 19.0}, ["it reserves 19.0 GiB, the fleet's median is 20.0 GiB"]),
        ({"reserved_gib": 19.7}, []),
        ({"reserved_gib": 20.45}, ["it reserves 20.4 GiB, the fleet's median is 20.0 GiB"]),
        ({"micro_s": 0.524}, []),
        ({"micro_s": 0.477}, []),
        ({"micro_s": 0.475}, ["+5% tokens/s against the fleet's median (1980 MHz, 650 W)"]),
        ({"temperature_c": 70.0}, ["it is at 70 C, the fleet's median is 55 C"]),
        ({"temperature_c": 40.0}, ["it is at 40 C, the fleet's median is 55 C"]),
        ({"temperature_c": 65.0}, []),
        ({"temperature_c": None}, []),
    ],
)
def test_a_node_apart_says_in_what(changes: dict[str, float], says: list[str]) -> None:
    # One that limps moves no median.
    fleet = [LIKE, LIKE, replace(LIKE, micro_s=5.0, reserved_gib=90.0, temperature_c=95.0)]
    assert differences(replace(LIKE, **changes), fleet) == says


def test_on_processors_that_are_shared_memory_alone_counts() -> None:
    slow = replace(LIKE, micro_s=5.0, temperature_c=95.0)
    assert differences(slow, [LIKE], timed=False) == []
    assert len(differences(replace(slow, reserved_gib=30.0), [LIKE], timed=False)) == 1


def test_a_segment_of_the_allocator_is_not_apart() -> None:
    tiny = replace(LIKE, reserved_gib=0.02)
    assert differences(replace(tiny, reserved_gib=0.035), [tiny]) == []
    assert differences(replace(tiny, reserved_gib=0.02), [replace(tiny, reserved_gib=0.0)]) == []
    assert len(differences(replace(tiny, reserved_gib=0.045), [tiny])) == 1


def test_a_fleet_whose_drivers_say_nothing_has_no_temperature() -> None:
    assert differences(LIKE, [replace(LIKE, temperature_c=None)]) == []


# --- the monitor

SOUND = machine(rate=by_tokens)


def request(config: TrainConfig) -> ProbeRequest:
    return ProbeRequest(config=config, model={}, memory_gib=80.0)


def node(
    session: Session, tmp_path: Path, answers: Answers = SOUND, *, timed: bool = True
) -> NodeMonitor:
    prober: Any = ReplayProber(answers)
    return NodeMonitor(
        prober,
        session.store,
        session.study.trials.selection,
        request,
        timed=timed,
        log=tmp_path / "node.log",
    )


def readings(session: Session) -> list[ProbeResult]:
    return [
        row.result for row in session.store.probes_of_study("one") if row.result.rung is Rung.NODE
    ]


def test_a_node_like_the_others_is_reported_nothing(start: Start, tmp_path: Path) -> None:
    session = begun(start)
    assert node(session, tmp_path).check() == []
    assert [one.notes for one in readings(session)] == [()]
    key, digest = session.study.trials.task.model_key, FINGERPRINT.digest
    assert Rung.NODE in [row.result.rung for row in session.store.probes_of_model(key, digest)]
    session.study.trials.sync()
    assert len(session.study.trials.rows) == 1  # a reading is no trial


def test_a_reading_is_of_the_baseline_timed_for_as_long_as_a_finalist(
    start: Start, tmp_path: Path
) -> None:
    asked: list[ProbeRequest] = []

    def sound(request: ProbeRequest) -> ProbeResult:
        asked.append(request)
        return SOUND(request)

    node(begun(start), tmp_path, sound).check()
    assert [(one.rung, one.min_timed_s) for one in asked] == [(Rung.NODE, 2.0)]


def test_a_node_apart_is_reported_in_what_and_is_no_measure_of_the_next(
    start: Start, tmp_path: Path
) -> None:
    session = begun(start)
    slow = node(session, tmp_path, altered(micro_step_s=1.2))
    (reason,) = slow.check()
    assert reason.startswith("-17% tokens/s against the fleet's median")
    assert node(session, tmp_path).check() == []
    assert slow.check() == [reason]
    assert [one.notes for one in readings(session)] == [(reason,), (), (reason,)]
    # processors are shared
    assert node(session, tmp_path, altered(micro_step_s=1.2), timed=False).check() == []


def test_a_node_on_which_the_baseline_fails_is_apart(start: Start, tmp_path: Path) -> None:
    session = begun(start)
    (reason,) = node(session, tmp_path, machine(limit_gib=0.1)).check()
    assert reason.startswith("the baseline fails here")
    assert [one.outcome for one in readings(session)] == [Outcome.OOM]


def test_without_a_baseline_there_is_nothing_to_look_at(start: Start, tmp_path: Path) -> None:
    session = start(begin=[BASELINE])
    assert node(session, tmp_path).check() == [] and readings(session) == []


def test_a_node_is_looked_at_now_and_then(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = node(begun(start), tmp_path)
    assert not made.is_due()
    later = node_health.time.monotonic() + node_health.CHECK_EVERY_S
    monkeypatch.setattr(node_health.time, "monotonic", lambda: later)
    assert made.is_due()
    made.check()
    assert not made.is_due()


def test_a_node_is_looked_at_every_ten_minutes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(node_health.time, "monotonic", lambda: now[0])
    made = node(start(began=1000.0), tmp_path)
    for begun_s in (1000.0, 1700.0):
        for passed_s, due in ((599.0, False), (600.0, True)):
            now[0] = begun_s + passed_s
            assert made.is_due() is due
        now[0] = 1700.0
        made.check()


def test_a_node_that_has_worked_may_be_warm(start: Start, tmp_path: Path) -> None:
    def at(celsius: float) -> Answers:
        def answer(request: ProbeRequest) -> ProbeResult:
            found = SOUND(request)
            assert found.measurement is not None
            return replace(
                found,
                measurement=replace(found.measurement, telemetry=Telemetry(temperature_c=celsius)),
            )

        return answer

    session = begun(start)
    assert node(session, tmp_path, at(55.0)).check() == []
    warm = node(session, tmp_path, at(80.0))
    assert warm.check() == ["it is at 80 C, the fleet's median is 55 C"]
    assert warm.check() == []
