"""What the parent sees of a probe that runs: the phase it is in, that phase's deadline, and the card's sensors."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from autotune.core.nvml import THROTTLE_REASONS, Nvml, Sample
from autotune.core.probe_types import Phase, Telemetry

HOT = THROTTLE_REASONS[0x40]


class Watch:
    """One probe. The sensors are read while steps are timed; `throttled` has them say, on purpose, that it was hot."""

    def __init__(self, nvml: Nvml | None, deadlines: Mapping[Phase, float], *, throttled: bool = False) -> None:
        self._nvml, self._throttled = nvml, throttled
        self._deadlines = deadlines
        self._samples: list[Sample] = []
        self.phase = Phase.START
        self._since = time.monotonic()

    def enter(self, phase: Phase) -> None:
        self.phase, self._since = phase, time.monotonic()
        self.tick()

    def tick(self) -> None:
        if self.phase is Phase.STEADY and (self._nvml or self._throttled):
            sample = self._nvml.sample() if self._nvml else Sample()
            self._samples.append(replace(sample, throttle_reasons=(HOT,)) if self._throttled else sample)

    def expired(self) -> bool:
        return time.monotonic() - self._since > self._deadlines.get(self.phase, 900)

    def telemetry(self) -> Telemetry | None:
        """Means over the samples; None without a card to ask. The first sample is from before the timed steps' load."""
        samples = self._samples[1:]
        if not samples:
            return None

        def mean(read: Callable[[Sample], float | None]) -> float | None:
            values = [value for value in map(read, samples) if value is not None]
            return statistics.fmean(values) if values else None

        first, last = samples[0].energy_j, samples[-1].energy_j
        return Telemetry(
            utilization=mean(lambda sample: sample.utilization),
            power_w=mean(lambda sample: sample.power_w),
            energy_j=None if first is None or last is None else last - first,
            temperature_c=mean(lambda sample: sample.temperature_c),
            sm_clock_mhz=mean(lambda sample: sample.sm_clock_mhz),
            throttle_reasons=tuple(sorted({reason for sample in samples for reason in sample.throttle_reasons})),
            num_samples=len(samples),
        )
