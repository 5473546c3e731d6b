"""Workload: what the full run must process. Examples are cut to seq_len; one to a padded row, or packed, as probed."""

import bisect
import itertools
from dataclasses import dataclass
from typing import Any

from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths, Rows
from autotune.problem.run_shape import RunShape

PROBED_ROWS = 8  # kinds of row that a probe trains on in turn
GRAIN = 16  # lengths of padded rows are told in so many parts of a row, so that probes serve other data as well
_SPREAD = (0, 4, 2, 6, 1, 5, 3, 7)  # their order: any few of them are far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`examples` a pass, as long as `lengths` says, `epochs` passes; `global_batch` examples an optimizer step.

    The global batch is the user's and the same for every candidate, as nearly as whole rows of packed examples allow.
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

    def examples_per_row(self, config: TrainConfig) -> float:
        """Mean number of examples in a row: 1 unless they are packed."""
        if not config.packing:
            return 1  # an int, so that the global batch of unpacked examples is written as an int
        return self.lengths.number * self._times / sum(rows.number for rows in self._packed(config))

    @property
    def _times(self) -> int:
        """How often the lengths that are known must be taken to make up for all examples."""
        return max(1, round(self.examples / self.lengths.number))

    def _packed(self, config: TrainConfig) -> tuple[Rows, ...]:
        return self.lengths.packed(config.seq_len, self._times)

    def run_shape(self, config: TrainConfig, *, accumulation: int | None = None, world_size: int = 1) -> RunShape:
        """How the full run divides these examples into steps.

        Without `accumulation`, a step has as many micro batches as come to the global batch; of packed rows, as many as
        hold about the examples of the global batch.

        Raises:
            ValueError: the micro batches of all devices do not divide the global batch.
        """
        return RunShape(
            micro_batch_size=config.micro_batch_size,
            accumulation=accumulation or self._accumulation(config, world_size),
            world_size=world_size,
            seq_len=config.seq_len,
            examples_per_row=self.examples_per_row(config),
            useful_tokens_per_row=self.useful_tokens_per_row(config),
            examples=self.examples,
            epochs=self.epochs,
        )

    def _accumulation(self, config: TrainConfig, world_size: int) -> int:
        if config.packing:
            rows = self.global_batch / self.examples_per_row(config)
            return max(1, round(rows / (config.micro_batch_size * world_size)))
        accumulation, remainder = divmod(self.global_batch, config.micro_batch_size * world_size)
        if remainder:
            devices = f" on each of {world_size} devices" if world_size > 1 else ""
            raise ValueError(
                f"micro batch {config.micro_batch_size}{devices} does not divide the global batch {self.global_batch}"
            )
        return accumulation

    def useful_tokens_per_row(self, config: TrainConfig) -> float:
        """Tokens of a mean row that are trained on: neither padding nor cut off."""
        return self.lengths.kept(config.seq_len) / self.lengths.number * self.examples_per_row(config)

    def fill(self, config: TrainConfig) -> float:
        """Share of the rows that is not padding."""
        return self.useful_tokens_per_row(config) / config.seq_len

    def truncated(self, seq_len: int) -> float:
        """Share of all tokens that is cut off at `seq_len`."""
        return 1.0 - self.lengths.kept(seq_len) / self.lengths.total

    def rows(self, config: TrainConfig) -> tuple[tuple[int, ...], ...]:
        """Rows such as the run trains on, for a probe: the lengths of the examples in each. () where all are full.

        Of packed ones first one of several examples, then one that a single example fills, if there are both:
        transformers makes a mask for the first alone, and what a probe compiles and weighs, it does in its first steps.
        """
        if not config.packing:
            lengths = sorted(self.lengths.sample(PROBED_ROWS, config.seq_len))
            parts = [max(1, round(GRAIN * length / config.seq_len)) for length in lengths]
            if min(parts) == GRAIN:
                return ()
            return tuple((max(2, parts[index] * config.seq_len // GRAIN),) for index in _SPREAD)
        rows = self._packed(config)
        ends = list(itertools.accumulate(one.number for one in rows))
        # Equally far apart in the order in which they were filled, so that all kinds of row are there.
        places = ((2 * index + 1) * ends[-1] / (2 * PROBED_ROWS) for index in range(PROBED_ROWS))
        kinds = [rows[bisect.bisect_right(ends, place)].examples for place in places]
        kinds = [kinds[index] for index in _SPREAD]
        first = next((kind for kind in kinds if len(kind) > 1), kinds[0])
        kinds.remove(first)
        second = next((kind for kind in kinds if len(kind) == 1), kinds[0])
        kinds.remove(second)
        return (first, second, *kinds)

    def facts(self) -> dict[str, Any]:
        """As plain data, its lengths described."""
        return {
            "examples": self.examples,
            "examples_assumed": self.examples_assumed,
            "epochs": self.epochs,
            "tokens_per_example": self.lengths.facts(),
            "global_batch": self.global_batch,
        }
