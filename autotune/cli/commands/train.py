"""`autotune train`: start the full run of a study's winner, and show its progress and cost."""

import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Json, Storage, StudyName
from autotune.cli.stop import stop_on_signals
from autotune.cli.terminal import console, print_note
from autotune.core.errors import (
    PREEMPTED,
    AutotuneError,
    EnvironmentProblem,
    Interrupted,
    UsageError,
)
from autotune.core.text import operands, short_path
from autotune.core.units import fmt_seconds, fmt_usd

if TYPE_CHECKING:
    from autotune.api import StudyResult
    from autotune.export.run.train import Progress, Run
    from autotune.study.summary import Recipe

PLAIN_S = 30.0  # seconds between two lines of progress if stderr is not a terminal
STOPPED = (
    PREEMPTED,
    128 + signal.SIGTERM,
    -signal.SIGTERM,
)  # the exit codes of a stopped run; the last one is for a stop before the training began


def train(
    study: StudyName = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="File or folder of examples, or org/name[:config]. [the study's]",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Split of --dataset. [the study's, or train, if any]"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Directory or Hub name of the weights. [the study's]")
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights", help="Only measure the speed, with random weights and without data."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output-dir", help="Directory for the weights. [trained/ in the study's]"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint, if any.")
    ] = False,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of optimizer steps.")
    ] = None,
    ask: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT",
            help="Answer this prompt before and after the training, and show both answers.",
        ),
    ] = None,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable to pass to the training, such as HF_TOKEN; repeatable.",
        ),
    ] = None,
    other_device: Annotated[
        bool,
        typer.Option("--other-device", help="Train here even if the study is for another device."),
    ] = False,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Train with a study's winner. The exported script, copied beside the weights, does the work.

    Raises:
        UsageError: there is no such study, no dataset is given, an example cannot be read, the
            model has no weights, an environment variable is not set, or the directory has an
            earlier run.
        EnvironmentProblem: the study is for another device, and `other_device` is false.
        Interrupted: stopped by a signal; the run can be continued from its checkpoint.
        AutotuneError: the script failed.
    """
    from autotune.api import load_study
    from autotune.export.run.train import Run
    from autotune.export.run.verify import tolerance_on
    from autotune.study.storage.location import printed_options

    result = load_study(study, storage)
    recipe = result.recipe
    if dataset is None and not random_weights and recipe.data is not None:
        dataset = Path(recipe.data.path)
        split = split or recipe.data.split
    _check(
        result,
        dataset,
        random_weights=random_weights,
        pass_env=pass_env or [],
        other_device=other_device,
    )
    prompt = ask
    if dataset is not None:
        recipe, default_prompt = _with_examples(recipe, dataset, split, model)
        prompt = ask or default_prompt

    # A run that only measures the speed saves nothing, unless the user gives a directory.
    saves = output is not None or not random_weights
    output = (output or result.out / ("trained" if saves else "tried")).absolute()
    script = _script(output, recipe, resume=resume)
    arguments = _script_options(dataset, split, model, max_steps, prompt)
    directory = ["--output-dir", str(output)] if saves else []
    arguments += [*(directory or ["--output-dir", ""]), *(["--resume"] if resume else [])]
    run = Run(recipe, script, output, arguments, fresh=not resume, pass_env=pass_env or ())

    display = TrainingDisplay(
        saves=dataset is not None and max_steps is None, tolerance=tolerance_on(recipe.device)
    )
    display.say(f"training {recipe.config.label()}; its log is {run.log}")
    with stop_on_signals() as stop, display:
        code, error = run.train(display.progress, lambda: stop() and display.stopping())

    if code == 0:
        _say_done(display, run, output if saves else None)
        if json_:
            sys.stdout.write((output / "training.json").read_text(encoding="utf-8"))
        return

    if code in STOPPED:
        options = _script_options(dataset, split, model, max_steps, ask)
        options += [*directory, *(f"--pass-env={name}" for name in pass_env or ())]
        options += ["--other-device"] * other_device
        database, set_variable = printed_options(storage)
        commands = [
            " && ".join(filter(None, (set_variable, _command([*options, *more], recipe.study))))
            for more in ([*database, "--resume"], database)
        ]
        raise interruption(
            output,
            commands[0],
            commands[1],
            128 + signal.SIGINT if stop.signal == signal.SIGINT else PREEMPTED,
        )

    raise AutotuneError(
        f"training failed: {error or f'exit code {code}'}", remedy=f"read {run.log}"
    )


def _say_done(display: "TrainingDisplay", run: "Run", output: Path | None) -> None:
    """Show the path of the weights and the answers to the prompt."""
    saved = f"the weights are in {output}" if output else "nothing was saved"
    trained = display.line or "the training was complete already"
    display.say(f"done: {trained}; {saved}")
    if asked := run.result.get("asked"):
        display.say(f"asked:  {asked['prompt']}")
        display.say(f"before: {asked['before']}")
        display.say(f"after:  {asked['after']}")


def _script(output: Path, recipe: "Recipe", *, resume: bool) -> Path:
    """Return the path of the exported script in `output`.

    The script is written, unless a run is resumed whose script exists.

    Raises UsageError if the directory contains another run.
    """
    from autotune.report.study_directory import write_exports

    earlier_files = sorted(output.glob("checkpoint-*")) + sorted(output.glob("*.safetensors"))
    if earlier_files and not resume:
        can_resume = earlier_files[0].is_dir()  # a checkpoint
        other = "add --resume" if can_resume else "move that file away"
        raise UsageError(
            f"{earlier_files[0]} belongs to an earlier run",
            remedy=f"{other}, or name another --output-dir",
        )

    script = output / "export" / "train.py"
    # A resumed run uses the script that it began with, even if the study has another winner now.
    if not (resume and script.is_file()):
        write_exports(output, recipe, ["train"])
    return script


def _script_options(
    dataset: Path | None,
    split: str | None,
    model: str | None,
    max_steps: int | None,
    ask: str | None = None,
) -> list[str]:
    """Return these options as arguments of the exported script, which has the same options."""
    from autotune.problem.dataset import full_path

    options = ["--dataset", full_path(str(dataset))] if dataset else ["--random-weights"]
    values = {"--split": split, "--model": model, "--max-steps": max_steps and str(max_steps)}
    values |= {"--ask": ask}
    return options + [word for name, value in values.items() if value for word in (name, value)]


def _check(
    result: "StudyResult",
    dataset: Path | None,
    *,
    random_weights: bool,
    pass_env: list[str],
    other_device: bool,
) -> None:
    """Raise an error if no training is possible with these options, before any file is written."""
    from autotune.report.describe import training_commands, training_data
    from autotune.study.session import require_device

    recipe = result.recipe
    if recipe.trainer != "transformers":
        (command,) = training_commands(result.summary, recipe, short_path(result.out)).values()
        raise UsageError(
            "the study was measured with TRL, so use TRL's own command to train", remedy=command
        )
    if (dataset is None) is not random_weights:
        raise UsageError(
            "give either --dataset PATH to train on, or --random-weights to try the speed",
            remedy=_command(
                ["--dataset", *(training_data(result.summary) or ["data.jsonl"])], recipe.study
            ),
        )

    if missing := [name for name in pass_env if name not in os.environ]:
        raise UsageError(
            f"--pass-env {missing[0]}: there is no such variable",
            remedy="export the variable first",
        )
    try:
        remedy = "train there, or add --other-device: the run may be slower or not fit here"
        require_device(recipe.device, remedy, recipe.config.num_gpus)
    except EnvironmentProblem as difference:
        if not other_device:
            raise
        print_note(f"warning: {difference}: the predicted speed, memory and cost do not hold")


def _default_prompt(recipe: "Recipe", dataset: Path, split: str | None) -> str | None:
    """Return the prompt of the first example, or None if the run cannot answer prompts."""
    from autotune.trainer.answers import first_prompt

    config = recipe.config
    is_sft = recipe.workload.objective.value == "sft"
    if config.num_gpus > 1 or not is_sft or config.attention_implementation == "varlen":
        return None
    return first_prompt(dataset, split)


def _with_examples(
    recipe: "Recipe", dataset: Path, split: str | None, model: str | None
) -> "tuple[Recipe, str | None]":
    """Check the examples, and return the recipe and the default prompt to answer.

    For the demo model, the recipe gets the model's weights, and the default prompt is the prompt of
    the first example. Other models have no default prompt. Raises the errors of `_check_examples`.
    """
    from autotune.problem.dataset import check_exists
    from autotune.problem.demo import TOY, is_demo, with_weights

    check_exists(dataset, split)
    if model is not None or not is_demo(recipe.model):
        _check_examples(recipe, dataset, split, model)
        return recipe, None

    recipe = replace(recipe, model=with_weights(recipe.model, print_note))
    _check_examples(recipe, dataset, split, model)
    print_note(TOY)
    return recipe, _default_prompt(recipe, dataset, split)


def _check_examples(recipe: "Recipe", dataset: Path, split: str | None, model: str | None) -> None:
    """Check the examples and the weights before loading, which takes seconds or minutes.

    Raises UsageError for a model without weights, for rows that are not examples, and for too few
    examples. Prints a note if the examples differ from the study's examples.
    """
    from autotune.export.header import has_published_weights
    from autotune.problem.dataset import check_examples

    if model is None and not has_published_weights(recipe):
        raise UsageError(
            f"{recipe.model.name} has no published weights to train", remedy="give --model DIR"
        )

    tokenizer = recipe.model.tokenizer
    if model is not None:
        tokenizer = model if (Path(model) / "tokenizer.json").is_file() else None
    for note in check_examples(dataset, split, tokenizer, recipe.workload, recipe.config):
        print_note(note)


def _command(options: list[str], study: str) -> str:
    """Return the command line of `autotune train` with these options."""
    return shlex.join(["autotune", "train", *options, *operands(study)])


def interruption(
    output: Path, resume_command: str, restart_command: str, exit_code: int
) -> Interrupted:
    """Return the error for a run that a signal stopped.

    The error names the last complete checkpoint in `output`, and the command that continues the
    run. Without a checkpoint, it names the command that starts the run again.
    """
    steps = [
        int(path.parent.name.removeprefix("checkpoint-"))
        for path in output.glob("checkpoint-*/trainer_state.json")
    ]
    return Interrupted(
        f"stopped; a checkpoint of step {max(steps)} is saved"
        if steps
        else "stopped; there is no checkpoint",
        remedy=f"continue with: {resume_command}" if steps else f"start again: {restart_command}",
        exit_code=exit_code,
    )


class TrainingDisplay:
    """Shows the run's progress on stderr.

    This is a progress bar on a terminal, and a line every half minute elsewhere. `saves` says
    whether a run that is stopped saves a checkpoint. A step time that differs from the measured one
    by more than the share `tolerance` gets a note.
    """

    def __init__(self, *, saves: bool, tolerance: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.line = ""
        self._saves = saves
        self._tolerance = tolerance
        self._printed_at = 0.0
        self._warned = False
        self._stopping = False

        self._console = console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            BarColumn(), TextColumn("{task.description}"), console=self._console, transient=True
        )
        self._task = self._bar.add_task("loading", total=None)

    def __enter__(self) -> "TrainingDisplay":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line that stays above the progress bar."""
        self._console.print(text, markup=False, emoji=False)

    def stopping(self) -> bool:
        """Print once that a stop was requested."""
        if not self._stopping:
            self._stopping = True
            saved = ", and a checkpoint will be saved" if self._saves else ""
            self.say(f"stopping: this step will end{saved}; a second signal ends the run at once")
        return True

    def progress(self, now: "Progress") -> None:
        """Show the run's progress; warn once if steps take much more or less time than measured."""
        loss = "" if now.loss is None else f", loss {now.loss:.4g}"
        spent_text = "" if now.spent_usd is None else f", {fmt_usd(now.spent_usd)}"
        usd_text = "" if now.projected_usd is None else f" and {fmt_usd(now.projected_usd)}"
        projected_text = f"the study projected {fmt_seconds(now.projected_s)}{usd_text} in all"
        left_text = f"{fmt_seconds(now.left_s)} left, " if now.left_s else ""
        self.line = (
            f"step {now.step:,} of {now.of:,}{loss}, {fmt_seconds(now.trained_s)}{spent_text}; "
            f"{left_text}{projected_text}"
        )

        if self._console.is_terminal:
            self._bar.update(self._task, total=now.of, completed=now.step, description=self.line)
        elif time.monotonic() - self._printed_at >= PLAIN_S:
            self._printed_at = time.monotonic()
            self.say(self.line)

        if now.slowdown is not None and abs(now.slowdown) > self._tolerance and not self._warned:
            self._warned = True
            direction = "longer" if now.slowdown > 0 else "less"
            self.say(
                f"note: a step takes {abs(now.slowdown):.0%} {direction} than measured (the "
                "examples may differ, or other work may use the device)"
            )
