"""The winner's run on every other card that is known: whether it fits there, how long it takes and what it costs.

Memory was measured, or extrapolated, and carries; speed is projected. What another configuration would do there is for
`compare` to say.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.catalog import DeviceSpec, find_price, list_devices
from autotune.core.probe_types import Evidence, Measurement
from autotune.core.train_config import TrainConfig
from autotune.planning.plan import FITS, drawn_to, fit, limit_of, published
from autotune.prediction.memory_formula import ERROR
from autotune.problem.run_cost import project
from autotune.problem.task import Task
from autotune.study.selection import Selection
from autotune.study.summary import Candidate, OnCard


def elsewhere(
    task: Task, winner: Candidate, measurements: Sequence[Measurement], headroom: float
) -> tuple[OnCard, ...]:
    """The cheapest first, then those whose price, or speed, is not known, then where it does not fit.

    Cards of another vendor have other kernels, and are left out; so is everything where a CPU measured.
    """
    device, source = task.device, task.measured_on or task.device
    if device.kind == "cpu":
        return ()
    need, limit = winner.measurement.peak_reserved_gib, winner.measurement.limit_gib
    here = OnCard(
        device=device,
        state=FITS,
        need_gib=need,
        limit_gib=limit,
        price=task.price,
        tokens_per_s=winner.performance.tokens_per_second,
        cost=winner.cost,
        basis=task.carried.basis if task.carried else 0,
        own=True,
    )
    others = [
        card for card in list_devices() if card.vendor == source.vendor and card.memory_gib and card.name != device.name
    ]
    found = [_on(card, task, source, winner, measurements, headroom) for card in others]
    return tuple(sorted((here, *found), key=_order))


def of_winner(headroom: float) -> Callable[[Selection, Candidate], tuple[OnCard, ...]]:
    """`elsewhere` as a study's summary asks for it."""
    return lambda selection, winner: elsewhere(
        selection.task, winner, selection.measurements(winner.config.digest), headroom
    )


def _on(
    card: DeviceSpec,
    task: Task,
    source: DeviceSpec,
    winner: Candidate,
    measurements: Sequence[Measurement],
    headroom: float,
) -> OnCard:
    need, limit, price = winner.measurement.peak_reserved_gib, limit_of(card, headroom), find_price(card.name)
    # What is measured may need a little more elsewhere: contexts and workspaces differ from card to card.
    state = _lacks(card, winner.config) or fit(need, limit, ERROR)
    here = OnCard(device=card, state=state, need_gib=need, limit_gib=limit, price=price)
    carried = drawn_to(source, card, winner.config, published())
    if state != FITS or carried is None:
        return here
    speed = replace(task, device=card, carried=carried).performance(winner.config, measurements)
    cost = project(task.workload, winner.config, speed, price)
    return replace(
        here,
        tokens_per_s=speed.tokens_per_second,
        # The card that stood in for the study's own was measured itself.
        cost=replace(cost, evidence=winner.memory_evidence if card.name == source.name else Evidence.PROJECTED),
        basis=carried.basis,
    )


def _lacks(card: DeviceSpec, config: TrainConfig) -> str | None:
    """What the configuration needs and the card has not got."""
    if config.precision.startswith("bf16") and not card.supports_bf16:
        return "has no bf16"
    if config.quantization == "fp8" and not card.supports_fp8:
        return "has no fp8"
    return None


def _order(one: OnCard) -> tuple[bool, float, float, float]:
    usd = one.cost.full_run_usd if one.cost else None
    hours = one.cost.full_run_hours if one.cost else math.inf
    return one.state != FITS, math.inf if usd is None else usd, hours, -(one.device.memory_gib or 0.0)
