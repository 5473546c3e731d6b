"""The child process that measures an engine for GRPO: start, generation, sleep and new weights.

It speaks the language of `worker`, so that `supervisor` controls both. An engine cannot be started
twice in a process, so that each process serves one request.
"""

import json
import os
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from autotune.core.probe_types import OomDetail, Outcome, Phase, ProbeRequest, ProbeResult
from autotune.core.process import seconds_since_start
from autotune.core.rollout_types import EngineMeasurement
from autotune.core.serialization import from_data, to_data
from autotune.probe.channel import open_channel, phase_seconds, redirect_output
from autotune.probe.engines import Engine, open_engine, random_prompts, random_weights, refusal
from autotune.probe.fault_injection import strike
from autotune.probe.meters import Meter, open_meter
from autotune.probe.phase_log import PhaseLog
from autotune.trainer.settings import ALLOCATOR_VARIABLE

WARM_TOKENS = 16  # tokens of each completion before the first timed generation
# Messages of vLLM if the share of the memory is too large for the device or too small for the model
NO_ROOM = (
    "is less than desired GPU memory utilization",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
)


def main() -> None:
    """Answer the parent's requests until the parent closes the socket."""
    reader, send, device, scratch = open_channel()
    send(event="phase", phase=Phase.START)
    try:
        # vLLM keeps weights and cache in a pool of its own, whose segments never grow.
        os.environ.pop(ALLOCATOR_VARIABLE, None)
        meter = open_meter(device)
        meter.hold_memory("fixed")
        sizes = {"memory_gib": meter.memory_gib(), "context_gib": meter.context_gib() or 0.0}
        seconds = seconds_since_start()
        send(event="ready", fingerprint=to_data(meter.fingerprint()), seconds=seconds, **sizes)
    except Exception as error:
        traceback.print_exc()
        send(event="broken", reason=f"{type(error).__name__}: {error}")
        return

    worker_log = os.dup(2)
    for line in reader:
        message = json.loads(line)
        redirect_output(message["log"])
        request = from_data(ProbeRequest, message["request"])
        result = serve(request, meter, send, scratch, message["log"])
        redirect_output(worker_log)
        send(event="result", result=to_data(result), reusable=False)


def serve(
    request: ProbeRequest, meter: Meter, send: Callable[..., None], scratch: str, log: str
) -> ProbeResult:
    """The measurement of a request's engine, or the reason why there is none.

    `scratch` is a folder for temporary files. The name of `log` selects injected faults.
    """
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    entered = [("total", time.perf_counter())]

    def emit(phase: Phase) -> None:
        entered.append((phase.value, time.perf_counter()))
        send(event="phase", phase=phase)
        strike(log, phase)

    phases = PhaseLog(meter, emit)
    fields: dict[str, Any]
    if (reason := refusal(request)) is not None:
        fields = {"outcome": Outcome.REFUSED, "reason": reason}
    else:
        try:
            fields = {"outcome": Outcome.OK, "engine": measure(request, phases, scratch)}
        except Exception as error:
            traceback.print_exc()
            fields = _failure(error, phases)
    return ProbeResult(
        request_digest=request.digest,
        config=request.config,
        rung=request.rung,
        seconds=phase_seconds(entered),
        started_at=started,
        **fields,
    )


def measure(request: ProbeRequest, phases: PhaseLog, scratch: str) -> EngineMeasurement:
    """Measure the engine. Raises its errors."""
    meter, generation = phases.meter, request.generation
    assert generation is not None
    empty_gib = meter.used_gib()

    def growth(used_gib: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(used - empty_gib for used in used_gib)

    phases.enter(Phase.LOAD)
    engine = open_engine(request, meter.torch_device, scratch)

    phases.enter(None)
    vocab_size = _vocab_size(request.model)
    prompts = random_prompts(generation.prompts, vocab_size, request.seed)
    engine.generate(prompts, [min(WARM_TOKENS, length) for length in generation.completions])
    tokens = _generate(engine, prompts, generation.completions, generation.repeats, phases)
    timed = phases.seconds(Phase.ROLLOUT)
    # One of two GPUs generates every second completion.
    _generate(engine, prompts[::2], generation.completions[::2], 1, phases)
    half_s = phases.seconds(Phase.ROLLOUT)[-1]
    if not engine.shares_weights:
        _alternate(engine, request, prompts, phases)

    return EngineMeasurement(
        engine=engine.name,
        start_s=engine.start_s,
        generate_s=timed,
        half_s=half_s,
        tokens=tokens,
        cached_tokens=engine.cached_tokens,
        transfer_s=phases.seconds(Phase.TRANSFER),
        sleep_s=phases.seconds(Phase.SLEEP),
        wake_s=_by_pair(phases.seconds(Phase.WAKE)),
        peak_gib={phase.value: peak - empty_gib for phase, peak in phases.peaks_gib().items()},
        awake_gib=growth(phases.after_gib(Phase.ROLLOUT)),
        asleep_gib=growth(phases.after_gib(Phase.SLEEP)),
        weights_gib=engine.weights_gib,
    )


def _generate(
    engine: Engine,
    prompts: list[list[int]],
    lengths: tuple[int, ...],
    repeats: int,
    phases: PhaseLog,
) -> int:
    """Time whole generations, and return the number of tokens of each.

    Raises RuntimeError if the engine cuts completions off, because it then did less work.
    """
    for _ in range(repeats):
        with phases.inside(Phase.ROLLOUT):
            made = engine.generate(prompts, lengths)
        if list(made) != list(lengths):
            short = sum(one < length for one, length in zip(made, lengths, strict=True))
            raise RuntimeError(f"the engine cut {short} of {len(lengths)} completions off")
    return sum(lengths)


def _alternate(
    engine: Engine, request: ProbeRequest, prompts: list[list[int]], phases: PhaseLog
) -> None:
    """Alternate with a training that takes no time: sleep, wake up, and get new weights.

    The order is TRL's. A few tokens are generated in each alternation, so that the engine works as
    before.
    """
    generation = request.generation
    assert generation is not None
    weights_on = random_weights(request)
    device = phases.meter.torch_device
    for _ in range(generation.alternations):
        if generation.engine.sleeps:
            with phases.inside(Phase.SLEEP):
                engine.sleep()
            with phases.inside(Phase.WAKE):
                engine.wake("weights")
        weights = weights_on(device)
        with phases.inside(Phase.TRANSFER):
            engine.load(weights)
        # The buffer stands for the trained model, and is not part of the engine's memory.
        del weights
        _empty_cache(device)
        if generation.engine.sleeps:
            with phases.inside(Phase.WAKE):
                engine.wake("kv_cache")
        with phases.inside(Phase.ROLLOUT):
            engine.generate(prompts[:1], [min(WARM_TOKENS, generation.completions[0])])


def _empty_cache(device: Any) -> None:
    """Return unused memory. Workspaces stay, because CUDA graphs refer to them."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def _by_pair(seconds: tuple[float, ...]) -> tuple[float, ...]:
    """The seconds to wake up: first the weights, then the cache."""
    return tuple(map(sum, zip(seconds[::2], seconds[1::2], strict=True)))


def _vocab_size(model: dict[str, Any]) -> int:
    from autotune.trainer.model_builder import config_of

    size: int = config_of(model).get_text_config().vocab_size
    return size


def _failure(error: Exception, phases: PhaseLog) -> dict[str, Any]:
    """The failure as fields of the result. The phase is the one that failed."""
    from autotune.core.oom_text import requested_gib
    from autotune.probe.accounting import is_out_of_memory

    phase = phases.failed_in or phases.phase or Phase.ROLLOUT
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    meter = phases.meter
    if is_out_of_memory(error) or any(words in str(error) for words in NO_ROOM):
        detail = OomDetail(
            phase=phase,
            requested_gib=requested_gib(str(error)),
            allocated_gib=meter.used_gib(),
            reserved_gib=meter.used_gib(),
            limit_gib=meter.memory_gib(),
        )
        return {
            "outcome": Outcome.OOM,
            "phase": phase,
            "reason": f"out of memory in {phase}: {reason}",
            "oom": detail,
        }
    return {
        "outcome": Outcome.CRASH,
        "phase": phase,
        "reason": f"{type(error).__name__}: {reason}",
    }


if __name__ == "__main__":
    main()
