"""The comparison of cards for a page, a document, a spreadsheet or a program.

Every name in it is somebody else's: each form keeps it text, whatever stands in it. Unknown is a dash to people, and
nothing at all to programs.
"""

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from typing import Any

from autotune.catalog import Price, age
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_usd
from autotune.planning.compare import (
    NO_PRICE,
    Comparison,
    Entry,
    Group,
    OwnRun,
    fmt_hours,
    rivals,
    speed,
    speed_interval,
    unlike,
    usd_interval,
)
from autotune.planning.plan import FITS
from autotune.report.style import environment

SPEED = ("card", "GiB of limit", "tokens/s (80 %)", "relative", "hours (80 %)", "kWh at most")
COST = ("USD (80 %)", "USD at spot", "USD/1,000 samples", "price")
BASIS = ("configuration", "evidence")
COLUMNS = SPEED + COST + BASIS
NUMBERS = {*SPEED[2:], *COST[:3]}


def facts(group: Group, entry: Entry) -> dict[str, Any]:
    """One cell as plain data; what is not known is None."""
    best, cost, price, plan = entry.best, entry.cost, entry.price, entry.plan
    need = best or entry.least
    return {
        "model": group.model,
        "method": group.method,
        "card": entry.device.name,
        "state": entry.state,
        "from_reserve": entry.opened,
        "need_gib": need and need.footprint.peak_reserved_gib,
        "limit_gib": plan and plan.limit_gib,
        "guides_need_gib": plan and plan.baseline.footprint.peak_reserved_gib,
        **_ranged("tokens_per_s", speed(entry) or None, speed_interval(entry)),
        "relative_speed": group.relative(entry),
        **_ranged("hours", cost.full_run_hours if cost else None, cost.interval_hours if cost else None),
        **_ranged("usd", entry.usd, usd_interval(entry)),
        "usd_spot": cost and cost.spot_usd,
        "usd_per_1000_samples": cost and cost.cost_per_1000_samples_usd,
        "kwh_at_most": cost and cost.kwh,
        "configuration": best and best.config.label(),
        "evidence": best and str(best.evidence),
        "measurements_on_this_card": best and best.carried and best.carried.basis,
        "usd_per_hour": price and price.usd_per_hour,
        "provider": price and price.provider,
        "price_as_of": price and price.as_of,
        "price_of_instance_of": price and price.count,
    }


def _ranged(name: str, value: float | None, bounds: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = bounds or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def shown(group: Group, entry: Entry, today: date) -> dict[str, str]:
    """One cell for people, by the names of `COLUMNS`."""
    told = facts(group, entry)
    of = f"{_size(told['need_gib'])} of {_size(told['limit_gib'])}"
    if entry.best is None:
        of = entry.state
        if entry.plan:
            least, guides = _size(told["need_gib"]), _size(told["guides_need_gib"])
            of += f": at least {least} of {_size(told['limit_gib'])} (guides: {guides})"
    relative, basis = told["relative_speed"], told["measurements_on_this_card"]
    tightened = f", tightened by {basis} measured on this card" if basis else ""
    texts = (
        entry.device.name,
        of,
        _span(told, "tokens_per_s", fmt_count),
        DASH if relative is None else f"{relative:.2f}",
        _span(told, "hours", fmt_count),
        fmt_count(told["kwh_at_most"]),
        _span(told, "usd", _usd),
        _usd(told["usd_spot"]),
        _usd(told["usd_per_1000_samples"]),
        price_text(entry.price, today),
        told["configuration"] or DASH,
        DASH if entry.best is None else told["evidence"] + tightened,
    )
    return dict(zip(COLUMNS, texts, strict=True))


def price_text(price: Price | None, today: date) -> str:
    """With provider and age, and what it is a part of."""
    if price is None:
        return f"{DASH} ({NO_PRICE})"
    part = f", 1/{price.count} of an instance of {price.count}" if price.count > 1 else ""
    doubt = "" if price.quotable else ", a reference and not a quote"
    return f"{fmt_usd(price.usd_per_hour)}/h, {price.provider}, {age(price.as_of, today)}{part}{doubt}"


def heading(group: Group) -> str:
    return f"{group.model}: {group.method}"


def task(group: Group) -> str:
    """What the run is."""
    plan = next((one.plan for one in group.entries if one.plan), None)
    if plan is None:
        return ""
    work = plan.task.workload
    assumed = " (assumed)" if work.examples_assumed else ""
    return f"{work.examples:,} examples{assumed} x {work.epochs}, {work.lengths}, global batch {work.global_batch}"


def verdicts(comparison: Comparison, group: Group) -> list[str]:
    """Sentences: the cheapest, the fastest, the smallest, what the budget allows, and the own card."""
    if not any(one.plan for one in group.entries):
        return list(dict.fromkeys(one.state for one in group.entries))
    cheapest, fastest = group.cheapest, group.fastest
    told = []
    if cheapest is None:
        told.append(f"cheapest: {DASH} ({NO_PRICE if fastest else 'none surely fits'})")
    else:
        told.append(
            f"cheapest: {cheapest.device.name}, {fmt_usd(cheapest.usd)}" + _but(rivals(cheapest, group, usd_interval))
        )
    if fastest is not None and fastest.best:
        pace = f"{fastest.device.name}, {fmt_count(fastest.best.tokens_per_s)} tokens/s"
        told.append(f"fastest: {pace}" + _but(rivals(fastest, group, speed_interval)))
    of_all, of_these = (card.name if card else "none" for card in (group.smallest, group.smallest_here))
    told.append(f"smallest card that holds it: {of_all} of all known, {of_these} of these")
    if opened := [one.device.name for one in group.entries if one.opened]:
        told.append(f"nothing fits on {' and '.join(opened)} but a quantised base or leaner state")
    told += [
        f"not the same training on {' and '.join(names)} as on the fastest: {how}"
        for how, names in unlike(group).items()
    ]
    if (advice := comparison.advice(group)) is not None:
        text = f"within {comparison.budget}: {advice.chosen or 'none'}"
        if advice.breaks:
            text += f"; the upper end of its range breaks the budget: {', '.join(advice.breaks)}"
        told.append(text)
        if advice.excluded:
            told.append("left out: " + "; ".join(f"{name} ({why})" for name, why in advice.excluded))
    if comparison.owned is not None:
        told.append(_own(comparison, comparison.own(group)))
    return told


def _own(comparison: Comparison, own: OwnRun | None) -> str:
    owned = comparison.owned
    assert owned is not None
    name = f"your own {owned.device.name}"
    if own is None:
        return f"{name}: {DASH}, since it does not surely fit, or its speed or power is not known"
    text = (
        f"{name}: {fmt_usd(own.usd)} a run, {fmt_usd(own.electricity_usd)} of it electricity "
        f"({fmt_usd(owned.usd)} over {owned.hours:,.0f} h, {fmt_usd(owned.usd_per_kwh)} a kWh at its power limit)"
    )
    if own.runs is None or own.rented is None:
        return f"{text}; whether that pays is not known: {NO_PRICE}"
    against = f"against {own.rented.device.name} rented at {fmt_usd(own.rented.usd)}"
    if own.runs == math.inf:
        return f"{text}; it never pays {against}: its electricity alone costs as much"
    hours = own.runs * (own.entry.cost.full_run_hours if own.entry.cost else 0.0)
    late = f", more than its {owned.hours:,.0f} h" if hours > owned.hours else ""
    return f"{text}; it pays after {math.ceil(own.runs):,} such runs ({fmt_hours(hours)}{late}) {against}"


def data(comparison: Comparison) -> dict[str, Any]:
    """As plain data."""
    return {
        "how_sure": comparison.how_sure,
        "budget": asdict(comparison.budget),
        "owned": comparison.owned and {**asdict(comparison.owned), "device": comparison.owned.device.name},
        "groups": [_group_data(comparison, group) for group in comparison.groups],
    }


def _group_data(comparison: Comparison, group: Group) -> dict[str, Any]:
    plan = next((one.plan for one in group.entries if one.plan), None)
    advice, own = comparison.advice(group), comparison.own(group)
    named = {
        "cheapest": group.cheapest and group.cheapest.device.name,
        "cheapest_rivals": rivals(group.cheapest, group, usd_interval),
        "fastest": group.fastest and group.fastest.device.name,
        "fastest_rivals": rivals(group.fastest, group, speed_interval),
        "smallest_card": group.smallest and group.smallest.name,
        "smallest_compared": group.smallest_here and group.smallest_here.name,
    }
    return {
        "model": group.model,
        "method": group.method,
        "workload": plan and plan.task.workload.facts(),
        "cards": [facts(group, entry) for entry in group.entries],
        **named,
        "advice": advice and asdict(advice),
        "own_run": own
        and {
            "usd": own.usd,
            "electricity_usd": own.electricity_usd,
            "rented": own.rented and own.rented.device.name,
            "pays_after_runs": None if own.runs in (None, math.inf) else own.runs,
            "never_pays": own.runs == math.inf,
        },
    }


def as_json(comparison: Comparison, today: date) -> str:
    return json.dumps(data(comparison), indent=2) + "\n"


def as_csv(comparison: Comparison, today: date) -> str:
    """A row a cell. Text that a spreadsheet would take for a formula begins with an apostrophe."""
    rows = [facts(group, entry) for group in comparison.groups for entry in group.entries]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _guarded(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _guarded(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in tuple("=+-@") else value


def as_markdown(comparison: Comparison, today: date) -> str:
    lines = ["# Cards compared", "", f"Estimated, nothing was measured here: {_escaped(comparison.how_sure)}."]
    for group in comparison.groups:
        lines += ["", f"## {_escaped(heading(group))}", "", _escaped(task(group)), ""]
        lines += [f"- {_escaped(one)}" for one in verdicts(comparison, group)]
        lines += ["", _row(COLUMNS), _row("---:" if name in NUMBERS else "---" for name in COLUMNS)]
        lines += [_row(map(_escaped, shown(group, entry, today).values())) for entry in group.entries]
    return "\n".join(lines) + "\n"


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """No markup, no cell of its own, and no formula between dollars."""
    return re.sub(r"([\\|`*~$\[\]])", r"\\\1", html.escape(text, quote=False))


def as_html(comparison: Comparison, today: date) -> str:
    """One page that needs nothing else."""
    groups = [
        {
            "heading": heading(group),
            "task": task(group),
            "verdicts": verdicts(comparison, group),
            "rows": [
                {
                    "cells": shown(group, entry, today),
                    "fits": entry.state == FITS,
                    "marks": [
                        name for name, one in (("cheapest", group.cheapest), ("fastest", group.fastest)) if one is entry
                    ],
                }
                for entry in group.entries
            ],
        }
        for group in comparison.groups
    ]
    template = environment().get_template("matrix.html.j2")
    return template.render(
        groups=groups,
        how_sure=comparison.how_sure,
        columns=COLUMNS,
        numbers=NUMBERS,
        made=today.isoformat(),
    )


FORMATS: dict[str, Callable[[Comparison, date], str]] = {
    "markdown": as_markdown,
    "csv": as_csv,
    "html": as_html,
    "json": as_json,
}


def _size(value: float | None) -> str:
    return fmt_gib(value).removesuffix(" GiB")


def _usd(value: float | None) -> str:
    return fmt_usd(value).removeprefix("$")


def _span(told: dict[str, Any], name: str, fmt: Callable[[float | None], str]) -> str:
    """'1,109 (934 to 1,318)'."""
    if told[name] is None:
        return DASH
    return f"{fmt(told[name])} ({fmt(told[f'{name}_low'])} to {fmt(told[f'{name}_high'])})"


def _but(names: tuple[str, ...]) -> str:
    return f"; but {' and '.join(names)} cannot be told from it" if names else ""
