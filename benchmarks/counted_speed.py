"""Hold step times from counted work against micro batches that were timed on an H200, beside those of the formula.

The rows of `data/heldout_h200.jsonl` are whole models that no constant was made with: what the constants of counted
times rest on are the profiled kernels of `data/transfer_h200.jsonl`, of three others. A dry probe counts each
configuration here, without a GPU. These rows were seen once before thin products got their own time. Where the host
sets the pace, its speed is the uncertain part: the hosts of the rows issued work at paces of their own. An error is the
predicted time divided by the measured one, minus 1.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from common import save, table

from autotune.catalog import resolve_model
from autotune.core.probe_types import Fingerprint, ProbeRequest
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import counted_step_time, estimate_step_time
from autotune.probe.dry_prober import DryProber

DATA = Path(__file__).parent / "data" / "heldout_h200.jsonl"
DEVICE_BOUND = 0.3  # below this share of the host in the predicted time
COLUMNS = ["model", "config", "micro_s", "counted_error", "formula_error", "host_share"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured = [json.loads(line) for line in DATA.read_text().splitlines()]
    measured = [row for row in measured if row.get("micro_s")]
    with DryProber() as prober:
        rows = [found for row in measured if (found := judged(prober, row)) is not None]
    table(rows, COLUMNS)
    save("counted_speed", from_data(Fingerprint, measured[0]["fingerprint"]), summarize(rows), rows, args.out)
    print(json.dumps(summarize(rows), indent=1))


def judged(prober: DryProber, row: dict[str, Any]) -> dict[str, Any] | None:
    """One measured micro batch against both predictions; None where a dry probe cannot count it."""
    config, model = TrainConfig(**row["config"]), resolve_model(row["model"])
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


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors by what sets the pace."""
    found: dict[str, Any] = {"configs": len(rows), "models": len({row["model"] for row in rows})}
    for name, bound in (("device_bound", True), ("host_bound", False)):
        chosen = [row for row in rows if (row["host_share"] < DEVICE_BOUND) is bound]
        found[f"{name}_configs"] = len(chosen)
        for kind in ("counted", "formula"):
            errors = [abs(row[f"{kind}_error"]) for row in chosen]
            found[f"{name}_{kind}_error_median"] = statistics.median(errors)
            found[f"{name}_{kind}_error_max"] = max(errors)
    return found


if __name__ == "__main__":
    main()
