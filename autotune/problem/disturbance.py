"""Judges whether other work on the machine disturbed the timed steps of a probe.

Times of a disturbed probe are not evidence. Its memory and its outcome are, because other processes
do not change them.
"""

import os
from collections.abc import Mapping

from autotune.core.probe_types import Measurement

# Other work below this share of the cores, or of the GPU, changes a step by less than the reserve
# of a verification.
HARMLESS = 0.05
FULL = 0.9  # share of the cores in use at which other work delays the host of a GPU
# Of 1,158 probes on H200s and H100s (`benchmarks/data`), 8 have a larger range.
STEADY_RANGE = 0.5
# The environment variable of tests that run side by side: their probes always disturb each other.
ASSUME_QUIET = "AUTOTUNE_ASSUME_QUIET"


def disturbance(
    measurement: Measurement,
    *,
    on_cpu: bool,
    cores: int,
    environment: Mapping[str, str] = os.environ,
) -> str | None:
    """Return how other work disturbed the timed steps, or None without a sign of it.

    A probe on a CPU wants all `cores`. The host of a GPU only waits if all of them are in use.
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
        return f"the times of its steps differ by {spread:.0%}"
    return None


def assumes_quiet(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user says that the machine is quiet, so nothing is judged."""
    return bool(environment.get(ASSUME_QUIET))
