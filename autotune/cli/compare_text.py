"""The text of `autotune compare`: the best GPU, a row for each GPU, and with `--details` more."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from autotune.cli.terminal import print_lines, print_table, print_text
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.report.answer import size_table
from autotune.report.compared_answer import group_answer
from autotune.report.comparison import (
    COLUMNS,
    cells,
    heading,
    own_card_sentence,
    verdicts,
    workload_text,
)
from autotune.report.values.comparison import ComparedCard, Comparison, Group
from autotune.report.values.rent_or_buy import Bought, PurchaseBudget, purchases, size_costs

FEW_ROWS = 10
MORE = "--details shows configurations, ranges, spot prices, other sizes and the accuracy."


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What to print: details, at most `most_rows` GPUs, and the cost for each number in `sizes`.

    `sizes` are numbers of examples. With a purchase budget, the table lists the GPUs that the
    budget can buy instead of the GPUs to rent.
    """

    details: bool = False
    most_rows: int | None = None
    sizes: tuple[int, ...] = ()
    purchase_budget: PurchaseBudget | None = None


def print_comparison(comparison: Comparison, shown: Shown) -> None:
    """Print the best GPU for each model and method, its numbers, and a table of the GPUs.

    With details, the caller then prints the answer about costs (`report.answer.costs_answer`).
    """
    for number, group in enumerate(comparison.groups):
        if number:
            print()
        answer = group_answer(comparison, group, shown.purchase_budget)
        print_text(answer.answer)
        print_lines(answer.lines())
        if comparison.owned is not None and group.plan is not None:
            print_text(own_card_sentence(comparison, group))

        if shown.details:
            _print_details(comparison, group)
        else:
            _print_rows(group, shown)
            for examples in shown.sizes:
                table = size_table(size_costs(group, (examples,)), examples)
                print_table(table.title, table.columns, table.rows)

    if not shown.details:
        print_text(MORE)


def _print_rows(group: Group, shown: Shown) -> None:
    """Print a row for each GPU that surely holds the run, the cheapest first.

    Also name or count the other GPUs.
    """
    budget = shown.purchase_budget
    bought = purchases(group, budget) if budget else []
    if bought:
        columns = {"GPU": "left"} | dict.fromkeys(
            ("USD to buy", "GiB of limit", "tokens/s", "pays off after"), "right"
        )
        rows = [_bought_row(group, one) for one in bought]
    else:
        columns = {"GPU": "left"} | dict.fromkeys(
            ("GiB of limit", "tokens/s", "full run", "USD"), "right"
        )
        rows = [_row(card) for card in group.by_cost]

    if len(rows) > 1:
        print()
        print_table(None, columns, rows[: shown.most_rows])
        plans = [card.plan for card in group.by_cost if card.plan and card.plan.from_reserve]
        if plans:
            values = dict.fromkeys(value for plan in plans for value in plan.consented)
            print_text(f"*: fits only with settings that change learning: {', '.join(values)}")
    if num_hidden := len(rows) - len(rows[: shown.most_rows]):
        print_text(f"{num_hidden} more GPUs fit.")
    if unfit := [card for card in group.cards if card.best is None]:
        print_text(_unfit_text(unfit, name_all=shown.most_rows is None))


def _row(card: ComparedCard) -> tuple[str, ...]:
    """Return the row of a GPU to rent."""
    hours = card.cost.full_run_hours if card.cost else None
    speed = fmt_count(card.tokens_per_s or None)
    return _name(card), _memory(card), speed, fmt_hours(hours), fmt_usd(card.usd)


def _bought_row(group: Group, bought: Bought) -> tuple[str, ...]:
    """Return the row of a GPU to buy."""
    card = group.card(bought.card)
    assert card is not None
    pays = DASH if bought.rented is None else "never"
    if bought.pays_after_hours is not None:
        pays = f"{bought.pays_after_hours:,.0f} h"
    return _name(card), fmt_usd(bought.usd), _memory(card), fmt_count(bought.tokens_per_s), pays


def _name(card: ComparedCard) -> str:
    """Return the name of a GPU, with a star if the run needs settings that change learning."""
    return card.device.label + "*" * bool(card.plan and card.plan.from_reserve)


def _memory(card: ComparedCard) -> str:
    if card.best is None:
        return DASH
    need, limit = map(fmt_gib, (card.best.need_gib, card.best.limit_gib))
    return f"{need.removesuffix(' GiB')} of {limit.removesuffix(' GiB')}"


def _unfit_text(unfit: Sequence[ComparedCard], *, name_all: bool) -> str:
    """Name the GPUs on which the run does not surely fit, with reasons, or only count them."""
    if name_all:
        return "; ".join(f"{card.device.name}: {card.state}" for card in unfit)
    return f"{len(unfit)} GPUs do not surely fit."


def _print_details(comparison: Comparison, group: Group) -> None:
    """Print the workload, every column of every GPU, the configurations, and comparisons."""
    today = date.today()
    print()
    print_text(heading(group))
    print_text(workload_text(group))
    rows = [cells(group, card, today) for card in group.cards]

    # Print two tables instead of one, so that each table fits the width of a terminal.
    for table in ("speed", "cost"):
        columns = [column for column in COLUMNS if column.table == table or column.title == "GPU"]
        titles = {column.title: "right" if column.numeric else "left" for column in columns}
        print_table(None, titles, [tuple(row[title] for title in titles) for row in rows])

    width = max(len(row["GPU"]) for row in rows)
    basis = [column.title for column in COLUMNS if column.table == "basis"]
    for row, card in zip(rows, group.cards, strict=True):
        if card.best:
            print_text("; ".join(row[title] for title in basis), f"{row['GPU']:>{width}}  ")

    print()
    for verdict in verdicts(comparison, group):
        print_text(verdict)
