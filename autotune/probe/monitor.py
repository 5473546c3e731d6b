"""Watches a running probe: its phase and deadline, the sensors, and other processes' load.

This module runs in the parent process.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from autotune.core.core_use import CoreUse, process_tree
from autotune.core.nvml import THROTTLE_REASONS, Nvml
from autotune.core.probe_types import Measurement, Phase, Telemetry

THERMAL = THROTTLE_REASONS[0x40]
# A phase that takes longer than this number of seconds counts as hung. The first step has a long
# deadline, because torch compiles the model in it.
DEADLINES = {
    Phase.START: 240.0,
    Phase.LOAD: 600.0,
    Phase.FIRST_STEP: 900.0,
    Phase.STEADY: 900.0,
    Phase.EVALUATE: 300.0,
    Phase.ROLLOUT: 900.0,
    Phase.SLEEP: 120.0,
    Phase.WAKE: 120.0,
    Phase.TRANSFER: 300.0,
    Phase.SAVE: 300.0,
    Phase.PROFILE: 600.0,
    Phase.CLEANUP: 300.0,
}


class Monitor:
    """Observes one probe, and reads the sensors while steps are timed."""

    def __init__(self, nvml: Nvml | None, *, throttled: bool = False) -> None:
        """Begin to observe a probe in the phase START.

        `nvml` is None on a CPU. `throttled` injects a fault for tests: every sample then reports
        thermal throttling.
        """
        self._nvml = nvml
        self._throttled = throttled
        self._samples: list[Telemetry] = []
        self._core_uses: list[CoreUse | None] = []  # at the start and at the end of the timed steps
        self._timed_since = 0.0  # seconds since 1970
        self._other_gpu: float | None = None
        self.phase = Phase.START
        self.patience_s = 0.0
        self._since = time.monotonic()

    def enter(self, phase: Phase) -> None:
        """Record that the probe has begun a phase."""
        begins = phase is Phase.STEADY and self.phase is not Phase.STEADY
        ends = phase is not Phase.STEADY and self.phase is Phase.STEADY
        if begins or ends:
            self._core_uses.append(CoreUse.now())
        if begins:
            self._timed_since = time.time()
        elif ends and self._nvml is not None:
            own = set(process_tree(os.getpid()))
            self._other_gpu = self._nvml.use_by_others(self._timed_since, own)

        self.phase = phase
        self._since = time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Take one sample of the sensors if steps are being timed."""
        if self.phase is not Phase.STEADY or not (self._nvml or self._throttled):
            return
        sample = self._nvml.sample() if self._nvml else Telemetry()
        self._samples.append(
            replace(sample, throttle_reasons=(THERMAL,)) if self._throttled else sample
        )

    def deadline_s(self) -> float:
        """The seconds that the current phase may take: at least `patience_s`."""
        return max(DEADLINES[self.phase], self.patience_s)

    def is_expired(self) -> bool:
        """Whether the current phase has taken longer than its deadline."""
        return time.monotonic() - self._since > self.deadline_s()

    def complete(self, measurement: Measurement) -> Measurement:
        """Add the sensors' means and the use of cores and GPU to the worker's measurement."""
        own_cores, other_cores = self.core_use() or (None, None)
        return replace(
            measurement,
            telemetry=self.telemetry(),
            own_cores=own_cores,
            other_cores=other_cores,
            other_gpu=self._other_gpu,
        )

    def core_use(self) -> tuple[float, float] | None:
        """The mean numbers of cores that autotune and other processes used in the timed steps."""
        before, after = (*self._core_uses, None, None)[:2]
        return after.mean_cores_since(before) if before and after else None

    def telemetry(self) -> Telemetry | None:
        """The sensors' means over all samples except the first, or None if there are no others.

        The first sample is read before the timed steps load the GPU.
        """
        samples = self._samples[1:]
        if not samples:
            return None

        def mean(read: Callable[[Telemetry], float | None]) -> float | None:
            values = [value for value in map(read, samples) if value is not None]
            return statistics.fmean(values) if values else None

        first, last = samples[0].energy_j, samples[-1].energy_j
        return Telemetry(
            utilization=mean(lambda sample: sample.utilization),
            power_w=mean(lambda sample: sample.power_w),
            energy_j=None if first is None or last is None else last - first,
            temperature_c=mean(lambda sample: sample.temperature_c),
            sm_clock_mhz=mean(lambda sample: sample.sm_clock_mhz),
            throttle_reasons=tuple(
                sorted({reason for sample in samples for reason in sample.throttle_reasons})
            ),
            num_samples=len(samples),
        )
