"""Starts the program once for each GPU of this machine, like torchrun, and ends all ranks together.

torchrun differs in three ways. It kills a rank that has not saved its checkpoint 30 seconds after a
signal. Its exit code is 1, independent of its ranks' exit codes. A signal raises an exception in it
at any point, after which it may wait for a minute.
"""

import atexit
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

LAUNCHER = "AUTOTUNE_LAUNCHER"  # an environment variable: the process id of a rank's launcher
CLEAN_EXITS = (
    0,
    75,
    130,
)  # exit codes of a complete rank, and of one that SIGTERM or SIGINT stopped
GRACE_S = 5.0  # the time for other ranks to print their errors, after one has failed
# A scheduler signals each process of a job. Signals within this time count as one.
AGAIN_S = 1.0
CAUSES = {"SIGKILL": ": the host may have run out of memory"}
PR_SET_PDEATHSIG = 1  # a constant of Linux's prctl
PORTS = (20_000, 30_000)  # outside the range that Linux assigns by itself


def run(count: int) -> int:
    """Run this program as `count` ranks. Return the exit code of the first failed rank, else 0.

    SIGINT and SIGTERM are passed on once. A second signal or a failed rank ends all ranks.
    """
    signals: list[tuple[float, int]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append((time.monotonic(), number)))

    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            variables = os.environ | _variables(rank, count, port)
            command = [sys.executable, *sys.argv]
            ranks.append(subprocess.Popen(command, env=variables, start_new_session=True))
        code = _wait(ranks, signals)
    finally:
        for one in ranks:
            one.kill()
    return code if code >= 0 else 128 - code


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables that torch.distributed and libraries on top of it read."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_PORT": port,
    }
    variables = {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}

    # torchrun sets OMP_NUM_THREADS too, because each rank would use all cores.
    return variables | {
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], signals: Sequence[tuple[float, int]]) -> int:
    """Wait for the end of all ranks, and return the first exit code other than 0.

    A negative code is a signal.
    """
    code = 0
    is_passed_on = False
    deadline = float("inf")
    while True:
        codes = [rank.poll() for rank in ranks]
        if not code and any(codes):
            number = next(number for number, ended in enumerate(codes) if ended)
            code = codes[number] or 0
            if code < 0 and not signals:  # a killed rank could not print its error
                name = signal.Signals(-code).name
                print(
                    f"train.py: error: rank {number} was ended by {name}{CAUSES.get(name, '')}",
                    file=sys.stderr,
                )
            if code not in CLEAN_EXITS:
                deadline = time.monotonic() + GRACE_S

        running = [rank for rank, ended in zip(ranks, codes, strict=True) if ended is None]
        if not running:
            return code

        if signals and not is_passed_on:
            is_passed_on = True
            for rank in running:
                rank.send_signal(signals[0][1])
        is_repeated = bool(signals) and signals[-1][0] - signals[0][0] > AGAIN_S
        if time.monotonic() > deadline or is_repeated:
            for rank in running:
                rank.kill()
        time.sleep(0.05)


def run_rank(train: Callable[[], object]) -> NoReturn:
    """Run `train`, and end this process at once with its exit code.

    The interpreter is not shut down. During a shutdown, a thread of gloo that drops the last work
    may deadlock with the interpreter, or end the process with SIGABRT (both seen with torch 2.13).
    """
    code: object = 0
    try:
        train()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:  # the run does not handle signals yet
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1

    # The interpreter would print a text too.
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1

    try:
        atexit._run_exitfuncs()  # trackers end their runs here
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a flush fails if the other end of a pipe is closed
        os._exit(code if isinstance(code, int) else 0)


def end_with_launcher() -> None:
    """Have Linux send SIGTERM to this rank when its launcher dies.

    The launcher and its ranks are in different sessions.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
            sys.exit("the launcher is dead")


def free_port() -> int:
    """Return a free port of this machine."""
    while True:
        port = random.randrange(*PORTS)  # noqa: S311
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
