"""The full run of a study's winner: its exported script in a process of its own, how far it is, and what it costs."""

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

from autotune.core.errors import UsageError
from autotune.core.files import write_atomic
from autotune.export.run.process import last_error, tied
from autotune.study.summary import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is. Seconds are those of training, over all its sessions; USD are those of the device's time."""

    step: int
    of: int
    trained_s: float
    left_s: float
    spent_usd: float | None
    projected_s: float
    projected_usd: float | None
    loss: float | None
    off: float | None  # how much longer a step takes than was promised; None while it is too early, and on a CPU

    def told(self) -> dict[str, Any]:
        """As training.json holds it. `error`, once it is done, is what it took over what was projected, minus 1."""
        about: dict[str, Any] = {"schema_version": 1, "steps": self.step, "of": self.of, "trained_s": self.trained_s}
        about |= {"spent_usd": self.spent_usd, "projected_s": self.projected_s, "projected_usd": self.projected_usd}
        error = self.trained_s / self.projected_s - 1 if self.step == self.of else None
        return about | {"loss": self.loss, "error": error}


class Run:
    """One session of a full run. `script` is the exported train.py, `output` where it keeps what it says.

    What it prints goes to `output`/train.log, a line for each step to `output`/progress.jsonl.
    """

    def __init__(
        self, recipe: Recipe, script: Path, output: Path, arguments: Sequence[str], *, fresh: bool = False
    ) -> None:
        """`fresh`: forget what earlier runs said there."""
        self._recipe, self._output, self._fresh = recipe, output, fresh
        self._steps = output / "progress.jsonl"
        # When this process ends, however it ends, the run saves a checkpoint.
        self._command = tied(str(script), [*arguments, "--progress", str(self._steps)], signal.SIGTERM)
        self._read = 0  # bytes of it
        self._sessions: dict[float, float] = {}  # when each began -> seconds it has trained
        self._first: dict[str, Any] | None = None  # steps of this session, and the last
        self._last: dict[str, Any] = {}
        self._log_begins = 0
        self.log = output / "train.log"

    def train(self, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]) -> tuple[int, str]:
        """(exit code, the last error that it printed). A stop is passed on once, and the checkpoint waited for.

        Raises UsageError where another run trains there.
        """
        self._output.mkdir(parents=True, exist_ok=True)
        with (self._output / ".lock").open("a") as lock, self.log.open("ab") as log:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"another run trains in {self._output}, or still saves", remedy="wait, or give another --output-dir"
                ) from None
            self._begin(log)
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is passed on by this process alone
                pass_fds=[lock.fileno()],  # held until the run has saved, whatever becomes of this process
            )
        started, passed_on = time.monotonic(), False
        while process.poll() is None:
            if should_stop() and not passed_on:
                passed_on = True
                process.send_signal(signal.SIGTERM)
            if self._look():
                on_progress(self._progress())
            time.sleep(0.2)
        self._look()
        if self._first is not None:
            progress = self._progress()
            on_progress(progress)
            ended = {"wall_s": time.monotonic() - started, "exit_code": process.returncode}
            about = {"study": self._recipe.study, **progress.told(), **ended}
            write_atomic(self._output / "training.json", json.dumps(about, indent=2) + "\n")
        return process.returncode, last_error(self.log, self._log_begins)

    def _begin(self, log: IO[bytes]) -> None:
        """Read what earlier sessions did, but for half a line at the end, behind which the next would be written."""
        if self._fresh:
            self._steps.unlink(missing_ok=True)
            log.truncate(0)
        if self._steps.exists():
            whole = self._steps.read_bytes().rpartition(b"\n")
            os.truncate(self._steps, len(whole[0]) + len(whole[1]))
        self._look()
        self._first, self._log_begins = None, log.seek(0, os.SEEK_END)

    def _look(self) -> bool:
        """Read what has come, whole lines only; whether there was any."""
        if not self._steps.exists():
            return False
        with self._steps.open("rb") as file:
            file.seek(self._read)
            lines = [line for line in file if line.endswith(b"\n")]
        for line in lines:
            self._read += len(line)
            with suppress(ValueError, KeyError, TypeError):
                self._take(json.loads(line))
        return bool(lines)

    def _take(self, line: dict[str, Any]) -> None:
        self._sessions[line["began"]] = line["seconds"]
        self._first, self._last = self._first or line, line

    def _progress(self) -> Progress:
        """Money counts all sessions, with the steps that were lost and done again; the pace is that of this one."""
        last, first = self._last, self._first or self._last
        trained = sum(self._sessions.values())
        done = last["step"] - first["step"]
        promised = self._recipe.winner.performance.step_time_s
        pace = (last["seconds"] - first["seconds"]) / done if done else promised
        price = self._recipe.price
        projected = last["of"] * promised
        usd = price.usd_per_hour / 3600 if price else None
        return Progress(
            step=last["step"],
            of=last["of"],
            trained_s=trained,
            left_s=(last["of"] - last["step"]) * pace,
            spent_usd=usd and trained * usd,
            projected_s=projected,
            projected_usd=usd and projected * usd,
            loss=last["loss"],
            off=pace / promised - 1 if done >= 20 and self._recipe.device.kind != "cpu" else None,
        )
