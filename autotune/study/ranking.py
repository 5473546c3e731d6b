"""Which of several measured configurations wins: the cheapest, or a more capable one that costs little more.

The score of a configuration is its useful tokens per second (`performance.score`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig, learning_differences
from autotune.problem.search_space import SearchSpace

# A configuration that leaves less than this share of the memory limit free is tight. Beyond it, more room is worth no
# speed that can be measured; among equals in speed it decides, since which of them comes out fastest is chance.
ROOMY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A configuration that fits, with its score and the share of the memory limit it leaves free.

    `noise` is by which share the score would differ if it were measured again, `spread` the range of the timed steps
    relative to the reported one (`Performance`); where it is not known, it tells nothing apart. `host_bound` says
    whether the host sets the pace.
    """

    config: TrainConfig
    score: float
    free_fraction: float
    host_bound: bool = False
    noise: float = 0.0
    spread: tuple[float, float] = (-1.0, math.inf)

    def ties(self, other: "Scored") -> bool:
        """Whether the two scores cannot be told apart.

        A few long steps on a busy machine make much noise, and yet all steps of one may be slower than the other's.
        """
        ratio = max(self.score, other.score) / min(self.score, other.score)
        return ratio - 1 <= max(self.noise, other.noise) and not (
            self.beats(other) or other.beats(self)
        )

    def beats(self, other: "Scored") -> bool:
        """Whether the score is higher even by the slowest step, against the fastest of the other's."""
        return self.score * (1 + other.spread[0]) > other.score * (1 + self.spread[1])

    def equals(self, other: "Scored") -> bool:
        """Whether the two tie, and neither is preferred to the other before speed is compared."""
        return _class(self) == _class(other) and self.ties(other)


def choose(candidates: Sequence[Scored], slack: float) -> Scored:
    """The winner: the cheapest candidate, or a more capable one that costs at most the share `slack` more.

    Of those as capable whose speeds cannot be told apart, it is the one that needs the least memory, but none whose
    host sets the pace if another's does not: whatever else the host does makes that one slower. Raises ValueError
    without candidates.
    """
    leaders = _leaders(candidates, slack)
    return max(
        (one for one in leaders if one.ties(leaders[0])),
        key=lambda one: (_among_equals(one), one.score),
    )


def to_beat(candidate: Scored, others: Sequence[Scored], slack: float) -> float:
    """The score from which on the candidate would be the cheapest, or `choose` would prefer it to the others.

    Raises ValueError without others.
    """
    cheapest = max(other.score for other in others)
    fastest = _leaders(others, slack)[0]
    if _class(candidate) == _class(fastest):
        preferred = _among_equals(candidate) > _among_equals(choose(others, slack))
        return fastest.score / (1.0 + (max(candidate.noise, fastest.noise) if preferred else 0.0))
    return cheapest / (1.0 + slack) if _class(candidate) > _class(fastest) else cheapest


def _leaders(candidates: Sequence[Scored], slack: float) -> list[Scored]:
    """The best class among those within the slack of the cheapest, the fastest first."""
    ranked = sorted(candidates, key=lambda candidate: candidate.score, reverse=True)
    best = max(_class(one) for one in ranked if one.score >= ranked[0].score / (1.0 + slack))
    return [
        one
        for one in ranked
        if _class(one) == best and one.score >= ranked[0].score / (1.0 + slack)
    ]


def _class(candidate: Scored) -> tuple[Any, ...]:
    """What decides before speed does: larger is better."""
    return candidate.config.capability, candidate.free_fraction >= ROOMY


def _among_equals(candidate: Scored) -> tuple[bool, float]:
    """What decides between equals in speed: larger is better. Free memory in whole percent: less is no difference."""
    return not candidate.host_bound, round(candidate.free_fraction, 2)


def why(
    winner: Scored,
    candidates: Sequence[Scored],
    slack: float,
    space: SearchSpace,
    tried: Iterable[TrainConfig],
    best: str = "the cheapest",
) -> str:
    """Why `choose` preferred the winner, and what became of more capable configurations of the space, in words.

    `best` is what the one with the highest score is called.
    """
    cheapest, capability = (
        max(candidates, key=lambda candidate: candidate.score),
        winner.config.capability,
    )
    tie, extra = winner.ties(cheapest), cheapest.score / winner.score - 1.0
    cost = (
        "at no measurable cost"
        if tie
        else f"for {extra:.1%} more cost than {best} (slack {slack:.0%})"
    )
    if capability != cheapest.config.capability:
        return f"it is more capable: {learning_differences(winner.config, cheapest.config)}, {cost}"
    if any(config.capability > capability for config in tried):
        larger = "nothing more capable is within the slack"
    elif any(config.capability > capability for config in more_capable(space, winner.config)):
        larger = "nothing more capable was tried"
    else:
        larger = "the space has nothing more capable"
    if winner is cheapest:
        return f"{best} above the floors; {larger}"
    steadier = winner.equals(cheapest) and cheapest.host_bound and not winner.host_bound
    return f"{'the host does not set its pace' if steadier else 'it leaves more memory free'}, {cost}; {larger}"


def more_capable(space: SearchSpace, config: TrainConfig) -> list[TrainConfig]:
    """More capable configurations of the space, one of which may win within the slack.

    First every learning knob at its most capable value, then each knob alone, then the LoRA ranks between.
    """
    raised = {
        knob.name: max(
            (replace(config, **{knob.name: value}).capability, value) for value in knob.choices()
        )[1]
        for knob in space.knobs
        if KNOBS[knob.name].capability_priority is not None and len(knob.choices()) > 1
    }
    wanted = [raised, *({name: value} for name, value in raised.items())]
    if "lora_rank" in raised and config.lora_rank:
        ranks = space.knob("lora_rank").choices()  # type: ignore[union-attr]
        wanted += [{"lora_rank": rank} for rank in sorted(ranks) if rank > config.lora_rank]
    return list(
        dict.fromkeys(space.config(space.clip(replace(config, **changes))) for changes in wanted)
    )
