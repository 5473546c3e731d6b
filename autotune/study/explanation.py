"""What each knob of a winner is worth: plain data, and its words."""

import math
from dataclasses import dataclass

from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib

NOTHING_GIB = 0.005  # prints as 0.00


@dataclass(frozen=True, slots=True, kw_only=True)
class AblatedKnob:
    """The winner with one knob as in the baseline. Memory is reserved; `error` is that of its speed, relative."""

    knob: str
    config: TrainConfig
    outcome: Outcome
    evidence: Evidence
    tokens_per_s: float | None = None
    error: float = 0.0
    peak_gib: float | None = None
    limit_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """What each knob of the winner is worth beside the others: what setting it back alone would do."""

    winner: AblatedKnob
    baseline: TrainConfig
    undone: tuple[AblatedKnob, ...]

    def of(self, config: TrainConfig) -> bool:
        """Whether it is this one's: a study that went on may have another winner."""
        return self.winner.config == config

    def ranked(self) -> list[AblatedKnob]:
        """What helped most first: what does not fit without, then by speed, at last what nothing is known of."""
        too_large = (Outcome.OOM, Outcome.REFUSED)
        return sorted(
            self.undone,
            key=lambda one: (one.tokens_per_s is None and one.outcome not in too_large, one.tokens_per_s or 0.0),
        )

    def effect(self, one: AblatedKnob) -> str:
        """In words: how many times as fast the winner is for this knob, and what it takes in memory."""
        if one.tokens_per_s is None or self.winner.tokens_per_s is None:
            if one.outcome not in (Outcome.OOM, Outcome.REFUSED) or not one.peak_gib:
                return f"without it: {one.outcome.value}"
            return f"does not fit without it: at least {fmt_gib(one.peak_gib)} of {fmt_gib(one.limit_gib)}"
        ratio = self.winner.tokens_per_s / one.tokens_per_s
        unclear = abs(ratio - 1) <= math.hypot(one.error, self.winner.error)
        speed = "no clear difference in speed" if unclear else f"{ratio:.2f} times as fast"
        if one.peak_gib is None or self.winner.peak_gib is None:
            return speed
        more = self.winner.peak_gib - one.peak_gib
        if abs(more) < NOTHING_GIB:
            return f"{speed}, as much memory"
        return f"{speed}, {fmt_gib(abs(more))} {'more' if more > 0 else 'less'}"

    def said(self) -> list[str]:
        """A line for each knob, what helped most first."""
        return [
            f"{one.knob} {getattr(self.winner.config, one.knob)} instead of {getattr(one.config, one.knob)}: "
            f"{self.effect(one)} [{one.evidence.value}]"
            for one in self.ranked()
        ]
