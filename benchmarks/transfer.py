"""Predict the speed of one card from probes on another, for the same configurations on both.

`measure` runs on a card: it calibrates the card and its host, then probes a few layers of three models, and writes each
row at once to a file that a further call can continue. `compare` needs no GPU: it takes the rows of two cards, predicts
each card's micro batches from the other's probes, and divides the pairs by whether the host sets the pace. What was
fitted here was fitted on one model; the summary is of the others.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import Rows, save, table
from plan_speed import HOST_BOUND

from autotune.catalog import DeviceSpec, resolve_device, resolve_model
from autotune.core.probe_types import HOST_SHARE, Measurement, Outcome, ProbeRequest, Rung
from autotune.core.serialization import from_data, to_data
from autotune.core.text import dashed
from autotune.core.train_config import TrainConfig
from autotune.prediction.calibration import Calibration
from autotune.prediction.step_time import StepTimeEstimate, divide_step_time, estimate_step_time
from autotune.prediction.transfer import REFERENCE, SpeedTransfer, host_transfer, interval, speed_transfer
from autotune.probe.calibrate import calibrate_by
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.target import find_target
from autotune.problem.workload import Workload

DATA = Path(__file__).parent / "data"
STORED = [DATA / "transfer_h100.jsonl", DATA / "transfer_h200.jsonl"]
# Each model with the layers that are probed: enough that they, not the head, take most of the time.
MODELS = {"llama-3.2-1b": 8, "qwen2.5-1.5b": 8, "mistral-7b": 4}
FITTED = "llama-3.2-1b"  # the exponent of the memory and the error of profiled probes are its own
MEMORY_GIB = 70.0  # of any card
TIMED_S = 0.5
LENGTHS = Lengths.described(mean=400, p99=1600)  # of rows that are packed, or padded to the longest of a micro batch
PURE = {"precision": "bf16_pure"}
FULL = {"method": "full", "lora_rank": None} | PURE
NF4 = {"quantization": "nf4"}
PLAIN, AGAIN = {"checkpointing": "none"}, {"checkpointing": "full"}
COMPILED = {"compile": "per_layer"} | PURE
LARGE = {"micro_batch_size": 8, "seq_len": 2048, "loss": "chunked"} | AGAIN


def shape(rows: int, seq_len: int) -> dict[str, int]:
    return {"micro_batch_size": rows, "seq_len": seq_len}


# Those that share a base model stand together. Each compiled shape takes seconds, so that these come last.
SETTINGS: list[dict[str, Any]] = [
    shape(1, 256) | PLAIN,
    shape(1, 1024) | PLAIN,
    shape(4, 1024) | PLAIN,
    shape(4, 1024) | PLAIN | PURE,
    shape(2, 2048) | AGAIN,
    shape(4, 2048) | PLAIN | {"packing": True},
    shape(4, 2048) | PLAIN | {"padding": "longest"},
    LARGE,
    shape(1, 256) | PLAIN | NF4,
    shape(4, 1024) | PLAIN | NF4,
    LARGE | NF4,
    shape(1, 256) | PLAIN | FULL,
    shape(1, 1024) | PLAIN | FULL,
    shape(4, 1024) | PLAIN | FULL,
    LARGE | FULL,
]
COMPILED_SETTINGS: list[dict[str, Any]] = [shape(1, 512) | PLAIN | COMPILED, LARGE | COMPILED]


def lengths_of(config: TrainConfig) -> Lengths:
    return LENGTHS if config.packing or config.padding == "longest" else Lengths.constant(config.seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration of a model of which `depth` layers are probed. `again` names a repetition, in words."""

    model: str
    depth: int
    config: TrainConfig
    again: str | None = None

    @property
    def key(self) -> dict[str, Any]:
        return {"model": self.model, "config": self.config.label(), "again": self.again}

    def request(self, device: str, memory_gib: float) -> ProbeRequest:
        return ProbeRequest(
            config=self.config,
            model=resolve_model(self.model).config,
            device=device,
            memory_gib=memory_gib,
            rung=Rung.SHALLOW,
            depth=self.depth,
            min_timed_s=TIMED_S,
            min_timed_micros=3,
            micro_batches=Workload(lengths=lengths_of(self.config)).micro_batches(self.config),
            profile=self.again is None,
        )


def cases(models: dict[str, int], precision: str | None = None) -> Iterator[Case]:
    """All configurations, the cheapest first; before and after them one that is not profiled.

    The two show whether profiles disturb what is timed after them.
    """
    first = next(iter(models.items()))

    def case(model: str, depth: int, settings: dict[str, Any], again: str | None = None) -> Case:
        settings = {"padding": "max_length"} | settings | ({"precision": precision} if precision else {})
        return Case(model=model, depth=depth, config=TrainConfig(**settings), again=again)

    yield case(*first, SETTINGS[0], "before any profile")
    for chosen in (SETTINGS, COMPILED_SETTINGS):
        for model, depth in models.items():
            for settings in chosen:
                yield case(model, depth, settings)
    yield case(*first, SETTINGS[0], "after all profiles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    phases = parser.add_subparsers(dest="phase", required=True)
    measuring = phases.add_parser("measure", help="probe on the card of this machine")
    measuring.add_argument("--gpu", default="auto")
    measuring.add_argument("--models", nargs="*", default=list(MODELS))
    measuring.add_argument("--memory-gib", type=float, default=MEMORY_GIB)
    measuring.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call on this card to continue")
    measuring.add_argument("--seconds", type=float, default=270.0, help="start no probe after this time")
    measuring.add_argument("--out", type=Path, help="directory of the .jsonl file")
    comparing = phases.add_parser("compare", help="predict each of two cards from the rows of the other")
    comparing.add_argument("rows", type=Path, nargs="*", default=STORED, help="the .jsonl files of two cards")
    comparing.add_argument("--out", type=Path)
    args = parser.parse_args()
    measure(args) if args.phase == "measure" else compare(args)


def measure(args: argparse.Namespace) -> None:
    """Probe what the rows of earlier calls do not hold, and print a short table of all rows."""
    until = time.monotonic() + args.seconds
    target = find_target(args.gpu)
    on_cpu = target.card is None
    stored = Rows(f"transfer-{dashed(target.device.name)}", args.out, args.rows)
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    models = {name: MODELS.get(name, 2) for name in args.models}
    missing = [case for case in cases(models, "fp32" if on_cpu else None) if not stored.has(**case.key)]
    with WorkerProber("cpu" if on_cpu else "cuda", logs) as prober:
        if not any("calibration" in row for row in stored.all):
            calibration = calibrate_by(prober, target, say=print)
            stored.add({"calibration": to_data(calibration), "fingerprint": to_data(prober.fingerprint)})
        for case in missing:
            if time.monotonic() < until:
                row = probe(prober, case, args.memory_gib)
                stored.add(row)
                print(f"{row['seconds']:5.1f} s  {case.model} {case.config.label()}", flush=True)
    rows = [summarized(row) for row in stored.all if "config" in row]
    table(rows, ["model", "config", "seconds", "micro", "host", "busy", "products", "attention", "bytes", "failed"])
    print(f"{len(rows)} rows, {sum('failed' in row for row in rows)} failed")


def probe(prober: WorkerProber, case: Case, memory_gib: float) -> dict[str, Any]:
    """A case as a row: its measurement and the kernels of its profile, or why there is none."""
    log = prober.logs / "probe.log"
    log.unlink(missing_ok=True)
    result = prober.probe(case.request(prober.device, memory_gib), log)
    row = case.key | {
        "settings": case.config.as_dict(),
        "depth": case.depth,
        "seconds": result.seconds.get("total", 0.0),
        "phases": result.seconds,
    }
    if result.outcome is not Outcome.OK or result.measurement is None:
        return row | {"failed": f"{result.outcome}: {result.reason}"}
    kernels = [line for line in log.read_text(encoding="utf-8").splitlines() if " ms " in line]
    return row | {"measurement": to_data(result.measurement), "kernels": kernels, "notes": result.notes}


def summarized(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the table; times in milliseconds."""
    if "failed" in row:
        return row
    found = from_data(Measurement, row["measurement"])
    kernels = found.kernels
    shown = {key: row[key] for key in ("model", "config", "seconds")}
    shown |= {"micro": 1000 * min(found.micro_step_s)}
    if found.host_micro_s is not None:
        shown |= {"host": 1000 * found.host_micro_s}
    if kernels is not None:
        seconds = {"busy": kernels.busy_s, "products": kernels.products_s + kernels.fp8_s}
        seconds |= {"attention": kernels.attention_s, "bytes": kernels.bytes_s}
        shown |= {name: 1000 * value for name, value in seconds.items()}
    return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `measure` found on a card: its calibration; rows and measurements by model, configuration and repetition."""

    calibration: Calibration
    found: dict[tuple[str, str, str | None], tuple[dict[str, Any], Measurement]]

    @property
    def card(self) -> DeviceSpec:
        return resolve_device(self.calibration.device)


def read(path: Path) -> Measured:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    (calibration,) = (row["calibration"] for row in rows if "calibration" in row)
    found = {
        (row["model"], row["config"], row["again"]): (row, from_data(Measurement, row["measurement"]))
        for row in rows
        if "measurement" in row
    }
    return Measured(calibration=from_data(Calibration, calibration), found=found)


def compare(args: argparse.Namespace) -> None:
    """Predict each card from the other, print the pairs and save them with a summary."""
    one, other = map(read, args.rows)
    rows = [
        predict(key, source, target) for source, target in ((one, other), (other, one)) for key in common(one, other)
    ]
    rows += [again(machine) for machine in (one, other)]
    columns = ["source", "target", "model", "config", "error", "old_error", "calibrated_error", "inside", "host_bound"]
    table([row for row in rows if "target" in row], columns)
    save("transfer", None, summarize(rows), rows, args.out)
    print(summarize(rows))


def common(one: Measured, other: Measured) -> list[tuple[str, str, str | None]]:
    """What was profiled on both."""
    profiled = [{key for key, (_, found) in cards.found.items() if found.kernels} for cards in (one, other)]
    return [key for key in one.found if all(key in keys for keys in profiled)]


def predict(key: tuple[str, str, str | None], source: Measured, target: Measured) -> dict[str, Any]:
    """One configuration on the target, predicted from its probe on the source: an error is predicted / measured - 1."""
    (row, probed), (_, there) = source.found[key], target.found[key]
    took_s = statistics.median(there.micro_step_s)
    here, own = divide_step_time(probed, None), divide_step_time(there, None)
    transfer, calibrated = (
        speed_transfer(source.card, target.card, calibration=calibration) for calibration in (None, target.calibration)
    )
    assert transfer is not None and calibrated is not None and probed.kernels and there.kernels
    host = host_transfer(source.calibration, target.calibration)
    predicted, known = here.on(transfer), here.on(replace(calibrated, host=host))
    inside, inside_known = (low_high(one)[0] <= took_s <= low_high(one)[1] for one in (predicted, known))
    return {
        "source": source.card.name,
        "target": target.card.name,
        "model": key[0],
        "config": key[1],
        "took_ms": 1000 * took_s,
        "error": predicted.micro_s / took_s - 1,
        "inside": inside,
        "calibrated_error": known.micro_s / took_s - 1,
        "calibrated_inside": inside_known,
        "old_error": by_old_rule(row, probed, source.card, target.card).micro_s / took_s - 1,
        "host_shares": [here.host_share, own.host_share],
        "host_bound": any(one.host_s >= HOST_SHARE * one.micro_s for one in (here, own)),
        "products": probed.kernels.products_s / there.kernels.products_s,
        "attention": probed.kernels.attention_s / there.kernels.attention_s,
        "bytes": probed.kernels.bytes_s / there.kernels.bytes_s,
        "bandwidth": (target.card.bandwidth_gb_s or math.nan) / (source.card.bandwidth_gb_s or math.nan),
        "hosts": (probed.host_micro_s or math.nan) / (there.host_micro_s or math.nan),
    }


def low_high(predicted: StepTimeEstimate) -> tuple[float, float]:
    """The range that holds 80 % of the cases."""
    return interval(predicted.micro_s, predicted.error)


def by_old_rule(row: dict[str, Any], probed: Measurement, source: DeviceSpec, target: DeviceSpec) -> StepTimeEstimate:
    """The prediction without a profile: the formula divides the device's time, and bytes go with the bandwidth."""
    config, model = TrainConfig(**row["settings"]), resolve_model(row["model"])
    truncated = replace(model, config=model.config | {"num_hidden_layers": row["depth"]})
    by_formula = estimate_step_time(truncated, Workload(lengths=lengths_of(config)).at_mean(config))
    if by_formula is not None:
        by_formula = by_formula.on(by_bandwidth(resolve_device(REFERENCE), source))
    host_share = (probed.host_micro_s or 0.0) / min(probed.micro_step_s)
    unprofiled = replace(probed, kernels=None, host_share=host_share)
    return divide_step_time(unprofiled, by_formula).on(by_bandwidth(source, target))


def by_bandwidth(source: DeviceSpec, target: DeviceSpec) -> SpeedTransfer:
    transfer = speed_transfer(source, target)
    assert transfer is not None and source.bandwidth_gb_s and target.bandwidth_gb_s
    return replace(transfer, bytes=target.bandwidth_gb_s / source.bandwidth_gb_s)


def again(machine: Measured) -> dict[str, Any]:
    """The first configuration, before, between and after the others, on the same machine."""
    first = next(iter(machine.found))
    times = [found.micro_step_s for key, (_, found) in machine.found.items() if key[:2] == first[:2]]
    took_ms = [1000 * statistics.median(each) for each in times]
    return {"machine": machine.card.name, "took_ms": took_ms, "drift": max(took_ms) / min(took_ms) - 1}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the models that nothing was fitted on, and what was fitted on the other.

    A pair is host-bound where the host sets the pace on either card: its part is at least `HOST_SHARE` of the time, by
    how long the card was busy. `device_alone` are those where it has less than a tenth of the pace on both.
    """
    pairs = [row for row in rows if "target" in row]
    unseen, fitted = ([row for row in pairs if (row["model"] == FITTED) is of_it] for of_it in (False, True))
    by_device, by_host = ([row for row in unseen if row["host_bound"] is bound] for bound in (False, True))
    alone = [row for row in unseen if max(row["host_shares"]) < HOST_BOUND]
    of_fitted = [row for row in fitted if not row["host_bound"]]

    def errors(chosen: list[dict[str, Any]], key: str = "error") -> list[float]:
        return [abs(row[key]) for row in chosen]

    return {
        "configs": len({(row["model"], row["config"]) for row in pairs}),
        "pairs": len(unseen),
        "device_bound": len(by_device),
        "error_median": statistics.median(errors(by_device)),
        "error_max": max(errors(by_device)),
        "error_above_10_percent": sum(error > 0.1 for error in errors(by_device)),
        "old_error_median": statistics.median(errors(by_device, "old_error")),
        "old_error_max": max(errors(by_device, "old_error")),
        "device_alone": len(alone),
        "device_alone_error_median": statistics.median(errors(alone)),
        "device_alone_error_max": max(errors(alone)),
        "old_device_alone_error_median": statistics.median(errors(alone, "old_error")),
        "old_device_alone_error_max": max(errors(alone, "old_error")),
        "inside_80": statistics.fmean(row["inside"] for row in unseen),
        "calibrated_inside_80": statistics.fmean(row["calibrated_inside"] for row in unseen),
        "host_bound": len(by_host),
        "host_bound_error_median": statistics.median(errors(by_host)),
        "host_bound_error_max": max(errors(by_host)),
        "calibrated_error_median": statistics.median(errors(by_host, "calibrated_error")),
        "calibrated_error_max": max(errors(by_host, "calibrated_error")),
        "old_host_bound_error_median": statistics.median(errors(by_host, "old_error")),
        "old_host_bound_error_max": max(errors(by_host, "old_error")),
        "host_drift_max": max(row["drift"] for row in rows if "drift" in row),
        "hosts_differ_max": max(max(row["hosts"], 1 / row["hosts"]) for row in pairs),
        "fitted_pairs": len(fitted),
        "fitted_error_median": statistics.median(errors(of_fitted)),
        "fitted_exponent": statistics.median(math.log(row["bytes"]) / math.log(row["bandwidth"]) for row in of_fitted),
    }


if __name__ == "__main__":
    main()
