"""Starts a worker process for the parent, exchanges JSON lines with it, and ends it.

The worker has its own session, so that the worker and its children can be killed together.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.core.child_environment import child_environment
from autotune.core.errors import Cancelled
from autotune.core.process import module_command
from autotune.core.scratch import scratch_directory
from autotune.probe.monitor import Monitor

SAMPLE_EVERY_S = 0.1
END_WITHIN_S = 3.0  # seconds between SIGTERM and SIGKILL


class WorkerProcess:
    """A worker on a device.

    The constructor returns before the worker has imported its libraries.
    """

    def __init__(
        self,
        device: str,
        log: Path,
        variables: Mapping[str, str] | None = None,
        *,
        module: str = "autotune.probe.worker",
        more: Sequence[str] = (),
    ) -> None:
        """Start the worker, and append its output to `log` until its first probe.

        `variables` replace environment variables that the worker would inherit. `more` are further
        arguments, for a `module` other than the default.
        """
        self._channel, theirs = socket.socketpair()
        self._buffer = b""
        self._killed = False
        # A killed worker may leave files in the scratch directory, which `close` removes.
        self._scratch = contextlib.ExitStack()
        scratch = self._scratch.enter_context(scratch_directory())

        arguments = [str(theirs.fileno()), device, str(os.getpid()), scratch, *more]
        environment = child_environment(dict(os.environ) | dict(variables or {}), device)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*module_command(module), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Compilers put their temporary files into the scratch directory, too.
                env=environment | {"TMPDIR": scratch},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()

    @property
    def pid(self) -> int:
        """The worker's process id, which is also the id of its process group."""
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; raises OSError (BrokenPipeError, ConnectionError) if the worker ended."""
        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, monitor: Monitor, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Wait for the next message, or return None if the phase exceeds its deadline.

        Raises:
            EOFError: the worker has ended.
            Cancelled: `should_stop` returned True.
        """
        if (found := receive_first([self], monitor, should_stop)) is None:
            return None
        _, message = found
        if message is None:
            raise EOFError
        return message

    def fileno(self) -> int:
        """The socket's descriptor, through which a selector waits for messages."""
        return self._channel.fileno()

    def read(self) -> bool:
        """Read the available bytes, and return False if the worker has ended."""
        with contextlib.suppress(ConnectionError):
            data = self._channel.recv(1 << 16)
            self._buffer += data
            return bool(data)
        return False

    def take(self) -> dict[str, Any] | None:
        """Remove and return the next complete message that was read, or None."""
        if b"\n" not in self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def dump_stacks(self) -> None:
        """Make the worker write every thread's stack to its current log."""
        self._process.send_signal(signal.SIGUSR1)

    def wait_for_exit(self, timeout_s: float) -> int | None:
        """Wait for the exit code (negative: a signal), or return None after `timeout_s`."""
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask the worker to end, without waiting."""
        self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """End the worker and all its processes immediately, without waiting."""
        self._killed = True
        self._signal_group(signal.SIGKILL)

    def close(self) -> None:
        """Ask the worker to end, wait, and then kill its process group."""
        self._channel.close()  # an idle worker ends when its socket is closed
        if not self._killed:
            self._signal_group(signal.SIGTERM)
            self.wait_for_exit(END_WITHIN_S)  # returns at most 50 ms after the worker's end
        # Also ends the worker's own child processes that still run.
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        self._scratch.close()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def receive_first(
    workers: Sequence[WorkerProcess], monitor: Monitor, should_stop: Callable[[], bool]
) -> tuple[int, dict[str, Any] | None] | None:
    """Wait for the first message of any worker, or return None if the phase exceeds its deadline.

    Returns the index of the worker and its message. The message is None if the worker has ended.
    Raises Cancelled if `should_stop` returned True.
    """
    with selectors.DefaultSelector() as selector:
        for place, worker in enumerate(workers):
            if (message := worker.take()) is not None:
                return place, message
            selector.register(worker, selectors.EVENT_READ, place)

        while True:
            ready = selector.select(timeout=SAMPLE_EVERY_S)
            for key, _ in ready:
                worker = workers[key.data]
                if not worker.read():
                    return key.data, None
                if (message := worker.take()) is not None:
                    return key.data, message
            if ready:  # the message is incomplete, so wait for the rest of it
                continue

            monitor.tick()
            if monitor.is_expired():
                return None
            if should_stop():
                raise Cancelled
