"""Workload: what the full run must process. Examples are padded or cut to seq_len, one to a row, as probes train."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`examples` a pass, `epochs` passes, `tokens_per_example` each; `global_batch` sequences an optimizer step.

    The global batch is the user's and the same for every candidate. `tokens_assumed` says that nobody gave the length.
    """

    examples: int = 10_000
    epochs: int = 1
    tokens_per_example: int = 1024
    tokens_assumed: bool = True
    examples_assumed: bool = True
    global_batch: int = 32

    def __post_init__(self) -> None:
        for name in ("examples", "epochs", "tokens_per_example", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the full run; the last batch of an epoch may be smaller and counts as a step."""
        return math.ceil(self.examples / self.global_batch) * self.epochs

    @property
    def total_tokens(self) -> int:
        return self.examples * self.epochs * self.tokens_per_example

    def accumulation(self, micro_batch_size: int) -> int:
        """Micro batches an optimizer step. Raises ValueError if the micro batch does not divide the global batch."""
        if self.global_batch % micro_batch_size:
            raise ValueError(f"micro batch {micro_batch_size} does not divide the global batch {self.global_batch}")
        return self.global_batch // micro_batch_size

    def useful_tokens(self, seq_len: int) -> int:
        """Tokens of one example that are trained on: neither padding nor cut off."""
        return min(self.tokens_per_example, seq_len)

    def truncated(self, seq_len: int) -> float:
        """Share of all tokens that is cut off at `seq_len`."""
        return 1.0 - self.useful_tokens(seq_len) / self.tokens_per_example

    def fill(self, seq_len: int) -> float:
        """Share of a row that is not padding."""
        return self.useful_tokens(seq_len) / seq_len
