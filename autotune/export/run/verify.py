"""Holding the promise against reality: what was exported runs as a user would run it, beside what was promised."""

import itertools
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from autotune.core.errors import StorageError
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, fmt_seconds, gib
from autotune.export import script, trl
from autotune.export.run.process import run_exported
from autotune.probe.trl_entry import STEPS
from autotune.study.summary import Recipe, Verification

TOLERANCE = 0.05
MICRO_STEPS = 200
START_S, SLOWER = 900.0, 10.0  # times the promised step: a run that takes longer is taken to hang
FILES = {"train": "train.py", "trl": "trl_sft.yaml"}
ROWS = 1024  # of random tokens to make for TRL, at least, as far as they are trained on: then it begins anew
SHORT = 4  # a short row of a soak has at most so small a part of the tokens of a long one
HOME = str(Path(__file__).absolute().parents[3])  # where the package is found

Said = tuple[dict[str, Any] | None, str | None]  # as `run_exported` tells it
Run = Callable[..., Said]


def verify(
    recipe: Recipe,
    out: Path,
    *,
    form: str | None = None,
    soak: bool = False,
    micro_steps: int = MICRO_STEPS,
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Verification:
    """Run the winner's export with random weights for at least so many micro batches. The device must be free.

    `form` is one of `FILES`, by default that of the trainer that was probed. One evaluation goes before and one after,
    and adapters are saved at the end, since runs die there too. Its log stays in the study's directory `out`.

    Raises:
        Cancelled: where `should_stop` says so.
        StorageError: no room for random weights on disk, which `trl sft` reads.
    """
    winner, accumulation = recipe.winner, recipe.accumulation
    form = form or usual(recipe)
    steps = max(math.ceil(micro_steps / accumulation), 4 if soak else 2) + 1  # the first warms up
    promise = Verification(
        config=winner.config,
        micro_steps=(steps - 1) * accumulation,
        tolerance=tolerance,
        promised_tokens_per_s=winner.performance.tokens_per_second,
        promised_step_s=winner.performance.step_time_s,
        promised_gib=max(winner.measurement.peak_reserved_gib, 0.0),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        file=FILES[form],
        probed=form == usual(recipe),
        soak=soak,
    )
    step_s, name = winner.performance.step_time_s, FILES[form]
    say(f"running the exported {name} for {steps} steps, about {fmt_seconds(steps * step_s)}: {winner.config.label()}")
    folder = out / ".verify"
    shutil.rmtree(folder, ignore_errors=True)  # of a session that was killed
    folder.mkdir(parents=True)
    run = partial(
        run_exported,
        folder,
        log=out / "logs" / "verify.log",
        seconds=START_S + SLOWER * steps * step_s,
        should_stop=should_stop,
        on_cpu=recipe.device.kind == "cpu",
        while_it_runs=_how_far(folder / STEPS, steps, step_s, say),
    )
    lengths = worst(winner.config) if soak else None
    try:
        done, reason = (_trl if form == "trl" else _train)(recipe, folder, steps, lengths, run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done_as(promise, done, reason, steps)


def _how_far(file: Path, steps: int, step_s: float, say: Callable[[str], None]) -> Callable[[], None]:
    """Says after each tenth of the way how far a run is, by the file to which it adds a line for each step."""
    done = tenths = read = 0

    def look() -> None:
        nonlocal done, tenths, read
        with suppress(FileNotFoundError), file.open("rb") as lines:
            lines.seek(read)
            new = lines.read()
            done, read = done + new.count(b"\n"), read + len(new)
        if done * 10 // steps > tenths:
            tenths = done * 10 // steps
            left = f"about {fmt_seconds((steps - done) * step_s)} left" if done < steps else "the last"
            say(f"verifying: step {done} of {steps}, {left}")

    return look


def usual(recipe: Recipe) -> str:
    """The format of what was probed."""
    return "trl" if recipe.trainer == "trl" else "train"


def worst(config: TrainConfig) -> list[int]:
    """Lengths that strain an allocator: about every second micro batch has a row of `seq_len` tokens, or short ones."""
    drawn, share = random.Random(0), 1 - 0.5 ** (1 / config.micro_batch_size)  # noqa: S311 (no secret hangs on it)
    shortest, short = 2, max(config.seq_len // SHORT, 2)  # a single token predicts nothing
    mixed = [config.seq_len if drawn.random() < share else drawn.randint(shortest, short) for _ in range(ROWS - 2)]
    return [config.seq_len, short, *mixed]


def _train(recipe: Recipe, folder: Path, steps: int, lengths: list[int] | None, run: Run) -> Said:
    _write(folder, script.export(recipe))
    config = recipe.winner.config
    arguments = ["--random-weights", "--max-steps", str(steps), "--held-out", "1", str(config.seq_len)]
    arguments += ["--progress", STEPS]
    arguments += ["--output-dir", "saved" if config.method == "lora" else ""]
    if lengths:
        _write(folder, {"lengths.txt": "\n".join(map(str, lengths))})
        arguments += ["--lengths", "lengths.txt"]
    return run(arguments)


def _trl(recipe: Recipe, folder: Path, steps: int, lengths: list[int] | None, run: Run) -> Said:
    """Through accelerate's launcher, as `trl sft` does; only that the script it starts is TRL's own with a clock."""
    config, workload = recipe.winner.config, recipe.workload
    _check_room(recipe, folder)
    every = math.ceil(steps / 4) if lengths else steps  # a soak does the same in each quarter
    batch = round(recipe.shape.examples_per_step)
    made = {
        "model": recipe.model.config,
        "device": "cpu" if recipe.device.kind == "cpu" else "cuda",
        "rows": batch * min(steps, math.ceil(ROWS / batch)),  # whole steps: the last of a pass would be shorter
        "lengths": lengths or workload.lengths.sample(script.SAMPLED, config.seq_len),
        "held_out": [config.seq_len] * config.micro_batch_size,
    }
    files = trl.export(recipe) | {"made.json": json.dumps(made)}
    _write(folder, files)
    environment = {
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")])),  # of the folder, not ours
    }
    done, reason = run(["made.json"], script="autotune.probe.synthetic_model", environment=environment)
    if done is None:
        return None, f"no random weights could be made: {reason}"
    overrides = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        "output_dir": folder / "saved",
        "max_steps": steps,
        "eval_on_start": True,
        "eval_strategy": "steps",
        "eval_steps": every,
        "per_device_eval_batch_size": config.micro_batch_size,
        "save_strategy": "steps" if config.method == "lora" else "no",
        "save_steps": every,
        "save_total_limit": 1,
    }
    arguments = [
        "--quiet",
        *trl.launch(recipe),
        "--module",
        "autotune.probe.trl_entry",
        "--config",
        "trl_sft.yaml",
    ]
    arguments += itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in overrides.items())
    return run(arguments, script="accelerate.commands.launch", environment=environment)


def _check_room(recipe: Recipe, folder: Path) -> None:
    """For bf16 weights; TRL's script saves what it trained at the end, of full fine-tuning all of it."""
    parameters, config = recipe.winner.measurement.total_params, recipe.winner.config
    saved = 0 if config.method == "lora" else 2 if config.precision == "bf16_pure" else 4
    needed, free = gib(parameters * (2 + saved)), gib(shutil.disk_usage(folder).free)
    if needed > free:
        raise StorageError(
            f"random weights of this model take {fmt_gib(needed)} at {folder.parent}, {fmt_gib(free)} are free",
            remedy="free some, or verify the study's train.py (--format train), which needs no files",
        )


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def done_as(promise: Verification, done: dict[str, Any] | None, reason: str | None, steps: int) -> Verification:
    """With what the run said of itself."""
    if done is None:
        return replace(promise, reason=reason or "it said nothing")
    seconds = done.get("seconds_per_step")
    if done.get("steps") != steps or not isinstance(seconds, int | float) or not seconds > 0:
        return replace(promise, reason=f"it took {done.get('steps')} steps of {steps}, of {seconds} s")
    return replace(
        promise,
        seconds_per_step=float(seconds),
        reserved_gib=done.get("peak_reserved_gib"),
        peaks_gib=tuple(done.get("peaks_gib") or ()),
    )
