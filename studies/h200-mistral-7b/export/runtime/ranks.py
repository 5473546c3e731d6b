# -*- coding: utf-8 -*-
"""Starts the program once for each GPU of this machine, like torchrun, and ends all ranks together.

torchrun differs in three ways. torchrun kills ranks 30 seconds after a signal, even if they have
not saved their checkpoint. If a rank fails, torchrun's exit code is always 1, independent of the
rank's exit code. A signal raises an exception at any point of torchrun's code, after which torchrun
may wait for a minute.

The launcher starts a supervisor, and the supervisor starts the ranks. If the launcher is killed,
the supervisor still ends all ranks.
"""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

SUPERVISOR = "AUTOTUNE_SUPERVISOR"  # an environment variable: the process id of a rank's parent
MEETING = "AUTOTUNE_MEETING"  # an environment variable: the file that lets ranks find each other
CLEAN_EXITS = (
    0,
    75,
    130,
)  # exit codes of a rank that has finished, and of ranks that SIGTERM or SIGINT stopped
# The time in seconds that the other ranks get to print their errors after one rank has failed.
GRACE_S = 5.0
# A scheduler signals each process of a job, so signals within this number of seconds count as one.
AGAIN_S = 1.0
# After the launcher's death, the ranks have this number of seconds to save, and are then killed.
ALONE_S = 600.0
CAUSES = {"SIGKILL": ": the host may have run out of memory"}
PR_SET_PDEATHSIG = 1  # the option of Linux's prctl that sends a signal when the parent dies
LOOPBACK = "lo"  # Linux's network interface that no other machine reaches


def run(count: int) -> int:
    """Run this program as `count` ranks. Return the exit code of the first failed rank, else 0.

    SIGINT and SIGTERM are passed on to the ranks once. A second signal or a failed rank ends all
    ranks. If this process dies, the ranks end as after SIGTERM.
    """
    signals: list[tuple[float, int]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append((time.monotonic(), number)))

    launcher = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        end_at_once(lambda: sys.exit(_supervise(count, launcher, signals)))

    num_passed_on = 0
    ended, status = 0, 0
    while not ended:
        for _, passed_on in signals[num_passed_on:]:
            num_passed_on += 1
            os.kill(supervisor, passed_on)
        time.sleep(0.05)
        ended, status = os.waitpid(supervisor, os.WNOHANG)
    return _shell_code(os.waitstatus_to_exitcode(status))


def _supervise(count: int, launcher: int, signals: Sequence[tuple[float, int]]) -> int:
    """Start the ranks, wait for their end, and return the exit code for the launcher.

    Ranks find each other through a file that has no name, so that no other user can open it.
    """
    os.setsid()
    _end_with(launcher)
    meeting = os.memfd_create("ranks")
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            variables = os.environ | _variables(rank, count, meeting)
            command = [sys.executable, *sys.argv]
            ranks.append(
                subprocess.Popen(command, env=variables, start_new_session=True, pass_fds=[meeting])
            )
        code = _wait(ranks, signals, launcher)
    finally:
        _kill(ranks)
    return _shell_code(code)


def _shell_code(code: int) -> int:
    """Return the exit code that a shell reports for a process. A negative `code` means a signal."""
    return code if code >= 0 else 128 - code


def _kill(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Kill the ranks that still run, together with the processes that they started."""
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)


def _variables(rank: int, count: int, meeting: int) -> dict[str, str]:
    """Return the environment variables that `join`, accelerate, gloo and NCCL read."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        SUPERVISOR: os.getpid(),
    }
    variables = {name: str(value) for name, value in numbers.items()}

    # Each rank would use all cores otherwise. torchrun sets this variable for the same reason.
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return variables | loopback_variables() | {MEETING: f"/proc/self/fd/{meeting}"}


def loopback_variables() -> dict[str, str]:
    """Return the variables that bind gloo and NCCL to the loopback interface.

    Variables that are already set keep their values.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, LOOPBACK) for name in names}


def _wait(
    ranks: Sequence["subprocess.Popen[bytes]"],
    signals: Sequence[tuple[float, int]],
    launcher: int,
) -> int:
    """Wait for the end of all ranks, and return the first exit code other than 0.

    A negative exit code means that a signal ended the rank.
    """
    code = 0
    is_passed_on = False
    deadline = float("inf")
    while True:
        codes = [rank.poll() for rank in ranks]
        if not code and any(codes):
            number = next(number for number, ended in enumerate(codes) if ended)
            code = codes[number] or 0
            # Print a message for a killed rank, which could not print its own.
            if code < 0 and not signals:
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
        # After the launcher's death, no second signal can reach the ranks, so a deadline ends them.
        if deadline == float("inf") and os.getppid() != launcher:
            deadline = time.monotonic() + ALONE_S
        if time.monotonic() > deadline or is_repeated:
            _kill(running)
        time.sleep(0.05)


def end_at_once(run: Callable[[], object]) -> NoReturn:
    """Call `run`, and end this process with the exit code of `run`, without freeing any object.

    Freeing can hang: if DDP's reducer has the last reference to gloo's group, the reducer holds the
    GIL while it joins a thread that waits for the GIL. A shutdown of the interpreter can deadlock
    with this thread too, or end with SIGABRT. All three were seen with torch 2.13.
    """
    code: object = 0
    kept: list[object] = []  # keeps the result or the exception, so that no object is freed
    try:
        kept.append(run())
    except SystemExit as error:
        kept.append(error)
        code = error.code
    except BaseException as error:
        kept.append(error)
        traceback.print_exc()
        code = 1

    # An exit code that is text is printed, as the interpreter does.
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1

    try:
        atexit._run_exitfuncs()  # experiment trackers end their runs here
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a flush fails if the other end of a pipe is closed
        os._exit(code if isinstance(code, int) else 0)


def begin_rank() -> None:
    """Have Linux send SIGTERM to this rank when its parent dies, and let SIGINT end the rank.

    Ranks have their own sessions, so that signals of a terminal do not reach them. Until the
    training handles signals, SIGINT ends a rank at once. The rank has nothing to save yet, and may
    be waiting for the other ranks in C++ code, during which Python handles no signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with(int(os.environ.get(SUPERVISOR, os.getppid())))


def _end_with(parent: int) -> None:
    """Have Linux send SIGTERM to this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit("the launcher is dead")


def join(backend: str) -> None:
    """Join the other ranks through the launcher's file, or at the address that torchrun gives."""
    from torch import distributed as dist

    meeting = os.environ.get(MEETING)
    if meeting is None:
        dist.init_process_group(backend)
        return

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(meeting, count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
