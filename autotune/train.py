"""The full run of a study's winner: its exported script in a process of its own, how far it is, and what it costs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.exported import last_error
from autotune.files import write_atomic
from autotune.recipe import Recipe

PREEMPTED = 75  # exit code of the script after SIGTERM, when a checkpoint is there
# Runs a script that gets SIGTERM when its parent ends, however that ends: it saves a checkpoint.
TIED = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
parent, *sys.argv = sys.argv[1:]
os.getppid() == int(parent) or sys.exit("the parent is gone")
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


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
        """As training.json holds it."""
        about: dict[str, Any] = {"schema_version": 1, "steps": self.step, "of": self.of, "trained_s": self.trained_s}
        about |= {"spent_usd": self.spent_usd, "projected_s": self.projected_s, "projected_usd": self.projected_usd}
        return about | {"loss": self.loss, "error": self.trained_s / self.projected_s - 1}


class Run:
    """One session of a full run. `script` is the exported train.py, `output` where it saves.

    What it says goes to `output`/train.log, a line for each step to `output`/progress.jsonl.
    """

    def __init__(self, recipe: Recipe, script: Path, output: Path, arguments: Sequence[str]) -> None:
        self._recipe, self._output = recipe, output
        self._command = [str(script), *arguments, "--output-dir", str(output)]
        self._command += ["--progress", str(output / "progress.jsonl")]
        self.log = output / "train.log"

    def train(self, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]) -> tuple[int, str]:
        """(exit code, the last error that its log names). A stop is passed on once, and the checkpoint waited for."""
        self._output.mkdir(parents=True, exist_ok=True)
        earlier = len(self._lines())
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", TIED, str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is passed on by this process alone
            )
        started, passed_on, shown = time.monotonic(), False, earlier
        while process.poll() is None:
            if should_stop() and not passed_on:
                passed_on = True
                process.send_signal(signal.SIGTERM)
            lines = self._lines()
            if len(lines) > shown:
                shown = len(lines)
                on_progress(self._progress(lines, earlier))
            time.sleep(0.2)
        if len(lines := self._lines()) > earlier:
            progress = self._progress(lines, earlier)
            on_progress(progress)
            seconds = {"wall_s": time.monotonic() - started, "exit_code": process.returncode}
            about = {"study": self._recipe.study, **progress.told(), **seconds}
            write_atomic(self._output / "training.json", json.dumps(about, indent=2) + "\n")
        return process.returncode, last_error(self.log)

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines only: the last may be half written."""
        path = self._output / "progress.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _progress(self, lines: list[dict[str, Any]], earlier: int) -> Progress:
        """From the lines of all sessions, the first `earlier` of earlier ones. Steps that were lost count as paid."""
        last, first = lines[-1], lines[earlier]
        trained = sum({line["began"]: line["seconds"] for line in lines}.values())  # the last of each session
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
