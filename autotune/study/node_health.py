"""Is a node like the others of its fleet? Each measures the baseline before its results count, and later again."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.probe_types import Measurement
from autotune.core.units import fmt_gib

SPEED, MEMORY, KELVIN = 0.05, 0.02, 10.0  # by how much a node may be off the median of the others
SEGMENT_GIB = 0.02  # torch reserves 20 MiB at a time: of a tiny model that is more than the share


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """The baseline on one node. What its driver does not tell is None."""

    micro_s: float
    reserved_gib: float
    temperature_c: float | None
    about: str  # clocks, power and throttling, in words

    @classmethod
    def of(cls, measurement: Measurement) -> "NodeReading":
        read = measurement.telemetry
        said = []
        if read is not None:
            said += [f"{read.sm_clock_mhz:.0f} MHz"] if read.sm_clock_mhz is not None else []
            said += [f"{read.power_w:.0f} W"] if read.power_w is not None else []
            said += [f"{read.temperature_c:.0f} C"] if read.temperature_c is not None else []
            said += [f"slowed down by {', '.join(read.throttle_reasons)}"] if read.throttle_reasons else []
        return cls(
            micro_s=statistics.median(measurement.micro_step_s),
            reserved_gib=measurement.peak_reserved_gib,
            temperature_c=read.temperature_c if read else None,
            about=", ".join(said),
        )


def apart(own: NodeReading, others: Sequence[NodeReading], *, timed: bool = True) -> list[str]:
    """In what a node differs from the median of the others; nothing where there are none.

    Speeds and temperatures count where they are `timed`: on processors that workers share they tell of the neighbours.
    """
    if not others:
        return []
    found = []
    fleet_s = statistics.median(one.micro_s for one in others)
    if timed and abs(fleet_s / own.micro_s - 1) > SPEED:
        with_what = f" ({own.about})" if own.about else ""
        found.append(f"{fleet_s / own.micro_s - 1:+.0%} tokens/s against the fleet's median{with_what}")
    fleet_gib = statistics.median(one.reserved_gib for one in others)
    if abs(own.reserved_gib - fleet_gib) > max(MEMORY * fleet_gib, SEGMENT_GIB):
        found.append(f"it reserves {fmt_gib(own.reserved_gib)}, the fleet {fmt_gib(fleet_gib)}")
    warmth = [one.temperature_c for one in others if one.temperature_c is not None]
    if timed and warmth and own.temperature_c is not None:
        fleet_c = statistics.median(warmth)
        if abs(own.temperature_c - fleet_c) > KELVIN:
            found.append(f"it is at {own.temperature_c:.0f} C, the fleet at {fleet_c:.0f} C")
    return found
