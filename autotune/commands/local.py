"""The other workers of `autotune run --workers N`: one for each further GPU of this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autotune import gpu
from autotune.catalog import DeviceSpec
from autotune.commands.outputs import prepare
from autotune.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from autotune.leases import Leases

SEARCHING, CONFIRMING, ENDED = "searching", "confirming", "ended"  # the phases of a study; workers help in the first
LEAVE_S = 20.0


@contextmanager
def local_workers(
    count: int, study: str, url: str, out: Path, device: DeviceSpec, note: Callable[[str, str], None]
) -> Iterator[None]:
    """`count` workers on the other GPUs of this machine (or its processor), that end with this process or before.

    `note` is told, in yellow, which of them failed.
    """
    if not count:
        yield
        return
    cards: list[int | str | None] = [None] * count
    if device.kind != "cpu":
        cards = list(gpu.visible()[1 : count + 1])
    if len(cards) < count:
        raise EnvironmentProblem(
            f"--workers {count + 1}: there are {len(cards) + 1} GPUs here", remedy=f"give --workers {len(cards) + 1}"
        )
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, card in enumerate(cards, 2):
            folder = out / f"worker-{number}"
            prepare(folder)
            environment = os.environ | {"AUTOTUNE_STORAGE": url}  # not on the command line, which everybody can read
            if card is not None:
                environment["CUDA_VISIBLE_DEVICES"] = str(card)
            line = [sys.executable, "-m", "autotune.cli", "worker", "--study", study, "--out", str(folder)]
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
        _wait(started)
    finally:
        for number, process in enumerate(started, 2):
            if process.poll():
                note(f"worker {number} failed (exit code {process.returncode}): {out}/worker-{number}/logs", "yellow")
            with suppress(ProcessLookupError):
                process.terminate()
        for process in started:
            try:
                process.wait(timeout=LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def refuse_another(crew: "Leases", study: str) -> None:
    """Raises UsageError where another process leads the study already, here or on another host."""
    if other := next((one for one in crew.certainly().values() if one.leads), None):
        raise UsageError(
            f"study {study!r} is being run by process {other.pid} of {other.host}",
            remedy="help it with `autotune worker`, or give another name with --study",
        )


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until they have ended by themselves, or should have."""
    until = time.monotonic() + LEAVE_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(until - time.monotonic(), 0.0))
