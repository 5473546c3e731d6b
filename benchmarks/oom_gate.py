"""Check that the memory gate and the shallow probes stop every configuration that does not fit, and no other.

The evaluator gets a grid of configurations around the limit, with memory caps of 22, 40 and 80 GiB. Each cap has its
own probe store, so that each starts without knowledge. The reference is the memory that a full-depth probe reserves
without a cap. If that is within a tenth of the limit, a full-depth probe with the cap shows whether it fits.
"""

import argparse
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Rows, save, table

from autotune.catalog import resolve_model
from autotune.core.probe_types import Outcome, ProbeRequest, Rung
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.study.evaluator import GATE_BAND, Evaluator
from autotune.study.storage.probe_store import ProbeStore

CAPS_GIB = (22.0, 40.0, 80.0)
GRID = {
    "micro_batch_size": (1, 2, 4, 8, 16),
    "seq_len": (1024, 2048),
    "checkpointing": ("none", "every_2", "full"),
    "lora_rank": (16,),
}
EXTRA = [{"lora_rank": 64, "micro_batch_size": size, "seq_len": 1024, "checkpointing": "none"} for size in (2, 4, 8)]
NEAR = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-gib", type=float, default=135.0)
    parser.add_argument("--caps", type=float, nargs="*", default=list(CAPS_GIB))
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call to continue")
    parser.add_argument("--seconds", type=float, default=540.0, help="start no further cap after this time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    stored = Rows("oom_gate", args.out, args.rows)
    with WorkerProber(args.device, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as prober:
        fingerprint = prober.fingerprint
        for config in configs():
            if not stored.has(truth=config.label()):
                stored.add(truth(prober, args, config))
        for cap in args.caps:
            if time.monotonic() < until and not stored.has(cap_gib=cap):
                for row in evaluate_under_cap(prober, args, cap, stored):
                    stored.add(row)
                    table([row], ["cap_gib", "config", "needs_over_limit", "fits", "rung", "outcome"])
    rows = [row for row in stored.all if "cap_gib" in row]
    summary = summarize(rows)
    save("oom_gate", fingerprint, summary, rows, args.out)
    print(summary)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "configs": len(rows),
        # Stopped although it fits by more than the uncertainty band.
        "false_refusals": sum(row["stopped"] and row["fits"] and not row["in_band"] for row in rows),
        "missed_ooms": sum(not row["fits"] and not row["stopped"] for row in rows),
        "stopped_within_the_band_though_it_fits": sum(
            row["stopped"] and row["fits"] and row["in_band"] for row in rows
        ),
        "do_not_fit": sum(not row["fits"] for row in rows),
        "by_rung_and_outcome": dict(Counter(f"{row['rung']} {row['outcome']}" for row in rows)),
    }


def configs() -> list[TrainConfig]:
    grid = (dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values()))
    return [TrainConfig(**settings) for settings in (*grid, *EXTRA)]


def request_of(args: argparse.Namespace, config: TrainConfig, memory_gib: float) -> ProbeRequest:
    """A probe of the shortest duration, since only its memory counts."""
    model = resolve_model(args.model).config
    return ProbeRequest(config=config, model=model, device=args.device, memory_gib=memory_gib, min_timed_s=0.0)


def truth(prober: WorkerProber, args: argparse.Namespace, config: TrainConfig) -> dict[str, Any]:
    """Measure the memory that the whole model reserves without a cap, and that of its CUDA context."""
    result = prober.probe(request_of(args, config, args.memory_gib), prober.logs / "truth.log")
    assert result.outcome in (Outcome.OK, Outcome.OOM), result.reason
    measurement = result.measurement if result.outcome is Outcome.OK else None
    return {
        "truth": config.label(),
        "reserved_gib": measurement.peak_reserved_gib if measurement else None,
        "context_gib": measurement.context_gib if measurement else 0.0,
    }


def evaluate_under_cap(
    prober: WorkerProber, args: argparse.Namespace, cap: float, stored: Rows
) -> Iterator[dict[str, Any]]:
    """Evaluate each configuration under one cap, in random order. Yield rows that compare outcome and reference."""
    model = resolve_model(args.model)
    store = ProbeStore(f"sqlite:///{prober.logs}/gate-{cap:g}.db")
    evaluator = Evaluator(
        prober,
        store,
        study="gate",
        logs=prober.logs,
        request=lambda config: request_of(args, config, cap),
        model=model.digest,
        shape=prober.describe(model.config),
    )
    references = {row["truth"]: row for row in stored.all if "truth" in row}
    everything = configs()
    for number, config in enumerate(random.Random(0).sample(everything, len(everything))):
        result = evaluator.evaluate(config, number).result
        assert result.outcome in (Outcome.OK, Outcome.OOM, Outcome.REFUSED), result.reason
        reference = references[config.label()]
        assert reference["context_gib"] is not None, "this machine does not report the size of the CUDA context"
        limit = cap * 0.95 - reference["context_gib"]
        over = None if reference["reserved_gib"] is None else reference["reserved_gib"] / limit - 1
        fits = over is not None and over <= 0
        if over is not None and abs(over) < NEAR and result.rung is not Rung.FULL:
            fits = prober.probe(request_of(args, config, cap), prober.logs / "truth.log").outcome is Outcome.OK
        elif result.rung is Rung.FULL:
            fits = result.outcome is Outcome.OK
        yield {
            "cap_gib": cap,
            "config": config.label(),
            "needs_over_limit": over,
            "fits": fits,
            "in_band": over is not None and abs(over) <= GATE_BAND,
            "stopped": result.rung is not Rung.FULL,
            "rung": result.rung.value,
            "outcome": result.outcome.value,
            "reason": result.reason,
        }
    store.close()


if __name__ == "__main__":
    main()
