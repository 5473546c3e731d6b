"""Hold step times from counted work against micro batches that were timed, on an H200 beside those of the formula.

The rows of `data/heldout_h200.jsonl` are whole models that no constant was made with: what the constants of counted
times rest on are the profiled kernels of `data/transfer_h200.jsonl`, of three others. A dry probe counts each
configuration here, without a GPU. These rows were seen once before thin products got their own time. Where the host
sets the pace, its speed is the uncertain part: the hosts of the rows issued work at paces of their own. An error is the
predicted time divided by the measured one, minus 1.

`data/truncated_h100.jsonl` has models without a formula, 2 and 6 layers of each, profiled on an H100. Each of its rows
keeps what was predicted before any constant or count was changed for it (`first_counted_s`).
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from common import save, table

from autotune.catalog import resolve_device, resolve_model
from autotune.core.probe_types import Fingerprint, ProbeRequest
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryProber
from autotune.prediction.step_time import counted_step_time, estimate_step_time
from autotune.prediction.transfer import EIGHTY_PERCENT, REFERENCE, speed_transfer

DATA = Path(__file__).parent / "data"
WHOLE, TRUNCATED = DATA / "heldout_h200.jsonl", DATA / "truncated_h100.jsonl"
DEVICE_BOUND = 0.3  # below this share of the host in the predicted time
COLUMNS = ["model", "config", "micro_s", "counted_error", "formula_error", "host_share"]
UNKNOWN = ["model", "config", "depth", "micro_s", "first_error", "counted_error", "device_error", "peak_error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured = [json.loads(line) for line in WHOLE.read_text().splitlines()]
    measured = [row for row in measured if row.get("micro_s")]
    truncated = [json.loads(line) for line in TRUNCATED.read_text().splitlines()]
    with DryProber(shipped=False) as prober:
        rows = [found for row in measured if (found := judged(prober, row)) is not None]
        table(rows, COLUMNS)
        unknown = [found for row in truncated if (found := judged_unknown(prober, row)) is not None]
    table(unknown, UNKNOWN)
    rows += unknown
    save("counted_speed", from_data(Fingerprint, measured[0]["fingerprint"]), summarize(rows), rows, args.out)
    print(json.dumps(summarize(rows), indent=1))


def judged(prober: DryProber, row: dict[str, Any]) -> dict[str, Any] | None:
    """One measured micro batch against both predictions; None where a dry probe cannot count it."""
    # All rows were as long as the longest, and attended to by cuDNN, which was not left out then.
    config, model = TrainConfig(**{"padding": "max_length"} | row["config"]), resolve_model(row["model"])
    request = ProbeRequest(config=config, model=model.config, memory_gib=1.0, micro_steps=row["micro_steps"])
    count = prober.count(request).count
    counted = None if count is None else counted_step_time(config, count)
    by_formula = estimate_step_time(model, config)
    if counted is None or by_formula is None:
        return None
    return {
        "model": row["model"],
        "config": config.label(),
        "micro_s": row["micro_s"],
        "counted_s": counted.micro_s,
        "counted_error": counted.micro_s / row["micro_s"] - 1,
        "formula_error": by_formula.micro_s / row["micro_s"] - 1,
        "host_share": counted.host_share,
    }


def judged_unknown(prober: DryProber, row: dict[str, Any]) -> dict[str, Any] | None:
    """One truncated model against its counted time and peak on its card; None where it has a formula."""
    config, model = TrainConfig(**row["config"]), resolve_model(row["model"])
    if estimate_step_time(model, config) is not None:
        return None
    request = ProbeRequest(config=config, model=model.config, memory_gib=1.0, micro_steps=2, depth=row["depth"])
    count = prober.count(request).count
    transfer = speed_transfer(resolve_device(REFERENCE), resolve_device("h100-sxm"))
    counted = None if count is None else counted_step_time(config, count)
    if count is None or counted is None or transfer is None:
        raise SystemExit(f"{row['model']} cannot be counted")
    there = counted.on(transfer)
    return {
        "model": row["model"],
        "config": config.label(),
        "depth": row["depth"],
        "micro_s": row["micro_s"],
        "counted_s": there.micro_s,
        "counted_error": there.micro_s / row["micro_s"] - 1,
        "first_error": row["first_counted_s"] / row["micro_s"] - 1,
        "device_error": there.device_s / row["kernels"]["busy_s"] - 1,
        "peak_error": count.peak_allocated_gib / row["peak_allocated_gib"] - 1,
        "host_share": there.host_share,
        "deviation": there.error,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors by what sets the pace, of models with a formula and of those without."""
    known = [row for row in rows if "formula_error" in row]
    found: dict[str, Any] = {"configs": len(known), "models": len({row["model"] for row in known})}
    for name, bound in (("device_bound", True), ("host_bound", False)):
        chosen = [row for row in known if (row["host_share"] < DEVICE_BOUND) is bound]
        found |= {f"{name}_configs": len(chosen)} | errors(chosen, f"{name}_", ("counted", "formula"))
    unknown = [row for row in rows if "first_error" in row]
    found |= {"unknown_configs": len(unknown), "unknown_models": len({row["model"] for row in unknown})}
    found["unknown_device_bound_configs"] = sum(row["host_share"] < DEVICE_BOUND for row in unknown)
    found |= errors(unknown, "unknown_", ("counted", "first", "device", "peak"))
    found["unknown_first_inside_80"] = sum(
        abs(math.log(1 + row["first_error"])) <= EIGHTY_PERCENT * row["deviation"] for row in unknown
    ) / len(unknown)
    return found


def errors(rows: list[dict[str, Any]], prefix: str, kinds: tuple[str, ...]) -> dict[str, float]:
    """The median and the largest error of each kind."""
    found: dict[str, float] = {}
    for kind in kinds:
        sizes = [abs(row[f"{kind}_error"]) for row in rows]
        found |= {f"{prefix}{kind}_error_median": statistics.median(sizes), f"{prefix}{kind}_error_max": max(sizes)}
    return found


if __name__ == "__main__":
    main()
