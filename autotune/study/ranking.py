"""Rank measured configurations: the cheapest wins, unless a more capable one costs little more.

The score of a configuration (`Task.score`) is its useful tokens per second or, if several GPU
counts are compared, its useful tokens per second and GPU. A more capable configuration can learn
more, for example with a higher LoRA rank. The more capable configuration wins if it costs at most a
certain fraction more than the cheapest. This fraction is called the slack, and its default is 5 %.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig, learning_differences
from autotune.problem.search_space import SearchSpace

# A configuration is tight if less than this share of the memory limit is free. A tight
# configuration may lose to a slower one. If more than this share is free, free memory only decides
# between configurations whose speeds tie.
ROOMY = 0.1
LEAST_SHOWN = 0.0005  # a smaller difference in cost would read 0.0%


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A configuration that fits, with its score and the free share of the memory limit.

    `noise` is the fraction by which two measurements of the same configuration may differ. `spread`
    is the range of the timed steps, relative to the reported step time (`Performance`). With the
    default `spread`, which is unlimited, the configuration neither beats another nor is beaten.
    `host_bound` is True for a CPU-bound configuration.
    """

    config: TrainConfig
    score: float
    free_fraction: float
    host_bound: bool = False
    noise: float = 0.0
    spread: tuple[float, float] = (-1.0, math.inf)

    def ties(self, other: "Scored") -> bool:
        """Whether the two scores differ from each other by no more than the noise.

        A few long steps on a busy machine make the noise large. Even then, two configurations do
        not tie if all steps of one take longer than all steps of the other.
        """
        ratio = max(self.score, other.score) / min(self.score, other.score)
        return ratio - 1 <= max(self.noise, other.noise) and not (
            self.beats(other) or other.beats(self)
        )

    def beats(self, other: "Scored") -> bool:
        """Whether this score at its slowest step exceeds the other score at its fastest step."""
        return self.score * (1 + other.spread[0]) > other.score * (1 + self.spread[1])

    def equals(self, other: "Scored") -> bool:
        """Whether the scores tie, the capability is equal, and both or neither are tight."""
        return _class(self) == _class(other) and self.ties(other)


def choose(candidates: Sequence[Scored], slack: float) -> Scored:
    """Return the cheapest candidate, or a more capable one that costs at most `slack` more.

    Among equally fast configurations, a GPU-bound one is preferred, because other work on the host
    slows a CPU-bound one. Next, the configuration with the most free memory is preferred. Raises
    ValueError if there are no candidates.
    """
    leaders = _leaders(candidates, slack)
    return max(
        (one for one in leaders if one.ties(leaders[0])),
        key=lambda one: (_tie_break(one), one.score),
    )


def score_to_beat(candidate: Scored, others: Sequence[Scored], slack: float) -> float:
    """Return the lowest score with which `choose` would prefer the candidate to all others.

    Raises ValueError if `others` is empty.
    """
    cheapest = max(other.score for other in others)
    fastest = _leaders(others, slack)[0]

    if _class(candidate) == _class(fastest):
        preferred = _tie_break(candidate) > _tie_break(choose(others, slack))
        return fastest.score / (1.0 + (max(candidate.noise, fastest.noise) if preferred else 0.0))
    return cheapest / (1.0 + slack) if _class(candidate) > _class(fastest) else cheapest


def _leaders(candidates: Sequence[Scored], slack: float) -> list[Scored]:
    """Return the candidates of the best `_class` that are within the slack, the fastest first.

    A candidate is within the slack if it costs at most the fraction `slack` more than the cheapest.
    """
    ranked = sorted(candidates, key=lambda candidate: candidate.score, reverse=True)
    within = [one for one in ranked if one.score >= ranked[0].score / (1.0 + slack)]
    classes = [_class(one) for one in within]
    best = max(classes)
    return [one for one, own in zip(within, classes, strict=True) if own == best]


def _class(candidate: Scored) -> tuple[Any, ...]:
    """The criteria that, within the slack, are more important than speed; larger is better."""
    return candidate.config.capability, candidate.free_fraction >= ROOMY


def _tie_break(candidate: Scored) -> tuple[bool, float]:
    """The criteria that decide between equally fast configurations; larger is better.

    Free memory is rounded to whole percent, because smaller differences do not matter.
    """
    return not candidate.host_bound, round(candidate.free_fraction, 2)


def explain_choice(
    winner: Scored,
    candidates: Sequence[Scored],
    slack: float,
    space: SearchSpace,
    tried: Iterable[TrainConfig],
    best: str = "the cheapest",
) -> str:
    """Explain in words why `choose` preferred the winner.

    The text also says why no more capable configuration of the space won. `best` describes the
    configuration with the highest score. The text calls the user's quality limits "floors"; all
    configurations of the space meet these limits.
    """
    cheapest = max(candidates, key=lambda candidate: candidate.score)
    capability = winner.config.capability
    tie = winner.ties(cheapest)
    extra = cheapest.score / winner.score - 1.0
    if tie:
        cost = "at no measurable cost"
    elif extra < LEAST_SHOWN:
        cost = f"at the same cost as {best}"
    else:
        cost = f"for {extra:.1%} more cost than {best} (slack allows {slack:.0%})"

    if capability != cheapest.config.capability:
        return f"it is more capable: {learning_differences(winner.config, cheapest.config)}, {cost}"

    if any(config.capability > capability for config in tried):
        larger = f"no more capable configuration costs at most {slack:.0%} more"
    elif any(config.capability > capability for config in more_capable(space, winner.config)):
        larger = "nothing more capable was tried"
    else:
        larger = "the space has nothing more capable"

    if winner is cheapest:
        return f"{best} above the floors; {larger}"
    steadier = winner.equals(cheapest) and cheapest.host_bound and not winner.host_bound
    reason = "it is not CPU-bound" if steadier else "it leaves more memory free"
    return f"{reason}, {cost}; {larger}"


def more_capable(space: SearchSpace, config: TrainConfig) -> list[TrainConfig]:
    """Return configurations of the space that are more capable than `config`.

    In the first of them, every learning knob has its most capable value. Then come configurations
    with only one knob raised to its most capable value, and configurations with the LoRA ranks in
    between.
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
