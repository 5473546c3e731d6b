"""A comparison of cards for the same run.

The comparison gives the cheapest and the fastest card, the options within a budget, and the cost of
the run on the user's card.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from autotune.catalog import NO_PRICE, DeviceSpec, Price
from autotune.core.errors import UsageError
from autotune.core.notebook import ShownAsTable
from autotune.core.train_config import learning_differences
from autotune.core.units import fmt_hours, fmt_usd
from autotune.prediction.estimate import Estimate
from autotune.problem.run_cost import FITS, CostProjection
from autotune.problem.search_space import ways_to_fit
from autotune.report.values.plan import Plan

OWN = "your own "  # prefix of the user's card in the options
Interval = Callable[["ComparedCard"], tuple[float, float] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCard:
    """The plan for one card. If there is no plan, `problem` says why.

    `least` is the configuration of the search space that needs the least memory.
    """

    device: DeviceSpec
    plan: Plan | None = None
    least: Estimate | None = None
    problem: str | None = None
    spot: Price | None = None  # the cheapest spot price; its provider may differ from the plan's

    @property
    def best(self) -> Estimate | None:
        """The best configuration that is certain to fit and has a known speed, or None."""
        return self.plan.best if self.plan else None

    @property
    def cost(self) -> CostProjection | None:
        """The time and cost of the run with the best configuration."""
        return self.best.cost if self.best else None

    @property
    def usd(self) -> float | None:
        """The cost of the run in USD, on demand."""
        return self.cost.full_run_usd if self.cost else None

    @property
    def spot_usd(self) -> float | None:
        """The expected cost of the run in USD at the cheapest spot price, with interruptions."""
        return self.cost.spot_cost(self.spot.spot_usd_per_hour) if self.cost and self.spot else None

    @property
    def tokens_per_s(self) -> float:
        """Useful tokens/s; 0 if no configuration fits or the speed is unknown."""
        return (self.best.tokens_per_s if self.best else None) or 0.0

    @property
    def is_guess(self) -> bool:
        """Whether the speed rests on data sheets alone, since no similar card was measured."""
        return self.best is not None and self.best.is_guess

    @property
    def holds_it(self) -> bool:
        """Whether a configuration is certain to fit; its speed may be unknown."""
        return self.best is not None or (self.least is not None and self.least.state == FITS)

    @property
    def state(self) -> str:
        """FITS, TIGHT or OOM; otherwise the reason why the state or the speed is unknown."""
        if self.plan is None or self.least is None:
            return self.problem or "unknown"
        if self.best is None and self.holds_it:
            return "fits, at an unknown speed"
        return FITS if self.best else self.least.state


def usd_interval(card: ComparedCard) -> tuple[float, float] | None:
    """Return the interval of the run's cost, in USD."""
    return card.cost.interval_usd if card.cost else None


def spot_interval(card: ComparedCard) -> tuple[float, float] | None:
    """Return the interval of the run's cost at the cheapest spot price, in USD."""
    return card.cost.spot_interval(card.spot.spot_usd_per_hour) if card.cost and card.spot else None


def speed_interval(card: ComparedCard) -> tuple[float, float] | None:
    """Return the interval of the speed, in useful tokens/s."""
    return card.best.interval if card.best else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One model, trained by one method, on each card.

    `smallest` is the catalogue's card with the least memory that holds the run.
    """

    model: str
    method: str
    cards: tuple[ComparedCard, ...]
    smallest: DeviceSpec | None = None

    @property
    def plan(self) -> Plan | None:
        """A plan of the group, for values that all its plans share, such as the workload."""
        return next((card.plan for card in self.cards if card.plan), None)

    @property
    def cheapest(self) -> ComparedCard | None:
        """The card that is cheapest on demand, or None if no cost is known.

        The faster of two equally cheap cards wins. A card with a guessed speed wins only if all
        speeds are guesses.
        """
        priced = [card for card in self.cards if card.usd is not None]
        return min(
            priced, key=lambda card: (card.is_guess, card.usd, -card.tokens_per_s), default=None
        )

    @property
    def cheapest_at_spot(self) -> ComparedCard | None:
        """The card that is cheapest at spot, among the cards with a published spot price."""
        priced = [card for card in self.cards if card.spot_usd is not None]
        return min(
            priced,
            key=lambda card: (card.is_guess, card.spot_usd, -card.tokens_per_s),
            default=None,
        )

    @property
    def fastest(self) -> ComparedCard | None:
        """The fastest card, or None if the run surely fits no card at a known speed.

        A card with a guessed speed wins only if all speeds are guesses.
        """
        fastest = max(
            self.cards,
            key=lambda card: (card.tokens_per_s > 0, not card.is_guess, card.tokens_per_s),
        )
        return fastest if fastest.best else None

    @property
    def smallest_compared(self) -> DeviceSpec | None:
        """The card with the least memory that holds the run, among the compared cards."""
        fitting = [card.device for card in self.cards if card.holds_it]
        return min(fitting, key=lambda device: device.memory_gib or math.inf, default=None)

    @property
    def by_cost(self) -> tuple[ComparedCard, ...]:
        """The cards that hold the run at a known speed: `cheapest` first, unknown prices last."""
        fitting = [card for card in self.cards if card.best]

        def key(card: ComparedCard) -> tuple[bool, bool, float, float]:
            return card.usd is None, card.is_guess, card.usd or 0.0, -card.tokens_per_s

        return tuple(sorted(fitting, key=key))

    def card(self, name: str) -> ComparedCard | None:
        """Return the card with this name, or None if the group has no such card."""
        return next((card for card in self.cards if card.device.name == name), None)

    def relative_speed(self, card: ComparedCard) -> float | None:
        """Return this card's speed divided by the speed of the fastest card."""
        return card.tokens_per_s / self.fastest.tokens_per_s if card.best and self.fastest else None

    def rivals(self, chosen: ComparedCard | None, interval: Interval) -> tuple[str, ...]:
        """Return the names of the cards that may be better than the chosen card.

        The interval of each of these cards overlaps the chosen card's interval.
        """
        bounds = interval(chosen) if chosen else None
        others = [(card.device.name, interval(card)) for card in self.cards if card is not chosen]
        if bounds is None:
            return ()
        return tuple(
            name
            for name, other in others
            if other and other[0] <= bounds[1] and bounds[0] <= other[1]
        )

    def training_differences(self) -> dict[str, list[str]]:
        """Return {difference: cards} for the cards whose best configuration learns differently.

        Each difference compares settings that affect learning with the fastest card's settings.
        """
        differences: dict[str, list[str]] = {}
        fastest = self.fastest.best if self.fastest else None

        for card in self.cards:
            if (
                card.best
                and fastest
                and (difference := learning_differences(card.best.config, fastest.config))
            ):
                differences.setdefault(difference, []).append(card.device.name)
        return differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of one run's cost and time. A limit may be None.

    Raises UsageError if a limit is not positive.
    """

    max_usd: float | None = None
    max_hours: float | None = None

    def __post_init__(self) -> None:
        _require("max_usd", self.max_usd, self.max_usd is None or 0 < self.max_usd < math.inf)
        _require(
            "max_hours", self.max_hours, self.max_hours is None or 0 < self.max_hours < math.inf
        )

    def __bool__(self) -> bool:
        return self.max_usd is not None or self.max_hours is not None

    def __str__(self) -> str:
        usd = [fmt_usd(self.max_usd)] if self.max_usd is not None else []
        hours = [fmt_hours(self.max_hours)] if self.max_hours is not None else []
        return " and ".join(usd + hours)

    def exceeded_limits(self, usd: float | None, hours: float) -> tuple[str, ...]:
        """Say which limits a run of this cost and duration exceeds, as '$5.00 is over $3.00'."""
        reasons = []
        if self.max_usd is not None and (usd is None or usd > self.max_usd):
            reasons.append(
                NO_PRICE if usd is None else f"{fmt_usd(usd)} is over {fmt_usd(self.max_usd)}"
            )
        if self.max_hours is not None and hours > self.max_hours:
            reasons.append(f"{fmt_hours(hours)} is over {fmt_hours(self.max_hours)}")
        return tuple(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A card that the user owns or may buy. The card costs `usd` and serves `hours` hours.

    Raises UsageError unless the cost and the hours are positive and `usd_per_kwh` is at least 0.
    """

    device: DeviceSpec
    usd: float
    hours: float = 10_000.0
    usd_per_kwh: float = 0.30

    def __post_init__(self) -> None:
        _require("owned_usd", self.usd, 0 < self.usd < math.inf)
        _require("owned_hours", self.hours, 0 < self.hours < math.inf)
        _require("usd_per_kwh", self.usd_per_kwh, 0 <= self.usd_per_kwh < math.inf)


def _require(name: str, value: float | None, valid: bool) -> None:
    if not valid:
        raise UsageError(f"{name} cannot be {value!r}", remedy="give a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """One run on the user's card. The names of the fields are keys of the JSON output.

    `usd` is the run's share of the purchase price, plus electricity at the card's power limit.
    `rented` is the cheapest card to rent. After `pays_after_runs` runs, the user's card has cost
    less in total than renting `rented`. `pays_after_runs` is None if this never happens, or if no
    price is known.
    """

    usd: float
    electricity_usd: float
    rented: str | None
    pays_after_runs: float | None
    never_pays: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A rented or owned card that can do the run.

    `usd_high` and `hours_high` are the upper ends of the intervals of cost and time.
    """

    name: str
    usd: float | None
    usd_high: float | None
    hours: float
    hours_high: float

    def __str__(self) -> str:
        usd = NO_PRICE if self.usd is None else fmt_usd(self.usd)
        return f"{self.name} ({usd}, {fmt_hours(self.hours)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The options within a budget. The names of the fields are keys of the JSON output.

    `breaks` describes the limits of the budget that the chosen option may exceed, because the upper
    end of its interval is above the limit. `excluded` has the name of each card that cannot be
    chosen, with the reason, such as an exceeded limit.
    """

    chosen: Option | None
    breaks: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    cheapest: Option | None
    fastest: Option | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(ShownAsTable):
    """A comparison of the same run on each card, for each model and method.

    The user may give a budget, and may own a card (`owned`).

    `how_sure` says how memory and speed were estimated. `calibrated` says whether a calibration
    contributed to an estimate.
    """

    groups: tuple[Group, ...]
    how_sure: str = ""
    calibrated: bool = False
    budget: Budget = Budget()
    owned: Owned | None = None

    def facts(self) -> dict[str, str]:
        """Return one row for each card, model and method."""
        facts = {}
        for group in self.groups:
            several = f"{group.model}, {group.method}: " if len(self.groups) > 1 else ""
            for card in group.cards:
                hours = fmt_hours(card.cost.full_run_hours if card.cost else None)
                numbers = f"{card.state}, {hours}, {fmt_usd(card.usd)}"
                facts[f"{several}{card.device.name}"] = card.problem or numbers
        return facts

    def own_card(self, group: Group) -> ComparedCard | None:
        """Return the user's card, or None.

        The result is None if the user gave no card, if the run does not fit the card, or if the
        card's speed or power is unknown.
        """
        owned = [
            card
            for card in group.cards
            if self.owned and card.device.name == self.owned.device.name
        ]
        return next((card for card in owned if card.cost and card.cost.kwh is not None), None)

    def own_run(self, group: Group) -> OwnRun | None:
        """Return the run on the user's card, or None if `own_card` returns None."""
        card = self.own_card(group)
        owned = self.owned
        rented = group.cheapest
        if card is None or card.cost is None or card.cost.kwh is None or owned is None:
            return None

        electricity = card.cost.kwh * owned.usd_per_kwh
        saved = rented.usd - electricity if rented and rented.usd is not None else None
        return OwnRun(
            usd=card.cost.full_run_hours * owned.usd / owned.hours + electricity,
            electricity_usd=electricity,
            rented=rented.device.name if rented else None,
            pays_after_runs=owned.usd / saved if saved is not None and saved > 0 else None,
            never_pays=saved is not None and saved <= 0,
        )

    def advice(self, group: Group) -> Advice | None:
        """Choose the cheapest option within the budget. Return None without a budget.

        The faster of two equally cheap options wins. Options without a price, and then those with
        a guessed speed, come last, as in `Group.by_cost`.
        """
        if not self.budget:
            return None

        options = [
            _option(card.device.name, card.cost, card.usd) for card in group.cards if card.cost
        ]
        guesses = {card.device.name for card in group.cards if card.is_guess}
        own_card = self.own_card(group)
        own_run = self.own_run(group)
        if own_card and own_card.cost and own_run:
            options.append(_option(f"{OWN}{own_card.device.name}", own_card.cost, own_run.usd))

        by_cost = sorted(
            options,
            key=lambda option: (
                *(option.usd is None, option.name.removeprefix(OWN) in guesses),
                *(option.usd or 0.0, option.hours),
            ),
        )
        exceeded = {
            option.name: self.budget.exceeded_limits(option.usd, option.hours) for option in options
        }
        chosen = next((option for option in by_cost if not exceeded[option.name]), None)
        unfit = [(card.device.name, card.state) for card in group.cards if card.cost is None]

        return Advice(
            chosen=chosen,
            breaks=self.budget.exceeded_limits(chosen.usd_high, chosen.hours_high)
            if chosen
            else (),
            excluded=(
                *((name, ", ".join(reasons)) for name, reasons in exceeded.items() if reasons),
                *unfit,
            ),
            cheapest=next((option for option in by_cost if option.usd is not None), None),
            fastest=min(
                options,
                key=lambda option: (option.name.removeprefix(OWN) in guesses, option.hours),
                default=None,
            ),
        )

    def remedy(self) -> str:
        """Return a remedy for the problem that `unmet_reason` describes."""
        planned = [group for group in self.groups if group.plan]
        if any(group.fastest for group in planned):
            return f"allow more than {self.budget}, or compare other GPUs"
        leanest = [card.least.config for group in planned for card in group.cards if card.least]
        return ways_to_fit(
            min(leanest, key=lambda config: (config.quantization != "nf4", config.seq_len))
        )

    def unmet_reason(self) -> str | None:
        """Say why the run fits no card, or why no card is within the budget.

        Return None if a card holds the run and, with a budget, is within the budget.
        """
        planned = [group for group in self.groups if group.plan]
        advised = [(group, advice) for group in planned if (advice := self.advice(group))]

        if not any(card.holds_it for group in planned for card in group.cards):
            lines = ["no configuration is certain to fit any of these GPUs"]
            for group in planned:
                card = (
                    f"the smallest GPU that holds the run is {group.smallest.name}"
                    if group.smallest
                    else None
                )
                lines.append(f"{group.model}, {group.method}: {card or 'no GPU holds it'}")
        elif not advised or any(advice.chosen for _, advice in advised):
            return None
        elif not any(group.fastest for group in planned):
            lines = [
                f"it is unknown whether any GPU is within {self.budget}: no formula gives the speed"
            ]
        else:
            holders = [card for group in planned for card in group.cards if card.holds_it]
            unknown = dict.fromkeys(card.device.name for card in holders if card.cost is None)
            lines = [f"nothing {'of known speed ' if unknown else ''}is within {self.budget}"]
            if unknown:
                lines.append(f"no formula gives the speed of {', '.join(unknown)}")
            for group, advice in advised:
                kinds = (("cheapest", advice.cheapest), ("fastest", advice.fastest))
                best = [f"{kind} is {option}" for kind, option in kinds if option]
                lines.append(
                    f"{group.model}, {group.method}: {', '.join(best) or 'fits none of these GPUs'}"
                )
        return "\n".join(lines)


def _option(name: str, cost: CostProjection, usd: float | None) -> Option:
    hours = cost.full_run_hours
    high = cost.interval_hours[1]
    usd_high = None if usd is None else usd * high / hours
    return Option(name=name, usd=usd, usd_high=usd_high, hours=hours, hours_high=high)
