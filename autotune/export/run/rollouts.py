"""Runs TRL's GRPOTrainer for a few steps, with a log of its phases.

The weights are random. The model ends a completion at each token with the same probability,
and the reward is the length.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.core.rollout_types import ENGINE_VARIABLES
from autotune.export.rollout_run import LONGEST_STEPS, STEPS, RolloutRun
from autotune.export.run.process import run_exported, write_files
from autotune.trainer.settings import ALLOCATOR_VARIABLE, ALLOCATORS

RUN_FILE, STEPS_FILE = "run.json", "steps.jsonl"
MODEL_S = 600.0  # seconds in which the model must be written
LIMIT_S = 1800.0  # seconds in which the run must end
HOME = str(Path(__file__).absolute().parents[3])  # the directory that holds the package


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
        environment=_environment("fixed"),
    )
    return made if isinstance(made, str) else None


def _environment(allocator: str) -> dict[str, str]:
    """The environment of a run with a kind of torch's allocator."""
    paths = filter(None, [HOME, os.environ.get("PYTHONPATH")])
    variables = {
        ALLOCATOR_VARIABLE: ALLOCATORS[allocator],
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return ENGINE_VARIABLES | variables


def run_trl(
    folder: Path,
    arguments: dict[str, Any],
    lora: dict[str, Any] | None,
    *,
    mean_tokens: float,
    steps: int = STEPS,
    longest_steps: tuple[int, ...] = LONGEST_STEPS,
    updates: int = 1,
    num_gpus: int = 1,
    allocator: str = "expandable",
    limit_s: float = LIMIT_S,
    should_stop: Callable[[], bool] = lambda: False,
) -> RolloutRun:
    """Run TRL's trainer on the model and the prompts in `folder`.

    `arguments` go to GRPOConfig, and `lora` to PEFT's LoraConfig unless it is None. The mean
    length of completions is `mean_tokens`; in `longest_steps`, every completion has the largest.
    Each generation has `updates` optimizer steps. On several GPUs, each GPU trains its part of the
    completions, and `arguments` are for one rank. `allocator` is the kind of torch's allocator: the
    exported script's, or "fixed", which TRL's users have.
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
    script, words = "autotune.probe.grpo_entry", [RUN_FILE]
    if num_gpus > 1:
        words = [f"--nproc_per_node={num_gpus}", "--module", script, RUN_FILE]
        script = "torch.distributed.run"
    done = run_exported(
        folder,
        words,
        folder / "trl.log",
        limit_s=limit_s,
        should_stop=should_stop,
        script=script,
        num_gpus=num_gpus,
        environment=_environment(allocator),
    )
    if isinstance(done, str):
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        finished = tuple(map(json.loads, lines))
        return RolloutRun(steps=finished, longest=longest_steps, updates=updates, problem=done)
    return RolloutRun(
        steps=tuple(done["steps"]),
        longest=longest_steps,
        updates=updates,
        lengths=tuple(map(tuple, done["lengths"])),
        start_s=done["start_s"],
    )
