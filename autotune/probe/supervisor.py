"""Controls probes in the parent process: sends requests, watches deadlines, and retries probes.

This module does not use torch. `worker_process` handles one process; this module interprets the
worker's answers, its silence and its death.
"""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autotune.core.errors import Cancelled, EnvironmentProblem, TooManyFailures, UsageError
from autotune.core.micro_profile import MicroBatchProfile
from autotune.core.nvml import Nvml
from autotune.core.probe_types import (
    DeviceRates,
    Fingerprint,
    ModelShape,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.scratch import scratch_directory
from autotune.core.serialization import from_data, to_data
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.probe.compile_ahead import CompileAhead
from autotune.probe.fault_injection import throttles
from autotune.probe.monitor import DEADLINES, Monitor
from autotune.probe.tiny_probe import tiny_request
from autotune.probe.worker_process import WorkerProcess

WORKER, ENGINE = "autotune.probe.worker", "autotune.probe.engine_worker"
HOST_OOM = "the kernel's OOM killer ended the worker: the host's RAM ran out, not the GPU's memory"
DUMP_S = 0.5  # seconds that a hung worker has to write its stacks to the log
EXIT_S = 5.0  # the longest wait in seconds for the exit code of a worker that has closed its socket
END_ERRORS = (ConnectionError, EOFError)


class WorkerProber:
    """Runs probes on one device in one worker process, which stays loaded between probes.

    A worker that fails is replaced.

    `probe` returns a result for every outcome. `probe` raises only EnvironmentProblem (the machine
    lacks a requirement), TooManyFailures (the device is broken) and Cancelled (`should_stop`
    returned True).
    """

    def __init__(
        self,
        device: str,
        logs: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        card: int | str | None = None,
        threads: int | None = None,
        module: str = WORKER,
    ) -> None:
        """Prepare the prober; the worker starts when it is first needed.

        `device` is "cuda" or "cpu"; `logs` is the directory of worker.log. `card` is the index or
        UUID of a GPU, by default of the first visible GPU. `threads` is the number of a CPU
        worker's threads, by default one for each core. `module` is the worker's program; ENGINE
        measures engines instead of training steps.
        """
        self._module = module
        self.device = device
        self.logs = logs
        self.starts = 0
        # The processes that compile code for later probes on the same device. The caller closes
        # them.
        self.ahead: CompileAhead | None = None
        self._memory_gib = 0.0
        self._context_gib = 0.0

        self._should_stop = should_stop
        self._process: WorkerProcess | None = None
        self._ready = False
        self._fingerprint: Fingerprint | None = None

        self._variables = {} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)}
        self._variables |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._nvml = Nvml.open(card) if device == "cuda" else None
        self._memory_errors = self._nvml.uncorrected_errors() if self._nvml else None
        # The seconds that the worker's start took, or None after a result has reported them.
        self._start_s: float | None = None
        # True if a compile-ahead process did not give up the device in the last try of a probe.
        self._missed_turn = False
        # True if compile-ahead processes held memory that the last try of a probe needed.
        self._lacked_room = False
        # True if heat or hardware slowed the last probe whose sensors were read.
        self._was_slowed = False
        self._crashed = set[TrainConfig]()

    def __enter__(self) -> "WorkerProber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fingerprint(self) -> Fingerprint:
        """The worker's fingerprint.

        Starts a worker if necessary. Raises the errors of `probe`.
        """
        if self._fingerprint is None:
            self.ready_process()
        assert self._fingerprint is not None
        return self._fingerprint

    @property
    def memory_gib(self) -> float:
        """The GiB of the device's memory.

        Starts a worker if necessary. Raises the errors of `probe`.
        """
        if self._fingerprint is None:
            self.ready_process()
        return self._memory_gib

    @property
    def context_gib(self) -> float:
        """The device memory that libraries take before a model is built; 0 if it is unknown."""
        _ = self.fingerprint
        return self._context_gib

    @property
    def knows_memory_of_others(self) -> bool:
        """Whether the driver shows other processes' memory; always true on a CPU."""
        if self.device == "cpu":
            return True
        return self._nvml is not None and self._nvml.used_gib() is not None

    # --- probing, and retrying if the machine may be to blame

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """Run one probe with its output in the file `log`.

        If the machine may be to blame rather than the configuration, the probe runs once more.
        """
        return self.with_retry(self._probe_once, request, log)

    def with_retry(
        self, once: Callable[[ProbeRequest, Path], ProbeResult], request: ProbeRequest, log: Path
    ) -> ProbeResult:
        """The result of `once`, repeated if the machine may be to blame for the first result.

        `once` is a function that runs one probe on this device, possibly together with other
        devices.
        """
        result = once(request, log)
        if (doubt := self._doubt(result)) is not None:
            self._check_memory()
            if self.ahead is not None:
                self.ahead.make_room()
            result = self._retry(once, request, log, result, doubt)

        if result.outcome is Outcome.CRASH:
            self._crashed.add(result.config)
        elif (slowed := _slowdowns(result)) is not None:
            self._was_slowed = bool(slowed)
        return result

    def _retry(
        self,
        once: Callable[[ProbeRequest, Path], ProbeResult],
        request: ProbeRequest,
        log: Path,
        first: ProbeResult,
        doubt: str,
    ) -> ProbeResult:
        """The result of a second try. `doubt` is the reason to distrust the first try."""
        try:
            second = once(request, log)
        except EnvironmentProblem:  # keep the first result; the next probe will report the problem
            return first
        return merge_tries(first, second, doubt)

    def _doubt(self, result: ProbeResult) -> str | None:
        """The reason to suspect the machine rather than the configuration, or None.

        The reason may be other processes, a crash without a known cause, or a slowed card. A
        configuration that has already crashed in two tries is not tried again after another crash.
        A probe on a slowed card is not repeated if the card was already slowed in the last probe.
        """
        if self._lacked_room:
            return (
                "tried twice, because the first time processes that compile code for later probes "
                "held memory that the probe needed"
            )
        if self._missed_turn:
            return (
                "measured twice, because the first time a process that compiles code for later "
                "probes still used the device"
            )

        reason = result.reason or ""
        if reason == HOST_OOM and self.ahead is not None and self.ahead.is_running:
            return (
                "tried twice, because the first time processes that compile code for later probes "
                "held memory of the host"
            )
        unexplained = reason != HOST_OOM and (result.phase is None or "CUDA error" in reason)
        if result.outcome is Outcome.CRASH and unexplained and result.config not in self._crashed:
            return f"tried twice, because the first time {reason}"

        slowed = _slowdowns(result) if result.outcome is Outcome.OK else None
        if slowed and not self._was_slowed:
            reasons = ", ".join(slowed)
            return f"measured twice, because the first time the GPU was slowed down: {reasons}"
        return None

    def _lacks_room(self, result: ProbeResult) -> bool:
        """Whether memory ran out below the limit because compile-ahead processes held too much."""
        oom = result.oom if result.outcome is Outcome.OOM else None
        if oom is None or self.ahead is None or not self.ahead.is_running:
            return False
        spare_gib = self._memory_gib - self._context_gib - oom.limit_gib
        missing_gib = self.ahead.held_gib() - max(spare_gib, 0.0)
        # A probe that reserved more than the other processes left has reached its own limit.
        reached_limit = oom.reserved_gib > oom.limit_gib - missing_gib
        return oom.need_gib <= oom.limit_gib and missing_gib > 0.0 and not reached_limit

    # --- sharing the device with processes that compile ahead

    def begin_try(self) -> None:
        """Forget what `note_others` noted about the last try of a probe."""
        self._missed_turn = False
        self._lacked_room = False

    def turns(self) -> dict[str, str]:
        """The part of a request that names the folder through which processes take turns."""
        if self.ahead is None:
            return {}
        # Each compile-ahead process writes the size of its memory to a file, and the worker adds up
        # these sizes. So the files of ended processes are removed.
        self.ahead.reap()
        return {"turns": str(self.ahead.folder)} if self.ahead.is_running else {}

    def note_others(self, message: dict[str, Any]) -> None:
        """Note if compile-ahead processes disturbed the try that this worker's answer reports."""
        self._lacked_room = self._lacks_room(from_data(ProbeResult, message["result"]))
        if message.get("others_are_stuck") and self.ahead is not None:
            self._missed_turn = True
            self.ahead.close()

    def _check_memory(self) -> None:
        """Raise TooManyFailures if the card has counted memory errors since this prober began."""
        now = self._nvml.uncorrected_errors() if self._nvml else None
        before = self._memory_errors or 0
        if now and now > before:
            raise TooManyFailures(
                f"the GPU's memory failed: {now - before} new uncorrected ECC errors",
                remedy="continue with --study on another GPU; `nvidia-smi -q -d ECC` shows the "
                "counters",
            )

    def profile(
        self, request: ProbeRequest, log: Path, trace: Path
    ) -> tuple[ProbeResult, MicroBatchProfile | None]:
        """Run one probe, profile a micro batch in it, and write a Chrome trace to the file `trace`.

        The profile is None if the probe failed or the driver hides the device's work.
        """
        found: list[MicroBatchProfile | None] = []

        def once(request: ProbeRequest, log: Path) -> ProbeResult:
            result, message = self._exchange(request, log, trace=str(trace))
            data = message.get("profile")
            found.append(from_data(MicroBatchProfile, data) if data else None)
            return result

        result = self.with_retry(once, request, log)
        return result, found[-1] if result.outcome is Outcome.OK else None

    def _probe_once(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """Run one try of a probe."""
        return self._exchange(request, log)[0]

    def _exchange(
        self, request: ProbeRequest, log: Path, **more: str
    ) -> tuple[ProbeResult, dict[str, Any]]:
        """Run one try of a probe; send `more` with the request.

        Return the result, and the worker's message, which is an empty dict if no message came.
        """
        oom_kills = host_oom_kills()
        self.begin_try()
        begin = time.monotonic()
        monitor = self.monitor(log)
        monitor.patience_s = request.patience_s

        try:
            process = self.ready_process()
            process.send({"request": to_data(request), "log": str(log)} | self.turns() | more)
            message = self._receive(process, monitor)
        except END_ERRORS:
            reason = self.end_of_worker(host_oom_kills() > oom_kills)
            return failed_result(request, Outcome.CRASH, None, reason, begin, log), {}

        if message is None:
            process.dump_stacks()
            time.sleep(DUMP_S)
            self.close()
            waited = f"{monitor.deadline_s():.0f} s"
            reason = f"no progress in phase {monitor.phase} for {waited}; the stack is in the log"
            return failed_result(request, Outcome.TIMEOUT, monitor.phase, reason, begin, log), {}

        self.note_others(message)
        if not message["reusable"]:
            self.close()

        result = replace(from_data(ProbeResult, message["result"]), log=log.name)
        if result.measurement is not None:
            result = replace(result, measurement=monitor.complete(result.measurement))
        if self._start_s is not None and request.depth is None:
            result = replace(result, seconds={"start": self._start_s} | result.seconds)
            self._start_s = None
        return result, message

    def monitor(self, log: Path) -> Monitor:
        """A monitor for the probe that writes this log."""
        return Monitor(self._nvml, throttled=throttles(log.name))

    def end_of_worker(self, by_oom_killer: bool) -> str:
        """Clean up after a worker that has ended, and return why it ended."""
        code = self._process.wait_for_exit(EXIT_S) if self._process else None
        self.close()
        if by_oom_killer and code == -signal.SIGKILL:
            return HOST_OOM
        if code is not None and code < 0:
            return f"the worker was killed by {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}"

    def _receive(self, process: WorkerProcess, monitor: Monitor) -> dict[str, Any] | None:
        """The next message that is not a phase report, or None if a phase exceeds its deadline."""
        try:
            while (message := process.receive(monitor, self._should_stop)) is not None:
                if message["event"] != "phase":
                    return message
                monitor.enter(Phase(message["phase"]))
        except Cancelled:
            self.close()
            raise
        return None

    # --- the worker

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        """The model's layer pattern and supported features, or None if the worker hangs or ends.

        `model` is a transformers config. Raises the errors of `probe`, and UsageError for a model
        that cannot be built or is not a causal language model.
        """
        process = self.ready_process()
        try:
            process.send({"describe": model})
            message = self._receive(process, Monitor(None))
        except END_ERRORS:
            message = None

        if message is None:
            self.close()
            return None
        if message["event"] == "broken":
            raise UsageError(
                f"this model cannot be trained: {printable(message['reason'])}",
                remedy=f"pass a causal language model; {self.logs / 'worker.log'} says more",
            )
        return from_data(ModelShape, message["shape"])

    def rates(self) -> DeviceRates:
        """The device's rates, measured one after another. Raises the errors of `probe`."""
        self.ask({"rates": True})
        return from_data(DeviceRates, self.answer())

    def ask(self, message: dict[str, Any]) -> None:
        """Ask the worker for a measurement. Raises the errors of `probe`.

        If the worker has ended, `answer` notices it.
        """
        process = self.ready_process()
        with suppress(*END_ERRORS):
            process.send(message)

    def answer(self) -> Any:
        """The worker's rates as JSON data. Raises EnvironmentProblem and the errors of `probe`."""
        try:
            assert self._process is not None  # `ask` started it
            message = self._receive(self._process, Monitor(None))
        except END_ERRORS:
            message = {"reason": self.end_of_worker(by_oom_killer=False)}
        if message is not None and message.get("event") == "rates":
            return message["rates"]

        self.close()
        reason = f"it took more than {DEADLINES[Phase.START]:.0f} s"
        if message:
            reason = message["reason"]
        raise EnvironmentProblem(
            f"the device could not be measured: {printable(reason)}",
            remedy="check which other processes use the device: `autotune doctor`",
        )

    def launch(self) -> None:
        """Start a worker if this prober has no worker, without waiting for its imports."""
        if self._process is not None:
            return
        if self.ahead is not None:
            # The memory of other processes would falsify a starting worker's measurement of its
            # CUDA context.
            self.ahead.make_room()
        self.logs.mkdir(parents=True, exist_ok=True)
        self._process = WorkerProcess(
            self.device, self.logs / "worker.log", self._variables, module=self._module
        )
        self.starts += 1

    def has_ended(self) -> bool:
        """Whether the worker was started and has ended by itself."""
        return self._process is not None and self._process.wait_for_exit(0.0) is not None

    def terminate(self) -> None:
        """Ask the worker to end without waiting; `close` waits."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End the worker immediately without waiting; `close` waits."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the worker and all processes that it started."""
        process = self._process
        self._process = None
        self._ready = False
        if process is not None:
            process.close()

    def ready_process(self) -> WorkerProcess:
        """Await and return the worker. Raises EnvironmentProblem, TooManyFailures and Cancelled."""
        if self._process is None:
            if self._should_stop():
                raise Cancelled
            self.launch()
        assert self._process is not None
        if not self._ready:
            self._await_ready(self._process)
        return self._process

    def _await_ready(self, process: WorkerProcess) -> None:
        if self.ahead is not None:
            # A starting worker measures its CUDA context, so no other process may use the device.
            self.ahead.drop_requests()
        try:
            message = self._receive(process, Monitor(None))
        except END_ERRORS:
            message = {"reason": "it ended while starting"}
        if message is None:
            message = {"reason": f"it did not start within {DEADLINES[Phase.START]:.0f} s"}
        elif message.get("event") == "ready":
            self._fingerprint = from_data(Fingerprint, message["fingerprint"])
            self._memory_gib = message["memory_gib"]
            self._context_gib = message["context_gib"]
            self._start_s = message["seconds"]
            self._ready = True
            return

        self.close()
        reason = message["reason"]
        log = self.logs / "worker.log"
        if message.get("unhealthy"):
            raise TooManyFailures(
                f"the device cannot be trusted: {reason}",
                remedy=f"use another device; see {log} and the device vendor's diagnostics",
            )
        raise EnvironmentProblem(
            f"the probe worker could not start: {reason}",
            remedy=f"see {log}; `autotune doctor` checks this machine",
        )


def merge_tries(first: ProbeResult, second: ProbeResult, doubt: str) -> ProbeResult:
    """The result of the second try, or of the first try if only the first try succeeded.

    The time `total` of the result covers both tries.
    """
    only_first_worked = first.outcome is Outcome.OK and second.outcome is not Outcome.OK
    result = first if only_first_worked else second
    total = {"total": first.seconds.get("total", 0.0) + second.seconds.get("total", 0.0)}
    notes = (*result.notes, doubt)
    return replace(result, notes=notes, seconds=result.seconds | total, started_at=first.started_at)


def check_worker(device: str) -> tuple[Fingerprint, str | None]:
    """Start a worker on `device`, which trains a tiny model before it reports that it is ready.

    On a GPU, the worker also trains a model with 4-bit weights of bitsandbytes. Returns the
    fingerprint, and the reason why training with 4-bit weights fails. The reason is None if the
    training succeeds, and on a CPU. Raises EnvironmentProblem and TooManyFailures if no worker can
    probe on this machine.
    """
    with scratch_directory() as logs, WorkerProber(device, Path(logs)) as prober:
        fingerprint = prober.fingerprint
        if device != "cuda":
            return fingerprint, None
        request = tiny_request(
            device, prober.memory_gib, bf16=fingerprint.has_bf16, quantization="nf4"
        )
        result = prober.probe(request, Path(logs, "nf4.log"))
    if result.outcome is Outcome.OK:
        return fingerprint, None
    return fingerprint, result.reason or result.outcome.value


def _slowdowns(result: ProbeResult) -> tuple[str, ...] | None:
    """The reasons why the card was slowed, or None if no sensor was read."""
    telemetry = result.measurement.telemetry if result.measurement else None
    return None if telemetry is None else telemetry.slowed_by


def failed_result(
    request: ProbeRequest,
    outcome: Outcome,
    phase: Phase | None,
    reason: str,
    begin: float,
    log: Path,
) -> ProbeResult:
    """The result of a failed probe.

    The probe began at `begin` by the monotonic clock and wrote the file `log`.
    """
    total_s = time.monotonic() - begin
    started = datetime.now(UTC) - timedelta(seconds=total_s)

    return ProbeResult(
        request_digest=request.digest,
        config=request.config,
        rung=request.rung,
        depth=request.depth,
        outcome=outcome,
        phase=phase,
        reason=reason,
        seconds={"total": total_s},
        log=log.name,
        started_at=started.isoformat(timespec="milliseconds"),
    )


def host_oom_kills() -> int:
    """The number of processes that the kernel's OOM killer has ended since boot; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return counts[0] if counts else 0
