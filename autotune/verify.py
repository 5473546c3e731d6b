"""Holding the promise against reality: the exported script runs as a user would run it, beside what was promised."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.export import train
from autotune.exported import run_exported
from autotune.recipe import Recipe, Verification

TOLERANCE = 0.05
MICRO_STEPS = 200
START_S, SLOWER = 900.0, 10.0  # times the promised step: a run that takes longer is taken to hang


def verify(
    recipe: Recipe,
    out: Path,
    *,
    micro_steps: int = MICRO_STEPS,
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Verification:
    """Run the winner's `train.py` with random weights for at least so many micro batches. The device must be free.

    One evaluation goes before and one after, and adapters are saved at the end, since runs die there too. Its log stays
    in the study's directory `out`. Raises Cancelled where `should_stop` says so.
    """
    winner, accumulation = recipe.winner, recipe.workload.accumulation(recipe.winner.config)
    steps = max(math.ceil(micro_steps / accumulation), 2) + 1  # the first warms up
    promise = Verification(
        config=winner.config,
        micro_steps=(steps - 1) * accumulation,
        tolerance=tolerance,
        promised_tokens_per_s=winner.performance.tokens_per_second,
        promised_step_s=winner.performance.step_time_s,
        promised_gib=max(winner.measurement.peak_reserved_gib, 0.0),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    say(f"running the exported script for {steps} steps: {winner.config.label()}")
    folder = out / ".verify"
    shutil.rmtree(folder, ignore_errors=True)  # of a session that was killed
    folder.mkdir(parents=True)
    try:
        for name, text in train.export(recipe).items():
            (folder / name).write_text(text, encoding="utf-8")
        arguments = ["--random-weights", "--max-steps", str(steps), "--held-out", "1", str(winner.config.seq_len)]
        arguments += ["--output-dir", "saved" if winner.config.method == "lora" else ""]
        seconds = START_S + SLOWER * steps * winner.performance.step_time_s
        log = out / "logs" / "verify.log"
        on_cpu = recipe.device.kind == "cpu"
        done, reason = run_exported(folder, arguments, log, seconds=seconds, should_stop=should_stop, on_cpu=on_cpu)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done_as(promise, done, reason, steps)


def done_as(promise: Verification, done: dict[str, Any] | None, reason: str | None, steps: int) -> Verification:
    """With what the script said of itself."""
    if done is None:
        return replace(promise, reason=reason or "it said nothing")
    seconds = done.get("seconds_per_step")
    if done.get("steps") != steps or not isinstance(seconds, int | float) or not seconds > 0:
        return replace(promise, reason=f"it took {done.get('steps')} steps of {steps}, of {seconds} s")
    return replace(promise, seconds_per_step=float(seconds), reserved_gib=done.get("peak_reserved_gib"))
