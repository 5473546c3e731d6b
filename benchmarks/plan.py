"""Compare the answers of `autotune plan` with measured and published trainings.

Most modes need no GPU.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import (
    DATA,
    RESULTS,
    Mode,
    Rows,
    finish,
    load,
    result_rows,
    run_program,
    table,
    worker,
)
from depth_extrapolation import CONFIGS, EAGER
from objectives import LENGTH, MICROS, ROWS
from published import run_rows, suite_rows
from published import summarize as summarize_published
from search import TABLE, Table
from step_fit import HOST_BOUND, Timed, fit, is_gpu_bound, leave_out

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device, resolve_model
from autotune.catalog.model_sizes import Sizes
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Fingerprint, Outcome, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.dry.prober import DryProber
from autotune.prediction.collectives import rank_step_time, slowest_of_catalogue, traffic
from autotune.prediction.memory_formula import (
    CONTEXT_GIB,
    NF4_STATISTICS,
    memory_breakdown,
)
from autotune.prediction.sharded_memory import ShardingSettings, rank_breakdown
from autotune.prediction.step_time import UNKNOWN_HOST, estimate_step_time
from autotune.prediction.transfer import REFERENCE, interval, speed_transfer
from autotune.probe.supervisor import WorkerProber
from autotune.problem.speed_transfer import SpeedTransfer


def finish_compared(
    args: argparse.Namespace, rows: list[dict[str, Any]], columns: list[str]
) -> None:
    """Print the rows that are not excluded, and save all."""
    table([row for row in rows if row["excluded"] is None], columns)
    finish(args, None, rows)


def config_of(row: dict[str, Any], **usual: Any) -> TrainConfig:
    """Return the configuration of a published row. `usual` holds the defaults of its source."""
    of_full = {"lora_rank": None} if row["config"].get("method") == "full" else {}
    return TrainConfig(**usual | of_full | row["config"])


def from_reference(device: DeviceSpec) -> SpeedTransfer | None:
    """Return the transfer of speeds from the reference GPU to this one."""
    return speed_transfer(resolve_device(REFERENCE), device)


def errors(rows: list[dict[str, Any]], key: str, prefix: str = "") -> dict[str, float]:
    """Return the median and the largest absolute error of a column; empty without a value."""
    sizes = [abs(row[key]) for row in rows if row.get(key) is not None]
    if not sizes:
        return {}
    return {f"{prefix}{key}_median": statistics.median(sizes), f"{prefix}{key}_max": max(sizes)}


# --- published

PUBLISHED_COLUMNS = ["source", "name", "published_gib", "predicted_gib", "memory_error", "verdict"]
PUBLISHED_COLUMNS += ["speed_error", "inside", "gpu_bound"]


def run_published(args: argparse.Namespace) -> None:
    """Compare the memory and the speed that `autotune plan --spec` predicts with runs that others
    published.

    The rows are the suites in `studies/published`, which name their sources and the settings that
    the sources left out, and the runs in `data/published_2026.yaml`. Rows that no configuration of
    autotune expresses are excluded, each with its reason. An error is the prediction divided by the
    published number, minus 1. A verdict is wrong if the opposite was observed; within the error of
    the prediction there is no verdict. No GPU is needed.
    """
    finish_compared(args, [*suite_rows(), *run_rows()], PUBLISHED_COLUMNS)


# --- speed

SPEED_COLUMNS = ["model", "config", "published", "predicted", "error", "low", "high", "host_share"]
OWN_COLUMNS = ["gpu", "model", "layers", "config", "measured_s", "predicted_s", "error"]
FACTOR = 2.0  # allowed error of a CPU-bound speed, because nothing is known about the host
FIRST = DATA / "first_step_times.jsonl"
LEVER_ROWS = 32


def run_speed(args: argparse.Namespace) -> None:
    """Compare the speeds that `autotune plan` estimates with our measurements, and with speeds that
    others published for one GPU.

    The rows of our measurements (`ours`) are whole models on an H200, and profiles of truncated
    models on an H200 and an H100. Each row is predicted with constants that were fitted to all
    other models (`step_fit.py`). `first_error` is the error of an earlier formula, whose constants
    were fitted to three models with 32,000 to 256,000 tokens in their vocabularies
    (`data/first_step_times.jsonl`). The rows of others (`data/published_speeds.yaml`) come from
    other stacks: torchtune, and older versions of transformers. Rows that no configuration of
    autotune expresses are excluded, each with its reason. Llama 2 7B stands for Qwen-7B of the
    first generation, whose layers have the same size. An error is the prediction divided by the
    measured value, minus 1. No GPU is needed.
    """
    own = compare_own()
    table(sorted(own, key=lambda row: -abs(row["error"]))[:12], OWN_COLUMNS)
    print("constants fitted to all models:", fit(timed_micro_batches()))
    rows = list(map(compare_speed, load(args.data)))
    table([row for row in rows if row["excluded"] is None], SPEED_COLUMNS)
    finish(args, None, rows + own)


def timed_micro_batches() -> list[Timed]:
    """Return our measured micro batches that the formula covers."""
    stored, _ = stored_measurements()
    whole = [(one.model, one.config, one.micro_s) for one in stored]
    for row in load(DATA / "heldout_h200.jsonl"):
        if row["outcome"] == "ok":
            config = TrainConfig(**row["config"])
            whole.append((resolve_model(row["model"]), config, row["micro_s"]))
    whole += lever_micro_batches()
    rows = [
        Timed(model=model, config=config, gpu="h200", seconds=micro_s)
        for model, config, micro_s in whole
    ]
    for gpu in ("h200", "h100"):
        for row in load(DATA / f"transfer_{gpu}.jsonl"):
            kernels = row.get("measurement", {}).get("kernels")
            settings = {"padding": "max_length"} | row.get("settings", {})
            if kernels and settings["padding"] != "longest":  # whose rows are not full
                model, config = model_of(row | {"layers": row["depth"]}), TrainConfig(**settings)
                rows.append(
                    Timed(
                        model=model,
                        config=config,
                        gpu=gpu,
                        seconds=kernels["busy_s"],
                        profiled=True,
                    )
                )
    return [row for row in rows if estimate_step_time(row.model, row.config) is not None]


def lever_micro_batches() -> Iterator[tuple[ModelSpec, TrainConfig, float]]:
    """Yield the micro batches of `levers.py reference`, whose steps have LEVER_ROWS full rows."""
    from levers import FULL, LORA, REFERENCE_LEVERS

    known = [
        replace(start, **changes) for start in (LORA, FULL) for changes in REFERENCE_LEVERS.values()
    ]
    configs = {config.label(): config for config in known}
    for row in load(DATA / "levers_h200.jsonl"):
        config, model = configs.get(row["config"]), resolve_model(row["model"])
        if config is None or not row.get("tokens_per_s"):
            continue
        step = estimate_step_time(model, config)
        if step is not None:
            rest_s = step.rest_s * config.micro_batch_size / LEVER_ROWS
            yield model, config, config.tokens / row["tokens_per_s"] - rest_s


def compare_own() -> list[dict[str, Any]]:
    """Return our measurements, each with the prediction by constants of the other models."""
    measured = timed_micro_batches()
    constants = leave_out(measured)
    first = {tuple(row["key"]): row["first_s"] for row in load(FIRST)}
    return [compare_timed(one, constants[one.model.short], first) for one in measured]


def compare_timed(
    one: Timed, constants: Mapping[str, float], first: Mapping[tuple[str, ...], float]
) -> dict[str, Any]:
    """Return one of our measurements with its prediction by these constants."""
    step, predicted_s = one.estimate(constants), one.predicted_s(constants)
    low_s, high_s = interval(predicted_s, step.device_error if one.profiled else step.error)
    return {
        "source": "ours",
        "gpu": one.gpu,
        "model": one.model.short,
        "layers": one.model.num_layers,
        "config": one.config.label(),
        "profiled": one.profiled,
        "measured_s": one.seconds,
        "predicted_s": predicted_s,
        "error": predicted_s / one.seconds - 1,
        "first_error": first[one.key] / one.seconds - 1,
        "inside": low_s <= one.seconds <= high_s,
        "gpu_bound": is_gpu_bound(one),
    }


def compare_speed(row: dict[str, Any]) -> dict[str, Any]:
    """Return one published row with its prediction, unless it is excluded."""
    config = config_of(row)
    compared = {key: row[key] for key in ("source", "gpu", "model")} | {"config": config.label()}
    compared |= {"published": row["tokens_per_s"], "excluded": row.get("excluded")}
    if compared["excluded"] is not None:
        return compared
    on_reference = estimate_step_time(resolve_model(row["model"]), config, UNKNOWN_HOST)
    transfer = from_reference(resolve_device(row["gpu"]))
    if on_reference is None or transfer is None:
        return compared | {"excluded": "no formula"}
    step_time = on_reference.convert(transfer)
    step_s = row["accumulation"] * step_time.micro_s + step_time.rest_s
    predicted = row["accumulation"] * config.tokens / step_s
    low, high = interval(predicted, step_time.error)
    return compared | {
        "predicted": predicted,
        "error": predicted / row["tokens_per_s"] - 1,
        "low": low,
        "high": high,
        "inside": low <= row["tokens_per_s"] <= high,
        "host_share": step_time.host_share,
    }


def summarize_speed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the published speeds, and our measurements (`heldout_`), each predicted from other
    models.

    A CPU-bound speed is inside within FACTOR, another one in its own interval of 80 %.
    `heldout_error_median` is for GPU-bound micro batches. `of_whole_models` includes CPU-bound
    ones, but not the search table, which has one model only.
    """
    own = [row for row in rows if row["source"] == "ours"]
    rows = [row for row in rows if row["source"] != "ours"]
    compared = [row for row in rows if row["excluded"] is None]
    by_device = [row for row in compared if row["host_share"] < HOST_BOUND]
    by_host = [row for row in compared if row["host_share"] >= HOST_BOUND]
    within = [abs(math.log(1 + row["error"])) <= math.log(FACTOR) for row in by_host]
    return {
        "rows": len(rows),
        "excluded": len(rows) - len(compared),
        "error_median": statistics.median(abs(row["error"]) for row in compared),
        "device_bound": len(by_device),
        "device_bound_bias": statistics.median(row["error"] for row in by_device),
        "device_bound_inside": statistics.fmean(row["inside"] for row in by_device),
        "device_bound_half_width_max": max(row["high"] / row["predicted"] - 1 for row in by_device),
        "host_bound": len(by_host),
        "host_bound_bias": statistics.median(row["error"] for row in by_host) if by_host else None,
        "host_bound_inside": statistics.fmean(within) if within else None,
    } | summarize_own(own)


def summarize_own(own: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize our measurements, each predicted from other models."""
    by_device = [row for row in own if row["gpu_bound"]]
    by_host = [row for row in own if not row["gpu_bound"]]
    frequent = Counter(row["model"] for row in own).most_common(1)[0][0]
    several = [row for row in own if not row["profiled"] and row["model"] != frequent]
    summary: dict[str, Any] = {
        "heldout_configs": len(by_device),
        "heldout_models": len({row["model"] for row in by_device}),
        "heldout_inside": statistics.fmean(row["inside"] for row in by_device),
        "heldout_host_bound": len(by_host),
        "whole_configs": len(several),
        "whole_models": len({row["model"] for row in several}),
    }
    groups = {"heldout_": by_device, "heldout_host_bound_": by_host, "whole_": several}
    for name, group in groups.items():
        summary |= errors(group, "error", name) | errors(group, "first_error", name)
    return summary


# --- objectives

MICRO_STEPS = 2  # of a probe
OBJECTIVES_COLUMNS = [
    "model",
    "objective",
    "peak_gib",
    "error",
    "counted_error",
    "as_sft_error",
    "time_error",
    "time_inside",
]


def run_objectives(args: argparse.Namespace) -> None:
    """Compare the estimates of `autotune plan --objective` with whole models that were measured for
    each objective.

    The measurements are the peaks, and the times of a step of four micro batches, in the result
    `objectives`. The formulas came from other trainings of the same models on an H100, with half
    the rows, half the tokens and no recomputation. A dry probe counts the same trainings with the
    steps of the same trainers. `as_sft_error` is the error of the next-token formula for the same
    number of rows.

    Gemma 2 is counted with torch's attention and without its cap on the scores. transformers 5.17,
    which measured it, allows this, and later versions do not: the measurements agree with it alone.
    No GPU is needed.
    """
    counts = {
        (row["model"], row["objective"]): row["counted_gib"]
        for row in (load(args.counted) if args.counted else [])
    }
    rows = [
        compare_objectives(row, counts)
        for row in result_rows("objectives")
        if "peak_gib" in row and not resolve_model(row["model"]).sees_images
    ]
    finish(args, None, rows, OBJECTIVES_COLUMNS)


def compare_objectives(row: dict[str, Any], counts: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Return the measurement, and the errors of the formulas and of the count."""
    model, objective = resolve_model(row["model"]), Objective(row["objective"])
    as_rows = TrainConfig(micro_batch_size=ROWS, seq_len=LENGTH, checkpointing="full")
    config = replace(as_rows, micro_batch_size=ROWS // objective.rows_per_example)
    memory = memory_breakdown(model, config, MICRO_STEPS, objective=objective)
    as_sft = memory_breakdown(model, as_rows)
    step = estimate_step_time(model, config, UNKNOWN_HOST, objective)
    transfer = from_reference(resolve_device(row["fingerprint"]["device"]))
    assert memory and as_sft and step and transfer
    step, peak = step.convert(transfer), row["peak_gib"]
    step_s = MICROS * step.micro_s + step.rest_s
    low, high = interval(step_s, step.error)
    counted = counts.get((row["model"], row["objective"])) or counted_peak(model, config, objective)
    return {
        "model": row["model"],
        "objective": row["objective"],
        "config": row["config"],
        "peak_gib": peak,
        "planned_gib": memory.peak_gib,
        "error": memory.peak_gib / peak - 1,
        "counted_gib": counted,
        "counted_error": counted / peak - 1,
        "as_sft_error": as_sft.peak_gib / peak - 1,
        "step_s": row["step_s"],
        "time_error": step_s / row["step_s"] - 1,
        "time_inside": low <= row["step_s"] <= high,
        "host_share": row["host_share"],
    }


def counted_peak(model: ModelSpec, config: TrainConfig, objective: Objective) -> float:
    """Return the peak in GiB that a dry probe of the whole model counts."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

    from autotune.dry.counting import dry_probe

    shape = dict(model.config)
    if shape["model_type"] == "gemma2":
        Gemma2PreTrainedModel._supports_sdpa, shape["attn_logit_softcapping"] = True, None
    trainer = objective.trainers[0]
    request = ProbeRequest(
        config=config, model=shape, memory_gib=1.0, trainer=trainer, objective=objective
    )
    return dry_probe(request).peak_allocated_gib


def summarize_objectives(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the other objectives, and next-token training (`sft_`)."""
    summary: dict[str, Any] = {
        "models": len({row["model"] for row in rows if row["objective"] != "sft"})
    }
    for name, is_sft in (("", False), ("sft_", True)):
        group = [row for row in rows if (row["objective"] == "sft") is is_sft]
        summary[f"{name}configs"] = len(group)
        for key in ("error", "counted_error", "as_sft_error", "time_error"):
            summary |= errors(group, key, name)
        summary[f"{name}time_inside"] = sum(row["time_inside"] for row in group)
    return summary


# --- world

WORLD_COLUMNS = [
    "source",
    "model",
    "parallelism",
    "config",
    "peak",
    "peak_gib",
    "predicted_gib",
    "memory_error",
]
WORLD_COLUMNS += ["s_per_step", "predicted_s", "low_s", "high_s", "inside"]


def run_world(args: argparse.Namespace) -> None:
    """Compare the projections of `autotune plan --gpus` for several GPUs with measured and
    published trainings.

    The rows (`data/many_gpus.yaml`) are ranks measured on two H200s, and trainings of other stacks.
    Rows that no plan expresses are excluded, each with its reason. An error of memory is the
    prediction divided by the peak, minus 1. A source reads a peak as the allocated memory, as the
    memory that the allocator reserved, or as the memory that the device reports, with NCCL and the
    CUDA context. A speed is inside if it lies in the printed interval. Rows with an unknown link
    have no speed for several GPUs. No GPU is needed.
    """
    finish_compared(args, list(map(compare_world, load(args.data))), WORLD_COLUMNS)


def compare_world(row: dict[str, Any]) -> dict[str, Any]:
    """Return one row with its predictions, unless it is excluded."""
    theirs = {} if row["source"] == "ours" else {"allocator": "fixed"}  # PyTorch's default
    config = config_of(row, **theirs)
    parallelism = Parallelism(num_gpus=row["num_gpus"], strategy=row["strategy"])
    compared = {key: row[key] for key in ("source", "gpu", "model")} | {"layers": row.get("layers")}
    compared |= {"config": config.label(), "parallelism": f"{row['num_gpus']} {row['strategy']}"}
    compared |= {"buffers": row.get("buffers"), "peak": reads(row)}
    compared |= {
        "excluded": row.get("excluded"),
        "no_memory": row.get("no_memory"),
        "peak_gib": row.get("peak_gib"),
    }
    compared |= {"no_speed": row.get("no_speed")}
    tokens = config.tokens * row["accumulation"] * row["num_gpus"]
    s_per_step = row.get("s_per_step") or (
        tokens / row["tokens_per_s"] if "tokens_per_s" in row else None
    )
    compared |= {"s_per_step": s_per_step}
    if compared["excluded"] is not None:
        return compared
    model = model_of(row)
    if compared["peak_gib"] is not None and compared["no_memory"] is None:
        compared |= world_memory(row, model, config, parallelism)
    if s_per_step is not None and compared["no_speed"] is None:
        compared |= world_step(row, model, config, parallelism, s_per_step)
    return compared


def reads(row: dict[str, Any]) -> str:
    """Return the kind of memory that the source of a row read."""
    return str(row.get("peak", "allocated" if row["source"] == "ours" else "device"))


def card_of(row: dict[str, Any]) -> DeviceSpec:
    """Return the GPU of a row, with the changes of its source."""
    return replace(resolve_device(row["gpu"]), **row.get("card", {}))


def model_of(row: dict[str, Any]) -> ModelSpec:
    """Return the model of a row, with its number of layers."""
    model, layers = resolve_model(row["model"]), row.get("layers")
    return (
        model
        if layers is None
        else replace(model, params=None, config=model.config | {"num_hidden_layers": layers})
    )


def world_memory(
    row: dict[str, Any], model: ModelSpec, config: TrainConfig, parallelism: Parallelism
) -> dict[str, Any]:
    """Predict the memory of a row, and return it with its error.

    The allocator keeps its reserved memory until the GPU is full, and then returns free blocks.
    """
    buffers = ShardingSettings(**row.get("buffers", {}))
    found = rank_breakdown(model, config, parallelism, row["accumulation"], buffers)
    assert found is not None
    beside = found.nccl + CONTEXT_GIB
    room = (card_of(row).memory_gib or math.inf) - beside
    reserved = max(found.peak_gib, min(found.roomy_gib - found.nccl, room))
    predicted = {"allocated": found.peak_gib, "reserved": reserved, "device": reserved + beside}[
        reads(row)
    ]
    return {"predicted_gib": predicted, "memory_error": predicted / row["peak_gib"] - 1}


def world_step(
    row: dict[str, Any],
    model: ModelSpec,
    config: TrainConfig,
    parallelism: Parallelism,
    s_per_step: float,
) -> dict[str, Any]:
    """Predict the time of an optimizer step of a row; empty if it is unknown."""
    card, on_reference = card_of(row), estimate_step_time(model, config, UNKNOWN_HOST)
    transfer = from_reference(card)
    if on_reference is None or transfer is None:
        return {}
    alone, sent = on_reference.convert(transfer), traffic(model, config, parallelism)
    if parallelism.num_gpus == 1:
        predicted = row["accumulation"] * alone.micro_s + alone.rest_s
        low, high = interval(predicted, alone.error)
    elif sent is None or card.link_gb_s is None:
        return {}
    else:
        link = card.link_between(parallelism.num_gpus)
        assert link is not None
        found = rank_step_time(
            alone,
            config,
            parallelism,
            sent,
            accumulation=row["accumulation"],
            link_gb_s=link,
            slowest_link=slowest_of_catalogue(card),
        )
        predicted, (low, high) = found.step_s, found.interval_s
    return {
        "predicted_s": predicted,
        "low_s": low,
        "high_s": high,
        "inside": low <= s_per_step <= high,
    }


def summarize_world(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the errors of memory, of all rows and of our own, and the share of speeds inside
    their interval.
    """
    errors = [abs(row["memory_error"]) for row in rows if "memory_error" in row]
    own = [
        abs(row["memory_error"])
        for row in rows
        if "memory_error" in row and row["source"] == "ours"
    ]
    timed = [row for row in rows if "inside" in row]
    return {
        "rows": len(rows),
        "excluded": sum(row["excluded"] is not None for row in rows),
        "without_memory": sum(row["no_memory"] is not None for row in rows),
        "memory_rows": len(errors),
        "memory_error_median": statistics.median(errors),
        "memory_error_max": max(errors),
        "memory_within_10_percent": sum(error <= 0.1 for error in errors),
        "own_memory_error_max": max(own),
        "timed": len(timed),
        "inside": sum(row["inside"] for row in timed),
        "inside_share": statistics.fmean(row["inside"] for row in timed),
    }


# --- memory


# The formula was written with measurements of these models. All others are held out, Llama 3.1
# among them.
CALIBRATION = ("mistral-7b", "phi-3-mini", "gemma-2-9b")
HELD_OUT = (
    "qwen2.5-7b",
    "qwen3-8b",
    "gemma-7b",
    "llama-2-13b",
    "smollm2-1.7b",
    "tinyllama",
    "mistral-nemo",
    "gemma-2-2b",
    "phi-4",
    "qwen3-1.7b",
)
NEW_CONFIGS: list[dict[str, Any]] = [
    {"micro_batch_size": 4, "seq_len": 1024},
    {
        "micro_batch_size": 2,
        "seq_len": 2048,
        "checkpointing": "none",
        "compile": "per_layer",
        "loss": "chunked",
    },
    {"micro_batch_size": 2, "seq_len": 1024, "checkpointing": "none", "lora_rank": 64},
    {"micro_batch_size": 4, "seq_len": 2048, "checkpointing": "every_2", "precision": "bf16_pure"},
    {
        "micro_batch_size": 2,
        "seq_len": 1024,
        "quantization": "nf4",
        "double_quant": True,
        "checkpointing": "none",
    },
    {
        "method": "full",
        "micro_batch_size": 2,
        "seq_len": 1024,
        "precision": "bf16_pure",
        "optimizer": "adamw_8bit",
    },
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured whole model: memory in GiB, seconds of a micro batch, and the version of the
    probe.
    """

    model: ModelSpec
    config: TrainConfig
    micro_steps: int
    peak_gib: float
    reserved_gib: float
    micro_s: float
    probe: int
    held_out: bool


def run_memory(args: argparse.Namespace) -> None:
    """Compare the peak memory and step time that the formulas of `autotune plan` estimate with
    measured whole models.

    The measurements are the results of `depth_extrapolation.py` and the table of `search.py`, which
    helped to write the formula, and held-out models, which did not. `--probe` measures held-out
    models on the local GPU. Without `--probe` no GPU is needed. `--count` counts the held-out
    models by dry probes too, as `plan` does for models without a formula. Rows with nf4 that were
    measured before version 3 of the probe count the statistics of the base model twice, and the
    benchmark subtracts the second copy. A step time is predicted with constants that were fitted to
    all other models (`step_fit.py`).
    """
    stored, fingerprint = stored_measurements()
    new = [] if args.probe is None and args.rows is None else probe_models(args)
    counted = counted_gib(args, [*stored, *new])
    constants = leave_out(timed_micro_batches())
    rows = [
        row
        for measured in (*stored, *new)
        if (row := compare_memory(measured, counted, constants)) is not None
    ]
    table(
        sorted(rows, key=lambda row: -abs(row["error"]))[:12],
        ["model", "config", "peak_gib", "error"],
    )
    finish(args, fingerprint, rows)


def summarize_memory(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize rows of models that fitted constants, and of held-out models (`heldout_`)."""
    fitted, held_out = ([row for row in rows if row["held_out"] is side] for side in (False, True))
    by_model = Counter(row["model"] for row in rows)
    summary: dict[str, Any] = {
        "configs": len(rows),
        "fitted_configs": len(fitted),
        "heldout_configs": len(held_out),
        "models": len(by_model),
        "fitted_models": len({row["model"] for row in fitted}),
        "heldout_models": len({row["model"] for row in held_out}),
        "configs_of_the_most_frequent_model": max(by_model.values()),
    }
    for name, group in (("", fitted), ("heldout_", held_out)):
        for key in ("error", "counted_error", "reserved_error", "pace_error"):
            summary |= errors(group, key, name)
        paces = [row["pace_error"] for row in group if row["pace_error"] is not None]
        summary[f"{name}pace_bias"] = statistics.fmean(paces)
    for name, group in (("", rows), ("heldout_", held_out)):
        insides = [row["pace_inside"] for row in group if row["pace_inside"] is not None]
        summary[f"{name}pace_within_80"] = statistics.fmean(insides)
    return summary


def compare_memory(
    measured: Measured,
    counted: dict[tuple[str, str], float],
    constants: Mapping[str, Mapping[str, float]],
) -> dict[str, Any] | None:
    """Compare the formulas and the count with a measurement. Return None without a formula.

    `constants` has the constants of the step time that were fitted to all models but this one.
    """
    memory = memory_breakdown(measured.model, measured.config, measured.micro_steps)
    if memory is None:
        return None
    step = None
    if estimate_step_time(measured.model, measured.config) is not None:
        timed = Timed(
            model=measured.model, config=measured.config, gpu="h200", seconds=measured.micro_s
        )
        step = timed.estimate(constants[measured.model.short])
    second_copy_gib = 0.0
    if measured.config.quantization == "nf4" and measured.probe < 3:
        sizes = Sizes.of(measured.model)
        assert sizes is not None
        second_copy_gib = gib(sizes.linear_params * NF4_STATISTICS[measured.config.double_quant])
    peak, reserved = measured.peak_gib - second_copy_gib, measured.reserved_gib - second_copy_gib
    count = counted.get((measured.model.short, measured.config.label()))
    low, high = interval(step.micro_s, step.error) if step else (0.0, 0.0)
    return {
        "model": measured.model.short,
        "config": measured.config.label(),
        "held_out": measured.held_out,
        "peak_gib": peak,
        "planned_gib": memory.peak_gib,
        "error": memory.peak_gib / peak - 1,
        "counted_gib": count,
        "counted_error": None if count is None else count / peak - 1,
        "reserved_gib": reserved,
        "reserved_error": memory.peak_reserved_gib / reserved - 1,
        "micro_s": measured.micro_s,
        "pace_error": step and step.micro_s / measured.micro_s - 1,
        "pace_inside": step and low <= measured.micro_s <= high,
        "host_bound": step and step.host_share > 0.5,
    }


def counted_gib(
    args: argparse.Namespace, every: Sequence[Measured]
) -> dict[tuple[str, str], float]:
    """Return the peaks of held-out models by name and configuration, counted by dry probes or by an
    earlier call.
    """
    if args.counted:
        return {
            (row["model"], row["config"]): row["counted_gib"]
            for row in load(args.counted)
            if row.get("counted_gib")
        }
    found = {}
    with DryProber(shipped=False) as prober:
        for one in every if args.count else ():
            if one.held_out:
                model, config = one.model, one.config
                request = ProbeRequest(
                    config=config, model=model.config, memory_gib=1.0, micro_steps=one.micro_steps
                )
                if (count := prober.count(request).count) is not None:
                    found[model.short, config.label()] = count.peak_allocated_gib
    return found


def stored_measurements() -> tuple[list[Measured], Fingerprint]:
    """Read the whole models that other benchmarks measured."""
    measurements = []
    result = json.loads((RESULTS / "depth_extrapolation.json").read_text())
    for row in result["rows"]:
        attention = {"attention": "eager"} if row["model"] in EAGER else {}
        configs = [TrainConfig(**settings, **attention) for settings in CONFIGS]
        if "peak_gib" in row:
            measurements.append(
                Measured(
                    model=resolve_model(row["model"]),
                    config=next(config for config in configs if config.label() == row["config"]),
                    micro_steps=2,
                    peak_gib=row["peak_gib"],
                    reserved_gib=row["reserved_gib"],
                    micro_s=statistics.fmean(row["micro_s"][-1]),
                    probe=result["fingerprint"].get("probe", 1),
                    held_out=row["model"] not in CALIBRATION,
                )
            )
    searched = Table(TABLE)
    for (config, depth), found in searched.results.items():
        if depth is None and found.outcome is Outcome.OK and found.measurement is not None:
            measurements.append(
                Measured(
                    model=resolve_model("mistral-7b"),
                    config=config,
                    micro_steps=found.measurement.micro_steps,
                    peak_gib=found.measurement.peak_allocated_gib,
                    reserved_gib=found.measurement.peak_reserved_gib,
                    micro_s=statistics.fmean(found.measurement.micro_step_s),
                    probe=searched.fingerprint.probe,
                    held_out=False,
                )
            )
    return measurements, searched.fingerprint


def probe_models(args: argparse.Namespace) -> list[Measured]:
    """Measure whole held-out models, each with several configurations."""
    rows, until = Rows.of(args), time.monotonic() + args.seconds
    missing = []
    for name, settings in itertools.product(args.probe or HELD_OUT, NEW_CONFIGS):
        eager = (
            {"attention": "eager"} if resolve_model(name).config["model_type"] == "gemma2" else {}
        )
        config = TrainConfig(**settings, **eager)
        if not rows.has(model=name, config=to_data(config)):
            missing.append((name, config))
    if missing and args.seconds:
        with worker(args.device) as prober:
            for name, config in missing:
                if time.monotonic() < until:
                    rows.add(probe_model(prober, args, name, config))
                    print(
                        name,
                        config.label(),
                        rows.all[-1]["outcome"],
                        rows.all[-1].get("peak_gib"),
                        flush=True,
                    )
    return [
        Measured(
            model=resolve_model(row["model"]),
            config=from_data(TrainConfig, row["config"]),
            probe=row["fingerprint"].get("probe", 1),
            held_out=row["model"] not in CALIBRATION,
            **{key: row[key] for key in ("micro_steps", "peak_gib", "reserved_gib", "micro_s")},
        )
        for row in rows.all
        if row["outcome"] == "ok"
    ]


def probe_model(
    prober: WorkerProber, args: argparse.Namespace, name: str, config: TrainConfig
) -> dict[str, Any]:
    """Probe one whole model and return its memory and time as a row."""
    model = resolve_model(name).config
    request = ProbeRequest(
        config=config, model=model, device=args.device, memory_gib=args.memory_gib
    )
    result = prober.probe(request, prober.logs / "probe.log")
    row: dict[str, Any] = {
        "model": name,
        "config": to_data(config),
        "outcome": result.outcome.value,
    }
    if result.outcome is Outcome.OK and result.measurement is not None:
        found = result.measurement
        row |= {"micro_steps": found.micro_steps, "micro_s": statistics.fmean(found.micro_step_s)}
        row |= {"peak_gib": found.peak_allocated_gib, "reserved_gib": found.peak_reserved_gib}
    return row | {"reason": result.reason, "fingerprint": to_data(prober.fingerprint)}


PUBLISHED_DATA = {"type": Path, "help": "other published rows in the same form"}


MODES = {
    "published": Mode(run=run_published, result="plan_published", summarize=summarize_published),
    "speed": Mode(
        run=run_speed,
        result="plan_speed",
        summarize=summarize_speed,
        options={"--data": PUBLISHED_DATA | {"default": DATA / "published_speeds.yaml"}},
    ),
    "objectives": Mode(
        run=run_objectives,
        result="plan_objectives",
        summarize=summarize_objectives,
        options={"--counted": None},
    ),
    "world": Mode(
        run=run_world,
        result="plan_world",
        summarize=summarize_world,
        options={"--data": PUBLISHED_DATA | {"default": DATA / "many_gpus.yaml"}},
    ),
    "memory": Mode(
        run=run_memory,
        result="plan_memory",
        summarize=summarize_memory,
        options={
            "--probe": {
                "nargs": "*",
                "help": "measure these models now [ten models of all families]",
            },
            "--device": "cuda",
            "--memory-gib": 135.0,
            "--seconds": 540.0,
            "--count": {"default": False, "help": "count the held-out models by dry probes now"},
            "--counted": None,
            "--rows": None,
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
