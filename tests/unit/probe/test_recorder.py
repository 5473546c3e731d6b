"""The plan of how many steps are timed, and what their marks say, against a clock that the test
turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.core.images import Picture
from autotune.core.probe_types import MicroBatch, Phase, ProbeRequest, Rung
from autotune.core.train_config import TrainConfig
from autotune.probe import recorder as module
from autotune.probe.recorder import NotSteady, Recorder
from autotune.probe.schedule import Schedule


class Clock:
    """A device whose time passes when the test says so. Peaks cost nothing to read on a GPU.

    It is `lag` seconds behind the host that issues its work. A mark that it has not passed cannot
    be read.
    """

    def __init__(self, *, peaks_are_free: bool = True, lag: float = 0.0) -> None:
        self.now = self._reached = 0.0
        self.peaks_are_free = peaks_are_free
        self._lag = lag

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        assert self.has_passed(end)
        return end - start

    def has_passed(self, mark: float) -> bool:
        return mark <= max(self._reached, self.now - self._lag)

    def synchronize(self) -> None:
        self._reached = self.now

    def reset_peak(self) -> None: ...

    def rebase(self, resident_gib: float) -> None: ...

    def keep_freed(self) -> None: ...

    def peak_gib(self) -> tuple[float, float]:
        return 1.0, 2.0

    def alloc_retries(self) -> int:
        return 0


KINDS = (
    MicroBatch(rows=((10,),), length=10, share=0.5),
    MicroBatch(rows=((40,),), length=40, share=0.3),
    MicroBatch(rows=((20,),), length=20, share=0.2),
    MicroBatch(rows=((90,),), length=90, share=0.0),
)


# two steps are a round
EVEN = tuple(MicroBatch(rows=((8,),), length=8, share=0.25) for _ in range(4))


def of_kinds(seconds: Sequence[float], **wanted: Any) -> Recorder:
    """Steps of two micro batches; each takes what its kind of KINDS does."""
    asked = ProbeRequest(config=TrainConfig(), model={}, memory_gib=1.0, micro_batches=KINDS)
    plan = Schedule.plan(asked)
    order = [index for step in range(60) for index in plan.micro_batches(step)]
    return recorded(
        [seconds[index] for index in order], optimizer=0.1, micro_batches=KINDS, **wanted
    )


def recorded(
    micros: list[float],
    gap: float | Sequence[float] = 0.0,
    optimizer: float = 0.0,
    fetch: float | Sequence[float] = 0.0,
    steps_of: int = 2,
    on_cpu: bool = False,
    lag: float = 0.0,
    largest: Callable[[float], float] | None = None,
    **wanted: Any,
) -> Recorder:
    """Optimizer steps until the recorder has enough; the n-th micro batch takes `micros[n]` s,
    again from the first.
    """
    clock: Any = Clock(peaks_are_free=not on_cpu, lag=lag)
    request = ProbeRequest(
        config=TrainConfig(), model={}, memory_gib=1.0, micro_steps=steps_of, **wanted
    )
    recorder = Recorder(clock, request, lambda phase: None, lambda: 0.0, largest=largest)
    count, done = 0, False
    while not done:
        begin = clock.now
        clock.now += (
            fetch if isinstance(fetch, float) else fetch[len(recorder.fetches) % len(fetch)]
        )
        recorder.fetches.append((begin, clock.now))
        for _ in range(request.micro_steps):
            recorder.begin_micro_batch()
            clock.now += micros[count % len(micros)] / 3
            recorder.enter(Phase.BACKWARD)
            clock.now += micros[count % len(micros)] * 2 / 3
            recorder.end_micro_batch()
            clock.now += gap if isinstance(gap, float) else gap[count % len(gap)]
            count += 1
        clock.now += optimizer
        done = recorder.end_step()
    clock.synchronize()
    return recorder


def test_the_timed_steps_begin_once_in_the_report_to_the_parent() -> None:
    phases: list[Phase] = []
    clock: Any = Clock()
    recorder = Recorder(
        clock,
        ProbeRequest(config=TrainConfig(), model={}, memory_gib=1.0),
        phases.append,
        lambda: 0.0,
    )
    done = False
    while not done:
        recorder.fetches.append((clock.now, clock.now))
        for _ in range(recorder.request.micro_steps):
            recorder.begin_micro_batch()
            clock.now += 0.1
            recorder.end_micro_batch()
        done = recorder.end_step()
    assert phases == [Phase.STEADY]


def test_every_micro_batch_counts_not_the_first_of_each_step_alone() -> None:
    """A card at its power limit runs ahead after each pause: the first of two is the faster one."""
    times = recorded([0.9, 1.1], gap=0.01, optimizer=0.2).times()
    assert times.steps == pytest.approx([2.22])
    assert times.micro_batches == pytest.approx([0.91, 1.11])
    assert times.rests == pytest.approx([0.2])


def test_what_making_batches_takes_counts_to_the_micro_batches() -> None:
    """A full run makes more of them for each step than a probe does."""
    recorder = recorded([0.1], gap=0.01, optimizer=0.05, fetch=0.04, min_timed_s=2.0)
    times = recorder.times()
    assert times.micro_batches == pytest.approx([0.13] * len(times.micro_batches))
    assert times.rests == pytest.approx([0.05] * len(times.rests))
    assert times.steps[:-1] == pytest.approx(
        [0.31] * (len(times.steps) - 1)
    )  # the last ends before the next one's batches


def test_a_step_does_not_count_the_making_of_the_next_ones_batches() -> None:
    times = recorded([0.1], optimizer=0.05, fetch=(0.04, 0.1, 0.2), min_timed_s=2.0).times()
    assert len(times.rests) > 3 and times.rests == pytest.approx([0.05] * len(times.rests))


def test_a_single_micro_batch_a_step_has_its_batch_made_too() -> None:
    for wanted in (0.0, 5.0):
        recorder = recorded(
            [1.0], optimizer=0.2, fetch=0.5, steps_of=1, min_timed_s=wanted, min_timed_micros=1
        )
        micros = recorder.times().micro_batches
        assert len(micros) == len(recorder.times().steps) > 0 and micros == pytest.approx(
            [1.7] * len(micros)
        )


@pytest.mark.parametrize("gap", [0.0, 0.05])
def test_a_step_is_its_micro_batches_and_the_rest(gap: float) -> None:
    recorder = recorded([0.1, 0.12, 0.11], gap=gap, optimizer=0.03, min_timed_s=2.0)
    times = recorder.times()
    steps, micros, rests, phases = times.steps, times.micro_batches, times.rests, times.phases
    assert sum(micros) + sum(rests) == pytest.approx(sum(steps))
    assert len(micros) == 2 * len(steps) == 2 * len(rests)
    assert sum(phases[phase] for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)) * len(
        steps
    ) == pytest.approx(sum(steps))


@pytest.mark.parametrize(
    ("micro_s", "wanted", "num_steps"),
    [
        (1.0, {}, 1),  # a step is long enough, and has two micro batches
        (1.0, {"min_timed_micros": 3}, 2),
        (1.0, {"min_timed_micros": 4}, 2),
        (0.3, {}, 2),
        (0.1, {}, 2),  # five would be timed, but two agree
        (0.02, {}, 8),  # as many as last 0.3 s: two short steps agree by chance
    ],
)
def test_no_more_steps_are_timed_than_say_something_new(
    micro_s: float, wanted: dict[str, int], num_steps: int
) -> None:
    assert len(recorded([micro_s], **wanted).times().steps) == num_steps


def test_ranks_time_the_steps_that_the_slowest_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """They agree while they plan.

    To agree once more at each step they would have to wait for each other.
    """
    monkeypatch.setattr(module, "compiled_graphs", lambda: 0)
    asked: list[float] = []

    def largest(value: float) -> float:
        asked.append(value)
        return 2 * value

    alone, rank = recorded([0.1]), recorded([0.1], largest=largest)
    # for a second, by steps of 0.4 s
    assert (len(alone.times().steps), len(rank.times().steps)) == (2, 3)
    # whether something compiled, a step, a micro batch
    assert asked == pytest.approx([0.0, 0.0, 0.2, 0.1])


def test_steps_that_disagree_are_followed_by_more() -> None:
    swinging = [0.45, 0.45, 0.55, 0.55]
    assert len(recorded(swinging, min_timed_s=1.8).times().steps) == 4
    assert len(recorded(swinging, min_timed_s=1.8, max_timed_steps=3).times().steps) == 3
    # its error is predicted with it
    assert len(recorded(swinging, min_timed_s=1.8, depth=2).times().steps) == 2


def test_what_the_device_has_not_reached_yet_is_not_read() -> None:
    """The host is three steps ahead: that steps disagree is known only once the device has passed
    them.
    """
    swinging = [0.45, 0.45, 0.55, 0.55]
    # and no mark was read too early
    assert len(recorded(swinging, min_timed_s=4.5, lag=3.0).times().steps) > 4


@pytest.mark.parametrize("unit", [1.0, 20.0])
@pytest.mark.parametrize(
    ("apart", "num_steps"), [(0.008, 2), (0.01005, 6), (0.018, 6), (0.0202, 8)]
)
def test_steps_agree_within_one_percent_and_disagree_beyond_two(
    unit: float, apart: float, num_steps: int
) -> None:
    """Of steps that take turns; six are planned, and of a whole model two more are taken where they
    disagree.
    """
    turns = [unit / 2, unit / 2, unit * (1 + apart) / 2, unit * (1 + apart) / 2]
    found = recorded(turns, min_timed_s=5.5 * unit, max_timed_steps=8).times().steps
    assert len(found) == num_steps


def test_steps_that_agree_by_less_than_a_hair_are_looked_at_for_long_enough() -> None:
    """A round of two steps lasts 0.08 s: four of them last 0.3 s."""
    times = recorded([0.02], micro_batches=EVEN, min_timed_s=5.0).times()
    assert len(times.micro_batches) == 4


def test_rounds_are_compared_only_once_they_are_whole() -> None:
    """The first round lasts 7.5 s, all others 5 s: 7.5 s are over in the middle of one too, which
    is no agreement.
    """
    micros = [1.0] * 2 + [1.875] * 4 + [1.25] * 400
    recorder = recorded(micros, micro_batches=EVEN, min_timed_s=60.0, depth=2)
    assert recorder.first_timed is not None and recorder.last_timed is not None
    assert (recorder.last_timed + 1 - recorder.first_timed) % 2 == 0


def test_a_cpu_is_timed_for_half_as_long_and_never_longer() -> None:
    swinging = [0.045, 0.045, 0.055, 0.055]
    for wanted in ({"depth": 2}, {}):
        assert len(recorded(swinging, on_cpu=True, **wanted).times().steps) == 5
    assert len(recorded(swinging, depth=2).times().steps) == 10


@pytest.mark.parametrize(
    ("free", "wanted", "limits"),
    [
        (True, {}, (3.0, 6.0)),
        (True, {"micro_batches": KINDS}, (3.0, 15.0)),
        (False, {}, (1.5, 0.0)),
    ],
    ids=str,
)
def test_how_long_steps_are_timed(
    free: bool, wanted: dict[str, Any], limits: tuple[float, float]
) -> None:
    recorder = on_scales(Scales((1.0, 1.0), peaks_are_free=free), min_timed_s=3.0, **wanted)
    assert (recorder._min_timed_s, recorder._max_timed_s) == limits


def test_the_time_of_a_run_is_the_mean_over_its_kinds_of_micro_batch() -> None:
    """By hand: half take 0.1 s, three tenths 0.4 s, a fifth 0.2 s.

    The longest, of 0.9 s, is not timed.
    """
    recorder = of_kinds([0.1, 0.4, 0.2, 0.9])
    times = recorder.times()
    mean = 0.5 * 0.1 + 0.3 * 0.4 + 0.2 * 0.2
    assert times.micro_batches == pytest.approx([mean] * len(times.micro_batches))
    assert times.steps == pytest.approx([2 * mean + 0.1] * len(times.steps))
    assert sorted(times.kinds) == [
        pytest.approx(pair) for pair in ((0.2, 0.2), (0.3, 0.4), (0.5, 0.1))
    ]
    assert times.rests == pytest.approx([0.1] * len(times.rests))
    assert times.phases[Phase.FORWARD] == pytest.approx(2 * mean / 3)
    assert times.phases[Phase.BACKWARD] == pytest.approx(4 * mean / 3)
    assert times.phases[Phase.OPTIMIZER] == pytest.approx(0.1)
    assert recorder.first_timed == 4  # after the shortest, the longest, and each kind once


def test_what_warms_up_would_take_as_long_at_the_pace_of_what_is_timed() -> None:
    """It did take as long here, where nothing compiles; the longest, which is not timed, goes by
    its tokens.
    """
    recorder = of_kinds([0.1, 0.4, 0.2, 0.9])
    assert recorder.warm_s(recorder.times()) == pytest.approx(recorder.starts[4][0])
    # The untimed longest goes by the longest of the others, whose time for a token is another than
    # that of short ones.
    uneven = of_kinds([0.2, 0.4, 0.3, 0.9])
    assert uneven.warm_s(uneven.times()) == pytest.approx(uneven.starts[4][0])
    alone = recorded([0.1], steps_of=1, min_timed_s=1.0)
    assert alone.warm_s(alone.times()) == pytest.approx(alone.starts[2][0])
    even = recorded([0.1], optimizer=0.1, min_timed_s=2.0)
    assert even.warm_s(even.times()) == pytest.approx(even.starts[2][0])


def test_long_micro_batches_count_although_they_are_the_first_of_their_length() -> None:
    """On average a micro batch takes 2.8 s, or 0.42 s, which is long for a few layers only, or 0.21
    s.
    """
    long, middling, short = (
        [unit * each for each in (2.0, 4.0, 3.0, 9.0)] for unit in (1.0, 0.15, 0.075)
    )
    recorder = of_kinds(long)
    assert (recorder.first_timed, recorder.last_timed) == (2, 3)
    assert of_kinds(middling).first_timed == 4 and of_kinds(middling, depth=2).first_timed == 2
    assert of_kinds(short, depth=2).first_timed == 4


@pytest.mark.parametrize(("micro_s", "first"), [(0.2, 3), (0.5, 2)])
def test_on_a_cpu_a_round_is_timed_after_one_that_read_peaks_and_one_that_fills_the_heap(
    micro_s: float, first: int
) -> None:
    """Long micro batches take little of their time for either: the heap is filled by one that
    counts.
    """
    assert recorded([micro_s], on_cpu=True, depth=2).first_timed == first


def test_whole_rounds_are_timed_and_compared() -> None:
    # two rounds agree
    assert len(of_kinds([0.1, 0.4, 0.2, 0.9], min_timed_s=3.0).times().micro_batches) == 2
    assert len(of_kinds([0.1, 0.4, 0.2, 0.9], min_timed_s=0.1).times().micro_batches) == 1
    assert (
        len(
            of_kinds([0.1, 0.4, 0.2, 0.9], min_timed_s=0.1, rung=Rung.CONFIRM).times().micro_batches
        )
        == 2
    )
    noisy = [0.1 + 0.03 * (index % 7) for index in range(7)]
    request_s = {"min_timed_s": 3.0, "micro_batches": KINDS}
    assert len(recorded(noisy, optimizer=0.1, **request_s).times().micro_batches) > 2
    # A round of 1.4 s is not followed by more for long, unless rounds of the whole model disagree.
    once = request_s | {"min_timed_s": 1.0}
    assert len(recorded(noisy, optimizer=0.1, **once, rung=Rung.CONFIRM).times().micro_batches) > 3
    assert len(recorded(noisy, optimizer=0.1, **once, depth=2).times().micro_batches) < 3


class Scales(Clock):
    """A device that tells these peaks, each once, and then the last; `retries` is how often it had
    to tidy up.
    """

    def __init__(self, *peaks: tuple[float, float], **wanted: Any) -> None:
        super().__init__(**wanted)
        self.peaks = list(peaks)
        self.retries = 0
        self.said: list[Any] = []
        self.torch_device = torch.device("cpu")

    def peak_gib(self) -> tuple[float, float]:
        return self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0]

    def alloc_retries(self) -> int:
        return self.retries

    def reset_peak(self) -> None:
        self.said.append("reset")

    def rebase(self, resident_gib: float) -> None:
        self.said.append(resident_gib)

    def keep_freed(self) -> None:
        self.said.append("keep")


def on_scales(meter: Any, phases: list[Phase] | None = None, **wanted: Any) -> Recorder:
    request = ProbeRequest(
        config=wanted.pop("config", TrainConfig()), model={}, memory_gib=1.0, **wanted
    )
    return Recorder(meter, request, (phases if phases is not None else []).append, lambda: 0.25)


def test_a_peak_belongs_to_the_phase_that_ends_and_the_highest_counts() -> None:
    meter = Scales((1.0, 2.0), (5.0, 6.0), (3.0, 9.0), (4.0, 4.0))
    phases: list[Phase] = []
    recorder = on_scales(meter, phases)
    recorder.begin(Phase.FIRST_STEP)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD):
        recorder.enter(phase)
    assert recorder.peaks == {Phase.FIRST_STEP: 1.0, Phase.FORWARD: 5.0, Phase.BACKWARD: 3.0}
    assert recorder.segments == {"first_step": 1.0, "forward": 5.0, "backward": 3.0}
    assert recorder.reserved == 9.0 and phases == [Phase.FIRST_STEP] and meter.said == ["reset"] * 4
    assert recorder.phase is Phase.BACKWARD


def test_parts_of_a_phase_have_peaks_of_their_own_until_steps_are_timed() -> None:
    meter = Scales((1.0, 1.0), (2.0, 2.0), (7.0, 7.0), (3.0, 3.0), (9.0, 9.0))
    recorder = on_scales(meter)
    recorder.enter(Phase.BACKWARD)
    recorder.enter_segment("backward_layers")
    assert meter.said == ["reset"] * 2
    recorder.enter_segment("backward_inputs")
    recorder.enter(Phase.OPTIMIZER)
    parts = {"load": 1.0, "backward": 2.0, "backward_layers": 7.0, "backward_inputs": 3.0}
    assert recorder.segments == parts and recorder.segment == ""
    assert recorder.peaks == {Phase.LOAD: 1.0, Phase.BACKWARD: 7.0}
    recorder.first_timed = 0
    said = len(meter.said)
    recorder.enter_segment("backward_layers")
    assert len(meter.said) == said and recorder.segment == ""
    recorder.record_peak()
    assert recorder.peaks[Phase.OPTIMIZER] == 9.0 and recorder.segments == parts


@pytest.mark.parametrize("peaks_are_free", [True, False])
def test_peaks_are_read_while_steps_are_timed_where_that_costs_nothing(
    peaks_are_free: bool,
) -> None:
    meter = Scales((1.0, 1.0), peaks_are_free=peaks_are_free)
    recorder = on_scales(meter)
    recorder.first_timed = 0
    recorder.enter(Phase.FORWARD)
    recorder.enter(Phase.BACKWARD)
    assert bool(recorder.peaks) is peaks_are_free is bool(meter.said)
    assert [span[2] for span in recorder.spans] == [Phase.FORWARD]


def test_the_first_peak_of_a_phase_counts_however_small() -> None:
    recorder = on_scales(Scales((0.5, 0.625)))
    recorder.enter(Phase.FORWARD)
    assert (
        recorder.peaks == {Phase.LOAD: 0.5}
        and recorder.segments == {"load": 0.5}
        and recorder.reserved == 0.625
    )


def test_the_first_phase_in_which_the_allocator_tidied_up_is_remembered() -> None:
    meter = Scales((1.0, 1.0))
    recorder = on_scales(meter)
    recorder.enter(Phase.FORWARD)
    assert recorder.retry_phase is None
    meter.retries = 1
    recorder.enter(Phase.BACKWARD)
    recorder.enter(Phase.OPTIMIZER)
    assert recorder.retry_phase is Phase.FORWARD


@pytest.mark.parametrize(
    ("config", "retried_in", "early", "first"),
    [
        (TrainConfig(num_gpus=2, sharding="fsdp2"), 1, 1, 1),
        (TrainConfig(num_gpus=2, sharding="fsdp2"), 2, 2, 2),  # the first round retried too
        (TrainConfig(num_gpus=2, sharding="fsdp2"), 99, 0, 4),  # every round retries
        (TrainConfig(num_gpus=2, sharding="ddp"), 99, 0, 1),
        (TrainConfig(), 99, 0, 1),
    ],
    ids=str,
)
def test_retries_before_a_steady_round_do_not_count_if_the_model_is_sharded(
    config: TrainConfig, retried_in: int, early: int, first: int
) -> None:
    """The first steps, so many, each retry once."""

    class Tight(Clock):
        step = 0

        def alloc_retries(self) -> int:
            self.step += 1
            return min(self.step, retried_in)

    recorder = Recorder(
        Tight(),  # type: ignore[arg-type]
        ProbeRequest(config=config, model={}, memory_gib=1.0, micro_steps=1, min_timed_s=0.0),
        lambda phase: None,
        lambda: 0.0,
    )
    recorder.retry_phase = Phase.FORWARD
    recorder.begin(Phase.FIRST_STEP)
    done = False
    while not done:
        recorder.begin_micro_batch()
        recorder.meter.now += 1.0  # type: ignore[attr-defined]
        recorder.end_micro_batch()
        done = recorder.end_step()
    assert (recorder.early_retries, recorder.first_timed) == (early, first)


def test_on_a_cpu_the_peaks_of_the_first_step_do_not_count() -> None:
    """Libraries make buffers in it, which count as context from then on."""
    meter = Scales((8.0, 8.0), peaks_are_free=False)
    recorder = on_scales(meter, micro_steps=1)
    recorder.fetches.append((0.0, 0.0))
    recorder.begin_micro_batch()
    recorder.end_micro_batch()
    assert recorder.peaks and recorder.reserved == 8.0
    meter.said.clear()
    recorder._plan()
    assert not recorder.peaks and not recorder.segments and recorder.reserved == 0.0
    assert meter.said[0] == 0.25


def test_the_hosts_own_time_is_the_shortest_between_two_micro_batches_of_a_step() -> None:
    """Of two, the second is followed by the rest of its step. The first step is not timed."""
    meter = Scales((1.0, 1.0))
    recorder = on_scales(meter, micro_steps=2)
    recorder.issue_s = [0.1, 0.2, 0.7, 0.3, 0.6, 0.4, 0.9, 0.2]
    assert recorder.host_micro_s() is None  # nothing is timed yet
    recorder.first_timed = 1
    assert recorder.host_micro_s() is None  # on a CPU the host is the device
    meter.torch_device = torch.device("meta")
    assert recorder.host_micro_s() == 0.6
    kind = MicroBatch(
        rows=((8,),), length=8, share=1.0, images=((Picture(tokens=4, beside=0, pixels=(2, 2)),),)
    )
    recorder.request = replace(recorder.request, micro_batches=(kind,))
    assert recorder.host_waits() and recorder.host_micro_s() is None
    alone = on_scales(meter, micro_steps=1)
    alone.first_timed, alone.issue_s = 2, [0.1, 0.2, 0.7, 0.3]
    assert alone.host_micro_s() == 0.3
    four = on_scales(meter, micro_steps=4)
    four.first_timed, four.issue_s = 0, [0.5, 0.4, 0.3, 0.1, 0.6, 0.7, 0.35, 0.2]
    assert four.host_micro_s() == 0.3


def test_the_host_works_between_two_micro_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 11.5, 13.0, 20.0, 22.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    recorder = on_scales(Scales((1.0, 1.0)))
    for _ in range(2):
        recorder.begin_micro_batch()
        recorder.end_micro_batch()
    assert recorder.issue_s == [1.5, 1.5]
    recorder.step = 1
    recorder.starts.append([])
    recorder.ends.append([])
    recorder.begin_micro_batch()  # what passes between two steps is not theirs
    recorder.end_micro_batch()
    assert recorder.issue_s == [1.5, 1.5, 2.0]


@pytest.mark.parametrize(
    ("compile", "planned", "now", "words"),
    [
        ("none", 3, 3, None),
        ("none", 0, 0, None),
        ("per_layer", 3, 3, None),
        ("per_layer", 3, 4, "compiled again"),
        ("none", 3, 4, "compiled again"),
        ("per_layer", 0, 0, "compiled no layer"),
    ],
)
def test_times_of_a_model_that_was_compiled_meanwhile_mean_nothing(
    monkeypatch: pytest.MonkeyPatch, compile: str, planned: int, now: int, words: str | None
) -> None:
    recorder = on_scales(Scales((1.0, 1.0)), config=TrainConfig(compile=compile))
    recorder._graphs = planned
    monkeypatch.setattr(module, "compiled_graphs", lambda: now)
    if words is None:
        recorder.check_steady()
    else:
        with pytest.raises(NotSteady, match=words):
            recorder.check_steady()


@pytest.mark.parametrize(("compiling", "first"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, 4)])
def test_nothing_is_timed_before_everything_is_compiled_or_for_long(
    monkeypatch: pytest.MonkeyPatch, compiling: int, first: int
) -> None:
    """So many steps compile something; after a few rounds it is timed anyway, and `check_steady`
    will tell.
    """
    graphs = iter([*range(1, compiling + 1), *[compiling] * 50])
    monkeypatch.setattr(module, "compiled_graphs", lambda: next(graphs))
    assert recorded([1.0]).first_timed == first


def test_graphs_are_counted_where_dynamo_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.sys.modules, "torch._dynamo.utils", None)  # type: ignore[arg-type]
    assert module.compiled_graphs() == 0
    utils: Any = SimpleNamespace(counters={"stats": {"unique_graphs": 7}})
    monkeypatch.setitem(module.sys.modules, "torch._dynamo.utils", utils)
    assert module.compiled_graphs() == 7


def test_a_round_that_compiled_something_in_any_of_its_steps_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first step compiles, after two steps that warm up; its second does not."""
    begun: list[int] = []
    begin = Recorder.begin_micro_batch

    def counted(recorder: Recorder) -> None:
        begun.append(recorder.step)
        begin(recorder)

    monkeypatch.setattr(Recorder, "begin_micro_batch", counted)
    monkeypatch.setattr(module, "compiled_graphs", lambda: int(begun[-1] >= 2))
    long = [2.0, 4.0, 3.0, 9.0]
    assert of_kinds(long).first_timed == 4
    monkeypatch.setattr(module, "compiled_graphs", lambda: 0)
    assert of_kinds(long).first_timed == 2


def test_each_of_several_micro_batches_counts_with_the_pause_after_it() -> None:
    times = recorded([1.0, 2.0, 3.0, 4.0], gap=0.1, optimizer=0.2, fetch=0.4, steps_of=4).times()
    # a quarter of what making the batches takes
    assert times.micro_batches == pytest.approx([1.2, 2.2, 3.2, 4.2])
    assert times.rests == pytest.approx([0.2]) and times.steps == pytest.approx([10.6])


@pytest.mark.parametrize(
    ("lengths", "shares", "seconds"),
    [
        ((10, 40, 20, 30), (0.1, 0.2, 0.3, 0.4), (0.5, 0.9, 1.2, 1.7)),
        (
            (10, 40, 20, 30, 50, 60),
            (0.1, 0.2, 0.25, 0.15, 0.2, 0.1),
            (0.05, 0.09, 0.12, 0.17, 0.2, 0.26),
        ),
    ],
)
def test_each_kind_counts_by_its_share_in_the_phases_too(
    lengths: tuple[int, ...], shares: tuple[float, ...], seconds: tuple[float, ...]
) -> None:
    """Four kinds or six, each with a time of its own, in steps of two micro batches."""
    kinds = tuple(
        MicroBatch(rows=((length,),), length=length, share=share)
        for length, share in zip(lengths, shares, strict=True)
    )
    asked = ProbeRequest(config=TrainConfig(), model={}, memory_gib=1.0, micro_batches=kinds)
    plan = Schedule.plan(asked)
    micros = [seconds[index] for step in range(60) for index in plan.micro_batches(step)]
    times = recorded(micros, micro_batches=kinds, min_timed_s=0.0).times()
    mean = sum(share * each for share, each in zip(shares, seconds, strict=True))
    assert times.micro_batches == pytest.approx([mean]) and times.steps == pytest.approx([2 * mean])
    assert times.phases[Phase.FORWARD] == pytest.approx(2 * mean / 3)
    assert times.phases[Phase.BACKWARD] == pytest.approx(4 * mean / 3)
    single = recorded(micros, micro_batches=kinds, min_timed_s=0.0, steps_of=1).times()
    assert single.steps == single.micro_batches and not single.rests


def test_freed_memory_is_kept_on_a_cpu_once_all_peaks_are_read() -> None:
    """From then on it reports that once.

    The device is waited for at the end of each step that is not timed.
    """
    meter = Scales((1.0, 1.0), peaks_are_free=False)
    recorder = on_scales(meter, micro_steps=1, min_timed_s=0.0, min_timed_micros=1)
    kept: list[int] = []
    done = False
    while not done:
        recorder.fetches.append((meter.now, meter.now))
        recorder.begin_micro_batch()
        meter.now += 0.2
        recorder.end_micro_batch()
        reached = meter._reached
        done = recorder.end_step()
        kept.append(meter.said.count("keep"))
        assert kept[-1] or meter._reached > reached
    assert kept == [0, 1, 1, 1] and (recorder.first_timed, recorder.last_timed) == (3, 3)


def test_a_round_that_follows_another_counts_however_short_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first compiled something; the second did not, and no length of it is new any more."""
    begun: list[int] = []
    begin = Recorder.begin_micro_batch

    def counted(recorder: Recorder) -> None:
        begun.append(recorder.step)
        begin(recorder)

    monkeypatch.setattr(Recorder, "begin_micro_batch", counted)
    monkeypatch.setattr(module, "compiled_graphs", lambda: int(begun[-1] >= 2))
    assert of_kinds([0.1, 0.4, 0.2, 0.9]).first_timed == 4


def test_what_passes_between_two_micro_batches_is_their_mean() -> None:
    """0.1, 0.2 and 0.3 s, so that 0.2 s of what follows the last one are such a pause."""
    times = recorded(
        [1.0, 2.0, 3.0, 4.0], gap=(0.1, 0.2, 0.3, 0.2), optimizer=0.2, fetch=0.4, steps_of=4
    ).times()
    assert times.micro_batches == pytest.approx(
        [1.2, 2.3, 3.4, 4.3]
    ) and times.rests == pytest.approx([0.2])


def test_a_mark_of_this_moment_can_be_read_at_once() -> None:
    meter: Any = Clock(lag=5.0)
    meter.now = 2.0
    assert not meter.has_passed(2.0)
    assert on_scales(meter)._now() == 2.0 and meter.has_passed(2.0)
