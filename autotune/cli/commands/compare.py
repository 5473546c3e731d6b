"""`autotune compare`: the same run on several cards, by formula and at once: what fits, how fast, and what it costs."""

import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import date
from pathlib import Path

from autotune.catalog import DeviceSpec, list_devices, resolve_device, resolve_model
from autotune.cli.commands.catalogs import print_table
from autotune.cli.commands.plan import HOW_SURE, gpus_of, sightings
from autotune.core.errors import NothingFits, UsageError
from autotune.core.files import write_atomic
from autotune.core.text import printable
from autotune.planning.compare import Budget, Comparison, Entry, Group, Owned, enter, least, smallest, unmet
from autotune.planning.observations import Observation
from autotune.planning.plan import Planned
from autotune.problem.search_space import load_space
from autotune.problem.setup import Setup, open_reserve, set_up
from autotune.problem.study_spec import StudySpec
from autotune.report.comparison import BASIS, COST, FORMATS, NUMBERS, SPEED, heading, shown, task, verdicts

FORMS = ("table", *FORMATS)
BY_SUFFIX = {".md": "markdown", ".csv": "csv", ".html": "html", ".json": "json"}
QUIET_S = 2.0
Say = Callable[[str], None]


def compare(
    specs: Sequence[StudySpec],
    *,
    gpus: Sequence[str],
    methods: Sequence[str] = (),
    budget: tuple[float | None, float | None] = (None, None),
    owned: tuple[str | None, float | None, float, float] = (None, None, 10_000.0, 0.30),
    evidence: Path,
    form: str | None = None,
    out: Path | None = None,
) -> None:
    """Print or write the comparison, of one spec a model.

    `budget` is USD and hours at most, `owned` a card, its USD, the hours that it serves, and USD per kWh.

    Raises:
        UsageError: what cannot be, or nothing that a formula knows.
        NothingFits: on none of the cards, or none within the budget.
        StorageError: `out` cannot be written.
    """
    form = form or BY_SUFFIX.get(out.suffix.lower() if out else "", "table")
    if form not in FORMS:
        raise UsageError(f"there is no format {form!r}", remedy=f"use one of {', '.join(FORMS)}")
    try:
        within, own = Budget(max_usd=budget[0], max_hours=budget[1]), _owned(*owned)
    except ValueError as error:
        raise UsageError(str(error), remedy="give a positive number") from None
    cards = gpus_of([*gpus, own.device.name] if own else gpus)
    studies = _studies(specs, methods)
    groups, errors = _groups(studies, cards, sightings(evidence))
    if not any(one.plan for group in groups for one in group.entries):
        raise UsageError("\n".join(dict.fromkeys(map(str, errors))), remedy=errors[0].remedy)
    made, today = Comparison(groups=groups, how_sure=HOW_SURE, budget=within, owned=own), date.today()
    text = io.StringIO()
    with redirect_stdout(text if out else sys.stdout):  # a table is as wide as what it goes to
        _print(made, today) if form == "table" else print(FORMATS[form](made, today), end="")
    if out is not None:
        write_atomic(out, text.getvalue())
    if missing := unmet(made):
        raise NothingFits(missing, remedy="allow more, or try other cards, --methods qlora or a shorter --seq-len")


def _owned(gpu: str | None, usd: float | None, hours: float, usd_per_kwh: float) -> Owned | None:
    if (gpu is None) is not (usd is None):
        raise UsageError("--owned and --owned-usd go together", remedy="for example --owned rtx-4090 --owned-usd 1800")
    if gpu is None or usd is None:
        return None
    return Owned(device=resolve_device(gpu), usd=usd, hours=hours, usd_per_kwh=usd_per_kwh)


def _studies(specs: Sequence[StudySpec], methods: Sequence[str]) -> list[StudySpec]:
    """Each model with each method. Raises UsageError for one that is unknown."""
    names = list(dict.fromkeys(name.strip() for part in methods for name in part.split(",") if name.strip()))
    if any(spec.configs for spec in specs):
        raise UsageError("a suite names its configurations, and there is no best to look for", remedy="`autotune plan`")
    if names and any(spec.space for spec in specs):
        raise UsageError("--methods and a space of one's own cannot both be", remedy="leave out one of them")
    for name in names:
        load_space(name)
    return [replace(spec, space=name) for spec in specs for name in names] or list(specs)


def _groups(
    studies: Sequence[StudySpec], cards: Sequence[DeviceSpec], seen: Sequence[Observation]
) -> tuple[tuple[Group, ...], list[UsageError]]:
    """A group a study, and what was wrong with cards of which nothing is known."""
    titles = [(printable(resolve_model(spec.model).name), printable(spec.space_name or "default")) for spec in studies]
    said: set[str] = set()

    def say(text: str) -> None:  # what is true of all cards is told once
        if text not in said:
            print(text, file=sys.stderr)
        said.add(text)

    groups: list[Group] = []
    errors: list[UsageError] = []
    told, number = time.monotonic(), 0
    for spec, (model, method) in zip(studies, titles, strict=True):
        entries: list[Entry] = []
        for card in cards:
            if time.monotonic() - told > QUIET_S:
                print(f"{number} of {len(studies) * len(cards)}: {model}, {method}, {card.name}", file=sys.stderr)
                told = time.monotonic()
            number += 1
            try:
                entries.append(_entry(spec, card, seen, say))
            except UsageError as error:
                errors.append(error)
                entries.append(Entry(device=card, problem=printable(str(error))))
        held = smallest(_needs(spec, entries, say), list_devices(), spec.headroom)
        groups.append(Group(model=model, method=method, entries=tuple(entries), smallest=held))
    return tuple(groups), errors


def _set_up(spec: StudySpec, card: DeviceSpec, say: Say) -> Setup:
    setup = set_up(spec, card, say)
    for warning in setup.warnings:
        say(f"warning: {warning}")
    return setup


def _entry(spec: StudySpec, card: DeviceSpec, seen: Sequence[Observation], say: Say) -> Entry:
    setup = _set_up(spec, card, say)
    reserve = open_reserve(setup).task
    return enter(setup.task, reserve, headroom=spec.headroom, memory_gib=spec.memory_gib, seen=seen)


def _needs(spec: StudySpec, entries: Sequence[Entry], say: Say) -> dict[bool, Planned]:
    """What needs the least memory on cards with bf16 and on those without; one of a kind stands for all."""
    needs = {one.device.supports_bf16: one.least for one in entries if one.least}
    missing = {True, False} - {one.device.supports_bf16 for one in entries}
    for bf16 in missing if needs else ():
        card = next(one for one in list_devices() if one.kind != "cpu" and one.supports_bf16 is bf16)
        try:
            found = least(open_reserve(_set_up(spec, card, say)).task, math.inf)
        except UsageError:
            continue  # the space has nothing for such cards
        if found:
            needs[bf16] = found
    return needs


def _print(made: Comparison, today: date) -> None:
    print(f"Nothing was measured here. Estimated: {made.how_sure}.")
    for group in made.groups:
        print(f"\n{heading(group)}\n{task(group)}")
        rows = [shown(group, entry, today) for entry in group.entries]
        for names in (SPEED, SPEED[:1] + COST):  # apart, so that each is as wide as a terminal is
            columns = {name: "right" if name in NUMBERS else "left" for name in names}
            print_table(None, columns, [tuple(row[name] for name in names) for row in rows])
        width = max(len(row["card"]) for row in rows)
        for row, entry in zip(rows, group.entries, strict=True):
            if entry.best:
                print(f"{row['card']:>{width}}  {'; '.join(row[name] for name in BASIS)}")
        print()
        for line in verdicts(made, group):
            print(line)
