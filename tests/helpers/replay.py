"""A prober that answers requests from a table or a function instead of a worker, and records the
requests.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.probe_types import (
    Fingerprint,
    ModelShape,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.train_config import TrainConfig
from tests.helpers.factories import FINGERPRINT, measurement, result

Answers = Callable[[ProbeRequest], ProbeResult] | Mapping[TrainConfig, ProbeResult]


class ReplayProber:
    """A prober for `Evaluator`. An answering function may raise, as the worker's launcher does."""

    context_gib = 0.0

    def __init__(
        self,
        answers: Answers,
        fingerprint: Fingerprint = FINGERPRINT,
        shape: ModelShape | None = None,
    ) -> None:
        self._answers, self._fingerprint, self._shape = answers, fingerprint, shape
        self.requests: list[ProbeRequest] = []
        self.logs: list[str] = []

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def num_probes(self) -> int:
        return len(self.requests)

    @property
    def configs(self) -> list[TrainConfig]:
        return [request.config for request in self.requests]

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        return self._shape

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        self.requests.append(request)
        self.logs.append(log.name)
        answer = (
            self._answers(request) if callable(self._answers) else self._answers[request.config]
        )
        return replace(
            answer,
            request_digest=request.digest,
            config=request.config,
            rung=request.rung,
            depth=request.depth,
            log=log.name,
            notes=(),
        )


def machine(
    limit_gib: float = 4.0, rate: Callable[[TrainConfig], float] = lambda config: 1000.0
) -> Callable[[ProbeRequest], ProbeResult]:
    """Answers of a device with `limit_gib` of memory that trains
    `rate(config)` tokens per second.
    """

    def answer(request: ProbeRequest) -> ProbeResult:
        config, need = request.config, need_gib(request.config)
        if need > limit_gib:
            detail = OomDetail(
                phase=Phase.BACKWARD,
                requested_gib=need - 0.75 * limit_gib,
                allocated_gib=0.75 * limit_gib,
                reserved_gib=0.75 * limit_gib,
                limit_gib=limit_gib,
            )
            return result(config, Outcome.OOM, oom=detail)
        micro_s = config.tokens / rate(config)
        measured = measurement(
            micro_s,
            need / 1.02,
            limit_gib=limit_gib,
            rest_s=(0.0, 0.0, 0.0),
            step_s=(2 * micro_s,) * 3,
            telemetry=None,
        )
        return result(config, measurement=measured)

    return answer


def need_gib(config: TrainConfig) -> float:
    """Weights take 1 GiB, or a quarter of it in 4 bits.

    1,024 tokens take 1 GiB, or half if all is recomputed.
    """
    weights = 0.25 if config.quantization == "nf4" else 1.0
    return weights + config.tokens / 1024 * (0.5 if config.checkpointing == "full" else 1.0)
