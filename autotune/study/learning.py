"""Find a winner's learning rate with short real trainings; better rates are trained longer.

Each training is a complete run, with warm-up and a cosine schedule that ends at zero. The rate that
is best for few steps may be too large for many steps, so the search has rounds with fewer and fewer
rates and more and more steps. The last round's trainings are as long as the budget allows.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from autotune.core.json_view import native_fields_plus
from autotune.core.train_config import TrainConfig

STEP = 2.0  # the ratio of neighbouring rates
# The numbers of rates to try below and above the default. More rates are above the default: a rate
# that diverges reveals the upper limit, but a low rate only learns more slowly.
BELOW = 3
ABOVE = 5
# For each round: the number of rates, and the number of steps divided by the steps of the first
# round.
ROUNDS = ((9, 1), (4, 2), (2, 4))
FEW = ((5, 1), (2, 3))  # the rounds for a small budget, which try only every second rate
# At most this number of rates is added to the first round, below the lowest or above the highest.
BEYOND = 2
SEEDS = 2  # the number of seeds in the last round
LEAST_STEPS = 5  # the fewest optimizer steps of a training in the first round


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One training with one learning rate and one seed.

    `loss` is the loss of the held-out examples after the training, or None if the training diverged
    or failed; `reason` then says why. `curve` is a list of pairs. Each pair has a step, and the
    mean training loss since the step of the previous pair.
    """

    learning_rate: float
    seed: int
    steps: int
    loss: float | None
    seconds: float
    curve: tuple[tuple[int, float], ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A configuration that is compared with the winner, and its trainings.

    The trainings use the learning rate that was chosen for the winner, and the steps and seeds of
    the last round.
    """

    config: TrainConfig
    attempts: tuple[Attempt, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss for each seed; infinite for a training that diverged or failed."""
        return tuple(map(_loss, self.attempts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The trainings of one configuration with different learning rates, the oldest first.

    `run_steps` is the number of optimizer steps of the full run, and `held_out` the number of
    held-out examples. `others` are other configurations, trained with the best rate for comparison.
    `default` is the usual rate of the fine-tuning method, or None if an older version ran the
    search.
    """

    JSON: ClassVar = native_fields_plus(
        "learning_rate", "is_sure", "steps", "seconds", notes="notes()"
    )

    config: TrainConfig
    attempts: tuple[Attempt, ...]
    run_steps: int
    held_out: int
    others: tuple[Compared, ...] = ()
    default: float | None = None

    @property
    def last_round(self) -> tuple[Attempt, ...]:
        """The trainings of the last round, which have the most steps."""
        longest = max(attempt.steps for attempt in self.attempts)
        return tuple(attempt for attempt in self.attempts if attempt.steps == longest)

    def losses(self) -> dict[float, tuple[float, ...]]:
        """The losses of each rate in the last round, one for each seed."""
        ordered = sorted(self.last_round, key=lambda attempt: (attempt.learning_rate, attempt.seed))
        grouped = groupby(ordered, key=lambda attempt: attempt.learning_rate)
        return {rate: tuple(map(_loss, attempts)) for rate, attempts in grouped}

    @property
    def learning_rate(self) -> float:
        """The rate with the lowest mean loss in the last round."""
        means = {rate: statistics.fmean(losses) for rate, losses in self.losses().items()}
        return min(means, key=lambda rate: means[rate])

    @property
    def is_sure(self) -> bool:
        """Whether the best rate has the lowest loss of the last round for every seed."""
        losses = self.losses()
        best = losses.pop(self.learning_rate)
        return all(
            all(own < other for own, other in zip(best, others, strict=False))
            for others in losses.values()
        )

    @property
    def is_at_an_end(self) -> bool:
        """Whether the best rate is the lowest or the highest that was tried."""
        tried = {attempt.learning_rate for attempt in self.attempts}
        return self.learning_rate in (min(tried), max(tried))

    @property
    def steps(self) -> int:
        """The number of optimizer steps of all trainings together."""
        return sum(attempt.steps for attempt in self._all_attempts)

    @property
    def seconds(self) -> float:
        """The seconds that all trainings took together, including evaluations."""
        return sum(attempt.seconds for attempt in self._all_attempts)

    @property
    def _all_attempts(self) -> tuple[Attempt, ...]:
        return (*self.attempts, *(attempt for other in self.others for attempt in other.attempts))

    def difference(self, other: Compared) -> str:
        """Compare another configuration's held-out losses with the winner's, in words.

        The words are "learned more" or "learned less" only if all seeds agree.
        """
        pairs = list(zip(other.losses, self.losses()[self.learning_rate], strict=False))
        if all(theirs < own for theirs, own in pairs):
            return "learned more"
        return (
            "learned less" if all(theirs > own for theirs, own in pairs) else "no sure difference"
        )

    def notes(self) -> list[str]:
        """List the reasons to doubt the best learning rate."""
        notes = []
        if not self.is_sure:
            notes.append(
                "for at least one seed, another rate has the same or a lower loss: "
                "the best rate is not certain"
            )
        if self.is_at_an_end:
            notes.append(
                f"{self.learning_rate:.2g} is the lowest or the highest rate that was tried; "
                "a rate beyond it may be better"
            )
        return notes


def _loss(attempt: Attempt) -> float:
    return math.inf if attempt.loss is None else attempt.loss


def rates(default: float) -> list[float]:
    """Return the rates to try, the lowest first; the default is one of them."""
    return [default * STEP**power for power in range(-BELOW, ABOVE + 1)]


def rounds_of(budget_steps: int) -> list[tuple[int, int]] | None:
    """Return, for each round, the number of rates and the steps of each training.

    Returns None if the budget is too small for any search.
    """
    for rounds in (ROUNDS, FEW):
        first = budget_steps // steps_of(rounds)
        if first >= LEAST_STEPS:
            return [(number, times * first) for number, times in rounds]
    return None


def least_budget() -> int:
    """Return the smallest number of optimizer steps that allows a search."""
    return LEAST_STEPS * steps_of(FEW)


def steps_of(rounds: Sequence[tuple[int, int]]) -> int:
    """Return the largest number of optimizer steps that a search with these rounds can take."""
    return sum(_max_trainings(rounds, place) * steps for place, (_, steps) in enumerate(rounds))


def _max_trainings(rounds: Sequence[tuple[int, int]], place: int) -> int:
    """Return the largest number of trainings that a round can have.

    In the first round, rates may be added below or above the others. The last round also trains the
    default rate, and trains each rate with several seeds.
    """
    number, _ = rounds[place]
    return (
        (number + 1) * SEEDS if place + 1 == len(rounds) else number + (BEYOND if place == 0 else 0)
    )


def search(
    default: float,
    rounds: Sequence[tuple[int, int]],
    train: Callable[[float, int, int], Attempt],
) -> tuple[Attempt, ...]:
    """Search the rates around a default by successive halving.

    `train` takes a learning rate, the number of steps and a seed. If the best rate of the first
    round is the lowest or the highest, up to BEYOND rates beyond it are tried, until a rate is not
    better than the previous one.
    """
    candidates = rates(default)[:: 1 if rounds[0][0] == len(rates(default)) else 2]
    steps = rounds[0][1]
    attempts = [train(rate, steps, 0) for rate in candidates]

    factor = candidates[1] / candidates[0]
    for _ in range(BEYOND):
        (best,) = _best_rates(attempts, steps, 1)
        tried = [attempt.learning_rate for attempt in attempts]
        if best not in (min(tried), max(tried)):
            break
        attempts.append(train(best * factor if best == max(tried) else best / factor, steps, 0))

    for place, (number, steps) in enumerate(rounds[1:], 1):
        is_last = place + 1 == len(rounds)
        candidates = _best_rates(attempts, rounds[place - 1][1], number)
        for seed in range(SEEDS if is_last else 1):
            for rate in sorted({*candidates, default}) if is_last else candidates:
                attempts.append(train(rate, steps, seed))
    return tuple(attempts)


def _best_rates(attempts: Iterable[Attempt], steps: int, number: int) -> list[float]:
    """Return the `number` rates with the lowest losses of a round, the lowest rate first.

    `steps` identifies the round: each of its trainings has this number of steps.
    """
    ranked = sorted((attempt for attempt in attempts if attempt.steps == steps), key=_loss)
    return sorted(attempt.learning_rate for attempt in ranked[:number])
