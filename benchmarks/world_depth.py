"""Predict a rank of a whole 7B and 8B model from two truncated depths, and compare it with two real ranks.

The two depths are probed on real ranks, and again in a fake world of two: what one card alone tells of two. An error
is the prediction divided by what the whole model took, minus 1: of the allocated peak, the reserved peak, and the time
of a step of four micro batches. A fake world does not communicate: its `fake_time_error` has what that takes. With what
the formula adds for it, by the catalogue's link, it is `unseen_time_error`: no two cards had run the configuration.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RANKS, collect, largest, measured, predicted, rank_config, rank_model, rank_parser

from autotune.catalog import resolve_device, resolve_model
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import ProbeRequest, World
from autotune.prediction.collectives import added_s, traffic
from autotune.probe.rank_pool import RankPool
from autotune.problem.performance import step_time_s

MICROS = 4  # micro batches of a step
# Micro batches as people train with: of smaller ones the host decides how long they take.
NONE, RECOMPUTED = ({"micro_batch_size": 8, "checkpointing": name} for name in ("none", "full"))
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mistral-7b", "fsdp2", NONE),
    ("mistral-7b", "ddp", NONE),
    ("mistral-7b", "fsdp2_keep", NONE),
    ("mistral-7b", "fsdp2", RECOMPUTED | {"method": "full", "micro_batch_size": 4}),
    ("llama-3.1-8b", "fsdp2", NONE),
    ("llama-3.1-8b", "fsdp2_keep", RECOMPUTED),
    ("llama-3.1-8b", "ddp", RECOMPUTED),
]


def main() -> None:
    args = rank_parser(__doc__).parse_args()
    with RankPool(args.device, RANKS, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as pool:
        args.memory_gib = args.memory_gib or pool.memory_gib
        collect("world_depth", args, pool, CASES, lambda case: compare(pool, args, *case), summarize)


def compare(
    pool: RankPool, args: argparse.Namespace, name: str, strategy: str, knobs: dict[str, Any]
) -> dict[str, Any]:
    """A row with the errors of a whole model's prediction, from real and from fake ranks."""
    config = rank_config(args.device, knobs | {"num_gpus": RANKS, "sharding": strategy})
    request = ProbeRequest(
        config=config,
        model=rank_model(args.device, name),
        device=args.device,
        memory_gib=args.memory_gib,
        world=World.REAL,
    )

    fake, _ = predicted(pool, replace(request, world=World.FAKE))
    real, found_at = predicted(pool, request)
    whole = measured(pool, request)
    spec, device = (
        resolve_model("demo-3m" if args.device == "cpu" else name),
        resolve_device("cpu" if args.device == "cpu" else pool.fingerprint.device),
    )
    sent = traffic(replace(spec, config=request.model), config, Parallelism.of(config))
    unseen_s = None
    if sent is not None and device.link_gb_s is not None:
        micro_s = statistics.median(fake.micro_step_s)
        each_s, once_s = added_s(micro_s, config, sent, device.link_gb_s)
        unseen_s = step_time_s(fake, MICROS) + MICROS * each_s + once_s
    row: dict[str, Any] = {
        "config": f"{name} {config.label()}",
        "depths": found_at,
        "peak_gib": whole.peak_allocated_gib,
        "reserved_gib": whole.peak_reserved_gib,
        "step_s": step_time_s(whole, MICROS),
        "unseen_time_error": unseen_s and unseen_s / step_time_s(whole, MICROS) - 1,
    }
    for prefix, found in (("", real), ("fake_", fake)):
        row |= {
            f"{prefix}memory_error": found.peak_allocated_gib / whole.peak_allocated_gib - 1,
            f"{prefix}reserved_error": found.peak_reserved_gib / whole.peak_reserved_gib - 1,
            f"{prefix}time_error": step_time_s(found, MICROS) / step_time_s(whole, MICROS) - 1,
        }
    return row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("memory_error", "reserved_error", "time_error")
    return {
        "configs": sum("memory_error" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "unseen_time_error_max": largest(rows, "unseen_time_error"),
        **{f"{prefix}{key}_max": largest(rows, f"{prefix}{key}") for prefix in ("", "fake_") for key in keys},
    }


if __name__ == "__main__":
    main()
