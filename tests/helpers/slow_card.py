"""A card that answers `ReplayProber` by the formulas of memory and step time, on a clock of its
own.

So a whole study of a large model can be replayed in seconds, each probe of which takes its time on
that clock: loading, compiling, the steps before the timed ones, and these.
"""

from dataclasses import dataclass, field, replace

from autotune.core.knobs import SELECTIVE
from autotune.core.probe_types import (
    ModelShape,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import CONTEXT_GIB, memory_breakdown
from autotune.prediction.step_time import estimate_step_time
from autotune.probe.schedule import Schedule
from autotune.problem.task import Task
from tests.helpers.factories import measurement, result

HEAD = 2  # embedding and head take as much as so many layers
WORKER_S, COMPILING_S = 10.0, 6.0


@dataclass(slots=True)
class SlowCard:
    """`layer_load_s` is what each layer adds to a load.

    `now` is the clock, `spent` what each probe took on it.
    """

    task: Task
    limit_gib: float
    layer_load_s: float
    now: float = WORKER_S
    spent: list[tuple[TrainConfig, int | None, float]] = field(default_factory=list)
    _loaded: set[int | None] = field(default_factory=set)
    _compiled: set[TrainConfig] = field(default_factory=set)

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=self.task.model.num_layers, prefix=0, period=1, plain_head=True, liger=True
        )

    def clock(self) -> float:
        return self.now

    def __call__(self, request: ProbeRequest) -> ProbeResult:
        config, layers = request.config, self.task.model.num_layers
        share = ((request.depth or layers) + HEAD) / (layers + HEAD)
        known = (
            replace(config, checkpointing="every_2")
            if config.checkpointing in SELECTIVE
            else config
        )
        need, time = (
            memory_breakdown(
                self.task.model, self.task.workload.longest_row_config(known), request.micro_steps
            ),
            estimate_step_time(self.task.model, self.task.workload.mean_row_config(known)),
        )
        assert need is not None and time is not None
        load_s = (
            0.0
            if request.depth in self._loaded
            else 1.0 + self.layer_load_s * (request.depth or layers)
        )
        if request.depth is not None:
            self._loaded.add(request.depth)  # truncated models wait in the worker
        peak_gib = need.peak_reserved_gib * share
        if peak_gib > self.limit_gib:
            return self._answer(
                config, request, load_s + 2 * time.micro_s * share, self._oom(peak_gib), {}
            )
        micro_s = time.micro_s * share
        schedule = Schedule.plan(request)
        round_s = schedule.round_micros * micro_s
        first_s = schedule.lead_micros * micro_s + round_s
        # which these do not change
        graph = replace(config, optimizer="adamw_torch_fused", double_quant=False)
        if config.compile != "none" and graph not in self._compiled:
            self._compiled.add(graph)
            first_s += COMPILING_S
        num_rounds = schedule.rounds_to_time(
            request, round_s / len(schedule.round), request.min_timed_s
        )
        steady_s = (num_rounds - schedule.first_counts(micro_s)) * round_s
        parts = {"load": load_s, "first_step": first_s, "steady": steady_s}
        measured = measurement(
            micro_s,
            peak_gib,
            micro_steps=request.micro_steps,
            step_s=(request.micro_steps * micro_s,) * 2,
            rest_s=(0.0,) * 2,
            host_micro_s=micro_s / 20,
            model_gib=need.weights * share,
            adapters_gib=need.adapters * share,
            gradients_gib=need.gradients * share,
            optimizer_gib=need.optimizer * share,
            phase_peak_gib={Phase.FORWARD: peak_gib * 0.9, Phase.BACKWARD: peak_gib},
            peak_reserved_gib=peak_gib,
            limit_gib=self.limit_gib,
            context_gib=CONTEXT_GIB,
            telemetry=None,
        )
        return self._answer(
            config, request, sum(parts.values()), result(config, measurement=measured), parts
        )

    def _answer(
        self,
        config: TrainConfig,
        request: ProbeRequest,
        seconds: float,
        answer: ProbeResult,
        parts: dict[str, float],
    ) -> ProbeResult:
        self.now += seconds
        self.spent.append((config, request.depth, seconds))
        return replace(answer, seconds=parts | {"total": seconds})

    def _oom(self, need_gib: float) -> ProbeResult:
        detail = OomDetail(
            phase=Phase.BACKWARD,
            requested_gib=need_gib - 0.9 * self.limit_gib,
            allocated_gib=0.9 * self.limit_gib,
            reserved_gib=0.9 * self.limit_gib,
            limit_gib=self.limit_gib,
        )
        return result(outcome=Outcome.OOM, phase=Phase.BACKWARD, oom=detail)
