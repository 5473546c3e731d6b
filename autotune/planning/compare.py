"""Cards held against one another: the cheapest, the fastest, what a budget allows, and when an own card pays.

Values and rules alone. Everything rests on a `plan` for each card, and is an estimate. What the cards have in common
may be wrong for all of them alike, so that intervals which overlap are less often in the wrong order than they look.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.catalog import DeviceSpec, Price
from autotune.core.knobs import KNOBS
from autotune.core.train_config import learning_differences
from autotune.core.units import fmt_seconds, fmt_usd
from autotune.planning.observations import Observation
from autotune.planning.plan import FITS, Plan, Planned, limit_of, make_plan, planned
from autotune.prediction.memory_formula import ERROR
from autotune.problem.run_cost import CostProjection
from autotune.problem.task import Task

# Of these it is not plain which value needs the least memory beside the others.
UNSETTLED = ("micro_batch_size", "optimizer", "checkpointing", "compile", "loss", "kernels")
NO_PRICE = "no price is known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One card. Without a `plan`, `problem` says why there is none.

    `least` is what needs the least memory of the whole search space. `opened`: nothing but its reserve would fit.
    """

    device: DeviceSpec
    price: Price | None = None
    plan: Plan | None = None
    least: Planned | None = None
    problem: str | None = None
    opened: bool = False

    @property
    def best(self) -> Planned | None:
        return self.plan.best if self.plan else None

    @property
    def cost(self) -> CostProjection | None:
        return self.best.cost if self.best else None

    @property
    def usd(self) -> float | None:
        """Of the run, on demand."""
        return self.cost.full_run_usd if self.cost else None

    @property
    def state(self) -> str:
        """`plan.FITS`, `TIGHT` or `OOM`; else what is not known."""
        if self.plan is None or self.least is None:
            return self.problem or "unknown"
        if self.best is None and self.least.fits == FITS:
            return "fits, at a speed that is not known"
        return FITS if self.best else self.least.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What can be compared: one model, trained by one method, on each card.

    `smallest` is the card with the least memory of the whole catalogue that holds it.
    """

    model: str
    method: str
    entries: tuple[Entry, ...]
    smallest: DeviceSpec | None = None

    @property
    def cheapest(self) -> Entry | None:
        """On demand; the faster one of two that cost the same."""
        priced = [(one.usd, -speed(one), place) for place, one in enumerate(self.entries) if one.usd is not None]
        return self.entries[min(priced)[2]] if priced else None

    @property
    def fastest(self) -> Entry | None:
        first = max(self.entries, key=speed)
        return first if first.best else None

    @property
    def smallest_here(self) -> DeviceSpec | None:
        """Of the cards compared."""
        held = [one.device for one in self.entries if one.state == FITS]
        return min(held, key=lambda card: card.memory_gib or math.inf, default=None)

    def relative(self, entry: Entry) -> float | None:
        """Speed over that of the fastest card."""
        return speed(entry) / speed(self.fastest) if entry.best and self.fastest else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one run may cost and take at most; None: no matter."""

    max_usd: float | None = None
    max_hours: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_usd", "max_hours"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} cannot be {value!r}")

    def __bool__(self) -> bool:
        return self.max_usd is not None or self.max_hours is not None

    def __str__(self) -> str:
        usd = [fmt_usd(self.max_usd)] if self.max_usd is not None else []
        return " and ".join(usd + ([fmt_hours(self.max_hours)] if self.max_hours is not None else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A card that was bought, and serves for so many hours. `usd_per_kwh` is what electricity costs."""

    device: DeviceSpec
    usd: float
    hours: float = 10_000.0
    usd_per_kwh: float = 0.30

    def __post_init__(self) -> None:
        for name, fine in {
            "owned_usd": 0 < self.usd < math.inf,
            "owned_hours": 0 < self.hours < math.inf,
            "usd_per_kwh": 0 <= self.usd_per_kwh < math.inf,
        }.items():
            if not fine:
                raise ValueError(f"{name} cannot be {getattr(self, name.removeprefix('owned_'))!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """One run on the own card: its share of the purchase, and electricity at its power limit.

    `runs` is how many of them pay for the card, against renting the cheapest: inf for never, None where nothing can be
    rented at a known price.
    """

    entry: Entry
    usd: float
    electricity_usd: float
    rented: Entry | None
    runs: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to have the run done, with the upper ends of its intervals."""

    name: str
    usd: float | None
    usd_high: float | None
    hours: float
    hours_high: float

    def __str__(self) -> str:
        return f"{self.name} ({NO_PRICE if self.usd is None else fmt_usd(self.usd)}, {fmt_hours(self.hours)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a budget allows. `breaks` is what the upper ends of the chosen way break of it, `excluded` who and why."""

    chosen: Way | None
    breaks: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    cheapest: Way | None
    fastest: Way | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All of it. `how_sure` is what the numbers rest on, in words."""

    groups: tuple[Group, ...]
    how_sure: str
    budget: Budget = Budget()
    owned: Owned | None = None

    def own(self, group: Group) -> OwnRun | None:
        return own_run(self.owned, group) if self.owned else None

    def advice(self, group: Group) -> Advice | None:
        return advise(group, self.budget, self.own(group)) if self.budget else None


def fmt_hours(value: float) -> str:
    return fmt_seconds(value * 3600)


def speed(entry: Entry | None) -> float:
    """Useful tokens a second; 0 where there are none."""
    return (entry.best.tokens_per_s if entry and entry.best else None) or 0.0


def enter(
    task: Task,
    reserve: Task | None = None,
    *,
    headroom: float = 0.05,
    memory_gib: float | None = None,
    seen: Sequence[Observation] = (),
) -> Entry:
    """The best that the subject's card can do, by its reserve (`setup.open_reserve`) where nothing else fits.

    `memory_gib` only ever lessens what a card has. Raises UsageError where no formula knows the model or the card.
    """
    device = task.device
    here = [one for one in seen if one.device == device.name]
    plan, opened = make_plan(task, headroom=headroom, memory_gib=memory_gib, seen=here), False
    if plan.best is None and reserve is not None and reserve.space != task.space:
        plan, opened = make_plan(reserve, headroom=headroom, memory_gib=memory_gib, seen=here), True
    need = least(reserve or task, plan.limit_gib) or plan.baseline
    return Entry(device=device, price=task.price, plan=plan, least=need, opened=opened and plan.best is not None)


def least(task: Task, limit_gib: float) -> Planned | None:
    """What needs the least memory of the space; None where no formula knows any of it."""
    space = task.space
    for name, value in space.leanest().items():
        if name in KNOBS and name not in UNSETTLED:
            space = space.pin(name, value)
    configs = dict.fromkeys(map(space.config, space.enumerate()))
    found = [one for config in configs if (one := planned(task, config, limit_gib)) is not None]
    return min(found, key=lambda one: one.footprint.peak_reserved_gib, default=None)


def smallest(needs: Mapping[bool, Planned], cards: Sequence[DeviceSpec], headroom: float) -> DeviceSpec | None:
    """The card with the least memory that surely holds what is needed at least, by whether it has bf16."""
    for card in sorted(cards, key=lambda one: one.memory_gib or 0.0):
        need = needs.get(card.supports_bf16)
        if need is None or not card.memory_gib or card.kind == "cpu":
            continue
        if need.footprint.peak_reserved_gib * (1 + ERROR) <= limit_of(card, headroom):
            return card
    return None


def unlike(group: Group) -> dict[str, list[str]]:
    """The cards on which what is learned is not the same as on the fastest, by how it differs."""
    first, found = group.fastest, dict[str, list[str]]()
    for one in group.entries:
        if one.best and first and first.best and (how := learning_differences(one.best.config, first.best.config)):
            found.setdefault(how, []).append(one.device.name)
    return found


def usd_interval(entry: Entry) -> tuple[float, float] | None:
    return entry.cost.interval_usd if entry.cost else None


def speed_interval(entry: Entry) -> tuple[float, float] | None:
    return entry.best.interval if entry.best else None


def rivals(
    chosen: Entry | None, group: Group, interval: Callable[[Entry], tuple[float, float] | None]
) -> tuple[str, ...]:
    """The cards that cannot be told from the chosen one: their intervals overlap."""
    bounds = interval(chosen) if chosen else None
    if bounds is None:
        return ()
    return tuple(
        one.device.name
        for one in group.entries
        if one is not chosen and (other := interval(one)) and other[0] <= bounds[1] and bounds[0] <= other[1]
    )


def own_run(owned: Owned, group: Group) -> OwnRun | None:
    """None where it does not fit, or where speed or power are not known."""
    entry = next(one for one in group.entries if one.device.name == owned.device.name)
    if entry.cost is None or entry.cost.kwh is None:
        return None
    electricity = entry.cost.kwh * owned.usd_per_kwh
    rented = group.cheapest
    runs = None
    if rented is not None and rented.usd is not None:
        runs = owned.usd / (rented.usd - electricity) if rented.usd > electricity else math.inf
    usd = entry.cost.full_run_hours * owned.usd / owned.hours + electricity
    return OwnRun(entry=entry, usd=usd, electricity_usd=electricity, rented=rented, runs=runs)


def ways(group: Group, own: OwnRun | None = None) -> list[Way]:
    """Every card rented, and the own one."""
    found = [_way(one.device.name, one.cost, one.usd) for one in group.entries if one.cost]
    if own is not None and own.entry.cost is not None:
        found.append(_way(f"your own {own.entry.device.name}", own.entry.cost, own.usd))
    return found


def _way(name: str, cost: CostProjection, usd: float | None) -> Way:
    hours, high = cost.full_run_hours, cost.interval_hours[1]
    usd_high = None if usd is None else usd * high / hours
    return Way(name=name, usd=usd, usd_high=usd_high, hours=hours, hours_high=high)


def advise(group: Group, budget: Budget, own: OwnRun | None = None) -> Advice:
    """The cheapest way within the budget, the faster of equals; where no price is known, after all others."""
    possible = ways(group, own)
    by_cost = sorted(possible, key=lambda one: (one.usd is None, one.usd or 0.0, one.hours))
    over = {one.name: broken(budget, one.usd, one.hours) for one in possible}
    chosen = next((one for one in by_cost if not over[one.name]), None)
    unfit = [(one.device.name, one.state) for one in group.entries if one.cost is None]
    return Advice(
        chosen=chosen,
        breaks=broken(budget, chosen.usd_high, chosen.hours_high) if chosen else (),
        excluded=(*((name, ", ".join(why)) for name, why in over.items() if why), *unfit),
        cheapest=next((one for one in by_cost if one.usd is not None), None),
        fastest=min(possible, key=lambda one: one.hours, default=None),
    )


def broken(budget: Budget, usd: float | None, hours: float) -> tuple[str, ...]:
    """What of a budget so much money and time break, in words."""
    found = []
    if budget.max_usd is not None and (usd is None or usd > budget.max_usd):
        found.append(NO_PRICE if usd is None else f"{fmt_usd(usd)} is over {fmt_usd(budget.max_usd)}")
    if budget.max_hours is not None and hours > budget.max_hours:
        found.append(f"{fmt_hours(hours)} is over {fmt_hours(budget.max_hours)}")
    return tuple(found)


def unmet(comparison: Comparison) -> str | None:
    """What is missing where no card holds any of it, or none does within the budget; None where one does."""
    known = [group for group in comparison.groups if any(one.plan for one in group.entries)]
    if not any(group.fastest for group in known):
        lines = ["nothing surely fits any of these cards"]
        for group in known:
            card = f"the smallest card that holds it is {group.smallest.name}" if group.smallest else "no card holds it"
            lines.append(f"{group.model}, {group.method}: {card}")
        return "\n".join(lines)
    advised = [(group, one) for group in known if (one := comparison.advice(group))]
    if not advised or any(one.chosen for _, one in advised):
        return None
    lines = [f"nothing is within {comparison.budget}"]
    for group, one in advised:
        wanted = [f"{kind} is {way}" for kind, way in (("cheapest", one.cheapest), ("fastest", one.fastest)) if way]
        lines.append(f"{group.model}, {group.method}: {', '.join(wanted) or 'fits none of these cards'}")
    return "\n".join(lines)
