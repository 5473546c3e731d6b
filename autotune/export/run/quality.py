"""Measures the held-out losses of the finalists, by short real trainings on the user's examples.

The exported script trains all finalists on the same examples with the same seed. The script never
trains on the held-out examples, and measures their loss before and after the training. The speed of
a configuration does not show how well the model learns. These losses are only a weak hint, because
a training has few steps and one seed.
"""

import json
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.catalog import ModelSpec
from autotune.core.errors import Cancelled, UsageError
from autotune.export import script
from autotune.export.run.process import run_exported, scratch_folder, time_limit_s, write_files
from autotune.problem.dataset import dataset_errors
from autotune.problem.workload import Workload
from autotune.study.summary import Candidate, Learned, Quality, Recipe
from autotune.trainer.forms import COLUMNS
from autotune.trainer.reading import read_rows

FINALISTS = 4
STEPS = 20  # the optimizer steps of each finalist's training; fewer if the dataset is small
HELD_OUT = 64  # the largest number of held-out examples
HELD_OUT_SHARE = 0.1  # the largest share of all examples that is held out


def measurement_obstacle(model: ModelSpec, workload: Workload, dataset: str | None) -> str | None:
    """Return the reason why held-out losses cannot be measured, or None if they can be measured."""
    if workload.pictured:
        return "examples with images are not supported"
    if model.weights is None:
        return "it needs real weights, from a local directory (--model DIR)"
    if dataset is None:
        return "it needs examples to learn from (--dataset FILE)"
    if model.tokenizer != model.weights:
        return f"it needs the model's tokenizer beside its weights, in {model.weights}"
    if _num_steps(workload) < 1:
        return (
            f"{workload.lengths.number:,} examples are too few:"
            f" some are held out, and a step needs {workload.global_batch}"
        )
    return None


def compare(
    recipe: Recipe,
    others: list[Candidate],
    dataset: Path,
    out: Path,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
    *,
    split: str | None = None,
) -> Quality:
    """Train the winner, the baseline and the other finalists, and report their held-out losses.

    No other process may use the device. `out` is the study's directory, which gets a log for each
    finalist. After a stop request, the result has only the finalists whose training had finished.

    Raises:
        UsageError: The dataset has fewer rows than when the study read it.
        OSError: The disk has no room for the sample.
    """
    first = [recipe.winner, recipe.baseline] if recipe.baseline else [recipe.winner]
    candidates = {candidate.config: candidate for candidate in [*first, *others]}
    finalists = list(candidates.values())[:FINALISTS]
    steps = _num_steps(recipe.workload)
    quality = Quality(
        steps=steps,
        trained_on=steps * recipe.workload.global_batch,
        held_out=num_held_out(recipe.workload),
        tokens=max(candidate.config.seq_len for candidate in finalists),
    )

    learned: list[Learned] = []
    with suppress(Cancelled), scratch_folder(out / ".quality") as scratch:
        examples = sample(
            dataset, split, recipe.workload.lengths.number, quality.trained_on, quality.held_out
        )
        write_files(scratch, {"examples.jsonl": examples})

        for number, candidate in enumerate(finalists, 1):
            say(f"learning, {number} of {len(finalists)}: {candidate.config.label()}")
            # An exported script computes its number of warm-up steps from the number of steps in
            # `cost`, so `cost` gets the number of steps of this short run.
            short = replace(candidate, cost=replace(candidate.cost, num_steps=steps))
            folder = scratch / candidate.config.digest
            write_files(folder, script.export(replace(recipe, winner=short)))
            log = out / "logs" / f"quality-{candidate.config.digest}.log"
            learned.append(_train(candidate, quality, folder, log, should_stop))

    return replace(quality, learned=tuple(learned))


def _num_steps(workload: Workload) -> int:
    return min(STEPS, (workload.lengths.number - num_held_out(workload)) // workload.global_batch)


def num_held_out(workload: Workload, most: int = HELD_OUT) -> int:
    """Return the number of held-out examples: HELD_OUT_SHARE of all, but at most `most`."""
    return min(most, max(1, round(HELD_OUT_SHARE * workload.lengths.number)))


def sample(
    dataset: Path, split: str | None, number: int, num_trained: int, num_held_out: int
) -> str:
    """Draw random rows of a dataset: the rows to train on, followed by the held-out rows.

    Only the first `number` rows of the dataset are used. The result has one JSON object per line.

    Raises UsageError if the dataset has fewer than `number` rows.
    """
    chosen = random.Random(0).sample(range(number), num_trained + num_held_out)  # noqa: S311
    places = {row: place for place, row in enumerate(chosen)}
    lines = [""] * len(chosen)

    with dataset_errors():
        for index, (_, row) in enumerate(read_rows(dataset, split)):
            if index in places:
                example = {name: row[name] for name in COLUMNS if row.get(name) is not None}
                lines[places[index]] = json.dumps(example)

    if "" in lines:
        raise UsageError(
            f"{dataset} has fewer examples than when the study read it",
            remedy="run again on the whole file",
        )
    return "\n".join(lines) + "\n"


def _train(
    candidate: Candidate, quality: Quality, folder: Path, log: Path, should_stop: Callable[[], bool]
) -> Learned:
    """Train one finalist with the script in `folder`. Raises Cancelled after a stop request."""
    arguments = ["--dataset", "../examples.jsonl", "--max-steps", str(quality.steps)]
    arguments += ["--output-dir", ""]
    arguments += ["--held-out", str(quality.held_out), str(quality.tokens)]
    arguments += ["--report-to", "none"]

    limit_s = time_limit_s(quality.steps, candidate.performance.step_time_s)
    started = time.monotonic()
    result = run_exported(folder, arguments, log, limit_s=limit_s, should_stop=should_stop)
    return Learned(
        config=candidate.config,
        full_run_hours=candidate.cost.full_run_hours,
        full_run_usd=candidate.cost.full_run_usd,
        seconds=time.monotonic() - started,
        **_losses(result, quality.steps),
    )


def _losses(result: dict[str, Any] | str, steps: int) -> dict[str, Any]:
    """Return `loss_before` and `loss_after` from the script's output, or else the `reason`."""
    if isinstance(result, str):
        return {"reason": result}
    try:
        before, after = result["held_out_loss"]
        done = result["steps"]
    except (ValueError, KeyError, TypeError):
        return {"reason": "the script printed no losses"}
    if done != steps:
        return {"reason": f"the training took {done} of {steps} steps"}
    if not (math.isfinite(before) and math.isfinite(after)):
        return {"reason": f"the loss went from {before} to {after}"}
    return {"loss_before": before, "loss_after": after}
