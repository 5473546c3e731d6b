"""Compare the losses of one GPU with those of two that share out the same global batch.

Both train the same rows from the same weights. An error is the loss of a step on two ranks over that on one, minus 1:
of the steps that both ran, the largest. FSDP2 computes in bf16 without autocast, which one GPU does not.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import RANKS, TINY_MODEL, collect, largest, measured, rank_config, rank_parser

from autotune.catalog import resolve_model
from autotune.core.probe_types import Measurement, ProbeRequest, World
from autotune.probe.rank_pool import RankPool

CASES = [(strategy, method) for strategy in ("ddp", "fsdp2", "fsdp2_keep") for method in ("lora", "full")]


def main() -> None:
    parser = rank_parser(__doc__)
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    with RankPool(args.device, RANKS, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as pool:
        args.memory_gib = args.memory_gib or pool.memory_gib
        collect("world_losses", args, pool, CASES, lambda case: compare(pool, args, *case), summarize)


def compare(pool: RankPool, args: argparse.Namespace, strategy: str, method: str) -> dict[str, Any]:
    """A row with the losses of both."""
    model = dict(TINY_MODEL if args.device == "cpu" else resolve_model(args.model).config)

    def losses(num_gpus: int, sharding: str) -> list[float]:
        knobs = {"micro_batch_size": 2, "method": method, "checkpointing": "none"}
        config = rank_config(args.device, knobs | {"num_gpus": num_gpus, "sharding": sharding})
        request = ProbeRequest(
            config=config,
            model=model | {"num_hidden_layers": args.layers},
            device=args.device,
            memory_gib=args.memory_gib,
            micro_steps=RANKS // num_gpus,
            world=World.REAL,
        )
        return step_losses(measured(pool, request))

    alone, shared = losses(1, "none"), losses(RANKS, strategy)
    pairs = list(zip(alone, shared, strict=False))
    return {
        "config": f"{strategy} {method}",
        "steps": len(pairs),
        "alone": alone[: len(pairs)],
        "shared": shared[: len(pairs)],
        "loss_error": max(abs(found / wanted - 1) for wanted, found in pairs),
    }


def step_losses(found: Measurement) -> list[float]:
    """The loss of each step: each of its micro batches has been divided by the rows of the step."""
    each = found.micro_steps
    return [sum(found.losses[at : at + each]) for at in range(0, len(found.losses) - each + 1, each)]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ddp = [row for row in rows if row["config"].startswith("ddp")]
    return {
        "configs": sum("loss_error" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "ddp_loss_error_max": largest(ddp, "loss_error"),
        "fsdp2_loss_error_max": largest([row for row in rows if row not in ddp], "loss_error"),
    }


if __name__ == "__main__":
    main()
