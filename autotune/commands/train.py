"""`autotune train`: starts the full run from a study's recipe, and says how far it is and what it has cost."""

import json
import sys
import time
from pathlib import Path

from autotune.commands.outputs import write_exports
from autotune.commands.run import Stop
from autotune.commands.session import open_study
from autotune.errors import AutotuneError, Interrupted, NothingFits, UsageError
from autotune.train import PREEMPTED, Progress, Run
from autotune.units import fmt_seconds, fmt_usd
from autotune.verify import TOLERANCE

PLAIN_S = 30.0  # between two lines where there is no terminal


def command(
    name: str | None,
    storage: str | None,
    *,
    dataset: Path | None,
    model: str | None,
    random_weights: bool,
    output: Path | None,
    resume: bool,
    max_steps: int | None,
    as_json: bool = False,
) -> None:
    """Train with a study's winner, by its exported script as it stands in the study's directory.

    Raises:
        UsageError: no such study, no data, or a checkpoint is in the way.
        Interrupted: stopped by a signal; the run can be continued from its checkpoint.
        AutotuneError: the script failed.
    """
    found = open_study(name, storage)
    recipe = found.summary.recipe
    if recipe is None:
        raise NothingFits(f"study {found.summary.study!r} has no winner", remedy="continue it with `autotune run`")
    if recipe.trainer != "transformers":
        from autotune.export.trl import command as trl

        raise UsageError("the study was measured with TRL, which trains by itself", remedy=trl(recipe))
    if (dataset is None) is not random_weights:
        raise UsageError(
            "give either --dataset FILE.jsonl to train on, or --random-weights to try the speed",
            remedy="autotune train --dataset data.jsonl",
        )
    if dataset is not None and not dataset.is_file():
        raise UsageError(f"there is no file {dataset}", remedy="name a .jsonl file")
    output = (output or found.out / "trained").absolute()
    if not resume and any(output.glob("checkpoint-*")):
        raise UsageError(
            f"{output} holds checkpoints of an earlier run",
            remedy="go on from the last with --resume, or name another --output-dir",
        )
    if not resume:
        (output / "progress.jsonl").unlink(missing_ok=True)
    script = (found.out / "export" / "train.py").absolute()
    if not script.is_file():
        write_exports(found.out, found.summary, ["train"])
    arguments = ["--dataset", str(dataset.absolute())] if dataset else ["--random-weights"]
    arguments += ["--model", model] if model else []
    arguments += ["--resume"] if resume else []
    arguments += ["--max-steps", str(max_steps)] if max_steps else []
    run, shown = Run(recipe, script, output, arguments), Shown()
    shown.say(f"training {recipe.winner.config.label()}; its log is {run.log}")
    with Stop().listening() as stop, shown:
        code, error = run.train(shown.progress, lambda: stop() and shown.stopping())
    told = json.loads(path.read_text()) if (path := output / "training.json").exists() else {}
    if code == 0:
        shown.say(f"done: {shown.line}; what was trained is in {output}")
        if as_json:
            sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    if stop.signal is not None or code == PREEMPTED:
        kept = "a checkpoint is saved" if any(output.glob("checkpoint-*")) else "it had no checkpoint yet"
        exit_code = 128 + stop.signal if stop.signal else code
        raise Interrupted(
            f"stopped; {kept}",
            remedy=f"go on with `autotune train {found.summary.study} --resume` and the same options",
            exit_code=exit_code,
        )
    raise AutotuneError(f"training failed: {error or f'exit code {code}'}", remedy=f"read {run.log}")


class Shown:
    """The run's progress on stderr: a bar on a terminal, a line every half minute elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.line, self._told, self._warned, self._stopping = "", 0.0, False, False
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=self._console, transient=True)
        self._task = self._bar.add_task("loading", total=None)

    def __enter__(self) -> "Shown":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def stopping(self) -> bool:
        if not self._stopping:
            self._stopping = True
            self.say("stopping: the step is finished and a checkpoint saved; once more ends it at once")
        return True

    def progress(self, now: Progress) -> None:
        loss = "" if now.loss is None else f", loss {now.loss:.4g}"
        spent = "" if now.spent_usd is None else f", {fmt_usd(now.spent_usd)}"
        projected = f"projected {fmt_seconds(now.projected_s)}"
        projected += "" if now.projected_usd is None else f", {fmt_usd(now.projected_usd)}"
        left = f"{fmt_seconds(now.left_s)} left, " if now.left_s else ""
        self.line = f"step {now.step:,} of {now.of:,}{loss}, {fmt_seconds(now.trained_s)}{spent}; {left}{projected}"
        if self._console.is_terminal:
            self._bar.update(self._task, total=now.of, completed=now.step, description=self.line)
        elif time.monotonic() - self._told >= PLAIN_S:
            self._told = time.monotonic()
            self.say(self.line)
        if now.off is not None and abs(now.off) > TOLERANCE and not self._warned:
            self._warned = True
            how = "longer" if now.off > 0 else "less"
            self.say(f"note: a step takes {abs(now.off):.0%} {how} than was measured (other rows, or a busy device)")
