"""The clock of the exported script: its measurements, its progress file, and how it stops a run."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.probe.runtime.clock import PREEMPTED, Clock


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def train(clock: Clock, steps: int, stop_at: int | None = None) -> Any:
    """Runs a Trainer's callbacks for so many steps; a SIGTERM comes in step `stop_at`."""
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    for step in range(1, steps + 1):
        clock.on_step_begin(None, None, control)
        if step == stop_at:
            signal.raise_signal(signal.SIGTERM)
        clock.on_log(None, None, control, logs={"loss": 2.5})
        clock.on_step_end(None, SimpleNamespace(global_step=step, max_steps=steps), control)
        if control.should_training_stop:
            break
    clock.on_train_end(None, None, control)
    return control


def test_steps_are_timed_without_the_first() -> None:
    clock = Clock(saves=False)
    train(clock, 9)
    measured = clock.measured()
    assert measured["seconds_per_step"] > 0
    assert len(measured["peaks_gib"]) == 4 and min(measured["peaks_gib"]) > 0
    clock.exit_if_stopped()


def test_a_single_step_has_no_time() -> None:
    clock = Clock(saves=False)
    train(clock, 1)
    assert clock.measured()["seconds_per_step"] is None and clock.measured()["peaks_gib"] is None


def test_each_step_appends_a_line_of_progress(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    file.write_text("{}\n")
    clock = Clock(saves=False, progress=str(file))
    train(clock, 3)
    assert clock._progress is not None
    clock._progress.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert [(line["step"], line["of"], line["loss"]) for line in lines] == [(1, 3, 2.5), (2, 3, 2.5), (3, 3, 2.5)]
    assert lines[0].keys() == {"began", "step", "of", "seconds", "loss"}


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_stops_the_run_after_the_step(saves: bool) -> None:
    clock = Clock(saves=saves)
    control = train(clock, 5, stop_at=2)
    assert control.should_training_stop and control.should_save is saves
    with pytest.raises(SystemExit) as ended:
        clock.exit_if_stopped()
    assert ended.value.code == PREEMPTED
