"""The other workers of `autotune run --workers N`: one for each further GPU of this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.console import Display
from autotune.core import nvml
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.report.study_directory import prepare

if TYPE_CHECKING:
    from autotune.study.storage.leases import Leases

LEAVE_S = 20.0


def further_cards(workers: int, *, cpu: bool) -> Sequence[int | str | None]:
    """Where the workers beside this process probe: on its further cards, or None for each on a processor.

    Raises EnvironmentProblem where there are too few.
    """
    if cpu:
        return [None] * (workers - 1)
    cards = nvml.visible() if workers > 1 else []
    if workers > max(len(cards), 1):
        raise EnvironmentProblem(
            f"--workers {workers}: GPUs here: {len(cards)}", remedy=f"give --workers {max(len(cards), 1)}"
        )
    return cards[1:workers]


@contextmanager
def local_workers(
    cards: Sequence[int | str | None],
    study: str,
    url: str,
    out: Path,
    display: Display,
    should_stop: Callable[[], bool],
) -> Iterator[None]:
    """A worker on each of these other `cards` (None: the processor), that end with this process or before."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, card in enumerate(cards, 2):
            folder = out / f"worker-{number}"
            prepare(folder)
            environment = os.environ | {"AUTOTUNE_STORAGE": url}  # not on the command line, which everybody can read
            if card is not None:
                environment["CUDA_VISIBLE_DEVICES"] = str(card)
            line = [sys.executable, "-m", "autotune", "worker", "--study", study, "--out", str(folder)]
            with (folder / "logs" / "tuner.log").open("ab") as log:
                started.append(
                    subprocess.Popen(
                        [*line, "--parent", str(os.getpid())],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        process_group=0,  # Ctrl-C is for the one that leads, which ends them
                    )
                )
        yield
        if any(process.poll() is None for process in started):
            display.say("waiting for the other workers to end what they probe")
        until = time.monotonic() + LEAVE_S
        while any(process.poll() is None for process in started) and time.monotonic() < until and not should_stop():
            time.sleep(0.1)
    finally:
        for number, process in enumerate(started, 2):
            if process.poll():
                text = f"worker {number} failed (exit code {process.returncode}): {out}/worker-{number}/logs"
                display.note(text, "yellow")
            with suppress(ProcessLookupError):
                process.terminate()
        for process in started:
            try:
                process.wait(timeout=LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def refuse_another(coordinator: "Leases", study: str, say: Callable[[str], None]) -> None:
    """Raises UsageError where another process leads the study already, here or on another host."""
    if other := next((one for one in coordinator.certainly(say).values() if one.leads), None):
        raise UsageError(
            f"study {study!r} is being run by process {other.pid} of {other.host}",
            remedy="help it with `autotune worker`, or give another name with --study",
        )
