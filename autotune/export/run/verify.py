"""Verification: the exported files of a winner run as a user would run them, and are compared with the prediction."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from autotune.core.errors import StorageError
from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, fmt_seconds, gib
from autotune.export import script, tool_file
from autotune.export.header import on_cpu
from autotune.export.run.process import (
    AddedLines,
    run_exported,
    scratch_folder,
    time_limit_s,
    write_files,
)
from autotune.probe.trl_entry import STEPS
from autotune.problem.run_options import RunOptions
from autotune.study.summary import Recipe, Verification

TOLERANCE = 0.05
MICRO_STEPS = 200
FORMATS = ("train", "trl")
ROWS = 1024  # random rows to make for TRL; a longer run passes over them again
SHORT = 4  # a short row of a soak has at most this part of the tokens of a long one: a quarter
HOME = str(Path(__file__).absolute().parents[3])  # the directory that holds the package

Run = Callable[..., dict[str, Any] | str]  # run_exported, with all that is the same for each call


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
    """Run the winner's export with random weights for at least `micro_steps` micro batches. The device must be free.

    `form` is one of FORMATS, by default that of the trainer that was probed. The run evaluates before and after, and
    saves adapters at the end, since runs die there too. Its log is in the study's directory `out`.

    Raises:
        Cancelled: `should_stop` returned true.
        StorageError: the disk has no room for the random weights that `trl sft` reads.
    """
    # Of its run options, it evaluates and saves once, and reports nowhere.
    recipe = replace(
        recipe, workload=replace(recipe.workload, eval_share=0.0), run_options=RunOptions()
    )
    winner = recipe.winner
    step_s = winner.performance.step_time_s
    form = form or probed_format(recipe)
    file = "train.py" if form == "train" else tool_file.file_of(recipe, form)
    steps = (
        max(math.ceil(micro_steps / recipe.accumulation), 4 if soak else 2) + 1
    )  # the first warms up
    prediction = Verification(
        config=winner.config,
        micro_steps=(steps - 1) * recipe.accumulation,
        tolerance=tolerance,
        promised_tokens_per_s=winner.performance.tokens_per_second,
        promised_step_s=step_s,
        promised_gib=max(winner.measurement.peak_reserved_gib, 0.0),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        file=file,
        probed=form == probed_format(recipe),
        soak=soak,
    )
    length = f"{steps} steps, about {fmt_seconds(steps * step_s)}"
    say(f"running the exported {file} for {length}: {winner.config.label()}")
    with scratch_folder(out / ".verify") as folder:
        run = partial(
            run_exported,
            folder,
            log=out / "logs" / "verify.log",
            limit_s=time_limit_s(steps, step_s),
            should_stop=should_stop,
            while_running=_StepReporter(folder / STEPS, steps, step_s, say).report,
        )
        lengths = straining_lengths(recipe.workload.at_longest(winner.config)) if soak else None
        run_format = _run_trl if form == "trl" else _run_train
        result = run_format(recipe, folder, steps, lengths, run)
    if isinstance(result, dict):
        promised_s = _step_s_of(recipe, result.get("padded_tokens_per_step"))
        promised_s += _plans_s(recipe, recipe.accumulation, steps * recipe.accumulation)
        prediction = replace(prediction, promised_step_s=promised_s)
    return with_result(prediction, result, steps)


def _step_s_of(recipe: Recipe, padded_tokens: float | None) -> float:
    """Seconds promised for steps of so many padded tokens of one GPU: a short run has not quite those of the whole.

    They lie on a line through what micro batches of each length took.
    """
    winner = recipe.winner
    step_s, shape = winner.performance.step_time_s, recipe.shape
    kinds = [kind for kind in recipe.workload.micro_batches(winner.config) if kind.share]
    timed = winner.measurement.kind_s
    if not padded_tokens or len(kinds) != len(timed) or len({kind.length for kind in kinds}) < 2:
        return step_s
    padded_tokens /= (
        recipe.workload.objective.rows_per_example
    )  # lengths are those of a pair's longer row
    mean = sum(kind.share * kind.length for kind in kinds)
    moments = [
        (kind.share * (kind.length - mean) * seconds, kind.share * (kind.length - mean) ** 2)
        for kind, (_, seconds) in zip(kinds, timed, strict=True)
    ]
    slope = (
        sum(one for one, _ in moments)
        / sum(square for _, square in moments)
        / winner.config.micro_batch_size
    )
    return step_s + slope * (padded_tokens - shape.tokens_per_step / shape.world_size)


def _plans_s(recipe: Recipe, begin: int, end: int) -> float:
    """How much longer a step of so short a run takes, since more of its micro batches are of a length that is new.

    Those from `begin` to `end`, counted from the start of the run, are timed.
    """
    share = partial(recipe.workload.new_length_share, recipe.config)
    timed = (end * share(end) - begin * share(begin)) / (end - begin)
    return recipe.accumulation * (timed - share()) * (recipe.winner.measurement.new_length_s or 0.0)


class _StepReporter:
    """Reports after each tenth of a run how far it is, from a file that gets a line for each step."""

    def __init__(self, file: Path, steps: int, step_s: float, say: Callable[[str], None]) -> None:
        self._added = AddedLines(file)
        self._steps = steps
        self._step_s = step_s
        self._say = say
        self._done = 0

    def report(self) -> None:
        """Read the lines that were added, and report if they complete a tenth."""
        tenths_before = self._done * 10 // self._steps
        self._done += len(self._added.read())
        if self._done * 10 // self._steps > tenths_before:
            left = self._steps - self._done
            then = f"about {fmt_seconds(left * self._step_s)} left" if left > 0 else "the last"
            self._say(f"verifying: step {self._done} of {self._steps}, {then}")


def probed_format(recipe: Recipe) -> str:
    """The format, one of FORMATS, that was probed."""
    return "trl" if recipe.trainer == "trl" else "train"


def straining_lengths(config: TrainConfig) -> list[int]:
    """Lengths of rows, in tokens, that strain an allocator.

    About every second micro batch has a row of `seq_len` tokens, and the others have short rows only.
    """
    shortest = 2  # a single token predicts nothing
    short = max(config.seq_len // SHORT, shortest)
    generator = random.Random(0)  # noqa: S311 (no secret depends on it)
    share_of_long = 1 - 0.5 ** (1 / config.micro_batch_size)
    lengths = [config.seq_len, short]
    while len(lengths) < ROWS:
        is_long = generator.random() < share_of_long
        lengths.append(config.seq_len if is_long else generator.randint(shortest, short))
    return lengths


def _run_train(
    recipe: Recipe, folder: Path, steps: int, lengths: list[int] | None, run: Run
) -> dict[str, Any] | str:
    write_files(folder, script.export(recipe))
    config, longest = recipe.config, recipe.workload.longest_row(recipe.config)
    arguments = ["--random-weights", "--max-steps", str(steps), "--held-out", "1", str(longest)]
    arguments += ["--progress", STEPS, "--output-dir", "saved" if config.method == "lora" else ""]
    if lengths:
        write_files(folder, {"lengths.txt": "\n".join(map(str, lengths))})
        arguments += ["--lengths", "lengths.txt"]
    return run(arguments, num_gpus=config.num_gpus)


def _run_trl(
    recipe: Recipe, folder: Path, steps: int, lengths: list[int] | None, run: Run
) -> dict[str, Any] | str:
    """Run TRL's own script with a clock through accelerate's launcher, as `trl sft` runs it."""
    config, objective = recipe.config, recipe.workload.objective
    _check_room(recipe, folder)
    made_of = json.dumps(_made_for_trl(recipe, steps, lengths))
    write_files(folder, tool_file.export(recipe, "trl") | {"made.json": made_of})
    # The script runs in `folder`, where the package might not be found.
    environment = {
        "HF_DATASETS_CACHE": str(folder / "cache"),
        **({"CUDA_VISIBLE_DEVICES": ""} if on_cpu(recipe) else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")])),
    }
    made = run(["made.json"], script="autotune.probe.synthetic_model", environment=environment)
    if isinstance(made, str):
        return f"no random weights could be made: {made}"
    every = math.ceil(steps / 4) if lengths else steps  # a soak does the same in each quarter
    overrides = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        **(
            {"assistant_only_loss": False} if objective is Objective.SFT else {}
        ),  # the rows are tokens
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
        *tool_file.launch_arguments(recipe),
        "--module",
        "autotune.probe.trl_entry",
    ]
    arguments += [objective, "--config", tool_file.file_of(recipe, "trl")]
    for name, value in overrides.items():
        arguments += [f"--{name}", str(value)]
    return run(arguments, script="accelerate.commands.launch", environment=environment)


def _made_for_trl(recipe: Recipe, steps: int, lengths: list[int] | None) -> dict[str, Any]:
    """What `probe.synthetic_model` makes: weights of the model's shape, and random rows."""
    config = recipe.config
    batch = round(recipe.shape.examples_per_step)
    rows = batch * min(
        steps, math.ceil(ROWS / batch)
    )  # whole steps: the last of a pass would be shorter
    return {
        "model": recipe.model.config,
        "device": "cpu" if on_cpu(recipe) else "cuda",
        "rows": rows,
        "lengths": lengths or script.sample(recipe, rows),
        "objective": recipe.workload.objective,
        "trained_share": recipe.workload.lengths.trained_share,
        "held_out": [recipe.workload.longest_row(config)] * config.micro_batch_size,
    }


def _check_room(recipe: Recipe, folder: Path) -> None:
    """Raise StorageError where the disk has no room for the weights in bf16 and for what TRL saves at the end."""
    config = recipe.config
    full_bytes = 2 if config.precision == "bf16_pure" else 4
    saved_bytes = (
        full_bytes if config.method == "full" else 0
    )  # for each parameter; LoRA saves adapters only
    needed = gib(recipe.winner.measurement.total_params * (2 + saved_bytes))
    free = gib(shutil.disk_usage(folder).free)
    if needed > free:
        raise StorageError(
            f"random weights of this model take {fmt_gib(needed)} at {folder.parent}, {fmt_gib(free)} are free",
            remedy="free some, or verify the study's train.py (--format train), which needs no files",
        )


def with_result(prediction: Verification, result: dict[str, Any] | str, steps: int) -> Verification:
    """The verification with what the run printed, or the reason why it printed nothing."""
    if isinstance(result, str):
        return replace(prediction, reason=result)
    seconds = result.get("seconds_per_step")
    if result.get("steps") != steps or not isinstance(seconds, int | float) or not seconds > 0:
        return replace(
            prediction, reason=f"it took {result.get('steps')} steps of {steps}, of {seconds} s"
        )
    return replace(
        prediction,
        seconds_per_step=float(seconds),
        reserved_gib=result.get("peak_reserved_gib"),
        peaks_gib=tuple(result.get("peaks_gib") or ()),
    )
