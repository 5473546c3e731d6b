"""Which of several measured configurations wins: the cheapest, or a more capable one that costs little more.

The score of a configuration is its useful tokens per second (`performance.score`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.train_config import TrainConfig, learning_differences

# A configuration that leaves less than this share of the memory limit free is tight. Beyond it, more room is not worth
# any speed, and it must not decide: which of several equally fast configurations comes out fastest is chance.
ROOMY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A configuration that fits, with its score and the share of the memory limit it leaves free."""

    config: TrainConfig
    score: float
    free_fraction: float


def choose(candidates: Sequence[Scored], slack: float) -> tuple[Scored, str]:
    """The winner and the reason in words.

    The winner is the cheapest candidate, or a more capable one that costs at most the share `slack` more.

    Raises:
        ValueError: there is no candidate.
    """
    cheapest = max(candidates, key=lambda candidate: candidate.score)
    close = [candidate for candidate in candidates if candidate.score >= cheapest.score / (1.0 + slack)]
    winner = max(close, key=_preference)
    if winner is cheapest:
        return winner, "the cheapest above the floors; nothing more capable is within the slack"
    if winner.config.capability == cheapest.config.capability:
        advantage = "it leaves more memory free"
    else:
        advantage = "it is more capable: " + learning_differences(winner.config, cheapest.config)
    extra = cheapest.score / winner.score - 1.0
    return winner, f"{advantage}, for {extra:.1%} more cost than the cheapest (slack {slack:.0%})"


def to_beat(candidate: Scored, others: Sequence[Scored], slack: float) -> float:
    """The score from which on the candidate would be the cheapest, or `choose` would prefer it to the others.

    Raises:
        ValueError: there are no others.
    """
    cheapest = max(other.score for other in others)
    least_close = cheapest / (1.0 + slack)
    *preferred, score = max(_preference(other) for other in others if other.score >= least_close)
    *offered, _ = _preference(candidate)
    if offered == preferred:
        return float(score)
    return least_close if offered > preferred else cheapest


def _preference(candidate: Scored) -> tuple[Any, ...]:
    """A key by which the winner among those within the slack sorts last."""
    return candidate.config.capability, candidate.free_fraction >= ROOMY, candidate.score
