"""Workload: what the full run must process. Examples are padded or cut to seq_len, one to a row, as probes train."""

import math
from dataclasses import dataclass
from typing import Any

from autotune.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`examples` a pass, as long as `lengths` says, `epochs` passes; `global_batch` sequences an optimizer step.

    The global batch is the user's and the same for every candidate.
    """

    examples: int = 10_000
    epochs: int = 1
    lengths: Lengths = Lengths.constant(1024, "assumed")  # noqa: RUF009 (frozen)
    examples_assumed: bool = True
    global_batch: int = 32

    def __post_init__(self) -> None:
        for name in ("examples", "epochs", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the full run; the last batch of an epoch may be smaller and counts as a step."""
        return math.ceil(self.examples / self.global_batch) * self.epochs

    def accumulation(self, micro_batch_size: int) -> int:
        """Micro batches an optimizer step. Raises ValueError if the micro batch does not divide the global batch."""
        if self.global_batch % micro_batch_size:
            raise ValueError(f"micro batch {micro_batch_size} does not divide the global batch {self.global_batch}")
        return self.global_batch // micro_batch_size

    def useful_tokens(self, seq_len: int) -> float:
        """Tokens of a mean example that are trained on: neither padding nor cut off."""
        return self.lengths.kept(seq_len) / self.lengths.number

    def truncated(self, seq_len: int) -> float:
        """Share of all tokens that is cut off at `seq_len`."""
        return 1.0 - self.lengths.kept(seq_len) / self.lengths.total

    def fill(self, seq_len: int) -> float:
        """Share of the rows that is not padding."""
        return self.useful_tokens(seq_len) / seq_len

    def facts(self) -> dict[str, Any]:
        """As plain data, its lengths described."""
        return {
            "examples": self.examples,
            "examples_assumed": self.examples_assumed,
            "epochs": self.epochs,
            "tokens_per_example": self.lengths.facts(),
            "global_batch": self.global_batch,
        }
