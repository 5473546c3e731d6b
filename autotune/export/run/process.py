"""Runs an exported script as a user would, in a child process that ends when this process ends.

A child process that hangs is killed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autotune.core.child_environment import child_environment
from autotune.core.errors import Cancelled
from autotune.core.nvml import visible
from autotune.export.run import child

# Torch writes "[rank0]: " before each line of an uncaught error if the process has a group.
ERROR = re.compile(
    r"(?m)^(?:\[rank\d+\]: )?((?:[\w.]*(?:Error|Exception|Exit)\b|[\w.]+: error: ).*)"
)
# The prefix of torchrun's last error message. The message says that a process failed, but not why.
OF_LAUNCHER = "torch.distributed.elastic"
START_S = 900.0  # seconds allowed for imports, weights and the first step
ENDING_S = 10.0  # seconds that a killed process may take to end
SLOWER = 10.0  # a run hangs if it takes longer than this multiple of the measured time


def time_limit_s(steps: int, step_s: float) -> float:
    """Return the seconds after which a run of `steps` steps is considered to hang."""
    return START_S + SLOWER * steps * step_s


def command(
    script: str, arguments: Sequence[str], on_parents_death: signal.Signals = signal.SIGKILL
) -> list[str]:
    """Return the command that runs a script (a path to a .py file) or a module.

    The process that runs this command gets the signal `on_parents_death` if this process dies.
    """
    return [
        sys.executable,
        child.__file__,
        str(int(on_parents_death)),
        str(os.getpid()),
        script,
        *arguments,
    ]


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Replace any leftover folder by an empty folder, and remove that folder at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts to files at relative paths in `folder`, and make the required subfolders."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class AddedLines:
    """Reads the lines that another process appends to a file. The file may not exist yet."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_bytes = 0

    def read(self) -> list[bytes]:
        """Return the complete lines that were added since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            lines = [line for line in file if line.endswith(b"\n")]
        self._read_bytes += sum(len(line) for line in lines)
        return lines


def run_exported(
    folder: Path,
    arguments: Sequence[str],
    log: Path,
    *,
    limit_s: float,
    should_stop: Callable[[], bool],
    script: str = "train.py",
    num_gpus: int = 1,
    environment: Mapping[str, str] | None = None,
    while_running: Callable[[], None] = lambda: None,
) -> dict[str, Any] | str:
    """Run a script in `folder`, or a module, and return the last JSON object that it prints.

    If the script fails or prints no object, the result is the reason, as text. The script gets the
    environment variables of a probe and the variables in `environment`. If `num_gpus`
    is above 1, it sees all GPUs. The script's stderr is written to `log`. The script is killed
    after `limit_s` seconds. `while_running` is called ten times a second. Raises Cancelled if
    `should_stop` returned true.
    """
    started = time.monotonic()
    stdout = folder / "stdout"
    # Even on a CPU, use the environment of "cuda": the environment for "cpu" makes the memory peaks
    # of probes repeatable, but would slow this run down.
    variables = child_environment(os.environ, "cuda") | dict(environment or {})
    if num_gpus > 1:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible()))

    with stdout.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            command(script, arguments),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=variables,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < started + limit_s:
                if should_stop():
                    raise Cancelled
                while_running()
                time.sleep(0.1)
        finally:
            _end(process)

    if process.returncode == 0:
        return _last_object(stdout)
    took = time.monotonic() - started
    if took >= limit_s:
        return f"not done after {took:.0f} s"
    return last_error(log) or f"exit code {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes that it started, also those in other process sessions."""
    import psutil

    started: list[psutil.Process] = []
    with suppress(psutil.Error):
        if process.poll() is None:
            started = psutil.Process(process.pid).children(recursive=True)

    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with suppress(psutil.Error):
            one.kill()
    process.wait()
    # Wait until these processes have ended, because they hold device memory until then.
    psutil.wait_procs(started, ENDING_S)


def last_error(log: Path, begins: int = 0) -> str:
    """Return the last line of a log that contains an error, or "" without an error.

    The search begins at byte `begins`. Lines after the error, such as progress bars, are skipped.
    """
    errors = ERROR.findall(log.read_bytes()[begins:].decode("utf-8", errors="replace"))
    own = [error for error in errors if not error.startswith(OF_LAUNCHER)] or errors
    return own[-1].strip()[:300] if own else ""


def _last_object(stdout: Path) -> dict[str, Any] | str:
    lines = stdout.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    with suppress(ValueError):
        result = json.loads(lines[-1]) if lines else None
        if isinstance(result, dict):
            return result
    return "the script printed no result"
