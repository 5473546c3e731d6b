"""Trains a study's winner in full: runs its exported script, and reports progress and cost."""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autotune.core.child_environment import inherited_variables
from autotune.core.errors import UsageError
from autotune.core.files import write_atomic
from autotune.export.run.process import AddedLines, command, last_error
from autotune.study.summary import Recipe

# Each start or resumption of a run begins a session. After this number of steps of a session, its
# speed is compared with the speed that the study measured.
SETTLED_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a full run.

    `trained_s` and `spent_usd` are totals of the training in all sessions. `projected_s` and
    `projected_usd` are the study's projection for the whole run. `left_s` is the remaining time at
    the speed of this session. `slowdown` is the session's step time divided by the step time that
    the study measured, minus 1. It is None on a CPU, and in the first SETTLED_STEPS steps of a
    session.
    """

    step: int
    of: int
    trained_s: float
    left_s: float
    spent_usd: float | None
    projected_s: float
    projected_usd: float | None
    loss: float | None
    slowdown: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the values for training.json.

        The value `error` is the time of a complete run divided by the projected time, minus 1.
        """
        names = ("of", "trained_s", "spent_usd", "projected_s", "projected_usd", "loss")
        error = self.trained_s / self.projected_s - 1 if self.step == self.of else None
        values = {name: getattr(self, name) for name in names}
        return {"schema_version": 1, "steps": self.step, **values, "error": error}


class Run:
    """One session of a full run. A session may continue the run of earlier sessions.

    In `output`, train.log gets the script's output, progress.jsonl gets lines for each step, and
    training.json gets the result.
    """

    def __init__(
        self,
        recipe: Recipe,
        script: Path,
        output: Path,
        arguments: Sequence[str],
        *,
        fresh: bool = False,
        pass_env: Sequence[str] = (),
    ) -> None:
        """`script` is the exported train.py; `fresh` discards the records of earlier sessions.

        The script gets the environment variables of a probe, and the variables in `pass_env`.
        """
        self._recipe = recipe
        self._output = output
        self._fresh = fresh
        pauses = recipe.winner.cost.pauses
        # The projection includes evaluations and checkpoints, so it is valid only for a whole run.
        is_whole = "--dataset" in arguments and "--max-steps" not in arguments
        self._paused_s = pauses.known_s if pauses and is_whole else 0.0
        self._environment = inherited_variables(os.environ, pass_env)
        self._steps = output / "progress.jsonl"

        # If this process dies, the script gets SIGTERM and saves a checkpoint.
        arguments = [*arguments, "--progress", str(self._steps)]
        self._command = command(str(script), arguments, signal.SIGTERM)

        self._added_lines = AddedLines(self._steps)
        # The seconds of training in each session, by the session's start time
        self._sessions: dict[float, float] = {}
        self._first: dict[str, Any] | None = None  # the first line of this session
        self._last: dict[str, Any] = {}
        self._log_begins = 0
        self.log = output / "train.log"
        # What the script printed at the end of the run. `asked` has the prompt of its option --ask,
        # and the model's answers `before` and `after` the training.
        self.result: dict[str, Any] = {}

    def train(
        self, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> tuple[int, str]:
        """Run the script to its end, and return its exit code and its last error.

        After a stop request, the script gets one signal, and has time to save a checkpoint. Raises
        UsageError if another run trains in this directory.
        """
        process = self._start()
        started = time.monotonic()
        is_stopping = False
        while process.poll() is None:
            if should_stop() and not is_stopping:
                is_stopping = True
                process.send_signal(signal.SIGTERM)
            if self._read():
                on_progress(self._progress())
            time.sleep(0.2)

        self._read()
        self.result = self._last_result()
        if self._first is not None:
            progress = self._progress()
            on_progress(progress)
            values = {"study": self._recipe.study, **progress.to_dict()}
            values |= {"wall_s": time.monotonic() - started, "exit_code": process.returncode}
            write_atomic(self._output / "training.json", json.dumps(values, indent=2) + "\n")
        return process.returncode, last_error(self.log, self._log_begins)

    def _last_result(self) -> dict[str, Any]:
        """Return the last JSON object in the script's log, or an empty one without any."""
        session = self.log.read_bytes()[self._log_begins :].decode(errors="replace")
        for line in reversed(session.splitlines()):
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        return {}

    def _start(self) -> subprocess.Popen[bytes]:
        self._output.mkdir(parents=True, exist_ok=True)
        with (self._output / ".lock").open("a") as lock, self.log.open("ab") as log:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"another run trains in {self._output}, or still saves its checkpoint",
                    remedy="wait, or give another --output-dir",
                ) from None
            self._restore(log)

            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                # In a process session of its own, the script does not get the terminal's Ctrl-C.
                start_new_session=True,
                # The script inherits the lock. So the lock is held until the script has saved its
                # checkpoint, even if this process dies.
                pass_fds=[lock.fileno()],
            )

    def _restore(self, log: IO[bytes]) -> None:
        """Read the lines of earlier sessions, and remove an incomplete last line."""
        if self._fresh:
            self._steps.unlink(missing_ok=True)
            log.truncate(0)
        if self._steps.exists():
            text = self._steps.read_bytes()
            os.truncate(self._steps, text.rfind(b"\n") + 1)
        self._read()
        self._first = None
        self._log_begins = log.seek(0, os.SEEK_END)

    def _read(self) -> bool:
        """Read the new lines of progress.jsonl; return whether there are any."""
        lines = self._added_lines.read()
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                self._add(json.loads(line))
        return bool(lines)

    def _add(self, line: dict[str, Any]) -> None:
        self._sessions[line["began"]] = line["seconds"]
        self._first = self._first or line
        self._last = line

    def _progress(self) -> Progress:
        """Return the progress. Its seconds and USD include steps that a later session repeated."""
        last = self._last
        first = self._first or last
        trained_s = sum(self._sessions.values())
        steps = last["step"] - first["step"]
        measured_s = self._recipe.winner.performance.step_time_s
        step_s = (_step_seconds(last) - _step_seconds(first)) / steps if steps else measured_s

        projected_s = last["of"] * measured_s + self._paused_s
        usd_per_s = self._recipe.price.usd_per_hour / 3600 if self._recipe.price else None
        is_settled = steps >= SETTLED_STEPS and self._recipe.device.kind != "cpu"

        return Progress(
            step=last["step"],
            of=last["of"],
            trained_s=trained_s,
            left_s=(last["of"] - last["step"]) * (step_s + self._paused_s / last["of"]),
            spent_usd=None if usd_per_s is None else trained_s * usd_per_s,
            projected_s=projected_s,
            projected_usd=None if usd_per_s is None else projected_s * usd_per_s,
            loss=last["loss"],
            slowdown=step_s / measured_s - 1 if is_settled else None,
        )


def _step_seconds(line: dict[str, Any]) -> float:
    """Return the seconds of a session's training steps up to a line of progress.jsonl.

    Evaluations and saves are subtracted, except for scripts of older versions, which did not time
    them.
    """
    return float(line["seconds"] - line.get("paused", 0.0))
