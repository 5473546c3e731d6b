"""Starts the program once for each GPU of this machine, as torchrun does, and ends all of these ranks together.

torchrun kills a rank that has not saved its checkpoint 30 seconds after a signal, ends with 1 whatever the ranks ended
with, and raises an exception wherever a signal finds it, after which it may wait for a minute.
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

LAUNCHER = "AUTOTUNE_LAUNCHER"  # a variable: the process id of what started a rank
ENDED = (0, 75, 130)  # exit codes of ranks that did all they should: the end, and a stop by SIGTERM or SIGINT
GRACE_S = 5.0  # seconds in which the other ranks may say what went wrong, once one has failed
AGAIN_S = 1.0  # a scheduler signals each process of a job: what comes sooner is the same signal
WHY = {"SIGKILL": ": the host may have run out of memory"}
PR_SET_PDEATHSIG = 1  # of Linux's prctl
PORTS = (20_000, 30_000)  # from which Linux gives none to who asks for any


def run(count: int) -> int:
    """Run this program as `count` ranks, and return the exit code of the first that fails, else 0.

    SIGINT and SIGTERM are passed on once. A second one, or a rank that fails, ends all ranks.
    """
    signals: list[tuple[float, int]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append((time.monotonic(), number)))
    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            variables = os.environ | _variables(rank, count, port)
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=variables, start_new_session=True))
        code = _wait(ranks, signals)
    finally:
        for one in ranks:
            one.kill()
    return code if code >= 0 else 128 - code


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    """What torch.distributed, and the libraries above it, read from the environment."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    # As with torchrun: each rank would take all cores for itself.
    return variables | {LAUNCHER: str(os.getpid()), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], signals: Sequence[tuple[float, int]]) -> int:
    """Wait for the end of all ranks; the first exit code that is not 0, negative for a signal."""
    code, passed_on, until = 0, False, float("inf")
    while True:
        codes = [rank.poll() for rank in ranks]
        if not code and any(codes):
            number = next(number for number, ended in enumerate(codes) if ended)
            code = codes[number] or 0
            if code < 0 and not signals:  # it could not say so itself
                name = signal.Signals(-code).name
                print(f"train.py: error: rank {number} was ended by {name}{WHY.get(name, '')}", file=sys.stderr)
            if code not in ENDED:
                until = time.monotonic() + GRACE_S
        running = [rank for rank, ended in zip(ranks, codes, strict=True) if ended is None]
        if not running:
            return code
        if signals and not passed_on:
            passed_on = True
            for rank in running:
                rank.send_signal(signals[0][1])
        if time.monotonic() > until or (signals and signals[-1][0] - signals[0][0] > AGAIN_S):
            for rank in running:
                rank.kill()
        time.sleep(0.05)


def end_after(train: Callable[[], object]) -> NoReturn:
    """Run a rank, and end this process at once, with the exit code that `train` ends with.

    The interpreter is not taken down. Meanwhile a thread of gloo that drops the last work may wait for the interpreter,
    which waits for that thread, or ends the process with SIGABRT (both seen with torch 2.13).
    """
    code: object = 0
    try:
        train()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:  # before the run handles signals itself
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):  # as the interpreter would do
        print(code, file=sys.stderr)
        code = 1
    try:
        atexit._run_exitfuncs()  # trackers end their runs so
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where nobody reads what is said any more
        os._exit(code if isinstance(code, int) else 0)


def end_with_launcher() -> None:
    """Have Linux send SIGTERM to this rank when its launcher dies, which does not share its session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
            sys.exit("the launcher is dead")


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    while True:
        port = random.randrange(*PORTS)  # noqa: S311
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
