"""Compare the speeds that `autotune plan` estimates with those that others published of one GPU.

The rows (`data/published_speeds.yaml`) are of other stacks: torchtune, older versions of transformers. Rows that no
configuration of autotune expresses are excluded, each with its reason. Qwen-7B of the first generation is taken for
Llama 2 7B, whose layers have the same size. An error is the prediction divided by what was published, minus 1. No GPU
is needed.
"""

import math
import statistics
from pathlib import Path
from typing import Any

from common import compare_published

from autotune.catalog import resolve_device, resolve_model
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import UNKNOWN_HOST, estimate_step_time
from autotune.prediction.transfer import REFERENCE, interval, speed_transfer

DATA = Path(__file__).parent / "data" / "published_speeds.yaml"
COLUMNS = ["model", "config", "published", "predicted", "error", "low", "high", "host_share"]
HOST_BOUND = 0.1  # from this share of the host on its uncertainty shows
FACTOR = 2.0  # how far off a speed that the host sets may be: nothing is known of the host


def main() -> None:
    compare_published("plan_speed", __doc__, DATA, compare, summarize, COLUMNS)


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """One published row with its prediction, unless it is excluded."""
    config = TrainConfig(**({"lora_rank": None} if row["config"].get("method") == "full" else {}) | row["config"])
    compared = {key: row[key] for key in ("source", "gpu", "model")} | {"config": config.label()}
    compared |= {"published": row["tokens_per_s"], "excluded": row.get("excluded")}
    if compared["excluded"] is not None:
        return compared
    card = resolve_device(row["gpu"])
    on_reference = estimate_step_time(resolve_model(row["model"]), config, UNKNOWN_HOST)
    transfer = speed_transfer(resolve_device(REFERENCE), card)
    if on_reference is None or transfer is None:
        return compared | {"excluded": "no formula"}
    step_time = on_reference.on(transfer)
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


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the host sets the pace, the prediction should be within FACTOR; elsewhere in its own interval of 80 %."""
    compared = [row for row in rows if row["excluded"] is None]
    by_device = [row for row in compared if row["host_share"] < HOST_BOUND]
    by_host = [row for row in compared if row["host_share"] >= HOST_BOUND]
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
        "host_bound_inside": statistics.fmean(abs(math.log(1 + row["error"])) <= math.log(FACTOR) for row in by_host)
        if by_host
        else None,
    }


if __name__ == "__main__":
    main()
