"""The parent's side of the probe: a warm worker that serves requests, its deadlines, and when to try once more.

No torch here. One process is `worker_process`; this decides what an answer, a silence or a death of it means.
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

HOST_OOM = "the kernel's OOM killer ended the worker: the host's RAM ran out, not the GPU's memory"
DUMP_S = 0.5  # to write the stacks of a hung worker
EXIT_S = 5.0  # for the exit code of a worker that has closed its channel
ENDED = (ConnectionError, EOFError)


class WorkerProber:
    """Probes on one device, by one warm worker that is replaced when it fails.

    `probe` returns a result for every outcome. It raises only EnvironmentProblem (the machine lacks what is needed),
    TooManyFailures (the device is broken) and Cancelled (`should_stop` returned True).
    """

    def __init__(
        self,
        device: str,
        logs: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        card: int | str | None = None,
        threads: int | None = None,
    ) -> None:
        """Start nothing yet. `device` is "cuda" or "cpu"; `logs` the directory of worker.log.

        `card` is a GPU by index or UUID, by default the first that is visible; `threads` are those of the worker on a
        CPU, by default one for each core.
        """
        self.device = device
        self.logs = logs
        self.starts = 0
        self.ahead: CompileAhead | None = (
            None  # with whom the device is shared; the caller closes it
        )
        self._memory_gib = self._context_gib = 0.0
        self._peak_tflops: float | None = None
        self._should_stop = should_stop
        self._process: WorkerProcess | None = None
        self._ready = False
        self._fingerprint: Fingerprint | None = None
        self._variables = {} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)}
        self._variables |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._nvml = Nvml.open(card) if device == "cuda" else None
        self._memory_errors = self._nvml.uncorrected_errors() if self._nvml else None
        self._start_s: float | None = None  # of a worker that has not probed a whole model yet
        self._waited_in_vain = (
            False  # in the last try: it went on beside a process that did not end its turn
        )
        self._was_slowed = False  # by heat or hardware, in the last probe with sensors
        self._crashed = set[TrainConfig]()

    def __enter__(self) -> "WorkerProber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fingerprint(self) -> Fingerprint:
        """The worker's; starts one if none has run. Raises as `probe` does."""
        if self._fingerprint is None:
            self.ready_process()
        assert self._fingerprint is not None
        return self._fingerprint

    @property
    def memory_gib(self) -> float:
        """The memory of the device; starts a worker if none has run. Raises as `probe` does."""
        if self._fingerprint is None:
            self.ready_process()
        return self._memory_gib

    @property
    def context_gib(self) -> float:
        """What the libraries hold of the device before a model is built; 0 where the driver does not show it."""
        _ = self.fingerprint
        return self._context_gib

    @property
    def knows_memory_of_others(self) -> bool:
        """Whether the driver shows what other processes hold of the device; a CPU's have memory of their own."""
        return self.device == "cpu" or (
            self._nvml is not None and self._nvml.used_gib() is not None
        )

    @property
    def peak_tflops(self) -> float | None:
        """What a CPU reaches in large products of matrices; None for a GPU, which has a data sheet."""
        _ = self.fingerprint
        return self._peak_tflops

    # --- probing, and once more where the machine may be to blame

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """Run one probe, whose output goes to the file `log`.

        Where the machine may be to blame rather than the configuration, the probe is run once more.
        """
        return self.tried(self._once, request, log)

    def tried(
        self, once: Callable[[ProbeRequest, Path], ProbeResult], request: ProbeRequest, log: Path
    ) -> ProbeResult:
        """The result of `once`, which probes on this device, maybe with others; of a second try where that is fair."""
        result = once(request, log)
        if (doubt := self._doubt(result)) is not None:
            self._check_memory()
            if self.ahead is not None:
                self.ahead.make_room()
            result = self._again(once, request, log, result, doubt)
        if result.outcome is Outcome.CRASH:
            self._crashed.add(result.config)
        elif (slowed := _slowed_by(result)) is not None:
            self._was_slowed = bool(slowed)
        return result

    def _again(
        self,
        once: Callable[[ProbeRequest, Path], ProbeResult],
        request: ProbeRequest,
        log: Path,
        first: ProbeResult,
        doubt: str,
    ) -> ProbeResult:
        """The second try, or the first if that succeeded and the second did not; both count for the total time."""
        try:
            second = once(request, log)
        except EnvironmentProblem:  # the next probe will report it
            return first
        only_first_worked = first.outcome is Outcome.OK and second.outcome is not Outcome.OK
        result = first if only_first_worked else second
        total = {"total": first.seconds.get("total", 0.0) + second.seconds.get("total", 0.0)}
        notes = (*result.notes, doubt)
        return replace(
            result, notes=notes, seconds=result.seconds | total, started_at=first.started_at
        )

    def _doubt(self, result: ProbeResult) -> str | None:
        """Why the machine may be to blame: others on it, a crash without a known cause, or a card that was slowed down.

        None for a configuration that crashed before even when tried twice, and while a card stays slow.
        """
        if self._lacked_room(result):
            return "tried twice, since the first time processes that compile ahead held memory that it needed"
        if self._waited_in_vain:
            return "measured twice, since the first time a process that compiles ahead did not leave the device"
        reason = result.reason or ""
        if reason == HOST_OOM and self.ahead is not None and self.ahead.is_running:
            return "tried twice, since the first time processes that compile ahead held memory of the host"
        unexplained = reason != HOST_OOM and (result.phase is None or "CUDA error" in reason)
        if result.outcome is Outcome.CRASH and unexplained and result.config not in self._crashed:
            return f"tried twice, since the first time {reason}"
        if result.outcome is Outcome.OK and (slowed := _slowed_by(result)) and not self._was_slowed:
            return f"measured twice, since the first time the card was slowed down: {', '.join(slowed)}"
        return None

    def _lacked_room(self, result: ProbeResult) -> bool:
        """Whether memory ran out below the limit, and the limit was not all there: others compile ahead."""
        oom = result.oom if result.outcome is Outcome.OOM else None
        if oom is None or self.ahead is None or not self.ahead.is_running:
            return False
        spare_gib = self._memory_gib - self._context_gib - oom.limit_gib
        return oom.need_gib <= oom.limit_gib and self.ahead.held_gib() > max(spare_gib, 0.0)

    def _check_memory(self) -> None:
        """Raises TooManyFailures where the card has counted errors of its memory since this prober was made."""
        now = self._nvml.uncorrected_errors() if self._nvml else None
        before = self._memory_errors or 0
        if now and now > before:
            raise TooManyFailures(
                f"the GPU's memory failed: {now - before} uncorrected ECC errors meanwhile",
                remedy="continue with --study on another card; `nvidia-smi -q -d ECC` shows the counters",
            )

    def profile(
        self, request: ProbeRequest, log: Path, trace: Path
    ) -> tuple[ProbeResult, MicroBatchProfile | None]:
        """Run one probe, and profile a micro batch in it, whose Chrome trace goes to the file `trace`.

        The profile is None where the probe failed, or the driver does not show what the device does.
        """
        found: list[MicroBatchProfile | None] = []

        def once(request: ProbeRequest, log: Path) -> ProbeResult:
            result, message = self._exchange(request, log, trace=str(trace))
            found.append(
                from_data(MicroBatchProfile, data) if (data := message.get("profile")) else None
            )
            return result

        result = self.tried(once, request, log)
        return result, found[-1] if result.outcome is Outcome.OK else None

    def _once(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """One try, whatever comes of it."""
        return self._exchange(request, log)[0]

    def _exchange(
        self, request: ProbeRequest, log: Path, **more: str
    ) -> tuple[ProbeResult, dict[str, Any]]:
        """The result of one try, whatever comes of it, and the worker's message; empty where there is none."""
        oom_kills = host_oom_kills()
        self._waited_in_vain = False
        begin = time.monotonic()
        monitor = self.monitor(log)
        monitor.patience_s = request.patience_s
        try:
            process = self.ready_process()
            if self.ahead is not None:
                self.ahead.reap()  # the worker reads what the others hold
            shared = (
                {}
                if self.ahead is None or not self.ahead.is_running
                else {"turns": str(self.ahead.folder)}
            )
            process.send({"request": to_data(request), "log": str(log)} | shared | more)
            message = self._receive(process, monitor)
        except ENDED:
            reason = self.end_of_worker(host_oom_kills() > oom_kills)
            return failed(request, Outcome.CRASH, None, reason, begin, log), {}
        if message is None:
            process.dump_stacks()
            time.sleep(DUMP_S)
            self.close()
            reason = f"no progress in phase {monitor.phase} for {monitor.deadline_s():.0f} s; the stack is in the log"
            return failed(request, Outcome.TIMEOUT, monitor.phase, reason, begin, log), {}
        if not message["reusable"]:
            self.close()
        if message.get("others_are_stuck") and self.ahead is not None:
            self._waited_in_vain = True
            self.ahead.close()
        result = replace(from_data(ProbeResult, message["result"]), log=log.name)
        if result.measurement is not None:
            result = replace(
                result, measurement=replace(result.measurement, telemetry=monitor.telemetry())
            )
        if self._start_s is not None and request.depth is None:
            result = replace(result, seconds={"start": self._start_s} | result.seconds)
            self._start_s = None
        return result, message

    def monitor(self, log: Path) -> Monitor:
        """What observes a probe on this device that writes this log."""
        return Monitor(self._nvml, throttled=throttles(log.name))

    def end_of_worker(self, by_oom_killer: bool) -> str:
        """Clean up after a worker that has ended; why it did."""
        code = self._process.wait_for_exit(EXIT_S) if self._process else None
        self.close()
        if by_oom_killer and code == -signal.SIGKILL:
            return HOST_OOM
        if code is not None and code < 0:
            return f"the worker was killed by {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}"

    def _receive(self, process: WorkerProcess, monitor: Monitor) -> dict[str, Any] | None:
        """The next message that is not about a phase; None once a phase took too long."""
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
        """How the layers of a model with this transformers config repeat, and what they can do; None if that hangs.

        Raises as `probe` does, and UsageError for a model that cannot be built or is not causal.
        """
        process = self.ready_process()
        try:
            process.send({"describe": model})
            message = self._receive(process, Monitor(None))
        except ENDED:
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
        """What the device reaches when it does one thing at a time. Raises as `probe` does."""
        self.ask({"rates": True})
        return from_data(DeviceRates, self.answer())

    def ask(self, message: dict[str, Any]) -> None:
        """Have the worker measure something; that it has ended shows where `answer` waits. Raises as `probe` does."""
        process = self.ready_process()
        with suppress(*ENDED):
            process.send(message)

    def answer(self) -> Any:
        """The rates that the worker has measured, as data. Raises as `probe` does, and EnvironmentProblem."""
        try:
            assert self._process is not None  # `ask` started it
            message = self._receive(self._process, Monitor(None))
        except ENDED:
            message = {"reason": self.end_of_worker(by_oom_killer=False)}
        if message is not None and message.get("event") == "rates":
            return message["rates"]
        self.close()
        reason = (
            message["reason"] if message else f"it took more than {DEADLINES[Phase.START]:.0f} s"
        )
        raise EnvironmentProblem(
            f"the device could not be measured: {printable(reason)}",
            remedy="see what else uses it: `autotune doctor`",
        )

    def launch(self) -> None:
        """Start a worker unless one runs, and return; it imports its libraries meanwhile."""
        if self._process is not None:
            return
        if self.ahead is not None:
            self.ahead.make_room()  # a worker finds out what its context takes when it starts
        self.logs.mkdir(parents=True, exist_ok=True)
        self._process = WorkerProcess(self.device, self.logs / "worker.log", self._variables)
        self.starts += 1

    def has_ended(self) -> bool:
        """Whether the worker was started, and has ended by itself."""
        return self._process is not None and self._process.wait_for_exit(0.0) is not None

    def terminate(self) -> None:
        """Ask the worker to end, and do not wait for it: `close` does."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End the worker at once, and do not wait for it: `close` does."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the worker and everything that it started."""
        process, self._process = self._process, None
        self._ready = False
        if process is not None:
            process.close()

    def ready_process(self) -> WorkerProcess:
        """The worker, started and ready. Raises EnvironmentProblem, TooManyFailures and Cancelled."""
        if self._process is None:
            if self._should_stop():
                raise Cancelled
            self.launch()
        assert self._process is not None
        if not self._ready:
            self._await_ready(self._process)
        return self._process

    def _await_ready(self, process: WorkerProcess) -> None:
        try:
            message = self._receive(process, Monitor(None))
        except ENDED:
            message = {"reason": "it ended while starting"}
        if message is None:
            message = {"reason": f"it did not start within {DEADLINES[Phase.START]:.0f} s"}
        elif message.get("event") == "ready":
            self._fingerprint = from_data(Fingerprint, message["fingerprint"])
            self._memory_gib = message["memory_gib"]
            self._context_gib, self._peak_tflops = message["context_gib"], message["peak_tflops"]
            self._start_s = message["seconds"]
            self._ready = True
            return
        self.close()
        reason = message["reason"]
        log = self.logs / "worker.log"
        if message.get("unhealthy"):
            raise TooManyFailures(
                f"the device cannot be trusted: {reason}",
                remedy=f"use another; see {log}, and its maker's diagnostics",
            )
        raise EnvironmentProblem(
            f"the probe worker could not start: {reason}",
            remedy=f"see {log}; `autotune doctor` checks this machine",
        )


def check_worker(device: str) -> tuple[Fingerprint, str | None]:
    """Start a worker on `device`, which trains a tiny model to become ready; on a GPU also train one of 4-bit weights.

    Returns the fingerprint, and the reason why 4-bit weights of bitsandbytes do not train: None if
    they do, or on a CPU. Raises EnvironmentProblem and TooManyFailures where no worker can probe on this machine.
    """
    with scratch_directory() as logs, WorkerProber(device, Path(logs)) as prober:
        fingerprint = prober.fingerprint
        if device != "cuda":
            return fingerprint, None
        asked = tiny_request(
            device, prober.memory_gib, bf16=fingerprint.has_bf16, quantization="nf4"
        )
        result = prober.probe(asked, Path(logs, "nf4.log"))
    return (
        fingerprint,
        None if result.outcome is Outcome.OK else result.reason or result.outcome.value,
    )


def _slowed_by(result: ProbeResult) -> tuple[str, ...] | None:
    """What slowed the card down; None where no sensor was read."""
    telemetry = result.measurement.telemetry if result.measurement else None
    return None if telemetry is None else telemetry.slowed_by


def failed(
    request: ProbeRequest,
    outcome: Outcome,
    phase: Phase | None,
    reason: str,
    begin: float,
    log: Path,
) -> ProbeResult:
    """The result of a probe that failed: it began at `begin` by the monotonic clock, and wrote the file `log`."""
    total_s = time.monotonic() - begin
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
        started_at=(datetime.now(UTC) - timedelta(seconds=total_s)).isoformat(
            timespec="milliseconds"
        ),
    )


def host_oom_kills() -> int:
    """How many processes the kernel's OOM killer has ended since boot; 0 where the kernel does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return counts[0] if counts else 0
