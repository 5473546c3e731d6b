"""Compare the peaks of memory that `autotune plan` predicts with those that others published of one GPU.

The rows (`data/published_memory.yaml`) are of other stacks. Rows that no configuration of autotune expresses are
excluded, each with its reason. What a row's source left out stands in the file that made it. An error is the prediction
divided by what was published, minus 1. A verdict is wrong where the opposite was seen; within the error of the
prediction there is none. No GPU is needed.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import compare_published

from autotune.catalog import resolve_device, resolve_model
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import memory_of
from autotune.planning.device_estimate import device_limit_gib, memory_state
from autotune.prediction.memory_formula import CONTEXT_GIB
from autotune.problem.run_cost import FITS, OOM

DATA = Path(__file__).parent / "data" / "published_memory.yaml"
COLUMNS = ["source", "model", "config", "published", "predicted", "error", "counted", "verdict"]


def main() -> None:
    compare_published("plan_published", __doc__, DATA, compare, summarize, COLUMNS)


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """One published row with its prediction, unless it is excluded. A published peak of None is out of memory."""
    config = TrainConfig(**{"padding": "max_length"} | row["config"])
    compared = {key: row[key] for key in ("source", "gpu", "model")} | {"config": config.label()}
    compared |= {"published": row["peak_gib"], "excluded": row.get("excluded")}
    if compared["excluded"] is not None:
        return compared
    model = resolve_model(row["model"])
    if "model_config" in row:
        model = replace(model, config=model.config | row["model_config"], params=None)
    memory = memory_of(model, config, row["accumulation"])
    if memory is None:
        return compared | {"excluded": "no formula and no count"}
    predicted = memory.peak_reserved_gib + CONTEXT_GIB if row.get("of_process") else memory.peak_gib
    limit_gib = device_limit_gib(resolve_device(row["gpu"]), headroom=0.0)
    said = memory_state(memory.peak_reserved_gib, limit_gib, memory.error)
    return compared | {
        "predicted": predicted,
        "counted": memory.counted,
        "error": None if row["peak_gib"] is None else predicted / row["peak_gib"] - 1,
        "verdict": said,
        "wrong": said == (FITS if row["peak_gib"] is None else OOM),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`by_source` are the largest errors."""
    compared = [row for row in rows if row["excluded"] is None]
    errors: dict[str, list[float]] = {source: [] for source in dict.fromkeys(row["source"] for row in compared)}
    for row in compared:
        if row["error"] is not None:
            errors[row["source"]].append(abs(row["error"]))
    every = [error for of_source in errors.values() for error in of_source]
    return {
        "rows": len(rows),
        "excluded": len(rows) - len(compared),
        "memory_error_median": statistics.median(every),
        "memory_error_max": max(every),
        "by_source": {source: max(of_source) for source, of_source in errors.items()},
        "verdicts_wrong": sum(row["wrong"] for row in compared),
    }


if __name__ == "__main__":
    main()
