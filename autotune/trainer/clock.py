"""A callback that times the steps of a run, reads its peaks, reports its progress, and stops it when asked to."""

import json
import os
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from .ranks import AGAIN_S

STOP = "stop after step"  # what ranks tell each other
PREEMPTED = 75  # the exit code after SIGTERM: a checkpoint was saved, and `--resume` continues from it
GIB = 2**30


class Clock(TrainerCallback):
    """Measures each optimizer step, on a GPU by events, so that the host does not wait for it.

    SIGINT and SIGTERM stop the run after the current step, on several GPUs two steps later. A second one, over
    AGAIN_S seconds later, ends it at once.
    """

    def __init__(self, saves: bool, progress: str | None = None) -> None:
        """Handle signals from now on.

        Args:
            saves: whether a run that is stopped saves a checkpoint.
            progress: a file to which a line of JSON is appended after each step.
        """
        self._saves = saves
        self._progress = open(progress, "a", encoding="utf-8", buffering=1) if progress else None  # noqa: SIM115
        self._began = time.time()
        self._starts: list[float] = []
        self._events: list[Any] = []  # the same moments in the device's time; on a CPU there is no other
        self._tokens = [0]  # of the micro batches between two starts, padding included
        self._graphs: list[int] = []  # that were compiled until each start
        self._paused: list[float] = []  # seconds of evaluations and saves since each start, which are not the step's
        self._ends: list[Any] = []  # by start the moment where evaluations or saves began, None where none did
        self._step_ended: float | None = None  # where an evaluation or a save follows
        self._peaks_allocated: list[float] = []  # GiB, of what ended at each start
        self._peaks_reserved: list[float] = []
        self._loss: float | None = None
        self._signal: int | None = None
        self._signalled = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled = number, now
        elif now - self._signalled > AGAIN_S:
            os._exit(128 + number)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        """Count the tokens of each micro batch from now on."""
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, inputs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():  # an untrained model may compute beside it
            self._tokens[-1] += inputs["input_ids"].numel()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a step, at which the one before ends."""
        self.mark()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the last step, and report what followed it."""
        if any(self._paused[-1:]):  # no step at all is left for a run that continues from its end
            self._report(state)
        self.mark()

    def mark(self) -> None:
        """Note the time and the peaks since the last mark."""
        if torch.cuda.is_available():
            self._peaks_allocated.append(torch.cuda.max_memory_allocated() / GIB)
            self._peaks_reserved.append(torch.cuda.max_memory_reserved() / GIB)
            torch.cuda.reset_peak_memory_stats()
        else:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            self._peaks_allocated.append(pages * os.sysconf("SC_PAGE_SIZE") / GIB)
        utils = sys.modules.get("torch._dynamo.utils")
        self._graphs.append(int(utils.counters["stats"]["unique_graphs"]) if utils else 0)
        self._starts.append(time.perf_counter())
        self._events.append(self._event(self._starts[-1]))
        self._tokens.append(0)
        self._paused.append(0.0)
        self._ends.append(None)

    def _event(self, now: float) -> Any:
        """The moment when the device has done all work issued until `now`."""
        if not torch.cuda.is_available():
            return now
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Keep the last training loss that was logged."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and stop the run if a signal came."""
        self._report(state)
        if self._is_to_stop(state.global_step):
            control.should_training_stop = True
            control.should_save = self._saves
        if control.should_evaluate or control.should_save:
            self._synchronize()
            self._step_ended = time.perf_counter()
            self._ends[-1] = self._event(self._step_ended)

    def _is_to_stop(self, step: int) -> bool:
        """Whether a signal came, and on several GPUs whether all stop here: after the same step, or some would wait."""
        if not dist.is_initialized():
            return self._signal is not None
        store = dist.distributed_c10d._get_default_store()
        if self._signal is not None:  # no rank is more than a step ahead
            store.compare_set(STOP, "", str(step + 2))
        if not store.check([STOP]) or step < int(store.get(STOP)):
            return False
        self._signal = self._signal or signal.SIGTERM
        return True

    def _report(self, state: Any) -> None:
        if self._progress and state.is_world_process_zero:
            line = {
                "began": self._began,
                "step": state.global_step,
                "of": state.max_steps,
                "seconds": time.perf_counter() - self._starts[0],
                "paused": sum(self._paused),
                "loss": self._loss,
            }
            self._progress.write(json.dumps(line) + "\n")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the time of an evaluation between two steps."""
        self._pause()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the time of a checkpoint."""
        self._pause()

    def _pause(self) -> None:
        if self._step_ended is not None:
            now = time.perf_counter()
            self._paused[-1] += now - self._step_ended
            self._step_ended = now

    def exit_if_stopped(self) -> None:
        """End the process if a signal stopped the run, with the exit code that says which."""
        if self._signal == signal.SIGTERM:
            sys.exit(PREEMPTED)
        if self._signal is not None:
            sys.exit(128 + self._signal)

    def measured(self) -> dict[str, Any]:
        """Mean seconds of a step, and its tokens with padding; the reserved peak, and the allocated one by quarter.

        The first step and those that compile something do not count as time, nor do evaluations and saves between two
        steps, but their peaks do. Peaks are in GiB. A value is None where nothing was measured, as reserved memory on a
        CPU.
        """
        self._synchronize()
        marks = list(zip(self._events, self._ends, self._tokens[1:], self._graphs, strict=False))[1:]
        timed = [
            (_seconds(start, next_start if end is None else end), tokens)
            for (start, end, tokens, before), (next_start, *_, after) in pairwise(marks)
            if before == after
        ]
        peaks = self._peaks_allocated[1:]
        bounds = [len(peaks) * quarter // 4 for quarter in range(5)]
        quarters = [peaks[start:end] for start, end in pairwise(bounds)]
        return {
            "seconds_per_step": statistics.fmean(seconds for seconds, _ in timed) if timed else None,
            "padded_tokens_per_step": statistics.fmean(tokens for _, tokens in timed) if timed else None,
            "peak_reserved_gib": max(self._peaks_reserved[1:], default=None),
            "peaks_gib": [max(quarter) for quarter in quarters] if all(quarters) else None,
        }


def _seconds(start: Any, end: Any) -> float:
    """Seconds between two moments of the device, or of a CPU."""
    return float(end - start) if isinstance(start, float | int) else float(start.elapsed_time(end)) / 1000
