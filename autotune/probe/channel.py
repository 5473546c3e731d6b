"""The worker's end of the socket to its parent, and the log that gets its output.

A worker sends JSON lines on its own socket, because libraries print to stdout.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from autotune.core.process import die_with_parent, take_group_along


def open_channel() -> tuple[Iterator[str], Callable[..., None], str, str]:
    """Open the socket to the parent, whose end also ends this process.

    Returns the lines that the parent sends, a function that sends a message to it, the device, and
    a scratch directory.
    """
    channel_handle = int(sys.argv[1])
    device = sys.argv[2]
    parent = int(sys.argv[3])
    scratch = sys.argv[4]
    die_with_parent(parent)
    take_group_along(channel_handle, scratch=scratch)

    channel = socket.socket(fileno=channel_handle)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    reader, writer = channel.makefile("r"), channel.makefile("w")

    def send(**message: Any) -> None:
        writer.write(json.dumps(message) + "\n")
        writer.flush()

    return reader, send, device, scratch


def phase_seconds(entered: list[tuple[str, float]]) -> dict[str, float]:
    """The wall-clock seconds that each phase has taken so far.

    `entered` has each phase's start; its first entry is `total`.
    """
    now = time.perf_counter()
    seconds: dict[str, float] = {}
    for (phase, begin), (_, end) in pairwise([*entered[1:], ("", now)]):
        seconds[phase] = seconds.get(phase, 0.0) + end - begin
    return seconds | {"total": now - entered[0][1]}


def redirect_output(target: str | int) -> None:
    """Redirect stdout and stderr to a file, given by path or descriptor."""
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(target, int):
        handle = target
    else:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if handle != target:
        os.close(handle)
