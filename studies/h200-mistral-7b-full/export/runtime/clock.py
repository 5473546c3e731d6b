# -*- coding: utf-8 -*-
"""Times a run's steps, reads memory peaks, reports progress, and stops the run after a signal."""

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
from .terminal import leave_terminal

# The key in torch's distributed store whose value is the step after which all ranks stop.
STOP = "stop after step"
# The exit code of a run that SIGTERM stopped: a checkpoint was saved, and `--resume` continues from
# it.
PREEMPTED = 75
# A program gets this signal when its terminal is closed. Windows has no such signal.
HANGUP = getattr(signal, "SIGHUP", None)
GIB = 2**30


class Clock(TrainerCallback):
    """Measures each optimizer step.

    On a GPU, CUDA events measure the step, so that the host does not wait.

    SIGINT, SIGTERM and SIGHUP stop the run after the current step; on several GPUs, two steps
    later. A second signal, more than AGAIN_S seconds after the first, ends the process at once.
    """

    def __init__(self, saves: bool, progress: str | None = None) -> None:
        """Handle signals from now on.

        Args:
            saves: whether a stopped run saves a checkpoint.
            progress: a file that gets a line of JSON after each step, and another one if the
                step's loss is logged.
        """
        self._saves = saves
        self._progress = None
        if progress:
            self._progress = open(progress, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._start_time = time.time()

        # Each of the following lists has one entry for the start of each step, and one entry for
        # the end of the run.
        self._starts: list[float] = []
        # The starts in `_starts` as CUDA events; on a CPU, a copy of `_starts`.
        self._events: list[Any] = []
        self._tokens = [0]  # tokens since the previous start, with padding
        # Number of graphs that torch.compile had made before this start.
        self._graphs: list[int] = []
        # Seconds of evaluations and saves between this start and the next start.
        self._pauses: list[float] = []
        # The time when an evaluation or a save began after the step, or None if there was none.
        self._ends: list[Any] = []
        self._peaks_allocated: list[float] = []  # the peak in GiB during the step before this start
        self._peaks_reserved: list[float] = []

        # The time when the last step ended, if an evaluation or a save follows.
        self._step_ended: float | None = None
        self._loss: float | None = None
        self._signal: int | None = None
        self._signal_time = 0.0
        self._is_stopped = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        # A program that nohup has started ignores SIGHUP, and must go on ignoring it.
        if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
            signal.signal(HANGUP, self._stop)

    def _stop(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        leave_terminal(if_closed=number != HANGUP)
        if self._signal is None:
            self._signal = number
            self._signal_time = now
        elif now - self._signal_time > AGAIN_S:
            os._exit(128 + number)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        """Count the tokens of each micro batch from now on."""
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, inputs: dict[str, Any]) -> None:
        # Evaluations call the model too, but their tokens do not count.
        if model.training and torch.is_grad_enabled():
            self._tokens[-1] += inputs["input_ids"].numel()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the start of a step, which is also the end of the previous step."""
        self.mark()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of the run, and report the pause after the last step."""
        # If a run resumes from its last checkpoint, it may have no steps left, and so no pauses.
        if any(self._pauses[-1:]):
            self._report(state)
        self.mark()

    def mark(self) -> None:
        """Record the time, and the memory peaks since the last mark."""
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
        self._pauses.append(0.0)
        self._ends.append(None)

    def _event(self, now: float) -> Any:
        """Return a CUDA event after all work launched so far; on a CPU, return `now`."""
        if not torch.cuda.is_available():
            return now
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep a training loss that was logged, and report its step again, with this loss.

        The Trainer logs the loss of a step after `on_step_end`.
        """
        loss = (logs or {}).get("loss")
        if loss is not None:
            self._loss = loss
            self._report(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and stop the run if a signal has arrived.

        The loss of the last step is logged, too, so that the run does not end with an older loss.
        """
        self._report(state)
        if state.global_step >= state.max_steps:
            control.should_log = True

        self._is_stopped = self._should_stop(state.global_step)
        if self._is_stopped:
            control.should_training_stop = True
            control.should_save = self._saves
        if control.should_evaluate or control.should_save:
            self._synchronize()
            self._step_ended = time.perf_counter()
            self._ends[-1] = self._event(self._step_ended)

    def _should_stop(self, step: int) -> bool:
        """Return whether the run stops after this step.

        All ranks must stop after the same step, because a rank that continued would wait for the
        others.
        """
        if not dist.is_initialized():
            return self._signal is not None

        store = dist.distributed_c10d._get_default_store()
        if self._signal is not None:
            # No rank is more than one step ahead of another, so all can still stop after step + 2.
            store.compare_set(STOP, "", str(step + 2))
        if not store.check([STOP]) or step < int(store.get(STOP)):
            return False
        self._signal = self._signal or signal.SIGTERM
        return True

    def _report(self, state: Any) -> None:
        if self._progress and state.is_world_process_zero:
            line = {
                "began": self._start_time,
                "step": state.global_step,
                "of": state.max_steps,
                "seconds": time.perf_counter() - self._starts[0],
                "paused": sum(self._pauses),
                "loss": self._loss,
            }
            self._progress.write(json.dumps(line) + "\n")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the time of an evaluation to the pause between two steps."""
        self._pause()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the time of saving a checkpoint to the pause between two steps."""
        self._pause()

    def _pause(self) -> None:
        if self._step_ended is not None:
            now = time.perf_counter()
            self._pauses[-1] += now - self._step_ended
            self._step_ended = now

    def exit_if_stopped(self) -> None:
        """End the process if a signal stopped the run. The exit code identifies the signal.

        A signal after the last step does not stop the run: the result is still saved. Ranks receive
        a signal at different times, so if ranks stopped here, some of them would end while other
        ranks wait for them.
        """
        if self._is_stopped and self._signal is not None:
            sys.exit(PREEMPTED if self._signal == signal.SIGTERM else 128 + self._signal)

    def measurements(self) -> dict[str, Any]:
        """Return the mean seconds and the mean tokens of a step, and the memory peaks in GiB.

        The tokens include padding. `peak_reserved_gib` is the run's peak of reserved memory.
        `peaks_gib` has the peak of allocated memory in each quarter of the run. The means leave out
        the first step, steps that compile code, and the time of evaluations and saves. The peaks
        include evaluations and saves. A value is None if it was not measured, for example reserved
        memory on a CPU.
        """
        self._synchronize()

        # Time only the steps that compiled no graph.
        marks = list(zip(self._events, self._ends, self._tokens[1:], self._graphs, strict=False))[
            1:
        ]
        timed = [
            (_seconds(start, next_start if end is None else end), tokens)
            for (start, end, tokens, before), (next_start, *_, after) in pairwise(marks)
            if before == after
        ]

        peaks = self._peaks_allocated[1:]
        bounds = [len(peaks) * quarter // 4 for quarter in range(5)]
        quarters = [peaks[start:end] for start, end in pairwise(bounds)]
        return {
            "seconds_per_step": statistics.fmean(seconds for seconds, _ in timed)
            if timed
            else None,
            "padded_tokens_per_step": statistics.fmean(tokens for _, tokens in timed)
            if timed
            else None,
            "peak_reserved_gib": max(self._peaks_reserved[1:], default=None),
            "peaks_gib": [max(quarter) for quarter in quarters] if all(quarters) else None,
        }


def _seconds(start: Any, end: Any) -> float:
    """Return the seconds between two CUDA events, or between two times of the host's clock."""
    if isinstance(start, float | int):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000
