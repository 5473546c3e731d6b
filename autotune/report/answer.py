"""The answer to one question as tables for a terminal and as a page: what a card can train.

An answer has sentences, tables and figures, each made once for both. The page opens offline and holds plotly.js.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from autotune.catalog import ModelSpec, describe_price
from autotune.core.pages import environment
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_usd
from autotune.planning.device_estimate import ACCURACY, NOT_MEASURED
from autotune.planning.trainable import METHODS, Entry, Trainable
from autotune.prediction.transfer import is_measured_kind
from autotune.problem.run_cost import OOM, TIGHT
from autotune.report import figures
from autotune.report.html import script_json
from autotune.report.style import plotly_js


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts; `columns` has each heading with the side to which its cells keep."""

    title: str
    columns: dict[str, str]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question's answer. `figures` are what Plotly.newPlot takes, by their caption."""

    title: str
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    figures: dict[str, dict[str, Any]]


def page(answer: Answer, today: date) -> str:
    """The answer as one page of HTML."""
    from markupsafe import Markup

    return (
        environment("autotune.report")
        .get_template("answer.html.j2")
        .render(
            title=answer.title,
            notes=answer.notes,
            tables=answer.tables,
            figures=answer.figures,
            figures_json=script_json(answer.figures),
            plotly_js=Markup(plotly_js() if answer.figures else ""),  # noqa: S704 (the library's own file)
            today=today,
        )
    )


# --- what a card can train


def trainable_answer(made: Trainable, today: date) -> Answer:
    """A table for each method, with a row for each model, the smallest first."""
    columns = {"model": "left", "billion": "right", "verdict": "left"}
    columns |= dict.fromkeys(("tokens/s (80 %)", "USD/1,000 samples"), "right")
    notes = [
        f"{fmt_gib(made.device.memory_gib)}, {fmt_gib(made.limit_gib)} of it for tensors. {NOT_MEASURED}: {ACCURACY}.",
        f"Samples of {made.lengths.removesuffix(' each')}; price of an hour: {describe_price(made.price, today)}.",
        "A verdict has the longest row, in tokens, of which one surely fits. tight: too close to tell. *: fits only "
        "with what learns differently, pure bf16 or another optimizer than AdamW.",
        f"{len(made.models)} models, one of each size; --model NAME plans any other.",
        *_refusals(made.entries),
    ]
    if any(entry.tokens_per_s for entry in made.entries) and not is_measured_kind(made.device):
        notes.append("Nobody measured such a card: its speeds are guesses.")
    tables = [
        Table(title=title, columns=columns, rows=tuple(_model_row(made, model, method) for model in made.models))
        for method, title in METHODS.items()
    ]
    drawn = figures.trainable(made)
    return Answer(
        title=f"What {made.device.label} can train",
        notes=tuple(notes),
        tables=tuple(tables),
        figures={"Tokens/s by model and method, with 80 % intervals": drawn} if drawn else {},
    )


def _model_row(made: Trainable, model: ModelSpec, method: str) -> tuple[str, ...]:
    entry = next(one for one in made.row(model) if one.method == method)
    size = DASH if model.params is None else f"{model.params / 1e9:.3g}"
    return model.short, size, _verdict(entry), _speed(entry), fmt_usd(entry.usd_per_1000)


def _verdict(entry: Entry) -> str:
    """'fits, rows to 8,192', 'fits*, rows to 2,048', 'tight', 'no: needs 63 GiB', 'refused'."""
    if entry.problem:
        return "refused"
    if entry.state == OOM:
        return "no" if entry.least_gib is None else f"no: needs {entry.least_gib:,.0f} GiB"
    state = entry.state + "*" * entry.learns_differently
    return state if entry.state == TIGHT or entry.longest_row is None else f"{state}, rows to {entry.longest_row:,}"


def _speed(entry: Entry) -> str:
    if entry.tokens_per_s is None or entry.interval is None:
        return DASH
    low, high = map(fmt_count, entry.interval)
    return f"{fmt_count(entry.tokens_per_s)} ({low} to {high})"


def _refusals(entries: Sequence[Entry]) -> list[str]:
    return [f"{name}: {why}." for name, why in dict.fromkeys((one.model, one.problem) for one in entries) if why]
