"""Compare how long GPUs wait for the one with the longest rows, by formula, with trainings that are
simulated.

Lengths are of three distributions. A simulated step has micro batches of examples as trainers make
them: drawn apart, or in the order of transformers' own sampler by length; or the same examples as
train.py deals them out. Time is proportional to padded tokens. A share is the time of a step
divided by its time on GPUs that never wait, minus 1. An error is the formula's share minus the
simulated one. `of_drawn` is the time of a step that is dealt out, divided by the time of the same
examples in the order of drawing.
"""

import argparse
import itertools
import random
import statistics
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench import Mode, finish, largest, run_program

from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from autotune.trainer.dealing import balance_rows

EXAMPLES, GLOBAL_BATCH, STEPS, SEEDS = 4000, 64, 3000, 5
GROUPED = ((1000, 64), (3000, 128), (10_000, 64))  # examples, global batch


def _drawn(
    name: str, lengths: list[int], config: TrainConfig, generator: random.Random
) -> Iterator[dict[str, Any]]:
    """A row of micro batches that are drawn apart, for several GPUs; and one of the same examples,
    dealt out.
    """
    drawn = Workload(
        examples=len(lengths), lengths=Lengths.of(lengths, "counted"), global_batch=GLOBAL_BATCH
    )
    size, ranks = config.micro_batch_size, config.num_gpus
    steps = [generator.choices(lengths, k=GLOBAL_BATCH) for _ in range(STEPS)]
    taken_s = {}
    for workload in (drawn, replace(drawn, dealt=True)):
        ends = workload.padded_lengths(config)
        taken = alone = 0.0
        for step in steps:
            rows = (
                [step[place] for place in balance_rows(step, size, ranks)]
                if workload.dealt
                else step
            )
            padded = [max(rows[at : at + size]) for at in range(0, GLOBAL_BATCH, size)]
            padded = [ends[bisect_left(ends, longest)] if ends else longest for longest in padded]
            alone += sum(padded) / ranks
            # Shards are gathered in each micro batch; DDP waits once a step.
            each = [padded[rank::ranks] for rank in range(ranks)]
            taken += (
                sum(map(max, zip(*each, strict=True)))
                if config.sharding == "fsdp2"
                else max(map(sum, each))
            )
        taken_s[workload.dealt] = taken
        row = _row(
            name, config, workload.run_shape(config).accumulation, taken / alone - 1, workload
        )
        if workload.dealt:
            yield row | {"of_drawn": taken_s[True] / taken_s[False]}
        elif ranks > 1:
            yield row


def _grouped(lengths: list[int], batch: int, size: int) -> dict[str, Any]:
    """A row of micro batches in the order of transformers' sampler by length, on eight GPUs."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    config = TrainConfig(
        micro_batch_size=size,
        num_gpus=8,
        sharding="fsdp2",
        padding="longest",
        seq_len=4096,
        group_by_length=True,
    )
    workload = Workload(
        examples=len(lengths), lengths=Lengths.of(lengths, "counted"), global_batch=batch
    )
    taken = alone = 0.0
    for seed in range(SEEDS):
        order = get_length_grouped_indices(
            lengths, batch, generator=torch.Generator().manual_seed(seed)
        )
        longest = [
            max(lengths[index] for index in order[at : at + size])
            for at in range(0, len(order) - size, size)
        ]
        for at in range(0, len(longest) - 7, 8):
            taken += max(longest[at : at + 8])
            alone += sum(longest[at : at + 8]) / 8
    name = f"{len(lengths)} lognormal, grouped"
    return _row(name, config, workload.run_shape(config).accumulation, taken / alone - 1, workload)


def _row(
    name: str, config: TrainConfig, accumulation: int, simulated: float, workload: Workload
) -> dict[str, Any]:
    share = workload.waiting_share(config)
    return {
        "lengths": name,
        "config": config.label(),
        "gpus": config.num_gpus,
        "micro_batch_size": config.micro_batch_size,
        "grouped": config.group_by_length,
        "dealt": workload.dealt,
        "accumulation": accumulation,
        "simulated": simulated,
        "formula": share,
        "error": share - simulated,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    grouped = [row for row in rows if row["grouped"]]
    drawn, dealt = (
        [row for row in rows if not row["grouped"] and row["dealt"] is kind]
        for kind in (False, True)
    )
    several = [row for row in dealt if row["gpus"] > 1]
    alone = [row for row in dealt if row["gpus"] == 1 and row["micro_batch_size"] > 1]
    return {
        "drawn": len(drawn),
        "grouped": len(grouped),
        "dealt": len(several),
        "error_max": largest(drawn, "error"),
        "grouped_error_max": largest(grouped, "error"),
        "dealt_error_max": largest(several, "error"),
        "largest_share": largest(drawn, "simulated"),
        "of_drawn_median": statistics.median(row["of_drawn"] for row in several),
        "of_drawn_least": min(row["of_drawn"] for row in several),
        "of_drawn_most": max(row["of_drawn"] for row in several),
        "alone_of_drawn_least": min(row["of_drawn"] for row in alone),
        "alone_of_drawn_most": max(row["of_drawn"] for row in alone),
    }


def run(args: argparse.Namespace) -> None:
    """Simulate all cases."""
    generator = random.Random(3)
    kinds = {
        "lognormal": lambda: int(min(2048, max(8, generator.lognormvariate(5.5, 0.7)))),
        "uniform": lambda: generator.randint(10, 2048),
        "two": lambda: generator.choice([128, 1024]),
    }
    rows = []
    for name, draw in kinds.items():
        lengths = [draw() for _ in range(EXAMPLES)]
        shared = [(1, "none"), *itertools.product((2, 4, 8), ("fsdp2", "ddp"))]
        for size, (number, sharding), padding in itertools.product(
            (1, 4), shared, ("longest", "bucket")
        ):
            knobs = {
                "micro_batch_size": size,
                "num_gpus": number,
                "sharding": sharding,
                "padding": padding,
            }
            rows += _drawn(name, lengths, TrainConfig(**knobs, seq_len=2048), generator)
    for (examples, batch), size in itertools.product(GROUPED, (4, 8)):
        lengths = [
            int(min(4096, max(8, generator.lognormvariate(6.0, 0.8)))) for _ in range(examples)
        ]
        rows.append(_grouped(lengths, batch, size))
    columns = [
        "lengths",
        "config",
        "dealt",
        "accumulation",
        "simulated",
        "formula",
        "error",
        "of_drawn",
    ]
    finish(args, None, rows, columns)


MODES = {"": Mode(run=run, result="waiting", summarize=summarize)}


if __name__ == "__main__":
    run_program(MODES, __doc__)
