"""How well do two truncated depths foretell the whole model: its peaks, what it reserves, its step time?

Each configuration is probed on two truncated depths and on the whole model, by the product's own worker, and the
extrapolation is held against the whole. Times are of a full step with four micro batches. Where issuing takes the host
as long as the device computes, the probe says that the host is the bottleneck.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Rows, save, table

from autotune.catalog import resolve_model
from autotune.config import TrainConfig
from autotune.depth import depths, extrapolate
from autotune.ladder import shortened
from autotune.objective import step_time_s
from autotune.probe.launcher import WorkerProber
from autotune.result import Measurement, Outcome, ProbeRequest

# A model, and how many of its layers count as the whole: a mixture does not fit with all of them.
MODELS: dict[str, int | None] = {
    "mistral-7b": None,
    "llama-3.1-8b": None,
    "gemma-2-9b": None,
    "phi-3-mini": None,
    "mixtral-8x7b": 12,
}
EAGER = {"gemma-2-9b"}  # its capped scores have no SDPA
NONE, EVERY_2, FULL = ({"checkpointing": name} for name in ("none", "every_2", "full"))
COMPILED = {"compile": "per_layer", "precision": "bf16_pure"}
CONFIGS: list[dict[str, Any]] = [
    {"micro_batch_size": 1, "seq_len": 512} | NONE,
    {"micro_batch_size": 2, "seq_len": 1024} | NONE,
    {"micro_batch_size": 4, "seq_len": 1024, "lora_rank": 64} | EVERY_2,
    {"micro_batch_size": 1, "seq_len": 4096, "optimizer": "adamw_8bit"} | FULL,
    {"micro_batch_size": 2, "seq_len": 1024} | NONE | COMPILED,
    {"micro_batch_size": 4, "seq_len": 1024} | FULL | COMPILED,
    {"micro_batch_size": 4, "seq_len": 1024, "quantization": "nf4"} | FULL,
    {"micro_batch_size": 2, "seq_len": 1024, "quantization": "nf4", "double_quant": True} | NONE,
    {"micro_batch_size": 2, "seq_len": 1024, "quantization": "int8"} | FULL,
    {"method": "full", "micro_batch_size": 2, "seq_len": 1024, "precision": "bf16_pure"} | FULL,
    {"method": "full", "micro_batch_size": 1, "seq_len": 1024, "precision": "bf16_pure", "optimizer": "adamw_8bit"}
    | NONE,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-gib", type=float, default=135.0)
    parser.add_argument("--rows", type=Path, help="the .jsonl of an earlier call, to go on from")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop after so long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    kept = Rows("depth_extrapolation", args.out, args.rows)
    with WorkerProber(args.device, logs) as prober:
        fingerprint = prober.fingerprint
        for name, settings in itertools.product(args.models, CONFIGS):
            config = TrainConfig(**settings, **({"attention": "eager"} if name in EAGER else {}))
            if time.monotonic() < until and not kept.has(model=name, config=config.label()):
                kept.add(compare(prober, args, name, config, logs))
                table(kept.all[-1:], ["model", "config", "peak_error", "reserved_error", "time_error", "host_bound"])
    rows = [row for row in kept.all if "peak_error" in row]

    def errors(key: str) -> tuple[float, float]:
        found = [abs(one[key]) for one in rows]
        return statistics.median(found), max(found)

    peak, reserved, step = errors("peak_error"), errors("reserved_error"), errors("time_error")
    summary = {
        "configs": len(rows),
        "families": len({one["model"] for one in rows}),
        "peak_error_median": peak[0],
        "peak_error_max": peak[1],
        "reserved_error_median": reserved[0],
        "reserved_error_max": reserved[1],
        "time_error_median": step[0],
        "time_error_max": step[1],
        "time_error_max_device_bound": max(
            (abs(one["time_error"]) for one in rows if not one["host_bound"]), default=0.0
        ),
        "time_error_max_host_bound": max((abs(one["time_error"]) for one in rows if one["host_bound"]), default=0.0),
        "time_within_its_interval": statistics.fmean(abs(one["time_error"]) <= one["claimed_error"] for one in rows),
    }
    save("depth_extrapolation", fingerprint, summary, rows, args.out)
    print(summary)


def compare(
    prober: WorkerProber, args: argparse.Namespace, name: str, config: TrainConfig, logs: Path
) -> dict[str, Any]:
    """The extrapolation against the whole. Errors are relative and signed; without them where a probe failed."""
    model = dict(resolve_model(name).config)
    if MODELS.get(name):
        model["num_hidden_layers"] = MODELS[name]
    shape = prober.describe(model)
    pair = depths(shape, config.checkpoint_every) if shape else None
    assert shape is not None and pair is not None
    whole_request = ProbeRequest(config=config, model=model, device=args.device, memory_gib=args.memory_gib)
    about: dict[str, Any] = {
        "model": name,
        "config": config.label(),
        "depths": [*pair, shape.num_layers],
        "seconds": [],
    }
    found: dict[int | None, Measurement] = {}
    for depth in (*pair, None):
        result = prober.probe(whole_request if depth is None else shortened(whole_request, depth), logs / "probe.log")
        about["seconds"].append(result.seconds.get("total"))
        if result.outcome is not Outcome.OK or result.measurement is None:
            return about | {"failed": f"at depth {depth}: {result.outcome}, {result.reason}"}
        found[depth] = result.measurement
    foretold, whole = extrapolate([(depth, found[depth]) for depth in pair], shape.num_layers), found[None]
    guess = foretold.measurement
    return about | {
        "peak_gib": whole.peak_allocated_gib,
        "peak_error": guess.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "segments_gib": {key: [guess.segment_peak_gib.get(key), gib] for key, gib in whole.segment_peak_gib.items()},
        "reserved_gib": whole.peak_reserved_gib,
        "reserved_error": guess.peak_reserved_gib / whole.peak_reserved_gib - 1,
        "context_gib": [guess.context_gib, whole.context_gib],
        "step_s": step_time_s(whole, 4),
        "time_error": step_time_s(guess, 4) / step_time_s(whole, 4) - 1,
        "claimed_error": foretold.time_error,
        "host_bound": foretold.host_bound,
        "micro_s": [statistics.median(found[depth].micro_step_s) for depth in (*pair, None)],
        "host_s": [found[depth].host_micro_s for depth in (*pair, None)],
        "rest_s": [statistics.median(found[depth].rest_s or (0.0,)) for depth in (*pair, None)],
    }


if __name__ == "__main__":
    main()
