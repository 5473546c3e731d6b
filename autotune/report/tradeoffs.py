"""What length and capability cost: the best of each learning cell, and what each seq_len does to one's examples."""

from dataclasses import dataclass, replace

from autotune.core.train_config import TrainConfig
from autotune.problem.performance import differences
from autotune.study.summary import Candidate, Recipe, StudySummary

SHORTEST_ROW = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """The best of one learning cell. `extra` is its cost a useful token over the winner's, minus 1.

    `interval` is `extra` at either end of the measured spread, `changes` what it does not share with the winner. `cut`
    is the share of all tokens that its length cuts off, `padding` the share of its rows that is none.
    """

    candidate: Candidate
    changes: str
    extra: float
    interval: tuple[float, float]
    cut: float
    padding: float
    is_winner: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """What rows of `seq_len` tokens do to the examples: shares of examples and tokens cut, and of the rows filled.

    `packed_fill` and `examples_a_row` are those of packed rows.
    """

    seq_len: int
    examples_cut: float
    tokens_cut: float
    fill: float
    packed_fill: float
    examples_a_row: float
    is_winner: bool


def cells(recipe: Recipe) -> tuple[CellRow, ...]:
    """The best of each learning cell, the cheapest first."""
    rows = []
    for candidate in recipe.cells:
        extra = recipe.winner.performance.tokens_per_second / candidate.performance.tokens_per_second - 1.0
        low, high = candidate.performance.spread
        rows.append(
            CellRow(
                candidate=candidate,
                changes=differences(candidate.config, recipe.winner.config),
                extra=extra,
                interval=((1 + extra) * (1 + low) - 1, (1 + extra) * (1 + high) - 1),
                cut=recipe.workload.truncated(candidate.config.seq_len),
                padding=1.0 - recipe.workload.fill(candidate.config),
                is_winner=candidate.config == recipe.winner.config,
            )
        )
    return tuple(sorted(rows, key=lambda row: (not row.is_winner, row.extra)))


def lengths(summary: StudySummary) -> tuple[LengthRow, ...]:
    """For each seq_len that was tried, and powers of two up to what cuts nothing; () where all are of one length."""
    recipe = summary.recipe
    if recipe is None or len(recipe.workload.lengths.counts) == 1:
        return ()
    workload = recipe.workload
    found = {row.config.seq_len for row in summary.trials}
    seq_len = SHORTEST_ROW
    while seq_len < 2 * min(workload.lengths.longest, max(found, default=SHORTEST_ROW)):
        found.add(seq_len)
        seq_len *= 2
    rows = []
    for seq_len in sorted(found):
        alone = TrainConfig(seq_len=seq_len)
        packed = replace(alone, packing=True)
        rows.append(
            LengthRow(
                seq_len=seq_len,
                examples_cut=workload.lengths.longer(seq_len),
                tokens_cut=workload.truncated(seq_len),
                fill=workload.fill(alone),
                packed_fill=workload.fill(packed),
                examples_a_row=workload.examples_per_row(packed),
                is_winner=seq_len == recipe.winner.config.seq_len,
            )
        )
    return tuple(rows)
