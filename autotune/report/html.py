"""report.html: one file that opens offline. Values are formatted here and laid out by templates/report.html.j2.

Autoescape is on; the only text marked safe is plotly.js and JSON without any `<`.
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
from autotune.core.text import dashed
from autotune.core.units import DASH, fmt_seconds, fmt_usd
from autotune.export.header import trained_on
from autotune.report import describe, figures, infos
from autotune.report.oom import missed, oom_report
from autotune.report.style import plotly_js
from autotune.report.timeline import timeline
from autotune.study.summary import Recipe, StudySummary

if TYPE_CHECKING:
    from markupsafe import Markup


PARTS = {  # of the page below its first screen, by their ids
    "tried": "What was tried",
    "why": "What makes the difference",
    "costs": "What else it would cost",
    "sure": "How sure the numbers are",
    "words": "What the words mean",
}
OF_WINNERS = ("why", "costs")  # parts of a page that has a winner
FEW = 12  # rows of a table that is not folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """One number of the first screen, with what it means and its evidence."""

    label: str
    value: str
    note: str
    evidence: Evidence


def render(summary: StudySummary, out_dir: str) -> str:
    """The whole page. `out_dir` is the study's directory, as its commands name it."""
    return page("report.html.j2", _view(summary, out_dir))


def page(template: str, view: dict[str, Any]) -> str:
    """A page; `view` is all that its template reads. Names in its `glossary`, if it has one, lead to their meanings."""
    pages = environment("autotune.report")
    pages.filters |= {
        "text": infos.value_text,
        "breaks": breaks,
        "term": partial(term, explained={name.casefold() for name in view.get("glossary", ())}),
        "place": place,
        "missed": missed,
        "learned": describe.learned,
        "hours_range": describe.hours_range,
        "usd_range": describe.usd_range,
        "label": lambda outcome: describe.LABELS[Outcome(outcome)],
    }
    return pages.get_template(template).render(view)


def draw(summary: StudySummary) -> dict[str, dict[str, Any] | None]:
    """The page's figures by name, as the data that Plotly.newPlot takes; None where there is nothing to show."""
    recipe, limit_gib = summary.recipe, infos.limit_gib(summary)
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
    """The numbers of the first screen."""
    winner, baseline, cost = recipe.winner, recipe.baseline, recipe.winner.cost
    text = {name: number.text for name, number in describe.numbers(winner).items()}
    evidence = recipe.speedup_evidence
    speedup = ": ".join(filter(None, (describe.speed_up(recipe), describe.speed_up_range(recipe))))
    if made_of := describe.factors(summary.decomposition):
        speedup += f"; {made_of}"
    usd = describe.usd_range(cost) if cost.interval_usd else "no price is known"
    hours = " to ".join(map(_unbroken, describe.hours_range(cost).split(" to ")))
    time = f"{hours}; {cost.num_steps:,} steps of {_unbroken(text['optimizer step'])}"
    if cost.startup_s is not None:
        time += f"; about {_unbroken(fmt_seconds(cost.startup_s))} more to start"
    if between := describe.pauses(cost):
        time += f"; {' and '.join(between)} included"
    mfu = "" if winner.performance.mfu is None else f"; MFU {winner.performance.mfu:.0%}"
    useful = f"without padding and cut-off tokens{trained_on(recipe)}{mfu}"
    free = f"{text['free below the limit']} free of a limit of {_unbroken(text['limit'])}"
    free += "" if recipe.example_gib is None else " on an example card"
    search = f"{len(summary.trials):,} trials in {fmt_seconds(summary.wall_seconds)}"
    rows = (
        ("Speed-up", f"{recipe.speedup:.2f}×" if recipe.differs else "none" if baseline else DASH, speedup, evidence),
        ("Cost of the full run", text["USD"], f"{usd}; {describe.workload(recipe.workload)}", cost.evidence),
        ("Time of the full run", text["time"], time, cost.evidence),
        (
            "Useful tokens/s",
            text["useful tokens/s"],
            useful,
            winner.evidence,
        ),
        ("Peak reserved memory", text["peak reserved"], free, winner.memory_evidence),
        ("Cost of this search", fmt_usd(summary.search_usd), search, Evidence.MEASURED),
    )
    return tuple(Stat(label=label, value=value, note=note, evidence=kind) for label, value, note, kind in rows)


def _unbroken(text: str) -> str:
    """A number with its unit, which stay on one line."""
    return text.replace(" ", "\u00a0")


def breaks(text: str) -> "Markup":
    """Text that may be broken after an underscore, for the names of knobs on a phone."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in text.split("_"))


def place(name: str) -> str:
    """The id of a term's explanation on the page."""
    return f"term-{dashed(name)}"


def term(name: str, explained: Collection[str]) -> "Markup":
    """The name of a term or a knob as a link to what it means; plain text where it is not among those explained."""
    from markupsafe import Markup

    link = Markup('<a class="term" href="#{}">{}</a>')
    return link.format(place(name), breaks(name)) if name.casefold() in explained else breaks(name)


def glossary() -> dict[str, str]:
    """What each term means, and what each knob is."""
    terms: dict[str, str] = load_data("autotune.report", "terms")
    return terms | {name: knob.description for name, knob in KNOBS.items()}


def answer_glossary(words: Iterable[str]) -> dict[str, str]:
    """What those of the words mean that tables of answers explain."""
    terms: dict[str, str] = load_data("autotune.report", "answer_terms")
    known = {word.casefold() for word in words}
    return {name: meaning for name, meaning in terms.items() if name.casefold() in known}


def script_json(data: Any) -> "Markup":
    """JSON for a <script> element: no `<`, `>` or `&`, so that no string of it can end the element."""
    from markupsafe import Markup

    text = json.dumps(data, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)  # noqa: S704 (nothing that HTML could interpret is left in it)


def plotly_markup(drawn: dict[str, Any]) -> "Markup":
    """The plotting library for a page with these figures: 5 MB, which a page without any does without."""
    from markupsafe import Markup

    return Markup(plotly_js() if drawn else "")  # noqa: S704 (the library's own file)


def _view(summary: StudySummary, out_dir: str) -> dict[str, Any]:
    """Everything that the template reads."""
    recipe, oom = summary.recipe, oom_report(summary)
    drawn = {name: data for name, data in draw(summary).items() if data is not None}
    misses = [(entry.margin, entry.number, entry) for entry in oom.entries if entry.margin is not None]
    view: dict[str, Any] = {
        "summary": summary,
        "recipe": recipe,
        "headline": _headline(summary),
        "breakdown": describe.breakdown(summary),
        "spent": timeline(summary).sentences(),
        "map": infos.feasibility(summary),
        "parallel_px": figures.parallel_px(infos.parallel(summary)),
        "explained": bool(summary.explanation and summary.explanation.undone),
        "num_measured": len(infos.measured_speeds(summary)),
        "lengths": infos.row_lengths(summary),
        "oom": oom,
        "closest": min(misses)[-1] if misses else None,
        "effect": lambda knob: describe.ablation_effect(summary.explanation, knob) if summary.explanation else "",
        "verification": describe.verification(summary.verification) if summary.verification else [],
        "price_of": lambda card: describe_price(card.price, date.today()),
        "parts": PARTS if recipe else {place: name for place, name in PARTS.items() if place not in OF_WINNERS},
        "glossary": glossary(),
        "few": FEW,
        "drawn": drawn,
        "figures_json": script_json(drawn),
        "plotly_js": plotly_markup(drawn),
    }
    if recipe is not None:
        view |= {
            "device": next(iter(recipe.device.nvml_names), recipe.device.name),
            "phrases": describe.configuration(recipe),
            "stats": stats(recipe, summary),
            "price": _price(recipe),
            "commands": describe.training_commands(summary, recipe, out_dir),
            "intervals": f"{describe.intervals(recipe.winner)} {describe.left_out(recipe.winner.cost)}",
            "compare": (rows := infos.compare(recipe)),
            "unchanged": [row.name for row in rows if row.group == "Configuration" and not row.changed],
            "costs": infos.costs(recipe),
            "cells": infos.learning_cells(recipe),
            "scaling": summary.scaling,
            "gpu_choices": describe.gpu_choices(summary.scaling.trainable, recipe.within_hours),
            "fingerprint": infos.fingerprint(recipe),
        }
    return view


def _headline(summary: StudySummary) -> str:
    recipe, counts = summary.recipe, summary.counts()
    if recipe is None:
        memory = counts["oom"] + counts["refused"] or not summary.trials
        return "Nothing fits" if memory else "No trial succeeded"
    text = describe.speed_up(recipe)
    return text[0].upper() + text[1:]


def _price(recipe: Recipe) -> str:
    price = recipe.price
    if price is None:
        return "No price is known for this GPU, so no cost is shown."
    spot = f" (spot {fmt_usd(price.spot_usd_per_hour)})" if price.spot_usd_per_hour is not None else ""
    dated = f", as of {price.as_of}" if price.as_of else ""
    return f"{describe_price(price, date.today())}{dated}{spot}. Source: {price.source}."
