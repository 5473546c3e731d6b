"""The child: reads requests, answers results, keeps the base model warm between them. Nothing imports this file.

It speaks JSON lines on a socket of its own, since libraries print to stdout; stdout and stderr go to the trial's log.
After each probe it puts the process back as it was, and says so; the parent replaces a worker that could not.
"""

import faulthandler
import gc
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psutil

from autotune.core.probe_types import Measurement, OomDetail, Outcome, Phase, ProbeRequest, ProbeResult
from autotune.core.process import die_with_parent, take_group_along
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.fault_injection import injected

if TYPE_CHECKING:
    from autotune.probe.resident import ResidentModel

MAX_LOST_GIB = 0.5


def main() -> None:
    die_with_parent(int(sys.argv[3]))
    take_group_along(int(sys.argv[1]), scratch=sys.argv[4])
    channel = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    reader, writer = channel.makefile("r"), channel.makefile("w")

    def send(**message: Any) -> None:
        writer.write(json.dumps(message) + "\n")
        writer.flush()

    send(event="phase", phase=Phase.START)
    try:
        worker = Worker(sys.argv[2], send, sys.argv[4])
        fingerprint, memory_gib = to_data(worker.meter.fingerprint()), worker.meter.memory_gib()
        took = time.time() - psutil.Process().create_time()
        send(event="ready", fingerprint=fingerprint, memory_gib=memory_gib, seconds=took)
    except Exception as error:
        traceback.print_exc()
        kind = type(error).__name__  # by name: what defines it may be what could not be imported
        send(event="broken", reason=f"{kind}: {error}", unhealthy=kind == "Miscalculated")
        return
    home = os.dup(2)
    for line in reader:
        message = json.loads(line)
        if "describe" in message:
            send(**described(message["describe"]))
            continue
        _log_to(message["log"])
        worker.strike = injected(message["log"])
        result, reusable = worker.serve(from_data(ProbeRequest, message["request"]))
        _log_to(home)
        send(event="result", result=to_data(result), reusable=reusable)


def described(model: dict[str, Any]) -> dict[str, Any]:
    """The answer to what a model's layers are like: a message."""
    from autotune.probe.model_shape import describe

    try:
        return {"event": "described", "shape": to_data(describe(model))}
    except Exception as error:
        traceback.print_exc()
        return {"event": "broken", "reason": f"{type(error).__name__}: {error}"}


class Worker:
    """One device, and the base models that wait on it: one family, at the depths that were asked for."""

    def __init__(self, device: str, send: Callable[..., None], scratch: str | None = None) -> None:
        # Imported here, so that `ready` and a failed import both reach the parent as messages.
        from autotune.probe.health import check_products
        from autotune.probe.meters import open_meter

        self.meter = open_meter(device)
        check_products(self.meter.torch_device)
        self._send = send
        self.strike: Callable[[Phase], None] | None = None  # a fault on purpose
        self._scratch = scratch
        self._residents: dict[int | None, ResidentModel] = {}  # by depth
        self._served = 0
        self._empty_gib = 0.0
        self._limit_gib = self.meter.memory_gib()
        self._lost_gib = 0.0
        self._warm_up(device)

    def _warm_up(self, device: str) -> None:
        """One probe of a tiny model loads the libraries and kernels, so that they count as context from the start."""
        result, _ = self.serve(warm_up_request(device, self.meter.memory_gib()))
        if result.outcome is not Outcome.OK:
            raise RuntimeError(f"a tiny warm-up probe failed: {result.reason}")
        self._drop(list(self._residents))
        gc.freeze()
        self._served = 0
        self.meter.settle()
        self._empty_gib = self.meter.allocated_gib()

    def serve(self, request: ProbeRequest) -> tuple[ProbeResult, bool]:
        """One probe, and whether this process is as good as new after it."""
        clock = Clock()
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        fields, reusable = self._attempt(request, clock)
        oom: OomDetail | None = fields.get("oom")
        if oom is not None and oom.need_gib <= oom.limit_gib and self.meter.aside_gib and reusable:
            # Less than the limit was held: the models that wait aside may have taken the room.
            self._drop([depth for depth in self._residents if depth != request.depth])
            fields, reusable = self._attempt(request, clock)
        self._served += 1
        result = ProbeResult(
            request_digest=request.digest,
            config=request.config,
            rung=request.rung,
            depth=request.depth,
            seconds=clock.finish(),
            warm=self._served > 1,
            started_at=started,
            **fields,
        )
        return result, reusable

    def _attempt(self, request: ProbeRequest, clock: "Clock") -> tuple[dict[str, Any], bool]:
        """What came of one try, as fields of the result, and whether this process is as good as new after it."""
        from autotune.probe.harness import Probe
        from autotune.probe.resident import clean

        fields: dict[str, Any] = {}
        probe: Probe | None = None

        def emit(phase: Phase) -> None:
            clock.enter(phase)
            self._send(event="phase", phase=phase)
            if self.strike is not None:
                self.strike(phase)

        try:
            emit(Phase.LOAD)
            probe = Probe(request, self._base_for(request), self.meter, emit, self._lost_gib, self._scratch)
            measurement = probe.run()
            fields = {"outcome": Outcome.OK, "measurement": measurement}
            if measurement.alloc_retries:
                fields |= too_tight(measurement, probe.recorder.retried_in or Phase.STEADY)
        except Exception as error:
            self.meter.uncap()  # on a CPU even a traceback wants memory
            fields = self._failure(error, probe)
        # Only now, outside the except block, does nothing hold the frames of the failed step any more.
        emit(Phase.CLEANUP)
        if probe is not None:
            # bitsandbytes never frees the managed memory of a paged optimizer (GlobalPageManager keeps it).
            self._lost_gib += probe.managed_gib
            probe.close()
            clean(probe.resident)
        probe = None
        # Full fine-tuning changed the weights; 8-bit layers grow buffers of their own as they run.
        changed = request.config.method == "full" or request.config.quantization == "int8"
        # What failed while it was loaded may be half made.
        whole = fields["outcome"] in (Outcome.OK, Outcome.OOM) and fields.get("phase") is not Phase.LOAD
        if changed or not whole:
            self._drop([request.depth])
        self.meter.uncap()
        self.meter.release()
        gc.freeze()  # what is left is libraries and base models: no collection in a timed step need walk them
        kept = self._residents.get(request.depth)
        baseline_gib = self._empty_gib + (kept.cached_gib() if kept else 0.0)
        reusable = fields["outcome"] in (Outcome.OK, Outcome.OOM)
        if reusable and not self.meter.returned_to(baseline_gib):
            reusable = False
            fields["notes"] = ("the worker is replaced, which did not give all memory back",)
        if self._lost_gib > MAX_LOST_GIB:
            reusable = False
            fields["notes"] = (f"the worker is replaced, where paged optimizers left {self._lost_gib:.1f} GiB behind",)
        return fields, reusable

    def _base_for(self, request: ProbeRequest) -> "ResidentModel":
        """The base model for this request: the one that is here, or a new one. Others of its family wait aside."""
        from autotune.probe.resident import build_resident, family_of

        # Libraries come first: their memory is context, not the model's.
        if request.config.quantization in ("int8", "nf4") or request.config.optimizer.endswith("8bit"):
            import bitsandbytes  # noqa: F401
        if request.config.quantization == "fp8":
            import torchao.float8  # noqa: F401
        family, full = family_of(request), request.config.method == "full"
        self._drop(
            [
                depth
                for depth, resident in self._residents.items()
                if resident.family != family or (full and depth == request.depth)
            ]
        )
        others = [resident for depth, resident in self._residents.items() if depth != request.depth]
        self.meter.aside_gib = sum(resident.cached_gib() for resident in others)
        resident = self._residents.get(request.depth)
        if resident is not None:
            self.meter.rebase(resident.cached_gib())
            return resident
        self.meter.rebase(0.0)
        self._limit_gib = self.meter.cap(request.memory_gib, request.headroom, self._lost_gib)
        empty_gib = self.meter.allocated_gib()
        resident = build_resident(request, self.meter.torch_device)
        self.meter.synchronize()
        resident.base_gib = self.meter.allocated_gib() - empty_gib
        self._residents[request.depth] = resident
        return resident

    def _drop(self, depths: list[int | None]) -> None:
        if depths:
            for depth in depths:
                self._residents.pop(depth, None)
            gc.unfreeze()
            self.meter.release()
            gc.freeze()  # the next collection, which the Trainer asks for at its start, need not walk all libraries

    def _failure(self, error: Exception, probe: Any) -> dict[str, Any]:
        """What went wrong, as fields of the result. Holds no reference to the error."""
        from autotune.probe.harness import BadLoss

        traceback.print_exc()
        phase = probe.recorder.phase if probe else Phase.LOAD
        if is_out_of_memory(error):
            # The failed step has begun to unwind: what it held is read from the peak, and the loss is activations'.
            peak, reserved = self.meter.peak_gib()
            terms = probe.held_gib() if probe else {"weights": self.meter.allocated_gib()}
            rest = "activations" if probe else "weights"
            terms[rest] += max(peak - sum(terms.values()), 0.0)
            detail = OomDetail(
                phase=phase,
                requested_gib=requested_gib(str(error)),
                allocated_gib=sum(terms.values()),
                reserved_gib=max(reserved, sum(terms.values())),
                limit_gib=probe.limit_gib if probe and probe.limit_gib else self._limit_gib,
                terms_gib=terms,
            )
            return {"outcome": Outcome.OOM, "phase": phase, "reason": f"out of memory in {phase}", "oom": detail}
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        outcome = Outcome.NUMERICS if isinstance(error, BadLoss) else Outcome.CRASH
        reason = first if outcome is Outcome.NUMERICS else f"{type(error).__name__}: {first}"
        return {"outcome": outcome, "phase": phase, "reason": reason}


def too_tight(measurement: Measurement, phase: Phase) -> dict[str, Any]:
    """A probe that came through only because the allocator gave cached memory back and tried again does not fit."""
    held = {
        "weights": measurement.model_gib,
        "adapters": measurement.adapters_gib,
        "gradients": measurement.gradients_gib,
        "optimizer": measurement.optimizer_gib,
    }
    detail = OomDetail(
        phase=phase,
        requested_gib=None,
        allocated_gib=measurement.peak_allocated_gib,
        reserved_gib=measurement.peak_reserved_gib,
        limit_gib=measurement.limit_gib,
        terms_gib=held | {"activations": max(measurement.peak_allocated_gib - sum(held.values()), 0.0)},
    )
    times = f"{measurement.alloc_retries} time" + ("s" if measurement.alloc_retries > 1 else "")
    reason = f"too tight in {phase}: the allocator ran out, gave back what it cached and tried again {times}"
    return {"outcome": Outcome.OOM, "phase": phase, "oom": detail, "reason": reason}


def warm_up_request(device: str, memory_gib: float) -> ProbeRequest:
    """A small real probe, large enough that the libraries set up the buffers they use for matrices of real size."""
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 1}
    return ProbeRequest(
        config=TrainConfig(micro_batch_size=2, seq_len=256, precision="fp32" if device == "cpu" else "bf16_mixed"),
        model={"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 4096, **shape},
        device=device,
        memory_gib=memory_gib,
        micro_steps=1,
        min_timed_s=0.0,
    )


class Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self._start = self._since = time.perf_counter()
        self._phase: str | None = None
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str | None) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def finish(self) -> dict[str, float]:
        self.enter(None)
        return self._seconds | {"total": time.perf_counter() - self._start}


def is_out_of_memory(error: Exception) -> bool:
    """Out of device or host memory. An illegal memory access is not."""
    import torch

    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator: can't allocate memory" in text
        or "CUDA error: out of memory" in text
        or "CUBLAS_STATUS_ALLOC_FAILED" in text
        or "std::bad_alloc" in text
    )


def requested_gib(message: str) -> float | None:
    """The size of the allocation that failed, from torch's message."""
    if match := re.search(r"tried to allocate ([\d.]+) (KiB|MiB|GiB)", message, re.IGNORECASE):
        return float(match.group(1)) / {"KiB": 2**20, "MiB": 2**10, "GiB": 1}[match.group(2)]
    if match := re.search(r"tried to allocate (\d+) bytes", message):
        return int(match.group(1)) / 2**30
    return None


def _log_to(target: str | int) -> None:
    """Point stdout and stderr at a file, by path or descriptor."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = target if isinstance(target, int) else os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if handle != target:
        os.close(handle)


if __name__ == "__main__":
    main()
