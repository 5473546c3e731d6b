"""Do the gate and the shallow rung stop what cannot fit, and nothing else?

A grid that crosses the limit is put through the ladder under caps of 22, 40 and 80 GiB, each with a store of its own,
so that nothing is known before. The truth is what a full-depth probe reserves without a cap; where that is within a
tenth of the limit, the same probe under the cap says whether it fits.
"""

import argparse
import itertools
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from common import save, table

from autotune.catalog import resolve_model
from autotune.config import TrainConfig
from autotune.ladder import GATE_BAND, Ladder
from autotune.probe.launcher import WorkerProber
from autotune.result import Outcome, ProbeRequest, Rung
from autotune.store import ProbeStore

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
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = resolve_model(args.model)
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    configs = [TrainConfig(**dict(zip(GRID, values, strict=True))) for values in itertools.product(*GRID.values())]
    configs += [TrainConfig(**settings) for settings in EXTRA]

    def request(config: TrainConfig, memory_gib: float) -> ProbeRequest:
        # Two short steps: memory is asked for here, not time.
        return ProbeRequest(
            config=config, model=model.config, device=args.device, memory_gib=memory_gib, min_timed_s=0.0
        )

    rows: list[dict[str, Any]] = []
    with WorkerProber(args.device, logs) as prober:
        fingerprint, shape = prober.fingerprint, prober.describe(model.config)
        free = {config: prober.probe(request(config, args.memory_gib), logs / "truth.log") for config in configs}
        for cap in args.caps:
            store = ProbeStore(f"sqlite:///{logs}/gate-{cap:g}.db")
            ladder = Ladder(
                prober,
                store,
                study=f"cap-{cap:g}",
                logs=logs,
                request=lambda config, cap=cap: request(config, cap),
                model=model.digest,
                shape=shape,
            )
            order = random.Random(0).sample(configs, len(configs))
            for number, config in enumerate(order):
                result = ladder.evaluate(config, number).result
                measured = free[config].measurement
                limit = cap * 0.95 - (measured.context_gib if measured else 0.0)
                over = measured.peak_reserved_gib / limit - 1 if measured else None
                fits = over is not None and over <= 0
                if over is not None and abs(over) < NEAR:
                    capped = (
                        result if result.rung is Rung.FULL else prober.probe(request(config, cap), logs / "truth.log")
                    )
                    fits = capped.outcome is Outcome.OK
                stopped = result.outcome in (Outcome.REFUSED, Outcome.OOM) and result.rung is not Rung.FULL
                rows.append(
                    {
                        "cap_gib": cap,
                        "config": config.label(),
                        "needs_over_limit": over,
                        "fits": fits,
                        "rung": result.rung.value,
                        "outcome": result.outcome.value,
                        "false_refusal": stopped and fits and (over is None or over < -GATE_BAND),
                        "missed_oom": not fits and not stopped,
                        "reason": result.reason,
                    }
                )
                table(rows[-1:], ["cap_gib", "config", "needs_over_limit", "fits", "rung", "outcome"])
            store.close()
    summary = {
        "configs": len(rows),
        "false_refusals": sum(row["false_refusal"] for row in rows),
        "missed_ooms": sum(row["missed_oom"] for row in rows),
        "stopped_within_the_band_though_they_fit": sum(
            row["fits"] and row["outcome"] != "ok" and not row["false_refusal"] for row in rows
        ),
        "by_rung_and_outcome": dict(Counter(f"{row['rung']} {row['outcome']}" for row in rows)),
    }
    save("oom_gate", fingerprint, summary, rows, args.out)
    print(summary)


if __name__ == "__main__":
    main()
