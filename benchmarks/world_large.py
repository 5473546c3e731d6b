"""Predict the memory of a model that no card holds as a whole, from one card, and train it on two.

A fake world of two on one card probes two truncated depths: they predict the whole model's rank. Then two real ranks
train the whole, built as shards, for ten steps and more. On a CPU it is a trial run with a model that is small, and a
limit that is smaller.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RANKS, collect, largest, measured, predicted, rank_config, rank_model, rank_parser

from autotune.core.probe_types import ProbeRequest, World
from autotune.probe.rank_pool import RankPool
from autotune.problem.performance import step_time_s

STEPS = 10
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fsdp2", {"micro_batch_size": 2, "checkpointing": "full", "loss": "chunked"}),
    ("fsdp2", {"micro_batch_size": 4, "checkpointing": "full", "loss": "chunked", "lora_rank": 64}),
]


def main() -> None:
    parser = rank_parser(__doc__)
    parser.add_argument("--model", default="llama-3.1-70b")
    args = parser.parse_args()
    with RankPool(args.device, RANKS, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as pool:
        args.memory_gib = args.memory_gib or pool.memory_gib
        collect("world_large", args, pool, CASES, lambda case: compare(pool, args, *case), summarize)


def compare(pool: RankPool, args: argparse.Namespace, strategy: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """A row with what one card predicted and what two took."""
    config = rank_config(args.device, knobs | {"num_gpus": RANKS, "sharding": strategy})
    request = ProbeRequest(
        config=config,
        model=rank_model(args.device, args.model),
        device=args.device,
        memory_gib=args.memory_gib,
        world=World.REAL,
        micro_steps=1,
        min_timed_micros=STEPS,
    )
    from_one, found_at = predicted(pool, replace(request, world=World.FAKE))
    whole = measured(pool, request)
    element_bytes = 4 if config.precision == "fp32" else 2
    return {
        "config": config.label(),
        "depths": found_at,
        "weights_gib": element_bytes * whole.total_params / 2**30,
        "limit_gib": whole.limit_gib,
        "predicted_gib": from_one.peak_allocated_gib,
        "peak_gib": whole.peak_allocated_gib,
        "memory_error": from_one.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "steps": len(whole.step_s),
        "step_s": step_time_s(whole, 1),
        "losses": list(whole.losses),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "configs": sum("memory_error" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "memory_error_max": largest(rows, "memory_error"),
        "steps_min": min((row["steps"] for row in rows if "steps" in row), default=None),
    }


if __name__ == "__main__":
    main()
