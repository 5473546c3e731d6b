"""Puts the best card of a comparison into words, for each model and method."""

from collections.abc import Sequence

from autotune.catalog import NO_PRICE
from autotune.core.units import fmt_gib, fmt_usd
from autotune.report.answer import buying_rivals, buying_sentences
from autotune.report.answers import (
    Answer,
    certainty,
    cost_text,
    memory_text,
    run_numbers,
    shape,
)
from autotune.report.values.comparison import (
    OWN,
    ComparedCard,
    Comparison,
    Group,
    speed_interval,
    usd_interval,
)
from autotune.report.values.rent_or_buy import PurchaseBudget, purchases

FEW_RIVALS = 3  # a sentence names at most this many cards


def group_answer(
    comparison: Comparison, group: Group, purchase_budget: PurchaseBudget | None
) -> Answer:
    """Return an answer with the best card for one model and method.

    With a purchase budget, the best card is the card to buy. With a budget for one run, it is the
    cheapest option within this budget. Otherwise it is the cheapest card, or the fastest card if no
    price is known.
    """
    bought = purchases(group, purchase_budget) if purchase_budget else []
    advice = comparison.advice(group)
    card: ComparedCard | None
    name = group.model.rpartition("/")[2]
    if len(comparison.groups) > 1:
        name += f" ({group.method})"

    if purchase_budget and bought:
        card = group.card(bought[0].card)
        limit = fmt_usd(purchase_budget.budget_usd)
        verdict = f"is the GPU to buy for at most {limit}: {fmt_usd(bought[0].usd)}, {name}"
        reason = (
            f"it is the fastest within this price{_no_clear_difference(buying_rivals(bought))}. "
        )
        reason += ". ".join(buying_sentences(bought, purchase_budget)[1:])
    elif advice and advice.chosen:
        card = group.card(advice.chosen.name.removeprefix(OWN))
        verdict = f"trains {name} within {comparison.budget}"
        reason = f"it is the cheapest within the budget{_cheaper_guesses(group, card)}"
        if advice.breaks:
            reason += f"; the upper end of its range breaks it: {', '.join(advice.breaks)}"
    elif card := group.cheapest:
        verdict = f"trains {name} cheapest"
        reason = f"it is {_best_of_fitting(group, 'cheapest')}{_cheaper_guesses(group, card)}"
        reason += _no_clear_difference(group.rivals(card, usd_interval))
    elif card := group.fastest:
        verdict = f"trains {name} fastest"
        reason = f"it is {_best_of_fitting(group, 'fastest')}, and {NO_PRICE}"
        reason += _no_clear_difference(group.rivals(card, speed_interval))
    else:
        return _unfit_answer(group, name)

    if advice and not advice.chosen:
        verdict += f", but not within {comparison.budget}"
    best = card.best if card else None
    if card is None or card.plan is None or best is None:
        return _unfit_answer(group, name)
    numbers = f"{shape(best.config)}, {run_numbers(best)} (estimated)"
    return Answer(
        answer=f"{card.device.label} {verdict}: {numbers}",
        needs=memory_text(best, card.device),
        cost=cost_text(best, card.plan.task),
        certainty=certainty(best),
        reason=reason,
        details=group,
    )


def _best_of_fitting(group: Group, best: str) -> str:
    """Return 'the cheapest of the 2 GPUs that surely fit (3 compared)'."""
    fitting = sum(card.best is not None for card in group.cards)
    compared = f"({len(group.cards)} compared)"
    if fitting == 1:
        return f"the only GPU that surely fits {compared}"
    return f"the {best} of the {fitting} GPUs that surely fit {compared}"


def _cheaper_guesses(group: Group, card: ComparedCard | None) -> str:
    """Name the cards that are left out, although they look cheaper, because their speed is a guess.

    `Group.cheapest` says when.
    """
    if card is None or card.usd is None or card.is_guess:
        return ""
    cheaper = [one for one in group.cards if one.is_guess and one.usd is not None]
    names = [one.device.name for one in cheaper if (one.usd or 0.0) < card.usd]
    return f", without {_few(names)}, whose speed is only a guess" if names else ""


def _no_clear_difference(rivals: Sequence[str]) -> str:
    """Say that the intervals of these cards overlap the best card's interval; name only a few."""
    return f"; no clear difference from {_few(rivals)}" if rivals else ""


def _few(names: Sequence[str]) -> str:
    few = ", ".join(names[:FEW_RIVALS])
    more = f" and {len(names) - FEW_RIVALS} more" if len(names) > FEW_RIVALS else ""
    return f"{few}{more}"


def _unfit_answer(group: Group, name: str) -> Answer:
    """Return the answer for a group whose cards all have an unknown speed.

    The answer names a card that holds the run or, if there is none, the card that comes closest.
    """
    known = [(card.least, card) for card in group.cards if card.least]
    if not known:
        problem = next((card.problem for card in group.cards if card.problem), "")
        return Answer(
            answer=f"{name} has no estimate on any of these {len(group.cards)} GPUs",
            needs="",
            cost="",
            certainty="",
            reason=problem or "",
            details=group,
        )

    need, card = min(known, key=lambda pair: (not pair[1].holds_it, pair[0].margin))
    verdict = "surely fits none of these GPUs"
    if card.holds_it:
        verdict = f"fits {card.device.label}, at an unknown speed"
    memory = f"{fmt_gib(need.need_gib)} of {fmt_gib(need.limit_gib)}"
    smallest = "no known GPU holds it"
    if group.smallest is not None:
        smallest = f"the smallest known GPU that holds it is {group.smallest.name}"
    return Answer(
        answer=f"{name} {verdict}: it needs at least {memory} (estimated)",
        needs=memory_text(need, card.device),
        cost="",
        certainty=certainty(need),
        reason=smallest,
        details=group,
    )
