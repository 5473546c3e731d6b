"""What `autotune run` shows while it works, on stderr: rich lines on a terminal, plain ones elsewhere."""

import json
import shlex
import sys
import threading
import time
from contextlib import AbstractContextManager
from datetime import date
from typing import Any

from autotune.catalog import age
from autotune.recipe import Candidate, StudySummary, TrialRow, summary_data
from autotune.result import Evidence, Outcome, Rung, to_data
from autotune.setup import Setup
from autotune.units import DASH, fmt_count, fmt_gib, fmt_seconds, fmt_usd

PLAIN_S = 30.0
_STYLES = {Outcome.OK: "green", Outcome.OOM: "yellow", Outcome.REFUSED: "dim", Outcome.SLOW: "dim"}


def _evidence(one: Candidate) -> str:
    if one.evidence is one.memory_evidence:
        return one.evidence
    return f"speed {one.evidence}, memory {one.memory_evidence}"


class Display(AbstractContextManager["Display"]):
    """One run's output. `quiet` shows only warnings and errors, `events` prints a JSON line on stdout for each event.

    Without a terminal a line says every half minute how far it is.
    """

    def __init__(self, *, budget_s: float, quiet: bool = False, events: bool = False) -> None:
        from rich.console import Console

        tty = sys.stderr.isatty()
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=not tty)
        self._status: Any = self._console.status("") if tty and not quiet else None
        self._budget_s, self._events = budget_s, events
        self._started = time.monotonic()
        self._best: TrialRow | None = None
        self._usd_per_hour: float | None = None
        self._ended = threading.Event()

    def __enter__(self) -> "Display":
        if self._status is not None:
            self._status.start()
        else:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._status is not None:
            self._status.stop()

    def _beat(self) -> None:
        while not self._ended.wait(PLAIN_S):
            self._print(self._header("running"), "dim")

    def _event(self, kind: str, **facts: Any) -> None:
        if self._events:
            about = {"event": kind, "seconds": round(time.monotonic() - self._started, 3)}
            sys.stdout.write(json.dumps(about | facts) + "\n")
            sys.stdout.flush()

    def say(self, text: str) -> None:
        """A step that takes a while: shown at the spinner on a terminal, as a line elsewhere."""
        self._event("step", text=text)
        if self._status is not None:
            self._spin(text)
        else:
            self._print(text)

    def note(self, text: str, style: str | None = None) -> None:
        """A line that stays."""
        self._event("note", text=text)
        self._print(text, style)

    def plan(self, setup: Setup, *, fits_gib: float, trials: int | None) -> None:
        """What is about to happen, before any GPU time is spent."""
        subject, workload = setup.subject, setup.subject.workload
        space, price, device = subject.space, subject.search_price, subject.device
        here = f", by {subject.measured_on.name} under a cap" if subject.measured_on else ""
        examples = f"{workload.examples:,} examples" + (" (assumed)" if workload.examples_assumed else "")
        budget = fmt_seconds(self._budget_s) + (f" or {trials} trials in all" if trials else "")
        if price is None:
            cost = "no price is known for this device (--price USD_PER_HOUR)"
        else:
            spent = self._budget_s / 3600 * price.usd_per_hour
            cost = (
                f"{fmt_usd(price.usd_per_hour)}/h ({price.provider}, {age(price.as_of, date.today())}); "
                f"the search itself costs about {fmt_usd(spent)}"
            )
        lines = {
            "study": subject.study,
            "model": f"{subject.model.name}, " + ("local weights" if subject.model.weights else "random weights"),
            "device": f"{device.name}{here}, {fmt_gib(fits_gib)} before headroom and context",
            "workload": f"{examples} x {workload.epochs} epoch(s), global batch {workload.global_batch} examples",
            "lengths": str(workload.lengths),
            "space": f"{space.name}: {space.size():,} configurations",
            "baseline": subject.baselines()[0].label(),
            "budget": budget,
            "price": cost,
        }
        self._usd_per_hour = price.usd_per_hour if price else None
        left_out = [str(removal) for removal in setup.removals]
        self._event("plan", **lines, left_out=left_out, warnings=list(setup.warnings))
        for name, text in lines.items():
            self._print(f"{name:>9}  {text}")
        for removal in setup.removals:
            self._print(f"{'left out':>9}  {removal}", "dim")
        for warning in setup.warnings:
            self._print(f"{'warning':>9}  {warning}", "yellow")

    def trial(self, row: TrialRow) -> None:
        """One line for a finished trial."""
        self._event("trial", **to_data(row))
        if row.tokens_per_second is not None:
            best = self._best.tokens_per_second if self._best else None
            if row.outcome is Outcome.OK and (best is None or row.tokens_per_second > best):
                self._best = row
            result = f"{fmt_count(row.tokens_per_second):>7} tok/s  {fmt_gib(row.peak_reserved_gib):>9}"
        else:
            result = f"{DASH:>7}        {DASH:>9}"
        verdict = row.outcome.value + (" (known)" if row.reused else "")
        if row.evidence is Evidence.EXTRAPOLATED and row.rung is Rung.SHALLOW:
            verdict += " [extrapolated]"
        if row is self._best:
            verdict += ", best"
        elif row.outcome is Outcome.OOM and row.margin is not None:
            verdict += f" in {row.oom.phase if row.oom else '?'}, over by {row.margin:.1%}"
        elif row.outcome not in (Outcome.OK, Outcome.OOM, Outcome.REFUSED):
            verdict += f": {row.reason}"
        self._print(f"{row.number:>4}  {row.config.label():<66} {result}  {verdict}", _STYLES.get(row.outcome, "red"))
        if self._status is not None:
            self._spin("searching")

    def result(self, summary: StudySummary, out_dir: str) -> None:
        """The winner against the baseline, what it will cost, where the files are and what to do next."""
        self._event("result", **summary_data(summary, out_dir))
        recipe = summary.recipe
        if recipe is None:
            self._print("no configuration came through", "red")
            return
        self._print("")
        winner, baseline = recipe.winner, recipe.baseline
        self._print(f"winner    {winner.config.label()}", "bold green")
        self._print(f"          {recipe.reason}")
        self._print(f"numerics  {recipe.numerics}")
        for name, one in (("winner", winner), ("baseline", baseline)):
            if one is None:
                self._print("baseline  none was measured: it did not fit, or failed")
                continue
            speed, memory = one.performance, one.measurement
            mfu = f", MFU {speed.mfu:.0%}" if speed.mfu else ""
            self._print(
                f"{name:<9} {fmt_count(speed.tokens_per_second)} tokens/s, {speed.samples_per_second:.3g} samples/s, "
                f"step {fmt_seconds(speed.step_time_s)}, {fmt_gib(memory.peak_reserved_gib)} of "
                f"{fmt_gib(memory.limit_gib)}{mfu}  [{_evidence(one)}]"
            )
        if recipe.speedup is not None:
            self._print(f"speed-up  {recipe.speedup:.2f} times the baseline [{winner.evidence}]")
        for name, one in (("full run", winner), ("baseline", baseline)):
            if one is not None:
                self._print(f"{name:<9} {self._cost(one)}")
        for price in recipe.prices():
            self._print(f"price     {price}")
        for text in summary.verification.said() if summary.verification else ():
            self._print(f"verified  {text}")
        for each in summary.quality.ranked() if summary.quality else ():
            self._print(f"learned   {each.config.label()}: {each.told()}")
        for caveat in (*recipe.caveats, *summary.notes):
            self._print(f"note      {caveat}", "yellow")
        self._print(f"files     {out_dir}")
        if recipe.trainer == "trl":
            from autotune.export.trl import command

            self._print(f"next      name your dataset in {out_dir}/export/trl_sft.yaml, then run the full run there:")
            self._print(f"          cd {shlex.quote(out_dir)}/export && {command(recipe)}")
        else:
            launch = shlex.quote(f"{out_dir}/export/launch.sh")
            self._print(f"next      bash {launch} --random-weights --max-steps 5   # tries the exported run")
            if recipe.model.weights or "/" in recipe.model.name:
                self._print(f"          bash {launch} --dataset data.jsonl   # the full run")
        self._print(f"          autotune explain {shlex.quote(summary.study)}   # why it won")
        self._print(f"          open {shlex.quote(out_dir + '/report.html')}")

    def configs(self, told: list[dict[str, Any]]) -> bool:
        """What a suite came to, where events are printed, instead of a table. Returns whether they are."""
        self._event("result", configs=told)
        return self._events

    def _cost(self, one: Any) -> str:
        cost = one.cost
        low, high = cost.interval_hours
        text = f"{fmt_seconds(cost.full_run_hours * 3600)} ({fmt_seconds(low * 3600)} to {fmt_seconds(high * 3600)})"
        if cost.full_run_usd is not None:
            text += f", {fmt_usd(cost.full_run_usd)}"
            text += f", {fmt_usd(cost.cost_per_1000_samples_usd)} per 1,000 samples"
        if cost.kwh is not None:
            text += f", {cost.kwh:.3g} kWh"
        return text

    def _header(self, text: str) -> str:
        elapsed = time.monotonic() - self._started
        best = f", best {fmt_count(self._best.tokens_per_second)} tokens/s" if self._best else ""
        gone, left = fmt_seconds(elapsed), self._budget_s - elapsed
        if self._usd_per_hour is not None:
            gone += f" and ${elapsed / 3600 * self._usd_per_hour:.2f}"
        return f"{text}   [{gone} gone, {fmt_seconds(left) if left > 0 else 'no time'} left{best}]"

    def _spin(self, text: str) -> None:
        from rich.markup import escape

        self._status.update(escape(self._header(text)))

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, emoji=False)
