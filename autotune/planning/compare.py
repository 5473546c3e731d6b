"""Compare cards for the same run: the cheapest, the fastest, what a budget allows, and when an own card pays.

Everything rests on a plan for each card, and is an estimate. The plans share errors, so that two cards whose intervals
overlap are less often in the wrong order than the intervals suggest.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from autotune.catalog import (
    NO_PRICE,
    DeviceSpec,
    Price,
    find_spot,
    list_devices,
    load_prices,
    resolve_device,
    resolve_model,
)
from autotune.catalog.model_sizes import Sizes
from autotune.catalog.own_devices import split_names
from autotune.core.errors import UsageError
from autotune.core.knobs import KNOBS
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig, learning_differences
from autotune.core.units import fmt_hours, fmt_usd
from autotune.planning.device_estimate import device_limit_gib, limit_of, smallest_card
from autotune.planning.observations import Say, silent
from autotune.planning.plan import Plan, alike_but_for_rows, candidates, count_leanest, plan_setup, planned_setup
from autotune.prediction.estimate import Estimate, estimate, memory_of, memory_state
from autotune.prediction.memory_formula import ERROR, MemoryBreakdown
from autotune.prediction.observed_speed import Observation
from autotune.problem.run_cost import FITS, CostProjection
from autotune.problem.search_space import SearchSpace, ways_to_fit
from autotune.problem.setup import Setup, open_reserve
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task

# Which value of these needs the least memory depends on the other knobs.
DEPENDENT = ("micro_batch_size", "optimizer", "checkpointing", "compile", "loss", "kernels")
QUIET_S = 2.0  # between two lines of progress

Interval = Callable[["ComparedCard"], tuple[float, float] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCard:
    """The plan for one card; without one, `problem` says why. `least` needs the least memory of the search space."""

    device: DeviceSpec
    plan: Plan | None = None
    least: Estimate | None = None
    problem: str | None = None
    spot: Price | None = None  # the cheapest that is published, maybe of another provider

    @property
    def best(self) -> Estimate | None:
        """The best configuration; None where nothing surely fits."""
        return self.plan.best if self.plan else None

    @property
    def cost(self) -> CostProjection | None:
        """What the run with the best configuration takes."""
        return self.best.cost if self.best else None

    @property
    def usd(self) -> float | None:
        """USD of the run, on demand."""
        return self.cost.full_run_usd if self.cost else None

    @property
    def spot_usd(self) -> float | None:
        """USD of the run at the cheapest spot price, without what interruptions cost."""
        rate = self.spot.spot_usd_per_hour if self.spot else None
        return None if self.cost is None or rate is None else self.cost.full_run_hours * rate

    @property
    def tokens_per_s(self) -> float:
        """Useful tokens a second; 0 where nothing fits or the speed is not known."""
        return (self.best.tokens_per_s if self.best else None) or 0.0

    @property
    def is_guess(self) -> bool:
        """Whether the speed rests on data sheets alone: no card of this kind was measured."""
        return self.best is not None and self.best.is_guess

    @property
    def holds_it(self) -> bool:
        """Whether something surely fits, though its speed may not be known."""
        return self.best is not None or (self.least is not None and self.least.state == FITS)

    @property
    def state(self) -> str:
        """FITS, TIGHT or OOM; else what is not known."""
        if self.plan is None or self.least is None:
            return self.problem or "unknown"
        if self.best is None and self.holds_it:
            return "fits, at a speed that is not known"
        return FITS if self.best else self.least.state


def usd_interval(card: ComparedCard) -> tuple[float, float] | None:
    """The interval of the cost of the run, in USD."""
    return card.cost.interval_usd if card.cost else None


def spot_interval(card: ComparedCard) -> tuple[float, float] | None:
    """The same at the cheapest spot price."""
    rate = card.spot.spot_usd_per_hour if card.spot else None
    if card.cost is None or rate is None:
        return None
    low, high = card.cost.interval_hours
    return low * rate, high * rate


def speed_interval(card: ComparedCard) -> tuple[float, float] | None:
    """The interval of the speed, in useful tokens a second."""
    return card.best.interval if card.best else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One model, trained by one method, on each card. `smallest` holds it with the least memory of the catalogue."""

    model: str
    method: str
    cards: tuple[ComparedCard, ...]
    smallest: DeviceSpec | None = None

    @property
    def plan(self) -> Plan | None:
        """The first of the plans; the workload is the same in all."""
        return next((card.plan for card in self.cards if card.plan), None)

    @property
    def cheapest(self) -> ComparedCard | None:
        """The cheapest on demand, the faster of two that cost the same; a guess only where there is nothing else."""
        priced = [card for card in self.cards if card.usd is not None]
        return min(priced, key=lambda card: (card.is_guess, card.usd, -card.tokens_per_s), default=None)

    @property
    def cheapest_at_spot(self) -> ComparedCard | None:
        """The same at spot prices, of the cards for which one is published."""
        priced = [card for card in self.cards if card.spot_usd is not None]
        return min(priced, key=lambda card: (card.is_guess, card.spot_usd, -card.tokens_per_s), default=None)

    @property
    def fastest(self) -> ComparedCard | None:
        """The fastest; a guess only where there is nothing else; None where nothing fits any card."""
        fastest = max(self.cards, key=lambda card: (card.tokens_per_s > 0, not card.is_guess, card.tokens_per_s))
        return fastest if fastest.best else None

    @property
    def smallest_compared(self) -> DeviceSpec | None:
        """The card with the least memory of those compared that hold it."""
        fitting = [card.device for card in self.cards if card.holds_it]
        return min(fitting, key=lambda device: device.memory_gib or math.inf, default=None)

    def relative_speed(self, card: ComparedCard) -> float | None:
        """Speed over that of the fastest card."""
        return card.tokens_per_s / self.fastest.tokens_per_s if card.best and self.fastest else None

    def rivals(self, chosen: ComparedCard | None, interval: Interval) -> tuple[str, ...]:
        """The cards whose interval overlaps that of the chosen one, so that either may be better."""
        bounds = interval(chosen) if chosen else None
        others = [(card.device.name, interval(card)) for card in self.cards if card is not chosen]
        if bounds is None:
            return ()
        return tuple(name for name, other in others if other and other[0] <= bounds[1] and bounds[0] <= other[1])

    def training_differences(self) -> dict[str, list[str]]:
        """The cards that would not train the same as the fastest, by how they differ."""
        differences: dict[str, list[str]] = {}
        fastest = self.fastest.best if self.fastest else None
        for card in self.cards:
            if card.best and fastest and (difference := learning_differences(card.best.config, fastest.config)):
                differences.setdefault(difference, []).append(card.device.name)
        return differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one run may cost and take at most; None: no limit. Raises UsageError unless both are positive."""

    max_usd: float | None = None
    max_hours: float | None = None

    def __post_init__(self) -> None:
        _require("max_usd", self.max_usd, self.max_usd is None or 0 < self.max_usd < math.inf)
        _require("max_hours", self.max_hours, self.max_hours is None or 0 < self.max_hours < math.inf)

    def __bool__(self) -> bool:
        return self.max_usd is not None or self.max_hours is not None

    def __str__(self) -> str:
        usd = [fmt_usd(self.max_usd)] if self.max_usd is not None else []
        hours = [fmt_hours(self.max_hours)] if self.max_hours is not None else []
        return " and ".join(usd + hours)

    def exceeded_by(self, usd: float | None, hours: float) -> tuple[str, ...]:
        """The limits that a run of this cost and duration exceeds, in words."""
        reasons = []
        if self.max_usd is not None and (usd is None or usd > self.max_usd):
            reasons.append(NO_PRICE if usd is None else f"{fmt_usd(usd)} is over {fmt_usd(self.max_usd)}")
        if self.max_hours is not None and hours > self.max_hours:
            reasons.append(f"{fmt_hours(hours)} is over {fmt_hours(self.max_hours)}")
        return tuple(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A card that the user owns or may buy. It costs `usd` and serves `hours`. Raises UsageError for other numbers."""

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
    """One run on the own card: its share of the purchase, and electricity at the card's power limit.

    `rented` is the cheapest card, with which it is compared. The card pays after so many runs, or never; None where no
    price is known. Field names are keys of the JSON output.
    """

    usd: float
    electricity_usd: float
    rented: str | None
    pays_after_runs: float | None
    never_pays: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A card, rented or owned, that can do the run; `_high` is the upper end of an interval."""

    name: str
    usd: float | None
    usd_high: float | None
    hours: float
    hours_high: float

    def __str__(self) -> str:
        return f"{self.name} ({NO_PRICE if self.usd is None else fmt_usd(self.usd)}, {fmt_hours(self.hours)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a budget allows. Field names are keys of the JSON output.

    `breaks`: the limits that the upper ends of the chosen option's intervals exceed. `excluded`: (name, why not).
    """

    chosen: Option | None
    breaks: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    cheapest: Option | None
    fastest: Option | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same run, for each model and method on each card, under a budget and against an own card."""

    groups: tuple[Group, ...]
    budget: Budget = Budget()
    owned: Owned | None = None

    def own_card(self, group: Group) -> ComparedCard | None:
        """The own card; None without one, where the run does not fit, or where speed or power are not known."""
        owned = [card for card in group.cards if self.owned and card.device.name == self.owned.device.name]
        return next((card for card in owned if card.cost and card.cost.kwh is not None), None)

    def own_run(self, group: Group) -> OwnRun | None:
        """The run on the own card; None where `own_card` is."""
        card, owned, rented = self.own_card(group), self.owned, group.cheapest
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
        """The cheapest option within the budget, the faster of equals, without a price last; None without a budget."""
        if not self.budget:
            return None
        options = [_option(card.device.name, card.cost, card.usd) for card in group.cards if card.cost]
        own_card, own_run = self.own_card(group), self.own_run(group)
        if own_card and own_card.cost and own_run:
            options.append(_option(f"your own {own_card.device.name}", own_card.cost, own_run.usd))
        by_cost = sorted(options, key=lambda option: (option.usd is None, option.usd or 0.0, option.hours))
        exceeded = {option.name: self.budget.exceeded_by(option.usd, option.hours) for option in options}
        chosen = next((option for option in by_cost if not exceeded[option.name]), None)
        unfit = [(card.device.name, card.state) for card in group.cards if card.cost is None]
        return Advice(
            chosen=chosen,
            breaks=self.budget.exceeded_by(chosen.usd_high, chosen.hours_high) if chosen else (),
            excluded=(*((name, ", ".join(reasons)) for name, reasons in exceeded.items() if reasons), *unfit),
            cheapest=next((option for option in by_cost if option.usd is not None), None),
            fastest=min(options, key=lambda option: option.hours, default=None),
        )

    def remedy(self) -> str:
        """What may help where something is `unmet`."""
        planned = [group for group in self.groups if group.plan]
        if any(group.fastest for group in planned):
            return f"allow more than {self.budget}, or compare other cards"
        leanest = [card.least.config for group in planned for card in group.cards if card.least]
        return ways_to_fit(min(leanest, key=lambda config: (config.quantization != "nf4", config.seq_len)))

    def unmet(self) -> str | None:
        """What is missing where the run fits no card, or no card within the budget; None where it fits one."""
        planned = [group for group in self.groups if group.plan]
        advised = [(group, advice) for group in planned if (advice := self.advice(group))]
        if not any(card.holds_it for group in planned for card in group.cards):
            lines = ["nothing surely fits any of these cards"]
            for group in planned:
                card = f"the smallest card that holds it is {group.smallest.name}" if group.smallest else None
                lines.append(f"{group.model}, {group.method}: {card or 'no card holds it'}")
        elif not advised or any(advice.chosen for _, advice in advised):
            return None
        elif not any(group.fastest for group in planned):
            lines = [f"whether anything is within {self.budget} is not known: no formula knows the speed"]
        else:
            held = [card for group in planned for card in group.cards if card.holds_it]
            unknown = dict.fromkeys(card.device.name for card in held if card.cost is None)
            lines = [f"nothing {'of known speed ' if unknown else ''}is within {self.budget}"]
            if unknown:
                lines.append(f"no formula knows the speed of {', '.join(unknown)}")
            for group, advice in advised:
                named = (("cheapest", advice.cheapest), ("fastest", advice.fastest))
                wanted = [f"{kind} is {option}" for kind, option in named if option]
                lines.append(f"{group.model}, {group.method}: {', '.join(wanted) or 'fits none of these cards'}")
        return "\n".join(lines)


def _option(name: str, cost: CostProjection, usd: float | None) -> Option:
    hours, high = cost.full_run_hours, cost.interval_hours[1]
    usd_high = None if usd is None else usd * high / hours
    return Option(name=name, usd=usd, usd_high=usd_high, hours=hours, hours_high=high)


# --- making a comparison


def compare(
    specs: Sequence[StudySpec],
    *,
    gpus: Sequence[str],
    methods: Sequence[str] = (),
    budget: Budget | None = None,
    owned: Owned | None = None,
    observations: Sequence[Observation] = (),
    say: Say = silent,
) -> Comparison:
    """Compare cards for the run of each spec, a spec a model; with each of `methods`, which are search spaces.

    A name of `gpus` or `methods` may be several with commas between. The own card is compared too. `say` gets warnings
    and progress. Raises UsageError if a part of a spec is unknown or impossible, or no formula covers any model on any
    card.
    """
    cards = _named_cards([*gpus, owned.device.option] if owned else gpus)
    studies = _studies(specs, methods)
    titles = [(printable(resolve_model(spec.model).name), printable(spec.space_name or "default")) for spec in studies]
    warnings: set[str] = set()

    def say_once(text: str) -> None:
        """Most warnings hold for all cards."""
        if text not in warnings:
            say(text)
        warnings.add(text)

    groups: list[Group] = []
    errors: list[UsageError] = []
    last_progress = time.monotonic()
    for spec, (model, method) in zip(studies, titles, strict=True):
        compared: list[ComparedCard] = []
        for card in cards:
            if time.monotonic() - last_progress > QUIET_S:
                number = len(groups) * len(cards) + len(compared)
                say(f"{number} of {len(studies) * len(cards)}: {model}, {method}, {card.name}")
                last_progress = time.monotonic()
            try:
                setup = planned_setup(spec, card, say_once)
                made = compare_card(setup, limit_of(spec, card), observations)
                compared.append(replace(made, spot=_spot(spec, card)))
            except UsageError as error:
                errors.append(error)
                compared.append(ComparedCard(device=card, problem=printable(str(error))))
        smallest = smallest_holding(_least_by_bf16(spec, compared, say_once), spec.headroom)
        groups.append(Group(model=model, method=method, cards=tuple(compared), smallest=smallest))
    if not any(group.plan for group in groups):
        raise UsageError("\n".join(dict.fromkeys(map(str, errors))), remedy=errors[0].remedy)
    return Comparison(groups=tuple(groups), budget=budget or Budget(), owned=owned)


def _spot(spec: StudySpec, card: DeviceSpec) -> Price | None:
    """The cheapest spot price of a card; None where the user gave a price."""
    if spec.price is not None:
        return None
    return find_spot(card.name, load_prices(Path(expanduser(spec.prices))) if spec.prices else ())


def _names(values: Sequence[str]) -> list[str]:
    """The names in texts with commas between them, each once."""
    return list(dict.fromkeys(name for text in values for name in split_names(text)))


def _named_cards(names: Sequence[str]) -> list[DeviceSpec]:
    """The cards of these names, each once. Raises UsageError."""
    cards = list(dict.fromkeys(resolve_device(name) for name in _names(names)))
    if not cards:
        raise UsageError("which GPUs?", remedy="for example --gpus a10,l4,a100-80gb,h100")
    return cards


def _studies(specs: Sequence[StudySpec], methods: Sequence[str]) -> list[StudySpec]:
    """Each model with each method. Raises UsageError for an unknown one."""
    names = _names(methods)
    if any(spec.configs for spec in specs):
        raise UsageError("a suite names its configurations, and there is no best to look for", remedy="`autotune plan`")
    if names and any(spec.space for spec in specs):
        raise UsageError("--methods and a space of one's own cannot both be", remedy="leave out one of them")
    for name in names:
        SearchSpace.load(name)
    return [replace(spec, space=name) for spec in specs for name in names] or list(specs)


def compare_card(setup: Setup, limit_gib: float, observations: Sequence[Observation] = ()) -> ComparedCard:
    """The plan for the card of this study, and what needs the least memory there. Raises UsageError."""
    made = plan_setup(setup, limit_gib, observations, counted=True)
    least = least_memory(open_reserve(setup).task, limit_gib) or made.baseline
    return ComparedCard(device=setup.task.device, plan=made, least=least)


def least_memory(task: Task, limit_gib: float) -> Estimate | None:
    """The configuration of the space that needs the least memory; None where that is not known.

    Where no formula covers any, the leanest is counted.
    """
    space = task.space
    for name, value in space.leanest().items():
        if name in KNOBS and name not in DEPENDENT:
            space = space.pin(name, value)
    configs = candidates(space) if Sizes.of(task.model) else ()
    smallest: dict[tuple[Any, ...], TrainConfig] = {}  # micro batches of configurations that are else alike
    for config in configs:
        alike = alike_but_for_rows(task, config)
        smallest[alike] = min(smallest.get(alike, config), config, key=lambda one: one.micro_batch_size)
    needs = {config: memory for config in smallest.values() if (memory := _memory(task, config)) is not None}
    if not needs:
        return count_leanest(task, limit_gib)
    return estimate(task, min(needs, key=lambda config: needs[config].peak_reserved_gib), limit_gib)


def _memory(task: Task, config: TrainConfig) -> MemoryBreakdown | None:
    """The memory of a configuration with the longest rows, by formula."""
    micro_steps = task.workload.run_shape(config).probe_micro_steps
    longest, objective = task.workload.at_longest(config), task.workload.objective
    return memory_of(task.model, longest, micro_steps, objective=objective)


def _least_by_bf16(spec: StudySpec, compared: Sequence[ComparedCard], say: Say) -> dict[bool, Estimate]:
    """What needs the least memory on cards with bf16 (True) and without it; one card stands for all of its kind."""
    needs = {card.device.supports_bf16: card.least for card in compared if card.least}
    missing = {True, False} - {card.device.supports_bf16 for card in compared}
    for bf16 in missing if needs else ():
        card = next(card for card in list_devices() if card.kind != "cpu" and card.supports_bf16 is bf16)
        try:
            least = least_memory(open_reserve(planned_setup(spec, card, say)).task, math.inf)
        except UsageError:
            continue  # nothing of the space runs on such cards
        if least:
            needs[bf16] = least
    return needs


def smallest_holding(needs: Mapping[bool, Estimate], headroom: float) -> DeviceSpec | None:
    """The card with the least memory that surely holds what is needed; `needs` is by whether a card has bf16."""

    def fits(card: DeviceSpec) -> bool:
        need = needs.get(card.supports_bf16)
        if need is None:
            return False
        limit_gib = device_limit_gib(card, headroom)
        return memory_state(need.need_gib, limit_gib, need.memory.error if need.memory else ERROR) == FITS

    return smallest_card(fits)
