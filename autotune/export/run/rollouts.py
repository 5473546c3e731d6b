"""Runs TRL's GRPOTrainer for a few steps, and compares its phases with a composed step.

Both sides have random weights. The model ends a completion at each token with the same probability,
and the reward is the length.
"""

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from autotune.core.json_view import fields_plus
from autotune.core.probe_types import Phase
from autotune.core.rollout_types import ENGINE_VARIABLES
from autotune.export.run.process import run_exported, write_files
from autotune.prediction.rollout_step import UPDATE, RolloutStep
from autotune.trainer.settings import ALLOCATOR_VARIABLE, ALLOCATORS

STEPS = 8
LONGEST_STEPS = (3, 4, 5)  # the steps in which every completion has the largest length
RUN_FILE, STEPS_FILE = "run.json", "steps.jsonl"
MODEL_S = 600.0  # seconds in which the model must be written
LIMIT_S = 1800.0  # seconds in which the run must end
HOME = str(Path(__file__).absolute().parents[3])  # the directory that holds the package
OUT_OF_MEMORY = ("out of memory", "No available memory for the cache blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRun:
    """TRL's run, by phases.

    Attributes:
        steps: For each finished step, its number, the seconds and the peak of each phase in GiB.
        lengths: The tokens of all completions of each generation.
        start_s: The seconds from the start of the process to the first step; None if it failed.
        problem: The reason why the run failed, or None.
    """

    steps: tuple[dict[str, Any], ...]
    lengths: tuple[tuple[int, ...], ...] = ()
    start_s: float | None = None
    problem: str | None = None

    @property
    def out_of_memory(self) -> bool:
        """Whether the run failed because memory ran out."""
        return self.problem is not None and any(words in self.problem for words in OUT_OF_MEMORY)

    @property
    def usual(self) -> list[dict[str, Any]]:
        """The steps with usual completions, without the first, which warms up."""
        return [one for one in self.steps if one["step"] > 0 and one["step"] not in LONGEST_STEPS]

    @property
    def step_s(self) -> float | None:
        """The median of the seconds of a usual step."""
        seconds = [sum(one["seconds"].values()) for one in self.usual]
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
    `phase_errors` are those of the memory in the generation, the probabilities and the update.
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
        "update": UPDATE,
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


def write_model(
    folder: Path,
    model: dict[str, Any],
    device: str,
    prompts: Sequence[int],
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> str | None:
    """Write a model with random bf16 weights, a tokenizer, and prompts of these lengths.

    Does nothing if they are there. Returns the reason of a failure, or None.
    """
    if (folder / "data" / "test.jsonl").exists():
        return None
    wanted = {
        "model": model,
        "device": device,
        "rows": len(prompts),
        "lengths": list(prompts),
        "held_out": [1],
        "objective": "grpo",
    }
    write_files(folder, {"model.json": json.dumps(wanted)})
    module = "autotune.probe.synthetic_model"
    log = folder / "model.log"
    made = run_exported(
        folder,
        ["model.json"],
        log,
        limit_s=MODEL_S,
        should_stop=should_stop,
        script=module,
        environment=_environment(),
    )
    return made if isinstance(made, str) else None


def _environment() -> dict[str, str]:
    """The environment of a run: TRL's users have torch's usual allocator."""
    paths = filter(None, [HOME, os.environ.get("PYTHONPATH")])
    allocator = {ALLOCATOR_VARIABLE: ALLOCATORS["fixed"]}
    return ENGINE_VARIABLES | allocator | {"PYTHONPATH": os.pathsep.join(paths)}


def run_trl(
    folder: Path,
    arguments: dict[str, Any],
    lora: dict[str, Any] | None,
    *,
    mean_tokens: float,
    steps: int = STEPS,
    longest_steps: Sequence[int] = LONGEST_STEPS,
    limit_s: float = LIMIT_S,
    should_stop: Callable[[], bool] = lambda: False,
) -> RolloutRun:
    """Run TRL's trainer on the model and the prompts in `folder`.

    `arguments` are those of GRPOConfig, and `lora` those of PEFT's LoraConfig, or None. The mean
    length of completions is `mean_tokens`; in `longest_steps`, every completion has the largest.
    """
    wanted = {
        "arguments": arguments | {"max_steps": steps, "logging_steps": 1},
        "lora": lora,
        "mean_tokens": mean_tokens,
        "longest_steps": list(longest_steps),
    }
    write_files(folder, {RUN_FILE: json.dumps(wanted)})
    file = folder / STEPS_FILE
    file.unlink(missing_ok=True)
    done = run_exported(
        folder,
        [RUN_FILE],
        folder / "trl.log",
        limit_s=limit_s,
        should_stop=should_stop,
        script="autotune.probe.grpo_entry",
        environment=_environment(),
    )
    if isinstance(done, str):
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return RolloutRun(steps=tuple(map(json.loads, lines)), problem=done)
    return RolloutRun(
        steps=tuple(done["steps"]),
        lengths=tuple(map(tuple, done["lengths"])),
        start_s=done["start_s"],
    )
