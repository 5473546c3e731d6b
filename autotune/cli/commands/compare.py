"""`autotune compare`: estimate for several cards whether a run fits, its speed and its cost."""

import io
import sys
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.answers import print_answer
from autotune.cli.commands.notes import estimate_notes
from autotune.cli.options import Details, Evidence, Html, Json
from autotune.cli.study_options import PLANNED, spec_of, with_study_options
from autotune.cli.terminal import print_answer_json
from autotune.core.errors import NothingFits, UsageError
from autotune.core.files import write_atomic
from autotune.core.units import fmt_usd
from autotune.study.storage.location import EVIDENCE

if TYPE_CHECKING:
    from autotune.cli.compare_text import Shown
    from autotune.report.values.comparison import Comparison, Owned

USD_PER_KWH = 0.30
KWH_HELP = (
    "Price of electricity, in USD a kWh. The default is a round number between the prices for "
    "households in the US (0.16, EIA, 2024) and in Italy (0.43, Statista, March 2025)."
)
BUY_REMEDY = (
    "raise --buy, or leave it out to compare rented GPUs; `autotune gpus` lists the known prices "
    "of GPUs"
)
BY_SUFFIX = {".md": "markdown", ".csv": "csv", ".html": "html", ".json": "json"}


@with_study_options(*PLANNED)
def compare_command(
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpus",
            metavar="NAMES",
            help="GPUs, separated by commas; repeatable. [all with a price; with --buy: all "
            "within that price]",
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Model, as for `autotune run`; repeatable.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Training methods to compare: lora, qlora, full. [by --space]",
        ),
    ] = None,
    max_usd: Annotated[float | None, typer.Option(help="Highest cost of the run.")] = None,
    max_hours: Annotated[float | None, typer.Option(help="Longest time of the run.")] = None,
    owned: Annotated[
        str | None, typer.Option(metavar="GPU", help="A GPU of your own, or one you may buy.")
    ] = None,
    owned_usd: Annotated[float | None, typer.Option(help="Price of the --owned GPU.")] = None,
    owned_hours: Annotated[
        float, typer.Option(help="Hours of use over which the price of the --owned GPU is spread.")
    ] = 10_000,
    usd_per_kwh: Annotated[
        float, typer.Option("--electricity", "--usd-per-kwh", help=KWH_HELP)
    ] = USD_PER_KWH,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Print the cost of these numbers of examples. [with --details: "
            "10000,50000,100000]",
        ),
    ] = None,
    buy: Annotated[
        float | None,
        typer.Option(metavar="USD", help="Find the GPU to buy for at most this price."),
    ] = None,
    hours_per_week: Annotated[
        float, typer.Option(help="With --buy: hours per week that the GPU would be used.")
    ] = 40.0,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="table, markdown, csv, html or json. [by the suffix of --out, or table]",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison to this file.")
    ] = None,
    html: Html = None,
    json_: Json = False,
    details: Details = False,
    evidence: Evidence = EVIDENCE,
    **options: Any,
) -> None:
    """Print or write the comparison of the runs that these options describe, one for each model.

    Raises:
        UsageError: an option has an unknown or invalid value, or no formula covers any of the runs.
        NothingFits: no run fits any card, or no card that fits is within the budget.
        StorageError: `out` cannot be written.
    """
    from autotune.cli.compare_text import FEW_ROWS, Shown
    from autotune.planning.compare import compare
    from autotune.planning.observations import known_observations
    from autotune.report.values.comparison import Budget
    from autotune.report.values.rent_or_buy import PurchaseBudget, parse_sizes, purchases

    form = _form("json" if json_ else format_, out, needs_page=bool(sizes or buy) and not html)
    purchase_budget = (
        None
        if buy is None
        else PurchaseBudget(budget_usd=buy, usd_per_kwh=usd_per_kwh, hours_per_week=hours_per_week)
    )
    numbers = parse_sizes(sizes)

    with estimate_notes() as say:
        comparison = compare(
            [spec_of(options | {"model": name}) for name in model or (None,)],
            gpus=_cards(gpus, buy),
            methods=methods or (),
            budget=Budget(max_usd=max_usd, max_hours=max_hours),
            owned=_own_card(owned, owned_usd, owned_hours, usd_per_kwh),
            observations=known_observations(evidence, say),
            say=say,
        )

        unmet = comparison.unmet_reason()
        buys_nothing = purchase_budget is not None and not any(
            purchases(group, purchase_budget) for group in comparison.groups
        )
        # If the budget buys no useful card, only the error is printed, without a table before it.
        if unmet or not buys_nothing or form != "table":
            shown = Shown(
                details=details,
                most_rows=None if gpus or details else FEW_ROWS,
                sizes=numbers if sizes or details else (),
                purchase_budget=purchase_budget,
            )
            _show(comparison, form, numbers, shown, out=out, html=html)

    if unmet:
        raise NothingFits(unmet, remedy=comparison.remedy())
    if buys_nothing:
        raise NothingFits(
            f"no GPU that surely fits the run is known to cost at most {fmt_usd(buy)}",
            remedy=BUY_REMEDY,
        )


def _form(name: str | None, out: Path | None, *, needs_page: bool) -> str:
    """Return the output's format: `name`, else the format for the suffix of `out`, else table."""
    from autotune.report.comparison import FORMATS

    form = name or BY_SUFFIX.get(out.suffix.lower() if out else "", "table")
    if form not in ("table", *FORMATS):
        raise UsageError(
            f"there is no format {form!r}", remedy=f"use one of table, {', '.join(FORMATS)}"
        )
    if needs_page and form not in ("table", "json"):
        raise UsageError(
            f"the format {form} shows neither the results of --sizes nor those of --buy",
            remedy="add --html FILE for a page with them, or take --json",
        )
    return form


def _cards(names: list[str] | None, usd: float | None) -> list[str]:
    """Return the named cards, or the cards that `usd` can buy.

    Raises NothingFits if `usd` can buy no card.
    """
    from autotune.report.values.rent_or_buy import affordable_cards

    if usd is None or names:
        return names or []
    if not (affordable := affordable_cards(usd)):
        raise NothingFits(
            f"no GPU is known to cost at most {fmt_usd(usd)}",
            remedy="raise --buy, or compare rented GPUs instead: --gpus NAMES",
        )
    return affordable


def _own_card(
    name: str | None, usd: float | None, hours: float, usd_per_kwh: float
) -> "Owned | None":
    """Return the user's own card, or None if no name is given. Raises UsageError."""
    from autotune.catalog import resolve_device
    from autotune.report.values.comparison import Owned

    if (name is None) is not (usd is None):
        raise UsageError(
            "--owned and --owned-usd go together",
            remedy="for example --owned rtx-4090 --owned-usd 1800",
        )
    if name is None or usd is None:
        return None
    return Owned(device=resolve_device(name), usd=usd, hours=hours, usd_per_kwh=usd_per_kwh)


def _show(
    comparison: "Comparison",
    form: str,
    sizes: tuple[int, ...],
    shown: "Shown",
    *,
    out: Path | None,
    html: Path | None,
) -> None:
    """Print the comparison in the format `form`, or write it to the file `out`.

    With `html`, also write an HTML page.
    """
    from autotune.cli.compare_text import print_comparison
    from autotune.report.answer import costs_answer
    from autotune.report.comparison import FORMATS
    from autotune.report.values.compared import to_compared

    budget = shown.purchase_budget
    text = io.StringIO()
    # print_table looks at sys.stdout, so a table in a file is not limited to a terminal's width.
    with redirect_stdout(text if out else sys.stdout):
        if form == "table":
            print_comparison(comparison, shown)
        elif form == "json":
            print_answer_json(to_compared(comparison, sizes, budget))
        else:
            print(FORMATS[form](comparison, date.today()), end="")
        if form == "table" or html:
            print_answer(
                lambda today: costs_answer(comparison, sizes, budget, today),
                html=html,
                silent=form != "table" or not shown.details,
            )
    if out is not None:
        write_atomic(out, text.getvalue())
