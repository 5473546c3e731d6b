"""Searches for the fastest layout of a GRPO run on one card: engine, sleep, and training.

One engine and some trainings are measured apart, and `prediction.rollout_step` composes each pair
of them. The score is prompts per second. Generations, prompts per step and updates per generation
are given: they decide the learning, so that they are never traded for speed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from autotune.core.json_view import keys
from autotune.core.probe_types import Outcome, Phase, ProbeRequest, ProbeResult, Rung
from autotune.core.rollout_types import TRANSFORMERS, EngineMeasurement
from autotune.core.train_config import TrainConfig
from autotune.prediction.rollout_step import (
    OF_UPDATE,
    RolloutStep,
    compose,
    compose_apart,
    compose_halves,
)
from autotune.study.rollout_task import RolloutTask

FITS, TOO_LONG = "fits", "fits only shorter completions"
ALTERNATIONS = 10  # generations and updates by which the best layout shows fragmentation
GAIN = 0.01  # a smaller micro batch is tried if the last one was faster by this share
RECOMPUTED = ("none", "full")  # what TRL's trainer for GRPO can recompute


class Prober(Protocol):
    """A worker that answers requests."""

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """The result of one probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayout:
    """A layout with its composed step.

    `state` is FITS, TOO_LONG or the outcome of a failed probe. `phase` is the phase that ran out of
    memory. With TOO_LONG, completions of `breaks_at` tokens are the shortest that do not fit.
    `between_gib` is the memory that the training's allocator holds before each generation.
    """

    JSON: ClassVar = keys(
        "config",
        label="config.label()",
        vllm_gpu_memory_utilization="share",
        vllm_enable_sleep_mode="sleeps",
        fits="state",
        prompts_per_s="prompts_per_s",
        seconds="step.seconds",
        phase_s="step.phase_s",
        phase_gib="step.phase_gib",
        failed_in="phase",
        breaks_at="breaks_at",
        reason="reason",
    )

    config: TrainConfig
    share: float
    sleeps: bool
    state: str
    step: RolloutStep | None = None
    phase: Phase | None = None
    breaks_at: int | None = None
    reason: str | None = None
    between_gib: tuple[float, ...] = ()

    @property
    def prompts_per_s(self) -> float | None:
        """The score, or None for a layout that does not surely fit."""
        return self.step.prompts_per_s if self.step and self.state == FITS else None

    @property
    def score(self) -> float:
        """The score; 0 for a layout that does not surely fit."""
        return self.prompts_per_s or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The measured training of a configuration.

    `ran_out_in` is the phase in which the longest completions ran out of memory, or None. The
    result is then for usual completions.
    """

    config: TrainConfig
    request: ProbeRequest
    result: ProbeResult
    ran_out_in: Phase | None = None


@dataclass(slots=True)
class RolloutSearch:
    """A search with one engine that was measured at `share` of the card.

    `logs` is a folder for the logs of the probes. `trained` collects all measured trainings.
    """

    task: RolloutTask
    engine: EngineMeasurement
    share: float
    trainer: Prober
    logs: Path
    say: Callable[[str], None] = lambda text: None
    trained: list[Trained] = field(default_factory=list)

    def run(
        self, config: TrainConfig, choices: Mapping[str, Sequence[Any]]
    ) -> Iterator[MeasuredLayout]:
        """Yield layouts as they become known, the confirmed best last.

        The search begins with `config`. `choices` has the values of each knob that may change.
        """
        best: MeasuredLayout | None = None
        for layout in self._layouts(config, choices):
            yield layout
            if layout.score > (best.score if best else 0.0):
                best = layout
        if best is None:
            return
        others = (
            replace(best.config, **{name: value})
            for name, values in choices.items()
            if name not in ("micro_batch_size", "checkpointing")
            for value in values
            if value != getattr(best.config, name)
        )
        for other in others:
            for layout in self.compositions(self.train(other)):
                yield layout
                best = max(best, layout, key=lambda one: one.score)
        yield self.confirm(best)

    def _layouts(
        self, config: TrainConfig, choices: Mapping[str, Sequence[Any]]
    ) -> Iterator[MeasuredLayout]:
        """Yield layouts with shrinking micro batches, without and with recomputation.

        Large micro batches are measured first, because they are usually the fastest, and because a
        micro batch that does not fit ends soon. The first that gains nothing ends the search.
        Recomputation costs time, so that it is tried only for micro batches that need it.
        """
        sizes = sorted(choices.get("micro_batch_size", (config.micro_batch_size,)), reverse=True)
        sizes = [size for size in sizes if self.task.rows_per_update % size == 0]
        for recomputed in RECOMPUTED:
            if recomputed not in choices.get("checkpointing", (config.checkpointing,)):
                continue
            best, fitting = 0.0, None
            failed: list[Trained] = []
            for size in sizes:
                tried = replace(config, micro_batch_size=size, checkpointing=recomputed)
                trained = self.train(tried)
                if trained.result.outcome is Outcome.OOM:
                    failed.append(trained)
                    continue
                found = self.compositions(trained)
                yield from found
                score = max(layout.score for layout in found)
                if score:
                    fitting = fitting or trained
                    if score < best * (1 + GAIN):
                        break
                    best = score
            if failed and fitting is None:
                failed[-1] = self.train_usual(failed[-1])
            for trained in failed:
                yield from self.compositions(trained, fitting)
            if fitting is not None:
                sizes = [size for size in sizes if size > fitting.config.micro_batch_size]

    def train(self, config: TrainConfig, *, sleeps: bool = True, rung: Rung = Rung.FULL) -> Trained:
        """Measure the training of a configuration.

        The engine sleeps if it can, so that the training has the most room. A confirming probe
        alternates ALTERNATIONS times between generation and update.
        """
        sleeps = sleeps and bool(self.engine.asleep_gib)
        beside_gib = max(self.engine.asleep_gib if sleeps else self.engine.awake_gib)
        config = replace(config, seq_len=self.task.rollouts.longest)
        self.say(f"training: {config.label()}")
        request = self.task.training_request(config, sleeps=sleeps, engine_gib=beside_gib)
        if rung is Rung.CONFIRM:
            micros = ALTERNATIONS * request.micro_steps
            request = replace(request, rung=rung, min_timed_micros=micros)
        trained = Trained(config=config, request=request, result=self._probe(request))
        self.trained.append(trained)
        return trained

    def _probe(self, request: ProbeRequest) -> ProbeResult:
        return self.trainer.probe(request, self.logs / f"training-{len(self.trained):04d}.log")

    def train_usual(self, trained: Trained) -> Trained:
        """Measure a training that ran out of memory again, with usual completions only."""
        timed = tuple(kind for kind in trained.request.micro_batches if kind.share)
        if timed == trained.request.micro_batches:
            return trained
        self.say(f"training with usual completions: {trained.config.label()}")
        request = replace(trained.request, micro_batches=timed)
        usual = replace(
            trained,
            request=request,
            result=self._probe(request),
            ran_out_in=trained.result.phase,
        )
        self.trained.append(usual)
        return usual

    def compositions(
        self, trained: Trained, fitting: Trained | None = None
    ) -> list[MeasuredLayout]:
        """The layouts with this training: the engine stays awake, or sleeps if it can.

        `fitting` is a training with fewer rows, which tells at which length a training that ran out
        of memory breaks.
        """
        ways = (False, True) if self.engine.asleep_gib else (False,)
        return [self.layout(trained, sleeps=sleeps, fitting=fitting) for sleeps in ways]

    def layout(
        self, trained: Trained, *, sleeps: bool, fitting: Trained | None = None
    ) -> MeasuredLayout:
        """Compose a layout with this training."""
        result = trained.result
        layout = MeasuredLayout(
            config=trained.config, share=self.share, sleeps=sleeps, state=result.outcome
        )
        if result.outcome is not Outcome.OK or result.measurement is None:
            layout = replace(layout, phase=result.phase, reason=result.reason)
            if result.outcome is not Outcome.OOM or fitting is None:
                return layout
            breaks_at = breaking_length(
                self.task,
                self._step(fitting, sleeps=sleeps),
                fitting,
                rows=trained.config.micro_batch_size,
            )
            if self.task.rollouts.prompt_tokens + breaks_at < self.task.mean_length:
                return layout
            largest = self.task.rollouts.completion_tokens  # did not fit
            return replace(layout, state=TOO_LONG, breaks_at=min(breaks_at, largest))

        task, step = self.task, self._step(trained, sleeps=sleeps)
        between_gib = result.measurement.between_gib
        layout = replace(layout, step=step, between_gib=between_gib)
        phase, peak_gib = step.peak
        if trained.ran_out_in is None and peak_gib <= task.limit_gib:
            return replace(layout, state=FITS)
        layout = replace(layout, phase=trained.ran_out_in or phase)
        breaks_at = breaking_length(task, step, trained)
        if not 0 < breaks_at <= task.rollouts.completion_tokens:
            return replace(layout, state=Outcome.OOM)
        return replace(layout, state=TOO_LONG, breaks_at=breaks_at)

    def _step(self, trained: Trained, *, sleeps: bool) -> RolloutStep:
        """The step with a training that was measured."""
        task, measurement = self.task, trained.result.measurement
        assert measurement is not None
        return compose(
            measurement,
            self.engine,
            sleeps=sleeps,
            prompts=task.num_prompts,
            accumulation=task.accumulation(trained.config),
            updates=task.updates * task.iterations,
        )

    def confirm(self, best: MeasuredLayout) -> MeasuredLayout:
        """Measure the training of the best layout again, with its own sleep, ten times."""
        self.say("confirming the best layout")
        trained = self.train(best.config, sleeps=best.sleeps, rung=Rung.CONFIRM)
        return self.layout(trained, sleeps=best.sleeps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLayout:
    """A layout of two GPUs with its predicted step."""

    JSON: ClassVar = keys(
        label="config.label()",
        vllm_enable_sleep_mode="sleeps",
        prompts_per_s="step.prompts_per_s",
        phase_s="step.phase_s",
    )

    config: TrainConfig
    sleeps: bool
    step: RolloutStep


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoGpus:
    """The fastest layouts of two GPUs, predicted. A layout that does not fit is None.

    `colocated` is two GPUs that generate and train half of the completions each. `apart` is a GPU
    that trains and a GPU that generates.
    """

    JSON: ClassVar = keys("colocated", "apart", "faster")

    colocated: PairLayout | None
    apart: PairLayout | None

    @property
    def faster(self) -> str | None:
        """The name of the faster of the two layouts, or None if none fits."""
        named = {"colocated": self.colocated, "apart": self.apart}
        speeds = {name: one.step.prompts_per_s for name, one in named.items() if one}
        return max(speeds, key=lambda name: speeds[name], default=None)


def two_gpus(search: RolloutSearch, link_gb_s: float | None = None) -> TwoGpus:
    """Predict two GPUs from the phases of one, with the best training for each layout.

    `link_gb_s` is the rate between the GPUs; None leaves out the time of their exchange.
    """
    task, engine = search.task, search.engine
    colocated: list[PairLayout] = []
    apart: list[PairLayout] = []
    for trained in search.trained:
        measured, config = trained.result.measurement, trained.config
        if measured is None or trained.ran_out_in is not None:
            continue
        numbers: dict[str, Any] = {
            "prompts": task.num_prompts,
            "accumulation": task.accumulation(config),
            "updates": task.updates * task.iterations,
            "link_gb_s": link_gb_s,
        }
        ways = (False, True) if engine.asleep_gib else (False,)
        if numbers["accumulation"] > 1 and engine.half_s is not None:
            for sleeps in ways:
                step = compose_halves(measured, engine, sleeps=sleeps, **numbers)
                colocated.append(PairLayout(config=config, sleeps=sleeps, step=step))
        if task.rollouts.engine.kind != TRANSFORMERS:
            step = compose_apart(measured, engine, **numbers)
            apart.append(PairLayout(config=config, sleeps=False, step=step))

    def fastest(layouts: list[PairLayout]) -> PairLayout | None:
        fitting = [one for one in layouts if one.step.peak[1] <= task.limit_gib]
        return max(fitting, key=lambda one: one.step.prompts_per_s, default=None)

    return TwoGpus(colocated=fastest(colocated), apart=fastest(apart))


def breaking_length(
    task: RolloutTask, step: RolloutStep, trained: Trained, rows: int | None = None
) -> int:
    """The length of completions from which the layout runs out of memory; 0 if there is none.

    Above the memory of weights, gradients and optimizer, the memory of an update grows with the
    length and with the rows of a micro batch. `rows` is another number of rows than the training's.
    """
    measured = trained.result.measurement
    assert measured is not None
    state_gib = (
        measured.model_gib + measured.adapters_gib + measured.gradients_gib + measured.optimizer_gib
    )
    # An engine that stays awake may peak in the generation, beside the memory of the update.
    in_update = max(measured.phase_reserved_gib.get(phase, 0.0) for phase in OF_UPDATE)
    row_length = measured.row_length or task.rollouts.longest
    if trained.ran_out_in is not None and trained.config.packing:
        row_length = task.mean_length
    per_token = (in_update - state_gib) / row_length
    if rows is not None:
        per_token *= rows / trained.config.micro_batch_size
    if per_token <= 0:
        return 0
    _, peak_gib = step.peak
    room_gib = task.limit_gib - (peak_gib - in_update) - state_gib
    return max(math.floor(room_gib / per_token) - task.rollouts.prompt_tokens, 0)
