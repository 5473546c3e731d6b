"""Predict ranks of whole models on four or eight GPUs from one of them, then run them on all; and what more GPUs bring.

First one card plays a rank of all at two depths, for each configuration: they predict the peak of the whole model and,
with what the ranks send each other by the catalogue's link, the time of a step of four micro batches with its interval
(`inside`). Nothing was measured on several GPUs until then. Then all cards train the whole models. `nccl_gib` is what a
real rank holds beside torch's memory and a played one does not: predicted and measured. `scaling` has the same
predictions and measurements on fewer of the cards: `efficiency` is the speed of a GPU over that of the smallest number.
At last one rank runs out of memory, planted, while the others wait for it: `stopped_s` is how soon all were ended.

On a CPU it is a trial run with a tiny model, whose errors mean little.
"""

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Failed, collect, largest, measured, predicted, rank_config, rank_model, rank_parser

from autotune.catalog import resolve_device
from autotune.core.errors import AutotuneError
from autotune.core.probe_types import Measurement, Outcome, ProbeRequest, World
from autotune.core.serialization import to_data
from autotune.prediction.sharded_memory import nccl_gib
from autotune.probe.fault_injection import VARIABLE
from autotune.probe.rank_pool import RankPool
from autotune.problem.performance import step_time_s
from autotune.problem.setup import set_up
from autotune.problem.study_spec import StudySpec

MICROS = 4  # micro batches of a step
FULL = {"method": "full", "micro_batch_size": 4, "checkpointing": "full"}
ADAPTERS = {"micro_batch_size": 8, "checkpointing": "none"}
LARGE = {"micro_batch_size": 4, "checkpointing": "full", "loss": "chunked"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-3.1-8b", "fsdp2", FULL),
    ("mistral-7b", "ddp", ADAPTERS),
    ("llama-3.1-70b", "fsdp2", LARGE),
]
SCALED = CASES[:2]  # the third does not fit fewer cards
COLLECTIVES = "collectives"  # the row of what the cards reach when they send each other something
STRUCK = ((101, "first_step", 2), (102, "steady", 0))  # the number of a probe, and where memory runs out in which rank


def main() -> None:
    parser = rank_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    os.environ[VARIABLE] = ",".join(f"oom@{phase}:{number}#{rank}" for number, phase, rank in STRUCK)
    wanted = [(args.ranks, *case) for case in CASES]
    wanted += [(number, *case) for number in (2, 1) if number < args.ranks for case in SCALED]
    wanted += [(args.ranks, str(number), "", {}) for number, *_ in STRUCK]
    pools: dict[int, RankPool] = {}

    def pool_of(number: int) -> RankPool:
        if number not in pools:
            for other in pools.values():
                other.close()
            pools[number] = RankPool(args.device, number, Path(tempfile.mkdtemp(prefix="autotune-bench-")))
        return pools[number]

    pool = pool_of(args.ranks)
    args.memory_gib, args.gpu = args.memory_gib or pool.memory_gib, pool.fingerprint.device
    plays = {}
    for number, name, strategy, knobs in (case for case in wanted if case[2]):
        request = requested(args, number, name, strategy, knobs)
        try:
            plays[request.digest] = predicted(pool, replace(request, world=World.FAKE))[0]
        except (Failed, AutotuneError) as error:
            print(f"{name} {request.config.label()} from one card: {error}", flush=True)
    # While this pool is there.
    wanted = [(args.ranks, COLLECTIVES, "", {}), *wanted[:3], *wanted[-len(STRUCK) :], *wanted[3 : -len(STRUCK)]]

    def measure(case: tuple[int, str, str, dict[str, Any]]) -> dict[str, Any]:
        number, name, strategy, knobs = case
        if name == COLLECTIVES:
            return {"config": name, "rates": [to_data(rates) for rates in pool_of(number).collectives()]}
        if not strategy:
            return struck(pool_of(number), args, int(name))
        request = requested(args, number, name, strategy, knobs)
        return compare(pool_of(number), args, name, request, plays.get(request.digest))

    try:
        collect("world_four", args, pool, wanted, measure, summarize)
    finally:
        for one in pools.values():
            one.close()


def requested(args: argparse.Namespace, number: int, name: str, strategy: str, knobs: dict[str, Any]) -> ProbeRequest:
    """The probe of a whole model on so many real ranks."""
    shared = {"num_gpus": number, "sharding": strategy} if number > 1 else {}
    return ProbeRequest(
        config=rank_config(args.device, knobs | shared),
        model=rank_model(args.device, name),
        device=args.device,
        memory_gib=args.memory_gib,
        world=World.REAL,
    )


def compare(
    pool: RankPool, args: argparse.Namespace, name: str, request: ProbeRequest, played: Measurement | None
) -> dict[str, Any]:
    """A row with what one card predicted of the whole model, and what all GPUs took."""
    config, whole = request.config, measured(pool, request)
    rows_per_step = MICROS * config.micro_batch_size * config.num_gpus
    step_s = step_time_s(whole, MICROS)
    row: dict[str, Any] = {
        "config": f"{name} {config.label()}",
        "gpus": config.num_gpus,
        "peak_gib": whole.peak_allocated_gib,
        "step_s": step_s,
        "tokens_per_s": rows_per_step * config.seq_len / step_s,
    }
    if played is None:
        return row
    expected_s, (low_s, high_s) = expected(args, name, request, played)
    row |= {
        "predicted_gib": played.peak_allocated_gib,
        "memory_error": played.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "predicted_step_s": expected_s,
        "interval_s": [low_s, high_s],
        "time_error": expected_s / step_s - 1,
        "inside": low_s <= step_s <= high_s,
        "predicted_tokens_per_s": rows_per_step * config.seq_len / expected_s,
    }
    if played.context_gib is not None and whole.context_gib is not None and config.num_gpus > 1:
        row["nccl_gib"] = [nccl_gib(config.num_gpus), whole.context_gib - played.context_gib]
    return row


def expected(
    args: argparse.Namespace, name: str, request: ProbeRequest, played: Measurement
) -> tuple[float, tuple[float, float]]:
    """Seconds of a step of the run, and their interval, as a study states them."""
    config, on_cpu = request.config, args.device == "cpu"
    device = replace(resolve_device("cpu"), link_gb_s=1.0) if on_cpu else resolve_device(args.gpu)
    spec = StudySpec(
        model="demo-3m" if on_cpu else name,
        gpu=device.name,
        gpus=config.num_gpus,
        tokens_per_example=config.seq_len,
        global_batch=MICROS * config.micro_batch_size * config.num_gpus,
    )
    found = set_up(spec, device).task
    task = replace(found, model=replace(found.model, config=request.model), world=World.FAKE)
    speed = task.performance(config, [played])
    low, high = speed.spread
    return speed.step_time_s, (speed.step_time_s * (1 + low), speed.step_time_s * (1 + high))


def struck(pool: RankPool, args: argparse.Namespace, number: int) -> dict[str, Any]:
    """A row about a probe in which memory runs out on one rank."""
    request = requested(args, args.ranks, *SCALED[0])
    result = pool.probe(request, pool.logs / f"trial-{number:04d}.log")
    if result.outcome is not Outcome.OOM:
        raise Failed(f"{result.outcome} instead of out of memory: {result.reason}")
    return {"config": f"probe {number}", "reason": result.reason, "stopped_s": result.seconds.get("stop")}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ranks = max((row["gpus"] for row in rows if "gpus" in row), default=None)
    of_all = [row for row in rows if row.get("gpus") == ranks]
    compared = [row for row in of_all if "memory_error" in row]
    nccl = [row["nccl_gib"] for row in compared if "nccl_gib" in row]
    scaling = []
    for name in sorted({row["config"].split()[0] for row in rows if "gpus" in row}):
        mine = sorted(
            (row for row in rows if row["config"].split()[0] == name and "gpus" in row), key=lambda one: one["gpus"]
        )
        first = mine[0]
        scaling += [
            {
                "model": name,
                "gpus": row["gpus"],
                "tokens_per_s": row["tokens_per_s"],
                "efficiency": row["tokens_per_s"] / row["gpus"] / (first["tokens_per_s"] / first["gpus"]),
                "projected_tokens_per_s": row.get("predicted_tokens_per_s"),
            }
            for row in mine
        ]
    return {
        "num_gpus": ranks,
        "configs": len(compared),
        "failed": sum("failed" in row for row in rows),
        "memory_error_max": largest(compared, "memory_error"),
        "time_error_max": largest(compared, "time_error"),
        "inside": sum(row["inside"] for row in compared),
        "nccl_predicted_gib": nccl[0][0] if nccl else None,
        "nccl_measured_gib_max": max((found for _, found in nccl), default=None),
        "stopped_s_max": largest(rows, "stopped_s"),
        "scaling": scaling,
    }


if __name__ == "__main__":
    main()
