"""How well do two truncated depths foretell the whole model: its peaks, what it reserves, its step time?

Each configuration is probed on two truncated depths and on the whole model, by the product's own worker, and the
extrapolation is held against the whole. Times are of a full step with four micro batches. Where issuing takes the host
as long as the device computes, the probe says that the host is the bottleneck.

A host that others use too is slower from one second to the next, and so are whole models on it: where the host's share
of a micro batch is not small, all three depths are probed in turns, and of each the fastest time counts. What the first
turn alone would have said is told beside it, and how much the whole model's own times differ.
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
from autotune.depth import DEVICE_BOUND, Extrapolation, depths, extrapolate
from autotune.ladder import shortened
from autotune.objective import step_time_s
from autotune.probe.launcher import WorkerProber
from autotune.result import Measurement, ModelShape, Outcome, ProbeRequest

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
    parser.add_argument("--turns", type=int, default=3, help="probes of each depth where the host matters")
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
        "time_error_median_in_one_turn": errors("time_error_in_one_turn")[0],
        "time_error_max_in_one_turn": errors("time_error_in_one_turn")[1],
        "whole_model_differs_max": max(one["whole_differs"] for one in rows),
        "time_within_its_interval": statistics.fmean(
            abs(one["time_error_in_one_turn"]) <= one["claimed_error"] for one in rows
        ),
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
    turns: list[dict[int | None, Measurement]] = []
    while not turns or (len(turns) < args.turns and foretell(turns[0], pair, shape).unseen > DEVICE_BOUND):
        turns.append({})
        for depth in (*pair, None):
            request = whole_request if depth is None else shortened(whole_request, depth)
            result = prober.probe(request, logs / "probe.log")
            about["seconds"].append(result.seconds.get("total"))
            if result.outcome is not Outcome.OK or result.measurement is None:
                return about | {"failed": f"at depth {depth}: {result.outcome}, {result.reason}"}
            turns[-1][depth] = result.measurement
    found = {depth: min((turn[depth] for turn in turns), key=micro_s) for depth in (*pair, None)}
    foretold, whole = foretell(found, pair, shape), found[None]
    guess, first = foretold.measurement, foretell(turns[0], pair, shape)
    wholes = [step_time_s(turn[None], 4) for turn in turns]
    return about | {
        "peak_gib": whole.peak_allocated_gib,
        "peak_error": guess.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "segments_gib": {key: [guess.segment_peak_gib.get(key), gib] for key, gib in whole.segment_peak_gib.items()},
        "reserved_gib": whole.peak_reserved_gib,
        "reserved_error": guess.peak_reserved_gib / whole.peak_reserved_gib - 1,
        "context_gib": [guess.context_gib, whole.context_gib],
        "step_s": step_time_s(whole, 4),
        "time_error": step_time_s(guess, 4) / step_time_s(whole, 4) - 1,
        "time_error_in_one_turn": step_time_s(first.measurement, 4) / wholes[0] - 1,
        "whole_differs": max(wholes) / min(wholes) - 1,
        "claimed_error": first.time_error,
        "host_bound": foretold.host_bound,
        "turns": len(turns),
        "micro_s": [micro_s(found[depth]) for depth in (*pair, None)],
        "host_s": [found[depth].host_micro_s for depth in (*pair, None)],
        "rest_s": [statistics.median(found[depth].rest_s or (0.0,)) for depth in (*pair, None)],
    }


def foretell(found: dict[int | None, Measurement], pair: tuple[int, int], shape: ModelShape) -> Extrapolation:
    return extrapolate([(depth, found[depth]) for depth in pair], shape.num_layers)


def micro_s(measurement: Measurement) -> float:
    return statistics.median(measurement.micro_step_s)


if __name__ == "__main__":
    main()
