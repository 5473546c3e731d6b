"""Records the times and memory peaks of a step's phases, and decides how many steps are timed."""

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
# Limits for the relative spread of the times of rounds, (longest - shortest) / shortest. A round
# trains on each kind of micro batch (`Schedule`). Below AGREE_SPREAD, timing ends early. Above
# DISAGREE_SPREAD, the recorder adds a round.
AGREE_SPREAD = 0.01
DISAGREE_SPREAD = 0.02
# Timing ends early only after at least ENOUGH_ROUNDS rounds and ENOUGH_S seconds. Two short rounds
# may agree by chance.
ENOUGH_ROUNDS, ENOUGH_S = 2, 0.3
# The minimum number of timed rounds if the host waits for the device within a micro batch. Every
# round then includes host work, whose time varies.
WAITING_ROUNDS = 3
# A CPU's steps are timed for this share of `ProbeRequest.min_timed_s`.
CPU_SHARE = 0.5


class NotSteady(Exception):
    """A model was compiled again, or ran without compilation, in the timed steps.

    The times of these steps have no meaning.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of the timed steps.

    `steps` is the time of each whole step, from start to start. `micro_batches` has the time of
    each micro batch, including the device's wait for new batches. `rests` has the time that each
    step spends outside its micro batches. `phases` has the mean time that a step spends in each
    phase.

    With several kinds of micro batch, `steps` and `micro_batches` have one value for each round:
    the mean over all kinds. `kinds` has a pair for each kind, in the order of the request: its
    fraction of the micro batches, and its seconds.
    """

    steps: tuple[float, ...]
    micro_batches: tuple[float, ...]
    rests: tuple[float, ...]
    phases: dict[Phase, float]
    kinds: tuple[tuple[float, float], ...] = ()


class Recorder:
    """Records the phases of each training step, and decides how many steps are timed.

    The first steps of the schedule (its lead) warm up. Then comes the first round of steps, which
    shows how long a step takes. The times of this round are used only if its micro batches are long
    (`Schedule.long_s`). If torch still compiles code in this round, a later round takes the place
    of the first round. Then complete rounds are timed for `min_timed_s` seconds. Timing ends
    earlier if the rounds' times agree. If the rounds' times disagree in a probe of a whole model,
    more rounds are timed.

    A CPU's steps are timed for CPU_SHARE of `min_timed_s`, and no rounds are added. Rounds on a CPU
    never agree, because every other process of the machine delays some of them. On a CPU, timing
    starts after all peaks are read, and malloc then keeps freed memory. Unless micro batches are
    long, an untimed round comes first, so that malloc has freed blocks to reuse.
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
        """`emit` reports a phase to the parent; `state_gib` returns the live memory between steps.

        For `planned`, see `Schedule.plan`. If several ranks must take the same steps, `largest`
        returns the largest of the ranks' values.
        """
        self.meter = meter
        self.request = request
        self.schedule = Schedule.plan(request, planned=planned)
        self.emit = emit
        self._state_gib = state_gib
        self._must_agree = largest is not None
        self._largest = largest or (lambda value: value)

        self.phase = Phase.LOAD
        self.step = 0
        self.first_timed: int | None = None
        self.last_timed: int | None = None
        # Marks (times or CUDA events) of each step: the starts and ends of the step's micro
        # batches, and the start and end of loading these micro batches.
        self.starts: list[list[Any]] = [[]]
        self.ends: list[list[Any]] = [[]]
        self.fetches: list[tuple[Any, Any]] = []
        # For each phase of a step: the step, the number of micro batches that the step has begun,
        # the phase, and the marks of the phase's start and end.
        self.spans: list[tuple[int, int, Phase, Any, Any]] = []

        self.peaks: dict[Phase, float] = {}
        self.segments: dict[str, float] = {}
        self.segment = ""  # the current part of a divided phase
        # The host's seconds from the start of each micro batch to the start of the next micro batch
        # in the same step.
        self.issue_s: list[float] = []
        self.reserved = 0.0
        # The allocator's peaks by phase, and its memory at the start of each generation.
        self.reserved_peaks: dict[Phase, float] = {}
        self.between: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.evaluation_ends: list[Any] = []  # a mark for each evaluated micro batch
        # The phase of the allocator's first retry (it freed its cache, and tried to allocate
        # again).
        self.retry_phase: Phase | None = None
        # The allocator's retries before the first steady round. They count as running out of
        # memory unless the model is sharded: the streams of its communication first take memory
        # for themselves, which the allocator takes back once.
        self.early_retries = 0

        self._mark: Any = None
        self._graphs = 0
        self._retries = 0
        self._began = 0.0
        self._agree_at = ENOUGH_ROUNDS

        on_cpu = not meter.peaks_are_free
        self._min_timed_s = request.min_timed_s * (CPU_SHARE if on_cpu else 1.0)
        # If micro batches have many lengths, timing one step of each length may already take
        # `min_timed_s`, so timing may take up to five times `min_timed_s`.
        most = 5 if self.schedule.uneven else 2
        self._max_timed_s = 0.0 if on_cpu else most * request.min_timed_s
        self._num_warm = 0  # the number of steps that are done before the timed steps are planned

    def begin(self, phase: Phase) -> None:
        """Begin a phase of the whole probe, outside training steps, and report it to the parent."""
        self.phase = phase
        self.emit(phase)

    def enter(self, phase: Phase, *, timed: bool = True) -> None:
        """End the current phase and begin `phase`.

        Within a CUDA graph `timed` is false, because a replay records no times.
        """
        if self.meter.peaks_are_free or self.first_timed is None:
            self.record_peak()
            self.meter.reset_peak()
        if timed:
            mark = self.meter.mark()
            if self._mark is not None:
                self.spans.append(
                    (self.step, len(self.starts[self.step]), self.phase, self._mark, mark)
                )
            self._mark = mark
        self.phase = phase
        self.segment = ""

    def enter_segment(self, name: str) -> None:
        """Begin a part of the current phase, with its own peak.

        Timed steps are not divided into parts.
        """
        if self.first_timed is None:
            self.record_peak()
            self.meter.reset_peak()
            self.segment = name

    def record_peak(self) -> None:
        """Record the memory peak since the last reset as a peak of the current phase."""
        allocated, reserved = self.meter.peak_gib()
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0.0), allocated)
        if self.first_timed is None:
            name = self.segment or self.phase.value
            self.segments[name] = max(self.segments.get(name, 0.0), allocated)
        self.reserved = max(self.reserved, reserved)
        self.reserved_peaks[self.phase] = max(self.reserved_peaks.get(self.phase, 0.0), reserved)
        if self.retry_phase is None and self.meter.alloc_retries():
            self.retry_phase = self.phase

    def begin_rollout(self, *, returns_memory: bool) -> None:
        """Begin a generation, in which the trained model waits.

        With `returns_memory`, the allocator returns its unused memory first, as TRL does before it
        wakes a sleeping engine.
        """
        self.enter(Phase.ROLLOUT)
        if returns_memory:
            self.meter.return_unused()
            self.meter.reset_peak()
        self.between.append(self.meter.reserved_gib())

    def begin_micro_batch(self) -> None:
        """Begin a micro batch with its forward pass."""
        now = time.perf_counter()
        if self.starts[self.step]:
            # Include the host's work between the previous micro batch and this one.
            self.issue_s[-1] = now - self._began
        self._began = now
        self.enter(Phase.FORWARD)
        self.starts[self.step].append(self._mark)

    def end_micro_batch(self) -> None:
        """End the backward pass of a micro batch, unless it has ended already."""
        if len(self.ends[self.step]) == len(self.starts[self.step]):
            return
        self.issue_s.append(time.perf_counter() - self._began)
        self.enter(Phase.OPTIMIZER)
        self.ends[self.step].append(self._mark)

    def end_step(self) -> bool:
        """End an optimizer step before its logging, and return whether to stop the Trainer."""
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
        """Plan the timed rounds after an untimed step, once compilation has ended."""
        self.meter.synchronize()
        if not self.meter.peaks_are_free:
            # New buffers of libraries count as context. Between steps only weights, adapters and
            # optimizer state are live, and their size is known.
            self.meter.rebase(self._state_gib())
            if self.step == 0:
                self.peaks.clear()
                self.segments.clear()
                self.reserved_peaks.clear()
                self.reserved = 0.0

        schedule, request = self.schedule, self.request
        num_rounds, each = schedule.finished_rounds(self.step), len(schedule.round)
        if not num_rounds and self.step >= len(schedule.lead):
            return
        graphs = count_graphs()
        retries = self.meter.alloc_retries() if request.parallelism.shards else 0
        settled = not self._largest(float((graphs, retries) != (self._graphs, self._retries)))
        self._graphs, self._retries = graphs, retries
        if not num_rounds or (not settled and num_rounds < MAX_WARMUP_ROUNDS):
            return

        self.early_retries = retries if settled else 0

        # Estimate the seconds of a step and of a micro batch from the last round.
        begin = self.step + 1 - each
        round_s = self.meter.seconds(self.starts[begin][0], self._now())
        step_s = self._largest(max(round_s / each, 1e-6))
        self.emit(Phase.STEADY)
        self._num_warm = self.step + 1
        marks = ((self.starts[index], self.ends[index]) for index in range(begin, self.step + 1))
        micros = [seconds for pair in marks for seconds in map(self.meter.seconds, *pair)]
        micro_s = self._largest(schedule.mean(micros))

        if self.meter.peaks_are_free:
            counts = num_rounds > 1 or (schedule.first_counts(micro_s) and not self.host_waits())
            self.first_timed = begin if counts else self.step + 1
        else:
            self.meter.keep_freed()
            self.first_timed = self.step + 1 + (0 if micro_s > schedule.long_s else each)

        wanted = schedule.rounds_to_time(request, step_s, self._min_timed_s)
        least = WAITING_ROUNDS if self.host_waits() else 1
        self.last_timed = self.first_timed + max(wanted, least) * each - 1
        self._agree_at = max(ENOUGH_ROUNDS, math.ceil(ENOUGH_S / (step_s * each)))

    def _adapt(self) -> None:
        """After a timed round, end timing if the rounds agree, or add a round if they disagree.

        Rounds disagree, for example, if other processes use the host.
        """
        assert self.first_timed is not None
        assert self.last_timed is not None
        each = len(self.schedule.round)
        num_rounds, inside = divmod(self.step + 1 - self.first_timed, each)
        # Real ranks never stop early: to agree on a stop, the ranks would have to wait for each
        # other.
        if inside or self._must_agree:
            return

        starts = [self.starts[self.first_timed + index * each][0] for index in range(num_rounds)]
        ends = starts[1:]
        if num_rounds == self._agree_at or self.step == self.last_timed:
            # Wait for the device here, so that the time of the round that has just ended counts
            # too.
            ends.append(self._now())
        marks = zip(starts, ends, strict=False)
        finished = [
            self.meter.seconds(start, end) for start, end in marks if self.meter.has_passed(end)
        ]
        if len(finished) < ENOUGH_ROUNDS:
            return

        spread = (max(finished) - min(finished)) / min(finished)
        adds_rounds = self.step == self.last_timed and self.request.depth is None
        if spread < AGREE_SPREAD and len(finished) >= self._agree_at:
            self.last_timed = min(self.last_timed, self.step)
        elif spread > DISAGREE_SPREAD and adds_rounds:
            num_steps = self.last_timed - self.first_timed + 1
            if num_steps < self.request.max_timed_steps and sum(finished) < self._max_timed_s:
                self.last_timed += each

    def _now(self) -> Any:
        mark = self.meter.mark()
        self.meter.synchronize()
        return mark

    def host_micro_s(self) -> float | None:
        """The host's shortest time to issue a micro batch.

        Longer measured times include waits of the host, because the device's queue was full. The
        result is None on a CPU, or if the host waits for the device within a micro batch.
        """
        if self.first_timed is None or self.meter.torch_device.type == "cpu" or self.host_waits():
            return None
        each = self.request.micro_steps
        timed = self.issue_s[self.first_timed * each :]
        # The last micro batch of a step does not count, because no micro batch of the same step
        # begins after it.
        return min(
            seconds for index, seconds in enumerate(timed) if each == 1 or (index + 1) % each
        )

    def host_waits(self) -> bool:
        """Whether the host waits for the device within a micro batch.

        The host waits if rows have images, because transformers reads the images' sizes back from
        the device. It waits in GRPO, because TRL reads the loss's statistics back.
        """
        return self.request.has_images or self.request.objective.generates

    def warm_s(self, times: StepTimes) -> float:
        """The seconds that the warm-up steps would take at the speed of the timed steps."""
        kinds, num_kinds = self.request.kinds, self.schedule.num_kinds
        timed = sorted({index for step in self.schedule.round for index in step})

        if num_kinds == 1:
            means = [statistics.fmean(times.micro_batches)]
        else:
            means = [mean for _, mean in times.kinds]
        by_kind = dict(zip(timed, means, strict=True))
        known = max(by_kind, key=lambda index: kinds[index].length)

        rest = statistics.fmean(times.rests) if times.rests else 0.0
        total = self._num_warm * rest
        steps = map(self.schedule.micro_batches, range(self._num_warm))
        for index in (index for step in steps for index in step):
            # If no micro batch of the longest kind was timed, its time is estimated from the
            # longest timed kind, in proportion to the length.
            total += by_kind.get(index, by_kind[known] * kinds[index].length / kinds[known].length)
        return total

    def check_steady(self) -> None:
        """Raise NotSteady if code was compiled or CUDA graphs were captured in the timed steps."""
        if count_graphs() != self._graphs:
            raise NotSteady(
                "the model was compiled again, or a CUDA graph was captured, during the timed steps"
            )
        if self.request.config.compile != "none" and not compiled_graphs():
            raise NotSteady("the compiler compiled no layer and left the model unchanged")

    def times(self) -> StepTimes:
        """The times of the timed steps.

        The times of all micro batches are used, because the first micro batch of a step is not
        typical: after the pause between two steps, a card at its power limit is faster for a
        moment.
        """
        assert self.first_timed is not None
        assert self.last_timed is not None
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
            # The pause between two micro batches (loader, bookkeeping) also follows the last micro
            # batch. So the mean pause is subtracted from `rest`.
            gap = statistics.fmean(map(seconds, ends[:-1], starts[1:]))
            rest = max(seconds(ends[-1], after) - gap - next_fetch, 0.0)
            rests.append(rest)
            micros += [micro + fetch for micro in map(seconds, starts[:-1], starts[1:])]
            micros.append(seconds(starts[-1], after) - rest - next_fetch + fetch)

        phases: dict[Phase, float] = {}
        for index, place, phase, start, end in self.spans:
            if index in timed:
                weighted = seconds(start, end) * self._weight(index, place, phase)
                phases[phase] = phases.get(phase, 0.0) + weighted
        times = StepTimes(
            steps=tuple(steps), micro_batches=tuple(micros), rests=tuple(rests), phases=phases
        )
        return self._average_kinds(times)

    def _weight(self, step: int, place: int, phase: Phase) -> float:
        """The weight of this phase's time in the mean time of the phase over the full run's steps.

        `place` is the number of micro batches of the step that had begun when the phase began.
        """
        assert self.first_timed is not None
        assert self.last_timed is not None
        each = self.request.micro_steps
        num_timed = self.last_timed + 1 - self.first_timed
        if phase not in (Phase.FORWARD, Phase.BACKWARD):
            return 1 / num_timed
        num_rounds = num_timed / len(self.schedule.round)
        slot = (step - self.first_timed) * each + place - 1
        return self.schedule.weights[slot % len(self.schedule.weights)] * each / num_rounds

    def _average_kinds(self, times: StepTimes) -> StepTimes:
        """Replace each round's times by the mean over its micro batches, weighted as in the run."""
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


def count_graphs() -> int:
    """The number of graphs that this process has compiled, plus the CUDA graphs captured so far."""
    return compiled_graphs() + MicroBatchGraphs.captured


def compiled_graphs() -> int:
    """The number of graphs that Dynamo has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
