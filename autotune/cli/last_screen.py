"""The texts of the last screen of `autotune run`: the winner, its speed and cost, and next steps.

`answer` and `next_steps` return the texts, and `cli.console` prints them.
"""

import getpass
import os
import shlex
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass

from autotune.core.probe_types import Outcome
from autotune.core.text import study_command
from autotune.core.units import DASH
from autotune.report import describe
from autotune.report.answers import study_answer
from autotune.report.infos import candidates
from autotune.study.summary import Candidate, Recipe, StudySummary

# The columns of the table of results: each heading, and the key of its number in `describe`
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


def next_steps(summary: StudySummary, recipe: Recipe, out_dir: str) -> dict[str, str]:
    """Return three command lines by purpose: train, read the report, and explain the winner.

    The user can run the commands without a change.
    """
    training = describe.training_commands(summary, recipe, out_dir)
    # The full run needs a file of examples. Without a dataset, the command that tries the run with
    # random weights is shown instead.
    purpose = list(training)[-1 if summary.dataset else 0]
    return {
        purpose: training[purpose],
        **_report_command(f"{out_dir}/report.html"),
        "ask why it won": study_command("explain", summary.study),
    }


def _report_command(page: str) -> dict[str, str]:
    """Return the command that opens a page on a desktop, or that copies it from this machine."""
    desktop = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if desktop and shutil.which("xdg-open"):
        return {"read the report": f"xdg-open {shlex.quote(page)}"}
    return {
        f"copy the report to your own computer ({page}), there": _copy_command(
            os.path.abspath(page)
        )
    }


def _copy_command(path: str) -> str:
    """Return a command for the user's own computer that copies a file from this machine.

    In an SSH session, the command has the machine's address, otherwise its host name.
    """
    # SSH_CONNECTION has the client's address and port, then this machine's address and port.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    host, port = connection[2:] if len(connection) == 4 else (socket.gethostname(), "22")
    host = f"[{host}]" if ":" in host else host
    with suppress(KeyError, OSError):  # in a container, the user may have no name
        host = f"{getpass.getuser()}@{host}"

    options = [] if port == "22" else ["-P", port]
    return shlex.join(["scp", *options, f"{host}:{path}", "."])
