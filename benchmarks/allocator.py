"""Compare what a step reserves in memory segments that can grow with what it reserves in segments that cannot.

Each configuration of four layers is probed twice by the same warm worker, with all of the card's memory. An error is
the reserved memory that the formula expects of the second kind, divided by what was measured, minus 1: `FIXED_SHARE` of
the formula was chosen by these rows, so that no configuration holds more than is expected.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Failed, Rows, save, table

from autotune.catalog import resolve_model
from autotune.core.probe_types import Fingerprint, Outcome, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import memory_breakdown
from autotune.probe.supervisor import WorkerProber

LAYERS = 4
KEPT, RECOMPUTED = {"checkpointing": "none"}, {"checkpointing": "full"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2.5-0.5b", KEPT | {"micro_batch_size": 4}),
    ("qwen2.5-0.5b", RECOMPUTED | {"micro_batch_size": 8, "method": "full"}),
    ("mistral-7b", KEPT | {"micro_batch_size": 2}),
    ("mistral-7b", RECOMPUTED | {"micro_batch_size": 8}),
    ("mistral-7b", KEPT | {"micro_batch_size": 4, "loss": "chunked"}),
    ("mistral-7b", RECOMPUTED | {"micro_batch_size": 4, "quantization": "nf4"}),
    ("llama-3.2-1b", KEPT | {"micro_batch_size": 8, "method": "full"}),
    ("llama-3.2-1b", KEPT | {"micro_batch_size": 4, "compile": "per_layer"}),
    ("llama-3.2-1b", RECOMPUTED | {"micro_batch_size": 16, "seq_len": 2048}),
]
COLUMNS = ["model", "config", "expandable_gib", "fixed_gib", "planned_gib", "error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call to continue")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no probe after this; 0 measures nothing")
    parser.add_argument("--memory-gib", type=float, default=75.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    stored = Rows("allocator", args.out, args.rows)
    measure(args, stored)
    rows = [compare(row) for row in stored.all]
    table(rows, COLUMNS)
    fingerprint = from_data(Fingerprint, rows[0]["fingerprint"]) if "fingerprint" in rows[0] else None
    save("allocator", fingerprint, summarize(rows), rows, args.out)
    print(summarize(rows))


def measure(args: argparse.Namespace, stored: Rows) -> None:
    """Probe what no stored row has."""
    started = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    with WorkerProber("cuda", logs) as prober:
        for name, knobs in CASES:
            if stored.has(model=name, knobs=knobs) or time.monotonic() - started >= args.seconds:
                continue
            peaks = {
                f"{kind}_gib": probe(prober, name, replace(config_of(knobs), allocator=kind), args.memory_gib)
                for kind in ("expandable", "fixed")
            }
            stored.add({"model": name, "knobs": knobs, **peaks, "fingerprint": to_data(prober.fingerprint)})


def config_of(knobs: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**({"seq_len": 1024, "loss": "full"} | knobs))


def probe(prober: WorkerProber, name: str, config: TrainConfig, memory_gib: float) -> list[float]:
    """Allocated and reserved GiB at the peak. Raises Failed."""
    request = ProbeRequest(
        config=config,
        model=resolve_model(name).config,
        device="cuda",
        memory_gib=memory_gib,
        headroom=0.0,
        micro_steps=2,
        min_timed_s=0.3,
        depth=LAYERS,
    )
    result = prober.probe(request, prober.logs / "probe.log")
    if result.outcome is not Outcome.OK or result.measurement is None:
        raise Failed(f"{result.outcome}: {result.reason}")
    return [result.measurement.peak_allocated_gib, result.measurement.peak_reserved_gib]


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """The row with what the formula expects of segments that cannot grow."""
    model = resolve_model(row["model"])
    model = replace(model, params=None, config=model.config | {"num_hidden_layers": LAYERS})
    config = replace(config_of(row["knobs"]), allocator="fixed")
    planned = memory_breakdown(model, config, 2)
    assert planned is not None
    return row | {
        "config": config.label(),
        "planned_gib": planned.peak_reserved_gib,
        "error": planned.peak_reserved_gib / row["fixed_gib"][1] - 1,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def unused_max(kind: str) -> float:
        return max(row[kind][1] / row[kind][0] - 1 for row in rows)

    return {
        "configs": len(rows),
        "unused_max_expandable": unused_max("expandable_gib"),
        "unused_max_fixed": unused_max("fixed_gib"),
        "error_min": min(row["error"] for row in rows),
        "error_max": max(row["error"] for row in rows),
    }


if __name__ == "__main__":
    main()
