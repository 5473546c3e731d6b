"""report.html: one file that opens offline. Infos are formatted here and laid out by templates/report.html.j2.

Autoescape is on; what is marked safe is plotly.js and JSON in which no `<` is left.
"""

import json
import shlex
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from autotune.catalog import age
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_seconds, fmt_usd
from autotune.report import describe, figures, infos, parallel, tradeoffs
from autotune.report.comparison import price_text
from autotune.report.oom import OomReport, missed, oom_report
from autotune.report.style import OUTCOMES, plotly_js
from autotune.report.timeline import timeline
from autotune.study.summary import Recipe, StudySummary

if TYPE_CHECKING:
    from markupsafe import Markup

OUTCOME_NAMES = {outcome.value: name for outcome, (_, _, name) in OUTCOMES.items()}
STATES = {
    "fits": ("✓", "fits"),
    "mixed": ("◪", "mixed"),
    "oom": ("✕", "OOM"),
    "refused": ("▽", "refused"),
    "failed": ("!", "failed"),
    "untried": (DASH, "not tried"),
}
EVIDENCE = {
    Evidence.MEASURED: ("●", "timed on this GPU with the whole model"),
    Evidence.EXTRAPOLATED: ("◐", "timed on this GPU with fewer layers, and extended to all of them"),
    Evidence.PROJECTED: ("○", "measured on another GPU, and carried over to this one"),
    Evidence.ESTIMATED: ("◌", "computed from a formula; nothing ran"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """One number of the first screen, with what it means and what it rests on."""

    label: str
    value: str
    note: str
    evidence: Evidence


def render(summary: StudySummary, out_dir_name: str) -> str:
    """The whole page. `out_dir_name` is the directory in which the commands to start are run."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("autotune.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "count": fmt_count,
        "gib": fmt_gib,
        "usd": fmt_usd,
        "seconds": fmt_seconds,
        "hours": lambda hours: fmt_seconds(None if hours is None else hours * 3600),
        "percent": lambda share: DASH if share is None else f"{share:.1%}",
        "signed": lambda share: DASH if share is None else f"{share:+.1%}",
        "text": infos.value_text,
        "breaks": breaks,
        "missed": missed,
        "learned": describe.learned,
    }
    environment.filters |= filters
    return environment.get_template("report.html.j2").render(_view(summary, out_dir_name))


def breaks(text: str) -> "Markup":
    """Text that may be broken after an underscore, as the names of knobs are on a phone."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in text.split("_"))


def script_json(data: Any) -> "Markup":
    """JSON for a <script> element: no `<`, `>` or `&`, so that no string of it can end the element."""
    from markupsafe import Markup

    text = json.dumps(data, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)  # noqa: S704 (nothing that HTML could interpret is left in it)


def stats(recipe: Recipe, summary: StudySummary) -> tuple[Stat, ...]:
    """The numbers of the first screen."""
    winner, workload = recipe.winner, recipe.workload
    speed, peak, cost = winner.performance, winner.measurement, winner.cost
    rank = list(Evidence)
    both = [winner.evidence] + ([recipe.baseline.evidence] if recipe.baseline else [])
    passes = "1 epoch" if workload.epochs == 1 else f"{workload.epochs} epochs"
    run = f"{workload.examples:,} examples{' (assumed)' * workload.examples_assumed}, {passes}"
    usd = DASH if cost.interval_usd is None else " to ".join(map(fmt_usd, cost.interval_usd))
    # A duration is not broken across lines.
    hours = " to ".join(fmt_seconds(hours * 3600).replace(" ", "\u00a0") for hours in cost.interval_hours)
    start = "" if cost.startup_s is None else f"; about {fmt_seconds(cost.startup_s)} more to start"
    free = 1.0 - peak.peak_reserved_gib / peak.limit_gib
    mfu = f"; MFU {speed.mfu:.0%}" if speed.mfu is not None else ""
    return (
        Stat(
            label="Speed-up",
            value=DASH if recipe.speedup is None else f"{recipe.speedup:.2f}×",
            note=(
                "no baseline measured"
                if recipe.baseline is None
                else f"from {fmt_count(recipe.baseline.performance.tokens_per_second)} tokens/s of the baseline"
            ),
            evidence=max(both, key=rank.index),
        ),
        Stat(
            label="Cost of the full run",
            value=fmt_usd(cost.full_run_usd),
            note=f"{usd}; {run}" if cost.interval_usd else f"no price is known; {run}",
            evidence=cost.evidence,
        ),
        Stat(
            label="Time of the full run",
            value=fmt_seconds(cost.full_run_hours * 3600),
            note=f"{hours}; {cost.num_steps:,} steps of {fmt_seconds(speed.step_time_s)}{start}",
            evidence=cost.evidence,
        ),
        Stat(
            label="Useful tokens/s",
            value=fmt_count(speed.tokens_per_second),
            note=f"neither padding nor cut off{mfu}",
            evidence=winner.evidence,
        ),
        Stat(
            label="Peak reserved memory",
            value=fmt_gib(peak.peak_reserved_gib),
            note=f"{free:.0%} free of a limit of {fmt_gib(peak.limit_gib)}",
            evidence=winner.memory_evidence,
        ),
        Stat(
            label="Cost of this search",
            value=fmt_usd(summary.search_usd),
            note=f"{len(summary.trials):,} trials in {fmt_seconds(summary.wall_seconds)}",
            evidence=Evidence.MEASURED,
        ),
    )


def _commands(recipe: Recipe | None, out_dir_name: str) -> str:
    """What starts the full run."""
    if recipe is not None and recipe.trainer == "trl":
        return f"cd {shlex.quote(out_dir_name)}/export\nhead trl_sft.yaml   # has the command; name your dataset in it"
    return f"cd {shlex.quote(out_dir_name)}\nbash export/launch.sh --dataset data.jsonl"


def _headline(summary: StudySummary) -> str:
    recipe, counts = summary.recipe, summary.counts()
    if recipe is None:
        memory = counts["oom"] + counts["refused"] or not summary.trials
        return "Nothing fitted" if memory else "No trial came through"
    if recipe.baseline is None or recipe.speedup is None:
        return "The best configuration found; no baseline measured"
    if recipe.winner.config == recipe.baseline.config:
        return "The baseline is the best configuration found"
    return f"{recipe.speedup:.1f}× the speed of the baseline"


def _subject(recipe: Recipe | None) -> str | None:
    """'Mistral-7B on NVIDIA H200'."""
    if recipe is None:
        return None
    return f"{recipe.model.name} on {recipe.device.nvml_names[0] if recipe.device.nvml_names else recipe.device.name}"


def _price(recipe: Recipe) -> str:
    price = recipe.price
    if price is None:
        return "No price is known for this GPU, so no cost is shown."
    old = age(price.as_of, date.today())
    dated = f"as of {price.as_of}, {old} when this was written" if price.as_of else old
    doubt = "" if price.quotable else "; a reference, not a quote"
    spot = f" (spot {fmt_usd(price.spot_usd_per_hour)})" if price.spot_usd_per_hour is not None else ""
    return f"{fmt_usd(price.usd_per_hour)} an hour{spot} at {price.provider}, {dated}{doubt}. Source: {price.source}."


def _breakdown(summary: StudySummary) -> str:
    """'12 trials: 8 fit, 2 out of memory, 2 refused'."""
    parts = []
    for outcome, (_, _, name) in OUTCOMES.items():
        number = sum(row.outcome is outcome for row in summary.trials)
        if number:
            parts.append(f"{number:,} {'fit' if outcome is Outcome.OK else name}")
    total = f"{len(summary.trials):,} {'trial' if len(summary.trials) == 1 else 'trials'}"
    return f"{total}: {', '.join(parts)}" if parts else "no trial was run"


def _closest(report: OomReport) -> Any:
    """The trial that missed the limit by least."""
    known = [entry for entry in report.entries if entry.margin is not None]
    return min(known, key=lambda entry: (entry.margin, entry.number), default=None)


def draw(summary: StudySummary) -> dict[str, dict[str, Any] | None]:
    """The page's figures by name, as the data that Plotly.newPlot takes; None where there is nothing to show."""
    recipe = summary.recipe
    return {
        "scatter": figures.scatter(infos.scatter(summary)),
        "history": figures.history(infos.history(summary)),
        "timeline": figures.timeline(timeline(summary)),
        "parallel": figures.parallel(parallel.parallel(summary)),
        "importances": figures.importances(infos.importances(summary)),
        "memory": figures.memory(infos.memory(summary)),
        "cards": figures.cards(summary.cards),
        "explanation": figures.explanation(summary.explanation),
        "capability": figures.capability(tradeoffs.cells(recipe) if recipe else ()),
        "quality": figures.quality(summary.quality, recipe.winner.config if recipe else None),
    }


def _view(summary: StudySummary, out_dir_name: str) -> dict[str, Any]:
    """Everything that the template reads."""
    from markupsafe import Markup

    recipe, report = summary.recipe, oom_report(summary)
    cells = tradeoffs.cells(recipe) if recipe else ()
    drawn = draw(summary)
    # A figure fewer is not a reason for 5 MB: without any, plotly.js stays out.
    source = plotly_js() if any(drawn.values()) else ""
    return {
        "summary": summary,
        "recipe": recipe,
        "headline": _headline(summary),
        "subject": _subject(recipe),
        "breakdown": _breakdown(summary),
        "words": describe.configuration(recipe) if recipe else (),
        "stats": stats(recipe, summary) if recipe else (),
        "price": _price(recipe) if recipe else None,
        "commands": _commands(recipe, out_dir_name),
        "compare": infos.compare(recipe) if recipe else (),
        "spent": timeline(summary).said(),
        "verified": describe.verification(summary.verification) if summary.verification else (),
        "effect": lambda knob: describe.ablation_effect(summary.explanation, knob) if summary.explanation else "",
        "map": infos.feasibility(summary),
        "costs": infos.costs(recipe) if recipe else (),
        "cells": cells,
        "price_of": lambda card: price_text(card.price, date.today()),
        "lengths": tradeoffs.lengths(summary),
        "fingerprint": infos.fingerprint(recipe) if recipe else (),
        "oom": report,
        "closest": _closest(report),
        "drawn": {name: data is not None for name, data in drawn.items()},
        "figures_json": script_json({name: data for name, data in drawn.items() if data is not None}),
        "plotly_js": Markup(source),  # noqa: S704 (the library's own file)
        "states": STATES,
        "outcome_names": OUTCOME_NAMES,
        "evidence": {kind.value: value for kind, value in EVIDENCE.items()},
    }
