"""RunShape: how a run divides its examples into rows, micro batches and optimizer steps.

All rules about steps are here: size of the global batch, number of steps, micro batches of a probe.
"""

import math
from dataclasses import dataclass

PROBED_MICRO_BATCHES = 2  # the second one peaks higher, since the gradients of the first are still allocated
CONFIRMED_MICRO_BATCHES = 4  # a confirmation times longer steps, nearer to those of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """How one run of `epochs` passes over `examples` examples processes them.

    A row is one sequence of `seq_len` tokens with `examples_per_row` examples on average; `useful_tokens_per_row` are
    neither padding nor cut off. A forward pass of one device takes `micro_batch_size` rows, an optimizer step
    `accumulation` such micro batches on each of `world_size` devices.
    """

    micro_batch_size: int
    accumulation: int
    world_size: int = 1
    seq_len: int
    examples_per_row: float
    useful_tokens_per_row: float
    examples: int
    epochs: float

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step: the global batch, counted in rows."""
        return self.micro_batch_size * self.accumulation * self.world_size

    @property
    def examples_per_step(self) -> float:
        """Examples of one optimizer step, on average: the global batch, counted in examples."""
        return self.rows_per_step * self.examples_per_row

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, padding included."""
        return self.rows_per_step * self.seq_len

    @property
    def useful_tokens_per_step(self) -> float:
        """Tokens of one optimizer step that are neither padding nor cut off."""
        return self.rows_per_step * self.useful_tokens_per_row

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run. The last batch of an epoch may be smaller and counts as a step."""
        steps_per_epoch = math.ceil(round(self.examples / self.examples_per_step, 6))
        return math.ceil(steps_per_epoch * self.epochs)

    @property
    def probe_micro_steps(self) -> int:
        """Micro batches in each step of a probe."""
        return min(self.accumulation, PROBED_MICRO_BATCHES)

    @property
    def confirmation_micro_steps(self) -> int:
        """Micro batches in each step of a confirmation."""
        return min(self.accumulation, CONFIRMED_MICRO_BATCHES)

    def step_time_s(self, micro_s: float, rest_s: float) -> float:
        """Seconds of one optimizer step: its micro batches of `micro_s` each, and `rest_s` for everything else."""
        return self.accumulation * micro_s + rest_s
