"""A comparison of cards, for programs: each card has a row of numbers.

Field names are keys of the JSON output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autotune.core.json_view import View, fields_plus, keys
from autotune.problem.run_cost import TABLE_EXAMPLES
from autotune.problem.workload import Workload
from autotune.report.values.comparison import (
    Advice,
    Budget,
    ComparedCard,
    Comparison,
    Group,
    Owned,
    OwnRun,
    speed_interval,
    spot_interval,
    usd_interval,
)
from autotune.report.values.rent_or_buy import (
    Bought,
    PurchaseBudget,
    SizeCost,
    purchases,
    size_costs,
)

Bounds = tuple[float, float] | tuple[None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow:
    """One card of a comparison. Unknown numbers are None."""

    model: str
    method: str
    card: str
    own_card: str | None
    state: str
    from_reserve: bool
    need_gib: float | None
    memory_by: str | None
    limit_gib: float | None
    guides_need_gib: float | None
    tokens_per_s: float | None
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    relative_speed: float | None
    hours: float | None
    hours_low: float | None
    hours_high: float | None
    usd: float | None
    usd_low: float | None
    usd_high: float | None
    usd_spot: float | None
    usd_spot_low: float | None
    usd_spot_high: float | None
    spot_usd_per_hour: float | None
    spot_provider: str | None
    spot_as_of: str | None
    usd_per_1000_samples: float | None
    kwh_at_most: float | None
    configuration: str | None
    evidence: str | None
    measurements_on_this_card: int | None
    is_guess: bool
    calibrated: str | None
    usd_per_hour: float | None
    usd_per_day: float | None
    usd_per_week: float | None
    provider: str | None
    price_as_of: str | None
    price_of_instance_of: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Buying:
    """The cards that a purchase budget covers, the best first."""

    JSON: ClassVar = keys("buy", "cards") | {
        name: f"budget.{name}" for name in ("budget_usd", "usd_per_kwh", "hours_per_week")
    }

    budget: PurchaseBudget
    cards: tuple[Bought, ...]

    @property
    def buy(self) -> str | None:
        """The card to buy."""
        return self.cards[0].card if self.cards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """The cards for one model and one method, with advice and the cost of runs of other sizes."""

    model: str
    method: str
    workload: Workload | None
    cards: tuple[CardRow, ...]
    cheapest: str | None
    cheapest_rivals: tuple[str, ...]
    fastest: str | None
    fastest_rivals: tuple[str, ...]
    smallest_card: str | None
    smallest_compared: str | None
    advice: Advice | None
    own_run: OwnRun | None
    sizes: tuple[SizeCost, ...]
    buying: Buying | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison as data for programs, with the rows of all models and methods."""

    JSON: ClassVar = fields_plus(
        owned=View("owned", keys("usd", "hours", "usd_per_kwh", device="device.name"))
    )

    how_sure: str
    budget: Budget
    owned: Owned | None
    groups: tuple[GroupRows, ...]


def to_compared(
    comparison: Comparison,
    sizes: Sequence[int] = TABLE_EXAMPLES,
    purchase_budget: PurchaseBudget | None = None,
) -> Compared:
    """Convert a comparison to data for programs.

    With a purchase budget, the data includes the cards that the budget covers.
    """
    return Compared(
        how_sure=comparison.how_sure,
        budget=comparison.budget,
        owned=comparison.owned,
        groups=tuple(
            _rows(comparison, group, sizes, purchase_budget) for group in comparison.groups
        ),
    )


def _rows(
    comparison: Comparison,
    group: Group,
    sizes: Sequence[int],
    purchase_budget: PurchaseBudget | None,
) -> GroupRows:
    cheapest = group.cheapest
    fastest = group.fastest
    smallest = group.smallest_compared

    return GroupRows(
        model=group.model,
        method=group.method,
        workload=group.plan.task.workload if group.plan else None,
        cards=tuple(card_row(group, card) for card in group.cards),
        cheapest=cheapest.device.name if cheapest else None,
        cheapest_rivals=group.rivals(cheapest, usd_interval),
        fastest=fastest.device.name if fastest else None,
        fastest_rivals=group.rivals(fastest, speed_interval),
        smallest_card=group.smallest.name if group.smallest else None,
        smallest_compared=smallest.name if smallest else None,
        advice=comparison.advice(group),
        own_run=comparison.own_run(group),
        sizes=tuple(size_costs(group, sizes)),
        buying=None
        if purchase_budget is None
        else Buying(budget=purchase_budget, cards=tuple(purchases(group, purchase_budget))),
    )


def card_row(group: Group, card: ComparedCard) -> CardRow:
    """Return the row of one card."""
    best = card.best
    cost = card.cost
    plan = card.plan
    spot = card.spot
    price = plan.task.price if plan else None
    # If no configuration is certain to fit, the row shows the configuration that needs the least
    # memory.
    need = best or card.least
    timed = best if best and best.tokens_per_s else None

    speed = _bounds(speed_interval(card))
    usd = _bounds(usd_interval(card))
    usd_spot = _bounds(spot_interval(card))
    hours = _bounds(cost.interval_hours if cost else None)

    return CardRow(
        model=group.model,
        method=group.method,
        card=card.device.name,
        own_card=card.device.given,
        state=card.state,
        from_reserve=plan is not None and plan.from_reserve,
        need_gib=need.need_gib if need else None,
        memory_by=need.memory_by if need else None,
        limit_gib=plan.limit_gib if plan else None,
        guides_need_gib=plan.baseline.need_gib if plan else None,
        tokens_per_s=card.tokens_per_s or None,
        tokens_per_s_low=speed[0],
        tokens_per_s_high=speed[1],
        relative_speed=group.relative_speed(card),
        hours=cost.full_run_hours if cost else None,
        hours_low=hours[0],
        hours_high=hours[1],
        usd=card.usd,
        usd_low=usd[0],
        usd_high=usd[1],
        usd_spot=card.spot_usd,
        usd_spot_low=usd_spot[0],
        usd_spot_high=usd_spot[1],
        spot_usd_per_hour=spot.spot_usd_per_hour if spot else None,
        spot_provider=spot.provider if spot else None,
        spot_as_of=spot.as_of if spot else None,
        usd_per_1000_samples=cost.cost_per_1000_samples_usd if cost else None,
        kwh_at_most=cost.kwh if cost else None,
        configuration=best.config.label() if best else None,
        evidence="estimated" if best else None,
        measurements_on_this_card=timed.num_observations if timed else None,
        is_guess=card.is_guess,
        calibrated=timed.calibrated if timed else None,
        usd_per_hour=price.usd_per_hour if price else None,
        usd_per_day=price.usd_per_day if price else None,
        usd_per_week=price.usd_per_week if price else None,
        provider=price.provider if price else None,
        price_as_of=price.as_of if price else None,
        price_of_instance_of=price.count if price else None,
    )


def _bounds(interval: tuple[float, float] | None) -> Bounds:
    return interval or (None, None)
