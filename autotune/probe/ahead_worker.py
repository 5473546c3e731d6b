"""The child process that compiles code for later probes, by one short training per request.

A file in the shared folder lists the wanted requests (see `compile_ahead` and `turns`). This
process runs the probe's own code on the same number of layers as the later probe, so that the
compiler's disk cache contains the compiled code when the later probe needs it. The process only
fills this cache, and keeps no result.
"""

import gc
import json
import os
import select
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.core.nvml import Nvml
from autotune.core.probe_types import ProbeRequest
from autotune.core.process import die_with_parent, pause_garbage_collection, take_group_along
from autotune.core.serialization import from_data
from autotune.probe.turns import CLAIMED, HELD, WANTED, Turns

if TYPE_CHECKING:
    from autotune.probe.meters import Meter

POLL_S = 0.05
NICE = 10  # Linux's nice value: the probing process has priority on the host's processors


def main() -> None:
    """Compile until the parent closes its end of the socket.

    The command line has the arguments of `worker`, followed by the shared folder.
    """
    channel_handle = int(sys.argv[1])
    device = sys.argv[2]
    parent = int(sys.argv[3])
    scratch, folder = sys.argv[4:6]
    die_with_parent(parent)
    take_group_along(channel_handle, scratch=scratch)
    os.nice(NICE)

    channel = socket.socket(fileno=channel_handle)
    compiler = AheadCompiler(device, Path(folder), scratch)
    while not select.select([channel], [], [], 0.0 if compiler.compile_next() else POLL_S)[0]:
        pass


class AheadCompiler:
    """Compiles the code for requests in the shared folder that no other process has claimed."""

    def __init__(self, device: str, folder: Path, scratch: str | None = None) -> None:
        """Load the libraries. The device is not used before the first request."""
        with pause_garbage_collection():
            from autotune.probe.harness import Probe  # noqa: F401
        self._device = device
        self._folder = folder
        self._scratch = scratch

        self._nvml = Nvml.open() if device == "cuda" else None
        self._held_gib = 0.0
        self._used_gib = 0.0
        # The device memory in use when this process got its first turn on the device. At that time,
        # all of this memory belonged to other processes.
        self._first_gib: float | None = None
        self._meter: Meter | None = None
        self._turns = Turns(folder, on_give=self._settle, on_wait=lambda begin, end: self._begin())

    def compile_next(self) -> bool:
        """Compile the code for the first request that no process has claimed.

        Return False if all requests are claimed.
        """
        with suppress(FileNotFoundError):
            for wanted in json.loads((self._folder / WANTED).read_text(encoding="utf-8")):
                if self._claim(wanted["key"]):
                    self._compile(wanted["key"], from_data(ProbeRequest, wanted["request"]))
                    return True
        return False

    def _claim(self, key: str) -> bool:
        with suppress(FileExistsError):
            (self._folder / f"{key}{CLAIMED}").touch(exist_ok=False)
            return True
        return False

    def _compile(self, key: str, request: ProbeRequest) -> None:
        """Run a short training for a request, so that its code is compiled.

        Failures such as an OOM are printed, and otherwise ignored.

        Raises RuntimeError if the process cannot use the device any more.
        """
        from autotune.probe.model_shape import describe

        began = time.monotonic()
        reason = ""
        if self._meter is None:
            with suppress(Exception):  # `_run` raises the same error later
                # `describe` loads the model's code before the device is needed.
                describe(request.model)

        with self._turns.take(compiles=True):
            try:
                self._run(request)
            except Exception as error:
                traceback.print_exc()
                reason = str(error) or type(error).__name__
            # After the except block, the frames of the failed code are no longer referenced, so
            # their tensors can be freed.
            gc.collect()
        gc.freeze()  # later garbage collections skip the compiled code

        if "CUDA error" in reason:
            raise RuntimeError(reason)
        if reason:
            return

        report = {"seconds": time.monotonic() - began, "compile": self._turns.compile_s}
        (self._folder / f"{key}{CLAIMED}").write_text(json.dumps(report), encoding="utf-8")
        print(f"compiled ahead in {report['seconds']:.1f} s: {request.config.label()}", flush=True)

    def _run(self, request: ProbeRequest) -> None:
        from autotune.probe.harness import Probe
        from autotune.probe.meters import open_meter
        from autotune.probe.rank import Rank
        from autotune.probe.resident import build_resident

        meter = self._meter = self._meter or open_meter(self._device)
        self._note_others()

        rank = Rank(request, meter.torch_device)
        probe: Probe | None = None
        try:
            rank.join()
            resident = build_resident(request, meter.torch_device)
            self._turns.offer()
            probe = Probe(
                request, resident, meter, lambda phase: self._turns.offer(), self._scratch, rank
            )
            probe.run_once()
        finally:
            meter.uncap()
            if probe is not None:
                probe.close()
            rank.leave()

    # --- the device memory of this process, which changes only during its turns

    def _begin(self) -> None:
        self._used_gib = self._used()
        if self._first_gib is None:
            self._first_gib = self._used_gib
        self._note_others()

    def _note_others(self) -> None:
        """Tell the meter by how much other processes' memory has grown.

        This growth is not part of this process's context.
        """
        if self._meter is not None:
            self._meter.others_gib = self._used_gib - self._held_gib - (self._first_gib or 0.0)

    def _settle(self) -> None:
        """Wait for the device and return unused memory.

        Python's garbage collector does not run here, because a full collection would take longer
        than many turns on the device.
        """
        if self._meter is not None:
            self._meter.synchronize()
            self._meter.release(collect=False)
        self._held_gib += self._used() - self._used_gib
        (self._folder / f"{os.getpid()}{HELD}").write_text(
            f"{self._held_gib:.4f}", encoding="ascii"
        )

    def _used(self) -> float:
        return (self._nvml.used_gib() if self._nvml else None) or 0.0


if __name__ == "__main__":
    main()
