"""Which of several measured configurations wins: the cheapest, or a more capable one that costs little more.

The score of a configuration is its useful tokens per second (`performance.score`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig, learning_differences
from autotune.problem.search_space import SearchSpace

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

    The winner is the cheapest candidate, or a more capable one that costs at most the share `slack` more. Raises
    ValueError without candidates.
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

    Raises ValueError without others.
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


def more_capable(space: SearchSpace, config: TrainConfig) -> list[TrainConfig]:
    """More capable configurations of the space, one of which may win within the slack.

    First every learning knob at its most capable value, then each knob alone, then the LoRA ranks between.
    """
    raised = {
        knob.name: max((replace(config, **{knob.name: value}).capability, value) for value in knob.choices())[1]
        for knob in space.knobs
        if KNOBS[knob.name].capability_priority is not None and len(knob.choices()) > 1
    }
    wanted = [raised, *({name: value} for name, value in raised.items())]
    if "lora_rank" in raised and config.lora_rank:
        ranks = space.knob("lora_rank").choices()  # type: ignore[union-attr]
        wanted += [{"lora_rank": rank} for rank in sorted(ranks) if rank > config.lora_rank]
    return list(dict.fromkeys(space.config(space.clip(replace(config, **changes))) for changes in wanted))
