"""The output of `autotune run` on stderr: a live status and colours on a terminal, plain lines elsewhere."""

import json
import os
import shlex
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import date
from typing import TYPE_CHECKING, Any

from autotune.catalog import describe_price
from autotune.cli.terminal import console
from autotune.core.probe_types import Evidence, Outcome, Rung
from autotune.core.serialization import to_data
from autotune.core.text import study_command
from autotune.core.units import fmt_count, fmt_gib, fmt_seconds, fmt_usd
from autotune.planning.more_gpus import on_other_numbers
from autotune.problem.setup import Setup
from autotune.problem.task import Task
from autotune.report import describe
from autotune.report.infos import candidates, trade_offs
from autotune.study.summary import Candidate, Recipe, StudySummary, TrialRecord, summary_data

if TYPE_CHECKING:
    from rich.text import Text

    from autotune.study.named_configs import ConfigResult

STATUS_EVERY_S = 30.0  # without a terminal
_COLUMNS = {  # of the table of results: the heading, and the number's name in `describe`
    "tokens/s": "useful tokens/s",
    "step": "optimizer step",
    "peak": "peak reserved",
    "limit": "limit",
    "MFU": "MFU",
    "full run": "time",
    "USD": "USD",
}
_STYLES = {Outcome.OK: "green", Outcome.OOM: "yellow", Outcome.REFUSED: "dim", Outcome.SLOW: "dim"}


class Display(AbstractContextManager["Display"]):
    """One run's output. `quiet` prints nothing on stderr, `events` prints a JSON line on stdout for each event."""

    def __init__(self, *, budget_s: float, quiet: bool = False, events: bool = False) -> None:
        tty = sys.stderr.isatty()
        self._console = console(stderr=True, quiet=quiet, highlight=False, soft_wrap=not tty)
        self._status: Any = self._console.status("") if tty and not quiet else None
        self._budget_s = budget_s
        self._events = events
        self._started = time.monotonic()
        self._best: TrialRecord | None = None
        self._task: Task | None = None
        self._step = "starting"
        self._has_heading = False
        self._usd_per_hour: float | None = None
        self._ended = threading.Event()

    def __enter__(self) -> "Display":
        if self._status is not None:
            self._status.update(self)
            self._status.start()
        else:
            threading.Thread(target=self._print_status, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._status is not None:
            self._status.stop()

    def __rich__(self) -> "Text":
        """The text next to the spinner, made again at each refresh of the terminal."""
        from rich.text import Text

        return Text(self._status_line(), no_wrap=True, overflow="ellipsis")

    def _print_status(self) -> None:
        while not self._ended.wait(STATUS_EVERY_S):
            self._print(self._status_line(), "dim")

    def _event(self, kind: str, **data: Any) -> None:
        if self._events:
            header = {"event": kind, "seconds": round(time.monotonic() - self._started, 3)}
            sys.stdout.write(json.dumps(header | data) + "\n")
            sys.stdout.flush()

    def say(self, text: str) -> None:
        """Show a step that takes a while: next to the spinner on a terminal, as a line elsewhere."""
        self._event("step", text=text)
        self._step = text
        if self._status is None:
            self._print(text)

    def note(self, text: str, style: str | None = None) -> None:
        """Print a line that stays."""
        self._event("note", text=text)
        self._print(text, style)

    def plan(self, setup: Setup, *, fits_gib: float, trials: int | None, workers: int = 1) -> None:
        """Print what is about to happen, before any GPU time is spent."""
        self._task = task = setup.task
        workload = task.workload
        space, price, device = task.space, task.search_price, task.device
        proxy = f", measured on {task.measured_on.name} with a memory cap" if task.measured_on else ""
        if task.plays_ranks:
            proxy += f", one of which plays a rank of {' or '.join(map(str, task.numbers_of_gpus))}"
        cost = "no price is known for this device (--price USD_PER_HOUR)"
        if price is not None:
            self._usd_per_hour = price.usd_per_hour * workers
            search_usd = self._budget_s / 3600 * self._usd_per_hour
            cost = f"{describe_price(price, date.today())}; the search itself costs about {fmt_usd(search_usd)}"
        lines = {
            "study": task.study,
            "model": f"{task.model.name}, " + ("local weights" if task.model.weights else "random weights"),
            "device": f"{device.label}{proxy}, {fmt_gib(fits_gib)} before the reserve and the context",
            "workload": f"{describe.workload(workload)}, global batch {workload.global_batch} examples",
            "lengths": str(workload.lengths),
            "space": f"{space.name}: {space.size():,} configurations",
            "baseline": task.baselines[0].label(),
            "budget": fmt_seconds(self._budget_s) + (f" or {trials} trials in total" if trials else ""),
            "price": cost,
        }
        left_out = [str(removal) for removal in setup.removals]
        self._event("plan", **lines, left_out=left_out, warnings=list(setup.warnings))
        for name, text in lines.items():
            self._field(name, text)
        self._fields("left out", left_out, "dim")
        self._fields("warning", setup.warnings, "yellow")

    def resumed(self, rows: list[TrialRecord]) -> None:
        """Find the best trial of earlier sessions, with which new ones are compared."""
        for row in rows:
            self._compare(row)
        if best := self._best:
            speed = fmt_count(best.tokens_per_second)
            self.note(f"the best of them: trial {best.number}, {speed} tokens/s, {best.config.label()}")

    def _score(self, row: TrialRecord) -> float:
        speed = row.tokens_per_second or 0.0
        return self._task.score(row.config, speed) if self._task and speed else speed

    def _compare(self, row: TrialRecord) -> None:
        better = self._best is None or self._score(row) > self._score(self._best)
        if row.outcome is Outcome.OK and row.tokens_per_second is not None and better:
            self._best = row

    def trial(self, row: TrialRecord) -> None:
        """Print one line for a finished trial: its numbers and outcome, its configuration, details."""
        self._event("trial", **to_data(row))
        self._compare(row)
        if not self._has_heading:
            self._has_heading = True
            self._print(f"\n{'trial':>5}  {'tok/s':>7}  {'GiB':>5}  outcome  configuration", "dim")
        verdict = "best" if row is self._best else row.outcome.value
        gib = fmt_gib(describe.memory_gib(row)).removesuffix(" GiB")
        start = f"{row.number:>5}  {fmt_count(row.tokens_per_second):>7}  {gib:>5}  {verdict:<7}  "
        text = ": ".join(filter(None, (row.config.label(), "; ".join(_details(row)))))
        self._hang(start, text, _STYLES.get(row.outcome, "red"))
        self._step = "searching"

    def result(self, summary: StudySummary, out_dir: str) -> None:
        """Print the winner against the baseline, what it will cost, where the files are and what to do next."""
        self._event("result", **summary_data(summary, out_dir))
        recipe = summary.recipe
        if recipe is None:
            self._print("no configuration succeeded", "red")
            return
        winner = recipe.winner
        self._print("")
        self._field("winner", winner.config.label(), "bold green")
        self._field("", recipe.reason)
        of_numbers = recipe.by_gpus if len(recipe.by_gpus) > 1 else ()
        rows = candidates(summary) | {describe.gpus(one.config): one for one in of_numbers}
        self._print("\n".join(["", *_side_by_side(rows), ""]))
        if len(recipe.by_gpus) > 1:
            self._fields("GPUs", describe.gpu_choices(on_other_numbers(recipe).trainable, recipe.within_hours))
        lead = ", ".join(filter(None, (describe.speed_up(recipe), describe.speed_up_range(recipe))))
        self._field("speed-up", lead, "bold" if recipe.differs else None)
        if made_of := describe.factors(summary.decomposition):
            self._field("factors", made_of)
        self._field("evidence", describe.evidence(winner))
        self._field("full run", describe.full_run(winner.cost))
        self._field("numerics", recipe.numerics)
        self._fields("trade", trade_offs(recipe))
        if summary.verification:
            self._fields("verified", describe.verification(summary.verification))
        if summary.quality:
            ranked = summary.quality.ranked()
            self._fields("learned", [f"{finalist.config.label()}: {describe.learned(finalist)}" for finalist in ranked])
        self._fields("note", (*recipe.caveats, *summary.notes), "yellow")
        self._field("files", out_dir)
        self._next(summary, recipe, out_dir)

    def _next(self, summary: StudySummary, recipe: Recipe, out_dir: str) -> None:
        """Print what to do now. Commands are never broken across lines, so that they can be copied."""
        steps = describe.training_commands(summary, recipe, out_dir)
        steps["ask why it won"] = study_command("explain", summary.study)
        steps["read the report"] = _open_command(f"{out_dir}/report.html")
        for index, (purpose, command) in enumerate(steps.items()):
            self._field("" if index else "next", f"{purpose}:")
            self._console.print(f"{'':>9}    {command}", style="cyan", markup=False, emoji=False, soft_wrap=True)

    def configs(self, results: "list[ConfigResult]", out_dir: str) -> None:
        """The results of named configurations; the command prints their table."""
        self._event("result", configs=[result.data() for result in results])
        if not self._events:
            self._print(f"written: {out_dir}/suite.md and suite.json")

    def _status_line(self) -> str:
        """Progress first, then the current step: a narrow terminal cuts off the end."""
        elapsed_s = time.monotonic() - self._started
        elapsed = f"{_clock(elapsed_s)} elapsed"
        if self._usd_per_hour is not None:
            elapsed += f" (${elapsed_s / 3600 * self._usd_per_hour:.2f})"
        if self._budget_s > elapsed_s:  # a verification is outside the budget
            elapsed += f", {_clock(self._budget_s - elapsed_s)} left"
        if self._best is not None:
            elapsed += f", best {fmt_count(self._best.tokens_per_second)} tokens/s"
        return f"{elapsed}, {self._step}"

    def _field(self, name: str, text: str, style: str | None = None) -> None:
        """A named line of the plan or the result."""
        self._hang(f"{name:>9}  ", text, style, start_style="dim")

    def _fields(self, name: str, texts: Iterable[str], style: str | None = None) -> None:
        """Several lines, of which the first has the name."""
        for index, text in enumerate(texts):
            self._field("" if index else name, text, style)

    def _hang(self, start: str, text: str, style: str | None, *, start_style: str | None = None) -> None:
        """Print a line that continues below its own text where a terminal is too narrow."""
        from rich.text import Text

        if self._status is not None:
            width = max(self._console.width - len(start), 30)
            lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
            text = ("\n" + " " * len(start)).join(lines)
        line = Text.assemble((start, start_style or style or ""), (text, style or ""))
        self._console.print(line, emoji=False, soft_wrap=True)

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, emoji=False)


def _clock(seconds: float) -> str:
    """75 -> '1:15'."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _open_command(page: str) -> str:
    """A command that opens a page where a desktop is known, else the path of the page."""
    desktop = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return f"xdg-open {shlex.quote(page)}" if desktop and shutil.which("xdg-open") else os.path.abspath(page)


def _details(row: TrialRecord) -> list[str]:
    """What a trial's line adds to its numbers."""
    details = []
    if row.outcome is Outcome.OOM and row.margin is not None:
        details.append(f"{row.margin:.1%} over the limit" + (f" in {row.oom.phase}" if row.oom else ""))
    elif row.outcome is not Outcome.REFUSED and row.reason:
        details.append(row.reason)
    if row.evidence is Evidence.EXTRAPOLATED and row.rung is Rung.SHALLOW:
        details.append("extrapolated")
    if row.reused:
        details.append("reused")
    return details


def _side_by_side(rows: dict[str, Candidate]) -> list[str]:
    """A table with a line for each candidate."""
    table = [[" " * 9, *_COLUMNS]]
    for name, candidate in rows.items():
        numbers = describe.numbers(candidate)
        table.append([name, *(numbers[column].text for column in _COLUMNS.values())])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]
