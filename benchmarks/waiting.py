"""Compare how long GPUs wait for the one with the longest rows, by formula, with trainings that are simulated.

Lengths are of three distributions. A simulated step deals out micro batches of examples as trainers do: drawn apart, or
in the order of transformers' own sampler by length. A share is the time of a step over that of GPUs that never wait,
minus 1, where time is proportional to padded tokens; an error is the formula's share minus the simulated one.
"""

import argparse
import itertools
import random
from bisect import bisect_left
from pathlib import Path
from typing import Any

from common import largest, save, table

from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload

EXAMPLES, GLOBAL_BATCH, STEPS, SEEDS = 4000, 64, 1500, 5
GROUPED = ((1000, 64), (3000, 128), (10_000, 64))  # examples, global batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR")
    args = parser.parse_args()
    generator = random.Random(3)
    kinds = {
        "lognormal": lambda: int(min(2048, max(8, generator.lognormvariate(5.5, 0.7)))),
        "uniform": lambda: generator.randint(10, 2048),
        "two": lambda: generator.choice([128, 1024]),
    }
    rows = []
    for name, draw in kinds.items():
        lengths = [draw() for _ in range(EXAMPLES)]
        for size, number, sharding, padding in itertools.product(
            (1, 4), (2, 4, 8), ("fsdp2", "ddp"), ("longest", "bucket")
        ):
            knobs = {"micro_batch_size": size, "num_gpus": number, "sharding": sharding, "padding": padding}
            rows.append(_drawn(name, lengths, TrainConfig(**knobs, seq_len=2048), generator))
    for (examples, batch), size in itertools.product(GROUPED, (4, 8)):
        lengths = [int(min(4096, max(8, generator.lognormvariate(6.0, 0.8)))) for _ in range(examples)]
        rows.append(_grouped(lengths, batch, size))
    summary = summarize(rows)
    save("waiting", None, summary, rows, args.out)
    print(summary)
    table(rows, ["lengths", "config", "accumulation", "simulated", "formula", "error"])


def _drawn(name: str, lengths: list[int], config: TrainConfig, generator: random.Random) -> dict[str, Any]:
    """A row of micro batches that are drawn apart."""
    workload = Workload(examples=len(lengths), lengths=Lengths.of(lengths, "counted"), global_batch=GLOBAL_BATCH)
    accumulation, ends = workload.run_shape(config).accumulation, workload.padded_lengths(config)

    def padded() -> int:
        longest = max(generator.choices(lengths, k=config.micro_batch_size))
        return ends[bisect_left(ends, longest)] if ends else longest

    taken = alone = 0.0
    for _ in range(STEPS):
        ranks = [[padded() for _ in range(accumulation)] for _ in range(config.num_gpus)]
        alone += sum(map(sum, ranks)) / config.num_gpus
        # Shards are gathered in each micro batch; DDP waits once a step.
        taken += max(map(sum, ranks)) if config.sharding == "ddp" else sum(map(max, zip(*ranks, strict=True)))
    return _row(name, config, accumulation, taken / alone - 1, workload)


def _grouped(lengths: list[int], batch: int, size: int) -> dict[str, Any]:
    """A row of micro batches in the order of transformers' sampler by length, on eight GPUs."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    config = TrainConfig(
        micro_batch_size=size, num_gpus=8, sharding="fsdp2", padding="longest", seq_len=4096, group_by_length=True
    )
    workload = Workload(examples=len(lengths), lengths=Lengths.of(lengths, "counted"), global_batch=batch)
    taken = alone = 0.0
    for seed in range(SEEDS):
        order = get_length_grouped_indices(lengths, batch, generator=torch.Generator().manual_seed(seed))
        longest = [max(lengths[index] for index in order[at : at + size]) for at in range(0, len(order) - size, size)]
        for at in range(0, len(longest) - 7, 8):
            taken += max(longest[at : at + 8])
            alone += sum(longest[at : at + 8]) / 8
    name = f"{len(lengths)} lognormal, grouped"
    return _row(name, config, workload.run_shape(config).accumulation, taken / alone - 1, workload)


def _row(name: str, config: TrainConfig, accumulation: int, simulated: float, workload: Workload) -> dict[str, Any]:
    share = workload.waiting_share(config)
    return {
        "lengths": name,
        "config": config.label(),
        "grouped": config.group_by_length,
        "accumulation": accumulation,
        "simulated": simulated,
        "formula": share,
        "error": share - simulated,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    drawn, grouped = ([row for row in rows if row["grouped"] is kind] for kind in (False, True))
    return {
        "drawn": len(drawn),
        "grouped": len(grouped),
        "error_max": largest(drawn, "error"),
        "grouped_error_max": largest(grouped, "error"),
        "largest_share": largest(drawn, "simulated"),
    }


if __name__ == "__main__":
    main()
