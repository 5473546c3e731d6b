"""Starts processes that compile code for the probes that may come next, while a probe runs.

The compiled code goes to the disk caches of Inductor and Triton, and the probe's worker reads it
from there. The processes and the worker take turns on the device (`turns`). If a process fails, the
study continues without it.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from autotune.core.errors import StorageError
from autotune.core.files import write_atomic
from autotune.core.probe_types import ProbeRequest
from autotune.core.scratch import scratch_directory
from autotune.core.serialization import to_data
from autotune.probe.turns import CLAIMED, HELD, WANTED, held_by_others_gib
from autotune.probe.worker_process import WorkerProcess

# The processes that compile ahead are ended when a probe needs their memory, and started again
# later. They are started at most MAX_STARTS times in all.
MAX_STARTS = 4
# A host with fewer cores than LEAST_CORES does not compile code ahead of the probes. With at least
# LEAST_CORES, one process compiles ahead; with at least MANY_CORES, two processes compile ahead.
LEAST_CORES = 4
MANY_CORES = 12


def num_helpers(cores: float) -> int:
    """The number of processes that compile code for later probes on a host with these cores."""
    return (cores >= LEAST_CORES) + (cores >= MANY_CORES)


class CompileAhead:
    """The processes that compile code for later probes. The caller must call `close`."""

    def __init__(self, device: str, logs: Path, number: int, cores: float) -> None:
        """Prepare the shared folder; `launch` or `compile_next` starts the processes.

        `device` is "cuda" or "cpu". `logs` is the directory of ahead-0.log, ahead-1.log and so on.
        `number` processes compile kernels, each on at most a quarter of the `cores`.
        """
        self._device = device
        self._logs = logs
        self._number = number
        self._variables: Mapping[str, str] = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(int(cores) // 4, 1))
        }

        self._opened = ExitStack()
        self.folder = Path(self._opened.enter_context(scratch_directory()))
        self._processes: list[WorkerProcess] = []
        self._starts = 0
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether any of these processes runs and may use the device."""
        return bool(self._processes)

    def compile_next(self, requests: Mapping[str, ProbeRequest]) -> None:
        """Compile these requests next, in this order, and drop earlier requests.

        Two requests with the same key have the same compiled code. After `close`, the call does
        nothing. If the folder cannot store another file, all processes end for good.
        """
        if self._is_closed:
            return

        wanted = [{"key": key, "request": to_data(request)} for key, request in requests.items()]
        try:
            write_atomic(self.folder / WANTED, json.dumps(wanted))
        except StorageError:  # a full disk is no reason to end the study
            self.close()
            return
        self.reap()
        if wanted:
            self.launch()

    def launch(self) -> None:
        """Start the processes, unless they run. They import torch, and then wait for requests."""
        if self._processes or self._starts >= MAX_STARTS:
            return
        self._starts += 1
        with suppress(OSError):  # the host cannot start another process
            for number in range(self._number):
                self._processes.append(self._start(number))

    def drop_requests(self) -> None:
        """Drop the requests that no process has begun."""
        with suppress(OSError):
            (self.folder / WANTED).unlink(missing_ok=True)

    def reap(self) -> None:
        """Remove the processes that have ended, and the record of their device memory."""
        for process in [one for one in self._processes if one.wait_for_exit(0.0) is not None]:
            self._end([process])

    def _start(self, number: int) -> WorkerProcess:
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"ahead-{number}.log"
        module = "autotune.probe.ahead_worker"
        return WorkerProcess(
            self._device, log, self._variables, module=module, more=[str(self.folder)]
        )

    def held_gib(self) -> float:
        """The device memory that the processes hold."""
        return held_by_others_gib(self.folder)

    def claimed_keys(self) -> set[str]:
        """The keys of the requests that are compiled already or are being compiled."""
        return {file.name.removesuffix(CLAIMED) for file in self.folder.glob(f"*{CLAIMED}")}

    def compile_seconds(self) -> dict[str, float]:
        """The seconds of each finished compilation by key, including its work on the device."""
        reports = {
            file.name.removesuffix(CLAIMED): file.read_text()
            for file in self.folder.glob(f"*{CLAIMED}")
        }
        return {key: json.loads(report)["seconds"] for key, report in reports.items() if report}

    def make_room(self) -> None:
        """End all processes to free memory.

        `compile_next` starts the processes again, up to MAX_STARTS times in all.
        """
        self._end(self._processes)

    def close(self) -> None:
        """End all processes for good."""
        self._is_closed = True
        self.make_room()
        self._opened.close()

    def _end(self, processes: Sequence[WorkerProcess]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.close()
            (self.folder / f"{process.pid}{HELD}").unlink(missing_ok=True)
        self._processes = [one for one in self._processes if one not in processes]

        # An empty claim file belongs to a compilation that ended without a report. Once the file is
        # removed, another process may compile the request.
        for file in self.folder.glob(f"*{CLAIMED}") if not self._processes else ():
            if not file.stat().st_size:
                file.unlink()
