"""The output of `autotune run`: its progress on stderr, and the answer on stdout.

The progress is a live status on a terminal, and plain lines elsewhere.
"""

import json
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

from autotune.catalog import describe_price
from autotune.cli.last_screen import Field, answer, next_steps, side_by_side
from autotune.cli.terminal import console, wrapped
from autotune.core.json_view import json_data
from autotune.core.probe_types import Evidence, Outcome, Rung
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_count, fmt_gib, fmt_hours, fmt_seconds, fmt_usd
from autotune.problem.setup import Setup
from autotune.problem.task import Task
from autotune.report import describe
from autotune.report.infos import trade_offs
from autotune.study.summary import Recipe, StudySummary, TrialRecord, summary_data

if TYPE_CHECKING:
    from rich.text import Text

    from autotune.study.named_configs import ConfigResult

STATUS_EVERY_S = 30.0  # seconds between two status lines if stderr is not a terminal
REFRESHES_PER_S = 4  # on a terminal; more would be too many for a slow connection
# Lines of the last screen besides its title and its fields: blank lines, and the shell's prompt
MARGIN = 4
REUSED = (
    "(reused: the same probe has run on this device before, and its stored result is used; "
    "--set fresh=true measures again)"
)
_STYLES = {Outcome.OK: "green", Outcome.OOM: "yellow", Outcome.REFUSED: "dim", Outcome.SLOW: "dim"}


class Display(AbstractContextManager["Display"]):
    """The output of one run.

    `quiet` suppresses all output except JSON. `events` adds a JSON line on stdout for each event.
    With `events` or `as_json`, stdout is only for JSON, so the answer is printed on stderr, too.
    `storage` is the value of `--storage`, which the printed commands repeat. `started` is the
    time.monotonic() at which the budget starts, by default now.
    """

    def __init__(
        self,
        *,
        budget_s: float,
        started: float | None = None,
        quiet: bool = False,
        events: bool = False,
        as_json: bool = False,
        storage: str | None = None,
    ) -> None:
        self._storage = storage
        tty = sys.stderr.isatty()
        self._console = console(stderr=True, quiet=quiet, highlight=False, soft_wrap=not tty)
        self._for_answer = self._console
        if not (events or as_json):
            self._for_answer = console(
                quiet=quiet, highlight=False, soft_wrap=not sys.stdout.isatty()
            )
        self._status: Any = (
            self._console.status("", refresh_per_second=REFRESHES_PER_S)
            if tty and not quiet
            else None
        )

        self._budget_s = budget_s
        self._events = events
        self._started = time.monotonic() if started is None else started
        self._best: TrialRecord | None = None
        # The last measurement of each configuration: a confirmation replaces the first one.
        self._measured = dict[TrainConfig, TrialRecord]()
        self._task: Task | None = None
        self._step = "starting"
        # For each configuration, the outcome in its last printed line
        self._printed = dict[TrainConfig, Outcome]()
        self._explained_reuse = False
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
        """Return the live status next to the spinner; each line answers one question.

        The library rich calls this method at each refresh of the terminal.
        """
        from rich.text import Text

        lines = [("time", self._clock_text()), ("now", self._step), ("best", self._best_run())]
        text = "\n".join(f"{name:<4}  {value}" for name, value in lines if value)
        return Text(text, no_wrap=True, overflow="ellipsis")

    def _print_status(self) -> None:
        while not self._ended.wait(STATUS_EVERY_S):
            self._print(self._status_line(), "dim")

    def _event(self, kind: str, **data: Any) -> None:
        if self._events:
            header = {"event": kind, "seconds": round(time.monotonic() - self._started, 3)}
            sys.stdout.write(json.dumps(header | data) + "\n")
            sys.stdout.flush()

    def say(self, text: str) -> None:
        """Show the name of a long step: next to the spinner on a terminal, otherwise as a line."""
        self._event("step", text=text)
        self._step = text
        if self._status is None:
            self._print(text)

    def note(self, text: str, style: str | None = None) -> None:
        """Print a line that stays above the live status."""
        self._event("note", text=text)
        self._print(text, style)

    def plan(self, setup: Setup, *, fits_gib: float, trials: int | None, workers: int) -> None:
        """Print the study's plan before any GPU time is spent."""
        self._task = task = setup.task
        workload = task.workload
        space = task.space
        price = task.search_price
        device = task.device

        proxy = (
            f", measured on {task.measured_on.name} with a memory cap" if task.measured_on else ""
        )
        if task.plays_ranks:
            proxy += (
                ", which simulates one rank of a run on "
                f"{' or '.join(map(str, task.numbers_of_gpus))} GPUs"
            )

        memory = (
            f"{fmt_gib(fits_gib)} of memory, including the headroom and the memory of libraries"
        )
        if task.example_gib is not None:
            memory = (
                f"limited to {fmt_gib(task.example_gib)}, as on a small GPU, so that some "
                "configurations do not fit (--memory-gib sets another limit)"
            )

        cost = "no price is known for this device (--price USD_PER_HOUR)"
        if price is not None:
            self._usd_per_hour = price.usd_per_hour * workers
            search_usd = self._budget_s / 3600 * self._usd_per_hour
            cost = (
                f"{describe_price(price, date.today())}; the search itself costs about "
                f"{fmt_usd(search_usd)}"
            )

        lines = {
            "study": task.study,
            "model": f"{task.model.name}, "
            + ("local weights" if task.model.weights else "random weights"),
            "device": f"{device.label}{proxy}, {memory}",
            "workload": f"{describe.workload(workload)}, global batch {workload.global_batch} "
            "examples",
            "lengths": str(workload.lengths),
            "space": f"{space.name}: {space.size():,} configurations",
            "baseline": task.baselines[0].label(),
            "budget": fmt_seconds(self._budget_s)
            + (f" or {trials} trials in total" if trials else ""),
            "price": cost,
        }

        left_out = [str(removal) for removal in setup.removals]
        self._event("plan", **lines, left_out=left_out, warnings=list(setup.warnings))
        for name, text in lines.items():
            self._field(name, text)
        self._fields("left out", left_out, "dim")
        self._fields("warning", setup.warnings, "yellow")

    def resumed(self, rows: list[TrialRecord]) -> None:
        """Find the best trial of earlier sessions, so that new trials are compared with it."""
        for row in rows:
            self._compare(row)
        if best := self._best:
            speed = fmt_count(best.tokens_per_second)
            self.note(
                f"the best so far: trial {best.number}, {speed} tokens/s, {best.config.label()}"
            )

    def _score(self, row: TrialRecord) -> float:
        speed = row.tokens_per_second or 0.0
        return self._task.score(row.config, speed) if self._task and speed else speed

    def _compare(self, row: TrialRecord) -> None:
        if row.outcome is not Outcome.OK or row.tokens_per_second is None:
            return
        known = self._measured.get(row.config)
        if known is None or known.tokens_per_second != row.tokens_per_second:
            self._measured[row.config] = row
        self._best = max(self._measured.values(), key=self._score)

    def trying(self, number: int, config: TrainConfig) -> None:
        """Show in the status which trial is being probed; `trial` later prints its result."""
        self._step = f"trial {number}: {config.label()}"

    def trial(self, row: TrialRecord) -> None:
        """Print a line for a finished trial: numbers or outcome, then configuration and details.

        No line is printed for a reused result if an earlier line already shows this outcome for the
        same configuration, unless the trial is the best so far.
        """
        self._event("trial", **to_data(row))
        self._compare(row)
        self._step = "searching"
        if row.reused and row is not self._best and self._printed.get(row.config) is row.outcome:
            return

        if not self._printed:
            self._print(f"\n{'trial':>5}  {'tok/s':>7}  {'GiB':>5}  outcome  configuration", "dim")

        verdict = "best" if row is self._best else row.outcome.value
        gib = fmt_gib(describe.memory_gib(row)).removesuffix(" GiB")
        start = f"{row.number:>5}  {fmt_count(row.tokens_per_second):>7}  {gib:>5}  {verdict:<7}  "
        text = ": ".join(filter(None, (row.config.label(), "; ".join(_details(row)))))
        self._hang(start, text, _STYLES.get(row.outcome, "red"))
        self._printed[row.config] = row.outcome
        if row.is_from_other and not self._explained_reuse:
            self._explained_reuse = True
            self._hang(" " * 7, REUSED, "dim")

    def result(self, summary: StudySummary, out_dir: str) -> None:
        """Print the winner and the baseline, the costs, the files and the next steps."""
        self._event("result", **summary_data(summary, out_dir))
        recipe = summary.recipe
        steps = next_steps(summary, out_dir, self._storage)
        if recipe is None:
            text = "no configuration succeeded" if summary.trials else "no trial has ended"
            self._print(text, "red")
            self._next(steps)
            return
        if self._status is not None:
            self._status.stop()
        self._details(summary, recipe)
        self._turn_page()
        self._console = self._for_answer

        title = describe.headline(summary)
        fields = answer(summary, recipe)
        table = side_by_side(summary, recipe)
        if self._status is not None:
            # On a terminal, only the notes that fit on the screen are printed below the fields.
            height = len(self._wrap("", title)) + sum(self._height(field) for field in fields)
            used = height + len(table) + 2 * len(steps) + MARGIN
            fields += self._notes_for(
                [*recipe.caveats, *summary.notes], self._console.height - used
            )

        broken = describe.broken_promise(summary)
        self._hang("", title, "bold red" if broken else "bold")
        for field in fields:
            self._field(field.name, field.text, field.style)
        self._print("\n".join(["", *table, ""]))
        self._next(steps)

    def _next(self, steps: dict[str, str]) -> None:
        """Print the next command lines, each below its purpose."""
        for index, (purpose, command) in enumerate(steps.items()):
            self._field("" if index else "next", f"{purpose}:")
            # A command is printed without line breaks, so that the user can copy it.
            self._console.print(
                f"{'':>9}    {command}", style="cyan", markup=False, emoji=False, soft_wrap=True
            )

    def _notes_for(self, notes: list[str], lines: int) -> list[Field]:
        """Return the notes that fit into `lines` lines of the terminal.

        If some notes do not fit, the last line gives their number.
        """
        fields: list[Field] = []
        for index, text in enumerate(notes):
            field = Field(name="" if index else "note", text=text, style="yellow")
            lines -= self._height(field)
            if lines < (index + 1 < len(notes)):
                more = f"{len(notes) - index} more notes are above and in the report"
                return [*fields, replace(field, text=more)]
            fields.append(field)
        return fields

    def _height(self, field: Field) -> int:
        """Return the number of terminal lines that a field takes."""
        return len(self._wrap(f"{field.name:>9}  ", field.text))

    def _details(self, summary: StudySummary, recipe: Recipe) -> None:
        """Print the reasons for the answer, before the last screen.

        The report also has the reasons.
        """
        self._print("")
        self._field("why", recipe.reason)
        if len(recipe.by_gpus) > 1:
            self._fields("GPUs", describe.gpu_choices(summary.scaling, recipe.within_hours))
        if made_of := describe.factors(summary.decomposition):
            self._field("factors", made_of)
        self._field("full run", describe.full_run(recipe.winner.cost))
        self._field("numerics", recipe.numerics)
        self._fields("trade", trade_offs(recipe))

        if summary.verification:
            self._fields("verified", describe.verification(summary.verification))
        if summary.quality:
            ranked = summary.quality.ranked()
            self._fields(
                "learned",
                [
                    f"{finalist.config.label()}: {describe.learned_text(finalist)}"
                    for finalist in ranked
                ],
            )

        self._fields("note", (*recipe.caveats, *summary.notes), "yellow")
        self._print("")

    def _turn_page(self) -> None:
        """Scroll the terminal's content into its history, so that printing continues at the top."""
        is_terminal = self._status is not None and self._for_answer.is_terminal
        if is_terminal and not self._console.is_dumb_terminal:
            from rich.control import Control

            self._console.print("\n" * self._console.height, end="")
            self._console.control(Control.home())

    def configs(self, results: "list[ConfigResult]", out_dir: str) -> None:
        """Print the files with the results of the listed configurations.

        `commands.run` prints the results themselves at the end.
        """
        self._event("result", configs=json_data(results))
        if not self._events:
            self._print(f"written: {out_dir}/suite.md and suite.json")

    def _status_line(self) -> str:
        """Return the status as one line.

        The progress comes before the current step, because a narrow terminal truncates the end of
        the line.
        """
        return ", ".join(filter(None, (self._clock_text(), self._best_speed(), self._step)))

    def _clock_text(self) -> str:
        """Return the time as '0:58 elapsed ($0.01), 1:01 left'."""
        elapsed_s = time.monotonic() - self._started
        text = f"{_clock(elapsed_s)} elapsed"
        if self._usd_per_hour is not None:
            text += f" (${elapsed_s / 3600 * self._usd_per_hour:.2f})"
        # A verification does not count against the budget, so the elapsed time may exceed the
        # budget.
        if self._budget_s > elapsed_s:
            text += f", {_clock(self._budget_s - elapsed_s)} left"
        return text

    def _best_speed(self) -> str:
        return (
            "" if self._best is None else f"best {fmt_count(self._best.tokens_per_second)} tokens/s"
        )

    def _best_run(self) -> str:
        """Describe the best trial so far, which is not confirmed yet, or return an empty text.

        For example: 'trial 3, 10,531 tokens/s, full run about 49 s, $0.0082'.
        """
        best = self._best
        task = self._task
        if best is None or task is None or not best.tokens_per_second:
            return ""
        hours = task.hours_of_steps(best.config, best.tokens_per_second)
        price = task.price and task.price.multiply(best.config.num_gpus)
        usd = f", {fmt_usd(hours * price.usd_per_hour)}" if price else ""
        speed = f"{fmt_count(best.tokens_per_second)} tokens/s"
        return f"trial {best.number}, {speed}, full run about {fmt_hours(hours)}{usd}"

    def _field(self, name: str, text: str, style: str | None = None) -> None:
        """Print one field of the plan or the result: a name and a text."""
        self._hang(f"{name:>9}  ", text, style, start_style="dim")

    def _fields(self, name: str, texts: Iterable[str], style: str | None = None) -> None:
        """Print one field with several lines. Only the first line has the name."""
        for index, text in enumerate(texts):
            self._field("" if index else name, text, style)

    def _hang(
        self, start: str, text: str, style: str | None, *, start_style: str | None = None
    ) -> None:
        """Print `start` and a text.

        On a narrow terminal, the text continues on further lines, indented by the width of `start`.
        """
        from rich.text import Text

        lines = self._wrap(start, text) if self._console.is_terminal else [f"{start}{text}"]
        rest = "\n".join(lines)[len(start) :]
        line = Text.assemble((start, start_style or style or ""), (rest, style or ""))
        self._console.print(line, emoji=False, soft_wrap=True)

    def _wrap(self, start: str, text: str) -> list[str]:
        """Return the lines of `start` and a text on the terminal."""
        return wrapped(text, start, self._console.width)

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, emoji=False)


def _clock(seconds: float) -> str:
    """Format seconds as minutes and seconds: 75 -> '1:15'."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _details(row: TrialRecord) -> list[str]:
    """Return the details at the end of a trial's line."""
    details = []
    if row.outcome is Outcome.OOM and row.margin is not None:
        details.append(describe.overrun(row))
    elif row.outcome is not Outcome.REFUSED and row.reason:
        details.append(row.reason)
    if row.evidence is Evidence.EXTRAPOLATED and row.rung is Rung.SHALLOW:
        details.append("extrapolated")
    if row.is_from_other:
        details.append("reused")
    return details
