"""Measure how well speeds transfer from one GPU to another: published pairs, and profiles of the
same probes.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench import DATA, Mode, Rows, finish, run_program, table, worker
from plan import HOST_BOUND

from autotune.catalog import DeviceSpec, resolve_device, resolve_model
from autotune.core.files import load_yaml
from autotune.core.probe_types import HOST_SHARE, Measurement, Outcome, ProbeRequest, Rung
from autotune.core.serialization import from_data, to_data
from autotune.core.text import kebab_case
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import StepTimeEstimate, divide_step_time, estimate_step_time
from autotune.prediction.transfer import (
    OF_MEMORY,
    REFERENCE,
    USUAL_SHARE,
    host_transfer,
    interval,
    peak_tflops,
    same_chip,
    speed_transfer,
)
from autotune.probe.calibrate import calibrate_worker
from autotune.probe.supervisor import WorkerProber
from autotune.problem.calibration import Calibration
from autotune.problem.length_distribution import Lengths
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.target import find_target
from autotune.problem.workload import Workload

# --- pairs

EXPONENTS = [round(0.1 * step, 1) for step in range(11)]
SHARES = EXPONENTS[1:-1]
PAIRS = Path(__file__).with_name("data") / "published_pairs.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One workload of a set on two cards; `ratio` is the speed
    on `target` over that on `source`.
    """

    set: str
    workload: str
    precision: str
    source: str
    target: str
    ratio: float


def run_pairs(args: argparse.Namespace) -> None:
    """Measure how well a speed on one GPU predicts the speed on another, with published pairs of
    measurements.

    Uncalibrated projections use data sheets only. The published tables do not give the share of the
    time in matrix products. The fit assumes one share on the reference GPU for all of them, and
    finds it together with the exponents of peak and power, by least absolute deviations. In the fit
    each pair of GPUs of a set counts once. The benchmark repeats the fit without each set and
    reports the error on that set. Calibrated projections also use one other row of the same set,
    and so of the same method, on the same two GPUs. No GPU is needed.
    """
    pairs = read_pairs()
    predicted = grid(pairs)
    fits = {
        name: fit([pair.set != name for pair in pairs], pairs, predicted)
        for name in {pair.set for pair in pairs}
    }
    rows = [
        compare_pair(pair, pairs, math.exp(predicted[fits[pair.set]][index]))
        for index, pair in enumerate(pairs)
    ]
    table(
        [
            {
                "set": name,
                "pairs": len(members),
                "error": statistics.fmean(abs(row["error"]) for row in members),
                "bias": statistics.fmean(row["error"] for row in members),
                "inside": statistics.fmean(row["inside"] for row in members),
                "calibrated": statistics.fmean(
                    [error for row in members for error in row["calibrated_errors"]] or [math.nan]
                ),
            }
            for name, members in by_set(rows).items()
        ],
        ["set", "pairs", "error", "bias", "inside", "calibrated"],
    )
    *exponents, share = fit([True] * len(pairs), pairs, predicted)
    finish(args, None, rows, exponents_of_all_sets=exponents, share_of_all_sets=share)


def by_set(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [row for row in rows if row["set"] == name]
        for name in dict.fromkeys(row["set"] for row in rows)
    }


def summarize_pairs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize all pairs. Large sets count most; in a mean over sets (`_of_sets`) each set counts
    once.

    The next user's method is a set of its own, unlike the pairs of a set: `_of_unseen_sets` also
    takes the exponents from the other sets.
    """
    errors = [abs(row["error"]) for row in rows]
    calibrated = [error for row in rows for error in row["calibrated_errors"]]
    inside = [inside for row in rows for inside in row["calibrated_inside"]]

    def of_sets(name: str) -> float:
        """The mean over sets of a column, whose cells are numbers or lists of numbers."""
        cells = [[row[name] for row in members] for members in by_set(rows).values()]
        flat = [
            [value for cell in of_set for value in (cell if isinstance(cell, list) else [cell])]
            for of_set in cells
        ]
        return statistics.fmean(statistics.fmean(map(abs, values)) for values in flat if values)

    return {
        "pairs": len(rows),
        "sets": len(by_set(rows)),
        "error_mean_uncalibrated": statistics.fmean(errors),
        "error_mean_of_sets_uncalibrated": of_sets("error"),
        "error_mean_of_unseen_sets": statistics.fmean(abs(row["unseen_error"]) for row in rows),
        "error_mean_of_sets_of_unseen_sets": of_sets("unseen_error"),
        "error_median_uncalibrated": statistics.median(errors),
        "error_max_uncalibrated": max(errors),
        "error_mean_calibrated": statistics.fmean(calibrated),
        "error_mean_of_sets_calibrated": of_sets("calibrated_errors"),
        "calibrations": len(calibrated),
        "coverage_80": statistics.fmean(row["inside"] for row in rows),
        "coverage_80_of_sets": of_sets("inside"),
        "coverage_80_of_unseen_sets": of_sets("unseen_inside"),
        "coverage_80_calibrated": statistics.fmean(inside),
        "coverage_80_of_sets_calibrated": of_sets("calibrated_inside"),
        "half_width_median": statistics.median(row["half_width"] for row in rows),
        "half_width_median_calibrated": statistics.median(
            row["half_width_calibrated"] for row in rows
        ),
        "error_mean_by_geometric_mean": statistics.fmean(
            abs(row["geometric_mean_error"]) for row in rows
        ),
        "error_mean_by_flops": statistics.fmean(abs(row["flops_error"]) for row in rows),
    }


def read_pairs() -> list[Pair]:
    """Read every pair of cards of every workload.

    The card with the better data sheet is the target.
    """
    pairs = []
    for published in load_yaml(PAIRS.read_text(encoding="utf-8"))["sets"]:
        workloads: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in published["rows"]:
            workloads[row["workload"]].append(row)
        for workload, rows in workloads.items():
            for first, second in itertools.combinations(rows, 2):
                precision = published["precision"] if published["precision"] == "fp8" else "bf16"
                expected = speed_transfer(
                    resolve_device(first["device"]),
                    resolve_device(second["device"]),
                    precision=precision,
                )
                if expected is None:
                    continue
                if expected.ratio(0.5) < 1:
                    first, second = second, first
                pairs.append(
                    Pair(
                        set=published["name"],
                        workload=workload,
                        precision=precision,
                        source=first["device"],
                        target=second["device"],
                        ratio=second["throughput"] / first["throughput"],
                    )
                )
    return pairs


def grid(pairs: list[Pair]) -> dict[tuple[float, ...], Any]:
    """The logarithms of the ratios by exponents of peak and power, and the share of products on the
    reference card.
    """
    at = [np.array([rates(pair, name) for pair in pairs]).T for name in ("source", "target")]
    alike = [same_chip(resolve_device(pair.source), resolve_device(pair.target)) for pair in pairs]
    at[1][2] = at[0][2] * (at[1][2] / at[0][2]) ** np.where(alike, OF_MEMORY, 1.0)
    found = {}
    for of_peak, of_power, share in itertools.product(EXPONENTS, EXPONENTS, SHARES):
        slow, fast = (
            share / (peak**of_peak * power**of_power) + (1 - share) / moved
            for peak, power, moved in at
        )
        found[of_peak, of_power, share] = np.log(slow / fast)
    return found


def rates(pair: Pair, name: str) -> tuple[float, float, float]:
    """Return peak, power and bandwidth of a GPU, relative to the reference GPU."""
    card, reference = (
        [
            peak_tflops(device, pair.precision) or math.nan,
            device.tdp_w or math.nan,
            device.bandwidth_gb_s or math.nan,
        ]
        for device in (resolve_device(getattr(pair, name)), resolve_device(REFERENCE))
    )
    peak, power, bandwidth = (one / other for one, other in zip(card, reference, strict=True))
    return peak, power, bandwidth


def fit(
    chosen: list[bool], pairs: list[Pair], predicted: dict[tuple[float, ...], Any]
) -> tuple[float, ...]:
    """The exponents and the share with the least absolute deviations from the chosen pairs."""
    counts = Counter((pair.set, pair.source, pair.target) for pair in pairs)
    weights = [
        one / counts[pair.set, pair.source, pair.target]
        for one, pair in zip(chosen, pairs, strict=True)
    ]
    ratios = np.log([pair.ratio for pair in pairs])
    return min(
        predicted, key=lambda one: float(np.array(weights) @ np.abs(predicted[one] - ratios))
    )


def projected(transfer: SpeedTransfer, source: DeviceSpec, precision: str) -> float:
    """The ratio of speeds for work that spends the usual share of its time on the reference card in
    products.
    """
    on_source = speed_transfer(resolve_device(REFERENCE), source, precision=precision)
    assert on_source is not None
    products, rest = USUAL_SHARE / on_source.products, (1 - USUAL_SHARE) / on_source.bytes
    return transfer.ratio(products / (products + rest))


def compare_pair(pair: Pair, pairs: list[Pair], unseen: float) -> dict[str, Any]:
    """Compare projections with a published ratio: from data sheets, and calibrated by each similar
    row.

    `unseen` is the ratio by a fit without the set of this pair.
    """
    source, target = resolve_device(pair.source), resolve_device(pair.target)
    alike = [
        other
        for other in pairs
        if other != pair
        and (other.set, other.source, other.target) == (pair.set, pair.source, pair.target)
    ]
    uncalibrated = speed_transfer(source, target, precision=pair.precision)
    assert uncalibrated is not None
    ratio = projected(uncalibrated, source, pair.precision)
    transfers = [
        speed_transfer(source, target, [other.ratio / ratio], precision=pair.precision)
        for other in alike
    ]
    calibrated = [
        (projected(transfer, source, pair.precision), transfer.error)
        for transfer in transfers
        if transfer is not None
    ]
    flops = (target.fp16_tflops or math.nan) / (source.fp16_tflops or math.nan)
    bandwidth = (target.bandwidth_gb_s or math.nan) / (source.bandwidth_gb_s or math.nan)
    low, high = interval(ratio, uncalibrated.error)
    narrow = interval(1.0, calibrated[0][1] if calibrated else uncalibrated.error)
    low_unseen, high_unseen = interval(unseen, uncalibrated.error)
    return {
        "set": pair.set,
        "workload": pair.workload,
        "source": pair.source,
        "target": pair.target,
        "ratio": pair.ratio,
        "projected": ratio,
        "error": ratio / pair.ratio - 1,
        "inside": low <= pair.ratio <= high,
        "unseen_error": unseen / pair.ratio - 1,
        "unseen_inside": low_unseen <= pair.ratio <= high_unseen,
        "half_width": (high - low) / 2 / ratio,
        "calibrated_errors": [abs(value / pair.ratio - 1) for value, _ in calibrated],
        "calibrated_inside": [
            low <= pair.ratio <= high for low, high in itertools.starmap(interval, calibrated)
        ],
        "half_width_calibrated": (narrow[1] - narrow[0]) / 2,
        "geometric_mean_error": math.sqrt(flops * bandwidth) / pair.ratio - 1,
        "flops_error": flops / pair.ratio - 1,
    }


# --- profiles

STORED = [DATA / "transfer_h100.jsonl", DATA / "transfer_h200.jsonl"]
# Each model with the layers that are probed: enough that they, not the head, take most of the time.
MODELS = {"llama-3.2-1b": 8, "qwen2.5-1.5b": 8, "mistral-7b": 4}
FITTED = "llama-3.2-1b"  # the exponent of the memory and the error of profiled probes are its own
MEMORY_GIB = 70.0  # of any card
TIMED_S = 0.5
# of rows that are packed, or padded to the longest of a micro batch
LENGTHS = Lengths.from_summary(mean=400, p99=1600)
PURE = {"precision": "bf16_pure"}
FULL = {"method": "full", "lora_rank": None} | PURE
NF4 = {"quantization": "nf4"}
PLAIN, AGAIN = {"checkpointing": "none"}, {"checkpointing": "full"}
COMPILED = {"compile": "per_layer"} | PURE
LARGE = {"micro_batch_size": 8, "seq_len": 2048, "loss": "chunked"} | AGAIN


def shape(rows: int, seq_len: int) -> dict[str, int]:
    return {"micro_batch_size": rows, "seq_len": seq_len}


# Those that share a base model stand together. Each compiled shape takes seconds, so that these
# come last.
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
    return (
        LENGTHS
        if config.packing or config.padding == "longest"
        else Lengths.constant(config.seq_len)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration of a model, probed with `depth` layers.

    `again` names a repetition, in words.
    """

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

    The two show whether profiles disturb later timings.
    """
    first = next(iter(models.items()))

    def case(model: str, depth: int, settings: dict[str, Any], again: str | None = None) -> Case:
        settings = (
            {"padding": "max_length"} | settings | ({"precision": precision} if precision else {})
        )
        return Case(model=model, depth=depth, config=TrainConfig(**settings), again=again)

    yield case(*first, SETTINGS[0], "before any profile")
    for chosen in (SETTINGS, COMPILED_SETTINGS):
        for model, depth in models.items():
            for settings in chosen:
                yield case(model, depth, settings)
    yield case(*first, SETTINGS[0], "after all profiles")


def run_measure(args: argparse.Namespace) -> None:
    """Probe truncated models on the GPU of this machine, with profiles.

    The rows continue the file of an earlier call. A short table shows all rows.
    """
    until = time.monotonic() + args.seconds
    target = find_target(args.gpu)
    on_cpu = target.card is None
    stored = Rows(f"transfer-{kebab_case(target.device.name)}", args.out, args.rows)
    models = {name: MODELS.get(name, 2) for name in args.models}
    missing = [
        case for case in cases(models, "fp32" if on_cpu else None) if not stored.has(**case.key)
    ]
    with worker("cpu" if on_cpu else "cuda") as prober:
        if not any("calibration" in row for row in stored.all):
            calibration = calibrate_worker(prober, target, say=print)
            stored.add(
                {"calibration": to_data(calibration), "fingerprint": to_data(prober.fingerprint)}
            )
        for case in missing:
            if time.monotonic() < until:
                row = probe(prober, case, args.memory_gib)
                stored.add(row)
                print(f"{row['seconds']:5.1f} s  {case.model} {case.config.label()}", flush=True)
    rows = [summarized(row) for row in stored.all if "config" in row]
    table(
        rows,
        [
            "model",
            "config",
            "seconds",
            "micro",
            "host",
            "busy",
            "products",
            "attention",
            "bytes",
            "failed",
        ],
    )
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
    return row | {
        "measurement": to_data(result.measurement),
        "kernels": kernels,
        "notes": result.notes,
    }


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
    """What `measure` found on a card: its calibration; rows and measurements by model,
    configuration and repetition.
    """

    calibration: Calibration
    found: dict[tuple[str, str, str | None], tuple[dict[str, Any], Measurement]]

    @property
    def card(self) -> DeviceSpec:
        return resolve_device(self.calibration.device)


def read_card(path: Path) -> Measured:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    (calibration,) = (row["calibration"] for row in rows if "calibration" in row)
    found = {
        (row["model"], row["config"], row["again"]): (
            row,
            from_data(Measurement, row["measurement"]),
        )
        for row in rows
        if "measurement" in row
    }
    return Measured(calibration=from_data(Calibration, calibration), found=found)


def run_compare(args: argparse.Namespace) -> None:
    """Predict the speed on each of two GPUs from probes on the other, for the same configurations.

    `measure` made the rows: it calibrates the GPU and its host, and probes a few layers of three
    models. The pairs are divided by CPU-bound and GPU-bound configurations. The constants were
    fitted on one of the models, and the summary covers the other two. No GPU is needed.
    """
    one, other = map(read_card, args.files)
    rows = [
        predict(key, source, target)
        for source, target in ((one, other), (other, one))
        for key in profiled_on_both(one, other)
    ]
    columns = [
        "source",
        "target",
        "model",
        "config",
        "error",
        "old_error",
        "calibrated_error",
        "inside",
        "host_bound",
    ]
    table(rows, columns)
    finish(args, None, rows + [again(machine) for machine in (one, other)])


def profiled_on_both(one: Measured, other: Measured) -> list[tuple[str, str, str | None]]:
    """List the keys that were profiled on both."""
    profiled = [
        {key for key, (_, found) in cards.found.items() if found.kernels} for cards in (one, other)
    ]
    return [key for key in one.found if all(key in keys for keys in profiled)]


def predict(key: tuple[str, str, str | None], source: Measured, target: Measured) -> dict[str, Any]:
    """One configuration on the target, predicted from its probe on the source: an error is
    predicted / measured - 1.
    """
    (row, probed), (_, there) = source.found[key], target.found[key]
    took_s = statistics.median(there.micro_step_s)
    here, own = divide_step_time(probed, None), divide_step_time(there, None)
    transfer, calibrated = (
        speed_transfer(source.card, target.card, calibration=calibration)
        for calibration in (None, target.calibration)
    )
    assert transfer is not None and calibrated is not None and probed.kernels and there.kernels
    host = host_transfer(source.calibration, target.calibration)
    predicted, known = here.convert(transfer), here.convert(replace(calibrated, host=host))
    inside, inside_known = (
        low_high(one)[0] <= took_s <= low_high(one)[1] for one in (predicted, known)
    )
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
        "bandwidth": (target.card.bandwidth_gb_s or math.nan)
        / (source.card.bandwidth_gb_s or math.nan),
        "hosts": (probed.host_micro_s or math.nan) / (there.host_micro_s or math.nan),
    }


def low_high(predicted: StepTimeEstimate) -> tuple[float, float]:
    """The range that holds 80 % of the cases."""
    return interval(predicted.micro_s, predicted.error)


def by_old_rule(
    row: dict[str, Any], probed: Measurement, source: DeviceSpec, target: DeviceSpec
) -> StepTimeEstimate:
    """The prediction without a profile: the formula divides the device's time, and bytes go with
    the bandwidth.
    """
    config, model = TrainConfig(**row["settings"]), resolve_model(row["model"])
    truncated = replace(model, config=model.config | {"num_hidden_layers": row["depth"]})
    by_formula = estimate_step_time(
        truncated, Workload(lengths=lengths_of(config)).mean_row_config(config)
    )
    if by_formula is not None:
        by_formula = by_formula.convert(by_bandwidth(resolve_device(REFERENCE), source))
    host_share = (probed.host_micro_s or 0.0) / min(probed.micro_step_s)
    unprofiled = replace(probed, kernels=None, host_share=host_share)
    return divide_step_time(unprofiled, by_formula).convert(by_bandwidth(source, target))


def by_bandwidth(source: DeviceSpec, target: DeviceSpec) -> SpeedTransfer:
    transfer = speed_transfer(source, target)
    assert transfer is not None and source.bandwidth_gb_s and target.bandwidth_gb_s
    return replace(transfer, bytes=target.bandwidth_gb_s / source.bandwidth_gb_s)


def again(machine: Measured) -> dict[str, Any]:
    """The first configuration, before, between and after the others, on the same machine."""
    first = next(iter(machine.found))
    times = [
        found.micro_step_s for key, (_, found) in machine.found.items() if key[:2] == first[:2]
    ]
    took_ms = [1000 * statistics.median(each) for each in times]
    return {
        "machine": machine.card.name,
        "took_ms": took_ms,
        "drift": max(took_ms) / min(took_ms) - 1,
    }


def summarize_profiles(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the errors of the models that no constant was fitted on, and the fit on the other
    model.

    A pair is host-bound if it is CPU-bound on either GPU: the host's part is at least `HOST_SHARE`
    of the time, judged by the busy time of the GPU. The pairs of `device_alone` have a host's part
    below a tenth on both.
    """
    pairs = [row for row in rows if "target" in row]
    unseen, fitted = (
        [row for row in pairs if (row["model"] == FITTED) is of_it] for of_it in (False, True)
    )
    by_device, by_host = (
        [row for row in unseen if row["host_bound"] is bound] for bound in (False, True)
    )
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
        "fitted_exponent": statistics.median(
            math.log(row["bytes"]) / math.log(row["bandwidth"]) for row in of_fitted
        ),
    }


MODES = {
    "measure": Mode(
        run=run_measure,
        options={
            "--gpu": "auto",
            "--models": list(MODELS),
            "--memory-gib": MEMORY_GIB,
            "--rows": None,
            "--seconds": 270.0,
            "--out": {"type": Path, "help": "folder of the .jsonl file"},
        },
    ),
    "compare": Mode(
        run=run_compare,
        result="transfer",
        summarize=summarize_profiles,
        options={
            "files": {
                "type": Path,
                "nargs": "*",
                "default": STORED,
                "help": "the .jsonl files of two GPUs",
            }
        },
    ),
    "pairs": Mode(run=run_pairs, result="projection", summarize=summarize_pairs),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
