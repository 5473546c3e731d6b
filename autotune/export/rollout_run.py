"""The phases of TRL's run of a GRPO layout, and their comparison with a composed step."""

import statistics
from dataclasses import dataclass, field
from typing import Any, ClassVar

from autotune.core.json_view import fields_plus
from autotune.core.probe_types import Phase
from autotune.prediction.rollout_step import OF_UPDATE, RolloutStep

STEPS = 8
LONGEST_STEPS = (3, 4, 5)  # the steps in which every completion has the largest length
OUT_OF_MEMORY = ("out of memory", "No available memory for the cache blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRun:
    """TRL's run, by phases.

    Attributes:
        steps: Each finished step's number, with the seconds and the peak in GiB of its phases.
        lengths: For each generation, the number of tokens of each completion.
        start_s: The seconds from the start of the process to the first step, or None without it.
        problem: The reason why the run failed, or None.
        longest: The numbers of the steps whose completions all had the largest length.
        updates: The optimizer steps for each generation.
    """

    steps: tuple[dict[str, Any], ...]
    longest: tuple[int, ...] = LONGEST_STEPS
    updates: int = 1
    lengths: tuple[tuple[int, ...], ...] = ()
    start_s: float | None = None
    problem: str | None = None

    @property
    def out_of_memory(self) -> bool:
        """Whether the run failed because memory ran out."""
        return self.problem is not None and any(words in self.problem for words in OUT_OF_MEMORY)

    @property
    def usual(self) -> list[dict[str, Any]]:
        """The steps with usual completions, without the first generation, which warms up."""
        return [
            one
            for one in self.steps
            if one["step"] >= self.updates and one["step"] not in self.longest
        ]

    @property
    def step_s(self) -> float | None:
        """The seconds of a usual generation with its updates: the median if there is one update."""
        seconds = [sum(one["seconds"].values()) for one in self.usual]
        if self.updates > 1:
            return self.updates * statistics.fmean(seconds) if seconds else None
        return statistics.median(seconds) if seconds else None

    @property
    def phase_s(self) -> dict[str, float]:
        """The median of the seconds that a usual step spends in each phase."""
        names = dict.fromkeys(name for one in self.usual for name in one["seconds"])
        return {
            name: statistics.median(one["seconds"].get(name, 0.0) for one in self.usual)
            for name in names
        }

    @property
    def phase_gib(self) -> dict[str, float]:
        """The largest peak of each phase in all steps."""
        names = dict.fromkeys(name for one in self.steps for name in one["peak_gib"])
        return {name: max(one["peak_gib"].get(name, 0.0) for one in self.steps) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutVerification:
    """The composed step of a layout, compared with TRL's run.

    An error is the prediction divided by the measurement, minus 1; None if the run failed early.
    `phase_errors` compares the memory in the generation, the probabilities and the update.
    """

    JSON: ClassVar = fields_plus()

    predicted_step_s: float
    step_s: float | None
    step_error: float | None
    phase_errors: dict[str, float] = field(default_factory=dict)
    phase_s: dict[str, float] = field(default_factory=dict)
    phase_gib: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    out_of_memory: bool = False
    problem: str | None = None


def compare(step: RolloutStep, run: RolloutRun) -> RolloutVerification:
    """Compare a composed step with TRL's run."""
    groups: dict[str, tuple[Phase, ...]] = {
        Phase.ROLLOUT.value: (Phase.ROLLOUT,),
        Phase.LOG_PROBS.value: (Phase.LOG_PROBS,),
        Phase.UPDATE.value: OF_UPDATE,
    }
    errors = {}
    for name, phases in groups.items():
        ours = [step.phase_gib[phase] for phase in phases if phase in step.phase_gib]
        theirs = [run.phase_gib[phase.value] for phase in phases if phase.value in run.phase_gib]
        if ours and theirs:
            errors[name] = max(ours) / max(theirs) - 1
    return RolloutVerification(
        predicted_step_s=step.seconds,
        step_s=run.step_s,
        step_error=step.seconds / run.step_s - 1 if run.step_s else None,
        phase_errors=errors,
        phase_s=run.phase_s,
        phase_gib=run.phase_gib,
        steps=len(run.steps),
        out_of_memory=run.out_of_memory,
        problem=run.problem,
    )
