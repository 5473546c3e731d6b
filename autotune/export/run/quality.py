"""What the finalists learn: a short real training of each on the user's own examples, by the exported script itself.

All train on the same examples from the same seed, and none on those held out, whose loss is told before and after.
Speed says nothing of what a configuration learns. This does, a little: a few steps, from one seed.
"""

import json
import math
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.catalog import ModelSpec
from autotune.core.errors import Cancelled, UsageError
from autotune.export import script
from autotune.export.run.process import run_exported
from autotune.problem.dataset import COLUMNS, read_rows
from autotune.problem.workload import Workload
from autotune.study.summary import Candidate, Learned, Quality, Recipe

FINALISTS = 4
STEPS, HELD_OUT = 20, 64  # optimizer steps of each, and examples that only tell a loss: fewer of a small dataset
HELD_OUT_SHARE = 0.1
SLOWER = 10.0  # times the measured step: training that takes longer is taken to hang
START_S = 900.0


def impossible(model: ModelSpec, workload: Workload, dataset: str | None) -> str | None:
    """Why nothing can be learned here; None where it can."""
    if model.weights is None:
        return "it needs real weights, from a local directory (--model DIR)"
    if dataset is None:
        return "it needs examples to learn from (--dataset FILE)"
    if model.tokenizer != model.weights:
        return f"it needs the model's tokenizer beside its weights, in {model.weights}"
    if _steps(workload) < 1:
        return f"{workload.lengths.number:,} examples are too few for a step of {workload.global_batch}"
    return None


def compare(
    recipe: Recipe,
    others: list[Candidate],
    dataset: Path,
    out: Path,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> Quality:
    """Train the winner, the baseline and the other finalists, and tell what each learned. The device must be free.

    `out` is the study's directory: logs stay there. Where `should_stop` says so, those are told that came through.

    Raises:
        UsageError: the dataset cannot be read any more.
        OSError: there is no room for the sample.
    """
    first = [recipe.winner, recipe.baseline] if recipe.baseline else [recipe.winner]
    candidates = list({one.config: one for one in [*first, *others]}.values())[:FINALISTS]
    workload, steps = recipe.workload, _steps(recipe.workload)
    quality = Quality(
        steps=steps,
        trained_on=steps * workload.global_batch,
        held_out=_held_out(workload),
        tokens=max(one.config.seq_len for one in candidates),
    )
    learned: list[Learned] = []
    scratch = out / ".quality"
    shutil.rmtree(scratch, ignore_errors=True)  # of a session that was killed
    scratch.mkdir()
    try:
        examples = scratch / "examples.jsonl"
        _sample(dataset, workload.lengths.number, quality, examples)
        for number, one in enumerate(candidates, 1):
            say(f"learning, {number} of {len(candidates)}: {one.config.label()}")
            folder = scratch / one.config.digest
            folder.mkdir()
            # As long as this run: the warm-up is a share of it.
            short = replace(one, cost=replace(one.cost, num_steps=steps))
            for name, text in script.export(replace(recipe, winner=short)).items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
            log = out / "logs" / f"quality-{one.config.digest}.log"
            on_cpu = recipe.device.kind == "cpu"
            learned.append(_learn(one, quality, folder, log, should_stop, on_cpu=on_cpu))
    except Cancelled:
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return replace(quality, learned=tuple(learned))


def _steps(workload: Workload) -> int:
    return min(STEPS, (workload.lengths.number - _held_out(workload)) // workload.global_batch)


def _held_out(workload: Workload) -> int:
    return min(HELD_OUT, max(1, round(HELD_OUT_SHARE * workload.lengths.number)))


def _sample(dataset: Path, number: int, quality: Quality, out: Path) -> None:
    """The examples to train on in a random order, then those held out, as JSON lines."""
    chosen = random.Random(0).sample(range(number), quality.trained_on + quality.held_out)  # noqa: S311
    wanted = {row: place for place, row in enumerate(chosen)}
    lines = [""] * len(chosen)
    for index, row in enumerate(read_rows(dataset)):
        if (place := wanted.get(index)) is not None:
            lines[place] = json.dumps({name: row[name] for name in COLUMNS if row.get(name) is not None})
    if "" in lines:
        raise UsageError(f"{dataset} has fewer rows than at the start", remedy="run again on the whole file")
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _learn(
    one: Candidate, quality: Quality, folder: Path, log: Path, should_stop: Callable[[], bool], *, on_cpu: bool
) -> Learned:
    """One finalist's training, in `folder`. Raises Cancelled."""
    arguments = ["--dataset", "../examples.jsonl", "--max-steps", str(quality.steps), "--output-dir", ""]
    arguments += ["--held-out", str(quality.held_out), str(quality.tokens)]
    begin, seconds = time.monotonic(), START_S + SLOWER * quality.steps * one.performance.step_time_s
    result, reason = run_exported(folder, arguments, log, seconds=seconds, should_stop=should_stop, on_cpu=on_cpu)
    learned = Learned(
        config=one.config,
        full_run_hours=one.cost.full_run_hours,
        full_run_usd=one.cost.full_run_usd,
        seconds=time.monotonic() - begin,
    )
    if result is None:
        return replace(learned, reason=reason)
    try:
        (before, after), steps = result["held_out_loss"], result["steps"]
    except (ValueError, KeyError, TypeError):
        return replace(learned, reason="it did not say how it went")
    if steps != quality.steps:
        return replace(learned, reason=f"it took {steps} steps of {quality.steps}")
    if not (math.isfinite(before) and math.isfinite(after)):
        return replace(learned, reason=f"its loss went from {before} to {after}")
    return replace(learned, loss_before=before, loss_after=after)
