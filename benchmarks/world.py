"""Compare simulated ranks on one GPU with real ranks on several: memory, step time, losses and
failures.

On a CPU each mode makes a trial run with a tiny model. Its errors say little about a GPU.
"""

import argparse
import os
import statistics
from dataclasses import dataclass, replace
from typing import Any

import psutil
from bench import (
    RANK_OPTIONS,
    RANKS,
    Failed,
    Mode,
    collect,
    largest,
    measured,
    predicted,
    rank_config,
    rank_model,
    run_program,
    scratch,
)

from autotune.catalog import resolve_device, resolve_model
from autotune.core.errors import AutotuneError
from autotune.core.memory_budget import nccl_gib
from autotune.core.nvml import Nvml, visible
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Measurement, Outcome, ProbeRequest, World
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.prediction.collectives import added_s, traffic
from autotune.prediction.projection import run_performance
from autotune.probe.fault_injection import VARIABLE
from autotune.probe.rank_pool import RankPool
from autotune.problem.performance import step_time_s
from autotune.problem.setup import set_up
from autotune.problem.study_spec import StudySpec

FEW_LAYERS = {"--model": "mistral-7b", "--layers": 4}
MICROS = 4  # micro batches of a step
FULL: dict[str, Any] = {"method": "full"}
NONE, RECOMPUTED = {"checkpointing": "none"}, {"checkpointing": "full"}


def open_pool(args: argparse.Namespace, ranks: int = RANKS) -> RankPool:
    """Start the ranks. The default memory limit is all memory of their device."""
    pool = RankPool(args.device, ranks, scratch())
    args.memory_gib = args.memory_gib or pool.memory_gib
    return pool


def request(
    args: argparse.Namespace, model: dict[str, Any], config: TrainConfig, world: World, **probe: Any
) -> ProbeRequest:
    """Return a probe request with the memory limit of the command line."""
    given = {"device": args.device, "memory_gib": args.memory_gib} | probe
    return ProbeRequest(config=config, model=model, world=world, **given)


def sharded(
    args: argparse.Namespace, strategy: str, knobs: dict[str, Any], num_gpus: int = RANKS
) -> TrainConfig:
    """Return a configuration for this number of GPUs. One GPU has no strategy."""
    shared = {"num_gpus": num_gpus, "sharding": strategy} if num_gpus > 1 else {}
    return rank_config(args.device, knobs | shared)


# --- ranks: four layers


STRATEGIES = ("ddp", "fsdp2", "fsdp2_keep", "zero2", "zero3")
SMALL = {"micro_batch_size": 4} | NONE


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration on several ranks, and the number of micro batches in a step."""

    config: TrainConfig
    micro_steps: int

    def __str__(self) -> str:
        return f"{self.config.label()} x {self.micro_steps}"


def rank_cases(args: argparse.Namespace) -> list[Case]:
    """List 23 configurations of eager layers, then three that recompute and three that compile, the
    slowest ones.
    """
    lora, full = SMALL, SMALL | FULL
    wanted: list[tuple[str, dict[str, Any], int]] = [
        (strategy, knobs, micro_steps)
        for strategy in STRATEGIES
        for knobs in (lora, full)
        for micro_steps in (1, 4)
    ]
    wanted += [("fsdp2", full | {"sync_each_batch": True}, 4)]
    wanted += [("fsdp2", knobs | {"offload": True}, 2) for knobs in (lora, full)]
    for more in (RECOMPUTED, {"compile": "per_layer"}):
        wanted += [("fsdp2", full | more, 1), ("fsdp2", lora | more, 4), ("ddp", lora | more, 1)]
    return [
        Case(config=sharded(args, strategy, knobs), micro_steps=number)
        for strategy, knobs, number in wanted
    ]


def run_ranks(args: argparse.Namespace) -> None:
    """Compare a simulated rank of two with two real ranks, on a few layers.

    The same pool of workers probes each configuration twice. An error is the simulated rank's peak
    divided by the real rank's peak, minus 1. `step_ratio` is the real step time divided by the
    simulated one: it shows communication that computation does not hide. `nccl_gib` is the
    difference of the memory outside torch.
    """
    model = rank_model(args.device, args.model, args.layers)
    with open_pool(args) as pool:
        collect(args, pool, rank_cases(args), lambda case: compare_ranks(pool, args, model, case))


def compare_ranks(
    pool: RankPool, args: argparse.Namespace, model: dict[str, Any], case: Case
) -> dict[str, Any]:
    """Measure a simulated and a real rank, and return both in a row."""
    probe = {"micro_steps": case.micro_steps, "min_timed_s": 0.5}
    worlds = (World.FAKE, World.REAL)
    fake, real = (
        measured(pool, request(args, model, case.config, world, **probe)) for world in worlds
    )
    contexts = fake.context_gib, real.context_gib
    fake_s, real_s = (statistics.median(found.step_s) for found in (fake, real))
    return {
        "config": str(case),
        "peak_gib": [fake.peak_allocated_gib, real.peak_allocated_gib],
        "peak_error": fake.peak_allocated_gib / real.peak_allocated_gib - 1,
        "reserved_gib": [fake.peak_reserved_gib, real.peak_reserved_gib],
        "reserved_error": fake.peak_reserved_gib / real.peak_reserved_gib - 1,
        "step_s": [fake_s, real_s],
        "step_ratio": real_s / fake_s,
        "nccl_gib": None if None in contexts else contexts[1] - contexts[0],  # type: ignore[operator]
    }


def summarize_ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
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


# --- depth: whole models of 7B and 8B


# Micro batches of usual sizes: the host decides how long smaller ones take.
LORA, LORA_RECOMPUTED = {"micro_batch_size": 8} | NONE, {"micro_batch_size": 8} | RECOMPUTED
FULL_RECOMPUTED = {"micro_batch_size": 4} | FULL | RECOMPUTED
DEPTH_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mistral-7b", "fsdp2", LORA),
    ("mistral-7b", "ddp", LORA),
    ("mistral-7b", "fsdp2_keep", LORA),
    ("mistral-7b", "fsdp2", FULL_RECOMPUTED),
    ("llama-3.1-8b", "fsdp2", LORA),
    ("llama-3.1-8b", "fsdp2_keep", LORA_RECOMPUTED),
    ("llama-3.1-8b", "ddp", LORA_RECOMPUTED),
    ("llama-3.1-8b", "zero2", LORA_RECOMPUTED),
    ("llama-3.1-8b", "zero3", LORA_RECOMPUTED),
]


def run_depth(args: argparse.Namespace) -> None:
    """Predict a rank of a whole 7B or 8B model from two truncated depths, and compare it with two
    real ranks.

    The two depths are probed on real ranks and again by one GPU that simulates a rank of two. An
    error is the prediction divided by the measurement of the whole model, minus 1, for the
    allocated peak, the reserved peak and the time of a step with four micro batches. A simulated
    rank does not communicate, so `fake_time_error` includes the missing communication.
    `unseen_time_error` adds the communication that the formula predicts with the catalogue's link
    bandwidth: the configuration needs no run on two GPUs for it. If a configuration is CPU-bound,
    as under DeepSpeed's third stage, its times count as `host_bound_`: no line in depth holds for
    them, and a search measures them on the whole model.
    """
    with open_pool(args) as pool:
        requests = []
        for name, strategy, knobs in DEPTH_CASES[: args.only]:
            whole = request(
                args, rank_model(args.device, name), sharded(args, strategy, knobs), World.REAL
            )
            requests.append((name, whole))
        # Simulated ranks come first, because the other GPU rests meanwhile: a real rank is slower
        # right after a rest.
        fakes = {whole.digest: from_one_gpu(pool, whole) for _, whole in requests}
        collect(args, pool, requests, lambda case: compare_depth(pool, args, *case, fakes))


def from_one_gpu(pool: RankPool, whole: ProbeRequest) -> Measurement | None:
    """Predict a whole model from two depths of a simulated rank. Return None if a probe fails."""
    try:
        return predicted(pool, replace(whole, world=World.FAKE))[0]
    except (Failed, AutotuneError) as error:
        print(f"{whole.config.label()} from one GPU: {error}", flush=True)
        return None


def compare_depth(
    pool: RankPool,
    args: argparse.Namespace,
    name: str,
    whole_request: ProbeRequest,
    fakes: dict[str, Measurement | None],
) -> dict[str, Any]:
    """Return a row with the errors of the predictions from real and from simulated ranks."""
    config, fake = whole_request.config, fakes[whole_request.digest]
    real, found_at = predicted(pool, whole_request)
    whole = measured(pool, whole_request)
    whole_s = step_time_s(whole, MICROS)
    unseen_s = unseen_step_s(pool, args, name, whole_request, fake)
    pace = "host_bound_" if real.host_bound else ""
    row: dict[str, Any] = {
        "config": f"{name} {config.label()}",
        "depths": found_at,
        "peak_gib": whole.peak_allocated_gib,
        "reserved_gib": whole.peak_reserved_gib,
        "step_s": whole_s,
        "host_share": real.host_share,
        f"{pace}unseen_time_error": unseen_s and unseen_s / whole_s - 1,
    }
    for prefix, found in (("", real), ("fake_", fake)):
        if found is not None:
            row |= {
                f"{prefix}memory_error": found.peak_allocated_gib / whole.peak_allocated_gib - 1,
                f"{prefix}reserved_error": found.peak_reserved_gib / whole.peak_reserved_gib - 1,
                f"{pace}{prefix}time_error": step_time_s(found, MICROS) / whole_s - 1,
            }
    return row


def unseen_step_s(
    pool: RankPool,
    args: argparse.Namespace,
    name: str,
    whole: ProbeRequest,
    fake: Measurement | None,
) -> float | None:
    """Return the step time of a simulated rank plus the predicted
    communication, if both are known.
    """
    on_cpu, config = args.device == "cpu", whole.config
    spec = replace(resolve_model("demo-3m" if on_cpu else name), config=whole.model)
    link_gb_s = resolve_device("cpu" if on_cpu else pool.fingerprint.device).link_gb_s
    sent = traffic(spec, config, Parallelism.of(config))
    if fake is None or sent is None or link_gb_s is None:
        return None
    each_s, once_s = added_s(statistics.median(fake.micro_step_s), config, sent, link_gb_s)
    return step_time_s(fake, MICROS) + MICROS * each_s + once_s


def summarize_depth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = ("unseen_time_error", "memory_error", "reserved_error", "time_error")
    errors += tuple(f"fake_{error}" for error in errors[1:])
    errors += ("host_bound_unseen_time_error", "host_bound_time_error")
    return {
        "configs": sum("memory_error" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "host_bound": sum("host_bound_time_error" in row for row in rows),
        **{f"{error}_max": largest(rows, error) for error in errors},
    }


# --- large: a model that no single GPU holds


STEPS = 10
LARGE = {"micro_batch_size": 4, "loss": "chunked"} | RECOMPUTED
LARGE_CASES = [LARGE | {"micro_batch_size": 2}, LARGE | {"lora_rank": 64}]


def run_large(args: argparse.Namespace) -> None:
    """Predict the memory of a model that no single GPU holds, and train it on two.

    One GPU simulates a rank of two at two truncated depths, which predict the rank of the whole
    model. Then two real ranks build the whole model as shards and train it for at least ten steps.
    """
    with open_pool(args) as pool:
        collect(args, pool, LARGE_CASES, lambda knobs: compare_large(pool, args, knobs))


def compare_large(
    pool: RankPool, args: argparse.Namespace, knobs: dict[str, Any]
) -> dict[str, Any]:
    """Return a row with the prediction from one GPU and the measurement of two."""
    config = sharded(args, "fsdp2", knobs)
    probe = {"micro_steps": 1, "min_timed_micros": STEPS}
    whole_request = request(args, rank_model(args.device, args.model), config, World.REAL, **probe)
    from_one, found_at = predicted(pool, replace(whole_request, world=World.FAKE))
    whole = measured(pool, whole_request)
    element_bytes = 4 if config.precision == "fp32" else 2
    return {
        "config": config.label(),
        "depths": found_at,
        "weights_gib": gib(element_bytes * whole.total_params),
        "limit_gib": whole.limit_gib,
        "predicted_gib": from_one.peak_allocated_gib,
        "peak_gib": whole.peak_allocated_gib,
        "memory_error": from_one.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "steps": len(whole.step_s),
        "step_s": step_time_s(whole, 1),
        "losses": list(whole.losses),
    }


def summarize_large(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "configs": sum("memory_error" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "memory_error_max": largest(rows, "memory_error"),
        "steps_min": min((row["steps"] for row in rows if "steps" in row), default=None),
    }


# --- scaling: four or eight GPUs, and fewer


SCALING_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-3.1-8b", "fsdp2", FULL_RECOMPUTED),
    ("mistral-7b", "ddp", LORA),
    ("llama-3.1-70b", "fsdp2", LARGE),
]
SCALED = SCALING_CASES[:2]  # the third does not fit fewer GPUs
COLLECTIVES = "collectives"  # the row with the measured bandwidth of collectives
# number of a probe, and the phase and rank of a planted OOM
STRUCK = ((101, "first_step", 2), (102, "steady", 0))


def run_scaling(args: argparse.Namespace) -> None:
    """Predict ranks of whole models on four or eight GPUs from one GPU, then measure them, and
    measure the scaling.

    First one GPU simulates a rank at two depths of each configuration. They predict the peak of the
    whole model and, with the catalogue's link bandwidth, the time of a step of four micro batches
    and its interval (`inside`). Only then do all GPUs train the whole models. `nccl_gib` is the
    memory outside torch that a real rank holds and a simulated one does not: predicted and
    measured. `scaling` has the same predictions and measurements on fewer GPUs; `efficiency` is the
    speed of a GPU divided by its speed with the fewest GPUs. Finally one rank runs out of memory,
    planted, while the others wait for it: `stopped_s` is the time until all ranks have ended.
    """
    os.environ[VARIABLE] = ",".join(
        f"oom@{phase}:{number}#{rank}" for number, phase, rank in STRUCK
    )
    pools: dict[int, RankPool] = {}

    def pool_of(number: int) -> RankPool:
        if number not in pools:
            for other in pools.values():
                other.close()
            pools[number] = open_pool(args, number)
        return pools[number]

    pool = pool_of(args.ranks)
    args.gpu = pool.fingerprint.device
    on_all = [(args.ranks, *case) for case in SCALING_CASES]
    on_fewer = [(number, *case) for number in (2, 1) if number < args.ranks for case in SCALED]
    plays = {}
    for case in [*on_all, *on_fewer]:
        whole = scaling_request(args, *case)
        plays[whole.digest] = from_one_gpu(pool, whole)
    # The pool of all ranks serves its cases first, because the next pool closes it.
    struck = [(args.ranks, str(number), "", {}) for number, *_ in STRUCK]
    wanted = [(args.ranks, COLLECTIVES, "", {}), *on_all, *struck, *on_fewer]

    def measure(case: tuple[int, str, str, dict[str, Any]]) -> dict[str, Any]:
        number, name, strategy, _ = case
        if name == COLLECTIVES:
            return {
                "config": name,
                "rates": [to_data(rates) for rates in pool_of(number).collectives()],
            }
        if not strategy:
            return stop_after_oom(pool_of(number), args, int(name))
        whole = scaling_request(args, *case)
        return compare_scaling(pool_of(number), args, name, whole, plays.get(whole.digest))

    try:
        collect(args, pool, wanted, measure)
    finally:
        for one in pools.values():
            one.close()


def scaling_request(
    args: argparse.Namespace, number: int, name: str, strategy: str, knobs: dict[str, Any]
) -> ProbeRequest:
    """Return the probe of a whole model on this number of real ranks."""
    return request(
        args, rank_model(args.device, name), sharded(args, strategy, knobs, number), World.REAL
    )


def compare_scaling(
    pool: RankPool,
    args: argparse.Namespace,
    name: str,
    whole_request: ProbeRequest,
    fake: Measurement | None,
) -> dict[str, Any]:
    """Return a row with the prediction from one GPU and the measurement of all GPUs."""
    config, whole = whole_request.config, measured(pool, whole_request)
    rows_per_step = MICROS * config.micro_batch_size * config.num_gpus
    step_s = step_time_s(whole, MICROS)
    row: dict[str, Any] = {
        "config": f"{name} {config.label()}",
        "gpus": config.num_gpus,
        "peak_gib": whole.peak_allocated_gib,
        "step_s": step_s,
        "tokens_per_s": rows_per_step * config.seq_len / step_s,
    }
    if fake is None:
        return row
    expected_s, (low_s, high_s) = expected_step_s(args, name, whole_request, fake)
    row |= {
        "predicted_gib": fake.peak_allocated_gib,
        "memory_error": fake.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "predicted_step_s": expected_s,
        "interval_s": [low_s, high_s],
        "time_error": expected_s / step_s - 1,
        "inside": low_s <= step_s <= high_s,
        "predicted_tokens_per_s": rows_per_step * config.seq_len / expected_s,
    }
    if fake.context_gib is not None and whole.context_gib is not None and config.num_gpus > 1:
        row["nccl_gib"] = [nccl_gib(config.num_gpus), whole.context_gib - fake.context_gib]
    return row


def expected_step_s(
    args: argparse.Namespace, name: str, whole: ProbeRequest, fake: Measurement
) -> tuple[float, tuple[float, float]]:
    """Return the step time in seconds and its interval, as a study reports them."""
    config, on_cpu = whole.config, args.device == "cpu"
    device = replace(resolve_device("cpu"), link_gb_s=1.0) if on_cpu else resolve_device(args.gpu)
    spec = StudySpec(
        model="demo-3m" if on_cpu else name,
        gpu=device.name,
        gpus=config.num_gpus,
        tokens_per_example=config.seq_len,
        global_batch=MICROS * config.micro_batch_size * config.num_gpus,
    )
    found = set_up(spec, device).task
    task = replace(found, model=replace(found.model, config=whole.model), world=World.FAKE)
    speed = run_performance(task, config, [fake])
    low, high = speed.spread
    return speed.step_time_s, (speed.step_time_s * (1 + low), speed.step_time_s * (1 + high))


def stop_after_oom(pool: RankPool, args: argparse.Namespace, number: int) -> dict[str, Any]:
    """Return a row about a probe that runs out of memory on one rank."""
    whole = scaling_request(args, args.ranks, *SCALED[0])
    result = pool.probe(whole, pool.logs / f"trial-{number:04d}.log")
    if result.outcome is not Outcome.OOM:
        raise Failed(f"{result.outcome} instead of out of memory: {result.reason}")
    return {
        "config": f"probe {number}",
        "reason": result.reason,
        "stopped_s": result.seconds.get("stop"),
    }


def summarize_scaling(rows: list[dict[str, Any]]) -> dict[str, Any]:
    trained = [row for row in rows if "gpus" in row]
    ranks = max((row["gpus"] for row in trained), default=None)
    compared = [row for row in trained if row["gpus"] == ranks and "memory_error" in row]
    nccl = [row["nccl_gib"] for row in compared if "nccl_gib" in row]
    scaling = []
    for name in sorted({row["config"].split()[0] for row in trained}):
        mine = sorted(
            (row for row in trained if row["config"].split()[0] == name),
            key=lambda one: one["gpus"],
        )
        first_per_gpu = mine[0]["tokens_per_s"] / mine[0]["gpus"]
        scaling += [
            {
                "model": name,
                "gpus": row["gpus"],
                "tokens_per_s": row["tokens_per_s"],
                "efficiency": row["tokens_per_s"] / row["gpus"] / first_per_gpu,
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


# --- losses: one GPU and two


LOSS_CASES = [
    (strategy, method) for strategy in ("ddp", "fsdp2", "fsdp2_keep") for method in ("lora", "full")
]


def run_losses(args: argparse.Namespace) -> None:
    """Compare the losses of one GPU with the losses of two GPUs that share the same global batch.

    Both train the same rows from the same weights. An error is the largest relative difference of
    the loss over the steps that both ran. FSDP2 computes in bf16 without autocast, and one GPU does
    not.
    """
    with open_pool(args) as pool:
        collect(args, pool, LOSS_CASES, lambda case: compare_losses(pool, args, *case))


def compare_losses(
    pool: RankPool, args: argparse.Namespace, strategy: str, method: str
) -> dict[str, Any]:
    """Return a row with the losses of one GPU and of two."""
    model = rank_model(args.device, args.model, args.layers)

    def losses(num_gpus: int) -> list[float]:
        config = sharded(args, strategy, {"micro_batch_size": 2, "method": method} | NONE, num_gpus)
        found = measured(
            pool, request(args, model, config, World.REAL, micro_steps=RANKS // num_gpus)
        )
        # The rows of the whole step already divide the loss of each micro batch.
        each = found.micro_steps
        return [
            sum(found.losses[at : at + each]) for at in range(0, len(found.losses) - each + 1, each)
        ]

    alone, shared = losses(1), losses(RANKS)
    pairs = list(zip(alone, shared, strict=False))
    return {
        "config": f"{strategy} {method}",
        "steps": len(pairs),
        "alone": alone[: len(pairs)],
        "shared": shared[: len(pairs)],
        "loss_error": max(abs(found / wanted - 1) for wanted, found in pairs),
    }


def summarize_losses(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ddp = [row for row in rows if row["config"].startswith("ddp")]
    return {
        "configs": sum("loss_error" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "ddp_loss_error_max": largest(ddp, "loss_error"),
        "fsdp2_loss_error_max": largest([row for row in rows if row not in ddp], "loss_error"),
    }


# --- oom: ranks that run out of memory


PROBES = 20
# By the number of a probe: the phase and the rank of a planted OOM.
PLANTED = {7: ("first_step", 1), 10: ("steady", 0), 13: ("load", 1), 18: ("steady", 1)}
REAL = 15  # the number of the probe whose limit is too low
LIMIT_GIB = {"cuda": 16.0, "cpu": 0.3}
# Strategy, number of GPUs, world and knobs. A model that stays in memory would count as growth;
# these do not.
KINDS: list[tuple[str, int, World, dict[str, Any]]] = [
    ("ddp", RANKS, World.REAL, NONE),
    ("fsdp2", RANKS, World.REAL, FULL),
    ("fsdp2", 8, World.FAKE, FULL),
    ("fsdp2_keep", RANKS, World.REAL, NONE),
    ("none", 1, World.FAKE, FULL),
    ("fsdp2", RANKS, World.REAL, NONE),
]


def run_oom(args: argparse.Namespace) -> None:
    """Run twenty mixed probes on two real ranks, let five run out of memory, and time how soon all
    ranks stop.

    `stopped_s` is the time from the report of a rank until no process of the pool is left. Four
    failures are planted in one rank, at the beginning or between steps, while the other waits in a
    collective. The fifth is
    real: its limit is below the need of the configuration. After each failure, the next probes must
    repeat the losses that the same configuration had before. Growth compares the memory in use
    between two probes (of the fullest GPU, or of the largest worker on a CPU) with the maximum
    after the first six probes, which are of different kinds.
    """
    faults = (f"oom@{phase}:{number}#{rank}" for number, (phase, rank) in PLANTED.items())
    os.environ[VARIABLE] = ",".join(faults)
    first = dict[str, tuple[float, ...]]()
    with open_pool(args) as pool:
        collect(
            args, pool, list(range(PROBES)), lambda number: probe_number(pool, args, number, first)
        )


def probe_number(
    pool: RankPool, args: argparse.Namespace, number: int, first: dict[str, tuple[float, ...]]
) -> dict[str, Any]:
    """Return a row about the probe of this number.

    `first` holds the losses of each kind in its first probe.
    """
    is_to_fail = number in PLANTED or number == REAL
    strategy, num_gpus, world, knobs = KINDS[1 if is_to_fail else number % len(KINDS)]
    knobs = {"micro_batch_size": 64 if number == REAL else 2} | knobs
    wanted = request(
        args,
        rank_model(args.device, args.model, args.layers),
        sharded(args, strategy, knobs, num_gpus),
        world,
        memory_gib=LIMIT_GIB[args.device] if number == REAL else args.memory_gib,
        min_timed_s=0.5,
    )
    name = f"{world} {wanted.config.label()}"
    result = pool.probe(wanted, pool.logs / f"trial-{number:04d}.log")
    expected = Outcome.OOM if is_to_fail else Outcome.OK
    if result.outcome is not expected:
        raise Failed(f"{result.outcome} instead of {expected}: {result.reason}")
    row: dict[str, Any] = {
        "config": f"{number} {name}",
        "outcome": result.outcome.value,
        "starts": pool.starts,
    }
    if result.measurement is None:
        return row | {
            "reason": result.reason,
            "notes": result.notes,
            "stopped_s": result.seconds.get("stop"),
        }
    losses = result.measurement.losses
    before = first.setdefault(name, losses)
    differences = [abs(now / then - 1) for now, then in zip(losses, before, strict=False)]
    return row | {"loss_difference": max(differences), "used_gib": used_gib(args.device)}


def used_gib(device: str) -> float:
    """Return the memory in use on the fullest GPU, or of the largest worker on a CPU."""
    if device == "cuda":
        cards = [Nvml.open(card) for card in visible()[:RANKS]]
        return max(card.used_gib() or 0.0 for card in cards if card is not None)
    return max(
        gib(process.memory_info().rss) for process in psutil.Process().children(recursive=True)
    )


def summarize_oom(rows: list[dict[str, Any]]) -> dict[str, Any]:
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


MODES = {
    "ranks": Mode(
        run=run_ranks, result="world", summarize=summarize_ranks, options=RANK_OPTIONS | FEW_LAYERS
    ),
    "depth": Mode(
        run=run_depth, result="world_depth", summarize=summarize_depth, options=RANK_OPTIONS
    ),
    "large": Mode(
        run=run_large,
        result="world_large",
        summarize=summarize_large,
        options=RANK_OPTIONS | {"--model": "llama-3.1-70b"},
    ),
    "scaling": Mode(
        run=run_scaling,
        result="world_four",
        summarize=summarize_scaling,
        options=RANK_OPTIONS | {"--ranks": 4},
    ),
    "losses": Mode(
        run=run_losses,
        result="world_losses",
        summarize=summarize_losses,
        options=RANK_OPTIONS | FEW_LAYERS,
    ),
    "oom": Mode(
        run=run_oom, result="world_oom", summarize=summarize_oom, options=RANK_OPTIONS | FEW_LAYERS
    ),
}

if __name__ == "__main__":
    run_program(MODES, __doc__)
