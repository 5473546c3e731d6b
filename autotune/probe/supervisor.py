"""The parent's side of the probe: starts the warm worker, hands it requests, keeps deadlines, kills and replaces it.

No torch here. The worker runs in a session of its own, so that it and all it starts can be killed together, and with an
environment from which everything unknown is stripped: no database or cloud secret reaches it.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autotune.core.errors import Cancelled, EnvironmentProblem, TooManyFailures
from autotune.core.nvml import Nvml
from autotune.core.probe_types import Fingerprint, ModelShape, Outcome, Phase, ProbeRequest, ProbeResult
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.fault_injection import throttles
from autotune.probe.monitor import Watch
from autotune.probe.runtime.settings import ALLOCATOR, one_gpu

# Seconds a phase may take before the worker is held to be hung. Compilation happens in the first step.
DEADLINES: dict[Phase, float] = {
    Phase.START: 240,
    Phase.LOAD: 600,
    Phase.FIRST_STEP: 900,
    Phase.STEADY: 900,
    Phase.EVALUATE: 300,
    Phase.SAVE: 300,
    Phase.CLEANUP: 300,
}
SAMPLE_EVERY_S = 0.1
HOST_OOM = "the kernel's OOM killer ended the worker: the host's RAM ran out, not the GPU's memory"

# On a CPU, peaks repeat to 1 % only if large blocks come straight from the kernel and go straight back. Threads that
# spin while they wait make a step twenty times slower as soon as another process wants a core; sleeping ones do not.
ON_CPU = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "OMP_WAIT_POLICY": "passive",
}
KEPT = (
    *("PATH", "HOME", "USER", "LANG", "TMPDIR", "TZ", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "CC", "CXX"),
    "AUTOTUNE_INJECT",
)
KEPT_PREFIXES = (
    "LC_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "TORCH",
    "TRITON_",
    "OMP_",
    "MKL_",
    "XDG_CACHE",
    "HF_HOME",
    "HF_HUB_",
)


def child_environment(parent: Mapping[str, str], device: str) -> dict[str, str]:
    """The worker's environment: what it needs by name, never a token, password or key."""
    kept = {
        name: value
        for name, value in parent.items()
        if (name in KEPT or name.startswith(KEPT_PREFIXES))
        and not any(word in name for word in ("TOKEN", "KEY", "SECRET", "PASSWORD"))
    }
    fixed = {
        # torch 2.9 renamed the variable and still reads the old name, which older ones know too.
        "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    on_cuda = one_gpu(parent.get("CUDA_VISIBLE_DEVICES", "0"))  # the card that is watched
    return kept | fixed | (ON_CPU if device == "cpu" else on_cuda)


class WorkerProber:
    """One warm worker for one device. `probe` always answers with a result; it raises only EnvironmentProblem, where
    the machine lacks what is needed, TooManyFailures, where the device is broken, and Cancelled, once `should_stop`
    says so."""

    def __init__(
        self,
        device: str,
        logs: Path,
        *,
        deadlines: Mapping[Phase, float] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.device = device
        self.logs = logs
        self._should_stop = should_stop
        self.starts = 0
        self.memory_gib = 0.0
        self._deadlines = DEADLINES | dict(deadlines or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None  # what a killed worker leaves lies in here
        self._buffer = b""
        self._ready = False
        self._fingerprint: Fingerprint | None = None
        self._nvml = Nvml.open() if device == "cuda" else None
        self._memory_errors = self._nvml.uncorrected_errors() if self._nvml else None
        self._start_s: float | None = None  # of a worker that has not probed a whole model yet
        self._was_slowed = False  # by heat or hardware, when it was last asked
        self._crashed = set[TrainConfig]()

    def __enter__(self) -> "WorkerProber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the running worker; starts it if need be. Raises EnvironmentProblem."""
        if self._process is None and self._fingerprint is None:
            self.launch()
        if self._fingerprint is None:
            self._await_ready()
        assert self._fingerprint is not None
        return self._fingerprint

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """Run one probe; its output goes to the file `log`. A hung, killed or broken worker is a result too.

        Where the machine may be to blame rather than the configuration it is run once more.
        """
        result = self._once(request, log)
        if (doubt := self._doubt(result)) is not None:
            self._check_memory()
            try:
                again = self._once(request, log)
            except EnvironmentProblem:  # the next probe will say so
                return result
            total = result.seconds.get("total", 0.0) + again.seconds.get("total", 0.0)
            taken = result if result.outcome is Outcome.OK is not again.outcome else again  # it did come through
            notes, seconds = (*taken.notes, doubt), taken.seconds | {"total": total}
            result = replace(taken, notes=notes, seconds=seconds, started_at=result.started_at)
        if result.outcome is Outcome.CRASH:
            self._crashed.add(result.config)
        elif slowed := _slowed_by(result):
            self._was_slowed = True
        elif slowed is not None:
            self._was_slowed = False
        return result

    def _doubt(self, result: ProbeResult) -> str | None:
        """Why a result may be the machine's: a crash nobody knows the reason of, or a card that was slowed down.

        Not of a configuration that crashed twice before, and a card that was slow before is as it is.
        """
        reason = result.reason or ""
        unknown = reason != HOST_OOM and (result.phase is None or "CUDA error" in reason)
        if result.outcome is Outcome.CRASH and unknown and result.config not in self._crashed:
            return f"tried twice, since the first time {reason}"
        if result.outcome is Outcome.OK and (slowed := _slowed_by(result)) and not self._was_slowed:
            return f"measured twice, since the first time the card was slowed down: {', '.join(slowed)}"
        return None

    def _check_memory(self) -> None:
        """Raises TooManyFailures where the card itself counted errors of its memory since this began."""
        now = self._nvml.uncorrected_errors() if self._nvml else None
        if now and now > (self._memory_errors or 0):
            raise TooManyFailures(
                f"the GPU's memory failed: {now - (self._memory_errors or 0)} uncorrected ECC errors meanwhile",
                remedy="go on with --study on another card; `nvidia-smi -q -d ECC` tells more",
            )

    def _once(self, request: ProbeRequest, log: Path) -> ProbeResult:
        oom_kills = host_oom_kills()
        begin = time.monotonic()
        try:
            if self._process is None:
                self.launch()
            if not self._ready:
                self._await_ready()
            self._send({"request": to_data(request), "log": str(log)})
            watch = Watch(self._nvml, self._deadlines, throttled=throttles(log.name))
            while True:
                message = self._receive(watch)
                if message is None:
                    return replace(self._hung(request, watch, begin), log=log.name)
                if message["event"] == "phase":
                    watch.enter(Phase(message["phase"]))
                elif message["event"] == "result":
                    break
        except (BrokenPipeError, ConnectionError, EOFError):
            return self._died(request, host_oom_kills() > oom_kills, log, begin)
        result = from_data(ProbeResult, message["result"])
        if not message["reusable"]:
            self.close()
        if result.measurement is not None:
            result = replace(result, measurement=replace(result.measurement, telemetry=watch.telemetry()))
        if self._start_s is not None and request.depth is None:
            result = replace(result, seconds={"start": self._start_s} | result.seconds)
            self._start_s = None
        return replace(result, log=log.name)

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        """How the model's layers repeat; None where the worker cannot tell. Raises EnvironmentProblem, Cancelled."""
        if self._process is None:
            self.launch()
        if not self._ready:
            self._await_ready()
        try:
            self._send({"describe": model})
            message = self._receive(Watch(None, self._deadlines))
        except (BrokenPipeError, ConnectionError, EOFError):
            message = None
        if message is None:
            self.close()
            return None
        return from_data(ModelShape, message["shape"]) if message["event"] == "described" else None

    def close(self) -> None:
        """End the worker and everything it started: ask, wait, kill the group."""
        process, self._process = self._process, None
        self._ready = False
        scratch, self._scratch = self._scratch, None
        if self._channel is not None:
            self._channel.close()  # end of file: an idle worker leaves by itself
            self._channel = None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # grandchildren that outlived it
        process.wait()
        if scratch is not None:
            scratch.cleanup()

    def launch(self) -> None:
        """Start the worker and return; it imports its libraries meanwhile."""
        ours, theirs = socket.socketpair()
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / "worker.log"
        self._scratch = tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
        worker = [sys.executable, "-m", "autotune.probe.worker"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*worker, str(theirs.fileno()), self.device, str(os.getpid()), self._scratch.name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(os.environ, self.device),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self._channel, self._buffer = ours, b""
        self.starts += 1
        self._ready = False

    def _await_ready(self) -> None:
        log = self.logs / "worker.log"
        watch = Watch(None, self._deadlines)
        reason, broken, unhealthy = f"it did not start within {self._deadlines[Phase.START]:.0f} s", False, False
        try:
            while message := self._receive(watch):
                if message["event"] == "ready":
                    self._fingerprint = from_data(Fingerprint, message["fingerprint"])
                    self.memory_gib = message["memory_gib"]
                    self._ready, self._start_s = True, message["seconds"]
                    return
                if message["event"] == "broken":
                    reason, broken, unhealthy = message["reason"], True, message["unhealthy"]
        except (ConnectionError, EOFError):
            reason = reason if broken else "it ended while starting"
        self.close()
        if unhealthy:
            raise TooManyFailures(
                f"the device cannot be trusted: {reason}", remedy=f"use another; see {log}, and its maker's diagnostics"
            )
        raise EnvironmentProblem(
            f"the probe worker could not start: {reason}", remedy=f"see {log}; `autotune doctor` checks this machine"
        )

    def _send(self, message: dict[str, Any]) -> None:
        if self._channel is None:
            raise ConnectionError
        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, watch: "Watch") -> dict[str, Any] | None:
        """The next message; None when the phase's deadline passed. Raises EOFError when the worker is gone."""
        assert self._channel is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if selector.select(timeout=SAMPLE_EVERY_S):
                    data = self._channel.recv(1 << 16)
                    if not data:
                        raise EOFError
                    self._buffer += data
                else:
                    watch.tick()
                    if watch.expired():
                        return None
                    if self._should_stop():
                        self.close()
                        raise Cancelled
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _hung(self, request: ProbeRequest, watch: "Watch", begin: float) -> ProbeResult:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)  # faulthandler writes every thread's stack to the trial's log
        time.sleep(0.5)
        self.close()
        limit = self._deadlines[watch.phase]
        reason = f"no progress in phase {watch.phase} for {limit:.0f} s; the stack is in the log"
        return _failed(request, Outcome.TIMEOUT, watch.phase, reason, begin)

    def _died(self, request: ProbeRequest, by_oom_killer: bool, log: Path, begin: float) -> ProbeResult:
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=5)
        self.close()
        if by_oom_killer and code == -signal.SIGKILL:
            reason = HOST_OOM
        elif code is not None and code < 0:
            reason = f"the worker was killed by {signal.Signals(-code).name}"
        else:
            reason = f"the worker ended with exit code {code}"
        return replace(_failed(request, Outcome.CRASH, None, reason, begin), log=log.name)


def _slowed_by(result: ProbeResult) -> tuple[str, ...] | None:
    """What slowed the card down; None where nobody looked."""
    read = result.measurement.telemetry if result.measurement else None
    return None if read is None else read.slowed_by


def _failed(request: ProbeRequest, outcome: Outcome, phase: Phase | None, reason: str, begin: float) -> ProbeResult:
    return ProbeResult(
        request_digest=request.digest,
        config=request.config,
        rung=request.rung,
        depth=request.depth,
        outcome=outcome,
        phase=phase,
        reason=reason,
        seconds={"total": (took := time.monotonic() - begin)},
        started_at=(datetime.now(UTC) - timedelta(seconds=took)).isoformat(timespec="milliseconds"),
    )


def host_oom_kills() -> int:
    """How often the kernel's OOM killer struck since boot."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
