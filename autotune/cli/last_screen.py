"""The texts of the last screen of `autotune run`: the winner, its speed and cost, and next steps.

`answer` and `next_steps` make the texts; `cli.console` lays them out.
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
from autotune.core.units import fmt_usd
from autotune.report import describe
from autotune.report.answers import study_answer
from autotune.report.infos import candidates
from autotune.study.summary import Candidate, Recipe, StudySummary

# The table of results: each heading, and the number's name in `describe`
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
    """A named line. A line without a name belongs to the line above."""

    name: str
    text: str
    style: str | None = None


def answer(summary: StudySummary, recipe: Recipe) -> list[Field]:
    """Return the winner and its meaning, in the order of a reader's questions."""
    winner = recipe.winner
    result = study_answer(recipe)
    number = {name: one.text for name, one in describe.numbers(winner).items()}
    mfu = (
        ""
        if winner.performance.mfu is None
        else f", MFU {number['MFU']}{describe.mfu_basis(recipe)}"
    )

    speed_up = ", ".join(filter(None, (describe.speed_up(recipe), describe.speed_up_range(recipe))))
    search = describe.breakdown(summary)
    if summary.search_usd is not None:
        search += f"; the search cost {fmt_usd(summary.search_usd)}"

    fields = [
        Field(name="winner", text=result.answer, style="bold green"),
        Field(name="", text="; ".join(describe.configuration(recipe))),
        Field(name="speed", text=f"{number['useful tokens/s']} useful tokens/s{mfu}"),
        Field(name="speed-up", text=speed_up, style="bold" if recipe.differs else None),
        Field(name="cost", text=result.cost),
        Field(name="memory", text=result.needs),
        Field(name="sure", text=result.certainty),
        Field(name="tried", text=search),
    ]

    if broken := describe.broken_promise(summary):
        fields.insert(0, Field(name="verify", text=broken, style="bold red"))
    if too_large := _too_large(summary):
        fields.append(Field(name="", text=too_large))
    return fields


def _too_large(summary: StudySummary) -> str:
    """Describe the failed trial that exceeded the memory least, or return an empty text."""
    misses = [
        row for row in summary.trials if row.outcome is Outcome.OOM and row.margin is not None
    ]
    if not misses:
        return ""
    closest = min(misses, key=lambda row: row.margin or 0.0)
    return f"closest out of memory: {closest.config.label()}, {describe.overrun(closest)}"


def side_by_side(summary: StudySummary, recipe: Recipe) -> list[str]:
    """Return a table of the candidates: winner, baseline, and the best for each number of GPUs."""
    by_number = recipe.by_gpus if len(recipe.by_gpus) > 1 else ()
    rows: dict[str, Candidate] = candidates(summary) | {
        describe.gpus(one.config): one for one in by_number
    }

    table = [[" " * 9, *_COLUMNS]]
    for name, candidate in rows.items():
        numbers = describe.numbers(candidate)
        table.append([name, *(numbers[column].text for column in _COLUMNS.values())])

    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in table
    ]


def next_steps(summary: StudySummary, recipe: Recipe, out_dir: str) -> dict[str, str]:
    """Return three command lines by purpose: train, read the report, ask why.

    The commands can be run without a change.
    """
    training = describe.training_commands(summary, recipe, out_dir)
    # Without a dataset, the full run needs a file first.
    purpose = list(training)[-1 if summary.dataset else 0]
    return {
        purpose: training[purpose],
        **_report_command(f"{out_dir}/report.html"),
        "ask why it won": study_command("explain", summary.study),
    }


def _report_command(page: str) -> dict[str, str]:
    """Return the command that opens a page on a desktop, or that copies it to another computer."""
    desktop = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if desktop and shutil.which("xdg-open"):
        return {"read the report": f"xdg-open {shlex.quote(page)}"}
    return {
        f"copy the report to your own computer ({page}), there": _copy_command(
            os.path.abspath(page)
        )
    }


def _copy_command(path: str) -> str:
    """Return a command that copies a file from this machine.

    The machine is named by the address of an SSH session, or else by its host name.
    """
    # The client's address and port, then this machine's address and port
    connection = os.environ.get("SSH_CONNECTION", "").split()
    host, port = connection[2:] if len(connection) == 4 else (socket.gethostname(), "22")
    host = f"[{host}]" if ":" in host else host
    with suppress(KeyError, OSError):  # a container's user may have no name
        host = f"{getpass.getuser()}@{host}"

    options = [] if port == "22" else ["-P", port]
    return shlex.join(["scp", *options, f"{host}:{path}", "."])
