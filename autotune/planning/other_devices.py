"""Estimates the winner's run on every other known card: whether it fits, its time and its cost.

The winner is the study's best configuration. Its memory was measured or extrapolated, and is
assumed to be the same on other cards. Its speed is projected. In contrast, `compare` searches for
the best configuration for each card.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.catalog import DeviceSpec, find_price, list_devices
from autotune.core.probe_types import Evidence, Measurement
from autotune.core.train_config import TrainConfig
from autotune.planning.device_estimate import device_limit_gib
from autotune.planning.observations import published_observations
from autotune.prediction.estimate import Estimate, memory_state
from autotune.prediction.observed_speed import observed_transfer
from autotune.prediction.projection import run_performance
from autotune.problem.run_cost import FITS, project
from autotune.problem.task import Task
from autotune.study.selection import Selection
from autotune.study.summary import Candidate


def estimate_other_devices(
    selection: Selection, winner: Candidate, headroom: float
) -> tuple[Estimate, ...]:
    """Return the winner's estimate on each card, including the study's own card.

    The cheapest card comes first, and cards without enough memory come last. Cards of another
    vendor are left out, because they have other kernels. If the winner uses several GPUs, the
    result has only the study's own card. If the study ran on a CPU, the result is empty.
    """
    task = selection.task
    measurements = selection.record(winner.config).best_known
    device = task.device
    source = task.measured_on or device
    if device.kind == "cpu":
        return ()

    own = Estimate(
        device=device,
        config=winner.config,
        state=FITS,
        need_gib=winner.measurement.peak_reserved_gib,
        limit_gib=winner.measurement.limit_gib,
        price=task.price and task.price.multiply(winner.config.num_gpus),
        tokens_per_s=winner.performance.tokens_per_second,
        cost=winner.cost,
        num_observations=task.carried.basis if task.carried else 0,
    )

    if winner.config.num_gpus > 1:  # the speed of several GPUs depends on the link between them
        return (own,)

    others = [
        _estimate_on(card, task, source, winner, measurements, headroom)
        for card in list_devices()
        if card.vendor == source.vendor and card.memory_gib and card.name != device.name
    ]
    return tuple(sorted((own, *others), key=_rank))


def _estimate_on(
    card: DeviceSpec,
    task: Task,
    source: DeviceSpec,
    winner: Candidate,
    measurements: Sequence[Measurement],
    headroom: float,
) -> Estimate:
    need = winner.measurement.peak_reserved_gib
    limit = device_limit_gib(card, headroom)
    price = find_price(card.name)

    # The formula's error is applied even to measured memory, because CUDA contexts and workspaces
    # differ from card to card.
    state = _missing_feature(card, winner.config) or memory_state(need, limit)
    estimated = Estimate(
        device=card, config=winner.config, state=state, need_gib=need, limit_gib=limit, price=price
    )

    transfer = observed_transfer(
        source, card, winner.config, published_observations(), task.calibration
    )
    if state != FITS or transfer is None:
        return estimated

    task_on_card = replace(task, device=card, measured_on=source, carried=transfer)
    speed = run_performance(task_on_card, winner.config, measurements)
    cost = project(task.workload, winner.config, speed, price, options=task.run_options)
    return replace(
        estimated,
        tokens_per_s=speed.tokens_per_second,
        # The probes ran on the card `source`, so the results for `source` itself are not projected.
        cost=replace(
            cost,
            evidence=winner.memory_evidence if card.name == source.name else Evidence.PROJECTED,
        ),
        num_observations=transfer.basis,
    )


def _missing_feature(card: DeviceSpec, config: TrainConfig) -> str | None:
    """Return a text such as "has no bf16" if the card lacks a feature that `config` needs."""
    if config.precision.startswith("bf16") and not card.supports_bf16:
        return "has no bf16"
    if config.multiplies_in_fp8 and not card.supports_fp8:
        return "has no fp8"
    return None


def _rank(estimated: Estimate) -> tuple[bool, float, float, float]:
    cost = estimated.cost
    usd = cost.full_run_usd if cost else None
    hours = cost.full_run_hours if cost else math.inf
    memory_gib = estimated.device.memory_gib or 0.0
    return estimated.state != FITS, math.inf if usd is None else usd, hours, -memory_gib
