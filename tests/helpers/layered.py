"""Answers for `ReplayProber` of a device whose memory and time are linear in the depth of the
model.
"""

from collections.abc import Callable

from autotune.core.probe_types import (
    ModelShape,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.train_config import TrainConfig
from tests.helpers.factories import measurement, result
from tests.helpers.replay import ReplayProber, need_gib

LAYERS, HEAD = 32, 4  # embeddings and head need as much as four layers
SHAPE = ModelShape(num_layers=LAYERS, prefix=0, period=1)
FULL_S, SHORT_S = 10.0, 1.0

Answer = Callable[[ProbeRequest], ProbeResult]


def steady(config: TrainConfig) -> float:
    return 1000.0


def layered(
    rate: Callable[[TrainConfig], float] = steady, slower: float = 1.0, gradients_gib: float = 0.0
) -> Answer:
    """Answers of a device that is linear in depth, except that whole models take `slower` times the
    linear time.

    A second micro batch needs `gradients_gib` in addition, the gradients of the first.
    """

    def answer(request: ProbeRequest) -> ProbeResult:
        config, whole = request.config, request.depth is None
        share = ((request.depth or LAYERS) + HEAD) / (LAYERS + HEAD)
        limit = request.memory_gib * (1 - request.headroom)
        gradients = gradients_gib * share if request.micro_steps > 1 else 0.0
        need, seconds = (
            need_gib(config) * share + gradients,
            {"total": FULL_S if whole else SHORT_S},
        )
        if need > limit:
            allocated = 0.75 * limit
            oom = OomDetail(
                phase=Phase.FORWARD,
                requested_gib=need - allocated,
                allocated_gib=allocated,
                reserved_gib=allocated,
                limit_gib=limit,
            )
            return result(config, Outcome.OOM, phase=Phase.FORWARD, oom=oom, seconds=seconds)
        micro_s = config.tokens / rate(config) * share * (slower if whole else 1.0)
        measured = measurement(
            micro_s,
            need,
            micro_steps=request.micro_steps,
            step_s=(request.micro_steps * micro_s,) * 3,
            rest_s=(0.0,) * 3,
            host_micro_s=micro_s / 10,
            model_gib=share,
            adapters_gib=0.0,
            gradients_gib=gradients,
            optimizer_gib=0.0,
            peak_reserved_gib=need,
            limit_gib=limit,
            context_gib=0.0,
            telemetry=None,
        )
        return result(config, measurement=measured, seconds=seconds)

    return answer


def asked(prober: ReplayProber) -> list[int | None]:
    """The depths of all requests, None for whole models."""
    return [request.depth for request in prober.requests]
