"""Twenty mixed probes on two real ranks, five of which run out of memory on one rank: how soon all are stopped.

`stopped_s` is the time from a rank's report until no process of the pool is left. Four failures are planted in one
rank, at the beginning or between steps, while the other waits in a collective. One is real: the limit is below what the
configuration needs. After each failure the next probes must give the losses that the same configuration gave before.
Growth is that of the memory in use between two probes (of the fullest card; on a CPU of the largest worker), over the
most that was in use after any of the first six, which are of different kinds.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
from common import RANKS, TINY_MODEL, Failed, collect, largest, rank_config, rank_parser

from autotune.catalog import resolve_model
from autotune.core.nvml import Nvml, visible
from autotune.core.probe_types import Outcome, ProbeRequest, World
from autotune.core.units import gib
from autotune.probe.fault_injection import VARIABLE
from autotune.probe.rank_pool import RankPool

PROBES = 20
# By the number of a probe: the phase and the rank in which memory is made to run out.
PLANTED = {7: ("first_step", 1), 10: ("steady", 0), 13: ("load", 1), 18: ("steady", 1)}
REAL = 15  # the number of the probe with a limit that is too low
LIMIT_GIB = {"cuda": 16.0, "cpu": 0.3}
# Strategy, number of GPUs, who the ranks are, knobs. None leaves a model behind that would count as growth.
KINDS: list[tuple[str, int, World, dict[str, Any]]] = [
    ("ddp", RANKS, World.REAL, {"checkpointing": "none"}),
    ("fsdp2", RANKS, World.REAL, {"method": "full"}),
    ("fsdp2", 8, World.FAKE, {"method": "full"}),
    ("fsdp2_keep", RANKS, World.REAL, {"checkpointing": "none"}),
    ("none", 1, World.FAKE, {"method": "full"}),
    ("fsdp2", RANKS, World.REAL, {"checkpointing": "none"}),
]


def main() -> None:
    parser = rank_parser(__doc__)
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    faults = (f"oom@{phase}:{number}#{rank}" for number, (phase, rank) in PLANTED.items())
    os.environ[VARIABLE] = ",".join(faults)
    with RankPool(args.device, RANKS, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as pool:
        args.memory_gib = args.memory_gib or pool.memory_gib
        first = dict[str, tuple[float, ...]]()
        collect(
            "world_oom", args, pool, list(range(PROBES)), lambda number: probe(pool, args, number, first), summarize
        )


def probe(pool: RankPool, args: argparse.Namespace, number: int, first: dict[str, tuple[float, ...]]) -> dict[str, Any]:
    """A row about the probe of this number. `first` has the losses of each kind when it was first probed."""
    is_to_fail = number in PLANTED or number == REAL
    strategy, num_gpus, world, knobs = KINDS[1 if is_to_fail else number % len(KINDS)]
    knobs = {"micro_batch_size": 64 if number == REAL else 2, "num_gpus": num_gpus, "sharding": strategy} | knobs
    model = TINY_MODEL if args.device == "cpu" else resolve_model(args.model).config
    request = ProbeRequest(
        config=rank_config(args.device, knobs),
        model=model | {"num_hidden_layers": args.layers},
        device=args.device,
        memory_gib=LIMIT_GIB[args.device] if number == REAL else args.memory_gib,
        min_timed_s=0.5,
        world=world,
    )
    name = f"{world} {request.config.label()}"
    result = pool.probe(request, pool.logs / f"trial-{number:04d}.log")
    expected = Outcome.OOM if is_to_fail else Outcome.OK
    if result.outcome is not expected:
        raise Failed(f"{result.outcome} instead of {expected}: {result.reason}")
    row: dict[str, Any] = {"config": f"{number} {name}", "outcome": result.outcome.value, "starts": pool.starts}
    if result.measurement is None:
        return row | {"reason": result.reason, "notes": result.notes, "stopped_s": result.seconds.get("stop")}
    losses = result.measurement.losses
    before = first.setdefault(name, losses)
    differences = [abs(now / then - 1) for now, then in zip(losses, before, strict=False)]
    return row | {"loss_difference": max(differences), "used_gib": used_gib(args.device)}


def used_gib(device: str) -> float:
    """The memory in use on the fullest card; on a CPU that of the largest worker."""
    if device == "cuda":
        cards = [Nvml.open(card) for card in visible()[:RANKS]]
        return max(card.used_gib() or 0.0 for card in cards if card is not None)
    return max(gib(process.memory_info().rss) for process in psutil.Process().children(recursive=True))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    used = [row["used_gib"] for row in rows if "used_gib" in row]
    warm = used[: len(KINDS)]
    return {
        "probes": len(rows),
        "failed": sum("failed" in row for row in rows),
        "out_of_memory": sum(row.get("outcome") == Outcome.OOM.value for row in rows),
        "stopped_s_max": largest(rows, "stopped_s"),
        "growth_gib_max": max(used[len(KINDS) :], default=0.0) - max(warm, default=0.0),
        "loss_difference_max": largest(rows, "loss_difference"),
    }


if __name__ == "__main__":
    main()
