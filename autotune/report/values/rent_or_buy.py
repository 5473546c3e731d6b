"""The cost of runs of several sizes on each compared card, and when buying a card beats renting.

Hours and USD are computed from the card's speed in the comparison. A bought card costs its purchase
price and electricity at its power limit. The rest of the computer and the card's resale value do
not count. A card is rented on demand or at spot. At spot, the cloud may take the card back; the
cost includes the work that is then repeated (`problem/interruptions`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.catalog import Purchase, find_purchase, list_devices
from autotune.core.errors import UsageError
from autotune.core.probe_types import Evidence
from autotune.problem.interruptions import interruptions_of
from autotune.problem.run_cost import TABLE_EXAMPLES
from autotune.report.values.comparison import ComparedCard, Group, speed_interval

WEEKS_PER_MONTH = 365.25 / 7 / 12
HOURS_PER_WEEK = 40.0
MAX_EXAMPLES = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCost:
    """The run with `examples` examples on one card. Its fields are keys of the JSON output.

    The cost is None if no price is known. `is_guess` says that the speed rests on data sheets
    alone, because no similar card was measured.
    """

    card: str
    examples: int
    hours: float
    hours_low: float
    hours_high: float
    usd: float | None
    usd_low: float | None
    usd_high: float | None
    usd_spot: float | None
    usd_spot_low: float | None
    usd_spot_high: float | None
    is_guess: bool
    evidence: Evidence = Evidence.ESTIMATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Bought:
    """A card that may be bought for the run. The names of the fields are keys of the JSON output.

    `pays_after_hours_against_itself` are the hours of use after which buying is cheaper than
    renting the same card at `rent_usd_per_hour`. `pays_after_hours` compares with renting `rented`,
    the cheapest of all cards for the same work; `pays_after_months` gives the same use in months.
    Fields with "spot" in their names are based on spot prices. A number of hours or months is None
    if buying never gets cheaper than renting. It is also None if no price is known; then `rented`
    or the rent per hour is None, too.
    """

    card: str
    usd: float
    as_of: str
    source: str
    tokens_per_s: float
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    is_guess: bool
    power_w: float
    electricity_usd_per_hour: float
    rent_usd_per_hour: float | None
    pays_after_hours_against_itself: float | None
    rented: str | None
    pays_after_hours: float | None
    pays_after_months: float | None
    spot_usd_per_hour: float | None
    pays_after_hours_against_its_spot: float | None
    rented_at_spot: str | None
    pays_after_hours_at_spot: float | None
    pays_after_months_at_spot: float | None
    evidence: Evidence = Evidence.ESTIMATED


@dataclass(frozen=True, slots=True, kw_only=True)
class PurchaseBudget:
    """The user's budget for buying a card, and the assumed hours of use per week.

    Raises UsageError if a number is out of its range. The error names the number's option.
    """

    budget_usd: float
    usd_per_kwh: float
    hours_per_week: float = HOURS_PER_WEEK

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("--buy", self.budget_usd, 1, 1e7),
            ("--electricity", self.usd_per_kwh, 0, 100),
            ("--hours-per-week", self.hours_per_week, 0.1, 168),
        ):
            if not least <= value <= most:
                raise UsageError(
                    f"{option} cannot be {value:g}",
                    remedy=f"give a number from {least} to {most:.0f}",
                )

    def months(self, hours: float | None) -> float | None:
        """Convert hours of use into months."""
        return None if hours is None else hours / self.hours_per_week / WEEKS_PER_MONTH


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """Parse numbers of examples such as '10000,50_000'. Without a text, return TABLE_EXAMPLES.

    Raises UsageError if a part of the text is not a number of examples.
    """
    if text is None:
        return TABLE_EXAMPLES
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or not all(1 <= size <= MAX_EXAMPLES for size in sizes):
        raise UsageError(
            f"--sizes {text!r} are not numbers of examples",
            remedy="for example --sizes 10000,50000",
        )
    return sizes


def size_costs(group: Group, sizes: Sequence[int] = TABLE_EXAMPLES) -> list[SizeCost]:
    """Return the run's cost for each number of examples, on each card whose speed is known."""
    return [_size_cost(card, examples) for card in group.cards if card.cost for examples in sizes]


def _size_cost(card: ComparedCard, examples: int) -> SizeCost:
    best = card.best
    cost = card.cost
    plan = card.plan
    assert best is not None and cost is not None and plan is not None

    # Time and cost are proportional to the number of micro batches.
    own_shape = plan.task.workload.run_shape(best.config)
    shape = replace(own_shape, examples=examples)
    part = shape.whole_steps() / own_shape.whole_steps(cost.num_steps)
    hours = cost.full_run_hours * part
    low, high = (bound * part for bound in cost.interval_hours)
    price = cost.usd_per_hour
    of_size = replace(
        cost,
        full_run_hours=hours,
        interval_hours=(low, high),
        interruptions=interruptions_of(plan.task.run_options, hours, shape.num_steps),
    )
    at_spot = card.spot.spot_usd_per_hour if card.spot else None
    spot_low, spot_high = of_size.spot_interval(at_spot) or (None, None)

    return SizeCost(
        card=card.device.name,
        examples=examples,
        hours=hours,
        hours_low=low,
        hours_high=high,
        usd=None if price is None else hours * price,
        usd_low=None if price is None else low * price,
        usd_high=None if price is None else high * price,
        usd_spot=of_size.spot_cost(at_spot),
        usd_spot_low=spot_low,
        usd_spot_high=spot_high,
        is_guess=card.is_guess,
    )


def affordable_cards(budget_usd: float) -> list[str]:
    """Return the cards of the catalogue whose purchase costs at most `budget_usd`."""
    bought = (find_purchase(device.name) for device in list_devices())
    return [purchase.device for purchase in bought if purchase and purchase.usd <= budget_usd]


def purchases(group: Group, budget: PurchaseBudget) -> list[Bought]:
    """Return the cards that can be bought for the group's run within the budget.

    The fastest card comes first; cards with a guessed speed come last.
    """
    cards = []
    for card in group.cards:
        purchase = find_purchase(card.device.name)
        if purchase and purchase.usd <= budget.budget_usd and card.cost and card.device.tdp_w:
            cards.append(_purchase(group, card, purchase, budget))
    return sorted(cards, key=lambda one: (one.is_guess, -one.tokens_per_s, one.usd))


def _purchase(
    group: Group, card: ComparedCard, purchase: Purchase, budget: PurchaseBudget
) -> Bought:
    """Compare buying this card with renting it, and with renting the cheapest card."""
    cost = card.cost
    assert cost is not None
    power_w = card.device.tdp_w or 0.0
    electricity = power_w / 1000 * budget.usd_per_kwh
    cheapest = group.cheapest
    at_spot = group.cheapest_at_spot
    spot = card.spot.spot_usd_per_hour if card.spot else None

    def pays_after(rent_usd_per_hour: float | None) -> float | None:
        return _pays_after(purchase.usd, rent_usd_per_hour, electricity)

    def same_work(run_usd: float | None) -> float | None:
        return None if run_usd is None else pays_after(run_usd / cost.full_run_hours)

    after = same_work(cheapest.usd if cheapest else None)
    after_spot = same_work(at_spot.spot_usd if at_spot else None)
    low, high = speed_interval(card) or (None, None)

    return Bought(
        card=card.device.name,
        usd=purchase.usd,
        as_of=purchase.as_of,
        source=purchase.source,
        tokens_per_s=card.tokens_per_s,
        tokens_per_s_low=low,
        tokens_per_s_high=high,
        is_guess=card.is_guess,
        power_w=power_w,
        electricity_usd_per_hour=electricity,
        rent_usd_per_hour=cost.usd_per_hour,
        pays_after_hours_against_itself=pays_after(cost.usd_per_hour),
        rented=cheapest.device.name if cheapest else None,
        pays_after_hours=after,
        pays_after_months=budget.months(after),
        spot_usd_per_hour=spot,
        pays_after_hours_against_its_spot=same_work(card.spot_usd),
        rented_at_spot=at_spot.device.name if at_spot else None,
        pays_after_hours_at_spot=after_spot,
        pays_after_months_at_spot=budget.months(after_spot),
    )


def _pays_after(
    usd: float, rent_usd_per_hour: float | None, electricity_usd_per_hour: float
) -> float | None:
    """Return the hours of use after which buying costs no more than renting, or None for never."""
    saved = None if rent_usd_per_hour is None else rent_usd_per_hour - electricity_usd_per_hour
    return usd / saved if saved is not None and saved > 0 else None
