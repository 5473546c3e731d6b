"""How well do two truncated depths foretell the whole model: its peaks, what it reserves, its step time?

Each configuration is probed on two truncated depths and on the whole model, by the product's own worker, and the
extrapolation is held against the whole. Times are of a full step with four micro batches. Where issuing takes the host
as long as the device computes, the probe says that the host is the bottleneck.

A host that others use too stumbles for seconds, at any depth alike, and two probes in a row may both be disturbed.
Where its share of a step is not small, the three depths are therefore probed in turns, two if all their steps are alike
and else four or more, until the shortest steps of two probes agree at each, and the shortest are compared, which is
what the product extends. Where no two of eight agree at a depth there is no undisturbed step to compare: such rows are
told apart (`disturbed`), and the next call with `--rows` measures them anew. What the first probes say of the median
step of the first whole model is told beside it, and how much that median differs from one whole model to the next.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Rows, save, table

from autotune.catalog import resolve_model
from autotune.core.probe_types import Fingerprint, Measurement, Outcome, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import DEVICE_BOUND, Extrapolation, depths, extrapolate
from autotune.probe.supervisor import WorkerProber
from autotune.problem.performance import step_time_s
from autotune.study.evaluator import shortened

# A model, and how many of its layers count as the whole: a mixture does not fit with all of them.
MODELS: dict[str, int | None] = {
    "mistral-7b": None,
    "llama-3.1-8b": None,
    "gemma-2-9b": None,
    "phi-3-mini": None,
    "mixtral-8x7b": 12,
}
MICROS = 4  # of a step
TURNS = 4  # at least, where something disturbs
AGREED = 0.03  # by how much the shortest steps of two undisturbed probes may differ, and a step from the shortest
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
    parser.add_argument("--turns", type=int, default=8, help="at most")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop after so long; 0 tells what is in --rows")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    kept = Rows("depth_extrapolation", args.out, args.rows)
    done = {key(row) for row in kept.all if finished(row)}
    wanted = [
        (name, TrainConfig(**settings, **({"attention": "eager"} if name in EAGER else {})))
        for name, settings in itertools.product(args.models, CONFIGS)
    ]
    missing = [(name, config) for name, config in wanted if (name, config.label()) not in done]
    if missing and args.seconds:
        with WorkerProber(args.device, logs) as prober:
            for name, config in missing:
                if time.monotonic() < until:
                    kept.add(probed(prober, args, name, config, logs))
                    table([compared(kept.all[-1])], ["model", "config", "peak_error", "reserved_error", "time_error"])
    latest = {key(row): row for row in kept.all}.values()  # what was measured anew comes later
    shown = [compared(row) | {"disturbed": not finished(row)} for row in latest]
    came_through = [row for row in shown if "failed" not in row]
    rows, disturbed = ([row for row in came_through if row["disturbed"] is side] for side in (False, True))

    def errors(name: str, host_bound: tuple[bool, ...] = (True, False)) -> tuple[float, float]:
        found = [abs(one[name]) for one in rows if one["host_bound"] in host_bound] or [0.0]
        return statistics.median(found), max(found)

    peak, reserved, step = errors("peak_error"), errors("reserved_error"), errors("time_error")
    summary = {
        "configs": len(rows),
        "families": len({one["model"] for one in rows}),
        "failed": len(shown) - len(came_through),
        "disturbed": len(disturbed),
        "disturbed_time_error_max": max((abs(row["time_error"]) for row in disturbed), default=None),
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
        "first_within_its_interval": statistics.fmean(abs(one["first_error"]) <= one["claimed_error"] for one in rows),
        "whole_differs_median": errors("whole_differs", (True,))[0],
        "whole_differs_max": errors("whole_differs", (True,))[1],
    }
    fingerprint = from_data(Fingerprint, kept.all[0]["fingerprint"])
    save("depth_extrapolation", fingerprint, summary, shown, args.out)
    print(summary)


def probed(
    prober: WorkerProber, args: argparse.Namespace, name: str, config: TrainConfig, logs: Path
) -> dict[str, Any]:
    """What was measured at each of the three depths, in each turn, or where it failed."""
    model = dict(resolve_model(name).config)
    if MODELS.get(name):
        model["num_hidden_layers"] = MODELS[name]
    shape = prober.describe(model)
    pair = depths(shape, config.checkpoint_every) if shape else None
    assert shape is not None and pair is not None
    whole = ProbeRequest(config=config, model=model, device=args.device, memory_gib=args.memory_gib)
    requests = [*(shortened(whole, depth) for depth in pair), whole]
    about: dict[str, Any] = {
        "model": name,
        "config": config.label(),
        "depths": [*pair, shape.num_layers],
        "seconds": 0.0,
        "fingerprint": to_data(prober.fingerprint),
    }
    found: list[list[Measurement]] = [[], [], []]
    for _ in range(args.turns):
        for request, measurements in zip(requests, found, strict=True):
            result = prober.probe(request, logs / "probe.log")
            about["seconds"] += result.seconds.get("total", 0.0)
            if result.outcome is not Outcome.OK or result.measurement is None:
                return about | {"failed": f"at depth {request.depth}: {result.outcome}, {result.reason}"}
            measurements.append(result.measurement)
        if enough(found, about["depths"]):
            break
    return about | {"probes": [[to_data(one) for one in each] for each in found]}


def enough(found: Sequence[Sequence[Measurement]], at: Sequence[int]) -> bool:
    """Whether so many turns tell the undisturbed step at each depth."""
    if foretold([each[0] for each in found], at).unseen <= DEVICE_BOUND:
        return True
    turns = min(len(each) for each in found)
    return all(agree(each) for each in found) and (turns >= TURNS or all(calm(each) for each in found))


def calm(probes: Sequence[Measurement]) -> bool:
    """Whether most steps took what the shortest did."""
    micros = pooled(probes).micro_step_s
    return statistics.median(micros) / min(micros) - 1 <= AGREED


def key(row: dict[str, Any]) -> tuple[str, str]:
    return row["model"], row["config"]


def finished(row: dict[str, Any]) -> bool:
    """Whether a row needs not be measured again."""
    return "failed" in row or enough(read(row), row["depths"])


def read(row: dict[str, Any]) -> list[list[Measurement]]:
    """The probes of each depth."""
    return [[from_data(Measurement, one) for one in each] for each in row["probes"]]


def agree(probes: Sequence[Measurement]) -> bool:
    """Whether two of these were not disturbed, as it seems."""
    shortest = sorted(min(one.micro_step_s) for one in probes)
    return len(shortest) > 1 and shortest[1] / shortest[0] - 1 <= AGREED


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """The extrapolation against the whole. Errors are relative and signed; without them where a probe failed."""
    about = {key: value for key, value in row.items() if key not in ("probes", "fingerprint")}
    if "failed" in row:
        return about
    probes = read(row)
    found = [pooled(each) for each in probes]
    line, whole = foretold(found, row["depths"]), found[-1]
    guess = line.measurement
    medians = [step_time_s(one, MICROS) for one in probes[-1]]
    first = foretold([each[0] for each in probes], row["depths"]).measurement
    micro, rest = (min, statistics.median) if line.shortest else (statistics.fmean, statistics.fmean)
    step_s = MICROS * micro(whole.micro_step_s) + (rest(whole.rest_s) if whole.rest_s else 0.0)
    return about | {
        "peak_gib": whole.peak_allocated_gib,
        "peak_error": guess.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "segments_gib": {key: [guess.segment_peak_gib.get(key), gib] for key, gib in whole.segment_peak_gib.items()},
        "reserved_gib": whole.peak_reserved_gib,
        "reserved_error": guess.peak_reserved_gib / whole.peak_reserved_gib - 1,
        "context_gib": [guess.context_gib, whole.context_gib],
        "step_s": step_s,
        "time_error": step_time_s(guess, MICROS) / step_s - 1,
        "probes": [len(each) for each in probes],
        "undisturbed": [agree(each) for each in probes],
        "first_error": step_time_s(first, MICROS) / medians[0] - 1,
        "claimed_error": first.time_error,
        "whole_differs": max(medians) / min(medians) - 1,
        "host_bound": line.host_bound,
        "micro_s": [[round(micro, 6) for micro in one.micro_step_s] for one in found],
        "host_s": [one.host_micro_s for one in found],
    }


def foretold(found: Sequence[Measurement], at: Sequence[int]) -> Extrapolation:
    """The whole model's from those of the first two depths."""
    return extrapolate(list(zip(at[:2], found[:2], strict=True)), at[-1])


def pooled(probes: Sequence[Measurement]) -> Measurement:
    """Probes of one depth as one: the memory of the first, the times of all."""
    return replace(
        probes[0],
        step_s=tuple(itertools.chain(*(one.step_s for one in probes))),
        micro_step_s=tuple(itertools.chain(*(one.micro_step_s for one in probes))),
        rest_s=tuple(itertools.chain(*(one.rest_s for one in probes))),
        host_micro_s=min((one.host_micro_s for one in probes if one.host_micro_s is not None), default=None),
    )


if __name__ == "__main__":
    main()
