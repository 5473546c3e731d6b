"""Marks and peaks at the seams of a training step, and the plan of how many steps to time."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from autotune.core.probe_types import Phase, ProbeRequest
from autotune.probe.meters import Meter

MAX_WARMUP_STEPS = 5
# Relative spread of step times: below the first, more of them say nothing new; above the second, they are worth having.
AGREED, DISAGREED = 0.01, 0.02
ENOUGH_TO_AGREE, ENOUGH_S = 2, 0.3  # steps, and seconds of them: two short steps agree by chance


class NotSteady(Exception):
    """A compiled model was compiled again, or fell back to eager, while it was timed: the times mean nothing."""


class Recorder:
    """Marks and peaks at the seams of a training step, and the plan of how many steps to time.

    Step 0 warms up, step 1 tells how long a step takes (later if something still compiles), the rest are timed: for
    `min_timed_s`, fewer if the steps agree, more if those of a whole model do not. Where reading a phase's peak costs
    time (CPU), it is not read in timed steps.
    """

    def __init__(
        self,
        meter: Meter,
        request: ProbeRequest,
        emit: Callable[[Phase], None],
        state_gib: Callable[[], float],
    ) -> None:
        self.meter, self.request, self.emit, self._state_gib = meter, request, emit, state_gib
        self.phase = Phase.FIRST_STEP
        self.step = 0
        self.first_timed: int | None = None
        self.last_timed: int | None = None
        self.starts: list[list[Any]] = [[]]  # by step: a mark at the start of each micro batch
        self.ends: list[list[Any]] = [[]]  # and at its end
        self.fetches: list[tuple[Any, Any]] = []  # by step: marks around the making of its batches
        self.spans: list[tuple[int, Phase, Any, Any]] = []
        self.peaks: dict[Phase, float] = {}
        self.segments: dict[str, float] = {}
        self.segment = ""  # a part of the phase, where it has parts
        self.issued: list[float] = []  # seconds the host took for each micro batch, until the next one of its step
        self.reserved = 0.0
        self.losses: list[torch.Tensor] = []
        self.retried_in: Phase | None = None  # where the allocator first had to give memory back and try again
        self._mark: Any = None
        self._mark_of_fetch: Any = None
        self._graphs = 0
        self._began = 0.0
        self._agree_at = ENOUGH_TO_AGREE

    def enter(self, phase: Phase) -> None:
        """The phase before ends here, and `phase` begins."""
        if self.meter.peaks_are_free or self.first_timed is None:
            self.weigh()
            self.meter.reset_peak()
        mark = self.meter.mark()
        if self._mark is not None:
            self.spans.append((self.step, self.phase, self._mark, mark))
        self._mark, self.phase, self.segment = mark, phase, ""

    def enter_segment(self, name: str) -> None:
        """Within a phase, a part of it whose peak is kept apart. Not in timed steps: their peaks are no other."""
        if self.first_timed is None:
            self.weigh()
            self.meter.reset_peak()
            self.segment = name

    def weigh(self) -> None:
        allocated, reserved = self.meter.peak_gib()
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0.0), allocated)
        if self.first_timed is None:  # timed steps are not parted
            name = self.segment or self.phase.value
            self.segments[name] = max(self.segments.get(name, 0.0), allocated)
        self.reserved = max(self.reserved, reserved)
        if self.retried_in is None and self.meter.alloc_retries():
            self.retried_in = self.phase

    def begin_fetch(self) -> None:
        """All batches of a step are made before the first is trained on."""
        self._mark_of_fetch = self.meter.mark()

    def end_fetch(self) -> None:
        self.fetches.append((self._mark_of_fetch, self.meter.mark()))

    def begin_micro_batch(self) -> None:
        now = time.perf_counter()
        if self.starts[self.step]:
            self.issued[-1] = now - self._began  # what passes between two micro batches is the host's as well
        self._began = now
        self.enter(Phase.FORWARD)
        self.starts[self.step].append(self._mark)

    def end_micro_batch(self) -> None:
        self.issued.append(time.perf_counter() - self._began)
        self.enter(Phase.OPTIMIZER)
        self.ends[self.step].append(self._mark)

    def end_step(self) -> bool:
        """An optimizer step is done; returns whether to stop. The last one ends here, before it is logged."""
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
        self.meter.synchronize()
        graphs = compiled_graphs()
        settled, self._graphs = graphs == self._graphs, graphs
        if not self.meter.peaks_are_free:
            # A process's memory holds more than tensors: buffers that libraries made meanwhile are context. Between
            # steps only weights, adapters and optimizer state are alive, and their size is known.
            self.meter.rebase(self._state_gib())
        if self.step == 0 and not self.meter.peaks_are_free:
            self.peaks.clear()
            self.segments.clear()
            self.reserved = 0.0
        if self.step == 0 or (not settled and self.step < MAX_WARMUP_STEPS - 1):
            return
        step_s = max(self.meter.seconds(self.starts[self.step][0], self._now()), 1e-6)
        self.emit(Phase.STEADY)
        request = self.request
        wanted = max(request.min_timed_s / step_s, request.min_timed_micros / request.micro_steps, 1)
        wanted = min(math.ceil(wanted), request.max_timed_steps)
        # Where reading peaks costs milliseconds, the step that had them read counts only if it was long.
        self.first_timed = self.step if self.meter.peaks_are_free or step_s > 2.0 else self.step + 1
        self.last_timed = self.first_timed + wanted - 1
        # Packed rows differ from one another: only a whole turn of them tells the mean.
        self._agree_at = max(ENOUGH_TO_AGREE, math.ceil(ENOUGH_S / step_s), wanted if request.config.packing else 0)

    def _adapt(self) -> None:
        """Stop early once steps agree, go on a little where they disagree: the host's share of a step is noisy."""
        assert self.first_timed is not None and self.last_timed is not None
        ends = [self.starts[index + 1][0] for index in range(self.first_timed, self.step)]
        if len(ends) + 1 == self._agree_at or self.step == self.last_timed:
            ends.append(self._now())  # worth waiting for the device: it may save the next step, or ask for another
        finished = [
            self.meter.seconds(self.starts[self.first_timed + index][0], end)
            for index, end in enumerate(ends)
            if self.meter.passed(end)
        ]
        if len(finished) < ENOUGH_TO_AGREE:
            return
        spread = (max(finished) - min(finished)) / min(finished)
        if spread < AGREED and len(finished) >= self._agree_at:
            self.last_timed = min(self.last_timed, self.step)
        elif spread > DISAGREED and self.step == self.last_timed and self.request.depth is None:
            num_steps = self.last_timed - self.first_timed + 1
            if num_steps < self.request.max_timed_steps and sum(finished) < 2 * self.request.min_timed_s:
                self.last_timed += 1

    def _now(self) -> Any:
        mark = self.meter.mark()
        self.meter.synchronize()
        return mark

    def host_micro_s(self) -> float | None:
        """The host's own time for a micro batch: the shortest, since issuing blocks once the device's queue is full."""
        if self.first_timed is None or self.meter.torch_device.type == "cpu":
            return None
        each = self.request.micro_steps
        timed = self.issued[self.first_timed * each :]
        # Nothing follows the last one of a step but the rest of the step.
        return min(one for index, one in enumerate(timed) if each == 1 or (index + 1) % each)

    def check_steady(self) -> None:
        """Raises NotSteady if anything was compiled during the timed steps."""
        if compiled_graphs() != self._graphs:
            raise NotSteady("the compiled model was compiled again while it was timed")
        if self.request.config.compile != "none" and not compiled_graphs():
            raise NotSteady("nothing was compiled: the compiler left the layers as they are")

    def times(self) -> tuple[list[float], list[float], list[float], dict[Phase, float]]:
        """(steps, micro batches, rest of each step, seconds a step by phase), of the timed steps.

        What the device waits for while batches are made counts to the micro batches, since more of them take longer.
        Every micro batch counts, not the first of each step alone: after the pause between two steps a card at its
        power limit is faster for a moment.
        """
        assert self.first_timed is not None and self.last_timed is not None
        steps, micros, rests = [], [], []
        between = self.meter.seconds
        timed = range(self.first_timed, self.last_timed + 1)
        fetches = [between(*marks) for marks in self.fetches]
        fetch = statistics.fmean(fetches[self.first_timed : self.last_timed + 1]) / self.request.micro_steps
        for index in timed:
            starts, ends, after = self.starts[index], self.ends[index], self.starts[index + 1][0]
            step = between(starts[0], after)
            steps.append(step)
            following = fetches[index + 1] if index < self.last_timed else 0.0
            if len(starts) == 1:
                micros.append(step - following + fetch)
                continue
            # What passes between two micro batches (loader, bookkeeping) passes after the last one too.
            gap = statistics.fmean(map(between, ends[:-1], starts[1:]))
            rest = max(between(ends[-1], after) - gap - following, 0.0)
            alone = [*map(between, starts[:-1], starts[1:]), between(starts[-1], after) - rest - following]
            micros += [micro + fetch for micro in alone]
            rests.append(rest)
        if self.request.config.packing:
            micros = [statistics.fmean(micros)]  # of rows of several kinds the mean is what a run takes
        phases: dict[Phase, float] = {}
        for index, phase, start, end in self.spans:
            if index in timed:
                phases[phase] = phases.get(phase, 0.0) + between(start, end) / len(timed)
        return steps, micros, rests, phases


def compiled_graphs() -> int:
    """How many graphs Dynamo has compiled in this process so far; 0 where nothing was."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
