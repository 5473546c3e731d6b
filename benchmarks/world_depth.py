"""Predict a rank of a whole 7B and 8B model from two truncated depths, and compare it with two real ranks.

The two depths are probed on real ranks, and again in a fake world of two: what one card alone tells of two. An error
is the prediction divided by what the whole model took, minus 1: of the allocated peak, the reserved peak, and the time
of a step of four micro batches. A fake world does not communicate: its `fake_time_error` has what that takes. With what
the formula adds for it, by the catalogue's link, it is `unseen_time_error`: no two cards had run the configuration.
Where the host sets the pace, as it does under DeepSpeed's third stage, times are `host_bound_` ones: no line in depth
holds for them, and a search measures them on the whole model.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RANKS, Failed, collect, largest, measured, predicted, rank_config, rank_model, rank_parser

from autotune.catalog import resolve_device, resolve_model
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Measurement, ProbeRequest, World
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
    ("llama-3.1-8b", "zero2", RECOMPUTED),
    ("llama-3.1-8b", "zero3", RECOMPUTED),
]


def main() -> None:
    args = rank_parser(__doc__).parse_args()
    with RankPool(args.device, RANKS, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as pool:
        args.memory_gib = args.memory_gib or pool.memory_gib
        requests = [(name, requested(args, name, strategy, knobs)) for name, strategy, knobs in CASES[: args.only]]
        # First, since the other card rests meanwhile: a real rank on one that has just rested is slower.
        fakes = {request.digest: played(pool, request) for _, request in requests}
        collect("world_depth", args, pool, requests, lambda case: compare(pool, args, *case, fakes), summarize)


def requested(args: argparse.Namespace, name: str, strategy: str, knobs: dict[str, Any]) -> ProbeRequest:
    """The probe of a whole model on real ranks."""
    return ProbeRequest(
        config=rank_config(args.device, knobs | {"num_gpus": RANKS, "sharding": strategy}),
        model=rank_model(args.device, name),
        device=args.device,
        memory_gib=args.memory_gib,
        world=World.REAL,
    )


def played(pool: RankPool, request: ProbeRequest) -> Measurement | None:
    """What two depths in a fake world predict; None if one failed, as real ranks then say."""
    try:
        return predicted(pool, replace(request, world=World.FAKE))[0]
    except Failed as error:
        print(f"{request.config.label()} in a fake world: {error}")
        return None


def compare(
    pool: RankPool, args: argparse.Namespace, name: str, request: ProbeRequest, fakes: dict[str, Measurement | None]
) -> dict[str, Any]:
    """A row with the errors of a whole model's prediction, from real and from fake ranks."""
    config, fake = request.config, fakes[request.digest]
    real, found_at = predicted(pool, request)
    whole = measured(pool, request)
    spec, device = (
        resolve_model("demo-3m" if args.device == "cpu" else name),
        resolve_device("cpu" if args.device == "cpu" else pool.fingerprint.device),
    )
    sent = traffic(replace(spec, config=request.model), config, Parallelism.of(config))
    unseen_s = None
    if fake is not None and sent is not None and device.link_gb_s is not None:
        micro_s = statistics.median(fake.micro_step_s)
        each_s, once_s = added_s(micro_s, config, sent, device.link_gb_s)
        unseen_s = step_time_s(fake, MICROS) + MICROS * each_s + once_s
    pace = "host_bound_" if real.host_bound else ""
    row: dict[str, Any] = {
        "config": f"{name} {config.label()}",
        "depths": found_at,
        "peak_gib": whole.peak_allocated_gib,
        "reserved_gib": whole.peak_reserved_gib,
        "step_s": step_time_s(whole, MICROS),
        "host_share": real.host_share,
        f"{pace}unseen_time_error": unseen_s and unseen_s / step_time_s(whole, MICROS) - 1,
    }
    for prefix, found in (("", real), ("fake_", fake)):
        if found is None:
            continue
        row |= {
            f"{prefix}memory_error": found.peak_allocated_gib / whole.peak_allocated_gib - 1,
            f"{prefix}reserved_error": found.peak_reserved_gib / whole.peak_reserved_gib - 1,
            f"{pace}{prefix}time_error": step_time_s(found, MICROS) / step_time_s(whole, MICROS) - 1,
        }
    return row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = ("unseen_time_error", "memory_error", "reserved_error", "time_error")
    errors += tuple(f"fake_{error}" for error in errors[1:])
    errors += ("host_bound_unseen_time_error", "host_bound_time_error")
    return {
        "configs": sum("memory_error" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "host_bound": sum("host_bound_time_error" in row for row in rows),
        **{f"{error}_max": largest(rows, error) for error in errors},
    }


if __name__ == "__main__":
    main()
