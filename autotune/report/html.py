"""Renders report.html: one file that opens offline.

This module formats the values, and templates/report.html.j2 lays them out. Autoescape is on. The
only texts that are marked as safe are HTML tags that this package writes itself, and JSON without
any `<`.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.catalog import describe_price
from autotune.core.files import load_data
from autotune.core.knobs import KNOBS
from autotune.core.pages import environment
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.text import kebab_case
from autotune.core.units import DASH, fmt_seconds, fmt_usd
from autotune.export.header import trained_tokens_text
from autotune.report import describe, figures, infos
from autotune.report.oom import excess_text, oom_report
from autotune.report.style import plotly_js
from autotune.report.timeline import timeline
from autotune.study.summary import Recipe, StudySummary

if TYPE_CHECKING:
    from markupsafe import Markup


PARTS = {  # the parts of the page below its first screen, by their ids
    "tried": "What was tried",
    "why": "What makes the difference",
    "costs": "What else it would cost",
    "sure": "How sure the numbers are",
    "words": "What the words mean",
}
OF_WINNERS = ("why", "costs")  # the parts that only a page with a winner has
FEW = 12  # a table with more rows is folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """One number on the report's first screen, with a note and its evidence."""

    label: str
    value: str
    note: str
    evidence: Evidence


def render(summary: StudySummary, out_dir: str) -> str:
    """Render the whole page.

    `out_dir` is the path of the study's directory in the page's commands.
    """
    return page("report.html.j2", _view(summary, out_dir))


def page(template: str, view: dict[str, Any]) -> str:
    """Render a page from a template, which reads only `view`.

    If `view` has a `glossary`, names on the page become links to their meanings in it.
    """
    explained = {name.casefold() for name in view.get("glossary", ())}
    pages = environment("autotune.report")
    pages.filters |= {
        "text": infos.value_text,
        "breaks": breaks,
        "term": partial(term, explained=explained),
        "place": place,
        "missed": excess_text,
        "learned": describe.learned_text,
        "hours_range": describe.hours_range,
        "usd_range": describe.usd_range,
        "label": lambda outcome: describe.LABELS[Outcome(outcome)],
    }
    return pages.get_template(template).render(view)


def draw(summary: StudySummary) -> dict[str, dict[str, Any] | None]:
    """Return {name: figure} for the page; a figure is the data for Plotly.newPlot, or None."""
    recipe = summary.recipe
    limit_gib = infos.limit_gib(summary)

    return {
        "scatter": figures.scatter(summary.trials, infos.candidates(summary), limit_gib),
        "history": figures.history(summary.trials, infos.best_so_far(summary)),
        "timeline": figures.timeline(timeline(summary)),
        "parallel": figures.parallel(infos.parallel(summary)),
        "importances": figures.importances(infos.importances(summary)),
        "memory": figures.memory(infos.memory(summary), limit_gib),
        "cards": figures.cards(summary.cards, recipe.device.name if recipe else None),
        "scaling": figures.scaling(summary.scaling) if recipe else None,
        "explanation": figures.explanation(summary.explanation),
        "capability": figures.capability(infos.learning_cells(recipe) if recipe else ()),
        "quality": figures.quality(summary.quality, recipe.config if recipe else None),
        "rates": figures.rates(summary.learning),
    }


def stats(recipe: Recipe, summary: StudySummary) -> tuple[Stat, ...]:
    """Return the numbers on the first screen of the report."""
    winner = recipe.winner
    cost = winner.cost
    text = {name: number.text for name, number in describe.numbers(winner).items()}

    # The notes below the numbers.
    # The number itself is above its note, so the note does not repeat it.
    speedup = describe.speed_up_range(recipe)
    if not recipe.differs:
        speedup = ": ".join(filter(None, (describe.speed_up(recipe), speedup)))
    elif recipe.disagreement is not None:
        speedup = recipe.disagreement
    if factors := describe.factors(summary.decomposition):
        speedup += f"; {factors}"
    usd = describe.usd_range(cost) if cost.interval_usd else "no price is known"
    hours = " to ".join(map(_keep_together, describe.hours_range(cost).split(" to ")))
    time = f"{hours}; {cost.num_steps:,} steps of {_keep_together(text['optimizer step'])}"
    if cost.startup_s is not None:
        time += f"; about {_keep_together(fmt_seconds(cost.startup_s))} more to start"
    if between := describe.pauses(cost):
        time += f"; {' and '.join(between)} included"
    mfu = "" if winner.performance.mfu is None else f"; MFU {winner.performance.mfu:.0%}"
    useful = f"without padding and cut-off tokens{trained_tokens_text(recipe)}{mfu}"
    free = f"{text['free below the limit']} free of a limit of {_keep_together(text['limit'])}"
    free += "" if recipe.example_gib is None else " on an example card"
    search = f"{len(summary.trials):,} trials in {fmt_seconds(summary.wall_seconds)}"
    usd += f"; {describe.workload(recipe.workload)}"

    rows = (
        ("Speed-up", _speed_up(recipe), speedup, recipe.speedup_evidence),
        ("Cost of the full run", text["USD"], usd, cost.evidence),
        ("Time of the full run", text["time"], time, cost.evidence),
        ("Useful tokens/s", text["useful tokens/s"], useful, winner.evidence),
        ("Peak reserved memory", text["peak reserved"], free, winner.memory_evidence),
        ("Cost of this search", fmt_usd(summary.search_usd), search, Evidence.MEASURED),
    )
    return tuple(
        Stat(label=label, value=value, note=note, evidence=kind)
        for label, value, note, kind in rows
    )


def _speed_up(recipe: Recipe) -> str:
    """Format the winner's speed-up: 'none' if speeds do not differ, or a dash if it is unknown."""
    if recipe.differs:
        return f"{describe.rounded(*describe.speed_up_ends(recipe), 2)}×"
    return DASH if recipe.speedup is None else "none"


def _keep_together(text: str) -> str:
    """Return the text with non-breaking spaces, for example in a number with its unit."""
    return text.replace(" ", "\u00a0")


def breaks(text: str) -> "Markup":
    """Return a knob's name with a possible line break after each underscore, for phones."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in text.split("_"))


def place(name: str) -> str:
    """Return the id of a term's explanation on the page."""
    return f"term-{kebab_case(name)}"


def term(name: str, explained: Collection[str]) -> "Markup":
    """Return the name of a term or a knob as a link to its meaning, or as text if unexplained."""
    from markupsafe import Markup

    link = Markup('<a class="term" href="#{}">{}</a>')
    return link.format(place(name), breaks(name)) if name.casefold() in explained else breaks(name)


def glossary() -> dict[str, str]:
    """Return the meaning of each term, and the description of each knob."""
    terms: dict[str, str] = load_data("autotune.report", "terms")
    return terms | {name: knob.description for name, knob in KNOBS.items()}


def answer_glossary(words: Iterable[str]) -> dict[str, str]:
    """Return the meanings of those words that the glossary of answers explains."""
    terms: dict[str, str] = load_data("autotune.report", "answer_terms")
    known = {word.casefold() for word in words}
    return {name: meaning for name, meaning in terms.items() if name.casefold() in known}


def script_json(data: Any) -> "Markup":
    """Return JSON for a <script> element.

    The text has no `<`, `>` or `&`, so no string in it can end the element.
    """
    from markupsafe import Markup

    text = json.dumps(data, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)  # noqa: S704 (the text has no character that HTML interprets)


def _view(summary: StudySummary, out_dir: str) -> dict[str, Any]:
    """Return everything that the template reads."""
    recipe = summary.recipe
    oom = oom_report(summary)
    drawn = {name: data for name, data in draw(summary).items() if data is not None}
    misses = [
        (entry.margin, entry.number, entry) for entry in oom.entries if entry.margin is not None
    ]

    view: dict[str, Any] = {
        "summary": summary,
        "recipe": recipe,
        "headline": _headline(summary),
        "breakdown": describe.breakdown(summary),
        "savings": describe.savings(summary),
        "spent": timeline(summary).sentences(),
        "map": infos.feasibility(summary),
        "parallel_px": figures.parallel_px(infos.parallel(summary)),
        "explained": bool(summary.explanation and summary.explanation.undone),
        "num_measured": len(infos.measured_speeds(summary)),
        "lengths": infos.row_lengths(summary),
        "oom": oom,
        "closest": min(misses)[-1] if misses else None,
        "effect": lambda knob: (
            describe.ablation_effect(summary.explanation, knob) if summary.explanation else ""
        ),
        "verification": describe.verification(summary.verification) if summary.verification else [],
        "price_of": lambda card: describe_price(card.price, date.today()),
        "parts": PARTS
        if recipe
        else {place: name for place, name in PARTS.items() if place not in OF_WINNERS},
        "glossary": glossary(),
        "few": FEW,
        "drawn": drawn,
        "figures_json": script_json(drawn),
        "plotly_js": plotly_js(),
    }

    # Only a page with a winner has these values.
    if recipe is not None:
        view |= {
            "device": next(iter(recipe.device.nvml_names), recipe.device.name),
            "phrases": describe.configuration(recipe),
            "speed_up": describe.speed_up(recipe),
            "stats": stats(recipe, summary),
            "price": _price(recipe),
            "commands": describe.training_commands(summary, recipe, out_dir),
            "intervals": f"{describe.intervals(recipe.winner)} "
            f"{describe.left_out(recipe.winner.cost)}",
            "compare": (rows := infos.compare(recipe)),
            "unchanged": [
                row.name for row in rows if row.group == "Configuration" and not row.changed
            ],
            "costs": infos.costs(recipe),
            "cells": infos.learning_cells(recipe),
            "scaling": summary.scaling,
            "gpu_choices": describe.gpu_choices(summary.scaling, recipe.within_hours),
            "fingerprint": infos.fingerprint(recipe),
        }
    return view


def _headline(summary: StudySummary) -> str:
    """Return the headline: a failed verification, the speed-up, or why there is no winner."""
    recipe = summary.recipe
    counts = summary.counts()
    if recipe is None:
        memory = counts["oom"] + counts["refused"] or not summary.trials
        return "Nothing fits" if memory else "No trial succeeded"
    text = describe.broken_promise(summary) or describe.speed_up(recipe)
    return text[0].upper() + text[1:]


def _price(recipe: Recipe) -> str:
    """Describe the price of the GPU with its date and its source."""
    price = recipe.price
    if price is None:
        return "No price is known for this GPU, so no cost is shown."
    spot = (
        f" (spot {fmt_usd(price.spot_usd_per_hour)})" if price.spot_usd_per_hour is not None else ""
    )
    dated = f", as of {price.as_of}" if price.as_of else ""
    return f"{describe_price(price, date.today())}{dated}{spot}. Source: {price.source}."
