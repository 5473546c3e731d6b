"""Running an exported script as a user would: in a process of its own that ends with this one, killed when it hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.core.errors import Cancelled
from autotune.probe.worker_process import child_environment

# Runs a script, or a module, in a process that gets a signal when its parent ends, however that ends.
TIED = """
import ctypes, os, runpy, sys
number, parent, *sys.argv = sys.argv[1:]
ctypes.CDLL(None).prctl(1, int(number))
os.getppid() == int(parent) or sys.exit("the parent is gone")
is_file = sys.argv[0].endswith(".py")
is_file and sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
(runpy.run_path if is_file else runpy.run_module)(sys.argv[0], run_name="__main__")
"""
ERROR = re.compile(r"(?m)^(?:[\w.]*(?:Error|Exception|Exit)\b|[\w.]+: error: ).*")


def tied(script: str, arguments: Sequence[str], ending: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command that runs a script, or a module of that name, tied to this process: `ending` is what it gets then."""
    return [sys.executable, "-c", TIED, str(int(ending)), str(os.getpid()), script, *arguments]


def run_exported(
    folder: Path,
    arguments: Sequence[str],
    log: Path,
    *,
    seconds: float,
    should_stop: Callable[[], bool],
    on_cpu: bool,
    script: str = "train.py",
    environment: Mapping[str, str] | None = None,
    while_it_runs: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any] | None, str | None]:
    """(what `script` in `folder`, or a module of that name, said at its end, None), or (None, why it said nothing).

    `environment` goes on top of a probe's. What it writes to stderr goes to `log`. After `seconds` it is taken to hang.
    `while_it_runs` is called ten times a second. Raises Cancelled where `should_stop`.
    """
    begin, said = time.monotonic(), folder / "said"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    with said.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            tied(script, arguments),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # Nothing is weighed here: no setting that makes a CPU's peaks repeat.
            env=child_environment(os.environ, "cuda") | dict(environment or {}) | hidden,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < begin + seconds:
                if should_stop():
                    raise Cancelled
                while_it_runs()
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        took = time.monotonic() - begin
        hung = f"not done after {took:.0f} s" if took >= seconds else None
        return None, hung or last_error(log) or f"exit code {process.returncode}"
    try:
        result: dict[str, Any] = json.loads(said.read_text(encoding="utf-8").strip().splitlines()[-1])
        return result | {}, None
    except (ValueError, IndexError, TypeError):
        return None, "it did not say how it went"


def last_error(log: Path, begins: int = 0) -> str:
    """The last error that a log names from this byte on; progress bars come after it."""
    found = ERROR.findall(log.read_bytes()[begins:].decode("utf-8", errors="replace"))
    return found[-1].strip()[:300] if found else ""
