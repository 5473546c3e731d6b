"""The plan for one GRPO run on one card."""

from dataclasses import dataclass
from typing import ClassVar

from autotune.core.json_view import keys
from autotune.core.notebook import ShownAsTable
from autotune.core.probe_types import Evidence, Phase
from autotune.core.rollout_types import EngineMeasurement
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib
from autotune.export.rollout_run import RolloutVerification
from autotune.prediction.estimate import MemoryBounds
from autotune.problem.length_distribution import Lengths
from autotune.problem.rollouts import Rollouts
from autotune.problem.task import Task
from autotune.study.rollout_search import MeasuredLayout, TwoGpus


def by_phase(phases: dict[Phase, MemoryBounds]) -> dict[str, tuple[float, float | None]]:
    """Return the lowest and the highest possible peak of each phase, in GiB."""
    return {str(phase): bounds.bounds_gib for phase, bounds in phases.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A configuration of the training and of the engine that generates, with its memory.

    `state` is FITS, TIGHT or OOM for completions of the longest length. `cached_tokens` is the
    least number of tokens that the engine's cache holds, or None if unknown.
    """

    JSON: ClassVar = keys(
        "config",
        label="config.label()",
        vllm_gpu_memory_utilization="rollouts.engine.share",
        vllm_enable_sleep_mode="rollouts.engine.sleeps",
        vllm_max_model_length="rollouts.engine.max_tokens",
        fits="state",
        phases="bounds_of_phases",
        peak_gib="bounds.bounds_gib",
        peak_phase="bounds.reported.phase",
        memory_gib="bounds.reported",
        cached_tokens="cached_tokens",
    )

    config: TrainConfig
    rollouts: Rollouts
    phases: dict[Phase, MemoryBounds]
    bounds: MemoryBounds
    state: str
    cached_tokens: float | None

    @property
    def bounds_of_phases(self) -> dict[str, tuple[float, float | None]]:
        """The lowest and the highest possible peak of each phase, in GiB."""
        return by_phase(self.phases)

    @property
    def need_gib(self) -> float:
        """The upper bound of the memory at the peak."""
        return self.bounds.reported.peak_reserved_gib


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RolloutPlan(ShownAsTable):
    """The plan for one GRPO run on one card.

    `best` is None if no layout is certain to fit; `leanest` needs the least memory. The leanest
    layout fits with completions of at most `fits_up_to` tokens. `fits_up_to` is None if `best` is
    known, or if the layout fits with no length. `change` names options that make the run fit, or
    "".
    """

    JSON: ClassVar = keys(
        model="task.model.name",
        device="task.device.name",
        workload=keys(
            prompts="task.workload.lengths.facts()",
            completions="completions.facts()",
            longest_prompt="leanest.rollouts.prompt_tokens",
            max_completion="leanest.rollouts.completion_tokens",
            num_generations="leanest.rollouts.num_generations",
            completions_at_once="leanest.rollouts.sequences",
            has_reference="leanest.rollouts.has_reference",
        ),
    ) | keys(
        *("limit_gib", "best", "leanest", "fits_up_to", "change", "reason", "how_sure", "evidence")
    )
    evidence: ClassVar[Evidence] = Evidence.ESTIMATED

    task: Task
    completions: Lengths
    limit_gib: float
    best: Layout | None
    leanest: Layout
    fits_up_to: int | None
    change: str
    reason: str
    how_sure: str

    def facts(self) -> dict[str, str]:
        """Return the best layout with its memory or, if there is none, the leanest layout."""
        chosen = self.best or self.leanest
        need = f"{fmt_gib(chosen.need_gib)} of {fmt_gib(self.limit_gib)}, {chosen.state}"
        return {
            "plan": f"{self.task.model.name} on {self.task.device.label}, grpo",
            "configuration": chosen.config.label(),
            "vLLM's share": f"{chosen.rollouts.engine.share:g}",
            "memory": need,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RolloutStudy(ShownAsTable):
    """The measured layouts of a GRPO run on one card, and the fastest that surely fits.

    `best` is None if no layout fits. `updates` is the number of optimizer steps for each
    generation, and `iterations` how often they repeat. `verification` compares the best layout with
    TRL's own run, if the user asked for it.
    """

    JSON: ClassVar = keys(
        model="task.model.name",
        device="task.device.name",
        workload=keys(
            prompts="task.workload.lengths.facts()",
            completions="completions.facts()",
            longest_prompt="rollouts.prompt_tokens",
            max_completion="rollouts.completion_tokens",
            num_generations="rollouts.num_generations",
            completions_at_once="rollouts.sequences",
            updates="updates",
            iterations="iterations",
            beta="beta",
        ),
    ) | keys("limit_gib", "engine", "best", "layouts", "two_gpus", "verification", "evidence")
    evidence: ClassVar[Evidence] = Evidence.MEASURED

    task: Task
    rollouts: Rollouts
    completions: Lengths
    limit_gib: float
    updates: int
    iterations: int
    beta: float
    engine: EngineMeasurement
    layouts: tuple[MeasuredLayout, ...]
    best: MeasuredLayout | None
    two_gpus: TwoGpus
    verification: RolloutVerification | None = None

    def facts(self) -> dict[str, str]:
        """Return the best layout with its speed and its memory."""
        study = f"{self.task.model.name} on {self.task.device.label}, grpo"
        if self.best is None or self.best.step is None:
            return {"study": study, "best": "no layout fits"}
        phase, peak_gib = self.best.step.peak
        return {
            "study": study,
            "engine": self.engine.engine,
            "configuration": self.best.config.label(),
            "speed": f"{self.best.score:.3g} prompts/s",
            "memory": f"{fmt_gib(peak_gib)} of {fmt_gib(self.limit_gib)} in {phase}",
        }
