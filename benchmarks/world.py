"""Compare a fake world of two, which one device plays, with two real ranks: the memory of a rank, and the step.

Every configuration is probed twice by the same pool of workers. An error is the fake rank's peak divided by the real
one's, minus 1. `step_ratio` is the real step over the fake one: communication that computation does not hide. The
context is what a rank holds beside torch's memory: NCCL's is the difference. On a CPU it is a trial run: there peaks
are those of a process, which has little to do with a GPU.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RANKS, TINY_MODEL, collect, largest, measured, rank_config, rank_parser

from autotune.catalog import resolve_model
from autotune.core.probe_types import Measurement, ProbeRequest, World
from autotune.core.train_config import TrainConfig
from autotune.probe.rank_pool import RankPool

STRATEGIES = ("ddp", "fsdp2", "fsdp2_keep", "zero2", "zero3")
LORA: dict[str, Any] = {"micro_batch_size": 4, "checkpointing": "none"}
FULL: dict[str, Any] = LORA | {"method": "full"}
RECOMPUTED, COMPILED = {"checkpointing": "full"}, {"compile": "per_layer"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration on several ranks, and the micro batches of a step."""

    config: TrainConfig
    micro_steps: int

    def __str__(self) -> str:
        return f"{self.config.label()} x {self.micro_steps}"


def cases(device: str) -> list[Case]:
    """23 configurations of eager layers, three that recompute and three that compile, which take longest."""
    wanted: list[tuple[str, dict[str, Any], int]] = [
        (strategy, knobs, micro_steps) for strategy in STRATEGIES for knobs in (LORA, FULL) for micro_steps in (1, 4)
    ]
    wanted += [("fsdp2", FULL | {"sync_each_batch": True}, 4)]
    wanted += [("fsdp2", knobs | {"offload": True}, 2) for knobs in (LORA, FULL)]
    for more in (RECOMPUTED, COMPILED):
        wanted += [("fsdp2", FULL | more, 1), ("fsdp2", LORA | more, 4), ("ddp", LORA | more, 1)]
    return [
        Case(
            config=rank_config(device, knobs | {"num_gpus": RANKS, "sharding": strategy}),
            micro_steps=micro_steps,
        )
        for strategy, knobs, micro_steps in wanted
    ]


def main() -> None:
    parser = rank_parser(__doc__)
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    model = TINY_MODEL if args.device == "cpu" else resolve_model(args.model).config
    model = model | {"num_hidden_layers": args.layers}
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    with RankPool(args.device, RANKS, logs) as pool:
        args.memory_gib = args.memory_gib or pool.memory_gib
        collect("world", args, pool, cases(args.device), lambda case: compare(pool, args, model, case), summarize)


def compare(pool: RankPool, args: argparse.Namespace, model: dict[str, Any], case: Case) -> dict[str, Any]:
    """A row with what the fake and the real rank took."""
    fake, real = (
        measured(
            pool,
            ProbeRequest(
                config=case.config,
                model=model,
                device=args.device,
                memory_gib=args.memory_gib,
                micro_steps=case.micro_steps,
                min_timed_s=0.5,
                world=world,
            ),
        )
        for world in (World.FAKE, World.REAL)
    )
    contexts = fake.context_gib, real.context_gib
    return {
        "config": str(case),
        "peak_gib": [fake.peak_allocated_gib, real.peak_allocated_gib],
        "peak_error": fake.peak_allocated_gib / real.peak_allocated_gib - 1,
        "reserved_gib": [fake.peak_reserved_gib, real.peak_reserved_gib],
        "reserved_error": fake.peak_reserved_gib / real.peak_reserved_gib - 1,
        "step_s": [step_s(fake), step_s(real)],
        "step_ratio": step_s(real) / step_s(fake),
        "nccl_gib": None if None in contexts else contexts[1] - contexts[0],  # type: ignore[operator]
    }


def step_s(found: Measurement) -> float:
    return statistics.median(found.step_s)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["step_ratio"] for row in rows if "step_ratio" in row]
    return {
        "configs": len(ratios),
        "failed": sum("failed" in row for row in rows),
        "peak_error_max": largest(rows, "peak_error"),
        "reserved_error_max": largest(rows, "reserved_error"),
        "step_ratio_min": min(ratios, default=None),
        "step_ratio_median": statistics.median(ratios) if ratios else None,
        "step_ratio_max": max(ratios, default=None),
        "nccl_gib_max": largest(rows, "nccl_gib"),
    }


if __name__ == "__main__":
    main()
