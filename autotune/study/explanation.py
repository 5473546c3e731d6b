"""What each knob of a winner is worth, as plain data."""

from dataclasses import dataclass

from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig


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
