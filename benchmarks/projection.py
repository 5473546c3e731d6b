"""Measure how well a speed on one card predicts the speed on another, with published pairs of measurements.

Uncalibrated projections use data sheets only. The exponents of `speed_transfer` are rounded from fits of least absolute
deviations, in which each pair of cards of a set counts once. The benchmark repeats the fit with each set left out and
reports the error on that set. Calibrated projections also use one other row of the same set, and so of the same method,
on the same two cards. The benchmark needs no GPU.
"""

import argparse
import itertools
import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import save, table

from autotune.catalog import resolve_device
from autotune.core.files import load_yaml
from autotune.prediction.transfer import speed_transfer

PAIRS = Path(__file__).with_name("data") / "published_pairs.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One workload of a set on two cards; `ratio` is the speed on `target` over that on `source`."""

    set: str
    workload: str
    precision: str
    source: str
    target: str
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pairs = read()
    rows = [compare(pair, pairs) for pair in pairs]
    errors = [abs(row["error"]) for row in rows]
    calibrated = [error for row in rows for error in row["calibrated_errors"]]
    widths = [row["half_width"] for row in rows]
    by_set = {name: [row for row in rows if row["set"] == name] for name in dict.fromkeys(row["set"] for row in rows)}
    summary = {
        "pairs": len(rows),
        "sets": len(by_set),
        "error_mean_uncalibrated": statistics.fmean(errors),
        "error_mean_of_sets_uncalibrated": statistics.fmean(
            statistics.fmean(abs(row["error"]) for row in members) for members in by_set.values()
        ),
        "error_mean_of_unseen_sets": statistics.fmean(
            error for name in by_set for error in errors_of_unseen_set(name, pairs)
        ),
        "exponents_of_all_sets": [round(float(exponent), 3) for exponent in fit_exponents(pairs)],
        "error_median_uncalibrated": statistics.median(errors),
        "error_max_uncalibrated": max(errors),
        "error_mean_calibrated": statistics.fmean(calibrated),
        "calibrations": len(calibrated),
        "coverage_80": statistics.fmean(row["inside"] for row in rows),
        "coverage_80_calibrated": statistics.fmean(inside for row in rows for inside in row["calibrated_inside"]),
        "half_width_median": statistics.median(widths),
        "half_width_median_calibrated": statistics.median(row["half_width_calibrated"] for row in rows),
        "error_mean_by_geometric_mean": statistics.fmean(abs(row["geometric_mean_error"]) for row in rows),
        "error_mean_by_flops": statistics.fmean(abs(row["flops_error"]) for row in rows),
    }
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
            for name, members in by_set.items()
        ],
        ["set", "pairs", "error", "bias", "inside", "calibrated"],
    )
    save("projection", None, summary, rows, args.out)
    print(summary)


def read() -> list[Pair]:
    """Read every pair of cards of every workload. The card with the better data sheet is the target."""
    pairs = []
    for published in load_yaml(PAIRS.read_text(encoding="utf-8"))["sets"]:
        workloads: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in published["rows"]:
            workloads[row["workload"]].append(row)
        for workload, rows in workloads.items():
            for first, second in itertools.combinations(rows, 2):
                precision = published["precision"] if published["precision"] == "fp8" else "bf16"
                expected = speed_transfer(
                    resolve_device(first["device"]), resolve_device(second["device"]), precision=precision
                )
                if expected is None:
                    continue
                if expected.ratio < 1:
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


def logs(pair: Pair) -> tuple[float, float]:
    """Logarithms of the ratios of peak throughput and of memory bandwidth, target over source."""
    source, target = resolve_device(pair.source), resolve_device(pair.target)
    name = "fp8_tflops" if pair.precision == "fp8" else "fp16_tflops"
    peaks = getattr(target, name) / getattr(source, name)
    return math.log(peaks), math.log((target.bandwidth_gb_s or math.nan) / (source.bandwidth_gb_s or math.nan))


def fit_exponents(pairs: list[Pair]) -> Any:
    """Fit the two exponents by iteratively reweighted least squares."""
    counts = Counter((pair.set, pair.source, pair.target) for pair in pairs)
    weights = np.array([1 / counts[pair.set, pair.source, pair.target] for pair in pairs])
    inputs = np.array([logs(pair) for pair in pairs])
    targets = np.array([math.log(pair.ratio) for pair in pairs])
    scale = weights
    for _ in range(50):
        fit, *_ = np.linalg.lstsq(inputs * np.sqrt(scale)[:, None], targets * np.sqrt(scale), rcond=None)
        scale = weights / (np.abs(inputs @ fit - targets) + 1e-3)
    return fit


def errors_of_unseen_set(name: str, pairs: list[Pair]) -> list[float]:
    """Relative errors on one set of exponents that were fitted without it."""
    fit = fit_exponents([pair for pair in pairs if pair.set != name])
    return [abs(math.exp(float(fit @ np.array(logs(pair)))) / pair.ratio - 1) for pair in pairs if pair.set == name]


def compare(pair: Pair, pairs: list[Pair]) -> dict[str, Any]:
    """Compare projections with a published ratio: from data sheets, and calibrated by each similar row."""
    source, target = resolve_device(pair.source), resolve_device(pair.target)
    alike = [
        other
        for other in pairs
        if other != pair and (other.set, other.source, other.target) == (pair.set, pair.source, pair.target)
    ]
    uncalibrated = speed_transfer(source, target, precision=pair.precision)
    assert uncalibrated is not None
    transfers = [speed_transfer(source, target, [other.ratio], precision=pair.precision) for other in alike]
    calibrated = [transfer for transfer in transfers if transfer is not None]
    example = calibrated[0] if calibrated else uncalibrated
    flops = (target.fp16_tflops or math.nan) / (source.fp16_tflops or math.nan)
    bandwidth = (target.bandwidth_gb_s or math.nan) / (source.bandwidth_gb_s or math.nan)
    low, high = uncalibrated.interval
    narrow = example.interval
    return {
        "set": pair.set,
        "workload": pair.workload,
        "source": pair.source,
        "target": pair.target,
        "ratio": pair.ratio,
        "projected": uncalibrated.ratio,
        "error": uncalibrated.ratio / pair.ratio - 1,
        "inside": low <= pair.ratio <= high,
        "half_width": (high - low) / 2 / uncalibrated.ratio,
        "calibrated_errors": [abs(transfer.ratio / pair.ratio - 1) for transfer in calibrated],
        "calibrated_inside": [transfer.interval[0] <= pair.ratio <= transfer.interval[1] for transfer in calibrated],
        "half_width_calibrated": (narrow[1] - narrow[0]) / 2 / example.ratio,
        "geometric_mean_error": math.sqrt(flops * bandwidth) / pair.ratio - 1,
        "flops_error": flops / pair.ratio - 1,
    }


if __name__ == "__main__":
    main()
