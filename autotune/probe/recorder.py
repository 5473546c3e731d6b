"""Times and peaks of the phases of a training step, and how many steps are timed."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune.core.probe_types import Phase, ProbeRequest
from autotune.probe.meters import Meter
from autotune.probe.schedule import Schedule
from autotune.trainer.graphs import MicroBatchGraphs

MAX_WARMUP_ROUNDS = 4
# Relative spread of the times of rounds: below the first, more of them add nothing; above the second, more are taken.
AGREE_SPREAD, DISAGREE_SPREAD = 0.01, 0.02
ENOUGH_ROUNDS, ENOUGH_S = 2, 0.3  # two short rounds may agree by chance
WAITING_ROUNDS = (
    3  # where the host waits within a micro batch, its own time, which swings, shows in all of them
)


class NotSteady(Exception):
    """A compiled model was compiled again, or fell back to eager, while it was timed: the times mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of the timed steps.

    `steps` is start to start of whole steps, `micro_batches` each of their micro batches (what the device waits for
    while batches are made included), `rests` what each step takes beyond its micro batches, `phases` the seconds a step
    spends in each phase. With several kinds of micro batch, steps and micro batches are means over all kinds, one for
    each round, and `kinds` has the share and the seconds of each kind, in the order of the request.
    """

    steps: tuple[float, ...]
    micro_batches: tuple[float, ...]
    rests: tuple[float, ...]
    phases: dict[Phase, float]
    kinds: tuple[tuple[float, float], ...] = ()


class Recorder:
    """Records the phases of each training step, and decides how many steps are timed.

    The lead of the schedule warms up. The first round (a later one while something still compiles) shows how long a
    step takes, and counts where that is long. From then on whole rounds are timed: for `min_timed_s`, fewer if they
    agree, more if those of a whole model do not. A CPU's steps are timed half as long, and no more are added: they
    never agree, since every other process of the machine delays some of them. They are timed once all peaks are read,
    with freed memory kept, and unless micro batches are long after a round that fills the heap.
    """

    def __init__(
        self,
        meter: Meter,
        request: ProbeRequest,
        emit: Callable[[Phase], None],
        state_gib: Callable[[], float],
        *,
        planned: bool = False,
        largest: Callable[[float], float] | None = None,
    ) -> None:
        """`emit` reports a phase to the parent; `state_gib` is the size of what is alive between two steps.

        `planned` is as in `Schedule.of`. Where several ranks must take the same steps, `largest` returns the largest of
        their values.
        """
        self.meter = meter
        self.request = request
        self.schedule = Schedule.of(request, planned=planned)
        self.emit = emit
        self._state_gib = state_gib
        self._must_agree = largest is not None
        self._largest = largest or (lambda value: value)
        self.phase = Phase.LOAD
        self.step = 0
        self.first_timed: int | None = None
        self.last_timed: int | None = None
        self.starts: list[list[Any]] = [[]]  # by step: a mark at the start of each micro batch
        self.ends: list[list[Any]] = [[]]  # by step: a mark at the end of each micro batch
        self.fetches: list[
            tuple[Any, Any]
        ] = []  # by step: marks around the making of all its batches
        self.spans: list[
            tuple[int, int, Phase, Any, Any]
        ] = []  # step, micro batches begun in it, phase, two marks
        self.peaks: dict[Phase, float] = {}
        self.segments: dict[str, float] = {}
        self.segment = ""  # a part of the phase, where it has parts
        self.issued: list[
            float
        ] = []  # seconds the host took for each micro batch, until the next one of its step
        self.reserved = 0.0
        self.losses: list[torch.Tensor] = []
        self.evaluated: list[
            Any
        ] = []  # a mark at the end of each micro batch that is only evaluated
        self.retried_in: Phase | None = (
            None  # where the allocator first had to return cached memory and try again
        )
        self._mark: Any = None
        self._graphs = 0
        self._began = 0.0
        self._agree_at = ENOUGH_ROUNDS
        on_cpu = not meter.peaks_are_free
        self._min_timed_s = request.min_timed_s / 2 if on_cpu else request.min_timed_s
        # A single round of many lengths may last as long as all that is wanted.
        self._max_timed_s = (
            0.0 if on_cpu else (5 if self.schedule.uneven else 2) * request.min_timed_s
        )
        self._num_warm = 0  # steps until their plan was made

    def begin(self, phase: Phase) -> None:
        """Begin a phase of the whole probe, not of a training step, and report it to the parent."""
        self.phase = phase
        self.emit(phase)

    def enter(self, phase: Phase, *, timed: bool = True) -> None:
        """End the current phase and begin `phase`. In a CUDA graph no times are taken, since a replay takes none."""
        if self.meter.peaks_are_free or self.first_timed is None:
            self.weigh()
            self.meter.reset_peak()
        if not timed:
            self.phase, self.segment = phase, ""
            return
        mark = self.meter.mark()
        if self._mark is not None:
            self.spans.append(
                (self.step, len(self.starts[self.step]), self.phase, self._mark, mark)
            )
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
        """The backward pass of a micro batch has ended, unless that is known."""
        if len(self.ends[self.step]) == len(self.starts[self.step]):
            return
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
        """After a step that is not timed: plan the timed rounds, once nothing compiles any more."""
        self.meter.synchronize()
        if not self.meter.peaks_are_free:
            # Buffers that libraries have made meanwhile count as context. Between steps the only tensors alive are
            # weights, adapters and optimizer state, whose size is known.
            self.meter.rebase(self._state_gib())
            if self.step == 0:
                self.peaks.clear()
                self.segments.clear()
                self.reserved = 0.0
        schedule, request = self.schedule, self.request
        num_rounds, each = schedule.in_rounds(self.step), len(schedule.round)
        if not num_rounds and self.step >= len(schedule.lead):
            return
        graphs = made_graphs()
        settled = not self._largest(float(graphs != self._graphs))
        self._graphs = graphs
        if not num_rounds or (not settled and num_rounds < MAX_WARMUP_ROUNDS):
            return
        begin = self.step + 1 - each
        step_s = self._largest(
            max(self.meter.seconds(self.starts[begin][0], self._now()) / each, 1e-6)
        )
        self.emit(Phase.STEADY)
        self._num_warm = self.step + 1
        marks = ((self.starts[index], self.ends[index]) for index in range(begin, self.step + 1))
        micro_s = self._largest(
            schedule.mean([seconds for pair in marks for seconds in map(self.meter.seconds, *pair)])
        )
        if self.meter.peaks_are_free:
            counts = num_rounds > 1 or (schedule.first_counts(micro_s) and not self.host_waits())
            self.first_timed = begin if counts else self.step + 1
        else:
            self.meter.keep_freed()
            self.first_timed = self.step + 1 + (0 if micro_s > schedule.long_s else each)
        wanted = schedule.rounds_to_time(request, step_s, self._min_timed_s)
        self.last_timed = (
            self.first_timed + max(wanted, WAITING_ROUNDS if self.host_waits() else 1) * each - 1
        )
        self._agree_at = max(ENOUGH_ROUNDS, math.ceil(ENOUGH_S / (step_s * each)))

    def _adapt(self) -> None:
        """After a timed round: stop early if rounds agree, add one if they disagree, since a busy host adds noise."""
        assert self.first_timed is not None and self.last_timed is not None
        each = len(self.schedule.round)
        num_rounds, inside = divmod(self.step + 1 - self.first_timed, each)
        if (
            inside or self._must_agree
        ):  # which ranks could do at each step only by waiting for each other
            return
        starts = [self.starts[self.first_timed + index * each][0] for index in range(num_rounds)]
        ends = starts[1:]
        if num_rounds == self._agree_at or self.step == self.last_timed:
            ends.append(
                self._now()
            )  # waiting for the device may save a round, or show that one is missing
        marks = zip(starts, ends, strict=False)
        finished = [
            self.meter.seconds(start, end) for start, end in marks if self.meter.passed(end)
        ]
        if len(finished) < ENOUGH_ROUNDS:
            return
        spread = (max(finished) - min(finished)) / min(finished)
        if spread < AGREE_SPREAD and len(finished) >= self._agree_at:
            self.last_timed = min(self.last_timed, self.step)
        elif (
            spread > DISAGREE_SPREAD and self.step == self.last_timed and self.request.depth is None
        ):
            num_steps = self.last_timed - self.first_timed + 1
            if num_steps < self.request.max_timed_steps and sum(finished) < self._max_timed_s:
                self.last_timed += each

    def _now(self) -> Any:
        mark = self.meter.mark()
        self.meter.synchronize()
        return mark

    def host_micro_s(self) -> float | None:
        """Seconds the host alone takes for a micro batch: the shortest, as it waits when the device's queue is full.

        None on a CPU, and where the host waits for the device within a micro batch.
        """
        if self.first_timed is None or self.meter.torch_device.type == "cpu" or self.host_waits():
            return None
        each = self.request.micro_steps
        timed = self.issued[self.first_timed * each :]
        # The last micro batch of a step is followed by the rest of the step, not by another.
        return min(
            seconds for index, seconds in enumerate(timed) if each == 1 or (index + 1) % each
        )

    def host_waits(self) -> bool:
        """Whether the host waits for the device in the midst of a micro batch.

        With images it does: transformers reads their sizes back from the device.
        """
        return any(kind.images for kind in self.request.kinds)

    def warm_s(self, times: StepTimes) -> float:
        """Seconds that the steps until the plan would have taken at the pace of the timed ones."""
        kinds, num_kinds = self.request.kinds, self.schedule.num_kinds
        timed = sorted({index for step in self.schedule.round for index in step})
        means = (
            [statistics.fmean(times.micro_batches)]
            if num_kinds == 1
            else [mean for _, mean in times.kinds]
        )
        by_kind = dict(zip(timed, means, strict=True))
        known = max(by_kind, key=lambda index: kinds[index].length)
        rest = statistics.fmean(times.rests) if times.rests else 0.0
        total = self._num_warm * rest
        for index in (index for step in range(self._num_warm) for index in self.schedule.at(step)):
            # The longest may not be timed: its time is that of the next by its tokens.
            total += by_kind.get(index, by_kind[known] * kinds[index].length / kinds[known].length)
        return total

    def check_steady(self) -> None:
        """Raises NotSteady if anything was compiled, or captured, during the timed steps."""
        if made_graphs() != self._graphs:
            raise NotSteady(
                "the compiled model was compiled again, or a CUDA graph captured, while it was timed"
            )
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
        fetch = statistics.fmean(fetches[self.first_timed :]) / self.request.micro_steps
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
        phases: dict[Phase, float] = {}
        for index, place, phase, start, end in self.spans:
            if index in timed:
                phases[phase] = phases.get(phase, 0.0) + seconds(start, end) * self._weight(
                    index, place, phase
                )
        return self._over_kinds(
            StepTimes(
                steps=tuple(steps), micro_batches=tuple(micros), rests=tuple(rests), phases=phases
            )
        )

    def _weight(self, step: int, place: int, phase: Phase) -> float:
        """What a phase of a timed step counts in a step of the run; `place` micro batches of its step have begun."""
        assert self.first_timed is not None and self.last_timed is not None
        num_timed, each = self.last_timed + 1 - self.first_timed, self.request.micro_steps
        if phase not in (Phase.FORWARD, Phase.BACKWARD):
            return 1 / num_timed
        num_rounds, slot = (
            num_timed / len(self.schedule.round),
            (step - self.first_timed) * each + place - 1,
        )
        return self.schedule.weights[slot % len(self.schedule.weights)] * each / num_rounds

    def _over_kinds(self, times: StepTimes) -> StepTimes:
        """The same for a step of the run, where the kinds of micro batch differ: one value for each timed round."""
        schedule, each = self.schedule, self.request.micro_steps
        if schedule.num_kinds == 1:
            return times
        slots = [index for step in schedule.round for index in step]
        rounds = [
            times.micro_batches[begin:][: len(slots)]
            for begin in range(0, len(times.micro_batches), len(slots))
        ]
        means = [schedule.mean(micros) for micros in rounds]
        rest = statistics.fmean(times.rests) if times.rests else 0.0
        by_slot = [statistics.fmean(micros) for micros in zip(*rounds, strict=True)]
        kinds = []
        for kind in sorted(set(slots)):
            places = [place for place, index in enumerate(slots) if index == kind]
            share = sum(schedule.weights[place] for place in places)
            kinds.append((share, statistics.fmean(by_slot[place] for place in places)))
        return replace(
            times,
            steps=tuple(each * mean + rest for mean in means),
            micro_batches=tuple(means),
            kinds=tuple(kinds),
        )


def made_graphs() -> int:
    """The number of graphs that this process has compiled, and captured, so far."""
    return compiled_graphs() + MicroBatchGraphs.captured


def compiled_graphs() -> int:
    """The number of graphs that Dynamo has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
