"""Measure how well probes at two truncated depths predict the peak memory and step time of the
whole model.

The product's own worker probes each configuration at two truncated depths and at full depth. The
benchmark compares the extrapolation with the whole model. A time is the duration of a full step
with four micro batches. If the host launches the operations no faster than the device computes
them, the probe reports a CPU-bound configuration.

Other users of the host can slow it down for seconds, at any depth, and can disturb two probes in a
row. If the host's share of a step is not small, the three depths are therefore probed in turns,
until at each depth the shortest steps of two probes agree. Two turns are enough if all steps of
each are alike, else there are at least four. The shortest steps are compared, since the product
extrapolates those. If no two of eight turns agree at a depth, there is no undisturbed step to
compare. Such rows are marked `disturbed`, and the next call with `--rows` measures them again. The
result also holds the error of a prediction from the first turn only, and how much the median step
differs between the
turns.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import Mode, Rows, finish, run_program, table, worker

from autotune.catalog import resolve_model
from autotune.core.probe_types import Measurement, Outcome, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import DEVICE_BOUND, Extrapolation, depths, extrapolate
from autotune.probe.supervisor import WorkerProber
from autotune.problem.performance import step_time_s
from autotune.study.evaluator import truncate_request

# Each model with the number of layers that count as its full depth: a mixture of experts does not
# fit with all layers.
MODELS: dict[str, int | None] = {
    "mistral-7b": None,
    "llama-3.1-8b": None,
    "gemma-2-9b": None,
    "phi-3-mini": None,
    "mixtral-8x7b": 12,
}
MICROS = 4  # micro batches of a step
TURNS = 4  # at least, if a turn was disturbed
# relative difference allowed between the shortest steps of two undisturbed probes, and within one
AGREED = 0.03
EAGER = {"gemma-2-9b"}  # SDPA does not support its capped attention scores
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
    {
        "method": "full",
        "micro_batch_size": 1,
        "seq_len": 1024,
        "precision": "bf16_pure",
        "optimizer": "adamw_8bit",
    }
    | NONE,
]


def summarize(shown: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the undisturbed rows, and the view of a study on all rows.

    A study probes each depth once: `first_` errors compare the first turn, and `_of_all` includes
    the disturbed rows.
    """
    succeeded = [row for row in shown if "failed" not in row]
    rows, disturbed = (
        [row for row in succeeded if row["disturbed"] is side] for side in (False, True)
    )

    def errors(name: str, host_bound: tuple[bool, ...] = (True, False)) -> tuple[float, float]:
        values = [abs(row[name]) for row in rows if row["host_bound"] in host_bound] or [0.0]
        return statistics.median(values), max(values)

    def kept(counted: list[dict[str, Any]]) -> list[bool]:
        return [abs(row["first_error"]) <= row["claimed_error"] for row in counted]

    peak, reserved, step = errors("peak_error"), errors("reserved_error"), errors("time_error")
    return {
        "configs": len(rows),
        "families": len({row["model"] for row in rows}),
        "failed": len(shown) - len(succeeded),
        "disturbed": len(disturbed),
        "disturbed_time_error_max": max(
            (abs(row["time_error"]) for row in disturbed), default=None
        ),
        "peak_error_median": peak[0],
        "peak_error_max": peak[1],
        "reserved_error_median": reserved[0],
        "reserved_error_max": reserved[1],
        "time_error_median": step[0],
        "time_error_max": step[1],
        "time_error_max_device_bound": errors("time_error", (False,))[1],
        "time_error_max_host_bound": errors("time_error", (True,))[1],
        "first_error_median": errors("first_error")[0],
        "first_error_max": errors("first_error")[1],
        "first_error_max_of_all": max(abs(row["first_error"]) for row in succeeded),
        "first_within_its_interval": statistics.fmean(kept(rows)),
        "first_within_its_interval_of_all": statistics.fmean(kept(succeeded)),
        "first_beyond_its_interval": {
            f"{row['model']} {row['config']}": [row["first_error"], row["claimed_error"]]
            for row, inside in zip(succeeded, kept(succeeded), strict=True)
            if not inside
        },
        "whole_differs_median": errors("whole_differs", (True,))[0],
        "whole_differs_max": errors("whole_differs", (True,))[1],
        **{
            f"whole_differs_max_{bound}_of_all": max(
                row["whole_differs"] for row in succeeded if row["host_bound"] is side
            )
            for bound, side in (("host_bound", True), ("device_bound", False))
        },
    }


def probe_depths(
    prober: WorkerProber, args: argparse.Namespace, name: str, config: TrainConfig
) -> dict[str, Any]:
    """Probe a configuration at three depths, in turns.

    Return the measurements, or the first failure, as a row.
    """
    model = dict(resolve_model(name).config)
    if MODELS.get(name):
        model["num_hidden_layers"] = MODELS[name]
    shape = prober.describe(model)
    pair = depths(shape, config.checkpoint_every) if shape else None
    assert shape is not None and pair is not None
    whole = ProbeRequest(config=config, model=model, device=args.device, memory_gib=args.memory_gib)
    requests = [*(truncate_request(whole, depth) for depth in pair), whole]
    about: dict[str, Any] = {
        "model": name,
        "config": config.label(),
        "depths": [*pair, shape.num_layers],
        "seconds": 0.0,
        "fingerprint": to_data(prober.fingerprint),
    }
    by_depth: list[list[Measurement]] = [[], [], []]
    for _ in range(args.turns):
        for request, measurements in zip(requests, by_depth, strict=True):
            result = prober.probe(request, prober.logs / "probe.log")
            about["seconds"] += result.seconds.get("total", 0.0)
            if result.outcome is not Outcome.OK or result.measurement is None:
                return about | {
                    "failed": f"at depth {request.depth}: {result.outcome}, {result.reason}"
                }
            measurements.append(result.measurement)
        if enough(by_depth, about["depths"]):
            break
    return about | {"probes": [[to_data(probe) for probe in probes] for probes in by_depth]}


def enough(by_depth: Sequence[Sequence[Measurement]], layers: Sequence[int]) -> bool:
    """Whether these turns show the undisturbed step at each depth."""
    if predict_whole([probes[0] for probes in by_depth], layers).unseen <= DEVICE_BOUND:
        return True
    turns = min(len(probes) for probes in by_depth)
    calm = turns >= TURNS or all(steps_alike(probes) for probes in by_depth)
    return calm and all(agree(probes) for probes in by_depth)


def steps_alike(probes: Sequence[Measurement]) -> bool:
    """Whether most steps took about as long as the shortest."""
    micros = pooled(probes).micro_step_s
    return statistics.median(micros) / min(micros) - 1 <= AGREED


def key(row: dict[str, Any]) -> tuple[str, str]:
    return row["model"], row["config"]


def finished(row: dict[str, Any]) -> bool:
    """Whether a row need not be measured again."""
    return "failed" in row or enough(read(row), row["depths"])


def read(row: dict[str, Any]) -> list[list[Measurement]]:
    """The measurements at each depth."""
    return [[from_data(Measurement, probe) for probe in probes] for probes in row["probes"]]


def agree(probes: Sequence[Measurement]) -> bool:
    """Whether the shortest steps of two probes agree, so that neither was disturbed."""
    shortest = sorted(min(probe.micro_step_s) for probe in probes)
    return len(shortest) > 1 and shortest[1] / shortest[0] - 1 <= AGREED


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """Compare the extrapolation with the whole model.

    Errors are relative and signed; a failed row has none.
    """
    about = {key: value for key, value in row.items() if key not in ("probes", "fingerprint")}
    if "failed" in row:
        return about
    probes = read(row)
    pools = [pooled(at_depth) for at_depth in probes]
    whole = pools[-1]
    extrapolation = predict_whole(pools, row["depths"])
    predicted = extrapolation.measurement
    medians = [step_time_s(probe, MICROS) for probe in probes[-1]]
    first = predict_whole([at_depth[0] for at_depth in probes], row["depths"]).measurement
    micro, rest = (
        (min, statistics.median) if extrapolation.shortest else (statistics.fmean, statistics.fmean)
    )
    step_s = MICROS * micro(whole.micro_step_s) + (rest(whole.rest_s) if whole.rest_s else 0.0)
    return about | {
        "peak_gib": whole.peak_allocated_gib,
        "peak_error": predicted.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "segments_gib": {
            key: [predicted.segment_peak_gib.get(key), gib]
            for key, gib in whole.segment_peak_gib.items()
        },
        "reserved_gib": whole.peak_reserved_gib,
        "reserved_error": predicted.peak_reserved_gib / whole.peak_reserved_gib - 1,
        "context_gib": [predicted.context_gib, whole.context_gib],
        "step_s": step_s,
        "time_error": step_time_s(predicted, MICROS) / step_s - 1,
        "probes": [len(at_depth) for at_depth in probes],
        "undisturbed": [agree(at_depth) for at_depth in probes],
        "first_error": step_time_s(first, MICROS) / medians[0] - 1,
        "claimed_error": first.time_error,
        "whole_differs": max(medians) / min(medians) - 1,
        "host_bound": predicted.host_bound,
        "micro_s": [[round(micro_s, 6) for micro_s in pool.micro_step_s] for pool in pools],
        "host_s": [pool.host_micro_s for pool in pools],
    }


def predict_whole(measurements: Sequence[Measurement], layers: Sequence[int]) -> Extrapolation:
    """Extrapolate the whole model from the measurements at the first two depths."""
    return extrapolate(list(zip(layers[:2], measurements[:2], strict=True)), layers[-1])


def pooled(probes: Sequence[Measurement]) -> Measurement:
    """Merge the probes of one depth: the memory of the first, the times of all."""
    return replace(
        probes[0],
        step_s=tuple(itertools.chain(*(probe.step_s for probe in probes))),
        micro_step_s=tuple(itertools.chain(*(probe.micro_step_s for probe in probes))),
        rest_s=tuple(itertools.chain(*(probe.rest_s for probe in probes))),
        host_micro_s=min(
            (probe.host_micro_s for probe in probes if probe.host_micro_s is not None), default=None
        ),
    )


def run(args: argparse.Namespace) -> None:
    """Probe the missing configurations, and compare all."""
    until = time.monotonic() + args.seconds
    stored = Rows.of(args)
    done = {key(row) for row in stored.all if finished(row)}
    wanted = [
        (name, TrainConfig(**settings, **({"attention": "eager"} if name in EAGER else {})))
        for name, settings in itertools.product(args.models, CONFIGS)
    ]
    missing = [(name, config) for name, config in wanted if (name, config.label()) not in done]
    if missing and args.seconds:
        with worker(args.device) as prober:
            for name, config in missing:
                if time.monotonic() < until:
                    stored.add(probe_depths(prober, args, name, config))
                    table(
                        [compared(stored.all[-1])],
                        ["model", "config", "peak_error", "reserved_error", "time_error"],
                    )
    latest = {key(row): row for row in stored.all}.values()  # a row measured again comes later
    finish(
        args,
        stored.fingerprint,
        [compared(row) | {"disturbed": not finished(row)} for row in latest],
    )


MODES = {
    "": Mode(
        run=run,
        result="depth_extrapolation",
        summarize=summarize,
        options={
            "--models": list(MODELS),
            "--device": "cuda",
            "--memory-gib": 135.0,
            "--rows": None,
            "--turns": {"default": 8, "help": "maximum number of turns"},
            "--seconds": 540.0,
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
