"""The child process: it reads requests, sends results, and keeps the base model between probes.

The process sends JSON lines on its own socket, because libraries print to stdout. Its stdout and
stderr go to the trial's log. After each probe, the process restores its state and reports whether
this succeeded. After a failure, the parent replaces the process.
"""

import gc
import json
import os
import resource
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from autotune.core.probe_types import (
    CollectiveRates,
    DeviceRates,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    RankAddress,
)
from autotune.core.process import seconds_since_start
from autotune.core.serialization import from_data, to_data
from autotune.core.units import GIB
from autotune.probe.channel import open_channel, phase_seconds, redirect_output
from autotune.probe.fault_injection import strike
from autotune.probe.tiny_probe import tiny_request
from autotune.probe.turns import PATIENCE_S, Turns, held_by_others_gib

if TYPE_CHECKING:
    from autotune.core.micro_profile import MicroBatchProfile
    from autotune.probe.harness import Probe
    from autotune.probe.meters import Meter
    from autotune.probe.resident import ResidentModel

Rates = TypeVar("Rates")
CHANCE_GIB = 24 / 1024  # the random variation of a process's memory on a CPU, in GiB
JOIN = "join"  # the key of the seconds in which a rank joins the others
LEAST_WAIT_S = 0.01  # seconds; a shorter wait for the device is not recorded
# The most host memory, in GiB, that a worker may use to build a model without weights and describe
# it. A model with 100,000 linear layers and adapters takes 3 GiB.
DESCRIBED_GIB = 8


def main() -> None:
    """Answer the parent's requests on a socket until the parent closes it.

    Arguments: the socket's descriptor, the device, the parent's pid, a scratch directory.
    """
    reader, send, device, scratch = open_channel()

    worker = _start(device, send, scratch)
    if worker is None:
        return

    worker_log = os.dup(2)
    for line in reader:
        message = json.loads(line)
        if "describe" in message:
            _describe(message["describe"], send)
        elif "rates" in message:
            _measure_rates(worker.rates, send)
        elif "collectives" in message:
            address = from_data(RankAddress, message["seat"])
            _measure_rates(partial(worker.collectives, address, message["collectives"]), send)
        else:
            _probe(worker, message, worker_log, send)


def _start(device: str, send: Callable[..., None], scratch: str) -> "Worker | None":
    """Make the worker and report that it is ready, or report the failure and return None."""
    send(event="phase", phase=Phase.START)

    try:
        worker = Worker(device, send, scratch)
        meter = worker.meter
        sizes = {"memory_gib": meter.memory_gib(), "context_gib": meter.context_gib() or 0.0}
        seconds = seconds_since_start()
        known = {
            "fingerprint": to_data(meter.fingerprint()),
            "seconds": seconds,
        }
        send(event="ready", **known, **sizes)
    except Exception as error:
        traceback.print_exc()
        kind = type(error).__name__  # compare the name, because importing the class may have failed
        send(event="broken", reason=f"{kind}: {error}", unhealthy=kind == "Miscalculated")
        return None
    return worker


def _probe(
    worker: "Worker", message: dict[str, Any], worker_log: int, send: Callable[..., None]
) -> None:
    """Run one probe, write its output to the log that the message names, and send the result."""
    redirect_output(message["log"])
    worker.log = message["log"]
    worker.address = from_data(RankAddress, message["seat"]) if "seat" in message else None
    worker.trace = message.get("trace")
    worker.shared = Path(message["turns"]) if "turns" in message else None
    result, reusable = worker.serve(from_data(ProbeRequest, message["request"]))
    redirect_output(worker_log)

    more: dict[str, Any] = {}
    if worker.micro_profile is not None:
        more |= {"profile": to_data(worker.micro_profile)}
    if worker.others_are_stuck:
        more |= {"others_are_stuck": True}
    send(event="result", result=to_data(result), reusable=reusable, **more)


def _describe(model: dict[str, Any], send: Callable[..., None]) -> None:
    """Send a model's ModelShape, which says above all how the layers repeat."""
    from autotune.probe.model_shape import describe

    limits = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        # A malicious config may have two billion layers or labels, so this process's memory is
        # limited.
        most = psutil.Process().memory_info().data + int(DESCRIBED_GIB * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (most, limits[1]))
        send(event="described", shape=to_data(describe(model)))
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        # When memory runs out, CPython may raise SystemError instead of MemoryError, and torch
        # passes on C++'s bad_alloc.
        if isinstance(error, (MemoryError, SystemError)) or "bad_alloc" in reason:
            reason = f"building the model takes more than {DESCRIBED_GIB} GiB, even without weights"
        else:
            traceback.print_exc()
        send(event="broken", reason=reason)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _measure_rates(measure: Callable[[], Any], send: Callable[..., None]) -> None:
    """Send the measured rates of the device, or the data rates between several devices."""
    try:
        send(event="rates", rates=to_data(measure()))
    except Exception as error:
        traceback.print_exc()
        send(event="broken", reason=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


class Worker:
    """Runs probes on one device, and keeps the base model of the last probe.

    The worker keeps one copy of this model for each probed number of layers. All copies have the
    same `resident.family_of`.
    """

    address: RankAddress | None = None  # this process's address in a probe on several real ranks
    trace: str | None = None  # the trace file to write, if the current probe is profiled in detail
    micro_profile: "MicroBatchProfile | None" = None  # the current probe's detailed profile
    shared: Path | None = None  # the folder through which processes take turns on the device
    # True if this process waited longer than PATIENCE_S for its turn on the device
    others_are_stuck = False

    def __init__(self, device: str, send: Callable[..., None], scratch: str | None = None) -> None:
        """Check the device and load the libraries.

        An import error is raised here, so that the parent gets a report of it.

        `send` sends a message to the parent; `scratch` is a directory for temporary files.
        """
        # The libraries create a million objects, and collecting garbage among them would take a
        # fifth of the loading time.
        gc.disable()
        from autotune.probe.harness import Probe  # noqa: F401
        from autotune.probe.health import check_products
        from autotune.probe.meters import open_meter

        gc.freeze()  # collecting the libraries' objects takes longer than many steps
        self.meter = open_meter(device)
        check_products(self.meter.torch_device)
        self.log: str | None = None  # the current probe's log, whose name selects injected faults

        self._send = send
        self._scratch = scratch
        # The key is the number of layers of a cached model; None stands for all layers.
        self._residents: dict[int | None, ResidentModel] = {}
        self._served = 0
        self._empty_gib = 0.0
        self._limit_gib = self.meter.memory_gib()

        # A probe of a tiny model loads libraries and kernels, whose memory then counts as context.
        bf16 = self.meter.fingerprint().has_bf16
        result, _ = self.serve(tiny_request(device, self.meter.memory_gib(), bf16=bf16))
        if result.outcome is not Outcome.OK:
            raise RuntimeError(f"a tiny warm-up probe failed: {result.reason}")

        self._drop(list(self._residents))
        gc.enable()
        self._served = 0
        self.meter.settle()
        self._empty_gib = self.meter.allocated_gib()

    def rates(self) -> DeviceRates:
        """The device's rates, measured one after another. Releases all cached models."""
        from autotune.probe.device_rates import measure_rates

        return self._measure(measure_rates)

    def collectives(self, address: RankAddress, num_ranks: int) -> tuple[CollectiveRates, ...]:
        """The data rates between the devices.

        All ranks must call this method, and wait for each other in it. Releases all cached models.
        """
        from autotune.probe.collective_rates import measure_collectives

        return self._measure(lambda meter: measure_collectives(meter, address, num_ranks))

    def _measure(self, measure: Callable[["Meter"], Rates]) -> Rates:
        self._drop(list(self._residents))
        rates = measure(self.meter)
        self.meter.release()
        self.meter.settle()  # memory that the libraries keep counts as context
        self._empty_gib = self.meter.allocated_gib()
        return rates

    def serve(self, request: ProbeRequest) -> tuple[ProbeResult, bool]:
        """The result of one probe, and whether this process can be reused for the next probe."""
        self.micro_profile = None
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        entered = [("total", time.perf_counter())]
        finish = self.meter.synchronize
        take = partial(self._take_turn, entered)
        turns = Turns(self.shared, patience_s=PATIENCE_S, on_give=finish, on_wait=take)
        self.meter.others_gib = 0.0
        with closing(turns), turns.take(compiles=request.config.compile != "none"):
            fields, reusable = self._attempt(request, entered)
            oom: OomDetail | None = fields.get("oom")
            below_limit = oom is not None and oom.need_gib <= oom.limit_gib
            if below_limit and self.meter.aside_gib and reusable:
                # The probe ran out of memory below its limit, so cached models with other numbers
                # of layers may have taken the missing memory. Release these models, and try again.
                self._drop([depth for depth in self._residents if depth != request.depth])
                fields, reusable = self._attempt(request, entered)

        self.others_are_stuck = turns.is_stuck
        self._served += 1
        result = ProbeResult(
            request_digest=request.digest,
            config=request.config,
            rung=request.rung,
            depth=request.depth,
            seconds=phase_seconds(entered)
            | ({"compile": turns.compile_s} if turns.compile_s else {}),
            warm=self._served > 1,
            started_at=started,
            **fields,
        )
        return result, reusable

    def _take_turn(self, entered: list[tuple[str, float]], begin: float, end: float) -> None:
        """Record the wait for a new turn on the device, and read other processes' memory again.

        This memory may have changed since the last turn.
        """
        assert self.shared is not None
        self.meter.others_gib = held_by_others_gib(self.shared)
        _note_wait(entered, begin, end)

    def _attempt(
        self, request: ProbeRequest, entered: list[tuple[str, float]]
    ) -> tuple[dict[str, Any], bool]:
        """Run one try of a probe.

        Return some fields of the probe's result, and whether this process can be reused.

        Adds each phase and its start to `entered`.
        """
        from autotune.probe.accounting import tight_memory_detail
        from autotune.probe.harness import Probe
        from autotune.probe.rank import Rank, refusal

        if (reason := refusal(request)) is not None:
            return {"outcome": Outcome.REFUSED, "reason": reason}, True

        fields: dict[str, Any] = {}
        probe: Probe | None = None
        rank = Rank(request, self.meter.torch_device, self.address)

        def emit(phase: Phase) -> None:
            entered.append((phase.value, time.perf_counter()))
            self._send(event="phase", phase=phase)
            if self.log is not None:
                strike(self.log, phase, rank.number)

        try:
            emit(Phase.LOAD)
            if rank.size > 1:
                entered.append((JOIN, time.perf_counter()))
                rank.join()
                entered.append((Phase.LOAD.value, time.perf_counter()))
            probe = Probe(
                request,
                self._resident_for(request),
                self.meter,
                emit,
                self._scratch,
                rank,
                self.trace,
            )
            measurement = probe.run()
            self.micro_profile = probe.micro_profile
            fields = {"outcome": Outcome.OK, "measurement": measurement}
            if measurement.alloc_retries:
                phase = probe.recorder.retry_phase or Phase.STEADY
                detail, reason = tight_memory_detail(measurement, phase)
                fields |= {"outcome": Outcome.OOM, "phase": phase, "oom": detail, "reason": reason}
        except Exception as error:
            self.meter.uncap()  # on a CPU, even printing the traceback needs memory
            fields = self._failure(error, probe)
            if request.has_real_ranks:
                # The other ranks wait for this rank in a collective, so more work on the device
                # could block this process too.
                return fields, False

        # After the except block, no reference to the failed step's frames is left, so the tensors
        # in these frames can be freed.
        emit(Phase.CLEANUP)
        if probe is not None:
            probe.close()
        probe = None
        rank.leave()
        return fields, self._restore(request, fields)

    def _restore(self, request: ProbeRequest, fields: dict[str, Any]) -> bool:
        """Release a finished probe's memory, and return whether that succeeded.

        Adds a note to `fields` if some memory was not released.
        """
        succeeded = fields["outcome"] in (Outcome.OK, Outcome.OOM)
        # A base model that the probe changed cannot be reused. Full fine-tuning changes the
        # weights, 8-bit layers allocate buffers of their own, and on several GPUs a rank has only a
        # shard.
        config = request.config
        num_gpus = request.parallelism.num_gpus
        changed = config.method == "full" or config.quantization == "int8" or num_gpus > 1

        # If the load of a model failed, the model may be incomplete.
        if changed or not succeeded or fields.get("phase") is Phase.LOAD:
            self._drop([request.depth])
        self.meter.uncap()
        resident = self._residents.get(request.depth)
        baseline_gib = self._empty_gib + (resident.cached_gib() if resident else 0.0)

        # While the worker starts, garbage collection is off, and `gc.freeze` is not called, so that
        # no object of the tiny model is frozen.
        if not succeeded or not gc.isenabled():
            self.meter.release()
        elif not self._release_until(lambda: self.meter.has_returned(baseline_gib)):
            kept_mib = 1024 * (self.meter.allocated_gib() - baseline_gib)
            fields["notes"] = (
                "the worker is replaced, because it did not return all memory"
                f" ({kept_mib:+.0f} MiB)",
            )
            return False
        return succeeded

    def _release_until(self, is_back: Callable[[], bool]) -> bool:
        """Release all unused memory, and return whether `is_back()` is True afterwards.

        The remaining objects, above all compiled code, are frozen, so that later garbage
        collections skip them. If some memory was not released, objects that were frozen earlier may
        refer to this memory, so all objects are unfrozen and collected once.
        """
        self.meter.release()
        succeeded = is_back()
        if not succeeded:
            gc.unfreeze()
            self.meter.release()
            succeeded = is_back()
        gc.freeze()
        return succeeded

    def _resident_for(self, request: ProbeRequest) -> "ResidentModel":
        """The base model for this request, from the cache or new.

        Models with other numbers of layers stay cached.
        """
        from autotune.probe.resident import build_resident, family_of

        # These libraries load before the model, so that their memory counts as context and not as
        # memory of the model.
        config = request.config
        if config.quantization in ("int8", "nf4") or config.optimizer.endswith("8bit"):
            import bitsandbytes  # noqa: F401

        family = family_of(request)
        self._drop(
            [depth for depth, resident in self._residents.items() if resident.family != family]
        )
        if config.method == "full":
            self._drop([request.depth])
        others = [resident for depth, resident in self._residents.items() if depth != request.depth]
        self.meter.aside_gib = sum(resident.cached_gib() for resident in others)
        if (resident := self._residents.get(request.depth)) is not None:
            self.meter.rebase(resident.cached_gib())
            return resident

        self.meter.rebase(0.0)
        self._limit_gib = self.meter.cap(request.memory_gib, request.headroom, 0.0)
        empty_gib = self.meter.allocated_gib()
        resident = build_resident(request, self.meter.torch_device)
        self.meter.synchronize()
        resident.base_gib = self.meter.allocated_gib() - empty_gib
        self._residents[request.depth] = resident
        return resident

    def _drop(self, depths: list[int | None]) -> None:
        """Release the base models with these numbers of layers."""
        if not depths:
            return
        held_gib = sum(
            self._residents[depth].cached_gib() for depth in depths if depth in self._residents
        )
        left_gib = self.meter.allocated_gib() - held_gib
        for depth in depths:
            self._residents.pop(depth, None)
        self._release_until(lambda: self.meter.allocated_gib() <= left_gib + CHANCE_GIB)

    def _failure(self, error: Exception, probe: "Probe | None") -> dict[str, Any]:
        """The failure as fields of the result.

        The fields do not refer to the error, so the error can be freed.
        """
        from autotune.probe.accounting import is_out_of_memory, oom_detail
        from autotune.probe.harness import BadLoss

        traceback.print_exc()
        phase = probe.recorder.phase if probe else Phase.LOAD
        if is_out_of_memory(error):
            peak, reserved = self.meter.peak_gib()
            terms = probe.memory_terms() if probe else {"weights": self.meter.allocated_gib()}
            limit = probe.limit_gib if probe and probe.limit_gib else self._limit_gib
            detail = oom_detail(error, phase, terms, peak, reserved, limit)
            return {
                "outcome": Outcome.OOM,
                "phase": phase,
                "reason": f"out of memory in {phase}",
                "oom": detail,
            }

        first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        if isinstance(error, BadLoss):
            return {"outcome": Outcome.NUMERICS, "phase": phase, "reason": first_line}
        return {
            "outcome": Outcome.CRASH,
            "phase": phase,
            "reason": f"{type(error).__name__}: {first_line}",
        }


def _note_wait(entered: list[tuple[str, float]], begin: float, end: float) -> None:
    """Record that another process's turn interrupted the current phase from `begin` to `end`."""
    if end - begin > LEAST_WAIT_S:
        phase = entered[-1][0]
        entered += [("turn", begin)] if phase == "total" else [("turn", begin), (phase, end)]


if __name__ == "__main__":
    main()
