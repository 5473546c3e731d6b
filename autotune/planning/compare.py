"""Compares cards (GPUs) for one run, and finds the cheapest, the fastest and the best in a budget.

The comparison also says when buying a card is cheaper than renting it. Each card's numbers are
estimates from a plan for this card. All plans use the same formulas, so a formula's error changes
the numbers of all cards alike. The order of two cards is thus more certain than their overlapping
intervals suggest.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import expanduser
from pathlib import Path

from autotune.catalog import (
    DeviceSpec,
    Price,
    find_price,
    find_spot,
    list_devices,
    load_prices,
    resolve_device,
    resolve_model,
)
from autotune.catalog.own_devices import split_names
from autotune.core.errors import UsageError
from autotune.core.objective import Objective
from autotune.core.text import printable
from autotune.planning.device_estimate import (
    accuracy_text,
    conversions_accuracy,
    device_limit_gib,
    limit_of,
    smallest_card,
)
from autotune.planning.observations import Say, ignore_message
from autotune.planning.plan import (
    least_memory,
    plan_setup,
    planned_setup,
)
from autotune.prediction.estimate import Estimate, memory_state
from autotune.prediction.memory_formula import ERROR
from autotune.prediction.observed_speed import Observation
from autotune.problem.run_cost import FITS
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import Setup, open_reserve
from autotune.problem.study_spec import StudySpec
from autotune.report.values.comparison import Budget, ComparedCard, Comparison, Group, Owned

QUIET_S = 2.0  # the shortest pause between two lines of progress


def compare(
    specs: Sequence[StudySpec],
    *,
    gpus: Sequence[str] = (),
    methods: Sequence[str] = (),
    budget: Budget | None = None,
    owned: Owned | None = None,
    observations: Sequence[Observation] = (),
    say: Say = ignore_message,
) -> Comparison:
    """Compare cards for each spec in `specs` (one per model) and each search space in `methods`.

    An entry of `gpus` or `methods` may hold several names with commas between them. The default of
    `gpus` is every card of the catalogue with a known price. `owned` describes the user's own card,
    which is compared too. If adapters are trained, their rank is the same on all cards. `say`
    receives warnings and progress.

    Raises UsageError if a spec has an unknown name or an invalid value, or if no plan can be made
    for any card.
    """
    names = _names(gpus) if gpus else priced_cards(specs)
    cards = _named_cards([*names, owned.device.option] if owned else names)
    studies = _studies(specs, methods)
    titles = [
        (printable(resolve_model(spec.model).name), printable(spec.space_name or "default"))
        for spec in studies
    ]
    warnings: set[str] = set()

    def say_once(text: str) -> None:
        """Pass each warning to `say` only once, since most warnings apply to all cards."""
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
                setup = with_one_rank(planned_setup(spec, card, say_once))
                result = compare_card(setup, limit_of(spec, card), observations)
                compared.append(replace(result, spot=_spot(spec, card)))
            except UsageError as error:
                errors.append(error)
                compared.append(ComparedCard(device=card, problem=printable(str(error))))

        smallest = smallest_holding(_least_by_bf16(spec, compared, say_once), spec.headroom)
        groups.append(Group(model=model, method=method, cards=tuple(compared), smallest=smallest))

    if not any(group.plan for group in groups):
        raise UsageError("\n".join(dict.fromkeys(map(str, errors))), remedy=errors[0].remedy)

    plans = [card.plan for group in groups for card in group.cards if card.plan]

    return Comparison(
        groups=tuple(groups),
        how_sure=_accuracy_text(groups),
        calibrated=any(plan.task.calibration for plan in plans),
        budget=budget or Budget(),
        owned=owned,
    )


def _accuracy_text(groups: Sequence[Group]) -> str:
    """Return a text about how memory and speed were estimated, and how large the errors are.

    The estimates for the cards in `groups` come from formulas, from dry probes (which run a step on
    the meta device), or from both. The text describes only the methods that were used, and
    names the GPUs of each kind.
    """
    needs = [card.least for group in groups for card in group.cards if card.least]
    counted_flags = {need.memory is not None and need.memory.counted for need in needs}
    tasks = [card.plan.task for group in groups for card in group.cards if card.plan]
    objective = next((task.workload.objective for task in tasks), Objective.SFT)

    kinds = [False] * (counted_flags != {True}) + [True] * (True in counted_flags)
    text = ". If no formula covers a model: ".join(
        accuracy_text(counted=kind, objective=objective) for kind in kinds
    )
    return ". ".join(filter(None, (text, conversions_accuracy(tasks))))


def _spot(spec: StudySpec, card: DeviceSpec) -> Price | None:
    """Return the cheapest spot price of a card, or None if the user gave a price."""
    if spec.price is not None:
        return None
    return find_spot(card.name, _own_prices(spec))


def _own_prices(spec: StudySpec) -> tuple[Price, ...]:
    """Return the prices in the user's file."""
    return load_prices(Path(expanduser(spec.prices))) if spec.prices else ()


def _names(values: Sequence[str]) -> list[str]:
    """Split texts at their commas, and return each name once."""
    return list(dict.fromkeys(name for text in values for name in split_names(text)))


def _named_cards(names: Sequence[str]) -> list[DeviceSpec]:
    """Return the cards with these names, each once. Raises UsageError for an unknown name."""
    cards = list(dict.fromkeys(resolve_device(name) for name in names))
    if not cards:
        raise UsageError("no GPU is named", remedy="for example --gpus a10,l4,a100-80gb,h100")
    return cards


def priced_cards(specs: Sequence[StudySpec]) -> list[str]:
    """Return the names of the cards whose price is known to the catalogue or to a spec's file."""
    own = [price for spec in specs if spec.prices for price in _own_prices(spec)]
    return [device.name for device in list_devices() if find_price(device.name, own)]


def with_one_rank(setup: Setup) -> Setup:
    """Return the setup with the LoRA rank pinned to the smallest rank of its search space.

    A study prefers a larger rank if the run then costs only little more. Cards with different ranks
    would train different adapters, so neither their speeds nor their costs could be compared.
    """
    ranks = [rank for rank in setup.task.space.choices("lora_rank") if rank is not None]
    if len(ranks) < 2:
        return setup
    space = setup.task.space.pin("lora_rank", min(ranks))
    return replace(
        setup,
        task=replace(setup.task, space=space),
        reserve=setup.reserve.pin("lora_rank", min(ranks)),
    )


def _studies(specs: Sequence[StudySpec], methods: Sequence[str]) -> list[StudySpec]:
    """Return a spec for each model and method. Raises UsageError for an unknown method."""
    names = _names(methods)
    if any(spec.configs for spec in specs):
        raise UsageError(
            "a suite names its configurations, so there is no search space to compare",
            remedy="use `autotune plan`",
        )
    if names and any(spec.space for spec in specs):
        raise UsageError(
            "--methods and a search space cannot be given together", remedy="leave out one of them"
        )

    for name in names:
        SearchSpace.load(name)
    return [replace(spec, space=name) for spec in specs for name in names] or list(specs)


def compare_card(
    setup: Setup, limit_gib: float, observations: Sequence[Observation] = ()
) -> ComparedCard:
    """Plan the study on its card, and find the configuration that needs the least memory.

    Raises UsageError in the cases of `plan_setup`.
    """
    plan = plan_setup(setup, limit_gib, observations, counted=True)
    leanest = least_memory(open_reserve(setup).task, limit_gib) or plan.baseline
    return ComparedCard(device=setup.task.device, plan=plan, least=leanest)


def _least_by_bf16(
    spec: StudySpec, compared: Sequence[ComparedCard], say: Say
) -> dict[bool, Estimate]:
    """Return the estimates of the configurations that need the least memory, with and without bf16.

    The key True holds the estimate for cards that support bf16, and False the estimate for other
    cards. Each estimate was made for one card, and is used for all cards with the same key.
    """
    needs = {card.device.supports_bf16: card.least for card in compared if card.least}
    missing = {True, False} - {card.device.supports_bf16 for card in compared}

    for bf16 in missing if needs else ():
        card = next(
            card for card in list_devices() if card.kind != "cpu" and card.supports_bf16 is bf16
        )

        try:
            leanest = least_memory(open_reserve(planned_setup(spec, card, say)).task, math.inf)
        except UsageError:
            continue  # no configuration of the space runs on such cards

        if leanest:
            needs[bf16] = leanest

    return needs


def smallest_holding(needs: Mapping[bool, Estimate], headroom: float) -> DeviceSpec | None:
    """Return the smallest card on which the configuration in `needs` certainly fits, or None.

    `needs` maps True to the estimate for cards that support bf16, and False to the estimate for
    other cards. Both estimates are of the configuration that needs the least memory.
    """

    def fits(card: DeviceSpec) -> bool:
        need = needs.get(card.supports_bf16)
        if need is None:
            return False
        limit_gib = device_limit_gib(card, headroom)
        return (
            memory_state(need.need_gib, limit_gib, need.memory.error if need.memory else ERROR)
            == FITS
        )

    return smallest_card(fits)
