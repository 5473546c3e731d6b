"""The timeline: what each second of a study was spent on, and how busy the GPU was while steps were
timed.
"""

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.probe_types import Outcome, ProbeResult, Rung, Telemetry
from autotune.report import figures
from autotune.report.timeline import KINDS, MAX_SPANS, NUM_SLICES, SET_UP, slices, timeline
from autotune.study.summary import StudySummary
from tests.helpers.factories import measurement, result, summary

# No clock counted half a second of these.
CLOCKS_S = {
    "load": 1.0,
    "first_step": 3.0,
    "steady": 4.0,
    "cleanup": 0.5,
    "total": 9.0,
}


def probe(at: str | None, utilization: float | None = 0.5, **changes: Any) -> ProbeResult:
    measured = measurement(telemetry=Telemetry(utilization=utilization))
    values: dict[str, Any] = {"seconds": CLOCKS_S, "measurement": measured} | changes
    return result(started_at=at and f"2026-11-22T{at}+00:00", **values)


def study(*probes: ProbeResult, wall_s: float = 30.0) -> StudySummary:
    return replace(summary(), probes=probes, wall_seconds=wall_s)


def test_every_second_of_a_probe_is_somewhere() -> None:
    info = timeline(study(probe("10:00:00"), probe("10:00:10", rung=Rung.SHALLOW)))
    assert [(one.kind, one.start_s, one.seconds) for one in info.spans[:4]] == [
        (SET_UP, 0.0, 1.5),
        ("first steps", 1.5, 3.0),
        ("timed steps", 4.5, 4.0),
        (SET_UP, 8.5, 0.5),
    ]
    assert [one.rung for one in info.spans[::4]] == [Rung.FULL, Rung.SHALLOW]
    assert info.spans[4].start_s == 10.0
    assert (info.probe_s, info.spent["timed steps"], tuple(info.spent)) == (18.0, 8.0, KINDS)


def test_utilization_weighs_by_timed_seconds_and_leaves_out_what_is_unknown() -> None:
    short = {"steady": 1.0, "total": 1.0}
    info = timeline(
        study(
            probe("10:00:00", 0.9), probe("10:00:10", 0.4, seconds=short), probe("10:00:20", None)
        )
    )
    assert info.utilization == pytest.approx((0.9 * 4 + 0.4 * 1) / 5)
    assert [
        (one.start_s, one.utilization)
        for one in [span for span in info.spans if span.utilization is not None]
    ] == [(4.5, 0.9), (10.0, 0.4)]
    assert timeline(study(probe("10:00:00", None))).utilization is None
    assert (
        "the GPU's utilization in them is unknown"
        in timeline(study(probe("10:00:00", None))).sentences()[1]
    )


def test_the_sentences() -> None:
    sentences = timeline(study(probe("10:00:00"), probe("10:00:10"))).sentences()
    assert sentences == (
        "Probes ran for 60% of 30 s: 8.0 s timed steps, 6.0 s first steps, 4.0 s set-up and"
        " clean-up.",
        "Timed steps took 27%; a kernel ran in 50% of that time.",
    )
    assert timeline(study()).sentences() == ()
    assert timeline(study(probe("10:00:00"), wall_s=0.0)).sentences() == ()


def test_starts_in_whole_seconds_do_not_overlap() -> None:
    short = {"steady": 1.4, "total": 1.4}
    info = timeline(study(probe("10:00:00", seconds=short), probe("10:00:01", seconds=short)))
    assert [one.start_s for one in info.spans] == [0.0, 1.4]


def test_a_pause_is_left_out_and_reported() -> None:
    info = timeline(study(probe("10:00:00"), probe("23:00:00"), probe("23:00:11")))
    assert [one.start_s for one in info.spans[::4]] == [0.0, 9.0, 20.0]
    assert info.pauses == 1 and info.sentences()[-1] == "The figure leaves out one pause."


def test_probes_without_time_are_left_out() -> None:
    empty = study(
        probe("10:00:00", seconds={}), probe(None), result(outcome=Outcome.REFUSED, seconds={})
    )
    assert timeline(empty).spans == () and figures.timeline(timeline(empty)) is None


def test_the_figure_has_the_utilization_above_the_rungs() -> None:
    drawn = figures.timeline(
        timeline(study(probe("10:00:00"), probe("10:00:10", rung=Rung.CONFIRM)))
    )
    assert drawn is not None
    assert drawn["layout"]["yaxis"]["categoryarray"] == ["confirm", "full"]
    assert [one.get("yaxis", "y") for one in drawn["data"]] == ["y"] * len(KINDS) + ["y2"]
    alone = figures.timeline(timeline(study(probe("10:00:00", None))))
    assert alone is not None and "yaxis2" not in alone["layout"]
    late = figures.timeline(
        timeline(study(*[probe(f"10:{minute:02}:00") for minute in range(0, 40, 1)]))
    )
    assert (
        late is not None
        and late["layout"]["xaxis"]["title"]["text"] == "minutes since the first probe"
    )


def test_a_long_study_is_cut_into_slices() -> None:
    """Two hundred probes of nine seconds, one every ten: each part is spent as each probe is."""
    probes = [
        probe(f"{10 + number // 360}:{number // 6 % 60:02}:{number % 6 * 10:02}")
        for number in range(200)
    ]
    info = timeline(study(*probes, wall_s=2000.0))
    found = slices(info)
    assert len(found) == NUM_SLICES and len(info.spans) == 800 > MAX_SPANS
    for kind in KINDS:
        assert sum(one.shares[kind] * one.seconds for one in found) == pytest.approx(
            info.spent[kind]
        )
        assert found[50].shares[kind] == pytest.approx(info.spent[kind] / info.length_s, abs=0.06)
    assert all(one.utilization == pytest.approx(0.5) for one in found)
    drawn = figures.timeline(info)
    assert (
        drawn is not None
        and drawn["layout"]["barmode"] == "stack"
        and len(drawn["data"]) == len(KINDS) + 1
    )
    assert slices(timeline(study(*probes[:50]))) == ()
