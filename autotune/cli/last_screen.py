"""The texts of the last screen of `autotune run`: the winner, its speed and cost, and next steps.

`answer` and `next_steps` return the texts, and `cli.console` prints them.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from autotune.core.probe_types import Evidence, Outcome
from autotune.core.text import operands, short_path
from autotune.core.units import DASH
from autotune.export.header import has_published_weights
from autotune.problem.demo import is_demo
from autotune.report import describe
from autotune.report.answers import study_answer
from autotune.report.infos import candidates
from autotune.study.summary import Candidate, Recipe, StudySummary

# The columns of the table of results: each heading, and the key of its number in `describe.numbers`
_COLUMNS = {
    "tokens/s": "useful tokens/s",
    "step": "optimizer step",
    "peak": "peak reserved",
    "limit": "limit",
    "MFU": "MFU",
    "full run": "time",
    "USD": "USD",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A line with a name. A line with an empty name continues the line above."""

    name: str
    text: str
    style: str | None = None


def answer(summary: StudySummary, recipe: Recipe) -> list[Field]:
    """Return the fields about the winner, in the order of a reader's questions."""
    winner = recipe.winner
    result = study_answer(recipe)
    number = {name: one.text for name, one in describe.numbers(winner).items()}
    mfu = "" if winner.performance.mfu is None else f", MFU {number['MFU']}"

    speed_up = describe.speed_up_range(recipe)
    speed_up = f", {speed_up}" if speed_up else ""
    fields = [
        Field(name="winner", text=result.answer, style="bold green"),
        Field(name="", text="; ".join(describe.configuration(recipe))),
        Field(name="speed", text=f"{number['useful tokens/s']} useful tokens/s{mfu}{speed_up}"),
        *([Field(name="", text=slower)] if (slower := summary.slower_than_searched) else []),
        Field(name="cost", text=result.cost),
        Field(name="search", text=describe.savings(summary)),
        Field(name="memory", text=result.needs),
        Field(name="sure", text=result.certainty),
        Field(name="tried", text=describe.breakdown(summary)),
    ]

    if too_large := _too_large(summary):
        fields.append(Field(name="", text=too_large))
    return fields


def _too_large(summary: StudySummary) -> str:
    """Describe the trial that exceeded the memory limit by the least, or return an empty text."""
    misses = [
        row for row in summary.trials if row.outcome is Outcome.OOM and row.margin is not None
    ]
    if not misses:
        return ""
    closest = min(misses, key=lambda row: row.margin or 0.0)
    return f"closest to fitting: {closest.config.label()}, {describe.overrun(closest)}"


def side_by_side(summary: StudySummary, recipe: Recipe) -> list[str]:
    """Return the lines of a table: the winner, the baseline, and the best for each GPU count."""
    by_number = recipe.by_gpus if len(recipe.by_gpus) > 1 else ()
    rows: dict[str, Candidate] = candidates(summary) | {
        describe.gpus(one.config): one for one in by_number
    }

    columns = [[" " * 9, *rows]]
    for heading, key in _COLUMNS.items():
        texts = [describe.numbers(candidate)[key].text for candidate in rows.values()]
        if set(texts) != {DASH}:  # a CPU has no MFU, and some devices have no price
            columns.append([heading, *texts])

    table = list(zip(*columns, strict=True))
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in table
    ]


def next_steps(summary: StudySummary, out_dir: str, storage: str | None = None) -> dict[str, str]:
    """Return {purpose: command line} for the next steps: train, verify and explain, if possible.

    If the study was stopped, the first step continues it. The user can run the commands without a
    change. `storage` is the value of `--storage`. If it has a password, the first command sets an
    environment variable for the others, and the user has to insert the password.
    """
    from autotune.study.storage.location import printed_options

    database, set_variable = printed_options(storage)
    first = {"first, with your password for PASSWORD": set_variable} if set_variable else {}

    def command(verb: str, *options: str) -> str:
        return shlex.join(["autotune", verb, *options, *database, *operands(summary.study)])

    steps = first
    if summary.stopped:
        steps["continue the search, which was stopped"] = command("resume")
    recipe = summary.recipe
    if recipe is None:
        if summary.trials or not summary.stopped:
            steps["see which configurations did not fit, and what to change"] = command("oom")
        return steps

    place = _place(recipe)
    if recipe.trainer != "transformers":
        steps |= describe.training_commands(summary, recipe, out_dir)
    elif summary.dataset and has_published_weights(recipe):
        dataset, *split = describe.training_data(summary)
        options = [short_path(Path(dataset)), *split]
        steps[f"start the full run{place}"] = command("train", "--dataset", *options)
    else:
        purpose = f"try the training{place}"
        if has_published_weights(recipe) or is_demo(recipe.model):
            purpose += "; for your file, --dataset FILE instead of --random-weights"
        steps[purpose] = command("train", "--random-weights", "--max-steps", "5")

    # Only a speed that was measured here can be verified here.
    if recipe.winner.evidence is Evidence.MEASURED:
        steps["check that the exported run keeps this promise"] = command("verify")
    if recipe.baseline is not None:
        report = f"{out_dir}/report.html"
        when = "when the machine is quiet, " if recipe.unsteady else ""
        steps[f"{when}ask why it won; the report is {report}"] = command("explain")
    return steps


def _place(recipe: Recipe) -> str:
    """Return the place of the full run if it may not be this machine: ' on 8 GPUs'."""
    num_gpus = recipe.config.num_gpus
    if num_gpus > 1:
        return f" on {num_gpus} GPUs"
    is_here = recipe.winner.evidence is not Evidence.PROJECTED
    return "" if is_here else f" on the {recipe.device.name}"
