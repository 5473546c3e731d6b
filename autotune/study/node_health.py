"""Compare a node with the other nodes of its study, to find nodes that are slow or hot.

A node is one worker process of the study. A worker that joins a study measures the baseline before
its first trial, and again every 10 minutes. The leader does not repeat its measurement.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.core.probe_types import Measurement, Outcome, ProbeRequest, Rung, Telemetry
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib
from autotune.study.selection import Selection

if TYPE_CHECKING:
    from autotune.study.evaluator import Prober
    from autotune.study.storage.probe_store import ProbeStore

# A healthy node differs from the median of the other nodes by at most these values. The values for
# speed and memory are fractions of that median.
MAX_SPEED_DIFFERENCE = 0.05
MAX_MEMORY_DIFFERENCE = 0.02
MAX_KELVIN = 10.0
# A difference in memory below this value is ignored, because torch reserves 20 MiB at a time, which
# is a large share of a tiny model's memory.
SEGMENT_GIB = 0.02
CHECK_EVERY_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """The measurement of the baseline on one node.

    A value that the driver does not report is None. `about` describes the GPU's clocks and power in
    words.
    """

    micro_s: float
    reserved_gib: float
    temperature_c: float | None
    about: str

    @classmethod
    def of(cls, measurement: Measurement) -> "NodeReading":
        """Make a reading from the times, the memory and the driver's report of a measurement."""
        telemetry = measurement.telemetry or Telemetry()
        readings = (
            (telemetry.sm_clock_mhz, "MHz"),
            (telemetry.power_w, "W"),
            (telemetry.temperature_c, "C"),
        )
        about = [f"{value:.0f} {unit}" for value, unit in readings if value is not None]
        if telemetry.throttle_reasons:
            about.append(f"slowed down by {', '.join(telemetry.throttle_reasons)}")
        return cls(
            micro_s=statistics.median(measurement.micro_step_s),
            reserved_gib=measurement.peak_reserved_gib,
            temperature_c=telemetry.temperature_c,
            about=", ".join(about),
        )


def differences(
    own: NodeReading, others: Sequence[NodeReading], *, timed: bool = True
) -> list[str]:
    """Describe how a node differs from the median of the other nodes.

    The list is empty if there are no other nodes. Speed and temperature are compared only if
    `timed` is True: on a processor that other processes share, both depend on these processes.
    """
    if not others:
        return []

    reasons = []

    fleet_s = statistics.median(reading.micro_s for reading in others)
    if timed and abs(fleet_s / own.micro_s - 1) > MAX_SPEED_DIFFERENCE:
        about = f" ({own.about})" if own.about else ""
        reasons.append(
            f"{fleet_s / own.micro_s - 1:+.0%} tokens/s against the fleet's median{about}"
        )

    fleet_gib = statistics.median(reading.reserved_gib for reading in others)
    if abs(own.reserved_gib - fleet_gib) > max(MAX_MEMORY_DIFFERENCE * fleet_gib, SEGMENT_GIB):
        reasons.append(
            f"it reserves {fmt_gib(own.reserved_gib)}, the fleet's median is {fmt_gib(fleet_gib)}"
        )

    temperatures = [
        reading.temperature_c for reading in others if reading.temperature_c is not None
    ]
    if timed and temperatures and own.temperature_c is not None:
        fleet_c = statistics.median(temperatures)
        if abs(own.temperature_c - fleet_c) > MAX_KELVIN:
            reasons.append(
                f"it is at {own.temperature_c:.0f} C, the fleet's median is {fleet_c:.0f} C"
            )
    return reasons


@dataclass(slots=True)
class NodeMonitor:
    """Compares this node with the study's other nodes every CHECK_EVERY_S seconds.

    The readings are stored, but they are not results of the study. `selection` holds the study's
    measurements so far. `timed` says whether speeds and temperatures are compared.
    """

    prober: "Prober"
    store: "ProbeStore"
    selection: Selection
    request: Callable[[TrainConfig], ProbeRequest]
    _: KW_ONLY
    timed: bool
    log: Path
    _next_s: float = field(default_factory=lambda: time.monotonic() + CHECK_EVERY_S)
    _is_warm: bool = False

    def is_due(self) -> bool:
        """Whether at least CHECK_EVERY_S seconds have passed since the last check."""
        return time.monotonic() >= self._next_s

    def check(self) -> list[str]:
        """Measure the baseline, and describe how this node differs from the others.

        The list is empty if nothing differs, or if the study has not measured a baseline yet.
        """
        self._next_s = time.monotonic() + CHECK_EVERY_S
        task = self.selection.task
        baseline = self.selection.baseline()
        measured = self.selection.record(baseline).measured if baseline else None
        if baseline is None or measured is None:
            return []
        # The study's own measurement of the baseline, by the leader or a worker, is the first
        # reading.
        others = [NodeReading.of(measured)]
        others += [
            NodeReading.of(row.result.measurement)
            for row in self.store.probes_of_study(task.study)
            if row.result.rung is Rung.NODE
            and row.result.measurement is not None
            and not row.result.notes
        ]

        result = self.prober.probe(
            replace(self.request(baseline), rung=Rung.NODE, min_timed_s=2.0), self.log
        )
        if result.outcome is not Outcome.OK or result.measurement is None:
            reasons = [f"the baseline fails here: {result.reason or result.outcome}"]
        else:
            own = NodeReading.of(result.measurement)
            if self._is_warm:
                # This GPU has worked since its first check, so it is now warmer than the other GPUs
                # were at their first checks.
                own = replace(own, temperature_c=None)
            reasons = differences(own, others, timed=self.timed)

        self._is_warm = True
        result = replace(result, notes=tuple(reasons))
        self.store.add(task.study, None, result, self.prober.fingerprint, model=task.model_key)
        return reasons
