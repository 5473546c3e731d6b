"""Times and peaks of the phases of a training step, and how many steps are timed."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autotune.core.probe_types import Phase, ProbeRequest
from autotune.probe.meters import Meter

MAX_WARMUP_STEPS = 5
# Relative spread of step times: below the first, more steps add nothing; above the second, more steps are taken.
AGREE_SPREAD, DISAGREE_SPREAD = 0.01, 0.02
ENOUGH_STEPS, ENOUGH_S = 2, 0.3  # two short steps may agree by chance


class NotSteady(Exception):
    """A compiled model was compiled again, or fell back to eager, while it was timed: the times mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of the timed steps.

    `steps` is start to start of whole steps, `micro_batches` each of their micro batches (what the device waits for
    while batches are made included), `rests` what each step takes beyond its micro batches, `phases` the seconds a step
    spends in each phase.
    """

    steps: tuple[float, ...]
    micro_batches: tuple[float, ...]
    rests: tuple[float, ...]
    phases: dict[Phase, float]


class Recorder:
    """Records the phases of each training step, and decides how many steps are timed.

    Step 0 warms up. Step 1 (a later one while something still compiles) shows how long a step takes. From then on steps
    are timed: for `min_timed_s`, fewer if they agree, more if those of a whole model do not. Where reading a peak takes
    time (CPU), peaks are not read in timed steps.
    """

    def __init__(
        self, meter: Meter, request: ProbeRequest, emit: Callable[[Phase], None], state_gib: Callable[[], float]
    ) -> None:
        """`emit` reports a phase to the parent; `state_gib` is the size of what is alive between two steps."""
        self.meter = meter
        self.request = request
        self.emit = emit
        self._state_gib = state_gib
        self.phase = Phase.LOAD
        self.step = 0
        self.first_timed: int | None = None
        self.last_timed: int | None = None
        self.starts: list[list[Any]] = [[]]  # by step: a mark at the start of each micro batch
        self.ends: list[list[Any]] = [[]]  # by step: a mark at the end of each micro batch
        self.fetches: list[tuple[Any, Any]] = []  # by step: marks around the making of all its batches
        self.spans: list[tuple[int, Phase, Any, Any]] = []  # step, phase, and its two marks
        self.peaks: dict[Phase, float] = {}
        self.segments: dict[str, float] = {}
        self.segment = ""  # a part of the phase, where it has parts
        self.issued: list[float] = []  # seconds the host took for each micro batch, until the next one of its step
        self.reserved = 0.0
        self.losses: list[torch.Tensor] = []
        self.retried_in: Phase | None = None  # where the allocator first had to return cached memory and try again
        self._mark: Any = None
        self._graphs = 0
        self._began = 0.0
        self._agree_at = ENOUGH_STEPS

    def begin(self, phase: Phase) -> None:
        """Begin a phase of the whole probe, not of a training step, and report it to the parent."""
        self.phase = phase
        self.emit(phase)

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin `phase`."""
        if self.meter.peaks_are_free or self.first_timed is None:
            self.weigh()
            self.meter.reset_peak()
        mark = self.meter.mark()
        if self._mark is not None:
            self.spans.append((self.step, self.phase, self._mark, mark))
        self._mark, self.phase, self.segment = mark, phase, ""

    def enter_segment(self, name: str) -> None:
        """Begin a part of the current phase whose peak is recorded apart. Timed steps are not divided."""
        if self.first_timed is None:
            self.weigh()
            self.meter.reset_peak()
            self.segment = name

    def weigh(self) -> None:
        """Add the peak since the last reset to the current phase."""
        allocated, reserved = self.meter.peak_gib()
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0.0), allocated)
        if self.first_timed is None:
            name = self.segment or self.phase.value
            self.segments[name] = max(self.segments.get(name, 0.0), allocated)
        self.reserved = max(self.reserved, reserved)
        if self.retried_in is None and self.meter.alloc_retries():
            self.retried_in = self.phase

    def begin_micro_batch(self) -> None:
        """A micro batch begins with its forward pass."""
        now = time.perf_counter()
        if self.starts[self.step]:
            self.issued[-1] = now - self._began  # the host also works between two micro batches
        self._began = now
        self.enter(Phase.FORWARD)
        self.starts[self.step].append(self._mark)

    def end_micro_batch(self) -> None:
        """The backward pass of a micro batch has ended."""
        self.issued.append(time.perf_counter() - self._began)
        self.enter(Phase.OPTIMIZER)
        self.ends[self.step].append(self._mark)

    def end_step(self) -> bool:
        """An optimizer step has ended, before it is logged. Returns whether to stop."""
        if self.first_timed is None:
            self._plan()
        else:
            self._adapt()
        done = self.step == self.last_timed
        self.step += 1
        self.starts.append([])
        self.ends.append([])
        if done:
            self.enter(Phase.STEADY)
            self.starts[self.step].append(self._mark)
        return done

    def _plan(self) -> None:
        """After a step that is not timed: plan the timed steps, once nothing compiles any more."""
        self.meter.synchronize()
        graphs = compiled_graphs()
        settled = graphs == self._graphs
        self._graphs = graphs
        if not self.meter.peaks_are_free:
            # Buffers that libraries have made meanwhile count as context. Between steps the only tensors alive are
            # weights, adapters and optimizer state, whose size is known.
            self.meter.rebase(self._state_gib())
            if self.step == 0:
                self.peaks.clear()
                self.segments.clear()
                self.reserved = 0.0
        if self.step == 0 or (not settled and self.step < MAX_WARMUP_STEPS - 1):
            return
        step_s = max(self.meter.seconds(self.starts[self.step][0], self._now()), 1e-6)
        self.emit(Phase.STEADY)
        request = self.request
        enough = max(request.min_timed_s / step_s, request.min_timed_micros / request.micro_steps, 1)
        wanted = min(math.ceil(enough), request.max_timed_steps)
        # Where reading peaks costs milliseconds, the step that had them read counts only if it was long.
        self.first_timed = self.step if self.meter.peaks_are_free or step_s > 2.0 else self.step + 1
        self.last_timed = self.first_timed + wanted - 1
        # Packed rows differ: only all of them in turn have the mean of a run.
        self._agree_at = max(ENOUGH_STEPS, math.ceil(ENOUGH_S / step_s), wanted if request.config.packing else 0)

    def _adapt(self) -> None:
        """After a timed step: stop early if steps agree, add one if they disagree, since a busy host adds noise."""
        assert self.first_timed is not None and self.last_timed is not None
        ends = [self.starts[index + 1][0] for index in range(self.first_timed, self.step)]
        if len(ends) + 1 == self._agree_at or self.step == self.last_timed:
            ends.append(self._now())  # waiting for the device may save a step, or show that one is missing
        finished = [
            self.meter.seconds(self.starts[self.first_timed + index][0], end)
            for index, end in enumerate(ends)
            if self.meter.passed(end)
        ]
        if len(finished) < ENOUGH_STEPS:
            return
        spread = (max(finished) - min(finished)) / min(finished)
        if spread < AGREE_SPREAD and len(finished) >= self._agree_at:
            self.last_timed = min(self.last_timed, self.step)
        elif spread > DISAGREE_SPREAD and self.step == self.last_timed and self.request.depth is None:
            num_steps = self.last_timed - self.first_timed + 1
            if num_steps < self.request.max_timed_steps and sum(finished) < 2 * self.request.min_timed_s:
                self.last_timed += 1

    def _now(self) -> Any:
        mark = self.meter.mark()
        self.meter.synchronize()
        return mark

    def host_micro_s(self) -> float | None:
        """Seconds the host alone takes for a micro batch: the shortest, as it waits when the device's queue is full."""
        if self.first_timed is None or self.meter.torch_device.type == "cpu":
            return None
        each = self.request.micro_steps
        timed = self.issued[self.first_timed * each :]
        # The last micro batch of a step is followed by the rest of the step, not by another.
        return min(seconds for index, seconds in enumerate(timed) if each == 1 or (index + 1) % each)

    def check_steady(self) -> None:
        """Raises NotSteady if anything was compiled during the timed steps."""
        if compiled_graphs() != self._graphs:
            raise NotSteady("the compiled model was compiled again while it was timed")
        if self.request.config.compile != "none" and not compiled_graphs():
            raise NotSteady("nothing was compiled: the compiler left the layers as they are")

    def times(self) -> StepTimes:
        """The times of the timed steps.

        Every micro batch counts, not the first of each step alone: after the pause between two steps a card at its
        power limit is faster for a moment.
        """
        assert self.first_timed is not None and self.last_timed is not None
        seconds = self.meter.seconds
        timed = range(self.first_timed, self.last_timed + 1)
        fetches = [seconds(*marks) for marks in self.fetches]
        fetch = statistics.fmean(fetches[self.first_timed : self.last_timed + 1]) / self.request.micro_steps
        steps: list[float] = []
        micros: list[float] = []
        rests: list[float] = []
        for index in timed:
            starts, ends, after = self.starts[index], self.ends[index], self.starts[index + 1][0]
            step = seconds(starts[0], after)
            steps.append(step)
            next_fetch = fetches[index + 1] if index < self.last_timed else 0.0
            if len(starts) == 1:
                micros.append(step - next_fetch + fetch)
                continue
            # What passes between two micro batches (loader, bookkeeping) passes after the last one too.
            gap = statistics.fmean(map(seconds, ends[:-1], starts[1:]))
            rest = max(seconds(ends[-1], after) - gap - next_fetch, 0.0)
            rests.append(rest)
            micros += [micro + fetch for micro in map(seconds, starts[:-1], starts[1:])]
            micros.append(seconds(starts[-1], after) - rest - next_fetch + fetch)
        if self.request.config.packing:
            micros = [statistics.fmean(micros)]  # packed rows differ: a run takes their mean
        phases: dict[Phase, float] = {}
        for index, phase, start, end in self.spans:
            if index in timed:
                phases[phase] = phases.get(phase, 0.0) + seconds(start, end) / len(timed)
        return StepTimes(steps=tuple(steps), micro_batches=tuple(micros), rests=tuple(rests), phases=phases)


def compiled_graphs() -> int:
    """The number of graphs that Dynamo has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
