"""Logs the phases of a generation or of a GRPO run: seconds, and peaks of the device's memory.

The figures are the memory in use on the whole device, so they include the CUDA context and the
memory of an engine in the same process. `Recorder` measures training steps more closely; it counts
only the memory of torch's allocator.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autotune.core.probe_types import Phase
from autotune.probe.meters import Meter


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One phase: its step, its seconds, and the device's memory, at the peak and afterwards."""

    step: int
    phase: Phase
    seconds: float
    peak_gib: float
    after_gib: float


class PhaseLog:
    """The phases of a process, one after another.

    Each change of the phase waits for the device. `step` is the number of finished steps.
    """

    def __init__(self, meter: Meter, emit: Callable[[Phase], None] = lambda phase: None) -> None:
        """`emit` reports the start of a phase."""
        self.meter = meter
        self.step = 0
        self.phase: Phase | None = None
        self.failed_in: Phase | None = None  # the innermost phase that an error ended
        self.spans: list[Span] = []

        self._emit = emit
        self._began = 0.0
        self._before_gib = 0.0

    def enter(self, phase: Phase | None) -> None:
        """End the current phase and begin `phase`; None begins a pause that is not logged."""
        self.meter.synchronize()
        now = time.perf_counter()
        used_gib = self.meter.used_gib()
        if self.phase is not None:
            self.spans.append(
                Span(
                    step=self.step,
                    phase=self.phase,
                    seconds=now - self._began,
                    peak_gib=self._peak_gib(used_gib),
                    after_gib=used_gib,
                )
            )
        self.phase = phase
        if phase is not None:
            self._emit(phase)
        self.meter.reset_peak()
        self._before_gib = used_gib
        self._began = time.perf_counter()

    def _peak_gib(self, used_gib: float) -> float:
        """The peak since the current phase began.

        Memory that the allocator returned to the device within the phase counts too.
        """
        _, peak = self.meter.peak_gib()
        returned_gib = max(peak - self.meter.reserved_gib(), 0.0)
        return max(self._before_gib, used_gib, used_gib + returned_gib)

    @contextmanager
    def inside(self, phase: Phase) -> Iterator[None]:
        """Enter a phase, and return to the current phase afterwards."""
        outer = self.phase
        try:
            self.enter(phase)
            yield
        except Exception:
            self.failed_in = self.failed_in or phase
            raise
        self.enter(outer)

    def seconds(self, phase: Phase) -> tuple[float, ...]:
        """The seconds of each time that the phase was entered."""
        return tuple(span.seconds for span in self.spans if span.phase is phase)

    def after_gib(self, phase: Phase) -> tuple[float, ...]:
        """The device's memory after each time that the phase was entered."""
        return tuple(span.after_gib for span in self.spans if span.phase is phase)

    def peaks_gib(self) -> dict[Phase, float]:
        """The largest peak of each phase."""
        phases = dict.fromkeys(span.phase for span in self.spans)
        return {
            phase: max(span.peak_gib for span in self.spans if span.phase is phase)
            for phase in phases
        }

    def seconds_per_step(self, steps: range) -> dict[Phase, float]:
        """The mean seconds that each of these steps spends in each phase."""
        timed = [span for span in self.spans if span.step in steps]
        phases = dict.fromkeys(span.phase for span in timed)
        return {
            phase: sum(span.seconds for span in timed if span.phase is phase) / len(steps)
            for phase in phases
        }

    def median_step_s(self, steps: range) -> float:
        """The median of the steps' total seconds."""
        return statistics.median(
            sum(span.seconds for span in self.spans if span.step == step) for step in steps
        )
