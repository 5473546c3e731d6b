"""The clock of the exported script: its measurements, its progress file, and how it stops a run."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from autotune.trainer.clock import PREEMPTED, Clock


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def at_step(step: int, of: int) -> SimpleNamespace:
    """The state of a Trainer whose process is the first."""
    return SimpleNamespace(global_step=step, max_steps=of, is_world_process_zero=True)


def train(
    clock: Clock, steps: int, stop_at: int | None = None, number: int = signal.SIGTERM
) -> Any:
    """Run a Trainer's callbacks for this number of steps. The signal comes in step `stop_at`."""
    control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
    for step in range(1, steps + 1):
        clock.on_step_begin(None, None, control)
        if step == stop_at:
            signal.raise_signal(number)
        clock.on_step_end(None, at_step(step, steps), control)
        clock.on_log(None, at_step(step, steps), control, logs={"loss": 2.5})
        if control.should_training_stop:
            break
    clock.on_train_end(None, None, control)
    return control


def test_steps_are_timed_without_the_first() -> None:
    clock = Clock(saves=False)
    train(clock, 9)
    measured = clock.measurements()
    assert measured["seconds_per_step"] > 0
    assert len(measured["peaks_gib"]) == 4 and min(measured["peaks_gib"]) > 0
    clock.exit_if_stopped()


def test_a_single_step_has_no_time() -> None:
    clock = Clock(saves=False)
    train(clock, 1)
    assert (
        clock.measurements()["seconds_per_step"] is None
        and clock.measurements()["peaks_gib"] is None
    )


def test_a_run_that_continues_from_its_end_has_no_time() -> None:
    clock = Clock(saves=False)
    train(clock, 0)
    assert clock.measurements()["seconds_per_step"] is None


def count(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, values: list[float]) -> None:
    """Have a function return these values one after another."""
    left = iter(values)
    monkeypatch.setattr(module, name, lambda: next(left))


def on_gpu(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> list[str]:
    """Have events on a GPU at these seconds, one after another.

    What is called of torch.cuda is in the list.
    """
    called, left = list[str](), iter(seconds)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(left)

        def elapsed_time(self, later: "Event") -> float:
            assert called[-1] == "synchronize"
            return (later.at - self.at) * 1000

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
    return called


def test_on_a_gpu_evaluations_and_saves_are_no_part_of_a_step_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 9, 2 and 4 s; an evaluation of 30 s follows the second.

    The host waits for the device before it.
    """
    called = on_gpu(monkeypatch, [0, 9, 11, 41, 45])
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    clock = Clock(saves=False)
    for step in (1, 2, 3):
        clock.on_step_begin(None, None, None)
        control = SimpleNamespace(
            should_training_stop=False, should_save=False, should_evaluate=step == 2
        )
        clock.on_step_end(None, at_step(step, 3), control)
        if step == 2:
            assert called.count("synchronize") == 1
            clock.on_evaluate(None, None, control)
    clock.mark()
    assert clock.measurements()["seconds_per_step"] == 3


def test_the_mean_step_and_the_peaks_by_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that end at 10, 11, 13, 16, 20 and 25 s: 10 s of
    warm-up, then 1, 2, 3, 4 and 5 s.
    """
    called = on_gpu(monkeypatch, [0, 10, 11, 13, 16, 20, 25])
    count(
        monkeypatch,
        torch.cuda,
        "max_memory_allocated",
        [gib * 2**30 for gib in (1, 90, 3, 2, 5, 6, 4)],
    )
    count(
        monkeypatch,
        torch.cuda,
        "max_memory_reserved",
        [gib * 2**30 for gib in (99, 8, 3, 9, 5, 6, 7)],
    )
    clock = Clock(saves=False)
    for _ in range(7):
        clock.mark()
    assert clock.measurements() == {
        "seconds_per_step": 3,
        "padded_tokens_per_step": 0,
        "peak_reserved_gib": 9,
        "peaks_gib": [90, 3, 5, 6],
    }
    # no step waits for the device
    assert called == ["reset_peak_memory_stats"] * 7 + ["synchronize"]
    clock._peaks_reserved = [99, 9, 3]
    assert clock.measurements()["peak_reserved_gib"] == 9  # that of the first step counts


def test_a_step_that_compiles_is_not_timed_and_tokens_are_those_of_the_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 10 (the first), 2, 50 (which compiles) and 4 s with two micro batches each of 3, 5,
    9 and 7 tokens.
    """
    count(monkeypatch, time, "perf_counter", [0, 10, 12, 62, 66])
    compiled = {"unique_graphs": 0}
    monkeypatch.setitem(
        sys.modules, "torch._dynamo.utils", SimpleNamespace(counters={"stats": compiled})
    )
    clock, model = Clock(saves=False), torch.nn.Module()
    model.forward = lambda input_ids: input_ids  # type: ignore[method-assign]
    clock.on_train_begin(None, None, None, model=model)
    for tokens in (3, 5, 9, 7):
        clock.on_step_begin(None, None, None)
        for _ in range(2):
            model(input_ids=torch.zeros(1, tokens))
        model.eval()(input_ids=torch.zeros(1, 1000))
        model.train()
        compiled["unique_graphs"] += tokens in (3, 9)
    clock.mark()
    measured = clock.measurements()
    assert (measured["seconds_per_step"], measured["padded_tokens_per_step"]) == (3, 12)


def test_a_peak_on_a_cpu_is_what_the_process_holds() -> None:
    clock = Clock(saves=False)
    train(clock, 5)
    assert (
        clock.measurements()["peaks_gib"]
        == [pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.05)] * 4
    )
    assert clock.measurements()["peak_reserved_gib"] is None
    short = Clock(saves=False)
    train(short, 3)
    assert (
        short.measurements()["peaks_gib"] is None and short.measurements()["seconds_per_step"] > 0
    )
    two = Clock(saves=False)
    train(two, 2)
    assert two.measurements()["seconds_per_step"] > 0


def test_evaluations_and_saves_are_no_part_of_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps of 2 s; after the second an evaluation of 7 s and a save of 30 s."""
    times = iter([0, 2, 4, 11, 41, 41, 43, 43, 45])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = Clock(saves=False)
    idle = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
    busy = SimpleNamespace(should_training_stop=False, should_save=True, should_evaluate=True)
    clock.on_evaluate(None, None, idle)  # before the training
    for step in (1, 2, 3):
        clock.on_step_begin(None, None, idle)  # at 0, 2 and 41
        state = at_step(step, 3)
        clock.on_step_end(None, state, busy if step == 2 else idle)  # the second at 4
        if step == 2:
            clock.on_evaluate(None, None, busy)
            clock.on_save(None, None, busy)
    clock.on_train_end(None, None, idle)
    assert clock.measurements()["seconds_per_step"] == 2


def test_what_follows_the_last_step_is_in_the_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step of 2 s and a save of 30 s: the run took 32 s."""
    count(monkeypatch, time, "perf_counter", [0, 2, 2, 32, 32, 32])
    clock = Clock(saves=False, progress=str(tmp_path / "p"))
    saving = SimpleNamespace(should_training_stop=False, should_save=True, should_evaluate=False)
    state = at_step(1, 1)
    clock.on_step_begin(None, None, saving)
    clock.on_step_end(None, state, saving)
    clock.on_save(None, state, saving)
    clock.on_train_end(None, state, saving)
    lines = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
    assert [(line["step"], line["seconds"], line["paused"]) for line in lines] == [
        (1, 2, 0),
        (1, 32, 30),
    ]
    assert clock._progress is not None
    clock._progress.close()


def test_each_step_appends_a_line_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "progress.jsonl"
    file.write_text("{}\n")
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    count(monkeypatch, time, "perf_counter", [100, 101, 101, 102, 103, 103, 104, 106, 106, 110])
    clock = Clock(saves=False, progress=str(file))
    train(clock, 3)
    assert clock._progress is not None
    # before the run has ended
    lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    clock._progress.close()
    common = {"began": 1234.5, "of": 3, "paused": 0}
    # The Trainer logs a loss after the end of the step.
    assert lines == [
        common | {"step": step, "seconds": seconds, "loss": loss}
        for step, seconds, loss in (
            *((1, 1, None), (1, 1, 2.5)),
            *((2, 3, 2.5), (2, 3, 2.5), (3, 6, 2.5), (3, 6, 2.5)),
        )
    ]


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_stops_the_run_after_the_step(saves: bool) -> None:
    clock = Clock(saves=saves)
    control = train(clock, 5, stop_at=2)
    assert control.should_training_stop and control.should_save is saves
    with pytest.raises(SystemExit) as ended:
        clock.exit_if_stopped()
    assert ended.value.code == PREEMPTED


def test_a_log_without_a_loss_keeps_the_last_one() -> None:
    clock = Clock(saves=False)
    for logs in ({"loss": 2.5}, {"eval_loss": 9.0}, None):
        clock.on_log(None, None, None, logs=logs)
    assert clock._loss == 2.5


def test_the_loss_of_the_last_step_is_logged() -> None:
    control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
    control.should_log = False
    clock = Clock(saves=False)
    for step in (1, 2):
        clock.on_step_begin(None, None, control)
        clock.on_step_end(None, at_step(step, 2), control)
        assert control.should_log is (step == 2)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 129)]
)
def test_the_exit_code_says_what_stopped_the_run(number: int, code: int) -> None:
    """128 and the number of the signal, as shells have it; 75 (EX_TEMPFAIL) asks for another
    attempt.
    """
    # The tests may run under nohup, which ignores SIGHUP.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        clock = Clock(saves=False)
        train(clock, 3, stop_at=2, number=number)
        with pytest.raises(SystemExit) as ended:
            clock.exit_if_stopped()
    finally:
        signal.signal(number, before)
    assert ended.value.code == code


def test_a_signal_after_the_last_step_loses_no_result() -> None:
    """One rank may get it earlier than another, which would wait for the first while it saves."""
    clock = Clock(saves=False)
    train(clock, 3)
    signal.raise_signal(signal.SIGTERM)
    clock.exit_if_stopped()


def test_a_second_signal_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    clock = Clock(saves=True)
    signal.raise_signal(signal.SIGINT)
    # a scheduler's, to each process of a job, beside the launcher's
    signal.raise_signal(signal.SIGINT)
    assert codes == []
    clock._signal_time -= 2  # seconds
    signal.raise_signal(signal.SIGTERM)
    assert codes == [143]


def test_the_clock_of_trl_counts_tokens_with_and_without_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 10 and 30 tokens: 4 of them are 80 tokens in the mean; each micro batch has 2 x 30
    with its padding.
    """
    trl_trainer = pytest.importorskip("autotune.probe.trl_trainer")
    clock = trl_trainer.TrlClock(saves=False)
    model = torch.nn.Identity()
    arguments = SimpleNamespace(
        per_device_train_batch_size=2, gradient_accumulation_steps=2, device="a device"
    )
    rows = {"input_ids": [[1] * 10, [1] * 30]}
    loader = SimpleNamespace(dataset=pytest.importorskip("datasets").Dataset.from_dict(rows))
    loaded: list[Any] = []
    monkeypatch.setattr(trl_trainer, "load_attention", lambda *asked: loaded.append(asked))
    clock.on_train_begin(arguments, None, None, model, train_dataloader=loader)
    assert loaded == [(model, "a device")]
    control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
    for step in (1, 2, 3):
        clock.on_step_begin(None, None, control)
        for _ in range(2):
            clock._count(model, None, {"input_ids": torch.zeros(2, 30)})
        clock.on_step_end(None, at_step(step, 3), control)
    clock.on_train_end(None, None, control)
    assert clock.tokens_per_step == 80 and clock.num_steps == 3
    assert model._forward_pre_hooks and clock.measurements()["padded_tokens_per_step"] == 120


def test_only_what_follows_the_last_step_is_reported_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkpoint after the first of two steps is in the line of the second.

    Without a step there is no line.
    """
    waited: list[str] = []
    monkeypatch.setattr(Clock, "_synchronize", lambda clock: waited.append("wait"))
    count(monkeypatch, time, "perf_counter", [0, 2, 2, 32, 32, 34, 34])
    clock = Clock(saves=False, progress=str(tmp_path / "p"))
    clock.on_step_begin(None, None, None)
    saving, idle = (
        SimpleNamespace(should_training_stop=False, should_save=saves, should_evaluate=False)
        for saves in (True, False)
    )
    clock.on_step_end(None, at_step(1, 2), saving)
    assert waited == ["wait"]  # a checkpoint follows the step
    clock.on_save(None, None, saving)
    clock.on_step_begin(None, None, None)
    clock.on_step_end(None, at_step(2, 2), idle)
    assert waited == ["wait"]
    clock.on_train_end(None, at_step(2, 2), None)
    lines = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
    assert [(line["step"], line["seconds"], line["paused"]) for line in lines] == [
        (1, 2, 0),
        (2, 34, 30),
    ]
    none = Clock(saves=False, progress=str(tmp_path / "none"))
    monkeypatch.undo()
    none.on_train_end(None, at_step(9, 9), None)
    assert (tmp_path / "none").read_text() == ""
    for one in (clock, none):
        assert one._progress is not None
        one._progress.close()


def test_a_step_that_loads_the_compiler_and_compiles_one_graph_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 10 (the first), 50 (which compiles) and 2 s."""
    count(monkeypatch, time, "perf_counter", [0, 10, 60, 62])
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", None)  # type: ignore[arg-type]
    clock = Clock(saves=False)
    clock.mark()
    clock.mark()
    compiled = SimpleNamespace(counters={"stats": {"unique_graphs": 1}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", compiled)  # type: ignore[arg-type]
    clock.mark()
    clock.mark()
    assert clock.measurements()["seconds_per_step"] == 2


def test_all_ranks_stop_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes to one of two ranks, one step ahead of the other: both take two more steps."""
    told: dict[str, str] = {}
    store = SimpleNamespace(
        compare_set=lambda key, old, new: told.setdefault(key, new),
        check=lambda keys: set(keys) <= told.keys(),
        get=lambda key: told[key].encode(),
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    stopped = []
    for stop_at in (3, None):
        clock = Clock(saves=True)
        control = train(clock, 9, stop_at=stop_at)
        stopped.append((control.should_training_stop, len(clock._starts) - 1))
        with pytest.raises(SystemExit) as ended:
            clock.exit_if_stopped()
        assert ended.value.code == PREEMPTED
    assert stopped == [(True, 5), (True, 5)]
