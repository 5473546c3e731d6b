"""Compare what `autotune plan --gpus` projects for several GPUs with what was measured and published.

The rows (`data/many_gpus.yaml`) are ranks measured on two H200s, and trainings of other stacks. Rows that no plan
expresses are excluded, each with its reason. An error of memory is the prediction divided by the peak, minus 1. A peak
is what its source read: memory that was allocated, that the allocator reserved, or that the device reports, which has
NCCL and the CUDA context besides. A speed is inside if it lies in the printed interval. Rows whose link is not known
have no speed for several GPUs. No GPU is needed.
"""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import compare_published

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device, resolve_model
from autotune.core.parallelism import Parallelism
from autotune.core.train_config import TrainConfig
from autotune.prediction.collectives import rank_step_time, traffic
from autotune.prediction.memory_formula import CONTEXT_GIB
from autotune.prediction.sharded_memory import Stack, rank_breakdown
from autotune.prediction.step_time import UNKNOWN_HOST, estimate_step_time
from autotune.prediction.transfer import REFERENCE, interval, speed_transfer

DATA = Path(__file__).parent / "data" / "many_gpus.yaml"
FSDP1 = {"fsdp1": "fsdp2", "fsdp1_keep": "fsdp2_keep"}  # what divides as FSDP2 does
COLUMNS = ["source", "model", "parallelism", "config", "peak", "peak_gib", "predicted_gib", "memory_error"]
COLUMNS += ["s_per_step", "predicted_s", "low_s", "high_s", "inside"]


def main() -> None:
    compare_published("plan_world", __doc__, DATA, compare, summarize, COLUMNS)


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """One row with what is predicted of it, unless it is excluded."""
    theirs = {} if row["source"] == "ours" else {"allocator": "fixed"}  # PyTorch's default
    of_full = {"lora_rank": None} if row["config"].get("method") == "full" else {}
    config = TrainConfig(**theirs | of_full | row["config"])
    parallelism = Parallelism(num_gpus=row["num_gpus"], strategy=FSDP1.get(row["strategy"], row["strategy"]))
    compared = {key: row[key] for key in ("source", "gpu", "model")} | {"layers": row.get("layers")}
    compared |= {"config": config.label(), "parallelism": f"{row['num_gpus']} {row['strategy']}"}
    compared |= {"stack": row.get("stack"), "peak": reads(row)}
    compared |= {"excluded": row.get("excluded"), "no_memory": row.get("no_memory"), "peak_gib": row.get("peak_gib")}
    compared |= {"no_speed": row.get("no_speed")}
    tokens = config.tokens * row["accumulation"] * row["num_gpus"]
    s_per_step = row.get("s_per_step") or (tokens / row["tokens_per_s"] if "tokens_per_s" in row else None)
    compared |= {"s_per_step": s_per_step}
    if compared["excluded"] is not None:
        return compared
    model, stack = model_of(row), stack_of(row)
    if compared["peak_gib"] is not None and compared["no_memory"] is None:
        compared |= memory(row, model, config, parallelism, stack)
    if s_per_step is not None and compared["no_speed"] is None:
        compared |= step(row, model, config, parallelism, stack, s_per_step)
    return compared


def reads(row: dict[str, Any]) -> str:
    """What the source of a row read its peak from."""
    return str(row.get("peak", "allocated" if row["source"] == "ours" else "device"))


def stack_of(row: dict[str, Any]) -> Stack:
    """What trained a row, where it is not what plans are for."""
    stack = Stack(**{"fsdp1": row["strategy"] in FSDP1} | row.get("stack", {}))
    return replace(stack, logit_bytes=tuple(stack.logit_bytes))  # a list in the file


def card_of(row: dict[str, Any]) -> DeviceSpec:
    """The card of a row, with what its source says of it."""
    return replace(resolve_device(row["gpu"]), **row.get("card", {}))


def model_of(row: dict[str, Any]) -> ModelSpec:
    """The model of a row, with as many layers as it had."""
    model, layers = resolve_model(row["model"]), row.get("layers")
    return model if layers is None else replace(model, params=None, config=model.config | {"num_hidden_layers": layers})


def memory(
    row: dict[str, Any], model: ModelSpec, config: TrainConfig, parallelism: Parallelism, stack: Stack
) -> dict[str, Any]:
    """The memory that is predicted of a row, and its error.

    The allocator keeps what it has reserved, but no more than the card has: then it gives free blocks back.
    """
    found = rank_breakdown(model, config, parallelism, row["accumulation"], stack)
    assert found is not None
    beside = found.nccl + CONTEXT_GIB
    room = (card_of(row).memory_gib or math.inf) - beside
    reserved = max(found.peak_gib, min(found.roomy_gib - found.nccl, room))
    predicted = {"allocated": found.peak_gib, "reserved": reserved, "device": reserved + beside}[reads(row)]
    return {"predicted_gib": predicted, "memory_error": predicted / row["peak_gib"] - 1}


def step(
    row: dict[str, Any],
    model: ModelSpec,
    config: TrainConfig,
    parallelism: Parallelism,
    stack: Stack,
    s_per_step: float,
) -> dict[str, Any]:
    """The time of an optimizer step that is predicted of a row; nothing where it is not known."""
    if stack.keeps_products:  # of each layer half is computed again, as if it were half of the layers
        config = replace(config, checkpointing="every_2")
    card, on_reference = card_of(row), estimate_step_time(model, config, UNKNOWN_HOST)
    transfer = speed_transfer(resolve_device(REFERENCE), card)
    if on_reference is None or transfer is None:
        return {}
    alone, sent = on_reference.on(transfer), traffic(model, config, parallelism)
    if parallelism.num_gpus == 1:
        predicted = row["accumulation"] * alone.micro_s + alone.rest_s
        low, high = interval(predicted, alone.error)
    elif sent is None or card.link_gb_s is None:
        return {}
    else:
        accumulation, link = row["accumulation"], card.link_gb_s
        found = rank_step_time(alone, config, parallelism, sent, accumulation=accumulation, link_gb_s=link)
        predicted, (low, high) = found.step_s, found.interval_s
    return {"predicted_s": predicted, "low_s": low, "high_s": high, "inside": low <= s_per_step <= high}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors of memory and the share of speeds inside their interval, of all rows and of our own."""
    errors = [abs(row["memory_error"]) for row in rows if "memory_error" in row]
    own = [abs(row["memory_error"]) for row in rows if "memory_error" in row and row["source"] == "ours"]
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


if __name__ == "__main__":
    main()
