"""The parent's side of compiling ahead: processes that compile what is likely to be probed next, while others probe.

Compiled code lies in the caches of Inductor and Triton on disk, where the probe's worker finds it. The processes share
the device with the worker in turns (`turns`), and are expendable: a study goes on without one that fails.
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

MAX_STARTS = 4  # of all processes: those that had to make room are started again so often
LEAST_CORES, MANY_CORES = 4, 12  # from which on there is one process, and two


def num_helpers(cores: float) -> int:
    """How many processes a host with so many cores has for compiling ahead."""
    return (cores >= LEAST_CORES) + (cores >= MANY_CORES)


class CompileAhead:
    """Processes that compile ahead on one device. The caller closes it."""

    def __init__(self, device: str, logs: Path, number: int, cores: float) -> None:
        """Start nothing yet. `device` is "cuda" or "cpu"; `logs` the directory of ahead-0.log and so on.

        Each of so many processes compiles kernels with a quarter of the `cores` at most.
        """
        self._device, self._logs, self._number = device, logs, number
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
        """Whether any process may use the device."""
        return bool(self._processes)

    def want(self, requests: Mapping[str, ProbeRequest]) -> None:
        """Compile these next, in this order, instead of what was wanted before. Equal keys have equal code.

        Nothing happens once this is closed. Where the folder takes no file any more, all processes end for good.
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
        if wanted and not self._processes and self._starts < MAX_STARTS:
            self._starts += 1
            with suppress(OSError):  # the host has no room for it
                for number in range(self._number):
                    self._processes.append(self._start(number))

    def reap(self) -> None:
        """Forget the processes that have ended, and what they held of the device's memory."""
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
        """What the processes hold of the device's memory."""
        return held_by_others_gib(self.folder)

    def claimed(self) -> set[str]:
        """The keys of what was compiled ahead, or is being compiled."""
        return {file.name.removesuffix(CLAIMED) for file in self.folder.glob(f"*{CLAIMED}")}

    def compiled(self) -> dict[str, float]:
        """The seconds that what was compiled ahead took, its turns on the device included, by key."""
        reports = {
            file.name.removesuffix(CLAIMED): file.read_text()
            for file in self.folder.glob(f"*{CLAIMED}")
        }
        return {key: json.loads(report)["seconds"] for key, report in reports.items() if report}

    def make_room(self) -> None:
        """End all processes, whose memory is free then. `want` starts them again, a few times."""
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
        for file in self.folder.glob(f"*{CLAIMED}") if not self._processes else ():
            if not file.stat().st_size:  # nobody will finish it
                file.unlink()
