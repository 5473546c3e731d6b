"""The child process that compiles ahead: it trains once what is wanted, and so fills the compiler's caches on disk.

What is wanted stands in a file of the folder that it shares with the others (`compile_ahead`, `turns`). It runs the
probe's own code on as few layers as a probe does, so that the caches' keys are the same, and keeps no result.
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
from autotune.core.process import die_with_parent, loading, take_group_along
from autotune.core.serialization import from_data
from autotune.probe.turns import CLAIMED, HELD, WANTED, Turns

if TYPE_CHECKING:
    from autotune.probe.meters import Meter

POLL_S = 0.05
NICE = 10  # the process that probes comes first on the host's processors


def main() -> None:
    """Compile until the parent's end of the socket closes; arguments as of `worker`, then the shared folder."""
    channel_handle, device, parent, scratch, folder = (
        int(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        *sys.argv[4:6],
    )
    die_with_parent(parent)
    take_group_along(channel_handle, scratch=scratch)
    os.nice(NICE)
    channel = socket.socket(fileno=channel_handle)
    compiler = AheadCompiler(device, Path(folder), scratch)
    while not select.select([channel], [], [], 0.0 if compiler.compile_next() else POLL_S)[0]:
        pass


class AheadCompiler:
    """Compiles, on one device, what stands in the shared folder and nobody has claimed."""

    def __init__(self, device: str, folder: Path, scratch: str | None = None) -> None:
        """Load the libraries. The device is first used when something is wanted."""
        with loading():
            from autotune.probe.harness import Probe  # noqa: F401
        self._device, self._folder, self._scratch = device, folder, scratch
        self._nvml = Nvml.open() if device == "cuda" else None
        self._held_gib = self._used_gib = 0.0
        self._first_gib: float | None = (
            None  # what others held when this process first had the device
        )
        self._meter: Meter | None = None
        self._turns = Turns(
            folder, before_giving=self._settle, on_wait=lambda begin, end: self._begin()
        )

    def compile_next(self) -> bool:
        """Compile the first of what is wanted that nobody has claimed; False if there is none."""
        with suppress(FileNotFoundError):
            for one in json.loads((self._folder / WANTED).read_text(encoding="utf-8")):
                if self._claim(one["key"]):
                    self._compile(one["key"], from_data(ProbeRequest, one["request"]))
                    return True
        return False

    def _claim(self, key: str) -> bool:
        with suppress(FileExistsError):
            (self._folder / f"{key}{CLAIMED}").touch(exist_ok=False)
            return True
        return False

    def _compile(self, key: str, request: ProbeRequest) -> None:
        """Run what is wanted once. What fails, as where memory runs out, is left to the probe.

        Raises RuntimeError where the process cannot use the device any more.
        """
        from autotune.probe.model_shape import describe

        began, reason = time.monotonic(), ""
        if self._meter is None:
            with suppress(Exception):  # the run will say it
                describe(request.model)  # which loads the model's code, and nobody waits for that
        with self._turns.held(compiles=True):
            try:
                self._run(request)
            except Exception as error:
                traceback.print_exc()
                reason = str(error) or type(error).__name__
            # Nothing refers to the frames of what failed any more, so that its memory can be returned.
            gc.collect()
        gc.freeze()  # compiled code: later collections leave it out
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
        resident = build_resident(request, meter.torch_device)
        self._turns.offer()
        rank = Rank(request, meter.torch_device)
        probe = Probe(
            request, resident, meter, lambda phase: self._turns.offer(), self._scratch, rank
        )
        try:
            probe.run_once()
        finally:
            meter.uncap()
            probe.close()

    # --- what it holds of the device's memory, which changes in its turns alone

    def _begin(self) -> None:
        self._used_gib = self._used()
        if self._first_gib is None:
            self._first_gib = self._used_gib
        self._note_others()

    def _note_others(self) -> None:
        """What others hold more by now than at first is no part of this process's context."""
        if self._meter is not None:
            self._meter.others_gib = self._used_gib - self._held_gib - (self._first_gib or 0.0)

    def _settle(self) -> None:
        """Let the device finish, and return what is not in use. A collection would take longer than many a turn."""
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
