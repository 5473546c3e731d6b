"""The search for a learning rate, on losses that are a function of rate and steps."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from autotune.core.train_config import TrainConfig
from autotune.study.learning import (
    LEAST_STEPS,
    SEEDS,
    Attempt,
    Compared,
    Learning,
    least_budget,
    rates,
    rounds_of,
    search,
    steps_of,
)

LORA, FULL = TrainConfig(), TrainConfig(method="full")
RATE = 2e-4


def landscape(
    best: float, diverges_at: float = math.inf, noise: float = 0.0
) -> Callable[[float, int, int], Attempt]:
    """Losses that fall with the steps, and rise with the distance from the best rate on a
    logarithmic scale.
    """

    def train(rate: float, steps: int, seed: int) -> Attempt:
        loss = (
            1
            + 1 / steps
            + 0.1 * math.log(rate / best) ** 2
            + noise * (-1) ** seed * math.sin(1e6 * rate)
        )
        return attempt(rate, seed, steps, None if rate >= diverges_at else loss)

    return train


def attempt(rate: float, seed: int = 0, steps: int = 10, loss: float | None = 1.0) -> Attempt:
    return Attempt(learning_rate=rate, seed=seed, steps=steps, loss=loss, seconds=2.0)


def learned(*attempts: Attempt) -> Learning:
    return Learning(config=LORA, attempts=attempts, run_steps=1000, held_out=64, default=RATE)


@pytest.mark.parametrize("default", [RATE, 5e-7])
def test_the_default_is_among_the_rates_and_they_reach_far_to_both_sides(default: float) -> None:
    tried = rates(default)
    assert default in tried and tried == sorted(tried)
    assert tried[0] <= default / 8 and tried[-1] >= 32 * default


@pytest.mark.parametrize(
    "budget", [0, 10, least_budget() - 1, least_budget(), 150, 200, 500, 10_000]
)
def test_a_search_keeps_to_its_budget(budget: int) -> None:
    rounds = rounds_of(budget)
    if budget < least_budget():
        assert rounds is None
        return
    assert rounds is not None and rounds[0][1] >= LEAST_STEPS
    spent = sum(one.steps for one in search(RATE, rounds, landscape(1e-3)))
    assert 0.4 * budget < spent <= budget
    at_an_end = sum(one.steps for one in search(RATE, rounds, landscape(1.0)))
    assert at_an_end == steps_of(rounds) <= budget


@pytest.mark.parametrize("budget", [150, 600])
@pytest.mark.parametrize("power", range(-4, 8))
def test_the_best_rate_is_found_wherever_it_is(power: int, budget: int) -> None:
    """To the next rate that was tried; every second one in a small search."""
    best = RATE * 2.0**power
    rounds = rounds_of(budget)
    assert rounds is not None
    found = learned(*search(RATE, rounds, landscape(best, diverges_at=8 * best, noise=1e-3)))
    assert abs(math.log2(found.learning_rate / best)) <= (1.01 if budget == 150 else 0.01)


def test_the_last_round_has_all_seeds_and_the_default() -> None:
    rounds = rounds_of(1000)
    assert rounds is not None
    found = learned(*search(RATE, rounds, landscape(3.2e-3)))
    losses = found.losses()
    assert RATE in losses and set(map(len, losses.values())) == {SEEDS}
    assert {one.seed for one in found.last_round} == set(range(SEEDS))
    assert found.steps == sum(one.steps for one in found.attempts) and found.seconds == 2 * len(
        found.attempts
    )


def test_what_diverges_is_worst() -> None:
    rounds = rounds_of(1000)
    assert rounds is not None
    attempts = search(RATE, rounds, landscape(1e-2, diverges_at=1e-3))
    assert any(one.loss is None for one in attempts)
    assert learned(*attempts).learning_rate < 1e-3


def test_how_sure_the_rate_is() -> None:
    apart = learned(
        attempt(1e-4, 0, loss=1.0),
        attempt(1e-4, 1, loss=1.1),
        attempt(1e-3, 0, loss=1.05),
        attempt(1e-3, 1, loss=1.2),
        attempt(1e-2, 0, loss=None),
        attempt(1e-2, 1, loss=None),
    )
    assert (apart.learning_rate, apart.is_sure) == (1e-4, True)
    assert apart.is_at_an_end and "the lowest or the highest rate" in apart.notes()[0]
    lucky = replace(
        apart, attempts=(*apart.attempts[:3], attempt(1e-3, 1, loss=1.09), *apart.attempts[4:])
    )
    assert not lucky.is_sure and "not certain" in lucky.notes()[0]
    inside = learned(attempt(1e-5, steps=5), *apart.attempts)
    assert not inside.is_at_an_end and inside.notes() == []
    assert inside.last_round == apart.attempts


def test_another_configuration_learned_more_less_or_neither() -> None:
    own = learned(attempt(1e-4, 0, loss=1.0), attempt(1e-4, 1, loss=1.1))
    cases = {
        (0.9, 1.05): "learned more",
        (1.2, None): "learned less",
        (0.9, 1.2): "no sure difference",
    }
    for losses, said in cases.items():
        again = tuple(attempt(1e-4, seed, loss=loss) for seed, loss in enumerate(losses))
        other = Compared(config=FULL, attempts=again)
        assert own.difference(other) == said
    assert replace(own, others=(other,)).steps == 2 * own.steps
