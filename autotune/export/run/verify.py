"""Runs a winner's exported files as a user would, and compares the run with the prediction."""

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec
from autotune.core.errors import Cancelled, StorageError
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

# How far a run may be off its prediction, as a share, on a GPU and on a CPU. On two quiet cores,
# four of five runs differed by 6 to 8 %.
TOLERANCE, CPU_TOLERANCE = 0.05, 0.1
MICRO_STEPS = 200
FORMATS = ("train", "trl")
ROWS = 1024  # the number of random rows that are made for TRL; a longer run repeats the rows
# In a soak test (`straining_lengths`), each short row has at most 1/SHORT of the tokens of a long
# row.
SHORT = 4
FIRST_S = 2.0  # seconds until the first report of progress
EVERY_S = 30.0  # the longest time between two reports
# A run is called slower before its end if its steps exceed their predicted time by this share more
# than the tolerance. The predicted time is corrected at the end, if rows have different lengths.
MARGIN = 0.1
HOME = str(Path(__file__).absolute().parents[3])  # the directory that holds the package

Run = Callable[..., dict[str, Any] | str]  # `run_exported` with some arguments already bound


def verify(
    recipe: Recipe,
    out: Path,
    *,
    form: str | None = None,
    soak: bool = False,
    micro_steps: int = MICRO_STEPS,
    tolerance: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Verification:
    """Run the winner's export with random weights for at least `micro_steps` micro batches.

    No other process may use the device. `form` is one of FORMATS, by default the format of the
    probed trainer. The run evaluates at the start and at the end, and then saves adapters, because
    full runs can also fail in an evaluation or a save. `tolerance` is by default `tolerance_on` the
    recipe's device. The log of the run is in `out`, the study's directory. A stop request prints
    the mean time of the steps so far.

    Raises:
        Cancelled: `should_stop` returned true.
        StorageError: The disk has no room for the random weights that `trl sft` reads.
    """
    # This short run has its own evaluations and saves, reports to no tracker, and trains on random
    # rows. Default options replace the recipe's options, which are for the full run.
    recipe = replace(
        recipe,
        workload=replace(recipe.workload, eval_share=0.0),
        run_options=RunOptions(),
        data=None,
    )

    form = form or probed_format(recipe)
    # The additional step is a warm-up that is not timed.
    steps = max(math.ceil(micro_steps / recipe.accumulation), 4 if soak else 2) + 1
    if tolerance is None:
        tolerance = tolerance_on(recipe.device)
    prediction = _prediction(recipe, form, steps, tolerance, soak=soak)
    config, step_s = prediction.config, prediction.promised_step_s

    length = f"{steps} steps, about {fmt_seconds(steps * step_s)}"
    say(f"running the exported {prediction.file} for {length}: {config.label()}")
    with scratch_folder(out / ".verify") as folder:
        allowed_s = _allowed_s(recipe, prediction, steps)
        reporter = _StepReporter(folder / STEPS, steps, step_s, say, allowed_s)
        run = partial(
            run_exported,
            folder,
            log=out / "logs" / "verify.log",
            limit_s=time_limit_s(steps, step_s),
            should_stop=should_stop,
            while_running=reporter.report,
        )
        lengths = straining_lengths(recipe.workload.longest_row_config(config)) if soak else None
        run_format = _run_trl if form == "trl" else _run_train
        try:
            result = run_format(recipe, folder, steps, lengths, run)
        except Cancelled:
            reporter.stopped()
            raise

    # Correct the predicted step time, which is for the full run. The mean row length of this short
    # run is different. In addition, a larger share of its micro batches has a row length that is
    # new to the process, which takes extra time.
    if isinstance(result, dict):
        promised_s = _step_s_of(recipe, result.get("padded_tokens_per_step"))
        promised_s += _plans_s(recipe, recipe.accumulation, steps * recipe.accumulation)
        prediction = replace(prediction, promised_step_s=promised_s)
    return with_result(prediction, result, steps)


def tolerance_on(device: DeviceSpec) -> float:
    """Return how far a run on this device may be off its prediction, as a share."""
    return CPU_TOLERANCE if device.kind == "cpu" else TOLERANCE


def _prediction(
    recipe: Recipe, form: str, steps: int, tolerance: float, *, soak: bool
) -> Verification:
    """Return the study's prediction for a run of `steps` steps. The first step is not timed."""
    winner = recipe.winner
    return Verification(
        config=winner.config,
        micro_steps=(steps - 1) * recipe.accumulation,
        tolerance=tolerance,
        promised_tokens_per_s=winner.performance.tokens_per_second,
        promised_step_s=winner.performance.step_time_s,
        promised_gib=max(winner.measurement.peak_reserved_gib, 0.0),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        file="train.py" if form == "train" else tool_file.file_of(recipe, form),
        probed=form == probed_format(recipe),
        soak=soak,
    )


def _allowed_s(recipe: Recipe, prediction: Verification, steps: int) -> float:
    """Return the longest time that the timed steps may take if the speed is as predicted.

    The time is unlimited if the speed is not predicted, or if the steps may compile code, which is
    not part of their time. MARGIN covers the corrections that need the result of the run.
    """
    if prediction.soak or not prediction.probed or recipe.config.compile != "none":
        return math.inf
    step_s = prediction.promised_step_s
    step_s += _plans_s(recipe, recipe.accumulation, steps * recipe.accumulation)
    return (steps - 1) * step_s * (1 + prediction.tolerance) * (1 + MARGIN)


def _step_s_of(recipe: Recipe, padded_tokens: float | None) -> float:
    """Return the predicted time of a step with `padded_tokens` tokens for each GPU.

    The mean row length of a short run differs a little from the mean of the full run. The probe
    timed micro batches of several lengths. The slope of a line through these times corrects the
    prediction.
    """
    winner = recipe.winner
    step_s = winner.performance.step_time_s
    shape = recipe.shape
    kinds = [kind for kind in recipe.workload.micro_batches(winner.config) if kind.share]
    timed = winner.measurement.kind_s
    if not padded_tokens or len(kinds) != len(timed) or len({kind.length for kind in kinds}) < 2:
        return step_s

    # `kinds` has the lengths of examples. A pair of answers is one example with two rows; its
    # length is the length of the longer row.
    padded_tokens /= recipe.workload.objective.rows_per_example
    # Least squares give the slope of seconds over length. The weight of each point is its share of
    # the micro batches.
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
    """Return the extra seconds per step of a short run: new row lengths are more frequent there.

    `begin` and `end` are the first timed micro batch, and the one after the last, counted from 0.
    """
    share = partial(recipe.workload.new_length_share, recipe.config)
    timed = (end * share(end) - begin * share(begin)) / (end - begin)
    return recipe.accumulation * (timed - share()) * (recipe.winner.measurement.new_length_s or 0.0)


class _StepReporter:
    """Reports the progress of a run, from a file with a line of JSON for each step.

    The first report comes after FIRST_S seconds, and later reports after each tenth of the run, and
    after EVERY_S seconds without a report. The remaining time is computed from the mean time of the
    steps so far or, until two steps are timed, from `step_s`, the predicted time of a step.

    `allowed_s` is the longest time that the timed steps may take together if the run is to be as
    fast as predicted. Once they have taken longer, the reporter says that the run is slower. By
    default, the time is unlimited.
    """

    def __init__(
        self,
        file: Path,
        steps: int,
        step_s: float,
        say: Callable[[str], None],
        allowed_s: float = math.inf,
    ) -> None:
        self._added_lines = AddedLines(file)
        self._steps = steps
        self._step_s = step_s
        self._say = say
        self._allowed_s = allowed_s
        self._done = 0
        self._first: tuple[int, float] | None = None  # steps and time at the first line
        self._untimed_s: float | None = None  # the seconds until the end of the first step
        self._timed_s = 0.0  # the seconds of the later steps
        self._report_at = time.monotonic() + FIRST_S

    def report(self) -> None:
        """Read the file's new lines, and report the progress if a report is due."""
        tenths_before = self._done * 10 // self._steps
        lines = [_values(line) for line in self._added_lines.read()]
        self._done = max([self._done, *(int(line.get("step", 0)) for line in lines)])
        now = time.monotonic()
        if self._done and self._first is None:
            self._first = self._done, now
        if self._done * 10 // self._steps > tenths_before or now >= self._report_at:
            self._report_at = now + EVERY_S
            self._say(f"verifying: {self._progress(now)}")
        for line in lines:
            self._compare(line)

    def stopped(self) -> None:
        """Say the mean time of the timed steps so far, when a stop request ends the run."""
        if self._done > 1 and self._timed_s:
            step_s = self._timed_s / (self._done - 1)
            self._say(
                f"verifying: stopped after step {self._done} of {self._steps}. A step took "
                f"{fmt_seconds(step_s)}, {step_s / self._step_s:.2f} times the predicted time"
            )

    def _progress(self, now: float) -> str:
        if not self._done:
            return "loading the model; no step has ended yet"
        left = self._steps - self._done
        left_s = fmt_seconds(left * self._pace_s(now))
        return f"step {self._done} of {self._steps}, " + (
            f"about {left_s} left" if left > 0 else "the last"
        )

    def _compare(self, line: dict[str, Any]) -> None:
        """Say once that the run is slower than predicted, as soon as this is certain."""
        trained_s = line.get("seconds", 0.0) - line.get("paused", 0.0)
        if self._untimed_s is None:
            self._untimed_s = trained_s
        self._timed_s = trained_s - self._untimed_s
        if self._timed_s > self._allowed_s:
            self._allowed_s = math.inf
            self._say(
                f"verifying: the run is slower than predicted. This is certain after {self._done} "
                f"of {self._steps} steps, which took longer than all steps were predicted to take. "
                "The run goes on, to measure its speed."
            )

    def _pace_s(self, now: float) -> float:
        """Return the seconds of a step: measured or, until two steps are timed, predicted."""
        since, began = self._first or (self._done, now)
        steps = self._done - since
        return (now - began) / steps if steps else self._step_s


def _values(line: bytes) -> dict[str, Any]:
    """Return the values of a line of JSON, or an empty dictionary if it is damaged."""
    with suppress(ValueError):
        values = json.loads(line)
        if isinstance(values, dict):
            return values
    return {}


def probed_format(recipe: Recipe) -> str:
    """Return the format whose trainer was probed, one of FORMATS."""
    return "trl" if recipe.trainer == "trl" else "train"


def straining_lengths(config: TrainConfig) -> list[int]:
    """Return row lengths, in tokens, that strain the memory allocator.

    About half of the micro batches have a row of `seq_len` tokens. The other micro batches have
    only short rows.
    """
    shortest = 2  # the fewest tokens of a row: a single token has no next token to predict
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
    config = recipe.config
    longest = recipe.workload.longest_row(recipe.config)
    arguments = ["--random-weights", "--max-steps", str(steps), "--held-out", "1", str(longest)]
    arguments += ["--progress", STEPS, "--output-dir", "saved" if config.method == "lora" else ""]
    if lengths:
        write_files(folder, {"lengths.txt": "\n".join(map(str, lengths))})
        arguments += ["--lengths", "lengths.txt"]
    return run(arguments, num_gpus=config.num_gpus)


def _run_trl(
    recipe: Recipe, folder: Path, steps: int, lengths: list[int] | None, run: Run
) -> dict[str, Any] | str:
    """Run TRL's script with accelerate's launcher, as `trl sft` does, and time its steps."""
    config = recipe.config
    objective = recipe.workload.objective
    _check_room(recipe, folder)
    request = json.dumps(_made_for_trl(recipe, steps, lengths))
    write_files(folder, tool_file.export(recipe, "trl") | {"made.json": request})

    # The script runs in `folder`, so Python finds the package only by PYTHONPATH.
    environment = {
        "HF_DATASETS_CACHE": str(folder / "cache"),
        **({"CUDA_VISIBLE_DEVICES": ""} if on_cpu(recipe) else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")])),
    }
    made = run(["made.json"], script="autotune.probe.synthetic_model", environment=environment)
    if isinstance(made, str):
        return f"no random weights could be made: {made}"

    # A soak test evaluates and saves after each quarter.
    every = math.ceil(steps / 4) if lengths else steps
    overrides = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        # The rows contain tokens instead of messages, so the loss cannot be limited to answers.
        **({"assistant_only_loss": False} if objective is Objective.SFT else {}),
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

    arguments = ["--quiet", *tool_file.launch_arguments(recipe)]
    arguments += ["--module", "autotune.probe.trl_entry"]
    arguments += [objective, "--config", tool_file.file_of(recipe, "trl")]
    for name, value in overrides.items():
        arguments += [f"--{name}", str(value)]
    return run(arguments, script="accelerate.commands.launch", environment=environment)


def _made_for_trl(recipe: Recipe, steps: int, lengths: list[int] | None) -> dict[str, Any]:
    """Return the request for `probe.synthetic_model` to make random weights and rows for TRL."""
    config = recipe.config
    batch = round(recipe.shape.examples_per_step)
    # The number of rows fills whole steps, because a partial last step would take less time.
    rows = batch * min(steps, math.ceil(ROWS / batch))

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
    """Raise StorageError if the disk has no room for bf16 weights and the files that TRL saves."""
    config = recipe.config
    full_bytes = 2 if config.precision == "bf16_pure" else 4
    # The bytes that TRL saves for each parameter of the model. With LoRA, TRL saves only adapters.
    saved_bytes = full_bytes if config.method == "full" else 0
    needed = gib(recipe.winner.measurement.total_params * (2 + saved_bytes))
    free = gib(shutil.disk_usage(folder).free)
    if needed > free:
        raise StorageError(
            f"random weights of this model take {fmt_gib(needed)} in {folder.parent},"
            f" but only {fmt_gib(free)} are free",
            remedy="free disk space, or verify the study's train.py (--format train),"
            " which needs no files",
        )


def with_result(prediction: Verification, result: dict[str, Any] | str, steps: int) -> Verification:
    """Return the verification with the run's result, or with the reason why the run failed."""
    if isinstance(result, str):
        return replace(prediction, reason=result)

    seconds = result.get("seconds_per_step")
    if result.get("steps") != steps or not isinstance(seconds, int | float) or not seconds > 0:
        return replace(
            prediction,
            reason=f"the run took {result.get('steps')} of {steps} steps, {seconds} s each",
        )
    return replace(
        prediction,
        seconds_per_step=float(seconds),
        reserved_gib=result.get("peak_reserved_gib"),
        peaks_gib=tuple(result.get("peaks_gib") or ()),
    )
