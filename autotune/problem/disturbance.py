"""Judge whether other work on the machine disturbed the timed steps of a probe.

The times of a disturbed probe cannot be trusted. Its memory and its outcome can still be trusted,
because other processes do not change them.
"""

import os
from collections.abc import Mapping

from autotune.core.probe_types import Measurement

# Other processes are ignored if they use less than this share of the cores, or of the GPU's time,
# because they then change a step time by less than the tolerance of `autotune verify`.
HARMLESS = 0.05
FULL = 0.9  # if at least this share of the cores is in use, other work delays the host
# A probe is treated as disturbed if the range of its step times exceeds this share of their median.
# 8 of 1,158 probes on H200s and H100s (`benchmarks/data`) have a larger range.
STEADY_RANGE = 0.5
# If this environment variable is set, no probe is treated as disturbed. Tests set the variable,
# because probes of tests run at the same time and always disturb each other.
ASSUME_QUIET = "AUTOTUNE_ASSUME_QUIET"


def disturbance(
    measurement: Measurement,
    *,
    on_cpu: bool,
    cores: int,
    environment: Mapping[str, str] = os.environ,
) -> str | None:
    """Return how other work disturbed the timed steps, or None if it did not.

    A probe on a CPU needs all `cores`, so any other work disturbs it. The host of a GPU is
    disturbed only if nearly all cores are in use.
    """
    if assumes_quiet(environment):
        return None

    others = measurement.other_cores or 0.0
    wanted = cores if on_cpu else (measurement.own_cores or 0.0)
    if others >= HARMLESS * cores and wanted + others >= FULL * cores:
        return f"other processes used {others:.1f} of {cores} cores"

    gpu = measurement.other_gpu or 0.0
    if gpu >= HARMLESS:
        return f"other processes used {gpu:.0%} of the GPU's time"

    spread = measurement.step_range or 0.0
    if spread > STEADY_RANGE:
        return f"the times of the timed steps differ by {spread:.0%}"
    return None


def assumes_quiet(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment says that no other work disturbs this machine's probes."""
    return bool(environment.get(ASSUME_QUIET))
