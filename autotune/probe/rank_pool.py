"""Runs probes on several real ranks: each rank is a worker process with its own device and socket.

This module does not use torch. A failed rank reports its failure before it cleans up, because the
other ranks wait for it in a collective. The parent then ends all workers, which also ends the
interrupted collective, and starts new workers for the next probe.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from autotune.core.errors import AutotuneError, Cancelled, EnvironmentProblem, UsageError
from autotune.core.nvml import visible
from autotune.core.probe_types import (
    CollectiveRates,
    Fingerprint,
    ModelShape,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    RankAddress,
)
from autotune.core.scratch import scratch_directory
from autotune.core.serialization import from_data, to_data
from autotune.probe.compile_ahead import CompileAhead
from autotune.probe.monitor import Monitor
from autotune.probe.supervisor import DUMP_S, WorkerProber, failed_result, host_oom_kills
from autotune.probe.worker_process import WorkerProcess, receive_first

# When a rank dies, another rank may report the lost connection before the parent sees the death.
# The death explains the failure better, so the parent waits this number of seconds before it looks
# for dead ranks.
GRACE_S = 0.2

Key = TypeVar("Key")
Message = dict[str, Any] | None  # a worker's message, or None after the worker's end


class RankPool:
    """Runs probes on the first devices of this host, one rank on each.

    A request for one GPU, or for a simulated rank, runs on the first device only.

    `probe` returns a result for every outcome, and raises the errors of `WorkerProber.probe`.
    """

    def __init__(
        self,
        device: str,
        num_ranks: int,
        logs: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the pool; each worker starts when it is first needed.

        `device` is "cuda" or "cpu"; `logs` is the directory of the workers' logs. Raises
        EnvironmentProblem if fewer GPUs than ranks are visible.
        """
        cards: list[Any] = [None] * num_ranks
        if device == "cuda" and len(cards := visible()) < num_ranks:
            raise EnvironmentProblem(
                f"{num_ranks} ranks need {num_ranks} GPUs, but {len(cards)} are visible",
                remedy="set CUDA_VISIBLE_DEVICES, or use fewer ranks; `autotune doctor` lists the "
                "GPUs",
            )

        # Like train.py and torchrun, a rank on a GPU uses one thread. If each rank used all cores,
        # their threads would wait for each other: a step of an optimizer on the host took 1.1 s
        # instead of 0.03 s in two processes on two cores.
        threads = None if "OMP_NUM_THREADS" in os.environ else 1
        if device == "cpu":
            threads = max(1, (os.cpu_count() or 1) // num_ranks)
        self.device = device
        self.logs = logs
        self._should_stop = should_stop
        self._ranks = [
            WorkerProber(
                device, logs / f"rank{number}", should_stop=should_stop, card=card, threads=threads
            )
            for number, card in enumerate(cards[:num_ranks])
        ]

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fingerprint(self) -> Fingerprint:
        """The first rank's fingerprint.

        Starts the rank's worker if necessary. Raises the errors of `probe`.
        """
        return self._ranks[0].fingerprint

    @property
    def memory_gib(self) -> float:
        """The GiB of the device with the least memory."""
        self._ready_workers()
        return min(rank.memory_gib for rank in self._ranks)

    @property
    def context_gib(self) -> float:
        """The largest `WorkerProber.context_gib` of all ranks."""
        self._ready_workers()
        return max(rank.context_gib for rank in self._ranks)

    @property
    def knows_memory_of_others(self) -> bool:
        """Whether the driver shows other processes' memory on the first device."""
        return self._ranks[0].knows_memory_of_others

    @property
    def ahead(self) -> CompileAhead | None:
        """The processes that compile code for later probes, which the caller closes.

        All of them use the first device. The other ranks find the compiled code in the same disk
        caches.
        """
        return self._ranks[0].ahead

    @ahead.setter
    def ahead(self, ahead: CompileAhead | None) -> None:
        self._ranks[0].ahead = ahead

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        """Describe a model like `WorkerProber.describe`."""
        return self._ranks[0].describe(model)

    @property
    def starts(self) -> int:
        """The number of started workers."""
        return sum(rank.starts for rank in self._ranks)

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """Run one probe, and repeat it if the machine may be to blame for the result.

        The first rank's output goes to the file `log`, and the other ranks' output to files in the
        same folder. Raises UsageError if the request is for more ranks than the pool has.
        """
        if not request.has_real_ranks:
            return self._ranks[0].probe(request, log)

        num_gpus = request.parallelism.num_gpus
        if num_gpus > len(self._ranks):
            raise UsageError(
                f"a pool of {len(self._ranks)} ranks cannot probe {num_gpus} real ranks",
                remedy=f"request at most {len(self._ranks)} real ranks, or one simulated rank",
            )
        return self._ranks[0].with_retry(self._probe_once, request, log)

    def _probe_once(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """Run one try of a probe on its ranks, and read the sensors of the first device."""
        begin = time.monotonic()
        oom_kills = host_oom_kills()
        first = self._ranks[0]
        first.begin_try()
        monitor = first.monitor(log)
        workers = self._ready_workers()[: request.parallelism.num_gpus]

        try:
            with scratch_directory() as folder:
                self._send(workers, request, log, Path(folder, "meeting"))
                answers = self._answers(workers, monitor)
        except Cancelled:
            self.close()
            raise

        if answers is None:
            for worker in workers:
                worker.dump_stacks()
            time.sleep(DUMP_S)
            self.close()
            waited = f"{monitor.deadline_s():.0f} s"
            reason = (
                f"no progress in phase {monitor.phase} for {waited}; the stacks are in the logs"
            )
            return failed_result(request, Outcome.TIMEOUT, monitor.phase, reason, begin, log)

        *_, (number, last) = answers.items()
        if message := answers.get(0):
            first.note_others(message)
        if _has_failed(last):
            return self._failure(request, number, last, begin, log, oom_kills)
        if not all(message["reusable"] for message in answers.values() if message):
            self._renew()

        results = [_result(answers[number]) for number in range(len(workers))]
        result = replace(combine_results(results), log=log.name)
        if result.measurement is None:
            return result
        return replace(result, measurement=monitor.complete(result.measurement))

    def _send(
        self, workers: Sequence[WorkerProcess], request: ProbeRequest, log: Path, meeting: Path
    ) -> None:
        """Send the request to these workers, which are the ranks of the probe.

        This method ignores a worker that has ended, because `_answers` notices its end later.
        """
        for number, worker in enumerate(workers):
            address = RankAddress(number=number, meeting=str(meeting))
            own_log = log if number == 0 else log.with_name(f"{log.stem}.rank{number}{log.suffix}")
            shared = self._ranks[0].turns() if number == 0 else {}
            with suppress(OSError):
                worker.send(
                    {"request": to_data(request), "log": str(own_log), "seat": to_data(address)}
                    | shared
                )

    def _answers(
        self, workers: Sequence[WorkerProcess], monitor: Monitor
    ) -> dict[int, Message] | None:
        """The result message of each rank; a failed rank's message comes last.

        The result is None if a phase takes longer than its deadline. Raises Cancelled.
        """
        answers: dict[int, Message] = {}
        while len(answers) < len(workers):
            waiting = [number for number in range(len(workers)) if number not in answers]
            found = receive_first(
                [workers[number] for number in waiting], monitor, self._should_stop
            )
            if found is None:
                return None

            place, message = found
            if message is not None and message["event"] == "phase":
                monitor.enter(Phase(message["phase"]))
                continue
            answers[waiting[place]] = message
            if _has_failed(message):
                break
        return answers

    def _failure(
        self,
        request: ProbeRequest,
        number: int,
        message: Message,
        begin: float,
        log: Path,
        oom_kills: int,
    ) -> ProbeResult:
        """The result of a probe that failed on rank `number`. All workers are replaced."""
        noticed = time.monotonic()
        if message is not None and _result(message).outcome is Outcome.CRASH:
            time.sleep(GRACE_S)
        dead = [place for place, rank in enumerate(self._ranks) if rank.has_ended()]

        for rank in self._ranks:
            rank.kill()
        if message is None or dead:
            number = number if message is None else dead[0]
            reason = self._ranks[number].end_of_worker(host_oom_kills() > oom_kills)
            result = failed_result(
                request, Outcome.CRASH, None, f"rank {number}: {reason}", begin, log
            )
        else:
            note = f"rank {number} failed, so the workers of all ranks were ended"
            result = replace(_result(message), notes=(note,), log=log.name)

        self.close()
        stopped = time.monotonic()
        self._renew()
        return replace(result, seconds=result.seconds | {"stop": stopped - noticed})

    def collectives(self) -> tuple[CollectiveRates, ...]:
        """The data rates of collectives between 2, 4, ... and all devices.

        Raises the errors of `WorkerProber.rates`.
        """
        self._ready_workers()
        try:
            with scratch_directory() as folder:
                for number, rank in enumerate(self._ranks):
                    address = RankAddress(number=number, meeting=str(Path(folder, "meeting")))
                    rank.ask({"collectives": len(self._ranks), "seat": to_data(address)})
                found, *_ = [rank.answer() for rank in self._ranks]
        except AutotuneError:
            self.close()  # end all workers, because the other ranks still wait for the failed rank
            raise
        return tuple(from_data(CollectiveRates, rates) for rates in found)

    def launch(self) -> None:
        """Start missing workers without waiting for their imports. Raises Cancelled."""
        if self._should_stop():
            raise Cancelled
        for rank in self._ranks:
            rank.launch()

    def _ready_workers(self) -> list[WorkerProcess]:
        """The workers of all ranks, started together and ready. Raises the errors of `probe`."""
        self.launch()
        return [rank.ready_process() for rank in self._ranks]

    def _renew(self) -> None:
        """End all workers, and start new ones for the next probe."""
        self.close()
        for rank in self._ranks:
            rank.launch()

    def close(self) -> None:
        """End all workers and all processes that they started."""
        for rank in self._ranks:
            rank.terminate()
        for rank in self._ranks:
            rank.close()


def _result(message: Message) -> ProbeResult:
    assert message is not None
    return from_data(ProbeResult, message["result"])


def _has_failed(message: Message) -> bool:
    """Whether a rank's worker has ended, or a rank has failed while others may wait for it."""
    return message is None or (
        not message["reusable"] and _result(message).outcome is not Outcome.OK
    )


def combine_results(results: Sequence[ProbeResult]) -> ProbeResult:
    """Combine the results of all ranks: the slowest rank's times and the highest peaks.

    If some results are not OK, the first result that is not OK is returned. Losses are means over
    the ranks, because each rank trains on a part of the batch.
    """
    for result in results:
        if result.outcome is not Outcome.OK:
            return result

    measured = [result.measurement for result in results if result.measurement is not None]
    slowest = max(measured, key=lambda measurement: statistics.fmean(measurement.step_s))
    notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
    contexts = [
        measurement.context_gib for measurement in measured if measurement.context_gib is not None
    ]
    losses = zip(*(measurement.losses for measurement in measured), strict=True)

    together = replace(
        slowest,
        phase_peak_gib=_max_by_key([measurement.phase_peak_gib for measurement in measured]),
        segment_peak_gib=_max_by_key([measurement.segment_peak_gib for measurement in measured]),
        peak_allocated_gib=max(measurement.peak_allocated_gib for measurement in measured),
        peak_reserved_gib=max(measurement.peak_reserved_gib for measurement in measured),
        context_gib=max(contexts, default=None),
        limit_gib=min(measurement.limit_gib for measurement in measured),
        loss_first=statistics.fmean(measurement.loss_first for measurement in measured),
        loss_last=statistics.fmean(measurement.loss_last for measurement in measured),
        losses=tuple(map(statistics.fmean, losses)),
    )
    return replace(results[measured.index(slowest)], measurement=together, notes=notes)


def _max_by_key(peaks: Sequence[dict[Key, float]]) -> dict[Key, float]:
    """Return for each key the largest value over all ranks."""
    return {key: max(one.get(key, 0.0) for one in peaks) for key in peaks[0]}
